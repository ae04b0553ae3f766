"""Tables of kernels, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from natgrad import launches
from natgrad.errors import NatgradWarning
from natgrad.launches import Launch, able, addresses
from natgrad.statistics.moving import numbers

CPU = torch.device("cpu")


def test_each_program_finds_its_piece() -> None:
    given: list[torch.Tensor] = []

    class Kernel:
        arg_names = ("pointers", "table", "owners", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert grid == (6, 1, 1)
            return lambda *arguments, **options: given.extend(arguments)

    with torch.device("meta"):  # a user's default device
        pointers = addresses([1, 2**40], CPU)
        Launch(Kernel(), [(7, 8), (9, 10)], [2, 4], CPU, BLOCK=16)(pointers)
        assert numbers([0.5], CPU).tolist() == [0.5]
    assert given[0].tolist() == [1, 2**40]
    assert given[1].tolist() == [[0, 7, 8], [2, 9, 10]]
    assert given[2].tolist() == [0, 0, 1, 1, 1, 1]


class Compiled:
    """A kernel that was compiled, with what Triton's own has; one that launches with other arguments refuses these."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.launched, self.tried = refuses, [], 0

    def run(self, *given: Any) -> None:
        self.tried += 1
        if self.refuses:
            raise TypeError("function takes exactly 20 arguments")
        self.launched.append(given)


class Kernel:
    arg_names = ("pointers", "table", "owners", "marks", "decay", "BLOCK")

    def __init__(self, compiled: object) -> None:
        self.compiled, self.calls = compiled, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> object:
            self.calls += 1
            return self.compiled

        return launch


def launched(compiled: object) -> tuple[Kernel, tuple[Any, ...]]:
    """Three times; what has been compiled should have been given after the first."""
    kernel, pointers, marks = Kernel(compiled), addresses([1], CPU), torch.zeros(1)
    launch = Launch(kernel, [(7,)], [3], CPU, BLOCK=16, num_warps=8)
    for decay in (0.5, 0.25, 0.25):
        launch(pointers, marks, decay)
    places = [tensor.data_ptr() for tensor in (pointers, *launch._tables, marks)]
    return kernel, (3, 1, 1, 0, "function", "metadata", None, None, None, *places, 0.25, 16)


def test_what_is_compiled_is_launched_by_addresses() -> None:
    compiled = Compiled()
    kernel, expected = launched(compiled)
    assert kernel.calls == 1
    assert compiled.launched == [expected, expected]


@pytest.mark.parametrize("refuses", [True, None])
def test_a_triton_that_is_another_launches_in_its_own_way(refuses: bool | None) -> None:
    compiled = None if refuses is None else Compiled(refuses=refuses)
    kernel, _ = launched(compiled)
    assert kernel.calls == 3
    assert compiled is None or compiled.tried == 1


@pytest.fixture
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "natgrad.pieces", SimpleNamespace(trial_kernel=None))
    monkeypatch.setattr("natgrad.pieces", SimpleNamespace(trial_kernel=None), raising=False)
    able.cache_clear()
    yield torch.device("cuda", 0)
    able.cache_clear()


def test_kernels_that_do_not_compile_are_done_without(new_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernel: Any, device: torch.device) -> bool:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launches, "_tried", fails)
    with pytest.warns(NatgradWarning, match="do not run on cuda:0 .*C compiler"):
        assert not able(new_gpu)
    assert not able(new_gpu)  # and warns no more


def test_kernels_that_do_something_else_are_done_without(
    new_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_tried", lambda kernel, device: False)
    with pytest.warns(NatgradWarning, match="wrong numbers"):
        assert not able(new_gpu)


def test_kernels_that_work_are_used(new_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_tried", lambda kernel, device: True)
    assert able(new_gpu)
    assert not able(CPU)
    able.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not able(new_gpu)

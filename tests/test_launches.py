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

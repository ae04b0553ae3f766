"""Running sums that move together: by the same rule on a CPU and by kernels, which are stood in for here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.statistics import moving
from natgrad.statistics.moving import Sums

DECAY = 0.5
SHAPES = [(1, 4, 4), (1, 3), (2, 5, 5)]
WRONG = {1: torch.inf, 2: torch.nan}  # what is not finite, by number


def tensors(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def expected(sums: Sequence[Tensor], moments: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor]:
    triples = zip(sums, moments, flags, strict=True)
    return [DECAY * old + new if flag else old.clone() for old, new, flag in triples]


class Interpreter:
    """Does what kernels would, and counts launches. It knows tensors by their addresses."""

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}
        self.launches = 0

    def __call__(self, name: str, rows: Sequence[Sequence[int]], *_: Any, **options: Any) -> Callable[..., None]:
        def tensor(pointers: Tensor, slot: int, count: int) -> Tensor:
            found = self.known[int(pointers[slot])].view(-1)
            assert found.numel() == count
            assert count % options["ALIGNED"] == 0
            return found

        def finite_kernel(pointers: Tensor, bad: Tensor) -> None:
            for slot, count, number in rows:
                bad[number] |= not bool(tensor(pointers, slot, count).isfinite().all())

        def move_kernel(pointers: Tensor, flags: Tensor, decay: float) -> None:
            for slot, other, count, number in rows:
                if flags[number]:
                    total = tensor(pointers, slot, count)
                    total.copy_(decay * total + tensor(pointers, other, count))

        def launch(pointers: Tensor, *arguments: Any) -> None:
            self.launches += 1
            {"finite_kernel": finite_kernel, "move_kernel": move_kernel}[name](pointers, *arguments)

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    interpreter = Interpreter()
    monkeypatch.setattr(moving, "able", lambda device: True)
    monkeypatch.setattr(moving, "kernel", lambda package, name: name)
    monkeypatch.setattr(moving, "Launch", interpreter)
    moving._launches.cache_clear()
    yield interpreter
    moving._launches.cache_clear()


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2)])
@pytest.mark.parametrize("usable", [None, True, False])
def test_what_is_not_finite_does_not_move(wrong: Sequence[int], usable: bool | None) -> None:
    sums, moments = tensors(0), tensors(1)
    for number in wrong:
        moments[number].view(-1)[0] = WRONG[number]
    flags = [number not in wrong and usable is not False for number in range(len(SHAPES))]
    wanted = expected(sums, moments, flags)
    found = Sums(sums).move(moments, None if usable is None else torch.tensor(usable), DECAY)
    assert found.tolist() == flags
    torch.testing.assert_close(sums, wanted)


@pytest.mark.parametrize("wrong", [(), (2,)])
@pytest.mark.parametrize("usable", [None, False])
def test_kernels_find_all_tensors(kernels: Interpreter, wrong: Sequence[int], usable: bool | None) -> None:
    sums = tensors(0)
    together = Sums(sums)
    for seed in (1, 2):  # what is known of the sums holds for other moments
        moments = tensors(seed)
        for number in wrong:
            moments[number].view(-1)[-1] = WRONG[number]
        kernels.known = {tensor.data_ptr(): tensor for tensor in (*sums, *moments)}
        flags = [number not in wrong and usable is not False for number in range(len(SHAPES))]
        wanted = expected(sums, moments, flags)
        before = kernels.launches
        found = together.move(moments, None if usable is None else torch.tensor(usable), DECAY)
        assert kernels.launches == before + 4  # two kernels, each for counts that are multiples of four, and others
        assert found.tolist() == flags
        torch.testing.assert_close(sums, wanted)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda moment: moment.double(),
        lambda moment: moment.mT.contiguous().mT,
        lambda moment: torch.cat([moment.new_zeros(1), moment.view(-1)])[1:].view(moment.shape),  # not aligned
    ],
)
def test_moments_that_kernels_cannot_read_move_without_them(
    kernels: Interpreter, spoil: Callable[[Tensor], Tensor]
) -> None:
    sums, moments = tensors(0), tensors(1)
    wanted = expected(sums, moments, [True] * len(SHAPES))
    moments[0] = spoil(moments[0])
    assert Sums(sums).move(moments, None, DECAY).all()
    assert kernels.launches == 0
    torch.testing.assert_close(sums, wanted)

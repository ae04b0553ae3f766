"""Decompositions in few operations are those of the ordinary way, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.overlap import piles
from natgrad.overlap.piles import Piles, side_by_side
from natgrad.overlap.tasks import Solution, Task, solve_tensors

SIZES = [(1, 5), (2, 5), (1, 8), (1, 5), (3, 1), (1, 33)]  # stack, n


def factor(stack: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(stack, size, size + 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return rows @ rows.mT / size


def task_of(solver: str, factors: Sequence[Tensor]) -> Task:
    return Task(solver, tuple(range(len(factors))), tuple(factors))


def same(found: Sequence[Solution], expected: Sequence[Solution]) -> bool:
    def parts(one: Solution) -> list[Tensor]:
        return [part for part in (one.side.matrix, one.side.values) if part is not None]

    return len(found) == len(expected) and all(
        one.failed == other.failed
        and len(parts(one)) == len(parts(other))
        and all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))
        for one, other in zip(found, expected, strict=True)
    )


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("small", [0, 2**19], ids=["room made by the thread", "room made before"])
def test_the_same_bits_as_the_ordinary_way(monkeypatch, solver, dtype, small):
    monkeypatch.setattr(piles, "_SMALL", small)
    factors = [factor(*size, seed=number, dtype=dtype) for number, size in enumerate(SIZES)]
    found = Piles(task_of(solver, factors)).solve()
    assert same(found, solve_tensors(solver, factors))
    for solution, own in zip(found, factors, strict=True):
        assert solution.side.matrix is not None
        assert solution.side.matrix.shape == own.shape
        # Row by row, as they are multiplied; and in one piece, or a GPU would wait until the host has copied them.
        parts = (solution.side.matrix, solution.side.values)
        assert all(part is None or part.is_contiguous() for part in parts)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_what_fails_is_done_the_ordinary_way(solver):
    broken, singular = factor(1, 5, 1), torch.zeros(1, 5, 5)
    broken[0, 2, 2] = torch.nan
    factors = [factor(1, 5, 2), broken, factor(2, 5, 3), singular, factor(1, 9, 4)]
    found = Piles(task_of(solver, factors)).solve()
    assert same(found, solve_tensors(solver, factors))
    assert [one.failed for one in found][:2] == [[False], [True]]


def test_eigenvalues_beyond_all_numbers_are_not_taken_for_good():
    """Vectors are fine and values are not: F's largest entries are nearly the largest there are."""
    factors = [torch.full((1, 4, 4), 3e38), factor(1, 4)]
    found = Piles(task_of("eigen", factors)).solve()
    assert same(found, solve_tensors("eigen", factors))


@pytest.mark.parametrize("there_is_room", [True, False])
def test_small_ones_are_sent_together_where_there_is_room(monkeypatch, there_is_room):
    away, sent = torch.device("meta"), []
    factors = [factor(*size) for size in SIZES]
    found = Piles(Task("eigen", tuple(range(len(factors))), tuple(factors), away)).solve()
    to = Tensor.to

    def watched(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        sent.append(tensor)
        if not there_is_room:
            raise torch.OutOfMemoryError
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", watched)
    for one, own in zip(found.sent(), factors, strict=True):
        assert one.side.device == (away if there_is_room else own.device)
        assert one.side.matrix is not None
        assert one.side.matrix.shape == own.shape
    assert len(sent) == len({size for _, size in SIZES})


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_thread_has_four_operations_a_stack(solver):
    whole = torch.empty(6 * 25)
    factors = [whole[start : start + 25].view(1, 5, 5).copy_(factor(1, 5, start)[0]) for start in range(0, 150, 25)]
    ready = Piles(task_of(solver, factors))
    with Operations() as count:
        ready.solve()
    # Python's brackets keep the interpreter, and a check is part of the call that it checks.
    free = ("select.int", "slice.Tensor", "_linalg_check_errors.default")
    assert len([name for name in count.names if name not in free]) == 4, count.names


def test_what_lies_at_one_distance_is_one_stack():
    whole = torch.arange(200.0)
    for starts, stack in (([0, 9], 1), ([0, 12], 1), ([5, 30, 55], 1), ([0, 18], 2), ([5, 23, 41], 2)):
        parts = [whole[start : start + 9 * stack].view(stack, 3, 3) for start in starts]
        joined = side_by_side(parts)
        assert joined is not None, (starts, stack)
        assert torch.equal(joined, torch.cat(parts))
        assert joined.data_ptr() == parts[0].data_ptr()
    for starts, stack in (([9, 0], 1), ([0, 24], 2), ([18, 0], 2)):
        parts = [whole[start : start + 9 * stack].view(stack, 3, 3) for start in starts]
        assert side_by_side(parts) is None, (starts, stack)
    assert side_by_side([torch.eye(3)[None], torch.eye(3)[None]]) is None
    overlapping = [whole[start : start + 9].view(1, 3, 3) for start in (0, 4)]
    assert side_by_side(overlapping) is None
    turned = [whole[start : start + 9].view(1, 3, 3).mT for start in (0, 9)]
    assert side_by_side(turned) is None

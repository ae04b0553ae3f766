"""Decompositions by threads of this process, in few operations.

A thread takes the interpreter from training with every operation of its own, and gives it back later than training
would like. So training's thread prepares what it can: factors of one size that lie beside each other are one stack,
with memory for the result; and it takes the results apart. What is left for the thread is four operations a stack.
Where one of them fails, or something is not finite, the thread does it the ordinary way, `natgrad.solve`. A large
network's factors do not lie together, and are put together by the thread, whom each stack keeps busy for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor

from natgrad.overlap.tasks import Solution, Task, solve_tensors
from natgrad.solve.solver import Side

# Elements of a result that training's thread makes room for, and moves to its device in one piece. Larger ones take a
# thread so long that an operation more is nothing; and so does pinning their memory, for which a step would wait.
_SMALL = 2**19


class _Room:
    """Memory for matrices (stack, n, n), and after them for eigenvalues (stack, n), if there are any. Parts of a stack
    have theirs in one piece: a GPU would wait for others, which are copied once more on the host.
    """

    def __init__(self, whole: Tensor, stack: int, size: int) -> None:
        self.whole = whole
        self._form = stack, size
        entries = stack * size * size
        self.matrices = whole[:entries].view(stack, size, size)
        self.values = whole[entries:].view(stack, size) if whole.numel() > entries else None

    def to(self, device: torch.device) -> _Room:
        """There, or on its way there in one piece; where it is if there is no room for all of it."""
        try:
            return _Room(self.whole.to(device, non_blocking=True), *self._form)
        except torch.OutOfMemoryError:
            return self


class Pile:
    """Dense factors (stack, n, n) of one size, and what comes of them, which is `pinned` where a GPU will take it."""

    def __init__(self, solver: str, factors: Sequence[Tensor], *, pinned: bool) -> None:
        self._solver, self._factors, self._pinned = solver, factors, pinned
        self._lengths = [factor.shape[0] for factor in factors]
        self._size = factors[0].shape[-1]
        self._is_small = sum(factor.numel() for factor in factors) <= _SMALL
        self._stack = side_by_side(factors)
        self._room = self._make_room() if self._is_small else None
        self._solutions: list[Solution] | None = None

    def _make_room(self) -> _Room:
        stack, size = sum(self._lengths), self._size
        length = stack * size * (size + (self._solver == "eigen"))
        return _Room(host_memory((length,), self._factors[0].dtype, pinned=self._pinned), stack, size)

    def solve(self) -> None:
        """Decomposes; for a thread beside training."""
        stack = torch.cat(list(self._factors)) if self._stack is None else self._stack
        if self._room is None:
            self._room = self._make_room()
        try:
            short = _eigen if self._solver == "eigen" else _inverse
            good = short(stack, self._room)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # as one whole: which of them it was the ordinary way finds out
            good = False
        if not good:
            self._solutions = [self._kept(one) for one in solve_tensors(self._solver, self._factors)]

    def _kept(self, solution: Solution) -> Solution:
        """In memory like that of others."""
        own = (solution.side.matrix, solution.side.values)
        kept = [
            None if part is None else host_memory(part.shape, part.dtype, pinned=self._pinned).copy_(part)
            for part in own
        ]
        return Solution(Side(*kept), solution.failed)

    def solutions(self, device: torch.device | None) -> list[Solution]:
        """One for each factor, once it is solved; small ones on their way to a `device`."""
        if self._solutions is not None:
            return self._solutions
        assert self._room is not None, "it has been solved"
        room = self._room.to(device) if self._is_small and device is not None else self._room
        matrices = room.matrices.split(self._lengths)
        values = [None] * len(matrices) if room.values is None else room.values.split(self._lengths)
        return [
            Solution(Side(matrix, value), [False] * length)
            for matrix, value, length in zip(matrices, values, self._lengths, strict=True)
        ]


class Piles(Sequence[Solution]):
    """A task's factors by size. Once `solve` is over it is the sequence of the task's solutions, which are in the
    host's memory.
    """

    def __init__(self, task: Task, *, pinned: bool = False) -> None:
        by_size: dict[int, list[int]] = {}
        for number, factor in enumerate(task.factors):
            by_size.setdefault(factor.shape[-1], []).append(number)
        self._numbers = [number for numbers in by_size.values() for number in numbers]
        self._piles = [
            Pile(task.solver, [task.factors[number] for number in numbers], pinned=pinned)
            for numbers in by_size.values()
        ]
        self._device = task.device

    def solve(self) -> Piles:
        """Decomposes all factors; for a thread beside training."""
        for pile in self._piles:
            pile.solve()
        return self

    def sent(self) -> list[Solution]:
        """The solutions, small ones on their way to the task's device: for who takes them over now, on this stream."""
        return self._apart(self._device)

    def _apart(self, device: torch.device | None) -> list[Solution]:
        found = [one for pile in self._piles for one in pile.solutions(device)]
        by_number = dict(zip(self._numbers, found, strict=True))
        return [by_number[number] for number in range(len(found))]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Solution]:
        return iter(self._apart(None))

    @overload
    def __getitem__(self, index: int) -> Solution: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Solution]: ...
    def __getitem__(self, index: int | slice) -> Solution | Sequence[Solution]:
        return self._apart(None)[index]


def _eigen(stack: Tensor, room: _Room) -> bool:
    """Eigenvectors and eigenvalues; whether all is finite."""
    assert room.values is not None, "there are eigenvalues"
    torch.linalg.eigh(stack, out=(room.values, room.matrices))
    room.values.clamp_(min=0)
    return math.isfinite(room.whole.sum().item())


def _inverse(stack: Tensor, room: _Room) -> bool:
    """Inverses; whether all are finite."""
    torch.cholesky_inverse(torch.linalg.cholesky(stack), out=room.matrices)
    return math.isfinite(room.whole.sum().item())


def side_by_side(factors: Sequence[Tensor]) -> Tensor | None:
    """Factors (stack, n, n) as one stack, a view, where all their matrices lie in one memory at one distance."""
    first = factors[0]
    if len(factors) == 1:
        return first
    size, home = first.shape[-1], first.untyped_storage().data_ptr()
    starts: list[int] = []
    for factor in factors:
        if not factor.is_contiguous() or factor.untyped_storage().data_ptr() != home:
            return None
        start = int(factor.storage_offset())
        starts += range(start, start + factor.numel(), size * size)
    distances = {later - earlier for earlier, later in pairwise(starts)}
    if len(distances) != 1 or min(distances) < size * size:
        return None
    return first.as_strided((len(starts), size, size), (distances.pop(), size, 1), starts[0])


def host_memory(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """With anything in it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

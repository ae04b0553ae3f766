"""Decompositions cut into pieces that can be made anywhere: in another thread, process or machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.packets import packed, unpacked
from natgrad.solve.linalg import JITTER
from natgrad.solve.solver import Side, Solved, solve

# Small factors go together up to this many elements: a piece of their own would cost more than it takes.
SMALL_PIECE = 2**18
# The fewest pieces of a request whose pieces are larger: so that several threads have enough to share.
_PIECES = 16
# Of the residual of a probe, beside what rounding explains: so many times what an inverse leaves of it, whatever its
# size (measured: up to 0.5).
_TOLERANCE, _ROUNDING = 1e-2, 30


class GarbageError(RuntimeError):
    """What came back is no decomposition of what was sent."""


@dataclass(frozen=True)
class Task:
    """Dense factors (stack, n, n) to be decomposed by one worker, with what names them. `home`: where they come from,
    where these are copies in the host's memory.
    """

    solver: str
    keys: tuple[Hashable, ...]
    factors: tuple[Tensor, ...]
    home: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where the solutions must get to."""
        return self.factors[0].device if self.home is None else self.home

    def solve_at_home(self) -> list[Solution]:
        """The solutions, made here and now."""
        if self.home is not None and self.home.type == "cuda":
            torch.cuda.synchronize(self.home)  # copies may still be on their way
        return solve_tensors(self.solver, [factor.to(self.device) for factor in self.factors])


@dataclass(frozen=True)
class Solution:
    """One solved factor, and which of its stack failed in every way."""

    side: Side
    failed: list[bool]


def cut(factors: Mapping[Hashable, Tensor], solver: str, piece: int = SMALL_PIECE) -> list[Task]:
    """Dense factors as tasks, the largest first: whoever is free takes the next. Factors go together up to `piece`
    elements, as long as there are some tasks to share.
    """
    pieces: list[list[Hashable]] = []
    room, total = 0, sum(factor.numel() for factor in factors.values())
    most = max(SMALL_PIECE, min(piece, total // _PIECES))
    for key in sorted(factors, key=lambda one: -factors[one].numel()):
        size = factors[key].numel()
        if size > room:
            pieces.append([])
            room = max(most, size)
        pieces[-1].append(key)
        room -= size
    return [Task(solver, tuple(keys), tuple(factors[key] for key in keys)) for keys in pieces]


def solve_tensors(solver: str, factors: Sequence[Tensor]) -> list[Solution]:
    """The work itself."""
    with torch.no_grad():
        result: Solved = solve(dict(enumerate(factors)), solver)
    return [Solution(result.sides[number], result.failed[number]) for number in range(len(factors))]


def pack(task: Task) -> bytes:
    """A task as bytes, for other processes and machines."""
    return packed({"solver": task.solver, "factors": [_alone(factor.cpu()) for factor in task.factors]})


def _alone(tensor: Tensor) -> Tensor:
    """In memory of its own: a part of something larger would be sent with all of that."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def solve_packed(payload: bytes) -> bytes:
    """What a worker does, from bytes to bytes: `concurrent.futures.Executor.submit(solve_packed, payload)`."""
    given = unpacked(payload)
    found = solve_tensors(given["solver"], given["factors"])
    return packed([(one.side.matrix, one.side.values, one.failed) for one in found])


def unpack(payload: bytes) -> list[Solution]:
    """The solutions that a worker has sent."""
    try:
        return [Solution(Side(matrix, values), failed) for matrix, values, failed in unpacked(payload)]
    except Exception as error:
        raise GarbageError(f"the answer cannot be read ({error})") from error


def check(task: Task, solutions: Sequence[Solution]) -> None:
    """Refuses what is no decomposition of the task's factors: of another form, not finite, or wrong on a probe."""
    if len(solutions) != len(task.factors):
        raise GarbageError(f"{len(solutions)} decompositions came back for {len(task.factors)} factors")
    for factor, solution in zip(task.factors, solutions, strict=True):
        _check_form(factor, solution, task.solver)
        good = [index for index, failed in enumerate(solution.failed) if not failed]
        if good and not bool(_residual_is_small(factor[good], solution.side, good, task.solver)):
            raise GarbageError(f"a decomposition of size {factor.shape[-1]} is wrong")


def _check_form(factor: Tensor, solution: Solution, solver: str) -> None:
    matrix, values = solution.side.matrix, solution.side.values
    expected = [(matrix, factor.shape), (values, factor.shape[:2] if solver == "eigen" else None)]
    for part, shape in expected:
        fits = part is None if shape is None else isinstance(part, Tensor) and part.shape == shape
        if not fits or (part is not None and part.dtype != factor.dtype):
            raise GarbageError(f"a decomposition of size {factor.shape[-1]} has another form than its factor")
        # Of what failed too: that is a diagonal, which may have to do.
        if part is not None and not bool(torch.isfinite(part).all()):
            raise GarbageError(f"a decomposition of size {factor.shape[-1]} is not finite")
    flags = solution.failed
    if len(flags) != factor.shape[0] or not all(isinstance(flag, bool) for flag in flags):
        raise GarbageError("a decomposition does not say which of its stack failed")


def _residual_is_small(factor: Tensor, side: Side, good: list[int], solver: str) -> Tensor:
    """F x against Q Λ Qᵀ x, or F F⁻¹ x against x, for one vector x: n² operations."""
    assert side.matrix is not None, "a dense factor has a dense solution"
    matrix, size = side.matrix[good], factor.shape[-1]
    # Signs without a period: no eigenvector of anything that comes up.
    signs = (torch.arange(size, device=factor.device, dtype=torch.float64) ** 2 * 0.7548776662466927).cos().sign()
    probe = signs.to(factor.dtype).reshape(1, size, 1).expand(len(good), size, 1)
    if solver == "eigen":
        assert side.values is not None, "an eigenbasis has eigenvalues"
        found = matrix @ (side.values[good].unsqueeze(-1) * (matrix.mT @ probe))
        error = _length(found - factor @ probe)
        # |F| is as long as F x is for most signs x: what has nothing to do with F is about as far away.
        bound = _TOLERANCE * _length(factor) + torch.finfo(factor.dtype).tiny
    else:
        once = matrix @ probe
        missing = probe - factor @ once
        jitter = JITTER * factor.diagonal(dim1=-2, dim2=-1).abs().amax(-1)[:, None, None] * once
        # One that had to be repaired is that of F and a little on its diagonal.
        error = torch.minimum(_length(missing), _length(missing - jitter))
        rounding = _ROUNDING * torch.finfo(factor.dtype).eps * _length(factor) * _length(once)
        bound = _TOLERANCE * size**0.5 + rounding
    small: Tensor = (torch.isfinite(error) & (error <= bound)).all()
    return small


def _length(matrices: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1))
    return length

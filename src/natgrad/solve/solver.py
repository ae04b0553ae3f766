"""Solving many blocks at once: equal sizes go through one batched decomposition.

A `Side` is the solved form of one factor: eigenvectors and eigenvalues, or a damped inverse. Sides outlive a failed
refresh: what cannot be decomposed anew keeps its last good form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from natgrad.blocks.kronecker import Estimate
from natgrad.solve.damping import factored_damping
from natgrad.solve.linalg import symmetric_eigen, symmetric_inverse

SOLVERS = ("eigen", "inverse")
# Factors of one size are stacked up to this many elements; larger ones gain nothing from it and would need the memory
# twice.
_STACK_ELEMENTS = 2**24


@dataclass(eq=False)
class Side:
    """One solved factor. `matrix` holds eigenvectors or an inverse, (stack, n, n); None for the eigenbasis of a
    diagonal factor.

    `values` holds eigenvalues, or the inverse of a diagonal factor, (stack, n); None for a dense inverse.
    """

    matrix: Tensor | None
    values: Tensor | None

    def is_like(self, other: Side) -> bool:
        """Whether both are of one form: a factor that was diagonal may become dense."""
        pairs = ((self.matrix, other.matrix), (self.values, other.values))
        return all((a is None) == (b is None) and (a is None or b is None or a.shape == b.shape) for a, b in pairs)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        part = self.values if self.matrix is None else self.matrix
        assert part is not None, "a side has a matrix or values"
        return part.device

    def to(self, device: torch.device) -> Side:
        """There, as it is where it is there already."""
        return Side(*(None if part is None else part.to(device) for part in (self.matrix, self.values)))

    def update(self, new: Side, failed: Sequence[bool]) -> None:
        """Takes over a newer solution, in place, except where it failed."""
        for own, other in ((self.matrix, new.matrix), (self.values, new.values)):
            if own is None or other is None:
                continue
            for index, lost in enumerate(failed):
                if not lost:
                    own[index].copy_(other[index])


def update_all(pairs: Sequence[tuple[Side, Side]]) -> None:
    """Takes over newer solutions, none of which has failed, in place; from the host's pinned memory without waiting."""
    near: list[tuple[Tensor, Tensor]] = []
    far: list[tuple[Tensor, Tensor]] = []  # elsewhere, or with something in between: these are copied one by one
    for old, new in pairs:
        for own, other in ((old.matrix, new.matrix), (old.values, new.values)):
            if own is not None and other is not None:
                dense = own.device == other.device and own.is_contiguous() and other.is_contiguous()
                (near if dense else far).append((own, other))
    for parts in (near, far):
        if parts:
            torch._foreach_copy_([own for own, _ in parts], [other for _, other in parts], non_blocking=True)


@dataclass(frozen=True)
class Solved:
    """New sides by key, and which of each stack failed."""

    sides: dict[Hashable, Side]
    failed: dict[Hashable, list[bool]]


def solve(factors: Mapping[Hashable, Tensor], solver: str, *, threads: int = 1) -> Solved:
    """Decomposes factors, stacks of them at once; see `symmetric_eigen` for `threads`."""
    return solve_eigen(factors, threads=threads) if solver == "eigen" else solve_inverse(factors)


def solve_eigen(factors: Mapping[Hashable, Tensor], *, threads: int = 1) -> Solved:
    """Eigendecompositions of factors (stack, n, n); a diagonal factor (stack, n) is its own."""

    def dense(stack: Tensor) -> tuple[Side, list[bool]]:
        result = symmetric_eigen(stack, threads=threads)
        for index in (i for i, bad in enumerate(result.failed) if bad):
            # Without an earlier decomposition the factor's diagonal must do.
            result.vectors[index] = torch.eye(stack.shape[-1], dtype=stack.dtype, device=stack.device)
            result.values[index] = stack[index].diagonal().nan_to_num(0, 0, 0).clamp(min=0)
        return Side(result.vectors, result.values), result.failed

    return _solve(factors, lambda diagonal: diagonal.clamp(min=0), dense)


def solve_inverse(factors: Mapping[Hashable, Tensor]) -> Solved:
    """Inverses of damped factors (stack, n, n) or diagonals (stack, n)."""

    def dense(stack: Tensor) -> tuple[Side, list[bool]]:
        result = symmetric_inverse(stack)
        for index in (i for i, bad in enumerate(result.failed) if bad):
            result.matrices[index] = stack[index].diagonal().reciprocal().nan_to_num(0, 0, 0).diag_embed()
        return Side(result.matrices, None), result.failed

    return _solve(factors, torch.reciprocal, dense)


def _solve(
    factors: Mapping[Hashable, Tensor],
    diagonal: Callable[[Tensor], Tensor],
    dense: Callable[[Tensor], tuple[Side, list[bool]]],
) -> Solved:
    """Diagonal factors one by one, dense ones in stacks of equal size."""
    sides: dict[Hashable, Side] = {}
    failed: dict[Hashable, list[bool]] = {}
    for key, factor in factors.items():
        if factor.dim() == 2:
            sides[key], failed[key] = Side(None, diagonal(factor)), [False] * factor.shape[0]
    for lengths, stack in _stacks(factors):
        whole, lost = dense(stack)
        count = list(lengths.values())
        matrices, values = (
            [None] * len(count) if part is None else part.split(count) for part in (whole.matrix, whole.values)
        )
        flags = iter(lost)
        for key, matrix, value in zip(lengths, matrices, values, strict=True):
            sides[key] = Side(matrix, value)
            failed[key] = list(islice(flags, lengths[key]))
    return Solved(sides, failed)


def damped_sides(estimate: Estimate, rule: str, damping: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """The sides of a block with a factored rule's damping added, and what the product of their inverses is divided
    by.
    """
    means = [trace / side.shape[-1] for trace, side in zip(estimate.traces, estimate.sides, strict=True)]
    damped = factored_damping(rule, means, estimate.scale, damping)
    sides = tuple(
        _damp(side, multiply, add)
        for side, multiply, add in zip(estimate.sides, damped.multiply, damped.add, strict=True)
    )
    return sides, damped.divide


def _damp(side: Tensor, multiply: Tensor, add: Tensor) -> Tensor:
    if side.dim() == 2:
        return side * multiply[:, None] + add[:, None]
    damped = side * multiply[:, None, None]
    damped.diagonal(dim1=-2, dim2=-1).add_(add[:, None])
    return damped


def _stacks(factors: Mapping[Hashable, Tensor]) -> list[tuple[dict[Hashable, int], Tensor]]:
    """Dense factors of equal size, joined; each with how many entries it has."""
    by_size: dict[int, list[list[Hashable]]] = {}
    filled: dict[int, int] = {}
    for key, factor in factors.items():
        if factor.dim() != 3:
            continue
        size, count = factor.shape[-1], factor.numel()
        groups = by_size.setdefault(size, [])
        if not groups or filled[size] + count > _STACK_ELEMENTS:
            groups.append([])
            filled[size] = 0
        groups[-1].append(key)
        filled[size] += count
    result = []
    for groups in by_size.values():
        for keys in groups:
            parts = [factors[key] for key in keys]
            lengths = {key: part.shape[0] for key, part in zip(keys, parts, strict=True)}
            result.append((lengths, parts[0] if len(parts) == 1 else torch.cat(parts)))
    return result

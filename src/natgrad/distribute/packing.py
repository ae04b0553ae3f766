"""Factors and solved sides as flat buffers, one a dtype: symmetric matrices as triangles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.distribute.triangles import fold, folded_numel, unfold
from natgrad.solve.solver import Side

T = TypeVar("T")


def by_dtype(things: Iterable[T], dtype: Callable[[T], torch.dtype]) -> Iterator[list[T]]:
    """What may go into one buffer."""
    groups: dict[torch.dtype, list[T]] = {}
    for thing in things:
        groups.setdefault(dtype(thing), []).append(thing)
    yield from groups.values()


def numel(shape: Sequence[int]) -> int:
    """Elements of any shape."""
    return torch.Size(shape).numel()


def packed_numel(factor: Tensor) -> int:
    """Elements of a factor (stack, n, n), or (stack, n), in a message."""
    return factor.numel() if factor.dim() == 2 else folded_numel(factor.shape[0], factor.shape[1])


def packed(factor: Tensor) -> Tensor:
    """A factor in a message."""
    return factor.flatten() if factor.dim() == 2 else fold(factor)


def unpacked(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `packed`."""
    return flat.view(*shape) if len(shape) == 2 else unfold(flat, shape[0], shape[1])


def side_parts(side: Side, solver: str) -> list[Tensor]:
    """A side as flat parts: an inverse is symmetric, eigenvectors are not."""
    if side.matrix is None:
        assert side.values is not None, "a side has a matrix or values"
        return [side.values.flatten()]
    if solver == "inverse":
        return [fold(side.matrix)]
    assert side.values is not None, "an eigenbasis has eigenvalues"
    return [side.matrix.flatten(), side.values.flatten()]


def side_numels(shape: Sequence[int], solver: str) -> list[int]:
    """How long the parts of a side are: (stack, n, n), or (stack, n) for a diagonal one."""
    if len(shape) == 2:
        return [shape[0] * shape[1]]
    stack, size, _ = shape
    return [folded_numel(stack, size)] if solver == "inverse" else [stack * size * size, stack * size]


def side_of(parts: Sequence[Tensor], shape: Sequence[int], solver: str) -> Side:
    """The inverse of `side_parts`; views of the buffer where there is nothing to unfold."""
    if len(shape) == 2:
        return Side(None, parts[0].view(*shape))
    if solver == "inverse":
        return Side(unfold(parts[0], shape[0], shape[1]), None)
    return Side(parts[0].view(*shape), parts[1].view(shape[0], shape[1]))

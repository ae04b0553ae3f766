"""Symmetric matrices as half of themselves, for messages.

The two halves of a matrix of even size n = 2h hold two triangles of size h, which fit into a rectangle h × (h + 1), and
a square h × h; odd sizes likewise. A few copies do that, where a list of indices would take more memory than the
matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def folded_numel(stack: int, size: int) -> int:
    """Elements of a folded stack."""
    return stack * size * (size + 1) // 2


def fold(matrices: Tensor) -> Tensor:
    """(K, n, n) symmetric → K · n(n + 1)/2 elements; only the upper triangle is looked at."""
    size = matrices.shape[-1]
    lower = size // 2
    upper = size - lower
    corner = _wedge(matrices[:, :upper, :upper], matrices[:, upper:, upper:].mT, upper, lower)
    return torch.cat([corner.flatten(1), matrices[:, :upper, upper:].flatten(1)], dim=1).flatten()


def unfold(flat: Tensor, stack: int, size: int) -> Tensor:
    """The inverse of `fold`: (stack, size, size)."""
    lower = size // 2
    upper = size - lower
    flat = flat.view(stack, -1)
    width = lower + 1
    corner = flat[:, : upper * width].view(stack, upper, width)
    matrices = flat.new_empty(stack, size, size)
    matrices[:, :upper, upper:] = flat[:, upper * width :].view(stack, upper, lower)
    matrices[:, upper:, :upper] = matrices[:, :upper, upper:].mT
    shift = width - upper  # 1 for even sizes, 0 for odd ones
    first = corner[:, :, shift:].triu()
    matrices[:, :upper, :upper] = first + first.triu(1).mT
    second = corner[:, upper - lower :, :lower].tril()
    matrices[:, upper:, upper:] = second + second.tril(-1).mT
    return matrices


def _wedge(first: Tensor, second: Tensor, upper: int, lower: int) -> Tensor:
    """(K, upper, lower + 1): the upper triangle of `first` above the lower triangle of `second`."""
    width = lower + 1
    shift = width - upper
    joined = first.new_empty(first.shape[0], upper, width)
    joined[:, :, shift:] = first
    mask = torch.ones(upper, width, dtype=torch.bool, device=first.device).tril(-1 if shift == 0 else 0)
    below = torch.zeros_like(joined)
    below[:, upper - lower :, :lower] = second
    return torch.where(mask, below, joined)

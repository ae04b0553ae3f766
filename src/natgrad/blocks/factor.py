"""Running averages of factors, bias-corrected and safe from NaN.

A factor keeps the weighted sum S of second moments and the weight w (rows seen): ``S ← ξS + new``, ``w ← ξw +
rows``, factor = S / w. Both are linear, so sums over
ranks or micro-batches are exact, and nothing starts from a made-up identity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.foreach import multiply_all

Rows = int | float | Tensor


class Factor:
    """One side of a block: (stack, n, n), or (stack, n) where it is diagonal."""

    def __init__(self, stack: int, size: int, *, diagonal: bool, dtype: torch.dtype, device: torch.device) -> None:
        shape = (stack, size) if diagonal else (stack, size, size)
        self.sum = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.diagonal = diagonal
        self.pending: Tensor | None = None
        self.pending_rows: Rows = 0

    @property
    def stack(self) -> int:
        """Groups or heads."""
        return self.sum.shape[0]

    @property
    def bytes(self) -> int:
        """Memory of the running sum."""
        return self.sum.numel() * self.sum.element_size()

    def add(self, moment: Tensor, rows: Rows) -> None:
        """Takes in a sum over rows; it counts from the next `commit` on.

        A use that does not add the block's bias has a 0 in the bias's coordinate: its sums are one smaller.
        """
        if (missing := self.sum.shape[1] - moment.shape[1]) > 0:
            moment = functional.pad(moment, [0, missing] * (moment.dim() - 1))
        if moment.dim() > self.sum.dim():
            moment = moment.diagonal(dim1=-2, dim2=-1)
        elif moment.dim() < self.sum.dim():
            moment = moment.diag_embed()
        moment = moment.to(self.sum.dtype)
        self.pending = moment if self.pending is None else self.pending + moment
        self.pending_rows = self.pending_rows + rows

    def discard(self) -> None:
        """Forgets what came in since the last commit."""
        self.pending, self.pending_rows = None, 0

    def mean(self) -> Tensor:
        """The estimate S / w."""
        return self.sum / self.weight.to(self.sum.dtype)

    def copy(self) -> Factor:
        """An independent factor with the same state."""
        twin = Factor.__new__(Factor)
        twin.sum, twin.weight, twin.diagonal = self.sum.clone(), self.weight.clone(), self.diagonal
        # Moments are scaled and committed in place: never the same memory twice.
        twin.pending = None if self.pending is None else self.pending.clone()
        twin.pending_rows = self.pending_rows
        return twin


def scale_moments(factors: Iterable[Factor], factor: float | Tensor) -> None:
    """Multiplies the derivatives that have come in since the last commit, before their squares are averaged."""
    moments = [one.pending for one in dict.fromkeys(factors) if one.pending is not None]
    if isinstance(factor, Tensor):
        multiply_all(moments, factor.square())
    elif factor != 1:
        torch._foreach_mul_(moments, factor**2)


def commit(
    factors: Iterable[Factor],
    decay: float,
    usable: Tensor | None = None,
    resting: Collection[Factor] = (),
) -> Tensor:
    """Moves the running averages by what came in, each unless that is not finite, and none unless `usable`.

    On several ranks `resting` are the factors that only others have statistics of: here the past fades, as it does
    there.

    Returns which were finite, on the device. All factors together, so that this is a few launches and one a factor.
    """
    if resting:
        _fade(resting, decay, usable)
    every = list(factors)
    moved = [factor for factor in every if factor.pending is not None]
    moments = [factor.pending for factor in moved if factor.pending is not None]
    if not moved:
        return torch.ones(0, dtype=torch.bool, device=every[0].sum.device if every else None)
    finite = torch.isfinite(torch.stack(torch._foreach_norm(moments, ord=math.inf)))
    if usable is not None:
        finite = finite & usable.to(finite.device)
    _move_sums(moved, moments, finite, decay)
    weights = [factor.weight for factor in moved]
    raised = list(torch._foreach_mul(weights, decay))
    add_counts(raised, [factor.pending_rows for factor in moved])
    kept = torch.where(finite, torch.stack(raised), torch.stack(weights))
    torch._foreach_copy_(weights, list(kept.unbind()))
    for factor in moved:
        factor.discard()
    return finite


def _move_sums(factors: Sequence[Factor], moments: list[Tensor], finite: Tensor, decay: float) -> None:
    """S ← ξS + new where that is finite."""
    if finite.device.type == "cpu":
        # Nobody waits for an answer here, and one pass over memory is enough.
        for factor, flag, moment in zip(factors, finite.tolist(), moments, strict=True):
            if flag:
                torch.add(moment, factor.sum, alpha=decay, out=factor.sum)
        return
    # Into the moments, which nobody needs any more: no third copy of all factors.
    torch._foreach_add_(moments, [factor.sum for factor in factors], alpha=decay)
    for factor, flag, total in zip(factors, finite.unbind(), moments, strict=True):
        torch.where(flag, total, factor.sum, out=factor.sum)


@dataclass(frozen=True)
class Preview:
    """What factors will be after a `commit` that has not happened: sums, made one at a time, and weights."""

    decay: float
    scales: Mapping[Factor, float]  # what moments will be multiplied with
    finite: Mapping[Factor, Tensor]
    resting: Collection[Factor]

    def sum(self, factor: Factor) -> Tensor:
        """S after the commit."""
        if factor.pending is None:
            return factor.sum * self.decay if factor in self.resting else factor.sum
        total = (factor.pending * self.scales.get(factor, 1.0)).add_(factor.sum, alpha=self.decay)
        return torch.where(self.finite[factor], total, factor.sum)

    def weight(self, factor: Factor) -> Tensor:
        """w after the commit."""
        if factor.pending is None:
            return factor.weight * self.decay if factor in self.resting else factor.weight
        raised = factor.weight * self.decay + factor.pending_rows
        return torch.where(self.finite[factor], raised, factor.weight)


def preview(
    factors: Iterable[Factor], decay: float, scales: Mapping[Factor, float], resting: Collection[Factor]
) -> Preview:
    """Looks at what `commit` on several ranks would do, for a step that is sure to be usable."""
    moved = {factor: factor.pending for factor in factors if factor.pending is not None}
    if not moved:
        return Preview(decay, scales, {}, resting)
    finite = torch.isfinite(torch.stack(torch._foreach_norm(list(moved.values()), ord=math.inf)))
    return Preview(decay, scales, dict(zip(moved, finite.unbind(), strict=True)), resting)


def _fade(factors: Collection[Factor], decay: float, usable: Tensor | None) -> None:
    """Takes the past of factors a step further away, unless the step is not `usable`."""
    tensors = [tensor for factor in factors for tensor in (factor.sum, factor.weight)]
    if usable is None:
        torch._foreach_mul_(tensors, decay)
    else:
        multiply_all(tensors, torch.where(usable, decay, torch.ones((), dtype=torch.float64, device=usable.device)))


def add_counts(totals: Sequence[Tensor], counts: Sequence[Rows]) -> None:
    """Adds a number, or a tensor where only the device knows it, to each total, in place."""
    known = [(total, count) for total, count in zip(totals, counts, strict=True) if not isinstance(count, Tensor)]
    if known:
        torch._foreach_add_([total for total, _ in known], [float(count) for _, count in known])
    for total, count in zip(totals, counts, strict=True):
        if isinstance(count, Tensor):
            total.add_(count)

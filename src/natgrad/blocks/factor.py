"""Running averages of factors, bias-corrected and safe from NaN.

A factor keeps the weighted sum S of second moments and the weight w (rows seen): ``S ← ξS + new``, ``w ← ξw +
rows``, factor = S / w. Both are linear, so sums over
ranks or micro-batches are exact, and nothing starts from a made-up identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.blocks.joint import Joined, Joint, Rows, joint
from natgrad.foreach import multiply_all
from natgrad.statistics import moving


class Factor(Joined):
    """One side of a block: (stack, n, n), or (stack, n) where it is diagonal."""

    def __init__(self, stack: int, size: int, *, diagonal: bool, dtype: torch.dtype, device: torch.device) -> None:
        shape = (stack, size) if diagonal else (stack, size, size)
        super().__init__(torch.zeros((), dtype=torch.float64, device=device))
        self.sum = torch.zeros(shape, dtype=dtype, device=device)
        self.diagonal = diagonal
        self.pending: Tensor | None = None
        self.pending_rows: Rows = 0

    @property
    def weight(self) -> Tensor:
        """w, on the device."""
        return self.own

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
        if moment.shape != self.sum.shape:
            moment = self._formed(moment)
        if moment.dtype != self.sum.dtype:
            moment = moment.to(self.sum.dtype)
        self.pending = moment if self.pending is None else self.pending + moment
        self.pending_rows = self.pending_rows + rows

    def _formed(self, moment: Tensor) -> Tensor:
        if (missing := self.sum.shape[1] - moment.shape[1]) > 0:
            moment = functional.pad(moment, [0, missing] * (moment.dim() - 1))
        if moment.dim() > self.sum.dim():
            return moment.diagonal(dim1=-2, dim2=-1)
        return moment.diag_embed() if moment.dim() < self.sum.dim() else moment

    def discard(self) -> None:
        """Forgets what came in since the last commit."""
        self.pending, self.pending_rows = None, 0

    def mean(self) -> Tensor:
        """The estimate S / w."""
        return self.sum / self.weight.to(self.sum.dtype)

    def copy(self) -> Factor:
        """An independent factor with the same state."""
        twin = Factor.__new__(Factor)
        Joined.__init__(twin, self.weight.clone())
        twin.sum, twin.diagonal = self.sum.clone(), self.diagonal
        # Moments are scaled and committed in place: never the same memory twice.
        twin.pending = None if self.pending is None else self.pending.clone()
        twin.pending_rows = self.pending_rows
        return twin


def scale_moments(factors: Iterable[Factor], factor: float | Tensor) -> None:
    """Multiplies the derivatives that have come in since the last commit, before their squares are averaged."""
    if not isinstance(factor, Tensor) and factor == 1:
        return
    moments = [one.pending for one in dict.fromkeys(factors) if one.pending is not None]
    if isinstance(factor, Tensor):
        multiply_all(moments, factor.square())
    else:
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
    if not moved:
        return torch.ones(0, dtype=torch.bool, device=every[0].sum.device if every else None)
    together = joint(moved)
    if together.sums is None:  # whose weights these are: a factor keeps its sum as long as it is there
        together.sums = moving.Sums([factor.sum for factor in moved])
    moments = [factor.pending for factor in moved if factor.pending is not None]
    finite = together.sums.move(moments, usable, decay)
    _move_weights(together, [factor.pending_rows for factor in moved], finite, decay)
    for factor in moved:
        factor.discard()
    return finite


def _move_weights(together: Joint, rows: list[Rows], finite: Tensor, decay: float) -> None:
    """w ← ξw + rows where the new statistics are finite."""
    weights = together.whole
    torch.where(finite, torch.add(together.counted(rows), weights, alpha=decay), weights, out=weights)


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
    finite = moving.finite(list(moved.values()))
    return Preview(decay, scales, dict(zip(moved, finite.unbind(), strict=True)), resting)


def _fade(factors: Collection[Factor], decay: float, usable: Tensor | None) -> None:
    """Takes the past of factors a step further away, unless the step is not `usable`."""
    tensors = [tensor for factor in factors for tensor in (factor.sum, factor.weight)]
    if usable is None:
        torch._foreach_mul_(tensors, decay)
    else:
        multiply_all(tensors, torch.where(usable, decay, torch.ones((), dtype=torch.float64, device=usable.device)))

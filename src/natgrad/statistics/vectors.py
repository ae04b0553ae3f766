"""Vectors that are broadcast against an activation: gains and biases of norm layers, free biases, scales, tokens.

Their Fisher block is full, from the gradients of single cases, or its diagonal: there are no inputs to factor out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.statistics import gpu
from natgrad.statistics.gram import accumulation_dtype, second_moment

Multiplier = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Place:
    """Where in a parameter of shape `shape` the part that a use sees lies: a (start, stop) pair per axis."""

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    def fill(self, rows: Tensor) -> Tensor:
        """(R, elements of the part) → (R, elements of the parameter), zero elsewhere."""
        whole = rows.new_zeros(rows.shape[0], *self.shape)
        part = whole[(slice(None), *(slice(start, stop) for start, stop in self.box))]
        part.copy_(rows.reshape(part.shape))
        return whole.flatten(1)


@dataclass(frozen=True)
class Vector:
    """A vector that enters an activation of shape `shape`: the derivative, times `multiplier` where it scales the
    activation, summed over all but the vector's own axes `kept` and the cases' axis, is each case's gradient, of the
    part of the parameter at `place`. `sign` is −1 where the vector is subtracted.

    Without `case_axis` every place counts as a case.
    """

    kind: str
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    case_axis: int | None
    multiplier: Multiplier | None = None
    place: Place | None = None
    sign: int = 1

    diagonal_input = False

    @property
    def keeps_saved(self) -> bool:
        """See `Operation`."""
        return self.multiplier is not None

    @property
    def _case_axes(self) -> list[int]:
        if self.case_axis is not None:
            return [self.case_axis]
        return [axis for axis in range(len(self.shape)) if axis not in self.kept]

    def rows(self, saved: Sequence[Tensor], derivative: Tensor) -> int:
        """See `Operation`."""
        return math.prod(self.shape[axis] for axis in self._case_axes)

    def input_factors(self, saved: Sequence[Tensor], *, homogeneous: bool, diagonal: Sequence[bool]) -> list[Tensor]:
        """See `Operation`."""
        return []

    def output_factor(self, derivative: Tensor, saved: Sequence[Tensor], *, diagonal: bool) -> Tensor:
        """See `Operation`."""
        return second_moment(self.gradients(derivative, saved)[None], diagonal=diagonal)

    def part(
        self, derivative: Tensor, saved: Sequence[Tensor], fraction: float
    ) -> tuple[Vector, Tensor, Sequence[Tensor]]:
        """See `Operation`. The first cases: batches are shuffled."""
        by_case = [tensor.dim() == len(self.shape) and tensor.shape[0] == self.shape[0] for tensor in saved]
        known = self.multiplier is None or self.multiplier == ByChannel() or all(by_case)
        if self.case_axis != 0 or not known:
            return self, derivative, saved
        count = math.ceil(fraction * self.shape[0])
        parts = [tensor[:count] if own else tensor for tensor, own in zip(saved, by_case, strict=True)]
        operation = replace(self, shape=(count, *self.shape[1:]))
        return operation, derivative.reshape(self.shape)[:count], parts

    def gradients(self, derivative: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """The gradient of each case, (cases, elements)."""
        derivative = derivative.reshape(self.shape)
        if isinstance(self.multiplier, ByChannel):
            return self.multiplier.gradients(derivative, saved)
        if self.multiplier is not None:
            derivative = derivative * self.multiplier(saved)
        cases = self._case_axes
        summed = [axis for axis in range(len(self.shape)) if axis not in self.kept and axis not in cases]
        if summed:
            derivative = derivative.sum(summed, keepdim=True, dtype=accumulation_dtype(derivative.dtype))
        count = math.prod(self.shape[axis] for axis in cases)
        rows = derivative.permute(*cases, *summed, *self.kept).reshape(count, -1)
        rows = rows if self.sign == 1 else -rows
        return rows if self.place is None else self.place.fill(rows)


def other_operand(saved: Sequence[Tensor]) -> Tensor:
    """x of x · w."""
    return saved[0]


def negative_part(saved: Sequence[Tensor]) -> Tensor:
    """What a leaky slope multiplies."""
    return saved[0].clamp(max=0)


@dataclass(frozen=True)
class ByChannel:
    """Batch and group norm: x̂ = (x − mean) · reciprocal, both constant over the places of a case's channel, so that
    Σ g x̂ = (Σ g x − mean Σ g) · reciprocal needs no normalised copy of the activation.

    Group norm has them per case and group; batch norm in evaluation saved the running variance instead of the
    reciprocal deviation, `eps` apart.
    """

    groups: int | None = None
    eps: float | None = None

    def __call__(self, saved: Sequence[Tensor]) -> Tensor:
        """x̂ itself."""
        x, mean, reciprocal = self._constants(saved)
        places = (..., *(None,) * (x.dim() - 2))
        return (x - mean[places]) * reciprocal[places]

    def gradients(self, derivative: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """Each case's gradient of the gain, (cases, channels)."""
        x, mean, reciprocal = self._constants(saved)
        if self.groups is None and gpu.sums(x) and derivative.dtype != torch.float64:
            return gpu.gain_gradients(derivative, x, mean[0].float(), reciprocal[0].float())
        products = derivative * x
        if x.dim() > 2:
            places, dtype = list(range(2, x.dim())), accumulation_dtype(derivative.dtype)
            products, derivative = products.sum(places, dtype=dtype), derivative.sum(places, dtype=dtype)
        return (products - mean * derivative) * reciprocal

    def _constants(self, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x, and mean and reciprocal deviation as (1 or cases, channels)."""
        x, mean, other = saved
        if self.eps is not None:
            other = torch.rsqrt(other + self.eps)
        if self.groups is None:
            return x, mean[None], other[None]
        each = x.shape[1] // self.groups
        return x, mean.repeat_interleave(each, 1), other.repeat_interleave(each, 1)


def normalised_by_row(saved: Sequence[Tensor]) -> Tensor:
    """Layer norm: one mean and deviation per row, with the last axes kept as ones."""
    x, mean, reciprocal = saved
    return (x - mean) * reciprocal


def scaled_by_row(saved: Sequence[Tensor]) -> Tensor:
    """RMS norm: one reciprocal root mean square per row."""
    x, reciprocal = saved
    return x * reciprocal

"""Vectors that are broadcast against an activation: gains and biases of norm layers, free biases, scales, tokens.

Their Fisher block is full, from the gradients of single cases, or its diagonal: there are no inputs to factor out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    part of the parameter at `place`.

    Without `case_axis` every place counts as a case.
    """

    kind: str
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    case_axis: int | None
    multiplier: Multiplier | None = None
    place: Place | None = None

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

    def gradients(self, derivative: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """The gradient of each case, (cases, elements)."""
        derivative = derivative.reshape(self.shape)
        if self.multiplier is not None:
            derivative = derivative * self.multiplier(saved)
        cases = self._case_axes
        summed = [axis for axis in range(len(self.shape)) if axis not in self.kept and axis not in cases]
        if summed:
            derivative = derivative.sum(summed, keepdim=True, dtype=accumulation_dtype(derivative.dtype))
        count = math.prod(self.shape[axis] for axis in cases)
        rows = derivative.permute(*cases, *summed, *self.kept).reshape(count, -1)
        return rows if self.place is None else self.place.fill(rows)


def other_operand(saved: Sequence[Tensor]) -> Tensor:
    """x of x · w."""
    return saved[0]


def negative_part(saved: Sequence[Tensor]) -> Tensor:
    """What a leaky slope multiplies."""
    return saved[0].clamp(max=0)


def normalised_by_channel(saved: Sequence[Tensor]) -> Tensor:
    """Batch norm: (x − mean) / deviation with one mean per channel, axis 1."""
    x, mean, reciprocal = saved
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return (x - mean.reshape(shape)) * reciprocal.reshape(shape)


@dataclass(frozen=True)
class NormalisedByRunning:
    """Batch norm in evaluation: with the running mean and variance."""

    eps: float

    def __call__(self, saved: Sequence[Tensor]) -> Tensor:
        """See `Multiplier`."""
        x, mean, variance = saved
        return normalised_by_channel((x, mean, torch.rsqrt(variance + self.eps)))


def normalised_by_row(saved: Sequence[Tensor]) -> Tensor:
    """Layer norm: one mean and deviation per row, with the last axes kept as ones."""
    x, mean, reciprocal = saved
    return (x - mean) * reciprocal


def scaled_by_row(saved: Sequence[Tensor]) -> Tensor:
    """RMS norm: one reciprocal root mean square per row."""
    x, reciprocal = saved
    return x * reciprocal


@dataclass(frozen=True)
class NormalisedByGroup:
    """Group norm: one mean and deviation per case and group of channels."""

    groups: int

    def __call__(self, saved: Sequence[Tensor]) -> Tensor:
        """See `Multiplier`."""
        x, mean, reciprocal = saved
        grouped = x.reshape(x.shape[0], self.groups, -1)
        return ((grouped - mean[..., None]) * reciprocal[..., None]).reshape(x.shape)

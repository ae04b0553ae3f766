"""Input factors of convolutions with strides, on the CPU: correlations of the image's phases, which become channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as functional
from torch import Tensor

from natgrad.launches import HOST
from natgrad.statistics import correlation, ways
from natgrad.statistics.gram import accumulation_dtype
from natgrad.statistics.ways import Axis


@dataclass(frozen=True)
class Phased:
    """One axis of a convolution with a stride, as one with stride 1 of the image's phases, which become channels.

    Kernel element k is on pixel k − padding of the first place: of the phase that is left of this by the stride, and
    there at the offset that the stride goes into it.
    """

    pixels: int
    kernel: int
    stride: int
    padding: int

    @property
    def places(self) -> int:
        """How many patches there are."""
        return (self.pixels + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def seen(self) -> int:
        """How many of the pixels are in a patch or before one that is."""
        return max(0, min(self.pixels, (self.places - 1) * self.stride + self.kernel - self.padding))

    @property
    def axis(self) -> Axis:
        """Of each phase."""
        first = -(self.padding // -self.stride)
        kernel = (self.kernel - 1 - self.padding) // self.stride + first + 1
        pixels = -(self.seen // -self.stride)
        return Axis(pixels, kernel, 1, first, self.places + kernel - 1 - pixels - first)

    @property
    def elements(self) -> list[tuple[int, int]]:
        """(offset, phase) of each element of the kernel."""
        first = -(self.padding // -self.stride) * self.stride
        return [divmod(k - self.padding + first, self.stride) for k in range(self.kernel)]


def pays(x: Tensor, axes: tuple[Phased, ...], groups: int) -> bool:
    """Whether `second_moment` is cheaper than patches for x, (N, C, *pixels).

    Batch 128, 3 × 3 with stride 2, one core: 16 channels 32² 15 ms, patches 19; 32 channels 16² 15, 18; 64 channels 8²
    30, 23.
    """
    if x.dtype == torch.float64 or not axes or min(axis.seen for axis in axes) < 1:
        return False
    cases, channels = x.shape[0] * groups, x.shape[1] // groups
    visible = tuple(axis.axis.visible for axis in axes)
    copied = cases * channels * math.prod(axis.seen for axis in axes) * ways.COPY
    price = copied + correlation.price(visible, cases, channels * math.prod(axis.stride for axis in axes), 0)
    size = channels * math.prod(axis.kernel for axis in axes)
    patches = cases * math.prod(axis.places for axis in axes) * size * (size + ways.COPY) + 2 * ways.CALL
    return price < patches


def second_moment(x: Tensor, axes: tuple[Phased, ...], groups: int) -> Tensor:
    """`correlation.second_moment` for a convolution with strides."""
    x = x.to(accumulation_dtype(x.dtype))[(slice(None), slice(None), *(slice(axis.seen) for axis in axes))]
    short = [-axis.seen % axis.stride for axis in axes]
    if any(short):
        x = functional.pad(x, [zeros for end in reversed(short) for zeros in (0, end)])
    cases, channels = x.shape[0], x.shape[1] // groups
    size = math.prod(axis.stride for axis in axes)
    split = x.reshape(*x.shape[:2], *(n for axis in axes for n in (axis.axis.pixels, axis.stride)))
    order = [*range(3, split.dim(), 2), *range(2, split.dim(), 2)]
    images = split.permute(0, 1, *order).reshape(cases, x.shape[1] * size, *(axis.axis.pixels for axis in axes))
    pairs = correlation.correlated(images, tuple(axis.axis.visible for axis in axes), groups)
    offsets, phases = _elements(axes, x.device)
    pairs = pairs.view(*pairs.shape[:3], channels, size, channels, size).permute(1, 4, 2, 6, 0, 3, 5)
    # (kernel, kernel, groups, channels, channels)
    some = pairs[offsets[:, None], phases[:, None], offsets, phases]
    moment = some.permute(2, 3, 0, 4, 1)
    return moment.reshape(groups, channels * len(offsets), -1)


@lru_cache(maxsize=64)
def _elements(axes: tuple[Phased, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Offset and phase of each element of the kernel, all axes flattened."""
    offsets = phases = torch.zeros(1, dtype=torch.int64, device=HOST)
    for axis in axes:
        offset, phase = torch.tensor(axis.elements, device=HOST).unbind(1)
        offsets = (offsets[:, None] * axis.axis.kernel + offset).flatten()
        phases = (phases[:, None] * axis.stride + phase).flatten()
    return offsets.to(device), phases.to(device)

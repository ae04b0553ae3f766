"""Correlations of images with themselves in one of three ways, and what each costs: products of shifted copies, the
weight gradient of a convolution of the image with itself, or products of Fourier coefficients, one a frequency instead
of one a difference and pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from itertools import product

import torch
from torch import Tensor

from natgrad import processor
from natgrad.launches import HOST

# Prices, in multiply-adds of a good matrix product (measured on one AVX-512 core, float32): to copy an
# element into a patch or a layout, and to call an operator.
COPY = 40
CALL = 5_000_000
# Weight gradients of few channels a group cost as much as this many.
_CHANNELS = 16
# A multiply-add of a weight gradient where products are slow, see `_gradient_price`. On an AMD EPYC with AVX-512 the
# way that is chosen is at most a tenth slower than the best one for 30 of 33 shapes, and on average by 2 %; with 1 for
# 14, and by 47 %.
_FAST_GRADIENT = 0.36
# And Fourier coefficients.
SPECTRUM_ELEMENTS = 2**19


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution with stride 1; `before` and `after` are the zeros put around the pixels."""

    pixels: int
    kernel: int
    dilation: int
    before: int
    after: int

    @property
    def reach(self) -> int:
        """From a kernel's first element to its last."""
        return self.dilation * (self.kernel - 1)

    @property
    def places(self) -> int:
        """How many patches there are."""
        return self.pixels + self.before + self.after - self.reach

    @property
    def complete(self) -> Axis:
        """With all places that see a pixel, and no others."""
        return replace(self, before=self.reach, after=self.reach)

    @property
    def visible(self) -> Axis:
        """Without the places that see no pixel."""
        return replace(self, before=min(self.before, self.reach), after=min(self.after, self.reach))


class Way(Enum):
    """How correlations are made."""

    SHIFTED = "products of shifted copies"
    GRADIENT = "the weight gradient of a convolution"
    SPECTRAL = "products of Fourier coefficients"


def costs(axes: tuple[Axis, ...], cases: int, channels: int) -> list[tuple[int, Way]]:
    """What `correlations` cost, each way."""
    wide = max(channels, _CHANNELS)
    taps = math.prod(2 * axis.kernel - 1 for axis in axes)
    lengthened = cases * channels * math.prod(axis.pixels + axis.reach for axis in axes)
    shifted = lengthened * ((taps // 2 + 1) * wide + COPY) + (4 + taps // 2) * CALL // 5
    pixels = cases * channels * math.prod(axis.pixels for axis in axes)
    gradient = round(pixels * (wide * math.prod(counts(axes)) + 2 * COPY) * _gradient_price()) + 2 * CALL
    found = [(shifted, Way.SHIFTED), (gradient, Way.GRADIENT)]
    if len(axes) <= 2:
        rows, columns = _periods(axes)
        height = axes[0].pixels if len(axes) == 2 else 1
        transforms = columns * (height * (axes[-1].pixels + COPY) + rows * (2 * height + COPY))
        products = rows * columns * (3 * wide // 2)
        sums = rows * columns * channels**2  # real and imaginary ones
        passes = -(-cases * channels * rows * columns // SPECTRUM_ELEMENTS)
        back = sums * (math.prod(counts(axes)) + passes * COPY // 2)
        found.append((cases * channels * (transforms + products) + back + 2 * CALL, Way.SPECTRAL))
    return found


def price(axes: tuple[Axis, ...], cases: int, channels: int) -> int:
    """The least of `costs`; without axes one small product is left."""
    return min(price for price, _ in costs(axes, cases, channels)) if axes else CALL


@cache
def _gradient_price() -> float:
    """Of a multiply-add of a weight gradient, in those of a product. MKL, which makes products, keeps AVX-512 to its
    maker's own processors; oneDNN, which makes weight gradients, uses it on all.
    """
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return _FAST_GRADIENT if wide and processor.entry("vendor_id") == "AuthenticAMD" else 1.0


def differences(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """Of kernel offsets, but for negative ones on the first axis that has any: their correlations are transposes."""
    if not axes:
        return [()]
    half = halved(axes)
    ranges = [range(0 if i == half else 1 - axis.kernel, axis.kernel) for i, axis in enumerate(axes)]
    return list(product(*ranges))


def counts(axes: Sequence[Axis]) -> list[int]:
    """How many `differences` there are on each axis."""
    half = halved(axes)
    return [axis.kernel if i == half else 2 * axis.kernel - 1 for i, axis in enumerate(axes)]


def halved(axes: Sequence[Axis]) -> int:
    """The axis on which negative differences are left out."""
    return next((i for i, axis in enumerate(axes) if axis.kernel > 1), 0)


def paired(axes: Sequence[Axis]) -> int:
    """How many of `differences` are there with their negative ones: they come first."""
    return len(differences(axes)) // axes[halved(axes)].kernel if axes else 1


def correlations(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """(groups, differences, C / groups, C / groups): for each of `differences` d the sum over cases and pixels u of
    x[u] x[u + d]ᵀ.
    """
    _, way = min(costs(axes, x.shape[0] * groups, x.shape[1] // groups), key=lambda one: one[0])
    make = {Way.SHIFTED: _by_shifts, Way.GRADIENT: _by_gradient, Way.SPECTRAL: _by_frequency}[way]
    return make(x, axes, groups)


def _by_shifts(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """With enough zeros after each axis, a difference is an offset in the flattened image."""
    cases, channels = x.shape[0], x.shape[1] // groups
    sizes = [axis.pixels + axis.reach for axis in axes]
    rows = x.new_zeros(groups * channels, cases, *sizes)
    rows[(slice(None), slice(None), *(slice(axis.pixels) for axis in axes))] = x.transpose(0, 1)
    rows = rows.view(groups, channels, -1)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    numbers = {difference: number for number, difference in enumerate(differences(axes))}
    result = x.new_empty(groups, len(numbers), channels, channels)
    for difference, number in numbers.items():
        transpose = numbers.get(tuple(-d for d in difference), number)
        if transpose < number:  # it is there
            result[:, number] = result[:, transpose].mT
            continue
        offset = sum(d * axis.dilation * stride for d, axis, stride in zip(difference, axes, strides, strict=True))
        ends = rows[..., : rows.shape[2] - abs(offset)], rows[..., abs(offset) :]
        result[:, number] = ends[0] @ ends[1].mT if offset >= 0 else ends[1] @ ends[0].mT
    return result


def _periods(axes: Sequence[Axis]) -> tuple[int, int]:
    """Rows and columns of the torus on which the image does not meet itself: columns are even in number."""
    columns = axes[-1].pixels + axes[-1].reach
    return axes[0].pixels + axes[0].reach if len(axes) == 2 else 1, columns + columns % 2


@dataclass(frozen=True)
class Waves:
    """Cosines and sines of an image's frequencies. Along rows of pixels they are odd multiples of half a turn, so that
    each has another one as its conjugate, and half of them are enough.
    """

    along: Tensor  # (columns / 2 · (cosine, −sine), pixels)
    real: Tensor  # what the other axis makes of a real part: (rows · (real, imaginary), pixels)
    imaginary: Tensor  # and of an imaginary one
    cosines: Tensor  # (differences, frequencies), to go back
    sines: Tensor


@lru_cache(maxsize=64)
def _waves(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Waves:
    rows, columns = _periods(axes)

    def angles(odd: bool, places: Tensor) -> Tensor:
        # In whole numbers up to a turn: exact also for many pixels.
        period = columns if odd else rows
        turns = 2 * torch.arange(period // 2, device=HOST) + 1 if odd else 2 * torch.arange(period, device=HOST)
        return ((turns[:, None] * places) % (2 * period)).double() * (math.pi / period)

    def interleaved(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], 1).flatten(0, 1)

    first = axes[0] if len(axes) == 2 else Axis(1, 1, 1, 0, 0)
    offsets = torch.tensor([(0, *difference)[-2:] for difference in differences(axes)], device=HOST)
    offsets = offsets * torch.tensor([first.dilation, axes[-1].dilation], device=HOST)
    along = angles(True, torch.arange(axes[-1].pixels, device=HOST))
    across = angles(False, torch.arange(first.pixels, device=HOST))
    back = (angles(True, offsets[:, 1])[:, None] + angles(False, offsets[:, 0])).flatten(0, 1).mT
    scale = 2 / (rows * columns)
    matrices = (
        interleaved(along.cos(), -along.sin()),
        interleaved(across.cos(), -across.sin()),
        interleaved(across.sin(), across.cos()),
        scale * back.cos(),
        scale * back.sin(),
    )
    return Waves(*(matrix.to(device, dtype).contiguous() for matrix in matrices))


def _by_frequency(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """Wiener–Khinchin: r(d) is the inverse transform of z zᴴ, whose real part is symmetric and whose imaginary part is
    i rᵀ − r iᵀ. Transforms are products with matrices, which leave the frequencies as the first axis.
    """
    channels = x.shape[1] // groups
    waves = _waves(axes, x.dtype, x.device)
    height = axes[0].pixels if len(axes) == 2 else 1
    frequencies = waves.cosines.shape[1]
    at_once = max(1, SPECTRUM_ELEMENTS // (2 * frequencies * x.shape[1]))
    sums: tuple[Tensor, Tensor] | None = None
    for part in x.split(at_once):
        images = part.shape[0] * part.shape[1]
        half = (waves.along @ part.reshape(images * height, axes[-1].pixels).mT).view(-1, 2, images, height)
        whole = torch.matmul(waves.real, half[:, 0].mT)
        whole.baddbmm_(waves.imaginary.expand(len(whole), -1, -1), half[:, 1].mT)
        z = whole.view(frequencies, 2 * part.shape[0], groups, channels).transpose(1, 2).flatten(0, 1)
        first, second = z.chunk(2, 1)
        if sums is None:
            sums = z.mT @ z, second.mT @ first
        else:
            sums[0].baddbmm_(z.mT, z)
            sums[1].baddbmm_(second.mT, first)
    assert sums is not None, "split yields at least one part"
    real, imaginary = sums
    differences = len(waves.cosines)
    odd = (waves.sines @ imaginary.view(frequencies, -1)).view(differences, groups, channels, channels)
    even = (waves.cosines @ real.view(frequencies, -1)).view(odd.shape)
    return even.add_(odd).sub_(odd.mT).transpose(0, 1)


def _by_gradient(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """As a weight gradient."""
    half = halved(axes)
    padding = [0 if i == half else axis.reach for i, axis in enumerate(axes)]
    dilation = [axis.dilation for axis in axes]
    taps = counts(axes)
    channels = x.shape[1] // groups
    if len(axes) == 1:
        x, padding, dilation, taps = x.unsqueeze(2), [0, *padding], [1, *dilation], [1, *taps]
    # Weight gradients are faster by a third with channels last, also of views such as a strip's.
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x = x.contiguous(memory_format=layout)
    later = _lengthened(x, half - len(axes), axes[half].reach, layout)
    result: Tensor = torch.ops.aten.convolution_backward(
        x,
        later,
        x.new_empty(x.shape[1], channels, *taps),
        None,
        [1] * len(taps),
        padding,
        dilation,
        False,
        [0] * len(taps),
        groups,
        (False, True, False),
    )[1]
    return result.reshape(groups, channels, channels, -1).permute(0, 3, 1, 2)


def _lengthened(x: Tensor, axis: int, zeros: int, layout: torch.memory_format) -> Tensor:
    """x with zeros at the end of one axis, in one pass over memory."""
    pixels = x.shape[axis]
    sizes = list(x.shape)
    sizes[axis] += zeros
    result = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=layout)
    result.narrow(axis, 0, pixels).copy_(x)
    result.narrow(axis, pixels, zeros).zero_()
    return result

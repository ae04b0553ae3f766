"""KFC's input factor of a convolution with stride 1 without its patches: correlations of the image with itself.

The factor is the sum over cases and places of patch patchᵀ. Were the image padded until no patch that sees a pixel is
missing, the element of kernel offsets k and k' would depend on k' − k only: a 3 × 3 kernel has 25 differences (13 up to
transposition) in place of 81 pairs, and all of them are one weight gradient of a convolution of the image with itself.
What that counts too much are the places of the additional padding: strips along the borders, which see few pixels and
not all of the kernel, that is, factors of smaller convolutions, to be taken away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
import torch.nn.functional as functional
from torch import Tensor

from natgrad.statistics.gram import accumulation_dtype

# The prices of `_price`, in multiply-adds of a good matrix product (measured on one AVX-512 core, float32): to copy an
# element into a patch or a layout, and to call an operator.
_COPY = 40
_CALL = 5_000_000
# Weight gradients of few channels a group cost as much as this many.
_CHANNELS = 16
# On the CPU patches are made for so few cases at a time that the memory of the last ones is used again: fresh pages for
# all at once took half as long as the product.
PATCH_ELEMENTS = 2**22


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


@dataclass(frozen=True)
class Strip:
    """What `axis` misses of being complete at one end: a convolution of the pixels there (`crop`) with the part
    `elements` of the kernel that can be on a pixel.
    """

    axis: Axis
    crop: slice
    elements: slice


def strips(axis: Axis) -> Iterator[Strip]:
    """The places of `axis.complete` that a visible `axis` has not: before its first and after its last."""
    for zeros, first in ((axis.before, True), (axis.after, False)):
        places = axis.reach - zeros
        if places <= 0:
            continue
        kernel = axis.kernel - (zeros // axis.dilation + 1)
        pixels = min(places, axis.pixels)
        # Towards the outside the first place has only its last element on a pixel. Inside, the last place ends at the
        # crop's last pixel, or beyond where the image is smaller than that.
        outside, inside = axis.dilation * (kernel - 1), places - pixels
        if first:
            part = Axis(pixels, kernel, axis.dilation, outside, inside)
            yield Strip(part, slice(0, pixels), slice(axis.kernel - kernel, None))
        else:
            part = Axis(pixels, kernel, axis.dilation, inside, outside)
            yield Strip(part, slice(axis.pixels - pixels, None), slice(0, kernel))


def missing(axes: tuple[Axis, ...]) -> Iterator[tuple[int, Strip, tuple[Axis, ...]]]:
    """The places that all axes complete would add, each once: (axis, strip along it, axes of the strip).

    Axes that come before the strip's are as they are, axes that come after it are complete.
    """
    for i, axis in enumerate(axes):
        for strip in strips(axis):
            yield i, strip, (*axes[:i], strip.axis, *(later.complete for later in axes[i + 1 :]))


def pays(x: Tensor, axes: tuple[Axis, ...], groups: int) -> bool:
    """Whether correlations are cheaper than patches for x, (N, C, *pixels).

    Batch 128, 3 × 3, padding 1, one core: 16 channels 32² 15 ms, patches 62 (105 with all of them at once); 32 channels
    16² 12, 57; 64 channels 8² 13, 57; an image of 3 channels, 32², 2.9, 6.5. Even: 64 channels 2², or 8² without
    padding; depthwise. Dearer: 1 × 1, and few cases (4 of 32 channels 8²: 1.2, 0.5). Convolutions in float64 are made
    of patches themselves (112, 57).
    """
    if x.dtype == torch.float64 or not axes:
        return False
    channels = x.shape[1] // groups
    cases = x.shape[0] * groups
    return _price(tuple(axis.visible for axis in axes), cases, channels, 0) < _patch_price(axes, cases, channels)


@lru_cache(maxsize=1024)
def _price(axes: tuple[Axis, ...], cases: int, channels: int, depth: int) -> int:
    """Of `correlated`, for all of a group's cases."""
    pixels = math.prod(axis.pixels for axis in axes)
    elements = math.prod(axis.kernel for axis in axes)
    each = max(channels, _CHANNELS) * math.prod(_taps(axes)) + 2 * _COPY
    total = cases * pixels * channels * each + _COPY * (channels * elements) ** 2 + 4 * _CALL
    for _, _, parts in missing(axes):
        price = _patch_price(parts, cases, channels)
        if depth < len(axes):
            price = min(price, _price(parts, cases, channels, depth + 1))
        total += price
    return total


def _patch_price(axes: tuple[Axis, ...], cases: int, channels: int) -> int:
    size = channels * math.prod(axis.kernel for axis in axes)
    return cases * math.prod(axis.places for axis in axes) * size * (size + _COPY) + 2 * _CALL


def second_moment(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """Sum over cases and places of patch patchᵀ: (N, C, *pixels) → (groups, n, n) with n = C / groups · kernel."""
    x = x.to(accumulation_dtype(x.dtype))
    return correlated(x, tuple(axis.visible for axis in axes), groups)


def patch_sums(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """Sum over cases and places of the patches: (N, C, *pixels) → (groups, C / groups · kernel)."""
    sums = _padded(x.sum(0, dtype=accumulation_dtype(x.dtype)), axes)
    for i, axis in enumerate(axes, 1):
        # Each element of the kernel slides over as many pixels as there are places.
        sums = sums.unfold(i, axis.places, 1).sum(-1)
        sums = sums[(slice(None),) * i + (slice(None, None, axis.dilation),)]
    return sums.reshape(groups, -1)


def correlated(x: Tensor, axes: tuple[Axis, ...], groups: int, depth: int = 0) -> Tensor:
    """`second_moment` for visible axes: all places that see a pixel, less those that are not there.

    A strip's own strips, at `depth` 1, are the corners where paddings are usual. Long kernels without padding have
    strips of strips as often as they have elements: further down there are patches only.
    """
    cases, channels = x.shape[0] * groups, x.shape[1] // groups
    kernel = [axis.kernel for axis in axes]
    moment = _all_pairs(_correlations(x, axes, groups), kernel)
    pairs = moment.view(groups, channels, *kernel, channels, *kernel)
    for i, strip, parts in missing(axes):
        part = x[(slice(None),) * (2 + i) + (strip.crop,)]
        patches = _patch_price(parts, cases, channels)
        if depth < len(axes) and _price(parts, cases, channels, depth + 1) < patches:
            less = correlated(part, parts, groups, depth + 1)
        else:
            less = _patch_moment(part, parts, groups)
        some = (slice(None),) * (1 + i) + (strip.elements,) + (slice(None),) * (len(axes) - 1 - i)
        where = pairs[(slice(None), *some, *some)]
        where.sub_(less.view(where.shape))
    return moment


def _taps(axes: Sequence[Axis]) -> list[int]:
    """How many differences of kernel offsets there are on each axis, without the negative ones on the axis that has
    most: they are transposes.
    """
    half = _halved(axes)
    return [axis.kernel if i == half else 2 * axis.kernel - 1 for i, axis in enumerate(axes)]


def _halved(axes: Sequence[Axis]) -> int:
    return max(range(len(axes)), key=lambda i: axes[i].kernel)


def _correlations(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """(groups, C / groups, C / groups, *(2 · kernel − 1)): for each difference d of offsets the sum over cases and
    pixels u of x[u] x[u + d]ᵀ.
    """
    half = _halved(axes)
    padding = [0 if i == half else axis.reach for i, axis in enumerate(axes)]
    dilation = [axis.dilation for axis in axes]
    taps = _taps(axes)
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
    sums = result.reshape(groups, channels, channels, *taps[-len(axes) :])
    negative = sums.narrow(3 + half, 1, axes[half].kernel - 1).flip(list(range(3, 3 + len(axes)))).transpose(1, 2)
    return torch.cat([negative, sums], dim=3 + half)


def _lengthened(x: Tensor, axis: int, zeros: int, layout: torch.memory_format) -> Tensor:
    """x with zeros at the end of one axis, in one pass over memory."""
    pixels = x.shape[axis]
    sizes = list(x.shape)
    sizes[axis] += zeros
    result = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=layout)
    result.narrow(axis, 0, pixels).copy_(x)
    result.narrow(axis, pixels, zeros).zero_()
    return result


def _all_pairs(correlations: Tensor, kernel: Sequence[int]) -> Tensor:
    """Correlations by difference k' − k → the matrix (groups, channels · k, channels · k')."""
    groups, channels = correlations.shape[:2]
    pairs = correlations.new_empty(groups, channels, *kernel, channels, *kernel)
    for element in product(*(range(size) for size in kernel)):
        differences = [slice(n - 1 - k, 2 * n - 1 - k) for k, n in zip(element, kernel, strict=True)]
        first: tuple[slice | int, ...] = (slice(None), slice(None), *element)
        pairs[first] = correlations[(slice(None),) * 3 + tuple(differences)]
    return pairs.flatten(1 + len(kernel) + 1).flatten(1, 1 + len(kernel))


def _patch_moment(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """`correlated` by patches, for strips too small for anything else."""
    size = x.shape[1] * math.prod(axis.kernel for axis in axes)
    at_once = max(1, PATCH_ELEMENTS // (size * math.prod(axis.places for axis in axes)))
    total = None
    for part in x.split(at_once):
        patches = _padded(part, axes)
        for i, axis in enumerate(axes, 2):
            patches = patches.unfold(i, axis.reach + 1, 1)[..., :: axis.dilation]
        ends = range(2 + len(axes), 2 + 2 * len(axes))
        rows = patches.permute(1, *ends, 0, *range(2, 2 + len(axes))).reshape(groups, size // groups, -1)
        moment = rows @ rows.mT
        total = moment if total is None else total.add_(moment)
    assert total is not None, "split yields at least one part"
    return total


def _padded(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Zeros around the last axes of x."""
    zeros = [amount for axis in reversed(axes) for amount in (axis.before, axis.after)]
    return functional.pad(x, zeros) if any(zeros) else x

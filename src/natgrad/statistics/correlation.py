"""KFC's input factor of a convolution with stride 1 without its patches: correlations of the image with itself.

The factor is the sum over cases and places of patch patchᵀ. Were the image padded until no patch that sees a pixel is
missing, the element of kernel offsets k and k' would depend on k' − k only: a 3 × 3 kernel has 25 differences (13 up to
transposition) in place of 81 pairs. What that counts too much are the places of the additional padding: strips along
the borders, which see few pixels and not all of the kernel, that is, factors of smaller convolutions, to be taken away.

The correlations themselves come in one of three ways (`Way`), whichever is cheapest: products of shifted copies, the
weight gradient of a convolution of the image with itself, or products of Fourier coefficients, one a frequency instead
of one a difference and pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from itertools import groupby, product

import torch
import torch.nn.functional as functional
from torch import Tensor

from natgrad import processor
from natgrad.statistics.gram import accumulation_dtype

# The prices of `price`, in multiply-adds of a good matrix product (measured on one AVX-512 core, float32): to copy an
# element into a patch or a layout, and to call an operator.
COPY = 40
CALL = 5_000_000
# Weight gradients of few channels a group cost as much as this many.
_CHANNELS = 16
# A multiply-add of a weight gradient where products are slow, see `_gradient_price`. On an AMD EPYC with AVX-512 the
# way that is chosen is at most a tenth slower than the best one for 30 of 33 shapes, and on average by 2 %; with 1 for
# 14, and by 47 %.
_FAST_GRADIENT = 0.36
# On the CPU patches are made for so few cases at a time that the memory of the last ones is used again: fresh pages for
# all at once took half as long as the product.
PATCH_ELEMENTS = 2**22
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


def missing(axes: tuple[Axis, ...]) -> Iterator[tuple[int, tuple[Strip, ...], tuple[Axis, ...]]]:
    """The places that all axes complete would add, each once: (axis, strips along it, axes of each of these strips).

    Axes that come before the strips' are as they are, axes that come after it are complete. Opposite strips come
    together where they are alike.
    """
    for i, axis in enumerate(axes):
        for own, alike in groupby(strips(axis), key=lambda strip: strip.axis):
            yield i, tuple(alike), (*axes[:i], own, *(later.complete for later in axes[i + 1 :]))


class Way(Enum):
    """How correlations are made."""

    SHIFTED = "products of shifted copies"
    GRADIENT = "the weight gradient of a convolution"
    SPECTRAL = "products of Fourier coefficients"


def pays(x: Tensor, axes: tuple[Axis, ...], groups: int) -> bool:
    """Whether correlations are cheaper than patches for x, (N, C, *pixels).

    Batch 128, 3 × 3, padding 1, one core: 16 channels 32² 11 ms, patches 62 (105 with all of them at once); 32 channels
    16² 6.5, 57; 64 channels 8² 5.6, 57. Dearer: 1 × 1, and few cases. Not in float64, where only the weight gradient
    has been measured (112, 57).
    """
    if x.dtype == torch.float64 or not axes:
        return False
    channels = x.shape[1] // groups
    cases = x.shape[0] * groups
    return price(tuple(axis.visible for axis in axes), cases, channels, 0) < _patch_price(axes, cases, channels)


@lru_cache(maxsize=1024)
def price(axes: tuple[Axis, ...], cases: int, channels: int, depth: int) -> int:
    """Of `correlated`, for all of a group's cases."""
    elements = math.prod(axis.kernel for axis in axes)
    total = min(price for price, _ in _ways(axes, cases, channels))
    total += COPY * (channels * elements) ** 2 + 2 * CALL
    if depth == 0 and are_narrow(axes):
        total += len(_half(axes)) * (channels * elements) ** 2
        for border in borders(axes):
            own = len(border.members) * cases
            total += min(price for price, _ in _ways(border.axes, own, channels)) if border.axes else CALL
            total += len(border.members) * len(_half(border.axes)) * (channels * elements) ** 2
        return total
    for _, alike, parts in missing(axes):
        total += min(price for price, _ in _strip_ways(parts, len(alike) * cases, channels, depth))
    return total


def _ways(axes: tuple[Axis, ...], cases: int, channels: int) -> list[tuple[int, Way]]:
    """What `_correlations` cost, either way."""
    wide = max(channels, _CHANNELS)
    taps = math.prod(2 * axis.kernel - 1 for axis in axes)
    lengthened = cases * channels * math.prod(axis.pixels + axis.reach for axis in axes)
    shifted = lengthened * ((taps // 2 + 1) * wide + COPY) + (4 + taps // 2) * CALL // 5
    pixels = cases * channels * math.prod(axis.pixels for axis in axes)
    gradient = round(pixels * (wide * math.prod(_taps(axes)) + 2 * COPY) * _gradient_price()) + 2 * CALL
    found = [(shifted, Way.SHIFTED), (gradient, Way.GRADIENT)]
    if len(axes) <= 2:
        rows, columns = _periods(axes)
        height = axes[0].pixels if len(axes) == 2 else 1
        transforms = columns * (height * (axes[-1].pixels + COPY) + rows * (2 * height + COPY))
        products = rows * columns * (3 * wide // 2)
        sums = rows * columns * channels**2  # real and imaginary ones
        passes = -(-cases * channels * rows * columns // SPECTRUM_ELEMENTS)
        back = sums * (math.prod(_taps(axes)) + passes * COPY // 2)
        found.append((cases * channels * (transforms + products) + back + 2 * CALL, Way.SPECTRAL))
    return found


@cache
def _gradient_price() -> float:
    """Of a multiply-add of a weight gradient, in those of a product. MKL, which makes products, keeps AVX-512 to its
    maker's own processors; oneDNN, which makes weight gradients, uses it on all.
    """
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return _FAST_GRADIENT if wide and processor.entry("vendor_id") == "AuthenticAMD" else 1.0


def _strip_ways(axes: tuple[Axis, ...], cases: int, channels: int, depth: int) -> list[tuple[int, bool]]:
    """What a strip costs, and whether that is by correlations.

    A strip's own strips, at `depth` 1, are the corners where paddings are usual. Long kernels without padding have
    strips of strips as often as they have elements: further down there are patches only.
    """
    found = [(_patch_price(axes, cases, channels), False)]
    if depth < len(axes):
        found.append((price(axes, cases, channels, depth + 1), True))
    return found


def _patch_price(axes: tuple[Axis, ...], cases: int, channels: int) -> int:
    size = channels * math.prod(axis.kernel for axis in axes)
    return cases * math.prod(axis.places for axis in axes) * size * (size + COPY) + 2 * CALL


def second_moment(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """Sum over cases and places of patch patchᵀ: (N, C, *pixels) → (groups, n, n) with n = C / groups · kernel."""
    x = x.to(accumulation_dtype(x.dtype))
    pairs = correlated(x, tuple(axis.visible for axis in axes), groups)
    size = pairs.shape[1] * pairs.shape[3]
    return pairs.permute(0, 3, 1, 4, 2).reshape(groups, size, size)


def patch_sums(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """Sum over cases and places of the patches: (N, C, *pixels) → (groups, C / groups · kernel)."""
    sums = _padded(x.sum(0, dtype=accumulation_dtype(x.dtype)), axes)
    for i, axis in enumerate(axes, 1):
        # Each element of the kernel slides over as many pixels as there are places.
        sums = sums.unfold(i, axis.places, 1).sum(-1)
        sums = sums[(slice(None),) * i + (slice(None, None, axis.dilation),)]
    return sums.reshape(groups, -1)


def correlated(x: Tensor, axes: tuple[Axis, ...], groups: int, depth: int = 0) -> Tensor:
    """`second_moment` for visible axes, as (groups, kernel, kernel, C / groups, C / groups): all places that see a
    pixel, less those that are not there.
    """
    if depth == 0 and are_narrow(axes):
        return _with_borders(x, axes, groups)
    cases, channels = x.shape[0] * groups, x.shape[1] // groups
    kernel = tuple(axis.kernel for axis in axes)
    found = _correlations(x, axes, groups).index_select(1, _differences(kernel, x.device))
    elements = math.prod(kernel)
    by_element = found.view(groups, *kernel, *kernel, channels, channels)
    for i, alike, parts in missing(axes):
        crops = [x[(slice(None),) * (2 + i) + (strip.crop,)] for strip in alike]
        part = crops[0] if len(crops) == 1 else torch.cat(crops, 1)
        _, again = min(_strip_ways(parts, len(alike) * cases, channels, depth))
        make = correlated if again else _patch_moment
        less = make(part, parts, groups * len(alike), depth + 1)
        for strip, one in zip(alike, less.split(groups), strict=True):
            some = (slice(None),) * i + (strip.elements,) + (slice(None),) * (len(axes) - 1 - i)
            where = by_element[(slice(None), *some, *some)]
            where.sub_(one.reshape(where.shape))
    return found.view(groups, elements, elements, channels, channels)


@lru_cache(maxsize=64)
def _differences(kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """For all pairs of kernel elements k and k' where k' − k is among the differences, all axes flattened."""
    index = torch.zeros((), dtype=torch.int64).expand([1] * 2 * len(kernel))
    for i, size in enumerate(kernel):
        elements = torch.arange(size)
        own = elements - elements[:, None] + size - 1
        shape = [size if axis in (i, len(kernel) + i) else 1 for axis in range(2 * len(kernel))]
        index = index * (2 * size - 1) + own.view(shape)
    return index.flatten().to(device)


@dataclass(frozen=True)
class Border:
    """Parts of the image that places beyond it see with one kernel element an axis: faces, edges, corners. `axes` are
    those along which they run, complete; each of `members` is where it is in the image, by axis: the index of a pixel,
    and of the kernel's element that can be on it, or None.
    """

    axes: tuple[Axis, ...]
    members: tuple[tuple[tuple[int, int] | None, ...], ...]


def are_narrow(axes: tuple[Axis, ...]) -> bool:
    """Whether what visible axes miss of being complete sees one pixel with one element, at each of their ends."""
    return all((strip.axis.pixels, strip.axis.kernel) == (1, 1) for axis in axes for strip in strips(axis))


@lru_cache(maxsize=1024)
def borders(axes: tuple[Axis, ...]) -> tuple[Border, ...]:
    """Of narrow axes. Those that run along equal axes come together."""
    found: dict[tuple[Axis, ...], list[tuple[tuple[int, int] | None, ...]]] = {}
    ends = [(None, *((strip.crop.start, strip.elements.start) for strip in strips(axis))) for axis in axes]
    for member in product(*ends):
        along = tuple(axis.complete for axis, end in zip(axes, member, strict=True) if end is None)
        if any(end is not None for end in member):
            found.setdefault(along, []).append(member)
    return tuple(Border(along, tuple(members)) for along, members in found.items())


def _with_borders(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """`correlated` for narrow axes. A place is there where none of its axes is beyond the image: the sum over complete
    axes, less that along each border, plus that along each border of a border. One product adds all of them up.
    """
    cases, channels = x.shape[0], x.shape[1] // groups
    sums = _with_transposes(_halves(x, axes, groups), axes, groups)
    for border in borders(axes):
        parts = [x[(..., *(slice(None) if end is None else end[0] for end in member))] for member in border.members]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if border.axes:
            found = _halves(part, border.axes, len(parts) * groups)
        else:
            rows = part.view(cases, len(parts) * groups, channels).permute(1, 2, 0)
            found = (rows @ rows.mT).unsqueeze(1)
        sums += _with_transposes(found, border.axes, groups)
    # Channels first: the factor's order, (channel, element) twice, is then that of memory nearly.
    together = torch.cat(sums, 1).flatten(2).mT @ _signs(axes, x.dtype, x.device)
    elements = math.prod(axis.kernel for axis in axes)
    return together.view(groups, channels, channels, elements, elements).permute(0, 3, 4, 1, 2)


def _with_transposes(found: Tensor, axes: Sequence[Axis], groups: int) -> list[Tensor]:
    """`_halves` of some members, and the transposes that they lack, each as (groups, members · differences, ...)."""
    both = [found, found[:, _own(axes) :].mT] if axes else [found]
    return [part.unflatten(0, (-1, groups)).transpose(0, 1).flatten(1, 2) for part in both]


@lru_cache(maxsize=64)
def _signs(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """How often each sum of `_with_borders` counts for each pair of kernel elements, (sums, kernel²)."""
    whole: tuple[None, ...] = (None,) * len(axes)
    columns: dict[tuple[tuple[tuple[int, int] | None, ...], tuple[int, ...]], int] = {}
    for along, members in ((axes, (whole,)), *((border.axes, border.members) for border in borders(axes))):
        half = _half(along)
        for some in (half, [tuple(-d for d in difference) for difference in half[_own(along) :]] if along else []):
            columns |= {pair: len(columns) + number for number, pair in enumerate(product(members, some))}
    result = torch.zeros(len(columns), *2 * [axis.kernel for axis in axes], dtype=dtype)
    for (member, difference), column in columns.items():
        ranges, left = [], list(difference)
        for axis, end in zip(axes, member, strict=True):
            if end is None:
                d = left.pop(0)
                ranges.append([(k, k + d) for k in range(max(0, -d), axis.kernel - max(0, d))])
            else:
                ranges.append([(end[1], end[1])])
        for pairs in product(*ranges):
            first, second = zip(*pairs, strict=True)
            result[(column, *first, *second)] = (-1) ** (len(axes) - len(difference))
    return result.flatten(1).to(device)


def _own(axes: Sequence[Axis]) -> int:
    """How many of `_half` are there with their negative ones: they come first."""
    return len(_half(axes)) // axes[_halved(axes)].kernel


def _half(axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """Differences of kernel offsets, without the negative ones on the first axis that has any: they are transposes."""
    if not axes:
        return [()]
    half = _halved(axes)
    ranges = [range(0 if i == half else 1 - axis.kernel, axis.kernel) for i, axis in enumerate(axes)]
    return list(product(*ranges))


def _taps(axes: Sequence[Axis]) -> list[int]:
    """How many of them there are on each axis."""
    half = _halved(axes)
    return [axis.kernel if i == half else 2 * axis.kernel - 1 for i, axis in enumerate(axes)]


def _halved(axes: Sequence[Axis]) -> int:
    return next((i for i, axis in enumerate(axes) if axis.kernel > 1), 0)


def _correlations(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """(groups, differences, C / groups, C / groups): for each difference d of offsets, 2 · kernel − 1 an axis, the sum
    over cases and pixels u of x[u] x[u + d]ᵀ.
    """
    found = _halves(x, axes, groups)
    half, channels = _halved(axes), found.shape[-1]
    sums = found.view(groups, *_taps(axes), channels, channels)
    negative = sums.narrow(1 + half, 1, axes[half].kernel - 1).flip(list(range(1, 1 + len(axes)))).mT
    return torch.cat([negative, sums], dim=1 + half).flatten(1, len(axes))


def _halves(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """The same for the differences in `_half`."""
    _, way = min(_ways(axes, x.shape[0] * groups, x.shape[1] // groups), key=lambda one: one[0])
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
    half = {difference: number for number, difference in enumerate(_half(axes))}
    result = x.new_empty(groups, len(half), channels, channels)
    for difference, number in half.items():
        transpose = half.get(tuple(-d for d in difference), number)
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
        turns = 2 * torch.arange(period // 2) + 1 if odd else 2 * torch.arange(period)
        return ((turns[:, None] * places) % (2 * period)).double() * (math.pi / period)

    def interleaved(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], 1).flatten(0, 1)

    first = axes[0] if len(axes) == 2 else Axis(1, 1, 1, 0, 0)
    offsets = torch.tensor([(0, *difference)[-2:] for difference in _half(axes)])
    offsets = offsets * torch.tensor([first.dilation, axes[-1].dilation])
    along = angles(True, torch.arange(axes[-1].pixels))
    across = angles(False, torch.arange(first.pixels))
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
        half = (waves.along @ part.reshape(images * height, -1).mT).view(-1, 2, images, height)
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


def _patch_moment(x: Tensor, axes: tuple[Axis, ...], groups: int, depth: int = 0) -> Tensor:
    """`correlated` by patches, for strips too small for anything else."""
    size = x.shape[1] * math.prod(axis.kernel for axis in axes)
    at_once = max(1, PATCH_ELEMENTS // (size * math.prod(axis.places for axis in axes)))
    total = None
    for part in x.split(at_once):
        patches = _padded(part, axes)
        for i, axis in enumerate(axes, 2):
            patches = patches.unfold(i, axis.reach + 1, 1)[..., :: axis.dilation]
        ends = range(2 + len(axes), 2 + 2 * len(axes))
        places = range(3, 3 + len(axes))
        patches = patches.unflatten(1, (groups, -1)).permute(1, *(end + 1 for end in ends), 2, 0, *places)
        rows = patches.reshape(groups, size // groups, -1)
        moment = rows @ rows.mT
        total = moment if total is None else total.add_(moment)
    assert total is not None, "split yields at least one part"
    channels, elements = x.shape[1] // groups, size // x.shape[1]
    by_element: Tensor = total.view(groups, elements, channels, elements, channels).transpose(2, 3)
    return by_element


def _padded(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Zeros around the last axes of x."""
    zeros = [amount for axis in reversed(axes) for amount in (axis.before, axis.after)]
    return functional.pad(x, zeros) if any(zeros) else x

"""KFC's input factor of a convolution with stride 1 without its patches: correlations of the image with itself.

The factor is the sum over cases and places of patch patchᵀ. Were the image padded until no patch that sees a pixel is
missing, the element of kernel offsets k and k' would depend on k' − k only: a 3 × 3 kernel has 25 differences (13 up to
transposition) in place of 81 pairs. What that counts too much are the places of the additional padding: strips along
the borders, which see few pixels and not all of the kernel, that is, factors of smaller convolutions, to be taken away.

Where each strip is one row of pixels under one row of the kernel, as with 3 × 3 and padding 1, what is taken away are
correlations too, of the borders, and one product with a small matrix adds all of them up (`Border`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product

import torch
import torch.nn.functional as functional
from torch import Tensor

from natgrad.launches import HOST
from natgrad.statistics import ways
from natgrad.statistics.gram import accumulation_dtype
from natgrad.statistics.ways import Axis

# On the CPU patches are made for so few cases at a time that the memory of the last ones is used again: fresh pages for
# all at once took half as long as the product.
PATCH_ELEMENTS = 2**22
# Elements of the matrix that adds borders up, which grows with the cube of the kernel: 3 × 3 × 3's is as large as this.
# That of a signal's kernel of 600 elements would be 1.7 GB.
_SIGNS = 2**18


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


def price(axes: tuple[Axis, ...], cases: int, channels: int, depth: int) -> int:
    """Of `correlated`, for all of a group's cases."""
    return cheapest(axes, cases, channels, depth)[0]


@lru_cache(maxsize=1024)
def cheapest(axes: tuple[Axis, ...], cases: int, channels: int, depth: int) -> tuple[int, bool]:
    """What `correlated` costs, and whether that is with borders added up: sums of few channels are small."""
    squared = (channels * math.prod(axis.kernel for axis in axes)) ** 2
    always = ways.price(axes, cases, channels) + ways.COPY * squared + 2 * ways.CALL
    strip_prices = (
        min(price for price, _ in _strip_ways(parts, len(alike) * cases, channels, depth))
        for _, alike, parts in missing(axes)
    )
    if depth > 0 or not are_narrow(axes):
        return always + sum(strip_prices), False
    by_borders = _sums(axes) * squared
    by_borders += sum(ways.price(border.axes, len(border.members) * cases, channels) for border in borders(axes))
    return min((always + by_borders, True), (always + sum(strip_prices), False))


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
    return cases * math.prod(axis.places for axis in axes) * size * (size + ways.COPY) + 2 * ways.CALL


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
    cases, channels = x.shape[0] * groups, x.shape[1] // groups
    _, by_borders = cheapest(axes, cases, channels, depth)
    if by_borders:
        return _with_borders(x, axes, groups)
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
    index = torch.zeros((), dtype=torch.int64, device=HOST).expand([1] * 2 * len(kernel))
    for i, size in enumerate(kernel):
        elements = torch.arange(size, device=HOST)
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
    """Whether what visible axes miss of being complete sees one pixel with one element, at each of their ends, and the
    kernel is small enough for `_with_borders`. Complete axes miss nothing.
    """
    if _sums(axes) * math.prod(axis.kernel for axis in axes) ** 2 > _SIGNS:
        return False
    return all((strip.axis.pixels, strip.axis.kernel) == (1, 1) for axis in axes for strip in strips(axis))


def _sums(axes: tuple[Axis, ...]) -> int:
    """How many sums `_with_borders` adds up for each pair of channels: on each axis all differences, and the ends."""
    return math.prod(2 * axis.kernel - 1 + len(list(strips(axis))) for axis in axes)


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
    sums = _with_transposes(ways.correlations(x, axes, groups), axes, groups)
    for border in borders(axes):
        parts = [x[(..., *(slice(None) if end is None else end[0] for end in member))] for member in border.members]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if border.axes:
            found = ways.correlations(part, border.axes, len(parts) * groups)
        else:
            rows = part.view(cases, len(parts) * groups, channels).permute(1, 2, 0)
            found = (rows @ rows.mT).unsqueeze(1)
        sums += _with_transposes(found, border.axes, groups)
    # Channels first: the factor's order, (channel, element) twice, is then that of memory nearly.
    together = torch.cat(sums, 1).flatten(2).mT @ _signs(axes, x.dtype, x.device)
    elements = math.prod(axis.kernel for axis in axes)
    return together.view(groups, channels, channels, elements, elements).permute(0, 3, 4, 1, 2)


def _with_transposes(found: Tensor, axes: Sequence[Axis], groups: int) -> list[Tensor]:
    """`ways.correlations` of a border's members, and those of the negative differences that are not among them, each as
    (groups, members · differences, C / groups, C / groups).
    """
    both = (found, found[:, ways.paired(axes) :].mT)
    return [part.unflatten(0, (-1, groups)).transpose(0, 1).flatten(1, 2) for part in both]


@lru_cache(maxsize=64)
def _signs(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """How often each sum of `_with_borders` counts for each pair of kernel elements, (sums, kernel²)."""
    whole: tuple[None, ...] = (None,) * len(axes)
    columns: dict[tuple[tuple[tuple[int, int] | None, ...], tuple[int, ...]], int] = {}
    for along, members in ((axes, (whole,)), *((border.axes, border.members) for border in borders(axes))):
        found = ways.differences(along)
        transposed = [tuple(-d for d in difference) for difference in found[ways.paired(along) :]]
        for some in (found, transposed):
            columns |= {pair: len(columns) + number for number, pair in enumerate(product(members, some))}
    result = torch.zeros(len(columns), *2 * [axis.kernel for axis in axes], dtype=dtype, device=HOST)
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


def _correlations(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """(groups, differences, C / groups, C / groups): for each difference d of offsets, 2 · kernel − 1 an axis, the sum
    over cases and pixels u of x[u] x[u + d]ᵀ.
    """
    found = ways.correlations(x, axes, groups)
    axis, channels = ways.halved(axes), found.shape[-1]
    sums = found.view(groups, *ways.counts(axes), channels, channels)
    negative = sums.narrow(1 + axis, 1, axes[axis].kernel - 1).flip(list(range(1, 1 + len(axes)))).mT
    return torch.cat([negative, sums], dim=1 + axis).flatten(1, len(axes))


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

"""The operations that use a weight, and the factors that one use contributes.

Each operation turns what autograd saved (`saved`: the activation, mostly) and what backward delivers (the derivative)
into sums over rows: `input_factors` are sums of a aᵀ, `output_factor` is the sum of g gᵀ, all as stacks (a stack
entry per group or head). The scale that makes a Fisher block of them is the business of `natgrad.blocks`.

A row is a place or token (*expand*), or a whole case (*reduce*: activations averaged and derivatives summed over its
places; Ba et al. 2017, Appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from natgrad.launches import COUNTABLE, HOST
from natgrad.statistics import correlation, gpu, phases
from natgrad.statistics.combs import combs
from natgrad.statistics.gram import accumulation_dtype, bordered, second_moment
from natgrad.statistics.rank_one import rank_one
from natgrad.statistics.ways import Axis

# Patches are made for as many cases at a time as fit here, so that a factor step needs little memory beyond
# training's own.
_PATCH_ELEMENTS = 2**26
# Elements of patches, of images with few channels, that a GPU's kernels make for themselves: those of small images.
_FEW_PATCHES = 2**23


class Operation(Protocol):
    """One kind of use of a parameter."""

    @property
    def diagonal_input(self) -> bool:
        """Whether the input factor is diagonal by nature (one-hot activations)."""

    @property
    def keeps_saved(self) -> bool:
        """Whether `output_factor` looks at what autograd saved."""

    @property
    def kind(self) -> str:
        """The name for the report."""

    def rows(self, saved: Sequence[Tensor], derivative: Tensor) -> int | Tensor:
        """How many (activation, derivative) pairs there are per stack entry; a tensor where only the device knows."""

    def input_factors(self, saved: Sequence[Tensor], *, homogeneous: bool, diagonal: Sequence[bool]) -> list[Tensor]:
        """For each column side the sum over rows of a aᵀ, with a 1 appended to each a where the use adds a bias."""

    def output_factor(self, derivative: Tensor, saved: Sequence[Tensor], *, diagonal: bool) -> Tensor:
        """Sum over rows of g gᵀ."""

    def part(
        self, derivative: Tensor, saved: Sequence[Tensor], fraction: float
    ) -> tuple[Operation, Tensor, Sequence[Tensor]]:
        """The same use of a part of the batch, without copying it; the whole, where a part would save little or cannot
        be told from the rest.
        """


@dataclass(frozen=True)
class Product:
    """A matrix product with the weight on the right (x W) or on the left (W x), possibly one per stack entry.

    `leading` is the shape of the rows before they were flattened. With `case_axis`, an axis of it, a row is a case.
    `feature_map` splits the inputs into two axes whose second moments are kept apart (doubly factored).
    """

    weight_on_left: bool = False
    stacked: bool = False
    leading: tuple[int, ...] = ()
    case_axis: int | None = None
    feature_map: tuple[int, int] | None = None

    diagonal_input = False
    keeps_saved = False

    @property
    def kind(self) -> str:
        """See `Operation`."""
        return "linear" if self.feature_map is None else "linear, doubly factored"

    def _rows(self, tensor: Tensor) -> Tensor:
        """→ (stack, R, n)."""
        rows = tensor.mT if self.weight_on_left else tensor
        return rows if self.stacked else rows.reshape(1, -1, rows.shape[-1])

    def _cases(self, rows: Tensor) -> Tensor:
        """(stack, R, n) → sums over the places of each case, (stack, cases, n)."""
        if len(self.leading) == 1 or self.case_axis is None:
            return rows
        spread = rows.reshape(rows.shape[0], *self.leading, rows.shape[-1])
        others = [1 + axis for axis in range(len(self.leading)) if axis != self.case_axis]
        return spread.sum(others, dtype=accumulation_dtype(rows.dtype))

    def rows(self, saved: Sequence[Tensor], derivative: Tensor) -> int:
        """See `Operation`."""
        return self._rows(saved[0]).shape[1] if self.case_axis is None else self.leading[self.case_axis]

    def input_factors(self, saved: Sequence[Tensor], *, homogeneous: bool, diagonal: Sequence[bool]) -> list[Tensor]:
        """See `Operation`."""
        rows = self._rows(saved[0])
        if self.feature_map is not None:
            maps = rows.reshape(-1, *self.feature_map)
            return [second_moment(v[None], diagonal=d) for v, d in zip(rank_one(maps), diagonal, strict=True)]
        if self.case_axis is not None and len(self.leading) > 1:
            rows = self._cases(rows) / (math.prod(self.leading) // self.leading[self.case_axis])
        return [second_moment(rows, homogeneous=homogeneous, diagonal=diagonal[0])]

    def output_factor(self, derivative: Tensor, saved: Sequence[Tensor], *, diagonal: bool) -> Tensor:
        """See `Operation`."""
        return second_moment(self._cases(self._rows(derivative)), diagonal=diagonal)

    def part(
        self, derivative: Tensor, saved: Sequence[Tensor], fraction: float
    ) -> tuple[Operation, Tensor, Sequence[Tensor]]:
        """See `Operation`. Every so many rows, so that neither early places nor early cases are all there is."""
        if self.weight_on_left or self.stacked or self.case_axis is not None or self.feature_map is not None:
            return self, derivative, saved
        every = max(1, round(1 / fraction))
        rows, *rest = (tensor.reshape(-1, tensor.shape[-1])[::every] for tensor in (derivative, saved[0]))
        return self, rows, rest


@dataclass(frozen=True)
class Convolution:
    """A convolution of any dimension, transposed or not; circular and "same" padding reach it already applied to the
    input. With `reduced` a row is a case, not a place.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    reduced: bool = False

    diagonal_input = False
    keeps_saved = False

    @property
    def kind(self) -> str:
        """See `Operation`."""
        return "transposed convolution" if self.transposed else "convolution"

    def places(self, size: torch.Size) -> tuple[int, ...]:
        """Output places per spatial axis for an input of shape (N, C, *spatial)."""
        geometry = zip(
            size[2:], self.kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True
        )
        if self.transposed:
            return tuple((n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in geometry)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in geometry)

    def rows(self, saved: Sequence[Tensor], derivative: Tensor) -> int:
        """See `Operation`."""
        cases, size = saved[0].shape[0], saved[0].shape
        return cases if self.reduced else cases * math.prod(self.places(size))

    def _patch_view(self, x: Tensor) -> Tensor:
        """→ a view (groups, N, C / groups, *places, *kernel) of the padded input."""
        x = _padded(x, [(p, p) for p in self.padding])
        cases, channels = x.shape[:2]
        places = [
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        ]
        per_group = channels // self.groups
        spatial = x.stride()[2:]
        return x.as_strided(
            (self.groups, cases, per_group, *places, *self.kernel),
            (
                per_group * x.stride(1),
                x.stride(0),
                x.stride(1),
                *(t * s for t, s in zip(spatial, self.stride, strict=True)),
                *(t * d for t, d in zip(spatial, self.dilation, strict=True)),
            ),
            x.storage_offset(),
        )

    def _chunks(self, x: Tensor) -> Iterator[Tensor]:
        per_case = x.shape[1] * math.prod(self.kernel) * math.prod(self.places(x.shape))
        most = correlation.PATCH_ELEMENTS if x.device.type == "cpu" else _PATCH_ELEMENTS
        yield from x.split(max(1, most // max(1, per_case)))

    def input_factors(self, saved: Sequence[Tensor], *, homogeneous: bool, diagonal: Sequence[bool]) -> list[Tensor]:
        """See `Operation`."""
        if self.reduced:
            return [second_moment(self._mean_patches(saved[0]), homogeneous=homogeneous, diagonal=diagonal[0])]
        if diagonal[0]:
            return [self._diagonal(saved[0], homogeneous=homogeneous)]
        if self.fits_gpu(saved[0]):
            return [self._gpu_factor(saved[0], homogeneous=homogeneous)]
        if saved[0].device.type == "cpu" and self._correlates(saved[0]):
            return [self._correlated(saved[0], homogeneous=homogeneous)]
        if self.transposed:
            return [self._combed(saved[0], homogeneous=homogeneous)]
        total = None
        for part in self._chunks(saved[0]):
            moment = self._chunk_factor(part, homogeneous=homogeneous)
            total = moment if total is None else total.add_(moment)
        assert total is not None, "split yields at least one chunk"
        return [total]

    def fits_gpu(self, x: Tensor) -> bool:
        """Whether its inputs are for `natgrad.statistics.gpu`."""
        if self.transposed or not gpu.takes(x):
            return False
        # Patches of an image's three colours are small, and its memory is read in pieces that are smaller still; where
        # there are not many of them, to launch what makes them takes longer.
        elements = math.prod(self.kernel)
        if x.shape[1] < 8 and elements > 1:
            patches = x.shape[0] * math.prod(self.places(x.shape)) * x.shape[1] * elements
            if patches > _FEW_PATCHES:
                return False
        return self.groups * (x.shape[1] // self.groups * math.prod(self.kernel)) ** 2 < COUNTABLE

    def _gpu_factor(self, x: Tensor, *, homogeneous: bool) -> Tensor:
        (k, m), (s, t), (p, q), (d, e) = self.kernel, self.stride, self.padding, self.dilation
        moment = gpu.moment_of_places(
            x, groups=self.groups, kernel=(k, m), stride=(s, t), padding=(p, q), dilation=(d, e)
        )
        if not homogeneous:
            return moment
        count = x.shape[0] * math.prod(self.places(x.shape))
        return bordered(moment, self._summed_patches(x).sum(1), count)

    def _axes(self, x: Tensor) -> tuple[Axis, ...]:
        geometry = zip(x.shape[2:], self.kernel, self.dilation, self.padding, self.padding, strict=True)
        return tuple(Axis(*numbers) for numbers in geometry)

    def _phased(self, x: Tensor) -> tuple[phases.Phased, ...]:
        geometry = zip(x.shape[2:], self.kernel, self.stride, self.padding, strict=True)
        return tuple(phases.Phased(*numbers) for numbers in geometry)

    def _correlates(self, x: Tensor) -> bool:
        """Whether the factor is cheaper without patches. Not asked on a GPU, where it would be sixty launches."""
        if self.transposed:
            return False
        if all(stride == 1 for stride in self.stride):
            return correlation.pays(x, self._axes(x), self.groups)
        plain = all(dilation == 1 for dilation in self.dilation)
        return plain and phases.pays(x, self._phased(x), self.groups)

    def _correlated(self, x: Tensor, *, homogeneous: bool) -> Tensor:
        if all(stride == 1 for stride in self.stride):
            moment = correlation.second_moment(x, axes := self._axes(x), self.groups)
            sums = correlation.patch_sums(x, axes, self.groups) if homogeneous else None
        else:
            moment = phases.second_moment(x, self._phased(x), self.groups)
            sums = self._summed_patches(x).sum(1) if homogeneous else None
        count = x.shape[0] * math.prod(self.places(x.shape))
        return moment if sums is None else bordered(moment, sums, count)

    def _combed(self, x: Tensor, *, homogeneous: bool) -> Tensor:
        """The factor of a transposed convolution from those of its combs; other elements never meet.

        4 × 4 with stride 2, two cores: batch 64, 64 channels of 16² 19 ms, patches 545; 256 channels of 4² 86, 621. And
        2 × 2 with stride 2, batch 16, 64 channels of 32² 1.3, 55.
        """
        channels, elements = x.shape[1] // self.groups, math.prod(self.kernel)
        dtype = accumulation_dtype(x.dtype)
        moment = x.new_zeros(self.groups, channels, elements, channels, elements, dtype=dtype)
        pairs = moment.permute(2, 4, 0, 1, 3)
        for comb in _all_combs(self, x.shape[2:], x.device):
            own = comb.convolution.input_factors([_padded(x, comb.margins)], homogeneous=False, diagonal=[False])[0]
            size = math.prod(comb.convolution.kernel)
            own = own.view(self.groups, channels, size, channels, size).permute(2, 4, 0, 1, 3)
            pairs[comb.elements[:, :, None], comb.elements[:, None, :]] = own
        moment = moment.view(self.groups, channels * elements, channels * elements)
        if not homogeneous:
            return moment
        return bordered(moment, self._summed_patches(x).sum(1), x.shape[0] * math.prod(self.places(x.shape)))

    def _diagonal(self, x: Tensor, *, homogeneous: bool) -> Tensor:
        """The diagonal of the factor, (groups, n): squares, summed as pixels are."""
        squares = self._summed_patches(x.to(accumulation_dtype(x.dtype)).square()).sum(1)
        if not homogeneous:
            return squares
        count = x.shape[0] * math.prod(self.places(x.shape))
        return torch.cat([squares, squares.new_full((self.groups, 1), count)], dim=1)

    def _mean_patches(self, x: Tensor) -> Tensor:
        """Each case's patches, averaged over places: (groups, N, C / groups · kernel)."""
        return self._summed_patches(x) / math.prod(self.places(x.shape))

    def _summed_patches(self, x: Tensor) -> Tensor:
        """Each case's patches, summed over places: (groups, N, C / groups · kernel), without making a patch.

        Kernel element k sees pixel i at as many places as `visits` says, so that the sum over places is one small
        product with the pixels.
        """
        cases, channels, *size = x.shape
        dtype = accumulation_dtype(x.dtype)
        if all(k == 1 and p == 0 for k, p in zip(self.kernel, self.padding, strict=True)) and not self.transposed:
            strides = [slice(None, None, stride) for stride in self.stride]
            seen = x[(slice(None), slice(None), *strides)]
            sums = seen.sum(list(range(2, x.dim())), dtype=dtype)
        else:
            visits = _all_visits(replace(self, groups=1), tuple(size), x.dtype, x.device)
            if x.stride(1) != 1 or channels == 1:
                sums = _wide_product(x.reshape(cases * channels, math.prod(size)), visits.mT, dtype)
            else:  # channels last: each case is (pixels, channels)
                pixels = x.flatten(2).mT
                sums = _wide_product(visits.expand(cases, -1, -1), pixels, dtype).mT
        return sums.reshape(cases, self.groups, channels // self.groups * math.prod(self.kernel)).transpose(0, 1)

    def visits(self, axis: int, size: int) -> Tensor:
        """(kernel, pixels) along one axis: whether some output place has this kernel element on this pixel."""
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        offset = torch.arange(kernel, device=HOST)[:, None] * self.dilation[axis] - padding
        pixel = torch.arange(size, device=HOST)[None, :]
        places = self.places(torch.Size((1, 1, *(size for _ in self.kernel))))[axis]
        if self.transposed:  # the output place is where the kernel element puts the pixel
            place = pixel * stride + offset
            return (place >= 0) & (place < places)
        distance = pixel - offset
        place = distance // stride
        return (distance % stride == 0) & (place >= 0) & (place < places)

    def _chunk_factor(self, x: Tensor, *, homogeneous: bool) -> Tensor:
        """Sum over rows for a few cases, with the patches copied along the direction in which memory runs."""
        view = self._patch_view(x)
        groups, _, channels = view.shape[:3]
        axes = len(self.kernel)
        elements = channels * math.prod(self.kernel)
        if x.stride(1) != 1 or axes == 0:
            # (group, channel, kernel, case, place): neighbouring places are neighbours in memory.
            order = (0, 2, *range(3 + axes, 3 + 2 * axes), 1, *range(3, 3 + axes))
            rows = view.permute(order).reshape(groups, elements, -1).mT
            return second_moment(rows, homogeneous=homogeneous)
        # Channels last: copy (group, case, place, kernel, channel) and put the small result into the weight's order.
        order = (0, 1, *range(3, 3 + 2 * axes), 2)
        rows = view.permute(order).reshape(groups, -1, elements)
        moment = second_moment(rows, homogeneous=homogeneous)
        by_channel = torch.arange(elements, device=x.device).reshape(-1, channels).mT.reshape(-1)
        if homogeneous:
            by_channel = torch.cat([by_channel, by_channel.new_full((1,), elements)])
        return moment.index_select(1, by_channel).index_select(2, by_channel)

    def output_factor(self, derivative: Tensor, saved: Sequence[Tensor], *, diagonal: bool) -> Tensor:
        """See `Operation`."""
        cases, channels = derivative.shape[:2]
        if self.reduced:
            places = list(range(2, derivative.dim()))
            sums = derivative.sum(places, dtype=accumulation_dtype(derivative.dtype))
            return second_moment(sums.reshape(cases, self.groups, -1).transpose(0, 1), diagonal=diagonal)
        if not diagonal and gpu.takes(derivative):
            return gpu.moment_of_places(derivative, groups=self.groups)
        grouped = derivative.reshape(cases, self.groups, channels // self.groups, -1)
        if derivative.stride(1) != 1:
            if derivative.device.type == "cpu" and not diagonal and grouped.shape[2] <= grouped.shape[3]:
                return _moment_by_case(grouped)  # instead of a copy of the derivative
            rows = grouped.permute(1, 2, 0, 3).reshape(self.groups, channels // self.groups, -1).mT
        else:
            rows = grouped.permute(1, 0, 3, 2).reshape(self.groups, -1, channels // self.groups)
        return second_moment(rows, diagonal=diagonal)

    def part(
        self, derivative: Tensor, saved: Sequence[Tensor], fraction: float
    ) -> tuple[Operation, Tensor, Sequence[Tensor]]:
        """See `Operation`. The first cases: batches are shuffled."""
        count = math.ceil(fraction * derivative.shape[0])
        return self, derivative[:count], [saved[0][:count]]


def _moment_by_case(columns: Tensor) -> Tensor:
    """(N, groups, n, places) → the sum over cases and places of g gᵀ, (groups, n, n)."""
    columns = columns.to(accumulation_dtype(columns.dtype))
    return (columns @ columns.mT).sum(0)


def _padded(x: Tensor, margins: list[tuple[int, int]]) -> Tensor:
    if not any(before or after for before, after in margins):
        return x
    return functional.pad(x, [margin for pair in reversed(margins) for margin in pair])


@dataclass(frozen=True)
class _Combs:
    """Combs of a transposed convolution that see the same: as a convolution of the input with zeros around it."""

    convolution: Convolution
    margins: list[tuple[int, int]]
    elements: Tensor  # (combs, elements of the small kernel), in the whole kernel


@lru_cache(maxsize=64)
def _all_combs(convolution: Convolution, size: torch.Size, device: torch.device) -> list[_Combs]:
    """Of all axes together."""
    c, axes = convolution, len(size)
    places = c.places(torch.Size((1, 1, *size)))
    each = map(combs, size, places, c.kernel, c.stride, c.padding, c.dilation)
    found = []
    for along in product(*(own.items() for own in each)):
        elements = torch.zeros(1, 1, dtype=torch.int64, device=HOST)
        for (_, own), kernel in zip(along, c.kernel, strict=True):
            index = torch.tensor(own, device=HOST)
            elements = (elements[:, None, :, None] * kernel + index[:, None, :]).flatten(2).flatten(0, 1)
        ends = [comb for comb, _ in along]
        small = Convolution(
            tuple(comb.kernel for comb in ends),
            (1,) * axes,
            tuple(comb.padding for comb in ends),
            tuple(comb.dilation for comb in ends),
            False,
            (0,) * axes,
            c.groups,
        )
        found.append(_Combs(small, [comb.margins for comb in ends], elements.to(device)))
    return found


@lru_cache(maxsize=64)  # two dozen launches a layer, and the same in every statistics step
def _all_visits(convolution: Convolution, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(kernel elements, pixels) over all axes."""
    return reduce(torch.kron, [convolution.visits(axis, n).to(dtype) for axis, n in enumerate(size)]).to(device)


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product whose result is not rounded back to half precision."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        product: Tensor = (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=dtype)
        return product
    return left.to(dtype) @ right.to(dtype)


@dataclass(frozen=True)
class Embedding:
    """A table look-up: the activation is a one-hot row, so the input factor is diagonal (how often each entry was
    read).
    """

    entries: int
    padding_index: int

    diagonal_input = True
    keeps_saved = True
    kind = "embedding"

    def _counted(self, indices: Tensor) -> Tensor:
        """1 where the look-up trains its entry, 0 at the padding index, whose gradient autograd drops."""
        return (indices != self.padding_index).flatten()

    def rows(self, saved: Sequence[Tensor], derivative: Tensor) -> int | Tensor:
        """See `Operation`."""
        return saved[0].numel() if self.padding_index < 0 else self._counted(saved[0]).sum()

    def input_factors(self, saved: Sequence[Tensor], *, homogeneous: bool, diagonal: Sequence[bool]) -> list[Tensor]:
        """See `Operation`."""
        indices = saved[0]
        counts = torch.zeros(self.entries, dtype=torch.float32, device=indices.device)
        counts.index_add_(0, indices.flatten(), self._counted(indices).to(counts.dtype))
        return [counts.unsqueeze(0)]

    def output_factor(self, derivative: Tensor, saved: Sequence[Tensor], *, diagonal: bool) -> Tensor:
        """See `Operation`."""
        rows = derivative.reshape(1, -1, derivative.shape[-1])
        if self.padding_index >= 0:
            rows = rows * self._counted(saved[0]).to(rows.dtype)[None, :, None]
        return second_moment(rows, diagonal=diagonal).to(accumulation_dtype(rows.dtype))

    def part(
        self, derivative: Tensor, saved: Sequence[Tensor], fraction: float
    ) -> tuple[Operation, Tensor, Sequence[Tensor]]:
        """See `Operation`."""
        return self, derivative, saved

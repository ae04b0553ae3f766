"""Statistics of convolutions and norm layers on a GPU, by kernels of their own: no patch is made, half of a symmetric
product is left out, and many layers are a few launches.

Rows are multiplied in half precision, sums are float32. Rows that are float32 are rounded to bfloat16, where the user
lets products be TF32: rounding errors of single rows average out over their great number, and what is left is about
what TF32 products leave (`docs/performance.md`).

Programs that share a tile write sums of their own, which are added up afterwards: a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.launches import COUNTABLE, able, bits, countable, stream_of
from natgrad.statistics.image import Image, readable
from natgrad.statistics.plans import SUMS, Pair, Plan, Sides, Strip, Work, divisor

# From here on differences of offsets are worth their launches (an H200).
_CORRELATION_FLOPS = 2e10
# Up to so many places memory that runs along them comes in pieces that are too short.
_SHORT = 512


def takes(x: Tensor) -> bool:
    """Whether a tensor of a 2-d convolution or norm layer is one for these kernels."""
    if not sums(x) or not countable(x) or x.shape[1] ** 2 >= COUNTABLE:
        return False
    return x.dtype != torch.float32 or rounds()


def rounds() -> bool:
    """Whether the user lets float32 products be less exact."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def sums(x: Tensor) -> bool:
    """Whether a tensor of a norm layer is one for `Norm`."""
    if not x.is_cuda or x.dim() != 4 or x.numel() == 0:
        return False
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and able(x.device)


# Works


@dataclass(frozen=True)
class Patches:
    """Sum over cases and places of patch patchᵀ, times `scale`: (N, C, H, W) → (groups, n, n), n = C / groups · kernel
    elements in the weight's order. A 1 × 1 kernel's patches are the pixels.
    """

    image: Image
    groups: int = 1
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    scale: float = 1.0

    @property
    def cases(self) -> int:
        """See `Work`."""
        return self.image.shape[0]

    @property
    def results(self) -> int:
        """See `Work`."""
        size = self.image.shape[1] // self.groups * self.kernel[0] * self.kernel[1]
        return self.groups * size**2

    def plan(self, plan: Plan) -> None:
        """See `Work`."""
        image, elements = self.image, self.kernel[0] * self.kernel[1]
        channels = image.shape[1] // self.groups
        places = self._places()
        slot = plan.input()
        pixels = elements == 1 and not any(self.padding) and self.stride == (1, 1)
        direct = pixels and not image.along_channels and places[0] * places[1] > _SHORT
        along_channels = not direct and (bool(image.along_channels) or channels * self.groups > 8)
        half = image.dtype != torch.float32
        correlates = self._correlates(channels, along_channels, places)
        lies_well = image.along_channels and (half or elements == 1) and (image.is_dense or not correlates)
        if along_channels and not lies_well:
            slot, image = plan.copied(slot, image)
        strip = Strip.of(image, channels, along_channels=along_channels)
        if correlates:
            self._correlated(plan, slot, strip, places)
            return
        moment = plan.moment(
            slot,
            strip,
            stack=self.groups,
            apart=channels * image.strides[1] if self.groups > 1 else 0,
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            places=places,
        )
        plan.finish(moment, elements if along_channels else 1, self.scale)

    def _places(self) -> Pair:
        sizes = zip(self.image.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return height, width

    def _margins(self) -> Pair:
        return self.kernel[0] - 1 - self.padding[0], self.kernel[1] - 1 - self.padding[1]

    def _correlates(self, channels: int, along_channels: bool, places: Pair) -> bool:
        cases, _, *size = self.image.shape
        elements = self.kernel[0] * self.kernel[1]
        return (
            elements > 1
            and self.groups == 1
            and (self.stride, self.dilation) == ((1, 1), (1, 1))
            and along_channels
            and channels % 64 == 0
            and all(0 <= margin <= n for margin, n in zip(self._margins(), size, strict=True))
            and 2.0 * cases * places[0] * places[1] * (channels * elements) ** 2 >= _CORRELATION_FLOPS
        )

    def _correlated(self, plan: Plan, slot: int, strip: Strip, places: Pair) -> None:
        """For stride 1, by the products of pixels at each difference of kernel elements' offsets, of which there are
        fewer than pairs of elements: 13 in place of 45 for 3 × 3.

        They are those of a convolution that sees every pixel with every element. The places which that has beyond the
        given one's lie outside its border, where few elements see anything: four small moments, taken off.
        """
        kernel, padding, (margin_y, margin_x) = self.kernel, self.padding, self._margins()
        across, down = (margin_y, places[1] + 2 * margin_x), (places[0], margin_x)
        rows = Sides(plan, slot, strip, 2, (margin_y, kernel[1]), across)
        rows.add((margin_y - 1, kernel[1] - 1), (0, kernel[1] - 1))
        columns = Sides(plan, slot, strip, 3, (kernel[0], margin_x), down)
        columns.add((padding[0], margin_x - 1), (padding[0], 0))
        correlation = plan.correlation(slot, strip, kernel)
        numbers = (strip.channels, *kernel, margin_y, margin_x, bits(self.scale))
        plan.spread(correlation, rows, columns, numbers, strip.channels, kernel[0] * kernel[1])


@dataclass(frozen=True)
class Norm:
    """Second moments of each case's gradient of a batch norm's gain, Σ g (x − mean) · reciprocal over places, of its
    bias, Σ g, or of both, times `scale`; or their diagonals. Tensors: g, and for gains x, mean (C,) and reciprocal.
    """

    image: Image
    gains: bool
    biases: bool
    diagonal: bool
    scale: float

    @property
    def cases(self) -> int:
        """See `Work`."""
        return self.image.shape[0]

    @property
    def results(self) -> int:
        """See `Work`."""
        channels = self.image.shape[1]
        return (self.gains + self.biases) * (channels if self.diagonal else channels**2)

    def plan(self, plan: Plan) -> None:
        """See `Work`."""
        rows = self.rows(plan)
        channels = self.image.shape[1]
        for start in rows:
            plan.moment_of_rows(start, self.image.shape[0], channels, diagonal=self.diagonal, scale=self.scale)

    def rows(self, plan: Plan) -> list[int]:
        """Where each case's gradients will be, (N, C), of gains and of biases."""
        image = self.image
        cases, channels = image.shape[:2]
        slots = [plan.input() for _ in range(4 if self.gains else 1)]
        slots += [0] * (4 - len(slots))
        starts = [plan.reserve(cases * channels) for _ in range(self.gains + self.biases)]
        along_channels = bool(image.along_channels)
        if along_channels:
            block, block_places = min(64, max(16, 1 << (channels - 1).bit_length())), 64
            programs, alignment = cases * -(-channels // block), divisor(channels, image.by_case)
        else:
            block_places = min(1024, 1 << (image.places - 1).bit_length())
            block = max(1, 2048 // block_places)
            programs, alignment = -(-cases * channels // block), divisor(image.places, image.by_case)
        plan.add(
            0,
            "norm_kernel",
            (*slots, SUMS, starts[0], starts[-1], cases, channels, image.places, image.by_case),
            programs,
            DTYPE=image.dtype,
            GAINS=self.gains,
            BIASES=self.biases,
            CHANNELS_LAST=along_channels,
            BLOCK=block,
            BLOCK_PLACES=block_places,
            ALIGNED=alignment,
        )
        return starts


@lru_cache(maxsize=512)  # also since plans go by works as objects
def joined(gains: Norm, biases: Norm) -> Norm | None:
    """The gains' work with the biases' of the same layer: one pass over its derivatives."""
    apart = gains.gains and not gains.biases and biases.biases and not biases.gains
    same = (gains.image, gains.diagonal, gains.scale) == (biases.image, biases.diagonal, biases.scale)
    return replace(gains, biases=True) if apart and same else None


WorkT = TypeVar("WorkT", bound=Work)


def moments(works: Sequence[Work], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of all works, in order, whose tensors come one after the other: a few launches together. Plans are
    remembered by the works themselves, as objects: to compare what they say would take longer than to launch.
    """
    device = tensors[0].device
    key: tuple[torch.device | int, ...] = (device, stream_of(device), *map(id, works))
    plan = _PLANS.pop(key, None)
    if plan is None:
        plan = Plan(device, works)
    _PLANS[key] = plan  # the last that was used is the last to go
    if len(_PLANS) > _PLANS_KEPT:
        del _PLANS[next(iter(_PLANS))]
    return plan.run(tensors)


_PLANS: dict[tuple[torch.device | int, ...], Plan] = {}
_PLANS_KEPT = 256


def moment_of_places(
    x: Tensor,
    *,
    groups: int = 1,
    kernel: Pair = (1, 1),
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """See `Patches`."""
    x = readable(x)
    (moment,) = moments([same(Patches(Image.of(x), groups, kernel, stride, padding, dilation))], [x])
    return moment


def same(work: WorkT) -> WorkT:
    """Equal works as one object, by which plans go."""
    if len(_WORKS) >= _WORKS_KEPT:
        _WORKS.clear()
    found: WorkT = _WORKS.setdefault(work, work)
    return found


_WORKS: dict[Any, Any] = {}
_WORKS_KEPT = 4096


def gain_gradients(derivative: Tensor, x: Tensor, mean: Tensor, reciprocal: Tensor) -> Tensor:
    """Each case's gradient of a batch norm's gain, (N, C): see `Norm`."""
    derivative, x = readable(derivative), readable(x)
    if Image.of(x) != Image.of(derivative):
        x = torch.empty_like(derivative).copy_(x)
    if Image.of(x) != Image.of(derivative):  # the derivative is a part of a larger tensor, and its like is dense
        derivative = torch.empty_like(derivative).copy_(derivative)
    (rows,) = moments([same(_Rows(Image.of(derivative)))], [derivative, x, mean, reciprocal])
    return rows


@dataclass(frozen=True)
class _Rows:
    """Each case's gradient of a gain."""

    image: Image

    @property
    def cases(self) -> int:
        return self.image.shape[0]

    @property
    def results(self) -> int:
        return self.image.shape[0] * self.image.shape[1]

    def plan(self, plan: Plan) -> None:
        (start,) = Norm(self.image, True, False, False, 1.0).rows(plan)
        plan.keep(start, self.image.shape[:2])

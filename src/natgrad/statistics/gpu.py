"""Statistics of convolutions and norm layers on a GPU, by kernels of their own: no patch is made, half of a symmetric
product is left out, and many layers are a few launches.

Rows are multiplied in half precision, sums are float32. Rows that are float32 are rounded to bfloat16, where the user
lets products be TF32: rounding errors of single rows average out over their great number, and what is left is about
what TF32 products leave (`docs/performance.md`).

Programs that share a tile write sums of their own, which are added up afterwards: a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from natgrad.launches import ALIGNED_BYTES, COUNTABLE, Launch, able, addresses, bits, countable, stream_of, triton_type

try:
    from natgrad.statistics import kernels
except ImportError:  # no Triton: not on this system, or a torch without a GPU
    kernels = None  # type: ignore[assignment]

# What sums of programs that share tiles may take, of one launch.
_PARTIAL_ELEMENTS = 2**24
# From here on differences of offsets are worth their launches (an H200).
_CORRELATION_FLOPS = 2e10
# Up to so many places memory that runs along them comes in pieces that are too short.
_SHORT = 512
# What rows in float32 are rounded to.
_ROUNDED = torch.bfloat16
# Outputs of a program that adds up.
_FINISH = 1024
# Slots of pointers: where results go, and sums on the way to them; tensors and their copies come after.
_OUT, _SUMS, _FIRST = 0, 1, 2

Pair = tuple[int, int]


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
class Image:
    """A tensor (N, C, H, W) as it lies in memory, which runs along a pixel's channels or a channel's pixels; None:
    neither.
    """

    shape: tuple[int, ...]
    by_case: int
    along_channels: bool | None
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor, cases: int | None = None) -> Image:
        """A tensor's, or that of its first `cases`."""
        count, channels, height, width = x.shape
        by_case, *strides = x.stride()
        sizes, along_channels = (channels, height, width), None
        if _lies(sizes, strides, (1, width * channels, channels)):
            along_channels = True
        if _lies(sizes, strides, (height * width, width, 1)) and (along_channels is None or height * width > 1):
            along_channels = False
        shape = (count if cases is None else cases, *sizes)
        return Image(shape, by_case if count > 1 else channels * height * width, along_channels, x.dtype)

    @property
    def places(self) -> int:
        """Pixels of a case."""
        return self.shape[2] * self.shape[3]

    @property
    def is_dense(self) -> bool:
        """Whether a case begins where the one before it ends."""
        return self.by_case == self.shape[1] * self.places

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of axes that have one element too."""
        _, channels, _, width = self.shape
        inner = (1, width * channels, channels) if self.along_channels else (self.places, width, 1)
        return self.by_case, *inner


def _lies(sizes: Iterable[int], strides: Iterable[int], steps: Iterable[int]) -> bool:
    return all(size == 1 or stride == step for size, stride, step in zip(sizes, strides, steps, strict=True))


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
        rows = _Sides(plan, slot, strip, 2, (margin_y, kernel[1]), across)
        rows.add((margin_y - 1, kernel[1] - 1), (0, kernel[1] - 1))
        columns = _Sides(plan, slot, strip, 3, (kernel[0], margin_x), down)
        columns.add((padding[0], margin_x - 1), (padding[0], 0))
        correlation = plan.correlation(slot, strip, kernel)
        size = strip.channels * kernel[0] * kernel[1]
        blocks = -(-size // _FINISH)
        numbers = (strip.channels, *kernel, margin_y, margin_x, bits(self.scale))
        plan.spread(correlation, rows, columns, numbers, size, blocks)


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
            programs, alignment = cases * -(-channels // block), _divisor(channels, image.by_case)
        else:
            block_places = min(1024, 1 << (image.places - 1).bit_length())
            block = max(1, 2048 // block_places)
            programs, alignment = -(-cases * channels // block), _divisor(image.places, image.by_case)
        plan.add(
            0,
            "norm_kernel",
            (*slots, _SUMS, starts[0], starts[-1], cases, channels, image.places, image.by_case),
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


class Work(Protocol):
    """What is to be computed of some tensors; knows all of them but where they are."""

    @property
    def results(self) -> int:
        """Elements of what comes out."""

    def plan(self, plan: Plan) -> None:
        """Asks for the tensors and kernels that it needs."""


WorkT = TypeVar("WorkT", bound=Work)


def moments(works: Sequence[Work], tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The results of all works, in order, each of its own tensors: a few launches together. Plans are remembered by the
    works themselves, as objects: to compare what they say would take longer than to launch.
    """
    device = tensors[0][0].device
    key: tuple[torch.device | int, ...] = (device, stream_of(device), *map(id, works))
    plan = _PLANS.pop(key, None)
    if plan is None:
        plan = Plan(device, works)
    _PLANS[key] = plan  # the last that was used is the last to go
    if len(_PLANS) > _PLANS_KEPT:
        del _PLANS[next(iter(_PLANS))]
    return plan.run([tensor for some in tensors for tensor in some])


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
    (moment,) = moments([same(Patches(Image.of(x), groups, kernel, stride, padding, dilation))], [[x]])
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
    tensors = [derivative, x, mean, reciprocal]
    return _gain_plan(Image.of(derivative), derivative.device).run(tensors)[0]


@lru_cache(maxsize=512)
def _gain_plan(image: Image, device: torch.device) -> Plan:
    return Plan(device, [_Rows(image)])


@dataclass(frozen=True)
class _Rows:
    """Each case's gradient of a gain."""

    image: Image

    @property
    def results(self) -> int:
        return self.image.shape[0] * self.image.shape[1]

    def plan(self, plan: Plan) -> None:
        (start,) = Norm(self.image, True, False, False, 1.0).rows(plan)
        plan.keep(start, self.image.shape[:2])


def readable(x: Tensor) -> Tensor:
    """The tensor, or a copy where it does not lie as kernels want it."""
    if Image.of(x).along_channels is None:
        x = x.contiguous()
    return x if x.data_ptr() % ALIGNED_BYTES == 0 else x.clone()


# Plans


@dataclass(frozen=True)
class Strip:
    """A part of an image that lies evenly in memory, from an `offset` on."""

    cases: int
    channels: int
    height: int
    width: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    along_channels: bool
    offset: int = 0

    @staticmethod
    def of(image: Image, channels: int, *, along_channels: bool) -> Strip:
        """All pixels, and as many channels."""
        cases, _, height, width = image.shape
        return Strip(cases, channels, height, width, image.strides, image.dtype, along_channels)

    def end(self, axis: int, size: int, *, last: bool) -> Strip:
        """The first or last rows (axis 2) or columns (axis 3)."""
        height, width = (size, self.width) if axis == 2 else (self.height, size)
        whole = self.height if axis == 2 else self.width
        offset = (whole - size) * self.strides[axis] if last else 0
        return replace(self, height=height, width=width, offset=self.offset + offset)


@dataclass
class _Product:
    """A moment or correlation whose sums will be found in as many `splits`, from `start` on."""

    slot: int
    strip: Strip
    tiles: int  # of one split
    iterations: int  # of one tile
    elements: int  # of one split's sums
    numbers: Callable[[_Product], tuple[int, ...]]
    options: dict[str, Any]
    size: int = 0
    stack: int = 1
    to: int = _SUMS
    start: int = 0
    splits: int = 1
    per_split: int = 1
    scale: float = 1.0
    direct: bool = False  # one split's sums may be the result


class Plan:
    """What is to be launched for some works, and the memory that it takes. Works say what they need; then it decides
    how rows are split, and makes the tables.
    """

    def __init__(self, device: torch.device, works: Sequence[Work]) -> None:
        self._device = device
        self._works = works  # by which it is found, as long as they are there
        self._slots = 0
        self._inputs: list[int] = []
        self._copies: list[tuple[int, int]] = []  # slot, and where in the work space
        self._space = 0
        self._sums = 0
        self._out = 0
        self._results: list[tuple[int, int, tuple[int, ...]]] = []  # slot, start, shape
        self._products: dict[str, list[_Product]] = {"moment_kernel": [], "correlation_kernel": []}
        self._later: list[Callable[[], None]] = []
        self._pieces: dict[tuple[Any, ...], tuple[list[tuple[int, ...]], list[int]]] = {}
        self._launches: list[Launch] = []
        for work in works:
            work.plan(self)
        self._close()

    # What works ask for

    def input(self) -> int:
        """The slot of the next tensor."""
        self._slots += 1
        self._inputs.append(_FIRST + self._slots - 1)
        return self._inputs[-1]

    def reserve(self, elements: int) -> int:
        """Where sums, or rows, on their way to results are."""
        start, self._sums = self._sums, self._sums + -(-elements // 16) * 16
        return start

    def keep(self, start: int, shape: tuple[int, ...]) -> None:
        """Sums that are results."""
        self._results.append((_SUMS, start, shape))

    def add(self, phase: int, kernel: str, numbers: tuple[int, ...], programs: int, **options: Any) -> None:
        """A piece of work; later phases need earlier ones."""
        rows, counts = self._pieces.setdefault((phase, kernel, *sorted(options.items())), ([], []))
        rows.append(numbers)
        counts.append(programs)

    def copied(self, slot: int, image: Image) -> tuple[int, Image]:
        """A copy in half precision whose memory runs along channels."""
        cases, channels = image.shape[:2]
        dtype = _ROUNDED if image.dtype == torch.float32 else image.dtype
        copy = Image(image.shape, image.places * channels, True, dtype)
        self._slots += 1
        to = _FIRST + self._slots - 1
        self._copies.append((to, self._space))
        self._space += -(-cases * channels * image.places * dtype.itemsize // 256) * 256
        along_channels, block = bool(image.along_channels), 64
        self.add(
            0,
            "channels_last_kernel",
            (slot, to, channels, image.places, image.by_case),
            -(-image.places // block) * -(-channels // block) * cases,
            DTYPE=image.dtype,
            ROUNDED=dtype,
            ALONG_CHANNELS=along_channels,
            BLOCK=block,
            BLOCK_PLACES=block,
            ALIGNED=_divisor(channels if along_channels else image.places, image.by_case),
            ALIGNED_CHANNELS=_divisor(channels),
        )
        return to, copy

    def moment(
        self,
        slot: int,
        strip: Strip,
        *,
        places: Pair,
        stack: int = 1,
        apart: int = 0,
        kernel: Pair = (1, 1),
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        exact: bool = False,
    ) -> _Product:
        """The moments (stack, n, n) of a stack of strips, so many elements `apart`: of the `places` from the first on,
        which lies `padding` before the first pixel. Where memory runs along channels, columns are sorted by element.
        """
        elements, count = kernel[0] * kernel[1], places[0] * places[1]
        columns = strip.channels * elements
        by_case, by_channel, by_y, by_x = strip.strides
        along_channels = strip.along_channels
        # The pixels of a strip along a border do not lie at one distance from each other.
        even = not along_channels or (by_y, by_case) == (strip.width * by_x, strip.height * strip.width * by_x)
        even = even or (strip.cases == 1 and strip.height == 1)
        pixels = even and (elements, stride, padding, places) == (1, (1, 1), (0, 0), (strip.height, strip.width))
        half = strip.dtype != torch.float32
        block, block_rows, warps, stages = _tile(columns, along_channels=along_channels, half=half, exact=exact)
        tiles = -(-columns // block)
        tiles = tiles * (tiles + 1) // 2
        blocks = -(-count // block_rows)
        if along_channels:
            alignment = _divisor(strip.channels, by_case, by_y, by_x, apart, strip.offset)
        else:
            alignment = _divisor(count, by_channel, by_case, apart, strip.offset)

        def numbers(product: _Product) -> tuple[int, ...]:
            return (
                *(slot, strip.offset, product.to, product.start, tiles, product.splits, stack),
                *(product.iterations, product.per_split, strip.cases * count, count, blocks),
                *(columns, strip.channels, places[1], strip.height, strip.width, elements, kernel[1]),
                *(*stride, *dilation, *padding, apart, *strip.strides, bits(product.scale)),
            )

        product = _Product(
            slot=slot,
            strip=strip,
            tiles=tiles * stack,
            iterations=-(-strip.cases * count // block_rows) if along_channels else strip.cases * blocks,
            elements=stack * columns**2,
            numbers=numbers,
            options={
                "DTYPE": strip.dtype,
                "ROUNDED": strip.dtype if half or exact else _ROUNDED,
                "PATCHES": not pixels,
                "CHANNELS_LAST": along_channels,
                "WHOLE": along_channels and not pixels and strip.channels % block == 0,
                "BLOCK": block,
                "BLOCK_ROWS": block_rows,
                "ALIGNED": alignment,
                "num_warps": warps,
                "num_stages": stages,
            },
            size=columns,
            stack=stack,
        )
        self._products["moment_kernel"].append(product)
        return product

    def correlation(self, slot: int, strip: Strip, kernel: Pair) -> _Product:
        """The products of all pixels with those at each offset, (C, offsets · C), of a dense image."""
        channels, rows = strip.channels, strip.cases * strip.height * strip.width
        offsets = kernel[1] + (kernel[0] - 1) * (2 * kernel[1] - 1)
        columns = offsets * channels
        left, right, block_rows = min(channels, 128), 128, 64
        tiles = -(-channels // left) * -(-columns // right)

        def numbers(product: _Product) -> tuple[int, ...]:
            return (
                *(slot, product.to, product.start, tiles, product.iterations, product.per_split, rows, channels),
                *(columns, strip.height, strip.width, kernel[1], strip.strides[3]),
            )

        product = _Product(
            slot=slot,
            strip=strip,
            tiles=tiles,
            iterations=-(-rows // block_rows),
            elements=channels * columns,
            numbers=numbers,
            options={
                "DTYPE": strip.dtype,
                "WHOLE": channels % right == 0,
                "BLOCK_LEFT": left,
                "BLOCK": right,
                "BLOCK_ROWS": block_rows,
                "ALIGNED": _divisor(channels, strip.strides[3]),
                "num_warps": 4,
                "num_stages": 3,
            },
        )
        self._products["correlation_kernel"].append(product)
        return product

    def finish(self, moment: _Product, elements: int, scale: float) -> None:
        """A moment is a result, (stack, n, n)."""
        size = moment.size
        start = self._result((moment.stack, size, size))
        moment.direct = elements == 1
        moment.scale = scale

        def later() -> None:
            if moment.to == _SUMS:
                self._finish(moment.start, start, moment.elements, size, elements, moment.splits, scale, squared=False)

        if moment.direct:
            moment.start = start
        self._later.append(later)

    def moment_of_rows(self, rows: int, cases: int, channels: int, *, diagonal: bool, scale: float) -> None:
        """The moment of rows (N, C) that other kernels have written, with all digits, or its diagonal, is a result."""
        if diagonal:
            start = self._result((1, channels))
            self._later.append(lambda: self._finish(rows, start, channels, channels, 1, cases, scale, squared=True))
            return
        strip = Strip(cases, channels, 1, 1, (channels, 1, channels, channels), torch.float32, True, rows)
        self.finish(self.moment(_SUMS, strip, places=(1, 1), exact=True), 1, scale)

    def spread(
        self,
        correlation: _Product,
        across: _Sides,
        down: _Sides,
        numbers: tuple[int, ...],
        size: int,
        blocks: int,
    ) -> None:
        """A correlation, less its sides, is a result."""
        start = self._result((1, size, size))

        def later() -> None:
            sides = (*across.numbers(), *down.numbers())
            row = (_SUMS, _OUT, start, *numbers, correlation.start, correlation.splits, *sides, blocks)
            self.add(2, "spread_kernel", (*row, correlation.elements), size * blocks, BLOCK=_FINISH)

        self._later.append(later)

    def _result(self, shape: tuple[int, ...]) -> int:
        start = self._out
        self._results.append((_OUT, start, shape))
        count = 1
        for size in shape:
            count *= size
        self._out += -(-count // 4) * 4  # each begins where four elements are stored at once
        return start

    def _finish(
        self,
        source: int,
        to: int,
        count: int,
        size: int,
        elements: int,
        splits: int,
        scale: float,
        squared: bool = False,
    ) -> None:
        apart = count
        row = (_SUMS, source, _OUT, to, count, size, elements, splits, apart, int(squared), bits(scale))
        self.add(2, "finish_kernel", row, -(-count // _FINISH), BLOCK=_FINISH)

    # Making tables

    def _close(self) -> None:
        """Nothing more is asked for."""
        for kernel, products in self._products.items():
            for some in _by_options(products):
                self._split(some)
                for product in some:
                    programs = product.tiles * product.splits
                    self.add(1, kernel, product.numbers(product), programs, **product.options)
        for later in self._later:
            later()
        for (_, kernel, *options), (rows, counts) in sorted(self._pieces.items(), key=lambda item: item[0][0]):
            self._launches.append(
                Launch(
                    getattr(kernels, kernel),
                    rows,
                    counts,
                    self._device,
                    **{name: triton_type(value) for name, value in options},
                )
            )
        self._products, self._later, self._pieces = {}, [], {}

    def _split(self, products: Sequence[_Product]) -> None:
        """Rows into parts, so that all processors are busy with about the same."""
        work = sum(product.tiles * product.iterations for product in products)
        each = max(4, -(-work // (2 * _processors(self._device))))
        room = max(_PARTIAL_ELEMENTS, max(product.elements for product in products))
        while sum(_splits(p, each) * p.elements for p in products if _splits(p, each) > 1) > room:
            each = -(-each * 5 // 4)
        for product in products:
            splits = _splits(product, each)
            product.per_split = -(-product.iterations // splits)
            product.splits = -(-product.iterations // product.per_split)
            if product.splits == 1 and product.direct:
                product.to = _OUT
            else:
                product.scale = 1.0
                product.start = self.reserve(product.splits * product.elements)

    # Running

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results."""
        device = self._device
        out = torch.empty(self._out, dtype=torch.float32, device=device)
        sums = torch.empty(self._sums, dtype=torch.float32, device=device)
        pointers = [0] * (_FIRST + self._slots)
        pointers[_OUT], pointers[_SUMS] = out.data_ptr(), sums.data_ptr()
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            pointers[slot] = tensor.data_ptr()
        if self._copies:
            space = torch.empty(self._space, dtype=torch.uint8, device=device)
            base = space.data_ptr()
            for slot, start in self._copies:
                pointers[slot] = base + start
        with torch.cuda.device_of(out):  # Triton goes by the current one
            table = addresses(pointers, device)
            for launch in self._launches:
                launch(table)
        homes = {_OUT: out, _SUMS: sums}
        return [_view(homes[slot], start, shape) for slot, start, shape in self._results]


class _Sides:
    """The moments of the places beyond both ends of an axis, which a part of the kernel reaches."""

    def __init__(self, plan: Plan, slot: int, strip: Strip, axis: int, kernel: Pair, places: Pair) -> None:
        self._plan, self._slot, self._strip, self._axis = plan, slot, strip, axis
        self._kernel, self._places = kernel, places
        self._ends: list[_Product] = []

    def add(self, first: Pair, last: Pair) -> None:
        """What the pixels at the ends are padded with."""
        margin = self._kernel[self._axis - 2]
        if margin == 0:
            return
        for padding, is_last in ((first, False), (last, True)):
            end = self._strip.end(self._axis, margin, last=is_last)
            self._ends.append(
                self._plan.moment(self._slot, end, kernel=self._kernel, padding=padding, places=self._places)
            )

    def numbers(self) -> tuple[int, ...]:
        """Where both are, how far splits are apart, and how many there are."""
        if not self._ends:
            return (0, 0, 0, 1)
        near, far = self._ends
        assert near.splits == far.splits, "both ends are of one size"
        return near.start, far.start, near.elements, near.splits


def _by_options(products: Iterable[_Product]) -> list[list[_Product]]:
    found: dict[tuple[Any, ...], list[_Product]] = {}
    for product in products:
        found.setdefault(tuple(sorted(product.options.items(), key=lambda item: item[0])), []).append(product)
    return list(found.values())


def _splits(product: _Product, iterations: int) -> int:
    return max(1, -(-product.iterations // iterations))


def _view(home: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return home.as_strided(shape, tuple(reversed(strides)), start)


@lru_cache(maxsize=1024)
def _divisor(*numbers: int) -> int:
    """What all strides are multiples of, so that loads can be of several elements."""
    return next(a for a in (16, 8, 4, 2, 1) if all(number % a == 0 for number in numbers))


def _tile(columns: int, *, along_channels: bool, half: bool, exact: bool) -> tuple[int, int, int, int]:
    """Columns and rows of a tile, warps, stages: what was fastest on an H200."""
    if exact:
        return 32, 32, 4, 3
    if columns > 96:
        return (128, 64, 4, 3) if along_channels or half else (128, 32, 8, 3)
    block = 64 if columns > 32 else 32 if columns > 16 else 16
    return block, 64, 4, 3


@cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 4
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)

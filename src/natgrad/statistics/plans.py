"""What is to be launched for the statistics of some layers: products, split so that all processors are busy, what adds
their parts up, and the memory in between. `natgrad.statistics.gpu` says what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.launches import Launch, addresses, bits, kernel, triton_type
from natgrad.statistics.image import Image

# What sums of programs that share tiles may take, of one launch.
_PARTIAL_ELEMENTS = 2**24
# What rows in float32 are rounded to.
_ROUNDED = torch.bfloat16
# Outputs of a program that adds up, and how many splits it takes in at a time, by how many there are at most.
_FINISH = {2: (1024, 1), 16: (1024, 4), 2**31: (128, 16)}
# Channels of a program that spreads correlations: memory is read along both, 32 bytes at least.
_FIRSTS, _SECONDS = 8, 32
# Slots of pointers: where results go, and sums on the way to them; tensors and their copies come after.
_OUT, SUMS, _FIRST = 0, 1, 2

Pair = tuple[int, int]


class Work(Protocol):
    """What is to be computed of some tensors; knows all of them but where they are."""

    @property
    def results(self) -> int:
        """Elements of what comes out."""

    @property
    def cases(self) -> int:
        """How many cases are read: the first ones of every tensor (N, C, H, W)."""

    def plan(self, plan: Plan) -> None:
        """Asks for the tensors and kernels that it needs."""


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

    tiles: int  # of one split
    iterations: int  # of one tile
    elements: int  # of one split's sums
    numbers: Callable[[_Product], tuple[int, ...]]
    options: dict[str, Any]
    size: int = 0
    stack: int = 1
    to: int = SUMS
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
        self._results: list[tuple[int, int, tuple[int, ...], list[int]]] = []  # slot, start, shape, strides
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
        self._results.append((SUMS, start, shape, _strides(shape)))

    def add(self, phase: int, name: str, numbers: tuple[int, ...], programs: int, **options: Any) -> None:
        """A piece of a kernel's work; later phases need earlier ones."""
        rows, counts = self._pieces.setdefault((phase, name, *sorted(options.items())), ([], []))
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
            ALIGNED=divisor(channels if along_channels else image.places, image.by_case),
            ALIGNED_CHANNELS=divisor(channels),
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
            alignment = divisor(strip.channels, by_case, by_y, by_x, apart, strip.offset)
        else:
            alignment = divisor(count, by_channel, by_case, apart, strip.offset)

        def numbers(product: _Product) -> tuple[int, ...]:
            return (
                *(slot, strip.offset, product.to, product.start, tiles, product.splits, stack),
                *(product.iterations, product.per_split, strip.cases * count, count, blocks),
                *(columns, strip.channels, places[1], strip.height, strip.width, elements, kernel[1]),
                *(*stride, *dilation, *padding, apart, *strip.strides, bits(product.scale)),
            )

        product = _Product(
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
                "ALIGNED": divisor(channels, strip.strides[3]),
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
            if moment.to == SUMS:
                self._finish(moment.start, start, moment.elements, size, elements, moment.splits, scale, squared=False)

        if moment.direct:
            moment.start = start
        self._later.append(later)

    def moment_of_rows(self, rows: int, cases: int, channels: int, *, diagonal: bool, scale: float) -> None:
        """The moment of rows (N, C) that other kernels have written, with all digits, or its diagonal, is a result."""
        if diagonal:
            start = self._result((1, channels))
            self._later.append(lambda: self._finish(rows, start, channels, 1, 1, cases, scale, squared=True))
            return
        strip = Strip(cases, channels, 1, 1, (channels, 1, channels, channels), torch.float32, True, rows)
        self.finish(self.moment(SUMS, strip, places=(1, 1), exact=True), 1, scale)

    def spread(
        self,
        correlation: _Product,
        across: Sides,
        down: Sides,
        numbers: tuple[int, ...],
        channels: int,
        elements: int,
    ) -> None:
        """A correlation, less its sides, is a result."""
        size = channels * elements
        start = self._result((1, size, size))
        blocks = -(-channels // _SECONDS)

        def later() -> None:
            sums = [self._added_up(product) for product in (correlation, *across.both(), *down.both())]
            self.add(
                3,
                "spread_kernel",
                (SUMS, _OUT, start, *numbers, *sums, blocks),
                -(-channels // _FIRSTS) * elements * blocks,
                FIRSTS=_FIRSTS,
                SECONDS=_SECONDS,
                OTHERS=1 << (elements - 1).bit_length(),
                num_warps=8,
            )

        self._later.append(later)

    def _added_up(self, product: _Product | None) -> int:
        """Where one sum is, in place of splits: who spreads it reads each element several times. 0 for nothing."""
        if product is None:
            return 0
        if product.splits == 1:
            return product.start
        start, count = self.reserve(product.elements), product.elements
        self._finish(product.start, start, count, 1, 1, product.splits, 1.0, squared=False, to=SUMS)
        return start

    def _result(self, shape: tuple[int, ...]) -> int:
        start = self._out
        self._results.append((_OUT, start, shape, _strides(shape)))
        self._out += -(-math.prod(shape) // 4) * 4  # each begins where four elements are stored at once
        return start

    def _finish(
        self,
        source: int,
        start: int,
        count: int,
        size: int,
        elements: int,
        splits: int,
        scale: float,
        *,
        squared: bool,
        to: int = _OUT,
    ) -> None:
        """Splits are as far apart as they have elements."""
        row = (SUMS, source, to, start, count, size, elements, splits, int(squared), bits(scale))
        block, depth = next(shape for most, shape in _FINISH.items() if splits <= most)
        self.add(2, "finish_kernel", row, -(-count // block), BLOCK=block, DEPTH=depth)

    # Making tables

    def _close(self) -> None:
        """Nothing more is asked for."""
        for name, products in self._products.items():
            for some in _by_options(products):
                self._split(some)
                for product in some:
                    programs = product.tiles * product.splits
                    self.add(1, name, product.numbers(product), programs, **product.options)
        for later in self._later:
            later()
        for (_, name, *options), (rows, counts) in sorted(self._pieces.items(), key=lambda item: item[0][0]):
            self._launches.append(
                Launch(
                    kernel("statistics", name),
                    rows,
                    counts,
                    self._device,
                    **{key: triton_type(value) for key, value in options},
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
        pointers[_OUT], pointers[SUMS] = out.data_ptr(), sums.data_ptr()
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
        homes = {_OUT: out, SUMS: sums}
        return [homes[slot].as_strided(shape, strides, start) for slot, start, shape, strides in self._results]


class Sides:
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

    def both(self) -> Sequence[_Product | None]:
        """Near the first pixel, and near the last."""
        return self._ends or (None, None)


def _by_options(products: Iterable[_Product]) -> list[list[_Product]]:
    found: dict[tuple[Any, ...], list[_Product]] = {}
    for product in products:
        found.setdefault(tuple(sorted(product.options.items(), key=lambda item: item[0])), []).append(product)
    return list(found.values())


def _splits(product: _Product, iterations: int) -> int:
    return max(1, -(-product.iterations // iterations))


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a tensor without gaps."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@lru_cache(maxsize=1024)
def divisor(*numbers: int) -> int:
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

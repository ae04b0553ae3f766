"""Statistics of convolutions and norm layers on a GPU, by kernels of their own: no patch is made, and half of a
symmetric product is left out.

Rows are multiplied in half precision, sums are float32. Rows that are float32 are rounded to bfloat16, where the user
lets products be TF32: rounding errors of single rows average out over their great number, and what is left is about
what TF32 products leave (`docs/performance.md`).

Programs that share a tile write sums of their own, which are added up afterwards: a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    from natgrad.statistics import kernels
except ImportError:  # no Triton: not on this system, or a torch without a GPU
    kernels = None  # type: ignore[assignment]

# What sums of programs that share a tile may take.
_PARTIAL_ELEMENTS = 2**24
# From here on differences of offsets are worth their launches (an H200).
_CORRELATION_FLOPS = 2e10
# Up to so many places memory that runs along them comes in pieces that are too short.
_SHORT = 512

Pair = tuple[int, int]


def takes(x: Tensor) -> bool:
    """Whether a tensor of a 2-d convolution or norm layer is one for these kernels."""
    if not sums(x) or x.numel() >= 2**31:
        return False
    return x.dtype != torch.float32 or bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def sums(x: Tensor) -> bool:
    """Whether a tensor of a norm layer is one for `gain_gradients`."""
    if not x.is_cuda or kernels is None or x.dim() != 4 or x.numel() == 0:
        return False
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and _capability(x.device) >= (8, 0)


def moment_of_places(
    x: Tensor,
    *,
    groups: int = 1,
    kernel: Pair = (1, 1),
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """Sum over cases and places of patch patchᵀ: (N, C, H, W) → (groups, n, n), n = C / groups · kernel elements in the
    weight's order. A 1 × 1 kernel's patches are the pixels.
    """
    channels, elements = x.shape[1] // groups, kernel[0] * kernel[1]
    height, width = _places(x, kernel, stride, padding, dilation)
    pixels = elements == 1 and not any(padding) and stride == (1, 1)
    along_channels = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    if pixels and x.is_contiguous() and height * width > _SHORT:
        parts = x.narrow(1, 0, channels)
        return _moment(parts, along_channels=False, stack=groups, apart=channels * x.stride(1), places=(height, width))
    if not along_channels and channels * groups > 8:
        x, along_channels = channels_last(x), True
    elif not along_channels:
        x = x.contiguous()
    elif elements > 1 and x.dtype == torch.float32:
        x = x.to(torch.bfloat16)
    margins = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
    flops = 2.0 * x.shape[0] * height * width * (channels * elements) ** 2
    if (
        elements > 1
        and groups == 1
        and (stride, dilation) == ((1, 1), (1, 1))
        and along_channels
        and channels % 64 == 0
        and all(0 <= margin <= size for margin, size in zip(margins, x.shape[2:], strict=True))
        and flops >= _CORRELATION_FLOPS
    ):
        return correlated(x, kernel, padding, (height, width))
    total = _moment(
        x.narrow(1, 0, channels),
        along_channels=along_channels,
        stack=groups,
        apart=channels * x.stride(1),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        places=(height, width),
    )
    return _in_order(total, elements) if along_channels else total


def moments_of_stack(
    tensors: Sequence[Tensor],
    *,
    kernel: Pair = (1, 1),
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """`moment_of_places` of K tensors of one shape and format: (K, n, n)."""
    first, count = tensors[0], len(tensors)
    along_channels = not first.is_contiguous() and first.is_contiguous(memory_format=torch.channels_last)
    if along_channels:
        stacked = torch.stack([x.permute(0, 2, 3, 1) for x in tensors]).flatten(0, 1).permute(0, 3, 1, 2)
    else:
        stacked = torch.stack([x.contiguous() for x in tensors]).flatten(0, 1)
        if first.shape[1] > 8:
            stacked, along_channels = channels_last(stacked), True
    moments = _moment(
        stacked.narrow(0, 0, first.shape[0]),
        along_channels=along_channels,
        stack=count,
        apart=first.shape[0] * stacked.stride(0),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        places=_places(first, kernel, stride, padding, dilation),
    )
    return _in_order(moments, kernel[0] * kernel[1]) if along_channels else moments


def _places(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    sizes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    return height, width


def _in_order(moments: Tensor, elements: int) -> Tensor:
    """Columns sorted by kernel element, in the weight's order."""
    if elements == 1:
        return moments
    stack, columns, _ = moments.shape
    pairs = moments.reshape(stack, elements, columns // elements, elements, columns // elements)
    return pairs.permute(0, 2, 1, 4, 3).reshape(moments.shape)


def channels_last(x: Tensor) -> Tensor:
    """A copy in half precision whose memory runs along channels."""
    if not x.is_contiguous():
        x = x.contiguous()
    cases, channels, height, width = x.shape
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    out = torch.empty((cases, height, width, channels), dtype=dtype, device=x.device)
    block = 64
    grid = (-(-height * width // block) * -(-channels // block) * cases,)  # the second and third are limited to 65535
    _launch(kernels.channels_last_kernel, grid, x, out, channels, height * width, BLOCK=block, BLOCK_PLACES=block)
    return out.permute(0, 3, 1, 2)


def correlated(x: Tensor, kernel: Pair, padding: Pair, places: Pair) -> Tensor:
    """The same for stride 1, by the products of pixels at each difference of kernel elements' offsets, of which there
    are fewer than pairs of elements: 13 in place of 45 for 3 × 3.

    They are those of a convolution that sees every pixel with every element. The places which that has beyond the
    given one's lie outside its border, where few elements see anything: four small moments, taken off.
    """
    cases, channels, height, width = x.shape
    margin_y, margin_x = kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1]
    elements = kernel[0] * kernel[1]
    offsets = kernel[1] + (kernel[0] - 1) * (2 * kernel[1] - 1)
    columns, rows = offsets * channels, cases * height * width
    left, right, block_rows = min(channels, 128), 128, 64
    tiles = (channels // left) * -(-columns // right)
    iterations = -(-rows // block_rows)
    splits, per_split = _splits(tiles, iterations, channels * columns, x.device)
    sums = torch.empty((splits, channels, columns), dtype=torch.float32, device=x.device)
    _launch(
        kernels.correlation_kernel,
        (tiles, splits),
        x,
        sums,
        iterations,
        per_split,
        rows,
        channels,
        columns,
        height,
        width,
        kernel[1],
        channels,
        WHOLE=channels % right == 0,
        BLOCK_LEFT=left,
        BLOCK=right,
        BLOCK_ROWS=block_rows,
        num_warps=4,
        num_stages=3,
    )
    sums = sums[0] if splits == 1 else sums.sum(0)
    across, down = (margin_y, places[1] + 2 * margin_x), (places[0], margin_x)
    top, bottom = _sides(x, 2, (margin_y, kernel[1]), (margin_y - 1, kernel[1] - 1), (0, kernel[1] - 1), across)
    before, after = _sides(x, 3, (kernel[0], margin_x), (padding[0], margin_x - 1), (padding[0], 0), down)
    out = torch.empty((1, channels * elements, channels * elements), dtype=torch.float32, device=x.device)
    block = 1024
    grid = (channels * elements, -(-channels * elements // block))
    sides = (top, bottom, before, after)
    _launch(kernels.spread_kernel, grid, sums, *sides, out, channels, *kernel, margin_y, margin_x, BLOCK=block)
    return out


def _sides(x: Tensor, axis: int, kernel: Pair, first: Pair, last: Pair, places: Pair) -> tuple[Tensor, Tensor]:
    """The moments of the places beyond both ends of an axis, which a part of the kernel reaches; `first` and `last` are
    what the pixels at the ends are padded with.
    """
    margin = kernel[axis - 2]
    if margin == 0:
        nothing = torch.empty(0, dtype=torch.float32, device=x.device)
        return nothing, nothing
    near, far = x.narrow(axis, 0, margin), x.narrow(axis, x.shape[axis] - margin, margin)
    if first == last:  # in one go
        apart = int(far.storage_offset() - near.storage_offset())
        both = _moment(near, along_channels=True, stack=2, apart=apart, kernel=kernel, padding=first, places=places)
        return both[0], both[1]
    ends = [
        _moment(part, along_channels=True, kernel=kernel, padding=padding, places=places)
        for part, padding in ((near, first), (far, last))
    ]
    return ends[0], ends[1]


def _moment(
    x: Tensor,
    *,
    along_channels: bool,
    places: Pair,
    stack: int = 1,
    apart: int = 0,
    kernel: Pair = (1, 1),
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """The moments (stack, n, n) of a stack of tensors like x, so many elements `apart`: of the `places` from the first
    on, which lies `padding` before the first pixel. Where memory runs along channels, columns are sorted by element.
    """
    cases, channels, height, width = x.shape
    elements, count = kernel[0] * kernel[1], places[0] * places[1]
    columns = channels * elements
    by_case, by_channel, by_y, by_x = x.stride()
    # The pixels of a strip along a border do not lie at one distance from each other.
    even = not along_channels or (by_y, by_case) == (width * by_x, height * width * by_x)
    pixels = even and (elements, stride, padding, places) == (1, (1, 1), (0, 0), (height, width))
    block, block_rows, warps, stages = _tile(columns, along_channels=along_channels, half=x.dtype != torch.float32)
    tiles = -(-columns // block)
    tiles = tiles * (tiles + 1) // 2
    blocks = -(-count // block_rows)
    iterations = -(-cases * count // block_rows) if along_channels else cases * blocks
    splits, per_split = _splits(tiles * stack, iterations, stack * columns**2, x.device)
    out = torch.empty((splits, stack, columns, columns), dtype=torch.float32, device=x.device)
    _launch(
        kernels.moment_kernel,
        (tiles, splits, stack),
        x,
        out,
        iterations,
        per_split,
        cases * count,
        count,
        blocks,
        columns,
        channels,
        places[1],
        height,
        width,
        elements,
        kernel[1],
        *stride,
        *dilation,
        *padding,
        apart,
        by_case,
        by_channel,
        by_y,
        by_x,
        PATCHES=not pixels,
        CHANNELS_LAST=along_channels,
        WHOLE=along_channels and not pixels and channels % block == 0,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        ALIGNED=1 if along_channels else _divisor(count, by_channel, by_case),
        num_warps=warps,
        num_stages=stages,
    )
    return out[0] if splits == 1 else out.sum(0)


@lru_cache(maxsize=256)
def _divisor(*numbers: int) -> int:
    """What strides that are no multiples of 16 still are multiples of, so that loads can be of several elements."""
    return next(a for a in (8, 4, 2, 1) if all(number % a == 0 for number in numbers))


def _tile(columns: int, *, along_channels: bool, half: bool) -> tuple[int, int, int, int]:
    """Columns and rows of a tile, warps, stages: what was fastest on an H200."""
    if columns > 96:
        return (128, 64, 4, 3) if along_channels or half else (128, 32, 8, 3)
    block = 64 if columns > 32 else 32 if columns > 16 else 16
    return block, 64, 4, 3


def _splits(tiles: int, iterations: int, elements: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts rows are split, so that all processors are busy, and how many iterations each has."""
    wanted = -(-2 * _processors(device) // tiles)
    splits = max(1, min(wanted, iterations // 4, _PARTIAL_ELEMENTS // elements))
    per_split = -(-iterations // splits)
    return -(-iterations // per_split), per_split


def gain_gradients(derivative: Tensor, x: Tensor, mean: Tensor, reciprocal: Tensor) -> Tensor:
    """Each case's gradient of a batch norm's gain, Σ g (x − mean) · reciprocal over places: (N, C, H, W), twice, and
    (C,), twice → (N, C). A stack of K layers has their cases one after the other, (K · N, ...), and (K, C).
    """
    along_channels = not derivative.is_contiguous() and derivative.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if along_channels else torch.contiguous_format
    derivative, x = derivative.contiguous(memory_format=form), x.contiguous(memory_format=form)
    cases, channels, height, width = derivative.shape
    places = height * width
    out = torch.empty((cases, channels), dtype=torch.float32, device=derivative.device)
    if along_channels:
        block, block_places = 64, 32
        grid = (-(-channels // block) * cases,)
    else:
        block_places = min(1024, 1 << (places - 1).bit_length())
        block = max(1, 2048 // block_places)
        grid = (-(-cases * channels // block),)
    _launch(
        kernels.gain_kernel,
        grid,
        derivative,
        x,
        mean,
        reciprocal,
        out,
        cases,
        cases // (mean.shape[0] if mean.dim() == 2 else 1),
        places,
        channels,
        CHANNELS_LAST=along_channels,
        BLOCK=block,
        BLOCK_PLACES=block_places,
        ALIGNED=1 if along_channels else _divisor(places),
    )
    return out


def _launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **options: Any) -> None:
    """On the device of x: Triton goes by the current one."""
    with torch.cuda.device_of(x):
        kernel[grid](x, *arguments, **options)


@cache
def _processors(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)

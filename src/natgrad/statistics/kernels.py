"""The Triton kernels behind `natgrad.statistics.gpu`, which says what they are for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moment_kernel(
    x,
    out,
    iterations,
    per_split,
    rows,
    places,
    blocks,
    columns,
    channels,
    out_width,
    height,
    width,
    kernel_size,
    kernel_width,
    stride_y,
    stride_x,
    dilation_y,
    dilation_x,
    padding_y,
    padding_x,
    apart,
    by_case,
    by_channel,
    by_y,
    by_x,
    PATCHES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One tile of the lower half, of the rows of one split.

    A column is a channel, with PATCHES a channel at a kernel element: in the weight's order, or, where memory runs
    along channels (CHANNELS_LAST), kernel element by kernel element; WHOLE then says that no tile has parts of two.
    Rows are the places of all cases, or, where memory runs along places, those of one case at a time.
    """
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    left = i * BLOCK + tl.arange(0, BLOCK)
    right = j * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED > 1:  # strides that are no multiples of 16, of which Triton takes notice by itself
        by_channel = tl.multiple_of(by_channel, ALIGNED)
        by_case = tl.multiple_of(by_case, ALIGNED)
        places = tl.multiple_of(places, ALIGNED)
    x += group.to(tl.int64) * apart
    if PATCHES:
        if CHANNELS_LAST:
            if WHOLE:  # one number a tile: nothing but channels runs along memory
                left_element, right_element = i * BLOCK // channels, j * BLOCK // channels
                left_channel, right_channel = left - left_element * channels, right - right_element * channels
            else:
                left_element, right_element = left // channels, right // channels
                left_channel, right_channel = left % channels, right % channels
        else:
            left_element, right_element = left % kernel_size, right % kernel_size
            left_channel, right_channel = left // kernel_size, right // kernel_size
        left_y = left_element // kernel_width * dilation_y - padding_y
        left_x = left_element % kernel_width * dilation_x - padding_x
        right_y = right_element // kernel_width * dilation_y - padding_y
        right_x = right_element % kernel_width * dilation_x - padding_x
        left_at = left_channel * by_channel + left_y * by_y + left_x * by_x
        right_at = right_channel * by_channel + right_y * by_y + right_x * by_x
    else:
        left_at, right_at = left * by_channel, right * by_channel
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, iterations)):
        if CHANNELS_LAST:
            row = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            inside = row < rows
            case, place = row // places, row % places
        else:
            case = step // blocks
            place = (step - case * blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            inside = place < places
        if PATCHES:
            y, column = place // out_width * stride_y, place % out_width * stride_x
            at = case * by_case + y * by_y + column * by_x
            if WHOLE:
                left_in = inside & (y + left_y >= 0) & (y + left_y < height)
                left_in = left_in & (column + left_x >= 0) & (column + left_x < width)
                right_in = inside & (y + right_y >= 0) & (y + right_y < height)
                right_in = right_in & (column + right_x >= 0) & (column + right_x < width)
                left_mask = left_in[None, :] & (left < columns)[:, None]
                right_mask = right_in[None, :] & (right < columns)[:, None]
            else:
                ly, lx = left_y[:, None] + y[None, :], left_x[:, None] + column[None, :]
                ry, rx = right_y[:, None] + y[None, :], right_x[:, None] + column[None, :]
                left_mask = (ly >= 0) & (ly < height) & (lx >= 0) & (lx < width)
                left_mask = left_mask & inside[None, :] & (left < columns)[:, None]
                right_mask = (ry >= 0) & (ry < height) & (rx >= 0) & (rx < width)
                right_mask = right_mask & inside[None, :] & (right < columns)[:, None]
        else:
            at = row * by_x if CHANNELS_LAST else case * by_case + place
            left_mask = inside[None, :] & (left < columns)[:, None]
            right_mask = inside[None, :] & (right < columns)[:, None]
        a = tl.load(x + left_at[:, None] + at[None, :], mask=left_mask, other=0.0)
        b = tl.load(x + right_at[:, None] + at[None, :], mask=right_mask, other=0.0)
        if a.dtype == tl.float32:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        sums = tl.dot(a, tl.trans(b), sums)
    base = out + (split * tl.num_programs(2) + group).to(tl.int64) * columns * columns
    tl.store(
        base + left[:, None] * columns + right[None, :],
        sums,
        mask=(left < columns)[:, None] & (right < columns)[None, :],
    )
    if i != j:
        tl.store(
            base + right[:, None] * columns + left[None, :],
            tl.trans(sums),
            mask=(right < columns)[:, None] & (left < columns)[None, :],
        )


@triton.jit
def correlation_kernel(
    x,
    out,
    iterations,
    per_split,
    rows,
    channels,
    columns,
    height,
    width,
    kernel_width,
    by_place,
    WHOLE: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One tile of the products of all pixels with those at each offset, of the pixels of one split.

    Left columns are channels, right ones channels at an offset, offset by offset; WHOLE says that no tile has parts of
    two. Memory runs along channels.
    """
    left_tiles = tl.cdiv(channels, BLOCK_LEFT)
    i, j = tl.program_id(0) % left_tiles, tl.program_id(0) // left_tiles
    split = tl.program_id(1)
    left = i * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    right = j * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        offset = j * BLOCK // channels
        channel = right - offset * channels
    else:
        offset = right // channels
        channel = right % channels
    # Half of all offsets: to the right in the same row, and all in the rows below.
    below = offset - kernel_width
    span = 2 * kernel_width - 1
    down = tl.where(offset < kernel_width, 0, 1 + below // span)
    along = tl.where(offset < kernel_width, offset, below % span - (kernel_width - 1))
    right_at = channel + (down * width + along) * by_place
    sums = tl.zeros((BLOCK_LEFT, BLOCK), dtype=tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, iterations)):
        row = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = row < rows
        place = row % (height * width)
        y, column = place // width, place % width
        at = row * by_place
        left_mask = inside[None, :] & (left < channels)[:, None]
        if WHOLE:
            seen = inside & (y + down < height) & (column + along >= 0) & (column + along < width)
            right_mask = seen[None, :] & (right < columns)[:, None]
        else:
            below_y, beside = y[None, :] + down[:, None], column[None, :] + along[:, None]
            right_mask = (below_y < height) & (beside >= 0) & (beside < width)
            right_mask = right_mask & inside[None, :] & (right < columns)[:, None]
        a = tl.load(x + left[:, None] + at[None, :], mask=left_mask, other=0.0)
        b = tl.load(x + right_at[:, None] + at[None, :], mask=right_mask, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums)
    base = out + split.to(tl.int64) * channels * columns
    tl.store(
        base + left[:, None] * columns + right[None, :],
        sums,
        mask=(left < channels)[:, None] & (right < columns)[None, :],
    )


@triton.jit
def spread_kernel(
    correlation,
    top,
    bottom,
    left,
    right,
    out,
    channels,
    kernel_height,
    kernel_width,
    margin_y,
    margin_x,
    BLOCK: tl.constexpr,
):
    """One row of the factor: each pair of kernel elements has the product at the difference of their offsets, less the
    places beyond the border that only some pairs see.
    """
    elements = kernel_height * kernel_width
    columns = channels * elements
    wide = columns.to(tl.int64)
    row = tl.program_id(0)
    first, one = row // elements, row % elements
    one_y, one_x = one // kernel_width, one % kernel_width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    second, other = column // elements, column % elements
    other_y, other_x = other // kernel_width, other % kernel_width
    down, along = other_y - one_y, other_x - one_x
    forward = (down > 0) | ((down == 0) & (along >= 0))
    span = 2 * kernel_width - 1
    size_y, size_x = tl.abs(down), tl.where(forward, along, -along)
    offset = tl.where(size_y == 0, size_x, kernel_width + (size_y - 1) * span + size_x + kernel_width - 1)
    offsets = kernel_width + (kernel_height - 1) * span
    a, b = tl.where(forward, first, second), tl.where(forward, second, first)
    at = (a * offsets + offset).to(tl.int64) * channels + b
    value = tl.load(correlation + at, mask=inside, other=0.0)
    # The sides' kernels are parts of the whole one, and stand element by element.
    many = margin_y * kernel_width * channels
    here = (one_y * kernel_width + one_x) * channels + first
    there = (other_y * kernel_width + other_x) * channels + second
    shift = (kernel_height - margin_y) * kernel_width * channels
    upper = inside & (one_y >= kernel_height - margin_y) & (other_y >= kernel_height - margin_y)
    value -= tl.load(top + (here - shift).to(tl.int64) * many + there - shift, mask=upper, other=0.0)
    lower = inside & (one_y < margin_y) & (other_y < margin_y)
    value -= tl.load(bottom + here.to(tl.int64) * many + there, mask=lower, other=0.0)
    many = margin_x * kernel_height * channels
    here = (one_y * margin_x + one_x) * channels + first
    there = (other_y * margin_x + other_x) * channels + second
    shift = (kernel_width - margin_x) * channels
    outer = inside & (one_x >= kernel_width - margin_x) & (other_x >= kernel_width - margin_x)
    value -= tl.load(left + (here - shift).to(tl.int64) * many + there - shift, mask=outer, other=0.0)
    inner = inside & (one_x < margin_x) & (other_x < margin_x)
    value -= tl.load(right + here.to(tl.int64) * many + there, mask=inner, other=0.0)
    tl.store(out + row * wide + column, value, mask=inside)


@triton.jit
def channels_last_kernel(x, out, channels, places, BLOCK: tl.constexpr, BLOCK_PLACES: tl.constexpr):
    """A tile of a case, from memory that runs along places to memory that runs along channels, rounded to the dtype of
    `out`.
    """
    tiles, channel_tiles = tl.cdiv(places, BLOCK_PLACES), tl.cdiv(channels, BLOCK)
    rest = tl.program_id(0) // tiles
    case = (rest // channel_tiles).to(tl.int64)
    channel = rest % channel_tiles * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0) % tiles * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    mask = (channel < channels)[:, None] & (place < places)[None, :]
    start = case * channels * places
    tile = tl.load(x + start + channel[:, None] * places + place[None, :], mask=mask, other=0.0)
    to = out + start + place[:, None] * channels + channel[None, :]
    tl.store(
        to, tl.trans(tile.to(out.dtype.element_ty)), mask=(place < places)[:, None] & (channel < channels)[None, :]
    )


@triton.jit
def gain_kernel(
    g,
    x,
    mean,
    reciprocal,
    out,
    cases,
    cases_of_each,
    places,
    channels,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Some channels of a case, or, where memory runs along places, some (case, channel); of a stack of layers."""
    if ALIGNED > 1:
        places = tl.multiple_of(places, ALIGNED)
    if CHANNELS_LAST:
        tiles = tl.cdiv(channels, BLOCK)
        case = tl.program_id(0) // tiles
        channel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        start = case.to(tl.int64) * places * channels + channel
        to = case * channels + channel
    else:
        to = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        case, channel = to // channels, to % channels
        inside = to < cases * channels
        start = to.to(tl.int64) * places
    layer = case // cases_of_each * channels
    middle = tl.load(mean + layer + channel, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, places, BLOCK_PLACES):
        place = first + tl.arange(0, BLOCK_PLACES)
        at = start[:, None] + (place * channels if CHANNELS_LAST else place)[None, :]
        mask = inside[:, None] & (place < places)[None, :]
        derivative = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        activation = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(derivative * (activation - middle[:, None]), 1)
    tl.store(out + to, total * tl.load(reciprocal + layer + channel, mask=inside, other=0.0), mask=inside)

"""The Triton kernels behind `natgrad.statistics.gpu`, which says what they are for.

The order of a piece's numbers is that in which each kernel loads them (`natgrad.pieces`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from natgrad.pieces import aligned, piece_of


@triton.jit
def moment_kernel(
    pointers,
    table,
    owners,
    DTYPE: tl.constexpr,
    ROUNDED: tl.constexpr,
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
    Rows are the places of all cases, or, where memory runs along places, those of one case at a time. They are
    multiplied as ROUNDED; float32 means all digits.
    """
    numbers, program = piece_of(table, owners, 32)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    offset = tl.load(numbers + 2)
    out = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32))
    out = tl.multiple_of(out, 16) + aligned(tl.load(numbers + 4), 4)
    tiles, splits, stack = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    iterations, per_split = tl.load(numbers + 8), tl.load(numbers + 9)
    rows, places, blocks = tl.load(numbers + 10), tl.load(numbers + 11), tl.load(numbers + 12)
    columns, channels, out_width = tl.load(numbers + 13), tl.load(numbers + 14), tl.load(numbers + 15)
    height, width = tl.load(numbers + 16), tl.load(numbers + 17)
    kernel_size, kernel_width = tl.load(numbers + 18), tl.load(numbers + 19)
    stride_y, stride_x = tl.load(numbers + 20), tl.load(numbers + 21)
    dilation_y, dilation_x = tl.load(numbers + 22), tl.load(numbers + 23)
    padding_y, padding_x = tl.load(numbers + 24), tl.load(numbers + 25)
    apart = tl.load(numbers + 26)
    by_case, by_channel = tl.load(numbers + 27), tl.load(numbers + 28)
    by_y, by_x = tl.load(numbers + 29), tl.load(numbers + 30)
    scale = tl.load(numbers + 31).to(tl.float32, bitcast=True)
    offset, apart, by_case = aligned(offset, ALIGNED), aligned(apart, ALIGNED), aligned(by_case, ALIGNED)
    if CHANNELS_LAST:
        columns, channels = aligned(columns, ALIGNED), aligned(channels, ALIGNED)
        by_y, by_x = aligned(by_y, ALIGNED), aligned(by_x, ALIGNED)
    else:
        by_channel, places = aligned(by_channel, ALIGNED), aligned(places, ALIGNED)

    tile, rest = program % tiles, program // tiles
    split, group = rest % splits, rest // splits
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    left = i * BLOCK + tl.arange(0, BLOCK)
    right = j * BLOCK + tl.arange(0, BLOCK)
    x = tl.multiple_of(x, 16) + offset + group.to(tl.int64) * apart
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
    else:
        left_channel, right_channel = left, right
    if not CHANNELS_LAST:
        left_channel, right_channel = left_channel * by_channel, right_channel * by_channel
    left_at, right_at = left_channel, right_channel
    if PATCHES:
        left_at += left_y * by_y + left_x * by_x
        right_at += right_y * by_y + right_x * by_x
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
        a = tl.load(x + left_at[:, None] + at[None, :], mask=left_mask, other=0.0).to(ROUNDED)
        b = tl.load(x + right_at[:, None] + at[None, :], mask=right_mask, other=0.0).to(ROUNDED)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    sums *= scale
    out += (split * stack + group).to(tl.int64) * columns * columns
    tl.store(
        out + left[:, None] * columns + right[None, :],
        sums,
        mask=(left < columns)[:, None] & (right < columns)[None, :],
    )
    if i != j:
        tl.store(
            out + right[:, None] * columns + left[None, :],
            tl.trans(sums),
            mask=(right < columns)[:, None] & (left < columns)[None, :],
        )


@triton.jit
def correlation_kernel(
    pointers,
    table,
    owners,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One tile of the products of all pixels with those at each offset, of the pixels of one split.

    Left columns are channels, right ones channels at an offset, offset by offset; WHOLE says that no tile has parts of
    two. Memory runs along channels.
    """
    numbers, program = piece_of(table, owners, 14)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    out = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32)) + tl.load(numbers + 3)
    tiles = tl.load(numbers + 4)
    iterations, per_split = tl.load(numbers + 5), tl.load(numbers + 6)
    rows, channels, columns = tl.load(numbers + 7), tl.load(numbers + 8), tl.load(numbers + 9)
    height, width, kernel_width = tl.load(numbers + 10), tl.load(numbers + 11), tl.load(numbers + 12)
    by_place = tl.load(numbers + 13)
    x = tl.multiple_of(x, 16)
    channels, columns, by_place = aligned(channels, ALIGNED), aligned(columns, ALIGNED), aligned(by_place, ALIGNED)

    tile, split = program % tiles, program // tiles
    left_tiles = tl.cdiv(channels, BLOCK_LEFT)
    i, j = tile % left_tiles, tile // left_tiles
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
    out += split.to(tl.int64) * channels * columns
    tl.store(
        out + left[:, None] * columns + right[None, :],
        sums,
        mask=(left < channels)[:, None] & (right < columns)[None, :],
    )


@triton.jit
def finish_kernel(pointers, table, owners, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Adds up splits, DEPTH at a time, multiplies with a scale, and puts columns that stand kernel element by kernel
    element into the weight's order. Or adds up the squares of rows.
    """
    numbers, program = piece_of(table, owners, 11)
    source = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32)) + tl.load(numbers + 2)
    out = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32)) + tl.load(numbers + 4)
    count, size, elements = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    splits, squared = tl.load(numbers + 8), tl.load(numbers + 9)
    scale = tl.load(numbers + 10).to(tl.float32, bitcast=True)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    entry, row, column = at // (size * size), at // size % size, at % size
    channels = size // elements
    row = row % elements * channels + row // elements
    column = column % elements * channels + column // elements
    source += (entry * size + row) * size + column
    total = tl.zeros((DEPTH, BLOCK), dtype=tl.float32)
    for first in range(0, splits, DEPTH):
        split = first + tl.arange(0, DEPTH)
        mask = (split < splits)[:, None] & inside[None, :]
        value = tl.load(source[None, :] + split.to(tl.int64)[:, None] * count, mask=mask, other=0.0)
        total += tl.where(squared > 0, value * value, value)
    tl.store(out + at, tl.sum(total, 0) * scale, mask=inside)


@triton.jit
def spread_kernel(pointers, table, owners, FIRSTS: tl.constexpr, SECONDS: tl.constexpr, OTHERS: tl.constexpr):
    """A part of the factor, some channels at one kernel element with some at all: each pair of kernel elements has the
    product at the difference of their offsets, less the places beyond the border that only some pairs see.
    """
    numbers, program = piece_of(table, owners, 16)
    source = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    out = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32)) + tl.load(numbers + 3)
    channels, kernel_height, kernel_width = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    margin_y, margin_x = tl.load(numbers + 7), tl.load(numbers + 8)
    scale = tl.load(numbers + 9).to(tl.float32, bitcast=True)
    correlation = source + tl.load(numbers + 10)
    top, bottom = source + tl.load(numbers + 11), source + tl.load(numbers + 12)
    left, right = source + tl.load(numbers + 13), source + tl.load(numbers + 14)
    blocks = tl.load(numbers + 15)

    elements = kernel_height * kernel_width
    columns = channels * elements
    rest = program // blocks
    one = rest % elements
    one_y, one_x = one // kernel_width, one % kernel_width
    first = (rest // elements * FIRSTS + tl.arange(0, FIRSTS))[:, None, None]
    second = (program % blocks * SECONDS + tl.arange(0, SECONDS))[None, :, None]
    other = tl.arange(0, OTHERS)[None, None, :]
    inside = (first < channels) & (second < channels) & (other < elements)
    other_y, other_x = other // kernel_width, other % kernel_width
    down, along = other_y - one_y, other_x - one_x
    forward = (down > 0) | ((down == 0) & (along >= 0))
    span = 2 * kernel_width - 1
    size_y, size_x = tl.abs(down), tl.where(forward, along, -along)
    offset = tl.where(size_y == 0, size_x, kernel_width + (size_y - 1) * span + size_x + kernel_width - 1)
    offsets = kernel_width + (kernel_height - 1) * span
    # Two loads, each of what lies side by side in memory: by second channels, and by first ones.
    at = (first * offsets + offset).to(tl.int64) * channels + second
    value = tl.load(correlation + at, mask=inside & forward, other=0.0)
    at = (second * offsets + offset).to(tl.int64) * channels + first
    value += tl.load(correlation + at, mask=inside & (forward == 0), other=0.0)
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
    to = (first * elements + one).to(tl.int64) * columns + second * elements + other
    tl.store(out + to, value * scale, mask=inside)


@triton.jit
def channels_last_kernel(
    pointers,
    table,
    owners,
    DTYPE: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALONG_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ALIGNED_CHANNELS: tl.constexpr,
):
    """A tile of a case, to memory that runs along channels, rounded."""
    numbers, program = piece_of(table, owners, 6)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    out = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(ROUNDED))
    channels, places, by_case = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    x, out = tl.multiple_of(x, 16), tl.multiple_of(out, 16)
    channels = aligned(channels, ALIGNED_CHANNELS)
    if not ALONG_CHANNELS:
        places = aligned(places, ALIGNED)
    tiles, channel_tiles = tl.cdiv(places, BLOCK_PLACES), tl.cdiv(channels, BLOCK)
    rest = program // tiles
    case = (rest // channel_tiles).to(tl.int64)
    channel = rest % channel_tiles * BLOCK + tl.arange(0, BLOCK)
    place = program % tiles * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    x += case * aligned(by_case, ALIGNED)
    by_channel, by_place = (1, channels) if ALONG_CHANNELS else (places, 1)
    at = channel[:, None] * by_channel + place[None, :] * by_place
    tile = tl.load(x + at, mask=(channel < channels)[:, None] & (place < places)[None, :], other=0.0)
    to = out + case * channels * places + place[:, None] * channels + channel[None, :]
    tl.store(to, tl.trans(tile.to(ROUNDED)), mask=(place < places)[:, None] & (channel < channels)[None, :])


@triton.jit
def norm_kernel(
    pointers,
    table,
    owners,
    DTYPE: tl.constexpr,
    GAINS: tl.constexpr,
    BIASES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each case's gradient of a batch norm's gain, Σ g (x − mean) · reciprocal over places, and of its bias, Σ g: some
    channels of a case, or, where memory runs along places, some (case, channel).
    """
    numbers, program = piece_of(table, owners, 12)
    g = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    x = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(DTYPE))
    mean = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32))
    reciprocal = tl.load(pointers + tl.load(numbers + 4)).to(tl.pointer_type(tl.float32))
    sums = tl.load(pointers + tl.load(numbers + 5)).to(tl.pointer_type(tl.float32))
    gains, biases = sums + tl.load(numbers + 6), sums + tl.load(numbers + 7)
    cases, channels, places = tl.load(numbers + 8), tl.load(numbers + 9), tl.load(numbers + 10)
    by_case = aligned(tl.load(numbers + 11), ALIGNED)
    g, x = tl.multiple_of(g, 16), tl.multiple_of(x, 16)
    if CHANNELS_LAST:
        channels = aligned(channels, ALIGNED)
        tiles = tl.cdiv(channels, BLOCK)
        case = program // tiles
        channel = program % tiles * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        start = case.to(tl.int64) * by_case + channel
        to = case * channels + channel
    else:
        places = aligned(places, ALIGNED)
        to = program * BLOCK + tl.arange(0, BLOCK)
        case, channel = to // channels, to % channels
        inside = to < cases * channels
        start = case.to(tl.int64) * by_case + channel * places
    if GAINS:
        middle = tl.load(mean + channel, mask=inside, other=0.0)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIASES:
        plain = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, places, BLOCK_PLACES):
        place = first + tl.arange(0, BLOCK_PLACES)
        at = start[:, None] + (place * channels if CHANNELS_LAST else place)[None, :]
        mask = inside[:, None] & (place < places)[None, :]
        derivative = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        if GAINS:
            activation = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(derivative * (activation - middle[:, None]), 1)
        if BIASES:
            plain += tl.sum(derivative, 1)
    if GAINS:
        tl.store(gains + to, total * tl.load(reciprocal + channel, mask=inside, other=0.0), mask=inside)
    if BIASES:
        tl.store(biases + to, plain, mask=inside)


@triton.jit
def move_kernel(pointers, table, owners, finite, decay, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """S ← ξS + new, where that is finite."""
    numbers, program = piece_of(table, owners, 5)
    total = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    new = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32))
    count, factor = aligned(tl.load(numbers + 3), ALIGNED), tl.load(numbers + 4)
    total, new = tl.multiple_of(total, 16), tl.multiple_of(new, 16)
    if tl.load(finite + factor) != 0:
        at = program * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        old = tl.load(total + at, mask=inside, other=0.0)
        tl.store(total + at, decay * old + tl.load(new + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def finite_kernel(pointers, table, owners, bad, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Marks tensors with elements that are not finite."""
    numbers, program = piece_of(table, owners, 4)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    count, factor = aligned(tl.load(numbers + 2), ALIGNED), tl.load(numbers + 3)
    at = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(tl.multiple_of(x, 16) + at, mask=at < count, other=0.0)
    if tl.sum((value - value != 0).to(tl.int32)) > 0:
        tl.atomic_max(bad + factor, 1)

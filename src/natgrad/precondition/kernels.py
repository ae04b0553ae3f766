"""The Triton kernels behind `natgrad.precondition.fused`.

A piece is one parameter, or the part of it that a block covers, in the matrices (K, rows, columns) of a stack. The
order of its numbers is that in which kernels load them (`natgrad.pieces`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from natgrad.pieces import aligned, piece_of


@triton.jit
def tile_of(numbers, program, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's entry, rows and columns of a piece, and which of them there are."""
    rows, columns = tl.load(numbers + 6), tl.load(numbers + 7)
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    entry, tile = program // tiles, program % tiles
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    return entry, row, column, rows, columns


@triton.jit
def in_matrix(numbers, entry, row, column, ALIGNED: tl.constexpr):
    """Where elements are in a stack's matrices."""
    start = aligned(tl.load(numbers + 8), ALIGNED)
    by_entry, by_row = aligned(tl.load(numbers + 9), ALIGNED), aligned(tl.load(numbers + 10), ALIGNED)
    return start + entry * by_entry + row[:, None] * by_row + column[None, :]


@triton.jit
def in_gradient(numbers, entry, row, column, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    """Where elements are in a gradient: columns are blocks of elements, as those of a kernel in channels-last memory
    are.
    """
    start = aligned(tl.load(numbers + 11), ALIGNED)
    by_entry, by_row = aligned(tl.load(numbers + 12), ALIGNED), aligned(tl.load(numbers + 13), ALIGNED)
    at = start + entry * by_entry + row[:, None] * by_row
    if CONTIGUOUS:
        return at + column[None, :]
    elements, by_block, by_element = tl.load(numbers + 14), tl.load(numbers + 15), tl.load(numbers + 16)
    return at + (column // elements * by_block + column % elements * by_element)[None, :]


@triton.jit
def gather_kernel(
    pointers,
    table,
    owners,
    DTYPE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients into matrices."""
    numbers, program = piece_of(table, owners, 17)
    gradient = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    matrix = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32))
    entry, row, column, rows, columns = tile_of(numbers, program, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < aligned(columns, ALIGNED))[None, :]
    if ALIGNED > 1:
        gradient, matrix = tl.multiple_of(gradient, 16), tl.multiple_of(matrix, 16)
    value = tl.load(gradient + in_gradient(numbers, entry, row, column, CONTIGUOUS, ALIGNED), mask=inside, other=0.0)
    tl.store(matrix + in_matrix(numbers, entry, row, column, ALIGNED), value.to(tl.float32), mask=inside)


@triton.jit
def length_kernel(
    pointers,
    table,
    owners,
    out,
    DTYPE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """α² vᵀ∇ of this program's part, of directions in matrices and gradients in their own memory."""
    numbers, program = piece_of(table, owners, 17)
    gradient = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    matrix = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32))
    rate = tl.load(tl.load(pointers + tl.load(numbers + 4)).to(tl.pointer_type(tl.float64)))
    entry, row, column, rows, columns = tile_of(numbers, program, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < aligned(columns, ALIGNED))[None, :]
    if ALIGNED > 1:
        gradient, matrix = tl.multiple_of(gradient, 16), tl.multiple_of(matrix, 16)
    value = tl.load(gradient + in_gradient(numbers, entry, row, column, CONTIGUOUS, ALIGNED), mask=inside, other=0.0)
    direction = tl.load(matrix + in_matrix(numbers, entry, row, column, ALIGNED), mask=inside, other=0.0)
    total = tl.sum(tl.sum(value.to(tl.float32) * direction, 1), 0).to(tl.float64)
    if DIVIDED:
        scale = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32))
        total = total / tl.load(scale + tl.load(numbers + 5) + entry).to(tl.float64)
    tl.store(out + tl.program_id(0), total * rate * rate)


@triton.jit
def scatter_kernel(
    pointers,
    table,
    owners,
    factor,
    finite,
    DTYPE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Directions, clipped, into the gradients' own memory; zero where the step is not finite."""
    numbers, program = piece_of(table, owners, 17)
    gradient = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(DTYPE))
    matrix = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32))
    entry, row, column, rows, columns = tile_of(numbers, program, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < aligned(columns, ALIGNED))[None, :]
    if ALIGNED > 1:
        gradient, matrix = tl.multiple_of(gradient, 16), tl.multiple_of(matrix, 16)
    multiplier = tl.load(factor)
    if DIVIDED:
        scale = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32))
        multiplier = multiplier / tl.load(scale + tl.load(numbers + 5) + entry).to(tl.float64)
    value = tl.load(matrix + in_matrix(numbers, entry, row, column, ALIGNED), mask=inside, other=0.0)
    value = value * multiplier.to(tl.float32)
    if tl.load(finite) == 0:
        value = tl.zeros_like(value)
    at = in_gradient(numbers, entry, row, column, CONTIGUOUS, ALIGNED)
    tl.store(gradient + at, value.to(DTYPE), mask=inside)


@triton.jit
def quotient_kernel(pointers, table, owners, damping, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Coefficients in the eigenbasis, divided in place by scale · row value · column value + λ. Columns beyond the
    `real` ones are zero, and stay so.
    """
    numbers, program = piece_of(table, owners, 11)
    matrix = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    row_values = tl.load(pointers + tl.load(numbers + 2)).to(tl.pointer_type(tl.float32))
    column_values = tl.load(pointers + tl.load(numbers + 3)).to(tl.pointer_type(tl.float32))
    scale = tl.load(pointers + tl.load(numbers + 4)).to(tl.pointer_type(tl.float32))
    real = tl.load(numbers + 5)
    entry, row, column, rows, columns = tile_of(numbers, program, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < aligned(columns, ALIGNED))[None, :]
    if ALIGNED > 1:
        matrix = tl.multiple_of(matrix, 16)
    along = tl.load(row_values + entry * rows + row, mask=row < rows, other=0.0) * tl.load(scale + entry)
    across = tl.load(column_values + entry * real + column, mask=column < real, other=0.0)
    at = in_matrix(numbers, entry, row, column, ALIGNED)
    value = tl.load(matrix + at, mask=inside, other=0.0)
    divisor = along[:, None] * across[None, :] + tl.load(damping).to(tl.float32)
    tl.store(matrix + at, tl.where((column < real)[None, :], value / divisor, 0.0), mask=inside)


@triton.jit
def trace_kernel(pointers, table, owners, out, BLOCK: tl.constexpr):
    """The trace of one matrix of a stack, or the sum of a diagonal."""
    numbers, program = piece_of(table, owners, 5)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    size, dense, entry = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    by_entry = tl.where(dense > 0, size * size, size)
    by_row = tl.where(dense > 0, size + 1, 1)
    x += program.to(tl.int64) * by_entry
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(x + row * by_row, mask=row < size, other=0.0)
    tl.store(out + entry + program, tl.sum(total, 0))


@triton.jit
def damp_kernel(pointers, table, owners, multiply, add, out, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """A part of a stack of matrices, or of diagonals, times a number, with another one on the diagonal."""
    numbers, program = piece_of(table, owners, 7)
    x = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32))
    start, count = aligned(tl.load(numbers + 2), 4), aligned(tl.load(numbers + 3), ALIGNED)
    size, dense, entry = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    of_entry = at // tl.where(dense > 0, size * size, size)
    on_diagonal = (dense == 0) | (at // size % size == at % size)
    value = tl.load(tl.multiple_of(x, 16) + at, mask=inside, other=0.0)
    value *= tl.load(multiply + entry + of_entry, mask=inside, other=0.0)
    value += tl.where(on_diagonal, tl.load(add + entry + of_entry, mask=inside, other=0.0), 0.0)
    tl.store(out + start + at, value, mask=inside)

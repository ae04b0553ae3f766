"""What Triton kernels with many pieces of work share.

A launch has pieces of one layer or of many: a program looks up whose part it does, and the numbers of that piece, of
which the first is the number of its first program. What changes from step to step is where tensors are: `pointers`. See
`natgrad.launches`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece_of(table, owners, NUMBERS: tl.constexpr):
    """Where the numbers of this program's piece are, and which part of it is this program's."""
    program = tl.program_id(0)
    numbers = table + tl.load(owners + program) * NUMBERS
    return numbers, program - tl.load(numbers)


@triton.jit
def trial_kernel(pointers, table, owners, number, TIMES: tl.constexpr):
    """Adds to one number a program: whether kernels can be launched at all."""
    numbers, program = piece_of(table, owners, 2)
    out = tl.load(pointers + tl.load(numbers + 1)).to(tl.pointer_type(tl.float32)) + program
    tl.store(out, tl.load(out) + number * TIMES)


@triton.jit
def aligned(number, ALIGNED: tl.constexpr):
    """A multiple of ALIGNED, for the compiler too: loads of several elements at once need to know."""
    return number // ALIGNED * ALIGNED

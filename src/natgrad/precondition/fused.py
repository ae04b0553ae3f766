"""The arithmetic of a step on a GPU, all that is not a product in a few launches.

From the gradients' memory into the matrices of all stacks, products, in the eigenbasis quotients, the clip, and back
into the gradients' memory: what would be a dozen passes over all parameters, and a dozen launches for every stack, is
four kernels (`natgrad.precondition.kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.layout import Layout
from natgrad.launches import ALIGNED_BYTES, HOST, Launch, able, addresses, countable, kernel, triton_type
from natgrad.precondition.clip import Clip, clip
from natgrad.precondition.rates import LearningRate, Rates
from natgrad.precondition.stack import Stack
from natgrad.solve.damping import columns_of, divisor
from natgrad.statistics.moving import numbers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 2**14
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")

Gradients = Mapping[str, Tensor | None]


def lie(gradients: Iterable[Tensor | None]) -> tuple[object, ...]:
    """All that kernels know of gradients, but where they are."""
    every = list(gradients)
    present = [gradient for gradient in every if gradient is not None]
    return (
        [number for number, gradient in enumerate(every) if gradient is None],
        list(map(_shape, present)),
        list(map(Tensor.stride, present)),
        list(map(_dtype, present)),
        [place % ALIGNED_BYTES == 0 for place in map(Tensor.data_ptr, present)],
    )


@dataclass(frozen=True)
class _Steps:
    """From element to element of a gradient, in the order of a matrix: blocks of elements make a column index."""

    start: int
    by_entry: int
    by_row: int
    elements: int
    by_block: int
    by_element: int

    @property
    def is_contiguous(self) -> bool:
        return self.elements == 1 and self.by_block == 1


def _steps(layout: Layout, gradient: Tensor) -> _Steps | None:
    """How a gradient lies, as a layout's matrix sees it; None where that is more than one can say in few numbers."""
    if any(stride == 0 and size > 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True)):
        return None
    try:
        view = layout.to_view(gradient)
    except RuntimeError:
        return _channels_last_steps(layout, gradient) or _steps_of_two_axes(layout, gradient)
    by_entry, by_row, by_column = view.stride()
    return _Steps(int(view.storage_offset() - gradient.storage_offset()), by_entry, by_row, 1, by_column, 0)


def _channels_last_steps(layout: Layout, gradient: Tensor) -> _Steps | None:
    """Of a convolution's weight (out, in, *kernel) whose memory runs along its input channels."""
    if gradient.dim() < 3:
        return None
    channels, elements = gradient.shape[1], gradient[0, 0].numel()
    wanted = gradient.permute(0, *range(2, gradient.dim()), 1)
    in_order = layout.box is None and layout.is_in_order and layout.shape[2] == channels * elements
    if not wanted.is_contiguous() or not in_order:
        return None
    row = channels * elements
    return _Steps(0, layout.shape[1] * row, row, elements, 1, channels)


def _steps_of_two_axes(layout: Layout, gradient: Tensor) -> _Steps | None:
    """Of a transposed convolution's weight (in, out, *kernel): rows are between the two axes that make a column."""
    if len(layout.column_axes) != 2 or max(len(layout.stack_axes), len(layout.row_axes)) > 1:
        return None
    try:
        view = layout.region(gradient).view(layout.axes)
    except RuntimeError:
        return None
    by_block, by_element = (view.stride(axis) for axis in layout.column_axes)
    by_entry, by_row = (view.stride(axes[0]) if axes else 0 for axes in (layout.stack_axes, layout.row_axes))
    start = int(view.storage_offset() - gradient.storage_offset())
    return _Steps(start, by_entry, by_row, layout.axes[layout.column_axes[1]], by_block, by_element)


@dataclass(frozen=True)
class _Piece:
    """One parameter in a stack: its numbers for the kernels, how many programs it has, and its class of kernels."""

    name: str
    numbers: tuple[int, ...]  # from `entry` on
    entries: int
    options: tuple[tuple[str, Any], ...]

    @property
    def elements(self) -> int:
        _, rows, columns, *_ = self.numbers
        return self.entries * rows * columns

    @property
    def programs(self) -> int:
        options: dict[str, int] = dict(self.options)
        _, rows, columns, *_ = self.numbers
        return self.entries * -(-rows // options["ROWS"]) * -(-columns // options["COLUMNS"])


def _piece(stack: Stack, layout: Layout, gradient: Tensor, entry: int, column: int) -> _Piece | None:
    """The part of a stack's matrices, from an entry and a column on, that a layout has."""
    steps = _steps(layout, gradient)
    if steps is None:
        return None
    entries, rows, columns = layout.shape
    _, padded_rows, padded_columns = stack.padded_shape
    by_entry, by_row = padded_rows * padded_columns, padded_columns
    if padded_columns == 1 and rows > 1:  # a vector: one row of elements
        rows, columns, by_row = 1, rows, padded_rows
        steps = _Steps(steps.start, steps.by_entry, 0, 1, steps.by_row, 0)
    start = entry * by_entry + column
    aligned = 1
    if steps.is_contiguous and gradient.data_ptr() % ALIGNED_BYTES == 0:
        all_of_them = (columns, start, by_entry, by_row, steps.start, steps.by_entry, steps.by_row)
        aligned = next(a for a in (8, 4, 2, 1) if all(number % a == 0 for number in all_of_them))
    tile = (1, 1024) if rows == 1 else (32, 128)
    return _Piece(
        layout.name,
        (
            *(entry, rows, columns, start, by_entry, by_row),
            *(steps.start, steps.by_entry, steps.by_row, steps.elements, steps.by_block, steps.by_element),
        ),
        entries,
        (
            ("ALIGNED", aligned),
            ("COLUMNS", tile[1]),
            ("CONTIGUOUS", steps.is_contiguous),
            ("DTYPE", gradient.dtype),
            ("ROWS", tile[0]),
        ),
    )


def fused(stacks: Sequence[Stack], gradients: Gradients, solver: str, rule: str) -> Fused | None:
    """The arithmetic of these stacks for gradients that lie as these do; None where kernels cannot do it."""
    first = stacks[0].device
    if not able(first):
        return None
    pieces: list[list[_Piece]] = []
    for stack in stacks:
        count, rows, columns = stack.padded_shape
        if stack.dtype != torch.float32 or stack.device != first or count * rows * columns >= _MOST:
            return None
        own: list[_Piece] = []
        entry = 0
        for member, entries in zip(stack.members, stack.counts, strict=True):
            column = 0
            for layout in member.block.layouts:
                gradient = gradients[layout.name]
                if gradient is not None:
                    fits = gradient.device == first and gradient.dtype in _DTYPES and countable(gradient)
                    piece = _piece(stack, layout, gradient, entry, column) if fits else None
                    if piece is None:
                        return None
                    own.append(piece)
                column += layout.shape[2]
            entry += entries
        pieces.append(own)
    return Fused(stacks, pieces, solver, rule)


class Memory:
    """The stacks' matrices, and where all tensors are. `lasting`: of a graph, whose pointers are sent when all are
    known, and whenever gradients have moved.
    """

    def __init__(self, slots: int, shapes: Sequence[tuple[int, ...]], device: torch.device, *, lasting: bool) -> None:
        self.pointers = [0] * slots
        self._device = device
        self._sent = torch.zeros(slots, dtype=torch.int64, device=device) if lasting else None
        self.matrices = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]

    def sent(self) -> Tensor:
        """The pointers, on the device."""
        return addresses(self.pointers, self._device) if self._sent is None else self._sent

    def send(self) -> None:
        """All pointers are known, or some have changed."""
        assert self._sent is not None, "only what lasts is sent again"
        here = torch.tensor(self.pointers, dtype=torch.int64, device=HOST, pin_memory=True)
        self._sent.copy_(here, non_blocking=True)


# The slots of a stack, from its first one on.
_MATRIX, _SCALE, _ROW_VALUES, _COLUMN_VALUES = range(4)
_OF_A_STACK = 4


class Fused:
    """See the module. Slots: the gradients, and for each stack its matrices, scales and, in the eigenbasis, the values
    of rows and columns; then learning rates.

    A stack's matrices are gradients at first, then their coefficients in the eigenbasis, and directions in the end: all
    of it happens in their place, but for one product on the way. Gradients are still where they were, until directions
    take their place.
    """

    def __init__(self, stacks: Sequence[Stack], pieces: Sequence[Sequence[_Piece]], solver: str, rule: str) -> None:
        self._stacks, self._solver, self._rule = stacks, solver, rule
        self._device = stacks[0].device
        self.names = list(dict.fromkeys(piece.name for own in pieces for piece in own))
        self._pieces = pieces
        self._missing = [_missing(stack, own) for stack, own in zip(stacks, pieces, strict=True)]
        self._filled = [_is_filled(stack, own) for stack, own in zip(stacks, pieces, strict=True)]
        slot = {name: number for number, name in enumerate(self.names)}
        self._rates_at = len(self.names) + _OF_A_STACK * len(stacks)
        # Kernels by class: each with its pieces' numbers and programs.
        classes: dict[tuple[tuple[str, Any], ...], tuple[list[tuple[int, ...]], list[int]]] = {}
        rate = self._rates_at
        for number, own in enumerate(pieces):
            first = self._of(number)
            for piece in own:
                rows, programs = classes.setdefault(piece.options, ([], []))
                slots = (slot[piece.name], first + _MATRIX, first + _SCALE, rate)
                rows.append((*slots, *piece.numbers))
                programs.append(piece.programs)
                rate += 1
        self._slots = rate
        self._programs = [sum(programs) for _, programs in classes.values()]
        self._gather, self._length, self._scatter = (
            [self._launch(name, rows, programs, dict(options)) for options, (rows, programs) in classes.items()]
            for name in ("gather_kernel", "length_kernel", "scatter_kernel")
        )
        self._quotients = self._quotient_launches() if (solver, rule) == ("eigen", "joint") else None

    def _launch(
        self, name: str, rows: Sequence[Sequence[int]], programs: Sequence[int], options: Mapping[str, Any]
    ) -> Launch:
        """With those of the options that a kernel knows."""
        found = kernel("precondition", name)
        known = {**options, "DIVIDED": self._solver == "inverse"}
        constants = {key: triton_type(value) for key, value in known.items() if key in found.arg_names}
        return Launch(found, rows, programs, self._device, **constants)

    def _of(self, number: int) -> int:
        """The first slot of a stack."""
        return len(self.names) + _OF_A_STACK * number

    def _quotient_launches(self) -> list[Launch]:
        classes: dict[tuple[int, int, int], tuple[list[tuple[int, ...]], list[int]]] = {}
        for number, stack in enumerate(self._stacks):
            (count, rows, columns), (_, padded_rows, padded_columns) = stack.shape, stack.padded_shape
            of = self._of(number)
            aligned = 4 if padded_columns % 4 == 0 else 1
            tile = (1024, 1) if columns == 1 else (32, 128)
            slots = (of + _MATRIX, of + _ROW_VALUES, of + _COLUMN_VALUES, of + _SCALE)
            some, programs = classes.setdefault((aligned, *tile), ([], []))
            some.append((*slots, columns, rows, padded_columns, 0, padded_rows * padded_columns, padded_columns))
            programs.append(count * -(-rows // tile[0]) * -(-padded_columns // tile[1]))
        return [
            self._launch("quotient_kernel", rows, programs, {"ALIGNED": a, "ROWS": r, "COLUMNS": c})
            for (a, r, c), (rows, programs) in classes.items()
        ]

    def memory(self, *, lasting: bool) -> Memory:
        """For `run`: of one step, or lasting."""
        return Memory(self._slots, [stack.padded_shape for stack in self._stacks], self._device, lasting=lasting)

    def find(self, gradients: Gradients, pointers: list[int]) -> bool:
        """Puts where the gradients are; whether they were elsewhere before."""
        present: Any = map(gradients.__getitem__, self.names)  # pieces are those with a gradient
        here = list(map(Tensor.data_ptr, present))
        moved = pointers[: len(here)] != here
        pointers[: len(here)] = here
        return moved

    def run(
        self,
        memory: Memory,
        gradients: Gradients,
        damping: float | Tensor,
        kappa: float | Tensor | None,
        rates: Sequence[Rates],
        finite: Tensor | None,
    ) -> Clip:
        """Replaces gradients by directions, clipped: what `Preconditioner._replace` does."""
        pointers = memory.pointers
        self.find(gradients, pointers)
        lam = damping if isinstance(damping, Tensor) else numbers([damping], self._device)
        # What is looked up must last until kernels have read it.
        rates_kept = self._place_rates(pointers, rates)
        values = [] if self._quotients is None else [_rows_and_columns(stack) for stack in self._stacks]
        for number, (stack, matrix) in enumerate(zip(self._stacks, memory.matrices, strict=True)):
            tensors = (matrix, stack.scale, *(values[number] if values else ()))
            at = self._of(number)
            pointers[at : at + len(tensors)] = [tensor.data_ptr() for tensor in tensors]
        sent = memory.sent()
        self._clear_gaps(memory.matrices)
        for launch in self._gather:
            launch(sent)
        self._make_directions(memory.matrices, sent, lam)
        clipped = clip(self._squared_length(sent), kappa)
        del rates_kept, values
        if finite is not None:
            clipped = replace(clipped, finite=clipped.finite & finite)
        for launch in self._scatter:
            launch(sent, clipped.factor, clipped.finite.view(torch.uint8))
        return clipped

    def _place_rates(self, pointers: list[int], rates: Sequence[Rates]) -> list[Tensor]:
        """Puts where learning rates are; returns tensors that must last until they are read."""
        wanted: list[LearningRate] = []
        for own, missing, rate in zip(self._pieces, self._missing, rates, strict=True):
            if isinstance(rate, list):
                every = [one for group in rate for one in group]
                wanted += [one for number, one in enumerate(every) if number not in missing]
            else:
                wanted += [rate] * len(own)
        known = dict.fromkeys(float(one) for one in wanted if not isinstance(one, Tensor))
        places = {value: number for number, value in enumerate(known)}
        here = numbers(list(known), self._device)
        lasting = [here]
        for number, one in enumerate(wanted):
            if isinstance(one, Tensor):
                lasting.append(one.to(self._device, torch.float64))
                pointers[self._rates_at + number] = lasting[-1].data_ptr()
            else:
                pointers[self._rates_at + number] = here.data_ptr() + here.element_size() * places[float(one)]
        return lasting

    def _clear_gaps(self, matrices: Sequence[Tensor]) -> None:
        """Zero where no gradient comes: padding, where a NaN of the last step may have spread, and parameters without
        one, where their last direction is.
        """
        for stack, filled, matrix in zip(self._stacks, self._filled, matrices, strict=True):
            _, rows, columns = stack.shape
            _, padded_rows, padded_columns = stack.padded_shape
            if not filled:
                matrix.zero_()
                continue
            if padded_rows > rows:
                matrix[:, rows:].zero_()
            if padded_columns > columns:
                matrix[:, :, columns:].zero_()

    def _make_directions(self, matrices: Sequence[Tensor], sent: Tensor, damping: Tensor) -> None:
        """Of gradients, in their place."""
        stacks = list(zip(self._stacks, matrices, strict=True))
        if self._solver == "inverse":
            for stack, matrix in stacks:
                _settle(stack.multiplied(matrix, out=matrix), matrix)
            return
        for stack, matrix in stacks:
            _settle(stack.rotated(matrix, out=matrix), matrix)
        if self._quotients is None:
            for stack, matrix in stacks:
                _, rows, columns = stack.shape
                matrix[:, :rows, :columns].div_(divisor(self._rule, stack.values(), stack.scale, damping))
        else:
            for launch in self._quotients:
                launch(sent, damping)
        for stack, matrix in stacks:
            _settle(stack.rotated_back(matrix, out=matrix), matrix)

    def _squared_length(self, sent: Tensor) -> Tensor:
        parts = torch.empty(sum(self._programs), dtype=torch.float64, device=self._device)
        for launch, part in zip(self._length, parts.split(self._programs), strict=True):
            launch(sent, part)
        return parts.sum()


def _settle(result: Tensor, matrix: Tensor) -> None:
    """Puts a result where the matrices are, unless a product has: where sides are diagonal there may be none."""
    if result.data_ptr() != matrix.data_ptr():
        matrix.copy_(result)


def _rows_and_columns(stack: Stack) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the rows' side, and of the columns'."""
    rows, *columns = stack.values()
    return rows, columns[0] if len(columns) == 1 else columns_of([rows, *columns])


def _is_filled(stack: Stack, own: Sequence[_Piece]) -> bool:
    """Whether all of a stack's matrices but padding are somebody's."""
    return sum(piece.elements for piece in own) == math.prod(stack.shape)


def _missing(stack: Stack, own: Sequence[_Piece]) -> set[int]:
    """The numbers of a stack's parameters that have no gradient."""
    present = {piece.name for piece in own}
    return {number for number, name in enumerate(stack.names) if name not in present}

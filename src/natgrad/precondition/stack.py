"""Preconditioning blocks of equal shape together: a handful of batched products instead of four per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.blocks.kronecker import KroneckerBlock, over_columns
from natgrad.precondition.buffers import same_norms
from natgrad.solve.damping import divisor
from natgrad.solve.solver import Side

# On a GPU a product whose sizes are no multiples of 8 takes twice as long; a bias makes most of them odd.
_ALIGNED = 8
_LARGE = 256


def padded_size(size: int, device: torch.device) -> int:
    """Of the memory of an n × n matrix, which is zero beyond it."""
    return size if device.type == "cpu" or size < _LARGE else -(-size // _ALIGNED) * _ALIGNED


class SolvedBlock:
    """A block with its solved sides and the scale that belongs to them (for an inverse: what its product is divided
    by). No sides: another rank has them.
    """

    def __init__(self, block: KroneckerBlock, sides: tuple[Side, ...], scale: Tensor, solved_at: int) -> None:
        self.block = block
        self.sides = sides
        self.scale = scale
        self.solved_at = solved_at


class Bank:
    """Joint memory of all sides of one size, each once, however many stacks use it: a refresh writes where the
    products read.
    """

    def __init__(self) -> None:
        self._sides: dict[int, Side] = {}
        self._starts: dict[int, int] = {}
        self._length = 0
        self.matrix: Tensor | None = None
        self.values: Tensor | None = None

    def add(self, sides: Iterable[Side]) -> None:
        """Reserves a place for sides not seen yet; those added together lie together."""
        for side in sides:
            if id(side) not in self._sides:
                self._sides[id(side)] = side
                self._starts[id(side)] = self._length
                self._length += _entries(side)

    def close(self) -> None:
        """Moves the sides' tensors into joint memory."""
        for field in ("matrix", "values"):
            parts = [getattr(side, field) for side in self._sides.values()]
            if parts[0] is None:
                continue
            joined = _joined(parts) if field == "matrix" else torch.cat(parts)
            setattr(self, field, joined)
            for side, part in zip(self._sides.values(), joined.split([p.shape[0] for p in parts]), strict=True):
                setattr(side, field, _inner(part, self.size))

    @property
    def size(self) -> int:
        """n of its n × n matrices."""
        some = next(iter(self._sides.values()))
        part = some.matrix if some.matrix is not None else some.values
        assert part is not None, "a side has a matrix or values"
        return part.shape[-1]

    def entries(self, sides: Sequence[Side]) -> list[int]:
        """Where the stack entries of these sides are, in order."""
        return [self._starts[id(side)] + entry for side in sides for entry in range(_entries(side))]


def _joined(matrices: Sequence[Tensor]) -> Tensor:
    """Stacks of n × n matrices as one, padded with zeros."""
    first = matrices[0]
    size, padded = first.shape[-1], padded_size(first.shape[-1], first.device)
    if padded == size:
        return torch.cat(list(matrices))
    lengths = [part.shape[0] for part in matrices]
    joined = first.new_zeros(sum(lengths), padded, padded)
    for place, part in zip(joined.split(lengths), matrices, strict=True):
        _inner(place, size).copy_(part)
    return joined


def _inner(part: Tensor, size: int) -> Tensor:
    """Without padding."""
    return part[..., :size] if part.dim() < 3 else part[..., :size, :size]


def _entries(side: Side) -> int:
    part = side.matrix if side.matrix is not None else side.values
    assert part is not None, "a side has a matrix or values"
    return part.shape[0]


class Stack:
    """Solved blocks of one shape."""

    def __init__(self, members: Sequence[SolvedBlock], banks: Sequence[Bank]) -> None:
        self.members = list(members)
        sides = zip(*(member.sides for member in members), strict=True)
        # Two column sides act on a column that is folded into two axes, whose sizes are as they are.
        self._row, *self._columns = [
            _Joined(bank, each, padded=number == 0 or len(banks) == 2)
            for number, (bank, each) in enumerate(zip(banks, sides, strict=True))
        ]
        self._counts = [member.block.shape[0] for member in members]
        self._scale = torch.cat([member.scale for member in members])
        _, rows, columns = members[0].block.shape
        more = self._columns[0].padding if len(self._columns) == 1 else 0
        self.shape = (sum(self._counts), rows, columns)  # K, rows, columns; then with the zeros of padded sides
        self.padded_shape = (sum(self._counts), rows + self._row.padding, columns + more)
        # Made here and not when it is asked for: copying it to a device would mean to wait.
        several = any(count > 1 for count in self._counts)
        numbers = [number for number, count in enumerate(self._counts) for _ in range(count)]
        self._members_of_entries = torch.tensor(numbers, device=self._scale.device) if several else None
        for member, part in zip(members, self._scale.split(self._counts), strict=True):
            member.scale = part

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._scale.device

    @cached_property
    def names(self) -> list[str]:
        """Its parameters; one that several members cover in slices stands there as often."""
        return [layout.name for member in self.members for layout in member.block.layouts]

    def has_gradient(self, gradients: Mapping[str, Tensor | None]) -> bool:
        """Whether there is anything to precondition."""
        return any(gradients[name] is not None for name in self.names)

    def gather(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """The members' gradients as (K, rows, columns); zero for members without one."""
        weights, biases = [], []
        for member in self.members:
            block = member.block
            weights.append(self._matrix(block, gradients, bias=False))
            if block.bias is not None:
                biases.append(self._matrix(block, gradients, bias=True))
        joined = torch.cat(weights).to(self._scale.dtype)
        return torch.cat([joined, torch.cat(biases).to(joined.dtype)], dim=2) if biases else joined

    def _matrix(self, block: KroneckerBlock, gradients: Mapping[str, Tensor | None], *, bias: bool) -> Tensor:
        layout = block.bias if bias else block.weight
        assert layout is not None, "asked for the bias of a block that has one"
        gradient = gradients[layout.name]
        if gradient is None:
            return self._scale.new_zeros(layout.shape)
        return layout.to_matrix(gradient)

    @property
    def dtype(self) -> torch.dtype:
        """Of all arithmetic."""
        return self._scale.dtype

    @property
    def scale(self) -> Tensor:
        """Of the members' entries, (K,)."""
        return self._scale

    @property
    def counts(self) -> list[int]:
        """How many entries of K are each member's."""
        return self._counts

    def apply(self, gradient: Tensor, solver: str, rule: str, damping: float | Tensor) -> Tensor:
        """(K, rows, columns) → the damped inverse block times each gradient."""
        _, rows, columns = self.shape
        if solver == "inverse":
            return self.multiplied(self._padded(gradient))[:, :rows, :columns] / self._scale[:, None, None]
        rotated = self.rotated(self._padded(gradient))[:, :rows, :columns]
        quotients = rotated / divisor(rule, self.values(), self._scale, damping)
        return self.rotated_back(self._padded(quotients))[:, :rows, :columns]

    def multiplied(self, matrix: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Padded matrices between the inverses. `out`: memory for the result, if a product makes it; the given
        matrices' own, too.
        """
        return self._row.times(self._after(matrix, inverse=True), inverse=True, out=out)

    def rotated(self, matrix: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Padded matrices in the eigenbasis."""
        return self._row.times(self._after(matrix), transpose=True, out=out)

    def rotated_back(self, matrix: Tensor, *, out: Tensor | None = None) -> Tensor:
        """And out of it."""
        return self._row.times(self._after(matrix, transpose=True), out=out)

    def values(self) -> list[Tensor]:
        """The eigenvalues of every side, (K, n)."""
        return [side.values() for side in (self._row, *self._columns)]

    def _padded(self, gradient: Tensor) -> Tensor:
        """With zeros where the sides' matrices have them."""
        (_, rows, columns), (_, padded_rows, padded_columns) = self.shape, self.padded_shape
        more = (0, padded_columns - columns, 0, padded_rows - rows)
        return functional.pad(gradient, more) if any(more) else gradient

    def quadratic(self, direction: Mapping[str, Tensor | None], rule: str, damping: float) -> Tensor:
        """δᵀF̂δ with the damping in F̂, in its eigenbasis: what `apply` divides by."""
        _, rows, columns = self.shape
        rotated = self.rotated(self._padded(self.gather(direction)))[:, :rows, :columns]
        return (rotated.square() * divisor(rule, self.values(), self._scale, damping)).sum(dtype=torch.float64)

    def _after(self, matrix: Tensor, *, transpose: bool = False, inverse: bool = False) -> Tensor:
        """The column sides' Kronecker product from the right."""
        sizes = [side.size for side in self._columns]
        return over_columns(
            matrix, self._columns, sizes, lambda side, part: side.after(part, transpose=transpose, inverse=inverse)
        )

    def ratio_of_norms(self, direction: Tensor, norms: Mapping[str, Tensor]) -> Tensor:
        """(K,): what makes each member's direction as long as its part of `norms`."""
        wanted: dict[str, Tensor | None] = dict.fromkeys(
            layout.name for member in self.members for layout in member.block.layouts
        )
        return same_norms(direction, self.gather({**wanted, **norms}), self._members_of_entries)

    def scatter(self, matrix: Tensor, gradients: Mapping[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Where each member's part of (K, rows, columns) belongs in the gradients, and what is to be copied there."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        columns = [layout.shape[2] for layout in self.members[0].block.layouts]
        sides = [matrix] if len(columns) == 1 else matrix.split(columns, dim=2)
        for number, side in enumerate(sides):
            for member, part in zip(self.members, self.members_parts(side), strict=True):
                layout = member.block.layouts[number]
                gradient = gradients[layout.name]
                if gradient is not None:
                    targets.append(layout.region(gradient))
                    sources.append(layout.from_matrix(part))
        return targets, sources

    def members_parts(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """A (K, ...) tensor split by member."""
        parts: tuple[Tensor, ...] = matrix.split(self._counts)
        return parts


class _Joined:
    """One side of all members of a stack: a part of a bank, as a view where the members lie together in it."""

    def __init__(self, bank: Bank, sides: Sequence[Side], *, padded: bool) -> None:
        entries = bank.entries(sides)
        together = entries == list(range(entries[0], entries[0] + len(entries)))
        span = slice(entries[0], entries[0] + len(entries)) if together else slice(None)
        self.size = bank.size  # n of its n × n matrices
        self._matrix = None if bank.matrix is None else bank.matrix[span]
        if self._matrix is not None and not padded:
            self._matrix = _inner(self._matrix, self.size)
        self.padding = 0 if self._matrix is None else self._matrix.shape[-1] - self.size
        self._values = None if bank.values is None else bank.values[span]
        self._index: Tensor | None = None
        if not together:
            example = self._matrix if self._matrix is not None else self._values
            assert example is not None, "a bank has matrices or values"
            self._index = torch.tensor(entries, device=example.device)

    def _members(self, joined: Tensor) -> Tensor:
        return joined if self._index is None else joined.index_select(0, self._index)

    def values(self) -> Tensor:
        """Eigenvalues (K, n)."""
        assert self._values is not None, "eigenvalues belong to the eigen solver"
        return self._members(self._values)

    def times(
        self, matrix: Tensor, *, transpose: bool = False, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """This side from the left: it acts on rows."""
        if self._matrix is None:
            return matrix * self.values()[:, :, None] if inverse else matrix
        own = self._members(self._matrix)
        if out is not None and out.data_ptr() == matrix.data_ptr():  # a product cannot write where it reads
            out = None
        return torch.bmm(own.mT if transpose else own, matrix, out=out)

    def after(self, matrix: Tensor, *, transpose: bool = False, inverse: bool = False) -> Tensor:
        """This side from the right: it acts on columns."""
        if self._matrix is None:
            return matrix * self.values()[:, None, :] if inverse else matrix
        own = self._members(self._matrix)
        return torch.bmm(matrix, own.mT if transpose else own)

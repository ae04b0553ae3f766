"""The blocks of a model: made when a use of a parameter is first seen, kept by the name of the weight."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation
from natgrad.capture.form import BATCH, Form
from natgrad.capture.use import Use, Uses
from natgrad.statistics.gram import accumulation_dtype
from natgrad.statistics.waiting import Late, Parts


@dataclass(frozen=True)
class Bundle:
    """What the tensors of one node lead to, all of which can wait for others: rows to be counted, and works whose
    moments go to `factors`.
    """

    rows: tuple[tuple[Orientation, int], ...]
    factors: tuple[Factor, ...]
    parts: Parts


@dataclass(frozen=True)
class Tap:
    """Where one use's statistics go; `shared` says of each side that other blocks have the same factor. `late`
    remembers what of them can wait for others, `bundles` all of it for a node whose first use this is: by how its
    tensors lie, which is the same in most steps.
    """

    use: Use
    block: KroneckerBlock
    orientation: Orientation
    shared: tuple[bool, ...]
    late: dict[Hashable, Late | None] = field(default_factory=dict, compare=False)
    bundles: dict[Hashable, Bundle | None] = field(default_factory=dict, compare=False)


class Registry:
    """All blocks, in the order of the model's parameters.

    `version` changes whenever a block or the sharing of a factor does.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, max_factor_size: int, max_vector_size: int) -> None:
        self._parameters = parameters
        self._max_factor_size = max_factor_size
        self._max_vector_size = max_vector_size
        self._blocks: dict[str, KroneckerBlock] = {}
        self.version = 0
        # What follows from the blocks as they are: uses are the same objects in step after step.
        self._taps: weakref.WeakKeyDictionary[Uses, list[Tap]] = weakref.WeakKeyDictionary()
        self._forms: dict[str, Form] | None = {}
        self._factors: tuple[Factor, ...] | None = ()
        self._orientations: tuple[Orientation, ...] | None = ()

    def __iter__(self) -> Iterator[KroneckerBlock]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, key: str) -> KroneckerBlock | None:
        """The block of this key."""
        return self._blocks.get(key)

    def keys(self) -> KeysView[str]:
        """Of all blocks."""
        return self._blocks.keys()

    def covering(self, name: str) -> list[KroneckerBlock]:
        """The blocks that cover a parameter or slices of it."""
        return [block for block in self if any(layout.name == name for layout in block.layouts)]

    def _has_changed(self) -> None:
        self.version += 1
        self._taps.clear()
        self._forms = self._factors = self._orientations = None

    def forms(self) -> Mapping[str, Form]:
        """How each block is factored."""
        if self._forms is None:
            self._forms = {key: block.form for key, block in self._blocks.items()}
        return self._forms

    def diagonals(self, use: Use) -> tuple[bool, ...]:
        """Which sides of a use's block are diagonal, the row side first: those above a size limit, look-ups, and what
        only the batch's gradient is known of.
        """
        rows, columns = use.weight.shape[1], list(use.form.columns)
        if not columns:
            limit = self._max_factor_size if use.form.full else self._max_vector_size
            return (rows > limit or use.form.source == BATCH,)
        if len(columns) == 1:
            columns[0] += use.bias is not None
        natural = use.operation.diagonal_input
        return (rows > self._max_factor_size, *(natural or size > self._max_factor_size for size in columns))

    def factors(self) -> list[Factor]:
        """Every factor once, however many blocks share it."""
        if self._factors is None:
            self._factors = tuple(dict.fromkeys(factor for block in self for factor in block.factors()))
        return list(self._factors)

    def orientations(self) -> tuple[Orientation, ...]:
        """Those of all blocks."""
        if self._orientations is None:
            self._orientations = tuple(orientation for block in self for orientation in block.orientations)
        return self._orientations

    def replace(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Takes these blocks instead of the present ones."""
        order = {name: position for position, name in enumerate(self._parameters)}
        ordered = sorted(blocks, key=lambda block: (order[block.weight.name], block.weight.box or ()))
        self._blocks = {block.key: block for block in ordered}
        self._has_changed()

    def drop(self, names: Iterable[str]) -> list[str]:
        """Forgets the blocks that cover any of these parameters; returns their keys."""
        lost = [block for name in names for block in self.covering(name)]
        if lost:
            self.replace([block for block in self if block not in lost])
        return [block.key for block in lost]

    def assign(self, uses: Uses) -> list[Tap]:
        """Finds or makes the block of every use of one forward pass."""
        known = self._taps.get(uses)
        if known is not None:
            return known
        before = self.version
        taps = self._assign(uses)
        # What has changed nothing will change nothing the next time. A bias that is not added may be frozen by then.
        if self.version == before and not any(tap.use.bias is None and tap.block.bias is not None for tap in taps):
            self._taps[uses] = taps
        return taps

    def _assign(self, uses: Uses) -> list[Tap]:
        by_key: dict[str, list[Use]] = {}
        for use in uses:
            by_key.setdefault(use.weight.label, []).append(use)
        made = [self._make(group) for key, group in by_key.items() if not self._fits(key, group[0])]
        if made:
            kept = [old for old in self if not any(_collide(old, new) for new in made)]
            self.replace(kept + made)
            self._share(made, by_key)
        self._unshare(by_key)
        orientations = [self._orientation_for(use) for use in uses]
        holders: dict[Factor, int] = {}
        for factor in (factor for block in self for factor in block.factors()):
            holders[factor] = holders.get(factor, 0) + 1
        return [
            Tap(use, self._blocks[use.weight.label], to, tuple(holders[factor] > 1 for factor in to.sides))
            for use, to in zip(uses, orientations, strict=True)
        ]

    def _fits(self, key: str, use: Use) -> bool:
        block = self._blocks.get(key)
        if block is None or use.weight not in (block.weight, block.weight.transposed()):
            return False
        swapped = use.weight != block.weight
        if not (use.form.reduced == block.form.reduced if swapped else use.form.fits(block.form)):
            return False
        present = tuple(factor.diagonal for factor in block.straight.sides)
        if (
            not swapped
            and not use.operation.diagonal_input
            and use.bias == block.bias
            and self.diagonals(use) != present
        ):
            return False  # a checkpoint under other size limits
        if use.bias is None and block.bias is not None:
            # A pass that does not add the bias leaves it in the block; only freezing takes it out.
            return self._parameters[block.bias.name].requires_grad
        return use.bias == block.bias

    def _make(self, uses: list[Use]) -> KroneckerBlock:
        # A look-up's diagonal input factor must not be what a product's dense one is added to.
        first = next((use for use in uses if not use.operation.diagonal_input), uses[0])
        return KroneckerBlock(
            first.weight,
            first.bias,
            kind=first.operation.kind,
            form=first.form,
            straight=self._new_orientation(first),
            swapped=None,
        )

    def _new_orientation(self, use: Use) -> Orientation:
        parameter = self._parameters[use.weight.name]
        stack, rows, _ = use.weight.shape
        columns = list(use.form.columns)
        if use.bias is not None:
            columns[0] += 1
        dtype, device = accumulation_dtype(parameter.dtype), parameter.device
        return Orientation(
            [
                Factor(stack, size, diagonal=diagonal, dtype=dtype, device=device)
                for size, diagonal in zip([rows, *columns], self.diagonals(use), strict=True)
            ]
        )

    def _orientation_for(self, use: Use) -> Orientation:
        block = self._blocks[use.weight.label]
        if use.weight == block.weight:
            return block.straight
        if block.swapped is None:
            block.swapped = self._new_orientation(use)
            self._has_changed()
        return block.swapped

    def _share(self, made: list[KroneckerBlock], by_key: dict[str, list[Use]]) -> None:
        """One input factor for layers fed by one activation, one output factor for layers whose outputs are summed."""
        for side in (_ROW, _COLUMN):
            first: dict[tuple[int, bool], Factor] = {}
            for block in made:
                uses, sides = by_key[block.key], block.straight.sides
                number = _share_number(uses[0], side)
                if len(uses) == 1 and number is not None and side < len(sides):
                    sides[side] = first.setdefault((number, sides[side].diagonal), sides[side])

    def _unshare(self, by_key: dict[str, list[Use]]) -> None:
        """A shared factor becomes one per block as soon as a pass shows that it is not the same for all of them."""
        for side in (_ROW, _COLUMN):
            holders: dict[Factor, list[KroneckerBlock]] = {}
            for block in self:
                if side < len(block.straight.sides):
                    holders.setdefault(block.straight.sides[side], []).append(block)
            for factor, blocks in holders.items():
                used = [by_key[block.key] for block in blocks if block.key in by_key]
                numbers = {_share_number(use, side) for uses in used for use in uses}
                together = len(used) == len(blocks) and all(len(uses) == 1 for uses in used)
                if len(blocks) > 1 and used and not (together and len(numbers) == 1 and None not in numbers):
                    for block in blocks[1:]:
                        block.straight.sides[side] = factor.copy()
                    self._has_changed()


# Which side of a block: its outputs', or its inputs'.
_ROW, _COLUMN = 0, 1


def _share_number(use: Use, side: int) -> int | None:
    return use.share_output if side == _ROW else use.share_input


def _collide(old: KroneckerBlock, new: KroneckerBlock) -> bool:
    return any(a.overlaps(b) for a in old.layouts for b in new.layouts)

"""The blocks of a model: made when a use of a parameter is first seen, kept by the name of the weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation
from natgrad.capture.uses import Use
from natgrad.statistics.gram import accumulation_dtype
from natgrad.statistics.operations import Embedding


@dataclass(frozen=True)
class Assignment:
    """Where a use's statistics go."""

    block: KroneckerBlock
    orientation: Orientation


class Registry:
    """All blocks, in the order of the model's parameters. `version` changes whenever a block or the sharing of a
    factor does.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, max_factor_size: int) -> None:
        self._parameters = parameters
        self._order = {name: position for position, name in enumerate(parameters)}
        self._max_factor_size = max_factor_size
        self._blocks: dict[str, KroneckerBlock] = {}
        self.version = 0

    def __iter__(self) -> Iterator[KroneckerBlock]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def covering(self, name: str) -> list[KroneckerBlock]:
        """The blocks that cover a parameter or slices of it."""
        return [block for block in self if any(layout.name == name for layout in block.layouts)]

    def factors(self) -> list[Factor]:
        """Every factor once, however many blocks share it."""
        return list(dict.fromkeys(factor for block in self for factor in block.factors()))

    def replace(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Takes these blocks instead of the present ones."""
        self._blocks = {block.key: block for block in sorted(blocks, key=self._position)}
        self.version += 1

    def assign(self, uses: list[Use]) -> list[Assignment]:
        """Finds or makes the block of every use of one forward pass."""
        by_key: dict[str, list[Use]] = {}
        for use in uses:
            by_key.setdefault(use.weight.label, []).append(use)
        # A transposed use may be found first: a block is known by the region, and keeps the orientation it was made
        # with.
        made = [self._make(group) for key, group in by_key.items() if not self._fits(key, group[0])]
        if made:
            kept = [old for old in self if not any(_collide(old, new) for new in made)]
            self.replace(kept + made)
            self._share(made, by_key)
        self._unshare(by_key)
        return [self._assignment(use) for use in uses]

    def _fits(self, key: str, use: Use) -> bool:
        block = self._blocks.get(key)
        return block is not None and use.weight in (block.weight, block.weight.transposed()) and use.bias == block.bias

    def _make(self, uses: list[Use]) -> KroneckerBlock:
        first = next((use for use in uses if not isinstance(use.operation, Embedding)), uses[0])
        parameter = self._parameters[first.weight.name]
        diagonal = first.operation.diagonal_input
        orientation = self._orientation(first, parameter, diagonal_input=diagonal)
        return KroneckerBlock(first.weight, first.bias, kind=first.operation.kind, straight=orientation, swapped=None)

    def _orientation(self, use: Use, parameter: Tensor, *, diagonal_input: bool) -> Orientation:
        stack, rows, columns = use.weight.shape
        columns += use.bias is not None
        dtype, device, limit = accumulation_dtype(parameter.dtype), parameter.device, self._max_factor_size
        row = Factor(stack, rows, diagonal=rows > limit, dtype=dtype, device=device)
        column = Factor(stack, columns, diagonal=diagonal_input or columns > limit, dtype=dtype, device=device)
        return Orientation(row, column)

    def _assignment(self, use: Use) -> Assignment:
        block = self._blocks[use.weight.label]
        if use.weight == block.weight:
            return Assignment(block, block.straight)
        if block.swapped is None:
            parameter = self._parameters[use.weight.name]
            block.swapped = self._orientation(use, parameter, diagonal_input=use.operation.diagonal_input)
            self.version += 1
        return Assignment(block, block.swapped)

    def _share(self, made: list[KroneckerBlock], by_key: dict[str, list[Use]]) -> None:
        """Layers fed by one activation get one input factor, layers whose outputs are summed one output factor."""
        inputs: dict[object, Factor] = {}
        outputs: dict[object, Factor] = {}
        for block in made:
            uses = by_key[block.key]
            if len(uses) != 1 or block.straight.column.diagonal or block.straight.row.diagonal:
                continue
            if uses[0].share_input is not None:
                block.straight.column = inputs.setdefault(uses[0].share_input, block.straight.column)
            if uses[0].share_output is not None:
                block.straight.row = outputs.setdefault(uses[0].share_output, block.straight.row)

    def _unshare(self, by_key: dict[str, list[Use]]) -> None:
        """A factor shared so far becomes one per block as soon as a pass shows that it is not the same for all of
        them.
        """
        for side in ("row", "column"):
            holders: dict[Factor, list[KroneckerBlock]] = {}
            for block in self:
                holders.setdefault(getattr(block.straight, side), []).append(block)
            for factor, blocks in holders.items():
                used = [by_key[block.key] for block in blocks if block.key in by_key]
                names = {use.share_output if side == "row" else use.share_input for uses in used for use in uses}
                single = all(len(uses) == 1 for uses in used)
                if len(blocks) > 1 and used and not (single and len(names) == 1 and None not in names):
                    for block in blocks[1:]:
                        setattr(block.straight, side, factor.copy())
                    self.version += 1

    def _position(self, block: KroneckerBlock) -> tuple[int, tuple[tuple[int, int], ...]]:
        return self._order[block.weight.name], block.weight.box or ()


def _collide(old: KroneckerBlock, new: KroneckerBlock) -> bool:
    return any(a.overlaps(b) for a in old.layouts for b in new.layouts)


def device_of(registry: Registry) -> torch.device | None:
    """Where the factors are, None while there are no blocks."""
    return next((factor.sum.device for factor in registry.factors()), None)

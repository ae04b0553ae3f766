"""What there is to do for a model's blocks at a refresh, cut into pieces that one rank can do alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.connected import connected
from natgrad.distribute.placement import Layer, Piece, Work
from natgrad.distribute.strategy import Strategy

Keys = Callable[[KroneckerBlock], tuple[Hashable, ...]]


@dataclass(frozen=True)
class Contents:
    """What a piece is made of: the sides that are solved, by key, and the factors that they are made from."""

    keys: tuple[Hashable, ...]
    factors: tuple[Factor, ...]


def work_of(
    blocks: Iterable[KroneckerBlock], keys: Keys, solver: str, strategy: Strategy
) -> tuple[Work, dict[str, Contents]]:
    """The work of refreshing blocks, and the contents of its pieces by name. `keys` name the sides of a block.

    A piece is one factor's decomposition. Sides that need a common factor are one piece (damped inverses of layers that
    share it), as are the factors that one side is mixed from (weights used in both orientations).
    """
    blocks = list(blocks)
    sides = [side for block in blocks for side in _sides(block, keys(block))]
    groups = connected({side: side.factors for side in sides})
    pieces: list[Piece] = []
    contents: dict[str, Contents] = {}
    piece_of: dict[Hashable, str] = {}
    for group in groups:
        name = group[0].name
        solved = {side.key: side for side in group}
        factors = tuple(dict.fromkeys(factor for side in group for factor in side.factors))
        pieces.append(
            Piece(
                name,
                solves=tuple(side.dimensions for side in solved.values()),
                sums=tuple((factor.stack, factor.sum.shape[1], factor.diagonal) for factor in factors),
            )
        )
        contents[name] = Contents(tuple(solved), factors)
        piece_of |= dict.fromkeys(solved, name)
    layers = [
        Layer(
            block.key,
            shape=block.shape,
            diagonal=tuple(side.dimensions[2] for side in _sides(block, keys(block))),
            pieces=tuple(dict.fromkeys(piece_of[key] for key in keys(block))),
        )
        for block in blocks
    ]
    size = max((block.straight.row.sum.element_size() for block in blocks), default=4)
    sums, gradients = strategy.wire_of_sums(solver), strategy.wire
    work = Work(
        tuple(layers),
        tuple(pieces),
        solver=solver,
        element_size=size,
        sum_size=None if sums is None else sums.itemsize,
        gradient_size=None if gradients is None else gradients.itemsize,
    )
    return work, contents


@dataclass(frozen=True)
class _Side:
    name: str
    key: Hashable
    factors: tuple[Factor, ...]

    @property
    def dimensions(self) -> tuple[int, int, bool]:
        first = self.factors[0]
        return first.stack, first.sum.shape[1], all(factor.diagonal for factor in self.factors)


def _sides(block: KroneckerBlock, keys: Sequence[Hashable]) -> list[_Side]:
    own: list[tuple[Factor, ...]] = [(factor,) for factor in block.straight.sides]
    if block.swapped is not None:  # the other orientation's rows are this one's columns
        own = [(*one, other) for one, other in zip(own, reversed(block.swapped.sides), strict=True)]
    return [
        _Side(f"{block.key} {'G' if number == 0 else 'A' if len(keys) < 3 else f'A{number}'}", key, factors)
        for number, (key, factors) in enumerate(zip(keys, own, strict=True))
    ]

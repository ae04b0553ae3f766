"""Whose decomposition is when, where layers take turns: evenly, by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.blocks.registry import Registry
from natgrad.connected import connected
from natgrad.distribute.costs import Costs
from natgrad.options import Now
from natgrad.overlap.timetable import spread_evenly
from natgrad.precondition.preconditioner import Preconditioner

Unit = list[KroneckerBlock]
"""Blocks that are decomposed together, because they share what is decomposed."""


class Turns(Protocol):
    """Says which blocks are decomposed in a step."""

    def at(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner) -> Iterable[KroneckerBlock]:
        """Those of this step, of which some may have nothing new."""

    def moved(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner, pace: float) -> None:
        """Statistics have come in. `pace` is the number that `told` was on the first rank."""

    watches_time: bool

    def told(self) -> float:
        """A number that all ranks need, and only the first one's counts."""

    def spent(self, blocks: Sequence[KroneckerBlock], seconds: float, preconditioner: Preconditioner) -> None:
        """Blocks have been decomposed, in this time."""

    def loaded(self, statistics_at: int | None) -> None:
        """A checkpoint has come in the place of everything, with its last statistics of this step."""


class Loads:
    """What decompositions cost whom. `costs` and `solver_of` are asked for when needed: ranks place their work late."""

    def __init__(self, costs: Callable[[], Costs], solver_of: Callable[[], Mapping[Hashable, int]]) -> None:
        self._costs, self._solver_of = costs, solver_of

    def units(self, registry: Registry, preconditioner: Preconditioner) -> list[Unit]:
        """The blocks, in groups that are decomposed together."""
        return connected({block: preconditioner.keys(block) for block in registry})

    def seconds(self, unit: Sequence[KroneckerBlock], preconditioner: Preconditioner) -> dict[int, float]:
        """What a unit costs each rank that has to do with it."""
        costs, solver_of = self._costs(), self._solver_of()
        result: dict[int, float] = {}
        sizes: dict[Hashable, tuple[int, int, bool]] = {}
        for block in unit:
            for key, factor in zip(preconditioner.keys(block), block.straight.sides, strict=True):
                sizes[key] = (factor.stack, factor.sum.shape[1], factor.diagonal)
        for key, (stack, size, diagonal) in sizes.items():
            rank = solver_of.get(key, 0)
            result[rank] = result.get(rank, 0.0) + costs.solve(
                preconditioner.solver, size, stack=stack, diagonal=diagonal
            )
        return result


class EvenTurns:
    """Every unit once in an interval."""

    watches_time = False

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._made_for: tuple[int, int, int, int | None] | None = None
        self._slots: list[list[KroneckerBlock]] = []
        self._statistics_at: int | None = None

    def at(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner) -> Iterable[KroneckerBlock]:
        """The blocks of this step's slot."""
        slots, every = now.refresh_interval, now.next_factor_interval
        # Steps that take statistics are long already.
        phase = None if self._statistics_at is None or slots % every else self._statistics_at % every
        made_for = (registry.version, slots, every, phase)
        if self._made_for != made_for:
            busy = [slot for slot in range(slots) if slot % every == phase] if every > 1 else []
            units = self._loads.units(registry, preconditioner)
            costs = [self._loads.seconds(unit, preconditioner) for unit in units]
            found = spread_evenly(costs, slots, busy)
            self._slots = [[block for number in slot for block in units[number]] for slot in found]
            self._made_for = made_for
        return self._slots[step % slots]

    def moved(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner, pace: float) -> None:
        """Remembers when statistics come."""
        self._statistics_at = step

    def told(self) -> float:
        """Nothing depends on a clock here."""
        return 0.0

    def spent(self, blocks: Sequence[KroneckerBlock], seconds: float, preconditioner: Preconditioner) -> None:
        """What it took does not matter here."""

    def loaded(self, statistics_at: int | None) -> None:
        """Goes on with the checkpoint's timetable."""
        self._statistics_at = statistics_at

"""K-FAC's work on several ranks, as the rest of natgrad sees it: this rank's part of everything."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.clock import Clock
from natgrad.distribute import costs as cost_models
from natgrad.distribute import solutions, sums
from natgrad.distribute.assignment import Assignment, chosen, groups, placed
from natgrad.distribute.channel import Channel
from natgrad.distribute.costs import Costs
from natgrad.distribute.directions import Directions, Shape
from natgrad.distribute.placement import owners_of
from natgrad.distribute.plan import Plan, plan
from natgrad.distribute.strategy import Strategy
from natgrad.distribute.sums import Collecting
from natgrad.distribute.work import Keys, work_of
from natgrad.solve.solver import Side

_LINK_BYTES = 2**22  # of the message that a link is measured with


class Spread:
    """This rank's part of the work."""

    def __init__(self, channel: Channel, strategy: Strategy, device: torch.device) -> None:
        self.channel = channel
        self.strategy = strategy
        self._device = device
        self._costs: Costs | None = strategy.costs if isinstance(strategy.costs, Costs) else None
        self._team_size = strategy.team_size(channel.size)
        self._assignment: Assignment | None = None
        self._shares: dict[Factor, int] = {}  # whose turn a factor's statistics are, before turns go round
        self._rows: dict[Factor, float] = {}
        self._turn = 0

    @property
    def rank(self) -> int:
        """This one."""
        return self.channel.rank

    @property
    def assignment(self) -> Assignment:
        """Who does what, for the present blocks."""
        assert self._assignment is not None, "blocks are assigned before they are refreshed"
        return self._assignment

    # Who does what

    def assign(
        self, blocks: Iterable[KroneckerBlock], keys: Keys, solver: str, interval: int, solved: Collection[str]
    ) -> None:
        """Places the blocks' work; the same on all ranks. What is `solved` stays in its team: the solution is there."""
        present = {block.key: block for block in blocks}
        before = self._assignment
        if before is not None and before.fits(present, keys):
            return
        work, contents = work_of(present.values(), keys, solver, self.strategy)
        fixed = {}
        if before is not None:
            fixed = {k: t for k, t in before.placement.team_of.items() if k in present and k in solved}
        placement = placed(work, self.strategy, self._team_size, self.channel.size, self.costs(), interval, fixed)
        self._team_size = placement.team_size
        self.channel.prepare(groups(placement))
        self._assignment = Assignment(work, contents, placement, present)
        self._shares = {factor: slot for factor, slot in self._shares.items() if factor in self.assignment.owner_of}

    def forget(self) -> None:
        """Other blocks have come in the place of all."""
        self._team_size = self.strategy.team_size(self.channel.size)
        self._assignment = None
        self._shares, self._rows = {}, {}

    def keep_share(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Of factors that all ranks have whole, after loading, leaves each to its owner alone."""
        for factor, owner in self.assignment.owner_of.items():
            if owner != self.rank:
                factor.sum.zero_()
                factor.weight.zero_()
        if self.rank != 0:
            for orientation in (one for block in blocks for one in block.orientations):
                orientation.counts.zero_()

    def costs(self) -> Costs:
        """Of work and messages; measured once where that was asked for, and the same on all ranks."""
        if self._costs is None and self.strategy.costs == "measured":
            mine = cost_models.measure(self._device)
            before = replace(self.channel.tallies["meetings"])
            mine = replace(mine, bandwidth=self._measure_link(mine.latency))
            self.channel.tallies["meetings"] = before  # measuring is no traffic of training
            self._costs = cost_models.slowest(self.channel.meet("measuring costs", mine))
        if self._costs is None:
            self._costs = cost_models.default_costs(self._device)
        return self._costs

    def _measure_link(self, latency: float) -> float:
        """Bytes a second of a broadcast to all, the second of two."""
        buffer = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=self._device)
        seconds = 0.0
        for attempt in ("warm-up", "measurement"):
            self.channel.meet(f"the {attempt} of the link")
            clock = Clock(self._device)
            with clock.part("link"):
                self.channel.broadcast(buffer, 0, range(self.channel.size), "meetings").wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = clock.take()[0]["link"]
        return _LINK_BYTES / max(seconds - latency, 1e-6)

    def plan(self, interval: int) -> Plan | None:
        """What the present assignment does, for people; None before the first one."""
        if self._assignment is None:
            return None
        work, placement = self.assignment.work, self.assignment.placement
        told = chosen(work, placement, self.strategy)
        return plan(work, placement, self.costs(), interval, self.strategy.name, told)

    def owners(self) -> dict[str, str]:
        """Which ranks decompose the factors of each block, for people."""
        if self._assignment is None:
            return {}
        return owners_of(self.assignment.work, self.assignment.placement)

    # Statistics

    def takes(self, factor: Factor) -> bool:
        """Whether this rank takes a factor's statistics now; those of a new one all do."""
        slot = self._shares.get(factor)
        return slot is None or (slot + self._turn) % self.channel.size == self.rank

    def next_turn(self) -> None:
        """After every step that took statistics: each factor sees every rank's cases in turn."""
        self._turn += 1

    def _share_out(self) -> None:
        """The factors' rows times their size squared, most work first, to whom has the least."""
        loads = [0.0] * self.channel.size
        work = {f: w * f.stack * f.sum.shape[1] ** (1 if f.diagonal else 2) for f, w in self._rows.items()}
        for factor in sorted(work, key=lambda one: -work[one]):
            self._shares[factor] = loads.index(min(loads))
            loads[self._shares[factor]] += work[factor]

    def shares(self, names: Mapping[str, Factor]) -> dict[str, Any] | None:
        """For a checkpoint: who takes the statistics of what; None where all take all."""
        slots = {name: self._shares[factor] for name, factor in names.items() if factor in self._shares}
        return {"ranks": self.channel.size, "turn": self._turn, "slots": slots} if slots else None

    def load_shares(self, state: Mapping[str, Any] | None, names: Mapping[str, Factor]) -> None:
        """Goes on with a checkpoint's shares, where they are of as many ranks."""
        if state is not None and self.strategy.share_statistics and state["ranks"] == self.channel.size:
            self._turn = state["turn"]
            self._shares = {names[name]: slot for name, slot in state["slots"].items() if name in names}
            self._rows = dict.fromkeys(self._shares, 0.0)

    # Sums, solutions, directions

    def collect(
        self,
        blocks: Sequence[KroneckerBlock],
        place: str,
        refused: int,
        *,
        rounded: bool = True,
        view: sums.View = sums.PRESENT,
    ) -> Collecting:
        """Starts to send the sums of the blocks' factors, as `view` sees them, to who decomposes them; not `rounded`,
        whatever the strategy says of that.
        """
        wire = self.strategy.wire_of_sums(self.assignment.work.solver) if rounded else None
        collecting = sums.collect(
            self.channel, self.assignment, blocks, place=place, refused=refused, wire=wire, view=view
        )
        if self.strategy.share_statistics:
            self._rows = {f: rows for f, rows in self._rows.items() if f in self.assignment.owner_of}
            self._rows |= {factor: weight for factor, (_, weight) in collecting.known.items()}
            if self._rows.keys() != self._shares.keys():
                self._share_out()
        return collecting

    def holds(self, block: KroneckerBlock) -> bool:
        """Whether this rank preconditions a block."""
        return self.rank in self.assignment.team(block.key)

    def leads(self, block: KroneckerBlock) -> bool:
        """Whether this rank is the first of those that hold a block."""
        return self.assignment.team(block.key)[0] == self.rank

    def solves(self, key: Hashable) -> bool:
        """Whether this rank decomposes what becomes a side."""
        return self.assignment.solver_of[key] == self.rank

    @property
    def placed(self) -> Assignment:
        """Who does what, for the present blocks."""
        return self.assignment

    def share_solutions(
        self, like: Mapping[Hashable, Tensor], sides: dict[Hashable, Side], solver: str, placed: Assignment
    ) -> None:
        """Completes the sides of the blocks that this rank's team holds. Who has made them was `placed` when they were
        asked for: blocks that have come since may have changed it.
        """
        solutions.share(self.channel, placed, like, sides, solver)

    @property
    def apart(self) -> bool:
        """Whether some rank has to be sent what others have preconditioned."""
        return self._assignment is not None and len(self._assignment.placement.teams) > 1

    def expect_directions(self, solved: Mapping[str, Shape]) -> Directions:
        """The exchange of a step's directions, before this rank has made its own."""
        return Directions(self.channel, self.assignment, solved, self._device, wire=self.strategy.wire)

    def total(self, own: Tensor) -> Tensor:
        """The sum over teams of a number that every member has."""
        first = any(team[0] == self.rank for team in self.assignment.placement.teams)
        return self.channel.total(own.clone() if first else torch.zeros_like(own), "gradients")

    # Everything, for checkpoints

    def gathered_sums(self, factors: Sequence[Factor]) -> dict[Factor, Tensor]:
        """The sums of factors that have just been collected, on all ranks."""
        return sums.gathered_sums(self.channel, self.assignment, factors)

    def gathered_sides(
        self, like: Mapping[Hashable, Tensor], sides: Mapping[Hashable, Side], solver: str
    ) -> dict[Hashable, Side]:
        """The solved sides of all blocks, on all ranks."""
        return solutions.gathered(self.channel, self.assignment, like, sides, solver)

    def gathered_from_solvers(
        self, like: Mapping[Hashable, Tensor], sides: Mapping[Hashable, Side], solver: str, placed: Assignment
    ) -> dict[Hashable, Side]:
        """Sides that nobody has been sent yet, on all ranks."""
        return solutions.gathered_from_solvers(self.channel, placed, like, sides, solver)

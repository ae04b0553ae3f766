"""Who does what: the present blocks' work, placed on ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.distribute.balance import choose, place
from natgrad.distribute.costs import Costs, known_costs
from natgrad.distribute.placement import Placement, Work
from natgrad.distribute.plan import Plan, plan
from natgrad.distribute.strategy import Strategy
from natgrad.distribute.traffic import held_bytes
from natgrad.distribute.work import Contents, Keys
from natgrad.report import memory


@dataclass
class Assignment:
    """Who does what, for the present blocks."""

    work: Work
    contents: dict[str, Contents]
    placement: Placement
    blocks: dict[str, KroneckerBlock]
    owner_of: dict[Factor, int] = field(init=False)
    solver_of: dict[Hashable, int] = field(init=False)

    def __post_init__(self) -> None:
        owners = self.placement.owner_of
        self.owner_of = {f: owners[name] for name, one in self.contents.items() for f in one.factors}
        self.solver_of = {key: owners[name] for name, one in self.contents.items() for key in one.keys}

    def team(self, block: str) -> tuple[int, ...]:
        """The ranks that hold a block's decomposition."""
        return self.placement.teams[self.placement.team_of[block]]

    def team_of_rank(self, rank: int) -> int:
        """The number of the team that a rank is in."""
        return next(number for number, team in enumerate(self.placement.teams) if rank in team)

    def fits(self, blocks: Mapping[str, KroneckerBlock], keys: Keys) -> bool:
        """Whether these are the same blocks still, with the same sharing of factors."""
        factors = {factor for block in blocks.values() for factor in block.factors()}
        sides = {key for block in blocks.values() for key in keys(block)}
        return self.blocks == blocks and factors == set(self.owner_of) and sides == set(self.solver_of)

    def sender(self, team: int, rank: int) -> int:
        """Who of a team sends its directions to a rank; to a member, itself."""
        members = self.placement.teams[team]
        if rank in members:
            return rank
        return next(member for member in members if rank in self.audience(team, member))

    def audience(self, team: int, sender: int) -> tuple[int, ...]:
        """The group in which one member of a team sends, itself included."""
        return _audience(self.placement, team, sender)


def groups(placement: Placement) -> list[tuple[int, ...]]:
    """All groups that messages go through, in one order for all ranks."""
    teams = list(placement.teams)
    if len(teams) == 1:
        return teams
    senders = [(number, member) for number, team in enumerate(teams) for member in team]
    return list(dict.fromkeys([*teams, *(_audience(placement, *one) for one in senders)]))


def _audience(placement: Placement, team: int, sender: int) -> tuple[int, ...]:
    return tuple(sorted((sender, *placement.receivers(team, placement.teams[team].index(sender)))))


def planned(work: Work, strategy: Strategy, *, ranks: int, device: torch.device, interval: int) -> Plan:
    """The plan of some ranks that need not be there."""
    costs = known_costs(strategy.costs, device)
    placement = placed(work, strategy, strategy.team_size(ranks), ranks, costs, interval, {})
    return plan(work, placement, costs, interval, strategy.name, chosen(work, placement, strategy))


def chosen(work: Work, placement: Placement, strategy: Strategy) -> str:
    """What ``"auto"`` has come to, for people."""
    if strategy.name != "auto":
        return ""
    most = max(held_bytes(work, placement))
    over = strategy.memory is not None and most > strategy.memory
    return placement.strategy + (
        f", although {memory(most)} do not fit into {memory(strategy.memory or 0)}" if over else ""
    )


def placed(
    work: Work,
    strategy: Strategy,
    team_size: int | None,
    ranks: int,
    costs: Costs,
    interval: int,
    fixed: Mapping[str, int],
) -> Placement:
    """Places work as a strategy says; blocks that are `fixed` stay in their teams."""
    if team_size is None:
        return choose(
            work, ranks=ranks, costs=costs, interval=interval, memory=strategy.memory, method=strategy.placement
        )
    return place(
        work,
        ranks=ranks,
        team_size=team_size,
        costs=costs,
        interval=interval,
        method=strategy.placement,
        fixed=fixed,
    )

"""K-FAC's work on several ranks: which rank does what, and the sums, solutions and directions that they send.

The sum over all ranks of what each has in its factors is *the* factor, always: statistics stay where they were taken
until a decomposition is due, and are then handed over to the rank that makes it. Both sums and weights are linear, so
that nothing is lost or counted twice, whoever decomposes next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation, Whole
from natgrad.clock import Clock
from natgrad.distribute import costs as cost_models
from natgrad.distribute.channel import Channel, Message
from natgrad.distribute.costs import Costs
from natgrad.distribute.placement import Placement, Plan, Work, choose, place, plan
from natgrad.distribute.strategy import Strategy
from natgrad.distribute.triangles import fold, folded_numel, unfold
from natgrad.distribute.work import Contents, Keys, work_of
from natgrad.solve.solver import Side

_LINK_BYTES = 2**22  # of the message that a link is measured with


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


class Spread:
    """This rank's part. `keys` name a block's sides, as the preconditioner does."""

    def __init__(self, channel: Channel, strategy: Strategy, device: torch.device) -> None:
        self.channel = channel
        self.strategy = strategy
        self._device = device
        self._costs: Costs | None = strategy.costs if isinstance(strategy.costs, Costs) else None
        self._team_size = strategy.team_size(channel.size)
        self.assignment: Assignment | None = None
        self._under_way: list[Message] = []
        self._shares: dict[Factor, int] = {}
        self._turn = 0

    @property
    def rank(self) -> int:
        """This one."""
        return self.channel.rank

    # Who does what

    def assign(self, blocks: Iterable[KroneckerBlock], keys: Keys, solver: str, interval: int) -> Assignment:
        """Places the blocks' work; the same on all ranks. What has a team stays in it: its decompositions are there."""
        present = {block.key: block for block in blocks}
        before = self.assignment
        if before is not None and before.blocks == present and _same_factors(before, present, keys):
            return before
        work, contents = work_of(present.values(), keys, solver)
        fixed = {} if before is None else {k: t for k, t in before.placement.team_of.items() if k in present}
        placement = _placed(work, self.strategy, self._team_size, self.channel.size, self.costs(), interval, fixed)
        self._team_size = placement.team_size
        self.channel.prepare(_groups(placement))
        self.assignment = Assignment(work, contents, placement, present)
        self._shares = {}
        return self.assignment

    def forget(self) -> None:
        """Other blocks have come in the place of all."""
        self._team_size = self.strategy.team_size(self.channel.size)
        self.assignment = None
        self._shares = {}

    def keep_share(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Of factors that all ranks have whole, after loading, leaves each to its owner alone."""
        assert self.assignment is not None, "blocks are assigned first"
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
            mine = replace(mine, bandwidth=self._measure_link(mine.latency))
            self._costs = cost_models.slowest(self.channel.meet("measuring costs", mine))
        if self._costs is None:
            self._costs = cost_models.default_costs(self._device)
        return self._costs

    def _measure_link(self, latency: float) -> float:
        """Bytes a second of a broadcast to all, the second of two."""
        buffer = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=self._device)
        clock = Clock(self._device)
        for attempt in ("warm-up", "link"):
            self.channel.meet(f"measuring the link, {attempt}")
            with clock.part(attempt):
                self.channel.broadcast(buffer, 0, range(self.channel.size), "meetings").wait()
        return _LINK_BYTES / max(clock.take()[0]["link"] - latency, 1e-6)

    def plan(self, interval: int) -> Plan | None:
        """What the present assignment does, for people; None before the first one."""
        if self.assignment is None:
            return None
        own = self.assignment
        return plan(own.work, own.placement, self.costs(), interval, self.strategy.name)

    # Statistics

    def takes(self, factor: Factor) -> bool:
        """Whether this rank takes a factor's statistics now."""
        if not self._shares:
            return True
        return (self._shares.get(factor, 0) + self._turn) % self.channel.size == self.rank

    def next_turn(self) -> None:
        """After every step that took statistics: each factor sees every rank's cases in turn."""
        self._turn += 1

    def _share_out(self, factors: Sequence[Factor], weights: Sequence[float]) -> None:
        """The factors' rows times their size squared, most work first, to whom has the least."""
        loads = [0.0] * self.channel.size
        work = {
            f: w * f.stack * f.sum.shape[1] ** (1 if f.diagonal else 2) for f, w in zip(factors, weights, strict=True)
        }
        for factor in sorted(work, key=lambda one: -work[one]):
            self._shares[factor] = loads.index(min(loads))
            loads[self._shares[factor]] += work[factor]

    # Sums

    def collect(self, blocks: Sequence[KroneckerBlock], place: str, refused: int) -> Whole:
        """Hands the sums of the blocks' factors over to who decomposes them, and returns what all ranks have of them
        together: means where this rank has the sums, and elsewhere what has the same trace.
        """
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        factors = list(dict.fromkeys(factor for block in blocks for factor in block.factors()))
        orientations = [orientation for block in blocks for orientation in block.orientations]
        numbers = _numbers(factors, orientations)
        told = self.channel.meet(place, {"numbers": numbers, "refused": refused})
        each = torch.stack([one["numbers"] for one in told])
        whole = each.sum(0)
        spans = [factor.stack for factor in factors]
        weights, traces, counts = whole.split([len(factors), sum(spans), 2 * len(orientations)])
        owners = [self.assignment.owner_of[factor] for factor in factors]
        others = [bool((each[:, n] > 0).sum() > (each[owner, n] > 0)) for n, owner in enumerate(owners)]
        self._hand_over(factors, owners, others)
        by_factor = traces.split(spans)
        on_device = [part.to(factor.weight.device) for part, factor in zip(by_factor, factors, strict=True)]
        for factor, owner, weight in zip(factors, owners, weights.tolist(), strict=True):
            factor.weight.fill_(weight if owner == self.rank else 0.0)
        for orientation, count in zip(orientations, counts.view(-1, 2), strict=True):
            orientation.counts.copy_(count if self.rank == 0 else torch.zeros_like(count))
        if self.strategy.share_statistics and not self._shares:
            self._share_out(factors, weights.tolist())
        means: dict[Factor, Tensor] = {}
        traces_of: dict[Factor, Tensor] = {}
        for factor, owner, weight, trace in zip(factors, owners, weights.tolist(), on_device, strict=True):
            size = factor.sum.shape[1]
            traces_of[factor] = (trace / weight if weight > 0 else trace).to(factor.sum.dtype)
            flat = (traces_of[factor] / size)[:, None].expand(factor.stack, size)
            means[factor] = factor.mean() if owner == self.rank else flat
        return Whole(
            means,
            traces_of,
            dict(zip(factors, weights.tolist(), strict=True)),
            {o: (float(c[0]), float(c[1])) for o, c in zip(orientations, counts.view(-1, 2), strict=True)},
            sum(one["refused"] for one in told),
        )

    def _hand_over(self, factors: Sequence[Factor], owners: Sequence[int], others: Sequence[bool]) -> None:
        """Adds what other ranks have to the owner's sums, and empties theirs; `others` says which have anything."""
        mine: list[tuple[Message, list[Factor]]] = []
        for owner in range(self.channel.size):
            own = [f for f, o, some in zip(factors, owners, others, strict=True) if o == owner and some]
            for same in _by_dtype(own, lambda factor: factor.sum.dtype):
                dtype = self.strategy.wire or same[0].sum.dtype
                if owner == self.rank:  # what the owner has does not travel
                    count = sum(map(_message_numel, same))
                    flat = torch.zeros(count, dtype=dtype, device=same[0].sum.device)
                    mine.append((self.channel.reduce(flat, owner, "factors"), same))
                else:
                    flat = torch.cat([_packed(factor.sum) for factor in same]).to(dtype)
                    self._under_way.append(self.channel.reduce(flat, owner, "factors"))
            for factor in own:
                if owner != self.rank:
                    factor.sum.zero_()
        for message, same in mine:
            parts = message.wait().split([_message_numel(factor) for factor in same])
            for factor, part in zip(same, parts, strict=True):
                factor.sum.add_(_unpacked(part.to(factor.sum.dtype), factor.sum.shape))

    def settle(self) -> None:
        """Waits for messages that nobody here needs to read."""
        for message in self._under_way:
            message.wait()
        self._under_way = []

    # Solutions

    def holds(self, block: KroneckerBlock) -> bool:
        """Whether this rank preconditions a block."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        return self.rank in self.assignment.team(block.key)

    def leads(self, block: KroneckerBlock) -> bool:
        """Whether this rank is the first of those that hold a block."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        return self.assignment.team(block.key)[0] == self.rank

    def solves(self, key: Hashable) -> bool:
        """Whether this rank decomposes what becomes a side."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        return self.assignment.solver_of[key] == self.rank

    def share_solutions(self, like: Mapping[Hashable, Tensor], sides: dict[Hashable, Side], solver: str) -> None:
        """Brings every side that a team member has solved to the whole team, into `sides`. `like` has a tensor of each
        side's shape and dtype: (stack, n, n), or (stack, n) for a diagonal one.
        """
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        own = next(team for team in self.assignment.placement.teams if self.rank in team)
        if len(own) == 1:
            return
        under_way = []
        for member in own:
            keys = [key for key in like if self.assignment.solver_of[key] == member]
            for same in _by_dtype(keys, lambda key: like[key].dtype):
                message = self._send_sides(same, like, sides, solver, member, own, "solutions")
                under_way.append((message, same, member))
        for message, same, member in under_way:
            flat = message.wait()
            if member != self.rank:
                self._read_sides(flat, same, like, sides, solver)

    def _send_sides(
        self,
        keys: Sequence[Hashable],
        like: Mapping[Hashable, Tensor],
        sides: Mapping[Hashable, Side],
        solver: str,
        source: int,
        ranks: Sequence[int],
        kind: str,
    ) -> Message:
        if source == self.rank:
            flat = torch.cat([part for key in keys for part in _side_parts(sides[key], solver)])
        else:
            count = sum(sum(_side_numels(like[key].shape, solver)) for key in keys)
            flat = torch.empty(count, dtype=like[keys[0]].dtype, device=like[keys[0]].device)
        return self.channel.broadcast(flat, source, ranks, kind)

    def _read_sides(
        self,
        flat: Tensor,
        keys: Sequence[Hashable],
        like: Mapping[Hashable, Tensor],
        sides: dict[Hashable, Side],
        solver: str,
    ) -> None:
        lengths = [_side_numels(like[key].shape, solver) for key in keys]
        parts = iter(flat.split([one for each in lengths for one in each]))
        for key, each in zip(keys, lengths, strict=True):
            new = _side_of([next(parts) for _ in each], like[key].shape, solver)
            if key in sides:
                sides[key].update(new, [False] * like[key].shape[0])
            else:
                sides[key] = Side(*(None if part is None else part.clone() for part in (new.matrix, new.values)))

    # Directions

    @property
    def apart(self) -> bool:
        """Whether some rank has to be sent what others have preconditioned."""
        return self.assignment is not None and len(self.assignment.placement.teams) > 1

    def share_directions(
        self, own: Mapping[str, Tensor], length: Tensor, solved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The directions (stack, rows, columns) of all `solved` blocks, of which `own` are this team's, and the sum of
        the teams' squared lengths, the same bits on all ranks.
        """
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        placement = self.assignment.placement
        lengths: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        under_way: list[tuple[int, list[str], Message | None, Tensor]] = []
        keys_of: dict[int, list[str]] = {}
        for layer in self.assignment.work.layers:
            if layer.name in solved:
                keys_of.setdefault(placement.team_of[layer.name], []).append(layer.name)
        for number, keys in sorted(keys_of.items()):
            for first, same in enumerate(_by_dtype(keys, lambda key: solved[key][1])):
                flat = self._directions_flat(number, same, own, length if first == 0 else None, solved)
                sender = _sender(placement, number, self.rank)
                group = _receivers(placement, number, sender)
                message = self.channel.broadcast(flat, sender, group, "gradients") if len(group) > 1 else None
                under_way.append((number if first == 0 else -1, same, message, flat))
        for number, same, message, flat in under_way:
            if message is not None:
                message.wait()
            dtype = solved[same[0]][1]
            sizes = [_numel(solved[key][0]) for key in same]
            head, *parts = flat.split([flat.numel() - sum(sizes), *sizes])
            if number >= 0:
                lengths[number] = head.view(torch.float64)[0]
            found |= {key: part.to(dtype).view(solved[key][0]) for key, part in zip(same, parts, strict=True)}
        return found, torch.stack([lengths[number] for number in sorted(lengths)]).sum()

    def _directions_flat(
        self,
        team: int,
        keys: Sequence[str],
        own: Mapping[str, Tensor],
        length: Tensor | None,
        solved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> Tensor:
        """A team's message: filled where this rank is part of it, room for it elsewhere. The length travels as bits."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        dtype = self.strategy.wire or solved[keys[0]][1]
        bits = 0 if length is None else 8 // dtype.itemsize
        if self.rank in self.assignment.placement.teams[team]:
            # In front, where eight bytes are sure to be aligned.
            head = [] if length is None else [length.double().reshape(1).view(dtype)]
            return torch.cat([*head, *(own[key].flatten().to(dtype) for key in keys)])
        count = sum(_numel(solved[key][0]) for key in keys) + bits
        return torch.empty(count, dtype=dtype, device=self._device)

    def total(self, own: Tensor) -> Tensor:
        """The sum over teams of a number that every member has."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        first = any(team[0] == self.rank for team in self.assignment.placement.teams)
        return self.channel.total(own.clone() if first else torch.zeros_like(own), "gradients")

    # Everything, for checkpoints

    def gathered_sums(self, factors: Sequence[Factor]) -> dict[Factor, Tensor]:
        """The sums of factors that have just been collected, on all ranks."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        result: dict[Factor, Tensor] = {}
        everybody = range(self.channel.size)
        for owner in everybody:
            own = [factor for factor in factors if self.assignment.owner_of[factor] == owner]
            for same in _by_dtype(own, lambda factor: factor.sum.dtype):
                if owner == self.rank:
                    flat = torch.cat([_packed(factor.sum) for factor in same])
                else:
                    flat = same[0].sum.new_empty(sum(map(_message_numel, same)))
                parts = (
                    self.channel.broadcast(flat, owner, everybody, "checkpoints")
                    .wait()
                    .split([_message_numel(factor) for factor in same])
                )
                result |= {f: _unpacked(part, f.sum.shape) for f, part in zip(same, parts, strict=True)}
        return result

    def gathered_sides(
        self, like: Mapping[Hashable, Tensor], sides: Mapping[Hashable, Side], solver: str
    ) -> dict[Hashable, Side]:
        """The solved sides of all blocks, on all ranks."""
        assert self.assignment is not None, "blocks are assigned before they are refreshed"
        everything = dict(sides)
        if not self.apart:
            return everything
        everybody = range(self.channel.size)
        for owner in everybody:
            keys = [key for key in like if self.assignment.solver_of[key] == owner]
            for same in _by_dtype(keys, lambda key: like[key].dtype):
                flat = self._send_sides(same, like, sides, solver, owner, everybody, "checkpoints").wait()
                missing = {key: like[key] for key in same if key not in sides}
                if missing:
                    received: dict[Hashable, Side] = {}
                    self._read_sides(flat, same, like, received, solver)
                    everything |= {key: received[key] for key in missing}
        return everything


def planned(work: Work, strategy: Strategy, *, ranks: int, device: torch.device, interval: int) -> Plan:
    """The plan of some ranks that need not be there."""
    costs = strategy.costs if isinstance(strategy.costs, Costs) else cost_models.default_costs(device)
    placement = _placed(work, strategy, strategy.team_size(ranks), ranks, costs, interval, {})
    return plan(work, placement, costs, interval, strategy.name)


def _placed(
    work: Work,
    strategy: Strategy,
    team_size: int | None,
    ranks: int,
    costs: Costs,
    interval: int,
    fixed: Mapping[str, int],
) -> Placement:
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


def _same_factors(before: Assignment, blocks: Mapping[str, KroneckerBlock], keys: Keys) -> bool:
    """Whether the sharing of factors is as it was."""
    factors = {factor for block in blocks.values() for factor in block.factors()}
    sides = {key for block in blocks.values() for key in keys(block)}
    return factors == set(before.owner_of) and sides == set(before.solver_of)


def _numbers(factors: Sequence[Factor], orientations: Sequence[Orientation]) -> Tensor:
    """Weights and traces of factors and counts of orientations, on the host."""
    traces = [f.sum if f.diagonal else f.sum.diagonal(dim1=-2, dim2=-1) for f in factors]
    return torch.cat(
        [
            torch.stack([factor.weight for factor in factors]),
            *(trace.sum(-1, dtype=torch.float64) for trace in traces),
            *(orientation.counts for orientation in orientations),
        ]
    ).cpu()


def _sender(placement: Placement, team: int, rank: int) -> int:
    """Who of a team sends to a rank; a member, itself."""
    members = placement.teams[team]
    if rank in members:
        return rank
    return next(m for m in members if rank in placement.receivers(team, members.index(m)))


def _receivers(placement: Placement, team: int, sender: int) -> tuple[int, ...]:
    """The group in which one member of a team sends, itself included."""
    return tuple(sorted((sender, *placement.receivers(team, placement.teams[team].index(sender)))))


def _groups(placement: Placement) -> list[tuple[int, ...]]:
    """All groups that messages go through, in one order for all ranks."""
    groups = list(placement.teams)
    if len(placement.teams) > 1:
        groups += [_receivers(placement, number, m) for number, team in enumerate(placement.teams) for m in team]
    return list(dict.fromkeys(groups))


T = TypeVar("T")


def _by_dtype(things: Iterable[T], dtype: Callable[[T], torch.dtype]) -> Iterator[list[T]]:
    groups: dict[torch.dtype, list[T]] = {}
    for thing in things:
        groups.setdefault(dtype(thing), []).append(thing)
    yield from groups.values()


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _message_numel(factor: Factor) -> int:
    return factor.sum.numel() if factor.diagonal else folded_numel(factor.stack, factor.sum.shape[1])


def _packed(tensor: Tensor) -> Tensor:
    return tensor.flatten() if tensor.dim() == 2 else fold(tensor)


def _unpacked(flat: Tensor, shape: Sequence[int]) -> Tensor:
    return flat.view(*shape) if len(shape) == 2 else unfold(flat, shape[0], shape[1])


def _side_parts(side: Side, solver: str) -> list[Tensor]:
    """A side as flat parts: an inverse is symmetric, eigenvectors are not."""
    if side.matrix is None:
        assert side.values is not None, "a side has a matrix or values"
        return [side.values.flatten()]
    if solver == "inverse":
        return [fold(side.matrix)]
    assert side.values is not None, "an eigenbasis has eigenvalues"
    return [side.matrix.flatten(), side.values.flatten()]


def _side_numels(shape: Sequence[int], solver: str) -> list[int]:
    if len(shape) == 2:
        return [shape[0] * shape[1]]
    stack, size, _ = shape
    return [folded_numel(stack, size)] if solver == "inverse" else [stack * size * size, stack * size]


def _side_of(parts: Sequence[Tensor], shape: Sequence[int], solver: str) -> Side:
    if len(shape) == 2:
        return Side(None, parts[0].view(*shape))
    if solver == "inverse":
        return Side(unfold(parts[0], shape[0], shape[1]), None)
    return Side(parts[0].view(*shape), parts[1].view(shape[0], shape[1]))

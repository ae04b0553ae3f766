"""Solved sides, from who has decomposed them to who needs them. `like` has, for each side, a tensor of its shape and
dtype: (stack, n, n), or (stack, n) for a diagonal one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.distribute.assignment import Assignment
from natgrad.distribute.channel import Channel, Message
from natgrad.distribute.packing import by_dtype, side_numels, side_of, side_parts
from natgrad.solve.solver import Side

Shapes = Mapping[Hashable, Tensor]
Sides = dict[Hashable, Side]


def share(channel: Channel, assignment: Assignment, like: Shapes, sides: Sides, solver: str) -> None:
    """Brings every side that a member of this rank's team has solved to the whole team, into `sides`."""
    team = assignment.placement.teams[assignment.team_of_rank(channel.rank)]
    if len(team) > 1:
        _exchange(channel, assignment, like, sides, solver, team, "solutions")


def gathered(
    channel: Channel, assignment: Assignment, like: Shapes, sides: Mapping[Hashable, Side], solver: str
) -> Sides:
    """The solved sides of all blocks, on all ranks."""
    everything = dict(sides)
    if len(assignment.placement.teams) > 1:
        # Into fresh ones: what this rank holds is the same already.
        everything = {**gathered_from_solvers(channel, assignment, like, sides, solver), **everything}
    return everything


def gathered_from_solvers(
    channel: Channel, assignment: Assignment, like: Shapes, sides: Mapping[Hashable, Side], solver: str
) -> Sides:
    """Sides that each rank has only where it has solved them, on all ranks."""
    received = {key: side for key, side in sides.items() if assignment.solver_of[key] == channel.rank}
    _exchange(channel, assignment, like, received, solver, range(channel.size), "checkpoints")
    return received


def _exchange(
    channel: Channel,
    assignment: Assignment,
    like: Shapes,
    sides: Sides,
    solver: str,
    ranks: Sequence[int],
    kind: str,
) -> None:
    under_way: list[tuple[Message, list[Hashable]]] = []
    for member in ranks:
        keys = [key for key in like if assignment.solver_of[key] == member]
        for same in by_dtype(keys, lambda key: like[key].dtype):
            if member == channel.rank:
                flat = torch.cat([part for key in same for part in side_parts(sides[key], solver)])
            else:
                count = sum(sum(side_numels(like[key].shape, solver)) for key in same)
                flat = torch.empty(count, dtype=like[same[0]].dtype, device=like[same[0]].device)
            message = channel.broadcast(flat, member, ranks, kind)
            # Half of an inverse travels: who has made it takes that half too, so that all have the same bits.
            read = member != channel.rank or solver == "inverse"
            under_way.append((message, same if read else []))
    for message, same in under_way:
        _read(message.wait(), same, like, sides, solver)


def _read(flat: Tensor, keys: Sequence[Hashable], like: Shapes, sides: Sides, solver: str) -> None:
    lengths = [side_numels(like[key].shape, solver) for key in keys]
    parts = iter(flat.split([one for each in lengths for one in each]) if keys else ())
    for key, each in zip(keys, lengths, strict=True):
        new = side_of([next(parts) for _ in each], like[key].shape, solver)
        if key in sides and sides[key].is_like(new):
            sides[key].update(new, [False] * like[key].shape[0])
        else:
            sides[key] = Side(*(None if part is None else part.clone() for part in (new.matrix, new.values)))

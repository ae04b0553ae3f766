"""What a placement's ranks send to each other and hold, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from natgrad.distribute.costs import Costs
from natgrad.distribute.placement import Matrices, Placement, Work, owned, product_seconds


@dataclass(frozen=True)
class Message:
    """One reduce to, or broadcast from, `root` among `ranks`, `root` being one of them."""

    kind: str
    root: int
    ranks: tuple[int, ...]
    bytes: int


def messages(work: Work, placement: Placement) -> tuple[Message, ...]:
    """Every message of a refresh (kinds "factors" and "solutions") and of a step ("gradients"), in a fixed order."""
    return (*_factor_messages(work, placement), *_solution_messages(work, placement), *_gradients(work, placement))


def _factor_messages(work: Work, placement: Placement) -> Iterable[Message]:
    if placement.ranks == 1:
        return
    everyone = tuple(range(placement.ranks))
    for rank in everyone:
        pieces = owned(work, placement, rank)
        each_size = work.sum_size or work.element_size
        if size := each_size * sum(_triangle(each) for piece in pieces for each in piece.sums):
            yield Message("factors", rank, everyone, size)


def _solution_messages(work: Work, placement: Placement) -> Iterable[Message]:
    sent = _eigen if work.solver == "eigen" else _triangle
    for team in placement.teams:
        for rank in team if len(team) > 1 else ():
            pieces = owned(work, placement, rank)
            if size := work.element_size * sum(sent(each) for piece in pieces for each in piece.solves):
                yield Message("solutions", rank, team, size)


def _gradients(work: Work, placement: Placement) -> Iterable[Message]:
    for number, team in enumerate(placement.teams):
        layers = [layer for layer in work.layers if placement.team_of[layer.name] == number]
        size = (work.gradient_size or work.element_size) * sum(layer.elements for layer in layers)
        for member, rank in enumerate(team):
            receivers = placement.receivers(number, member)
            if receivers and size:
                yield Message("gradients", rank, tuple(sorted((rank, *receivers))), size)


@dataclass(frozen=True)
class Sent:
    """How much is sent, in how many messages."""

    bytes: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Traffic:
    """Of all messages that the ranks exchange: factors and solutions at a refresh, gradients at every step."""

    factors: Sent
    solutions: Sent
    gradients: Sent


def traffic(work: Work, placement: Placement) -> Traffic:
    """The totals of all messages of a placement."""
    by_kind: dict[str, list[int]] = {"factors": [], "solutions": [], "gradients": []}
    for message in messages(work, placement):
        by_kind[message.kind].append(message.bytes)
    return Traffic(**{kind: Sent(sum(sizes), len(sizes)) for kind, sizes in by_kind.items()})


def held_bytes(work: Work, placement: Placement) -> tuple[int, ...]:
    """Bytes of decompositions that each rank holds: those of its team's layers."""
    held = _eigen if work.solver == "eigen" else _square
    pieces = {piece.name: sum(held(each) for each in piece.solves) for piece in work.pieces}
    result = [0] * placement.ranks
    for number, team in enumerate(placement.teams):
        layers = [layer for layer in work.layers if placement.team_of[layer.name] == number]
        names = {name for layer in layers for name in layer.pieces}
        for rank in team:
            result[rank] = work.element_size * sum(pieces[name] for name in names)
    return tuple(result)


def step_seconds(work: Work, placement: Placement, costs: Costs, interval: int) -> float:
    """Modelled seconds that a placement adds to an average step: decomposing, preconditioning, and their messages.

    Messages between different ranks go at the same time, so that the rank that takes part in most counts.
    """
    by_kind = {"factors": [0.0] * placement.ranks, "solutions": [0.0] * placement.ranks}
    by_kind["gradients"] = [0.0] * placement.ranks
    for message in messages(work, placement):
        for rank in message.ranks:
            by_kind[message.kind][rank] += costs.message(message.bytes)
    refresh = max(by_kind["factors"]) + placement.slowest + max(by_kind["solutions"])
    return refresh / interval + max(product_seconds(work, placement, costs)) + max(by_kind["gradients"])


def _triangle(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * (size + 1) // 2)


def _eigen(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * size + size)


def _square(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * size)

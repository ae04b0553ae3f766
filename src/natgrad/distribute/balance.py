"""Placing work on ranks. Pure: every rank computes the same placement from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.distribute.bins import Item, fill
from natgrad.distribute.costs import Costs
from natgrad.distribute.placement import Layer, Piece, Placement, Work, make_teams, product_seconds
from natgrad.distribute.traffic import held_bytes, step_seconds
from natgrad.options import choice, whole_number

METHODS = ("balanced", "round-robin")

# Ranks wait for the slowest at a refresh and again at every step, for another one perhaps. A rank's sum of both is what
# is balanced; how much products should count in it is tried: as they are, not at all, above all.
_EMPHASES = (1.0, 0.0, 100.0)
_AS_LONG = 0.99  # a piece bounds its rank where it takes this part of the time


def place(
    work: Work,
    *,
    ranks: int,
    team_size: int,
    costs: Costs,
    interval: int,
    method: str = "balanced",
    fixed: Mapping[str, int] = {},
) -> Placement:
    """Layers to teams, and pieces to members. `interval`: steps from one refresh to the next. `fixed`: layers that must
    stay in a team, by name, since their decompositions live there.

    "balanced" is longest processing time first, improved by moves and swaps; "round-robin" is the second paper's: in
    turn, whatever they cost.
    """
    whole_number("ranks", ranks)
    whole_number("team_size", team_size)
    whole_number("interval", interval)
    choice("method", method, METHODS)
    if team_size > ranks:
        raise ValueError(f"team_size must be at most the number of ranks, {ranks}, got {team_size}")
    teams = make_teams(ranks, team_size)
    components = _components(work)
    pinned = _pinned(components, fixed, len(teams))
    tries = []
    if method == "balanced":
        weights = [interval * emphasis for emphasis in _EMPHASES] if len(teams) > 1 else [0.0]
        tries = [_balanced(work, components, teams, pinned, costs, weight) for weight in weights]
    # Longest first is a rule of thumb; now and then the order that is given does better.
    tries.append(_in_turn(work, components, teams, pinned))
    placements = [_placement(work, team_size, teams, components, *shares, costs, method) for shares in tries]
    return min(placements, key=lambda each: _objective(work, each, costs, interval))


def choose(
    work: Work, *, ranks: int, costs: Costs, interval: int, memory: int | None = None, method: str = "balanced"
) -> Placement:
    """The fastest placement by the model, over team sizes 1, 2, 4, ... and all ranks, whose decompositions fit into
    `memory` bytes on every rank; the one that needs least where none does.
    """
    sizes = [1]
    while 2 * sizes[-1] < ranks:
        sizes.append(2 * sizes[-1])
    found = [
        place(work, ranks=ranks, team_size=size, costs=costs, interval=interval, method=method)
        for size in (*sizes, ranks)
    ]
    fitting = [each for each in found if memory is None or max(held_bytes(work, each)) <= memory]
    return min(fitting or found[:1], key=lambda each: step_seconds(work, each, costs, interval))


@dataclass
class _Component:
    """Layers that hang together by the pieces they share, and those pieces, both in the order of the work."""

    layers: list[Layer] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


def _components(work: Work) -> list[_Component]:
    group = {piece.name: index for index, piece in enumerate(work.pieces)}
    for layer in work.layers:
        joined = {group[name] for name in layer.pieces}
        if len(joined) > 1:
            group = {name: min(joined) if number in joined else number for name, number in group.items()}
    components: dict[int, _Component] = {}
    for layer in work.layers:
        components.setdefault(group[layer.pieces[0]], _Component()).layers.append(layer)
    for piece in work.pieces:
        components[group[piece.name]].pieces.append(piece)
    return list(components.values())


def _pinned(components: Sequence[_Component], fixed: Mapping[str, int], teams: int) -> dict[int, int]:
    """The team that a component must stay in, by its number."""
    names = {layer.name for component in components for layer in component.layers}
    for name, team in fixed.items():
        if name not in names:
            raise ValueError(f"fixed names {name!r}, which is not among the layers")
        if team not in range(teams):
            raise ValueError(f"fixed puts {name!r} into team {team!r}, and there are teams 0 to {teams - 1}")
    pinned = {}
    for number, component in enumerate(components):
        places = {layer.name: fixed[layer.name] for layer in component.layers if layer.name in fixed}
        if len(set(places.values())) > 1:
            raise ValueError(f"fixed puts layers that share pieces into different teams: {places}")
        if places:
            pinned[number] = next(iter(places.values()))
    return pinned


Shares = tuple[list[int], dict[str, int]]
"""The team of each component, and the owner of each piece."""


def _in_turn(
    work: Work, components: Sequence[_Component], teams: Sequence[Sequence[int]], pinned: Mapping[int, int]
) -> Shares:
    places = [pinned.get(number, number % len(teams)) for number in range(len(components))]
    team_of_piece = {p.name: places[number] for number, component in enumerate(components) for p in component.pieces}
    turns = [0] * len(teams)
    owners = {}
    for piece in work.pieces:
        team = team_of_piece[piece.name]
        owners[piece.name] = teams[team][turns[team] % len(teams[team])]
        turns[team] += 1
    return places, owners


def _balanced(
    work: Work,
    components: Sequence[_Component],
    teams: Sequence[Sequence[int]],
    pinned: Mapping[int, int],
    costs: Costs,
    weight: float,
) -> Shares:
    """`weight`: how often products are done for one decomposition."""
    seconds = {piece.name: work.seconds(piece, costs) for piece in work.pieces}
    items = [
        Item(
            shared=sum(seconds[piece.name] for piece in component.pieces),
            longest=max(seconds[piece.name] for piece in component.pieces),
            each=weight * sum(costs.products(work.solver, layer.shape, layer.diagonal) for layer in component.layers),
        )
        for component in components
    ]
    places = fill(items, [len(team) for team in teams], pinned)
    owners = {}
    for number, team in enumerate(teams):
        inside = [component for place, component in zip(places, components, strict=True) if place == number]
        pieces = [piece for component in inside for piece in component.pieces]
        alone = [Item(seconds[piece.name], seconds[piece.name], 0.0) for piece in pieces]
        for piece, member in zip(pieces, fill(alone, [1] * len(team), {}), strict=True):
            owners[piece.name] = team[member]
    return places, owners


def _placement(
    work: Work,
    team_size: int,
    teams: tuple[tuple[int, ...], ...],
    components: Sequence[_Component],
    places: Sequence[int],
    owners: Mapping[str, int],
    costs: Costs,
    method: str,
) -> Placement:
    ranks = sum(len(team) for team in teams)
    seconds = [0.0] * ranks
    for piece in work.pieces:
        seconds[owners[piece.name]] += work.seconds(piece, costs)
    longest = max(work.pieces, key=lambda piece: work.seconds(piece, costs), default=None)
    bounds = longest is not None and work.seconds(longest, costs) >= _AS_LONG * max(seconds)
    team_of = {
        layer.name: place for place, component in zip(places, components, strict=True) for layer in component.layers
    }
    return Placement(
        ranks=ranks,
        team_size=team_size,
        teams=teams,
        team_of={layer.name: team_of[layer.name] for layer in work.layers},
        owner_of={piece.name: owners[piece.name] for piece in work.pieces},
        solve_seconds=tuple(seconds),
        bound=longest.name if longest is not None and bounds else None,
        method=method,
    )


def _objective(work: Work, placement: Placement, costs: Costs, interval: int) -> float:
    """What balancing is for: seconds from one refresh to the next, without messages. All ranks wait for the slowest,
    at a refresh and at every step. Products that are everyone's count for nothing.
    """
    if len(placement.teams) == 1:
        return placement.slowest
    return placement.slowest + interval * max(product_seconds(work, placement, costs))

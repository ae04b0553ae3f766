"""Who does which part of K-FAC's work: what there is to place, and what a placement says.

A *piece* is work that one rank does alone at a refresh: decomposing one factor, or a few that cannot be parted. A
*layer* is one Fisher block; it needs one or more pieces, and layers may share pieces (q, k, v have one input factor).
A *team* is a set of ranks that all hold the decompositions of a layer and all precondition it; the other ranks receive
the preconditioned gradient from a member at every step. One team of all ranks is the second paper's K-FAC-opt
("comm-opt"), teams of one its K-FAC-lw ("layer-wise"), and "hybrid" is in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from natgrad.distribute.costs import Costs
from natgrad.options import choice, whole_number

Matrices = tuple[int, int, bool]
"""(stack, size, diagonal)"""


@dataclass(frozen=True)
class Piece:
    """`solves`: (stack, size, diagonal) of each decomposition. `sums`: the same of each factor whose sum over ranks is
    sent to who solves it.
    """

    name: str
    solves: tuple[Matrices, ...]
    sums: tuple[Matrices, ...]


@dataclass(frozen=True)
class Layer:
    """`shape`: (stack, rows, columns) of the gradient. `diagonal`: of its sides, row side first."""

    name: str
    shape: tuple[int, int, int]
    diagonal: tuple[bool, ...]
    pieces: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Of its gradient."""
        stack, rows, columns = self.shape
        return stack * rows * columns


@dataclass(frozen=True)
class Work:
    """Everything that is to be placed. `element_size`: bytes of a number, in memory and in messages; of sums and
    gradients in messages they may be others.
    """

    layers: tuple[Layer, ...]
    pieces: tuple[Piece, ...]
    solver: str
    element_size: int = 4
    sum_size: int | None = None
    gradient_size: int | None = None

    def __post_init__(self) -> None:
        choice("solver", self.solver, ("eigen", "inverse"))
        whole_number("element_size", self.element_size)
        _no_doubles("layers", [layer.name for layer in self.layers])
        _no_doubles("pieces", [piece.name for piece in self.pieces])
        unused = {piece.name: None for piece in self.pieces}
        known = set(unused)
        for layer in self.layers:
            _no_doubles(f"pieces of {layer.name!r}", layer.pieces)
            if not layer.pieces:
                raise ValueError(f"layer {layer.name!r} needs at least one piece")
            for name in layer.pieces:
                if name not in known:
                    raise ValueError(f"layer {layer.name!r} needs {name!r}, which is not among the pieces")
                unused.pop(name, None)
        if unused:
            raise ValueError(f"no layer needs the piece {next(iter(unused))!r}")

    def seconds(self, piece: Piece, costs: Costs, *, solver: str = "") -> float:
        """Of solving a piece, with this work's solver or another."""
        return sum(
            costs.solve(solver or self.solver, size, stack=stack, diagonal=diagonal)
            for stack, size, diagonal in piece.solves
        )


@dataclass(frozen=True)
class Placement:
    """Who does what. `team_of` by layer, `owner_of` by piece; `solve_seconds` of a refresh, by rank. `team_size` is
    what was asked for: with it, and not with the size that teams have, later placements have the same teams.

    `bound` is a piece that alone takes as long as the slowest rank, within 1 %: no placement over more ranks is faster.
    """

    ranks: int
    team_size: int
    teams: tuple[tuple[int, ...], ...]
    team_of: Mapping[str, int]
    owner_of: Mapping[str, int]
    solve_seconds: tuple[float, ...]
    bound: str | None
    method: str

    @property
    def strategy(self) -> str:
        """The name of this layout."""
        if len(self.teams) == 1:
            return "comm-opt"
        return "layer-wise" if len(self.teams) == self.ranks else "hybrid"

    @property
    def slowest(self) -> float:
        """Seconds that a refresh takes: those of the slowest rank."""
        return max(self.solve_seconds)

    @property
    def mean(self) -> float:
        """Seconds that a refresh would take if all ranks had equally much to do."""
        return sum(self.solve_seconds) / self.ranks

    def receivers(self, team: int, member: int) -> tuple[int, ...]:
        """Ranks outside a team to which its member number `member` sends preconditioned gradients.

        Every outsider has one sender in each other team. With equal teams the members of one number, one of each team,
        send to each other only.
        """
        own = len(self.teams[team])
        return tuple(
            sorted(
                rank
                for other, ranks in enumerate(self.teams)
                if other != team
                for number, rank in enumerate(ranks)
                if number % own == member
            )
        )


def make_teams(ranks: int, team_size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks cut into teams of about this size, which differ by at most one.

    Teams are strided, so that neighbours, with the fastest link between them, are in different ones: gradients go
    between teams at every step, decompositions within them at refreshes only.
    """
    count = max(1, round(ranks / team_size))
    return tuple(tuple(range(team, ranks, count)) for team in range(count))


def owned(work: Work, placement: Placement, rank: int) -> list[Piece]:
    """The pieces that a rank solves, in the order of the work."""
    return [piece for piece in work.pieces if placement.owner_of[piece.name] == rank]


def product_seconds(work: Work, placement: Placement, costs: Costs) -> list[float]:
    """Of preconditioning, by team; every member does all of its team's layers."""
    seconds = [0.0] * len(placement.teams)
    for layer in work.layers:
        seconds[placement.team_of[layer.name]] += costs.products(work.solver, layer.shape, layer.diagonal)
    return seconds


def _no_doubles(what: str, names: Sequence[str]) -> None:
    doubles = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if doubles:
        raise ValueError(f"{what} must be named once each, got {', '.join(map(repr, doubles))} again")


def owners_of(work: Work, placement: Placement) -> dict[str, str]:
    """The ranks that decompose each layer's factors, for people: ``0``, or ``0+3``."""
    ranks = {layer.name: sorted({placement.owner_of[piece] for piece in layer.pieces}) for layer in work.layers}
    return {name: "+".join(map(str, own)) for name, own in ranks.items()}

"""Who does which part of K-FAC's work. Pure: every rank computes the same placement from the same numbers.

A *piece* is work that one rank does alone at a refresh: decomposing one factor, or a few that cannot be parted. A
*layer* is one Fisher block; it needs one or more pieces, and layers may share pieces (q, k, v have one input factor).
A *team* is a set of ranks that all hold the decompositions of a layer and all precondition it; the other ranks receive
the preconditioned gradient from a member at every step. One team of all ranks is the second paper's K-FAC-opt
("comm-opt"), teams of one its K-FAC-lw ("layer-wise"), and "hybrid" is in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.distribute.costs import Costs
from natgrad.options import choice, whole_number

METHODS = ("balanced", "round-robin")

Matrices = tuple[int, int, bool]
"""(stack, size, diagonal)"""

_ROUNDS = 64  # of moves and swaps
_CLOSE = 1.001  # to what no placement can beat: not worth another round
# Ranks wait for the slowest at a refresh and again at every step, for another one perhaps. A rank's sum of both is what
# is balanced; how much products should count in it is tried: as they are, not at all, above all.
_EMPHASES = (1.0, 0.0, 100.0)
_AS_LONG = 0.99  # a piece bounds its rank where it takes this part of the time


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
    """Everything that is to be placed. `element_size`: bytes of a number, on the wire and in memory."""

    layers: tuple[Layer, ...]
    pieces: tuple[Piece, ...]
    solver: str
    element_size: int = 4

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


def make_teams(ranks: int, team_size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks cut into teams of about this size, which differ by at most one.

    Teams are strided, so that neighbours, with the fastest link between them, are in different ones: gradients go
    between teams at every step, decompositions within them at refreshes only.
    """
    count = max(1, round(ranks / team_size))
    return tuple(tuple(range(team, ranks, count)) for team in range(count))


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
        pieces = _owned(work, placement, rank)
        if size := work.element_size * sum(_triangle(each) for piece in pieces for each in piece.sums):
            yield Message("factors", rank, everyone, size)


def _solution_messages(work: Work, placement: Placement) -> Iterable[Message]:
    sent = _eigen if work.solver == "eigen" else _triangle
    for team in placement.teams:
        for rank in team if len(team) > 1 else ():
            pieces = _owned(work, placement, rank)
            if size := work.element_size * sum(sent(each) for piece in pieces for each in piece.solves):
                yield Message("solutions", rank, team, size)


def _gradients(work: Work, placement: Placement) -> Iterable[Message]:
    for number, team in enumerate(placement.teams):
        layers = [layer for layer in work.layers if placement.team_of[layer.name] == number]
        size = work.element_size * sum(layer.elements for layer in layers)
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
    return refresh / interval + max(_product_seconds(work, placement, costs)) + max(by_kind["gradients"])


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


@dataclass(frozen=True)
class Plan:
    """A placement with what it is expected to cost, for people. `seconds` are added to an average step."""

    work: Work
    placement: Placement
    costs: Costs
    interval: int
    strategy: str
    chosen: str
    traffic: Traffic
    seconds: float

    @property
    def bound(self) -> str | None:
        """The piece that alone takes as long as the slowest rank, if there is one."""
        return self.placement.bound

    def owner(self, layer: str) -> str:
        """The ranks that decompose a layer's factors: ``0``, or ``0+3``."""
        for each in self.work.layers:
            if each.name == layer:
                return "+".join(map(str, sorted({self.placement.owner_of[name] for name in each.pieces})))
        raise KeyError(layer)

    def __str__(self) -> str:
        if self.placement.ranks == 1:
            return f"one rank does it all: {self._solved(0)}"
        text = [self._heading(), *self._table()]
        slowest, mean = self.placement.slowest, self.placement.mean
        if mean:
            text.append(f"refresh: {_ms(slowest)} on the slowest rank, {_ms(mean)} on average ({slowest / mean:.2f} ×)")
        text += self._bounds()
        text += [
            f"sent by all ranks at a refresh: factors {_sent(self.traffic.factors)}, "
            f"decompositions {_sent(self.traffic.solutions)}",
            f"sent by all ranks at every step: gradients {_sent(self.traffic.gradients)}",
            f"modelled: {_ms(self.seconds)} added to an average step, with a refresh every {self.interval} "
            f"(costs of {self.costs.device})",
        ]
        return "\n".join(text)

    def _solved(self, rank: int) -> str:
        from natgrad.report import memory  # here, since the report may be importing this

        pieces = len(_owned(self.work, self.placement, rank))
        held = held_bytes(self.work, self.placement)[rank]
        return f"{pieces} pieces, {_ms(self.placement.solve_seconds[rank])} a refresh, {memory(held)} of decompositions"

    def _heading(self) -> str:
        sizes = sorted({len(team) for team in self.placement.teams})
        teams = "1 team" if len(self.placement.teams) == 1 else f"{len(self.placement.teams)} teams"
        chosen = f" ({self.chosen})" if self.chosen else ""
        return (
            f"{self.strategy}{chosen}: {self.placement.ranks} ranks, {teams} of {' or '.join(map(str, sizes))}, "
            f"{self.placement.method}"
        )

    def _table(self) -> list[str]:
        from natgrad.report import memory  # here, since the report may be importing this

        seconds, mean = self.placement.solve_seconds, self.placement.mean
        held = held_bytes(self.work, self.placement)
        rows = [("rank", "pieces", "refresh", "of the mean", "held")]
        for rank in range(self.placement.ranks):
            share = f"{seconds[rank] / mean:.0%}" if mean else ""
            pieces = len(_owned(self.work, self.placement, rank))
            rows.append((str(rank), str(pieces), _ms(seconds[rank]), share, memory(held[rank])))
        if self.placement.ranks > 16:
            order = sorted(range(self.placement.ranks), key=lambda rank: (-seconds[rank], rank))
            rows = [rows[0], *(rows[1 + rank] for rank in order[:4]), ("...",) * 5, *(rows[1 + r] for r in order[-4:])]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

    def _bounds(self) -> list[str]:
        """What keeps a refresh from getting faster with more ranks, if anything does."""
        if self.bound is not None:
            piece = next(piece for piece in self.work.pieces if piece.name == self.bound)
            seconds = self.work.seconds(piece, self.costs)
            inverse = self.work.seconds(piece, self.costs, solver="inverse")
            advice = f" solver='inverse' would take {_ms(inverse)}." if inverse < seconds else ""
            return [
                f"bound: {piece.name} ({' + '.join(map(_size, piece.solves))}, {_ms(seconds)}) takes as long as its "
                f"rank: more ranks do not help a refresh.{advice}"
            ]
        slowest = self.placement.solve_seconds.index(self.placement.slowest)
        team = next(number for number, ranks in enumerate(self.placement.teams) if slowest in ranks)
        layers = [name for name, place in self.placement.team_of.items() if place == team]
        if len(self.placement.teams[team]) == 1 and len(layers) == 1:
            return [f"bound: {layers[0]} is all that its rank does; a team of two or more could share it."]
        return []


def plan(work: Work, placement: Placement, costs: Costs, interval: int, strategy: str = "", chosen: str = "") -> Plan:
    """A placement to print. `strategy`: its name, if it has another than usual; `chosen`: why or by whom."""
    seconds = step_seconds(work, placement, costs, interval)
    name = strategy or placement.strategy
    return Plan(work, placement, costs, interval, name, chosen, traffic(work, placement), seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds >= 1e-3 or not seconds else f"{1000 * seconds:.3f} ms"


def _sent(sent: Sent) -> str:
    from natgrad.report import memory  # here, since the report may be importing this

    return f"{memory(sent.bytes)} in {sent.calls} messages" if sent.calls else "nothing"


def _size(each: Matrices) -> str:
    stack, size, diagonal = each
    return (f"{stack} × " if stack > 1 else "") + (f"{size} diagonal" if diagonal else f"{size}²")


def _triangle(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * (size + 1) // 2)


def _eigen(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * size + size)


def _square(each: Matrices) -> int:
    stack, size, diagonal = each
    return stack * (size if diagonal else size * size)


def _owned(work: Work, placement: Placement, rank: int) -> list[Piece]:
    return [piece for piece in work.pieces if placement.owner_of[piece.name] == rank]


def _no_doubles(what: str, names: Sequence[str]) -> None:
    doubles = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if doubles:
        raise ValueError(f"{what} must be named once each, got {', '.join(map(repr, doubles))} again")


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
        _Item(
            shared=sum(seconds[piece.name] for piece in component.pieces),
            longest=max(seconds[piece.name] for piece in component.pieces),
            each=weight * sum(costs.products(work.solver, layer.shape, layer.diagonal) for layer in component.layers),
        )
        for component in components
    ]
    places = _spread(items, [len(team) for team in teams], pinned)
    owners = {}
    for number, team in enumerate(teams):
        inside = [component for place, component in zip(places, components, strict=True) if place == number]
        pieces = [piece for component in inside for piece in component.pieces]
        alone = [_Item(seconds[piece.name], seconds[piece.name], 0.0) for piece in pieces]
        for piece, member in zip(pieces, _spread(alone, [1] * len(team), {}), strict=True):
            owners[piece.name] = team[member]
    return places, owners


@dataclass(frozen=True)
class _Item:
    """Something to be put into a bin of one or more ranks: seconds that its ranks can share, seconds of the longest
    part, which they cannot, and seconds that each of them spends.
    """

    shared: float
    longest: float
    each: float

    def load(self, size: float) -> float:
        """Seconds of this alone in a bin of so many ranks."""
        return max(self.shared / size, self.longest) + self.each

    def __add__(self, other: _Item) -> _Item:
        return _Item(self.shared + other.shared, max(self.longest, other.longest), self.each + other.each)


_NOTHING = _Item(0.0, 0.0, 0.0)


def _spread(items: Sequence[_Item], sizes: Sequence[int], pinned: Mapping[int, int]) -> list[int]:
    """The bin of each item, such that the fullest bin is as empty as can easily be had. `sizes`: ranks of each bin;
    `pinned`: items whose bin is given. Ties go by order.
    """
    contents: list[list[int]] = [[] for _ in sizes]
    sums = [_NOTHING] * len(sizes)

    def put(item: int, bin_: int) -> None:
        contents[bin_].append(item)
        sums[bin_] += items[item]

    for item, bin_ in sorted(pinned.items()):
        put(item, bin_)
    ranks = sum(sizes)
    own = [item.load(ranks / len(sizes)) for item in items]
    free = [item for item in range(len(items)) if item not in pinned]
    for item in sorted(free, key=lambda item: (-own[item], item)):
        put(item, min(range(len(sizes)), key=lambda b: ((sums[b] + items[item]).load(sizes[b]), b)))
    _improve(items, sizes, contents, set(pinned))
    where = {item: bin_ for bin_, inside in enumerate(contents) for item in inside}
    return [where[item] for item in range(len(items))]


def _improve(items: Sequence[_Item], sizes: Sequence[int], contents: list[list[int]], stuck: set[int]) -> None:
    """Takes an item out of the fullest bin, or swaps it for a lighter one, in the way that helps most, while any does.

    Plain numbers instead of sums of items: this is the inner loop.
    """
    if not items:
        return
    each = sum(item.each for item in items) * min(sizes)
    least = max((sum(item.shared for item in items) + each) / sum(sizes), *(item.load(max(sizes)) for item in items))
    for _ in range(_ROUNDS):
        sums = [sum((items[item] for item in inside), _NOTHING) for inside in contents]
        loads = [total.load(size) for total, size in zip(sums, sizes, strict=True)]
        full = max(range(len(sizes)), key=lambda b: (loads[b], -b))
        if loads[full] <= _CLOSE * least:
            return
        found = _best_exchange(items, sizes, contents, stuck, full, loads[full])
        if found is None:
            return
        out, other, back = found
        contents[full].remove(out)
        contents[other].append(out)
        if back is not None:
            contents[other].remove(back)
            contents[full].append(back)


def _best_exchange(
    items: Sequence[_Item],
    sizes: Sequence[int],
    contents: Sequence[Sequence[int]],
    stuck: set[int],
    full: int,
    limit: float,
) -> tuple[int, int, int | None] | None:
    """Which item should leave the full bin, for which bin, and for which item of that; None where nothing gets the
    fuller of the two below `limit`.
    """
    best, found = limit * (1 - 1e-9), None
    rests = [_without(items, inside, stuck) for inside in contents]
    for out, shared, longest, every in rests[full][1:]:
        assert out is not None, "the first entry alone is of the whole bin"
        a = items[out]
        for other, entries in enumerate(rests):
            if other == full:
                continue
            for back, other_shared, other_longest, other_every in entries:
                b = _NOTHING if back is None else items[back]
                there = max((other_shared + a.shared) / sizes[other], other_longest, a.longest) + other_every + a.each
                if there >= best:
                    continue
                here = max((shared + b.shared) / sizes[full], longest, b.longest) + every + b.each
                if here < best:
                    best, found = max(here, there), (out, other, back)
    return found


def _without(
    items: Sequence[_Item], inside: Sequence[int], stuck: set[int]
) -> list[tuple[int | None, float, float, float]]:
    """What is in a bin (shared, longest, each), whole, and without each item that may leave."""
    total = sum((items[item] for item in inside), _NOTHING)
    longest = sorted((items[item].longest for item in inside), reverse=True)
    entries: list[tuple[int | None, float, float, float]] = [(None, total.shared, total.longest, total.each)]
    for number in inside:
        if number not in stuck:
            item = items[number]
            left = longest[1:] if item.longest == longest[0] else longest
            entries.append((number, total.shared - item.shared, left[0] if left else 0.0, total.each - item.each))
    return entries


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


def _product_seconds(work: Work, placement: Placement, costs: Costs) -> list[float]:
    """Of preconditioning, by team; every member does all of its team's layers."""
    seconds = [0.0] * len(placement.teams)
    for layer in work.layers:
        seconds[placement.team_of[layer.name]] += costs.products(work.solver, layer.shape, layer.diagonal)
    return seconds


def _objective(work: Work, placement: Placement, costs: Costs, interval: int) -> float:
    """What balancing is for: seconds from one refresh to the next, without messages. All ranks wait for the slowest,
    at a refresh and at every step. Products that are everyone's count for nothing.
    """
    if len(placement.teams) == 1:
        return placement.slowest
    return placement.slowest + interval * max(_product_seconds(work, placement, costs))

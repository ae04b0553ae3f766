"""A placement with what it is expected to cost, for people: what ``kfac.plan()`` prints."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.distribute.costs import Costs
from natgrad.distribute.placement import Matrices, Placement, Work, owned, owners_of
from natgrad.distribute.traffic import Sent, Traffic, held_bytes, step_seconds, traffic
from natgrad.report import memory


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
        return owners_of(self.work, self.placement)[layer]

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
        pieces = len(owned(self.work, self.placement, rank))
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
        seconds, mean = self.placement.solve_seconds, self.placement.mean
        held = held_bytes(self.work, self.placement)
        rows = [("rank", "pieces", "refresh", "of the mean", "held")]
        for rank in range(self.placement.ranks):
            share = f"{seconds[rank] / mean:.0%}" if mean else ""
            pieces = len(owned(self.work, self.placement, rank))
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
    return f"{memory(sent.bytes)} in {sent.calls} messages" if sent.calls else "nothing"


def _size(each: Matrices) -> str:
    stack, size, diagonal = each
    return (f"{stack} × " if stack > 1 else "") + (f"{size} diagonal" if diagonal else f"{size}²")

"""Lines of several seeds in a panel: the mean, the band around it, and what the pointer finds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from natgrad.page import series
from natgrad.page.drawing import Look, rounded, to_six
from natgrad.page.series import Curve, Line
from natgrad.page.words import number

ANSWER = '<span style="color:%{fullData.line.color}">■</span> <b>%{fullData.name}</b>   %{text}<extra></extra>'


@dataclass(frozen=True, kw_only=True)
class Family:
    """A contender's seeds in one panel: those that came to the end as one curve, the others each for itself."""

    curve: Curve | None
    loose: tuple[Line, ...]

    def values(self) -> list[float]:
        """All that must be seen."""
        curve = [*self.curve.low, *self.curve.high] if self.curve is not None else []
        return [y for y in [*curve, *(y for line in self.loose for _, y in line)] if y is not None]

    def starts(self) -> list[float]:
        """Where the lines begin."""
        curve = list(self.curve.high) if self.curve is not None else []
        lines = [curve, *([y for _, y in line] for line in self.loose)]
        return [first for line in lines if (first := next((y for y in line if y is not None), None)) is not None]

    def at(self, x: float) -> float | None:
        """The mean there; where there is none, the only run."""
        if self.curve is not None:
            return series.at(list(zip(self.curve.x, self.curve.mean, strict=True)), x)
        return series.at(self.loose[0], x) if len(self.loose) == 1 else None

    def places(self) -> list[float]:
        """Every x that has a value."""
        if self.curve is not None:
            return list(self.curve.x)
        return [x for x, _ in self.loose[0]] if len(self.loose) == 1 else []


def family_of(lines: Sequence[tuple[Line, bool]], *, clocks: Sequence[Line] | None = None) -> Family:
    """Of lines over steps, each with whether its run came to the end; where none did, all of them count for the mean.

    With `clocks`, the seconds of each line's steps, it is drawn against those.
    """
    times = [series.cleaned(clock) for clock in clocks] if clocks is not None else [[] for _ in lines]
    kept = [(series.cleaned(line), finished, clock) for (line, finished), clock in zip(lines, times, strict=True)]
    kept = [one for one in kept if one[0]]
    whole = [one for one in kept if one[1]] or kept
    curve = series.by_step([line for line, _, _ in whole])
    loose = [one for one in kept if curve is None or not any(one is other for other in whole)]
    drawn = [[(series.at(clock, x) if clocks is not None else x, y) for x, y in line] for line, _, clock in loose]
    if curve is not None and clocks is not None:
        curve = series.timed(curve, [clock for _, _, clock in whole])
    placed = [[(x, y) for x, y in line if x is not None] for line in drawn]
    return Family(
        curve=curve, loose=tuple(line for line in map(_thinned, placed) if any(y is not None for _, y in line))
    )


def _thinned(line: Line) -> Line:
    """Counted from the end, which is what a run that broke off is looked at for."""
    return line[:: -max(1, len(line) // series.POINTS)][::-1]


def family_traces(family: Family, of: str, look: Look) -> list[dict[str, Any]]:
    """Band, mean and loose lines: solid for test, dashed for train."""
    solid = of == "test"
    common = {"hoverinfo": "skip", "showlegend": False, "legendgroup": look.group, "name": look.name}
    traces: list[dict[str, Any]] = []
    curve = family.curve
    if curve is not None and curve.seeds > 1:
        x, y = band(curve)
        traces.append(
            {
                **common, "type": "scatter", "mode": "lines", "x": x, "y": y, "fill": "toself",
                "fillcolor": f"{look.colour}/{0.2 if solid else 0.1}", "line": {"width": 0, "color": "@ink/0"},
            }
        )  # fmt: skip
    dash = {} if solid else {"dash": "5px,4px"}
    if curve is not None:
        alone = not any(a is not None and b is not None for a, b in itertools.pairwise(curve.mean))  # no line to see
        trace = {
            **common, "type": "scatter", "mode": "lines+markers" if solid or alone else "lines",
            "x": rounded(curve.x), "y": rounded(curve.mean), "connectgaps": False,
            "line": {"color": look.colour, "width": 2.25 if solid else 1.4, **dash},
        }  # fmt: skip
        if solid or alone:
            trace["marker"] = {"symbol": look.symbol, "size": 7, "color": look.colour, "maxdisplayed": 12}
        traces.append(trace)
    for line in family.loose:
        x, y = [x for x, _ in line], [y for _, y in line]
        traces.append(
            {
                **common, "type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded(y), "opacity": 0.75,
                "line": {"color": look.colour, "width": 1, **dash},
            }
        )  # fmt: skip
        end = max(index for index, one in enumerate(y) if one is not None)
        traces.append(
            {
                **common, "type": "scatter", "mode": "markers", "x": rounded(x[end : end + 1]),
                "y": rounded(y[end : end + 1]), "marker": {"symbol": "x-thin", "size": 9, "color": look.colour,
                "line": {"width": 2, "color": look.colour}},
            }
        )  # fmt: skip
    return traces


def band(curve: Curve) -> tuple[list[float | None], list[float | None]]:
    """Its outline, there on the largest and back on the smallest; one closed piece for every piece of the curve."""
    x: list[float | None] = []
    y: list[float | None] = []
    piece: list[tuple[float, float, float]] = []
    for place, low, high in [*zip(curve.x, curve.low, curve.high, strict=True), (0.0, None, None)]:
        if low is not None and high is not None:
            piece.append((place, low, high))
        elif piece:
            outline = [(x, high) for x, _, high in piece] + [(x, low) for x, low, _ in reversed(piece)]
            x += [*([None] if x else []), *(to_six(x) for x, _ in outline)]
            y += [*([None] if y else []), *(to_six(y) for _, y in outline)]
            piece = []
    return x, y


def answer(one: Family, look: Look) -> list[dict[str, Any]]:
    """What the pointer finds of one family, at its own places. (Nothing of it is seen.)"""
    places = [(x, y) for x in one.places() if (y := one.at(x)) is not None]
    if not places:
        return []
    return [
        {
            "type": "scatter", "mode": "lines", "x": rounded(x for x, _ in places),
            "y": rounded(y for _, y in places), "text": [number(y) for _, y in places], "name": look.name,
            "legendgroup": look.group, "showlegend": False, "line": {"color": look.colour, "width": 2.25},
            "opacity": 0, "hovertemplate": ANSWER,
        }
    ]  # fmt: skip


def above_zero(trace: dict[str, Any]) -> dict[str, Any]:
    """On a logarithmic axis nothing leads to zero; so it leads out of the picture."""
    return {**trace, "y": [1e-12 if y is not None and y <= 0 else y for y in trace["y"]]}

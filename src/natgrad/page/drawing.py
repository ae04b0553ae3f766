"""What all figures have in common: colours, axes, panels. Colours are names such as ``@c0`` or ``@c0/0.2`` (at 20 %),
which the page replaces by those of its light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from natgrad.compare.history import Comparison
from natgrad.page.words import THIN, in_figure, shortened

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
COLOURS = 8
SYMBOLS = ("circle", "diamond", "star", "cross", "hexagon", "triangle-down", "triangle-up", "square")
MARGIN = {"l": 46, "r": 14, "t": 30, "b": 46}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What Plotly gets, and what stands around it. `narrow` is what a telephone changes: layout entries by path."""

    name: str
    title: str
    says: str  # for those who cannot see it
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int
    narrow_height: int
    narrow: dict[str, Any] = field(default_factory=dict)
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a contender is drawn, everywhere."""

    colour: str
    symbol: str
    name: str
    group: str


def looks(comparison: Comparison) -> list[Look]:
    """One a contender: K-FAC's take the warm colours from the front, the others the cool ones from the back."""
    front, back = 0, COLOURS - 1
    chosen = []
    for index, contender in enumerate(comparison.contenders):
        if contender.uses_kfac:
            place, front = front, front + 1
        else:
            place, back = back, back - 1
        name = in_figure(shortened(contender.name, 28))
        place %= COLOURS
        chosen.append(Look(colour=f"@c{place}", symbol=SYMBOLS[place], name=name, group=f"contender-{index}"))
    return chosen


def base_layout(**more: Any) -> dict[str, Any]:
    """Fonts, ground and margins."""
    return {
        "font": {"family": FONT, "size": 12, "color": "@ink"},
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "margin": dict(MARGIN),
        "showlegend": False,
        "separators": f".{THIN}",
        "hoverlabel": {"bgcolor": "@paper", "bordercolor": "@line", "font": {"family": FONT, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "traceorder": "normal"},
        **more,
    }  # fmt: skip


def axis_style(title: str, **more: Any) -> dict[str, Any]:
    """Thin and quiet."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "@soft"}},
        "gridcolor": "@grid", "linecolor": "@line", "tickcolor": "@line", "tickfont": {"size": 11, "color": "@soft"},
        "showline": True, "zeroline": False, "ticks": "outside", "ticklen": 4, "exponentformat": "power",
        "separatethousands": True, "nticks": 6, **more,
    }  # fmt: skip


def pointed_axis(title: str, unit: str, anchor: str) -> dict[str, Any]:
    """An x axis on which the pointer asks all curves at once."""
    return axis_style(
        title, anchor=anchor, rangemode="tozero", spikecolor="@line", spikethickness=1, spikedash="solid",
        unifiedhovertitle={"text": f"%{{x:{',.0f' if unit == 'updates' else ',.3~f'}}} {unit}"},
    )  # fmt: skip


def legend_entry(look: Look) -> dict[str, Any]:
    """Only for pictures that leave the page: on it, buttons above the figure are the legend."""
    return {
        "type": "scatter", "mode": "lines+markers", "x": [None], "y": [None], "name": look.name, "showlegend": True,
        "legendgroup": look.group, "line": {"color": look.colour, "width": 2.25}, "hoverinfo": "skip",
        "marker": {"symbol": look.symbol, "size": 7, "color": look.colour},
    }  # fmt: skip


def name_panel(layout: dict[str, Any], panel: int, text: str) -> None:
    """Over its left corner, where it is read as a line of text."""
    layout.setdefault("annotations", []).append(
        {
            "text": f"<b>{text}</b>", "xref": f"{axis_name('x', panel)} domain", "x": 0, "xanchor": "left", "yshift": 3,
            "yref": f"{axis_name('y', panel)} domain", "y": 1, "yanchor": "bottom", "showarrow": False,
            "font": {"size": 13}, "borderpad": 0,
        }
    )  # fmt: skip


Domain = tuple[list[float], list[float]]


def panel_grid(rows: int, columns: int, *, height: int, gap_x: float = 0.0) -> list[Domain]:
    """Domains, row by row from the top; between rows there is room for a title and for an axis with its name."""
    across, down = _cut(columns, gap_x), _cut(rows, 76 / (height - MARGIN["t"] - MARGIN["b"]))
    return [([left, right], [1 - low, 1 - high]) for high, low in down for left, right in across]


def _cut(count: int, gap: float) -> list[tuple[float, float]]:
    size = (1 - gap * (count - 1)) / count
    return [(round(i * (size + gap), 4), round(min(1.0, i * (size + gap) + size), 4)) for i in range(count)]


def place_panels(layout: dict[str, Any], wide: Sequence[Domain], narrow: Sequence[Domain]) -> dict[str, Any]:
    """Puts the axes of each panel where the wide grid says; returns what changes on a telephone."""
    changes: dict[str, Any] = {}
    for panel, (there, here) in enumerate(zip(wide, narrow, strict=True), start=1):
        for letter, domain, other in zip("xy", there, here, strict=True):
            layout[axis_key(letter, panel)]["domain"] = domain
            changes[f"{axis_key(letter, panel)}.domain"] = other
    return changes


def axis_name(letter: str, panel: int) -> str:
    """``x``, ``x2``, ...: as traces name it, counted from one."""
    return letter if panel == 1 else f"{letter}{panel}"


def axis_key(letter: str, panel: int) -> str:
    """``xaxis``, ``xaxis2``, ...: as the layout names it."""
    return f"{letter}axis" if panel == 1 else f"{letter}axis{panel}"


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """`to_six` of each."""
    return [None if value is None else to_six(value) for value in values]


def to_six(value: float) -> float:
    """To six digits: the page holds many of these."""
    return float(f"{value:.6g}")


def log_axis(low: float, high: float) -> dict[str, Any]:
    """From 10^low to 10^high. Plain numbers, and not so many that they run into each other; powers of ten only where
    plain ones would be long.
    """
    axis = {"type": "log", "range": [to_six(low), to_six(high)]}
    if high - low <= 3:
        steps = (1, 2, 5) if high - low <= 2 else (1,)
        ticks = [to_six(step * 10.0**power) for power in range(math.floor(low), math.ceil(high)) for step in steps]
        shown = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(shown) >= 2:
            return {**axis, "tickvals": shown, "tickformat": "~g"}
    return {**axis, "tickformat": "~g"} if low > -5 and high < 6 else axis

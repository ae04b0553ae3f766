"""The figures of what K-FAC says of itself: its steps, and its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from natgrad.compare.history import Comparison, Contender, Layer, Reading
from natgrad.page import series
from natgrad.page.drawing import (
    MARGIN,
    Figure,
    axis_key,
    axis_name,
    axis_style,
    base_layout,
    legend_entry,
    log_axis,
    looks,
    name_panel,
    panel_grid,
    place_panels,
    pointed_axis,
    rounded,
)
from natgrad.page.families import Family, above_zero, answer, family_of, family_traces
from natgrad.page.words import grouped, in_figure, number, power, shortened

LAYERS_SAY = (
    "Condition number of each layer's damped curvature, from its first to its last reading; at the right how many "
    "steps old the decompositions were: a dot at the mean, a line up to the largest."
)
_QUANTITIES: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("predicted_kl", "predicted KL of a step", lambda reading: reading.predicted_kl),
    ("clip_factor", "clip factor", lambda reading: reading.clip_factor),
    ("damping", "damping", lambda reading: reading.damping),
)


def _varies(family: Family) -> bool:
    values = family.values()
    return bool(values) and max(values) > 1.001 * min(values)


def readings(comparison: Comparison) -> Figure | None:
    """What K-FAC said of its steps: predicted KL, and clip factor and damping where they vary."""
    shown = []
    for key, title, value in _QUANTITIES:
        everyone = []
        for contender, look in zip(comparison.contenders, looks(comparison), strict=True):
            lines = [
                ([(float(one.step), value(one)) for one in run.readings], run.finished)
                for run in contender.runs
                if any(value(one) is not None for one in run.readings)
            ]
            if lines:
                everyone.append((family_of(lines), look))
        values = [y for one, _ in everyone for y in one.values()]
        if values and (key == "predicted_kl" or any(_varies(one) for one, _ in everyone)):
            shown.append((title, everyone, values))
    if not shown:
        return None
    layout = base_layout(hovermode="x unified", hoverdistance=40, margin={**MARGIN, "l": 56})
    data: list[dict[str, Any]] = [
        legend_entry(look)
        for contender, look in zip(comparison.contenders, looks(comparison), strict=True)
        if any(run.readings for run in contender.runs)
    ]
    for panel, (title, everyone, values) in enumerate(shown, start=1):
        anchors = {"xaxis": axis_name("x", panel), "yaxis": axis_name("y", panel)}
        positive = [value for value in values if value > 0]
        log = bool(positive) and (title == _QUANTITIES[0][1] or max(positive) > 10 * min(positive))
        style: dict[str, Any] = {}
        if log:
            low, high = math.log10(min(positive)), math.log10(max(positive))
            room = max(0.05, 0.05 * (high - low))
            style = log_axis(low - room, high + room)
        for one, look in everyone:
            traces = [*family_traces(one, "test", look), *answer(one, look)]
            for trace in traces:
                trace.get("marker", {}).pop("maxdisplayed", None)
                if trace["mode"] == "lines+markers" and sum(y is not None for y in trace["y"]) > 1:
                    trace["mode"] = "lines"
                data.append({**(above_zero(trace) if log else trace), **anchors})
        layout[axis_key("x", panel)] = pointed_axis("updates", "updates", anchors["yaxis"])
        layout[axis_key("y", panel)] = axis_style("", anchor=anchors["xaxis"], **style)
        name_panel(layout, panel, f"{title[:1].upper()}{title[1:]}")
    height, narrow_height = 300, 230 * len(shown) + 20
    wide = panel_grid(1, len(shown), gap_x=0.08, height=height)
    narrow = place_panels(layout, wide, panel_grid(len(shown), 1, height=narrow_height))
    titles = ", ".join(title for title, _, _ in shown)
    return Figure(
        name="inside-kfac",
        title="Inside K-FAC",
        says=f"{titles[:1].upper()}{titles[1:]} against updates.",
        data=data,
        layout=layout,
        height=height,
        narrow=narrow,
        narrow_height=narrow_height,
    )


def layers(contender: Contender, *, index: int = 0) -> Figure | None:
    """Condition numbers and ages, layer by layer, of the first run that has them."""
    run = next((run for run in contender.runs if run.layers), None)
    if run is None:
        return None
    names = list(dict.fromkeys(layer.name for layer in run.layers))
    steps = [int(step) for step in series.thinned(sorted({layer.step for layer in run.layers}), 120)]
    there = {(layer.name, layer.step): layer for layer in run.layers}
    logs = [[_log_condition(there.get((name, step))) for step in steps] for name in names]
    flat = [value for row in logs for value in row if value is not None]
    ages = [[layer.age for layer in run.layers if layer.name == name and layer.age is not None] for name in names]
    if not flat and not any(ages):
        return None
    rows = len(names)
    layout = base_layout(hovermode="closest", margin={"l": 132, "r": 14, "t": 66, "b": 46})
    marked = list(range(0, rows, math.ceil(rows / 42)))
    layout["yaxis"] = {
        **axis_style("", fixedrange=True), "range": [rows - 0.5, -0.5], "tickvals": marked,
        "tickcolor": "@paper", "showgrid": False,
        "ticktext": [in_figure(shortened(names[row], 20)) for row in marked], "tickfont": {"size": 11, "color": "@ink"},
        "showline": False,
    }  # fmt: skip
    split = 0.62 if flat and any(ages) else 1.0
    data: list[dict[str, Any]] = []
    panel = 0
    if flat:
        panel = 1
        data.append(_condition_map(names, steps, logs, flat, split))
        layout["xaxis"] = {
            **axis_style("updates", fixedrange=True),
            "domain": [0, split],
            "showgrid": False,
            "tickangle": 0,
        }
        layout["annotations"] = [_panel_title("Condition number, with damping", "x")]
    if any(ages):
        panel += 1
        key = axis_key("x", panel)
        data += [{**trace, "xaxis": axis_name("x", panel)} for trace in _age_traces(names, ages)]
        oldest = max(age for one in ages for age in one)
        layout[key] = {
            **axis_style("age in steps", fixedrange=True, tickangle=0),
            "anchor": "y",
            "range": [0, 1.06 * oldest or 1],
        }
        layout[key]["domain"] = [split + 0.06, 1] if flat else [0, 1]
        layout.setdefault("annotations", []).append(_panel_title("Age", axis_name("x", panel)))
    height = round(max(9, min(22, 860 / rows)) * rows) + 112
    return Figure(
        name=f"layers-{index + 1}" if index else "layers",
        title=f"Layers of {contender.name}",
        says=f"Condition numbers of {rows} layers of {contender.name} while it trained, and the age of their "
        "decompositions in steps.",
        data=data,
        layout=layout,
        height=height,
        narrow={
            "margin.l": 106,
            "yaxis.ticktext": [in_figure(shortened(names[row], 15)) for row in marked],
            "annotations[0].text": "<b>Condition</b>" if flat else "<b>Age</b>",
            **{f"{axis_key('x', index)}.nticks": 3 for index in range(1, panel + 1)},
        },
        narrow_height=height,
    )


def _log_condition(layer: Layer | None) -> float | None:
    if layer is None or layer.condition is None or not 0 < layer.condition < math.inf:
        return None
    return math.log10(layer.condition)


def _condition_map(
    names: Sequence[str],
    steps: Sequence[int],
    logs: Sequence[Sequence[float | None]],
    flat: Sequence[float],
    split: float,
) -> dict[str, Any]:
    low, high = math.floor(min(flat)), max(math.ceil(max(flat)), math.floor(min(flat)) + 1)
    ticks = list(range(low, high + 1, math.ceil((high - low) / 5)))
    texts = [
        [
            f"{in_figure(shortened(name, 40))}<br>update {grouped(step)}: "
            f"<b>{number(None if value is None else 10**value)}</b>"
            for step, value in zip(steps, row, strict=True)
        ]
        for name, row in zip(names, logs, strict=True)
    ]
    return {
        "type": "heatmap", "x": list(steps), "y": list(range(len(names))), "z": [rounded(row) for row in logs],
        "zmin": low, "zmax": high, "colorscale": "Cividis", "text": texts, "xgap": 0, "ygap": 1, "hoverongaps": False,
        "hovertemplate": "%{text}<extra></extra>",
        "colorbar": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": split, "thickness": 8,
            "xpad": 0, "ypad": 6, "outlinewidth": 0, "ticklabelposition": "outside top", "tickvals": ticks,
            "ticktext": [power(tick) for tick in ticks],
            "tickfont": {"size": 11, "color": "@ink"}, "ticks": "",
        },
    }  # fmt: skip


def _age_traces(names: Sequence[str], ages: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A line up to the largest, a dot at the mean."""
    known = [(row, sum(one) / len(one), max(one)) for row, one in enumerate(ages) if one]
    common = {"type": "scatter", "showlegend": False}
    lines: dict[str, list[float | None]] = {"x": [], "y": []}
    for row, _, largest in known:
        lines["x"] += [0, largest, None]
        lines["y"] += [row, row, None]
    texts = [
        f"{in_figure(shortened(names[row], 40))}<br>mean <b>{number(mean)}</b>, largest {grouped(largest)}"
        for row, mean, largest in known
    ]
    return [
        {**common, **lines, "mode": "lines", "hoverinfo": "skip", "line": {"color": "@soft/0.55", "width": 2}},
        {
            **common, "mode": "markers", "x": rounded(mean for _, mean, _ in known), "y": [row for row, _, _ in known],
            "text": texts, "hovertemplate": "%{text}<extra></extra>", "cliponaxis": False,
            "marker": {"color": "@ink", "size": 6},
        },
    ]  # fmt: skip


def _panel_title(text: str, axis: str) -> dict[str, Any]:
    return {
        "text": f"<b>{text}</b>", "xref": f"{axis} domain", "x": 0, "xanchor": "left", "yref": "paper", "y": 1,
        "yanchor": "bottom", "yshift": 36, "showarrow": False, "font": {"size": 13},
    }  # fmt: skip

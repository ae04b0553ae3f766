"""The figures of what everybody measures, as the plain dicts that Plotly draws: curves, and the time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from natgrad.compare.history import Comparison, Contender, Point, mean_parts
from natgrad.compare.verdict import Verdict
from natgrad.page import series
from natgrad.page.drawing import (
    Figure,
    Look,
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
    to_six,
)
from natgrad.page.families import ANSWER, Family, above_zero, family_of, family_traces
from natgrad.page.words import in_figure, number, shortened
from natgrad.training.events import PARTS

GROUPS_OF = 240  # points that answer to the pointer, for each panel
PART_SAYS = {
    "data": "waiting for the next batch",
    "model": "forward, backward and the optimizer",
    "statistics": "K-FAC's factors",
    "solve": "their decompositions",
    "precondition": "applying them to the gradient",
}


def curves(comparison: Comparison, verdict: Verdict) -> Figure | None:
    """The four panels; two where there is no error, or no clock. None where nothing was measured."""
    points = [point for contender in comparison.contenders for point in _points(contender)]
    measured = [what for what in ("loss", "error") if any(_value(point, what) is not None for point in points)]
    if not measured:
        return None
    longest = max(point.seconds for point in points)
    clocks = [False, True] if longest > 0 else [False]
    unit, scale = time_unit(longest)
    styles = looks(comparison)
    data = [legend_entry(look) for look in styles]
    layout = base_layout(hovermode="x unified", hoverdistance=40)
    panel = 0
    for what in measured:
        first = axis_name("y", panel + 1)
        ranges: dict[str, list[float]] = {"train": [], "test": []}
        starts: list[float] = []
        drawn: list[dict[str, Any]] = []
        for clock in clocks:
            panel += 1
            anchors = {"xaxis": axis_name("x", panel), "yaxis": axis_name("y", panel)}
            families = []
            for contender, look in zip(comparison.contenders, styles, strict=True):
                family = {of: _family(contender, of, what, clock, scale) for of in ("train", "test")}
                families.append(family)
                for of, one in family.items():
                    drawn += [{**trace, **anchors} for trace in family_traces(one, of, look)]
                    ranges[of] += one.values()
                    starts += one.starts()
            drawn += [{**trace, **anchors} for trace in _answers(families, styles, what)]
            title = f"{unit} of training" if clock else "updates"
            layout[axis_key("x", panel)] = pointed_axis(title, unit if clock else "updates", anchors["yaxis"])
            same = {"matches": first} if anchors["yaxis"] != first else {}
            layout[axis_key("y", panel)] = axis_style("", anchor=anchors["xaxis"], **same)
            name_panel(layout, panel, "Error (%)" if what == "error" else "Loss")
        target = _target(verdict, what)
        values = [*ranges["train"], *ranges["test"], *([] if target is None else [target])]
        # Training errors end at nothing at all, and errors in training say less than those in tests.
        vertical = _vertical(values, starts, floor=_half_of_least(ranges["test"]) if what == "error" else 0.0)
        for index in range(panel - len(clocks) + 1, panel + 1):
            layout[axis_key("y", index)].update(vertical)
            if target is not None:
                _mark_target(layout, index, target, verdict)
        data += [above_zero(trace) for trace in drawn] if vertical.get("type") == "log" else drawn
    rows, columns = len(measured), len(clocks)
    height, narrow_height = 310 * rows + 20, 250 * rows * columns
    wide = panel_grid(rows, columns, gap_x=0.08, height=height)
    narrow = place_panels(layout, wide, panel_grid(rows * columns, 1, height=narrow_height))
    names = ", ".join(contender.name for contender in comparison.contenders)
    return Figure(
        name="curves",
        title=comparison.title,
        says=f"{' and '.join(measured).capitalize()} of {names} against updates"
        f"{' and against ' + unit + ' of training' if longest > 0 else ''}.",
        data=data,
        layout=layout,
        height=height,
        narrow=narrow,
        narrow_height=narrow_height,
        caption=_curves_caption(comparison, verdict),
    )


def time_unit(longest: float) -> tuple[str, float]:
    """What the axis counts in, and how many seconds that is."""
    if longest <= 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest <= 4 * 3600 else ("hours", 3600.0)


def _family(contender: Contender, of: str, what: str, clock: bool, scale: float) -> Family:
    lines: list[tuple[list[tuple[float, float | None]], bool]] = []
    clocks: list[list[tuple[float, float | None]]] = []
    for run in contender.runs:
        points = run.test if of == "test" else run.train
        if any(_value(point, what) is not None for point in points):
            lines.append(([(float(point.step), _value(point, what)) for point in points], run.finished))
            clocks.append([(float(point.step), point.seconds / scale) for point in points])
    return family_of(lines, clocks=clocks if clock else None)


def _answers(families: Sequence[Mapping[str, Family]], styles: Sequence[Look], what: str) -> list[dict[str, Any]]:
    """What the pointer finds: at the same places for all, what each has there. (Nothing of it is seen.)"""
    places = sorted({x for family in families for one in family.values() for x in one.places()})
    traces = []
    for family, look in zip(families, styles, strict=True):
        x: list[float] = []
        y: list[float] = []
        texts: list[str] = []
        for place in series.thinned(places, GROUPS_OF):
            values = {of: value for of in ("test", "train") if (value := family[of].at(place)) is not None}
            if values:
                x.append(place)
                y.append(next(iter(values.values())))
                unit = " %" if what == "error" else ""
                texts.append("   ".join(f"{of} {number(value)}{unit}" for of, value in values.items()))
        if x:
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded(y), "text": texts,
                    "name": look.name, "legendgroup": look.group, "showlegend": False,
                    "line": {"color": look.colour, "width": 2.25}, "opacity": 0, "hovertemplate": ANSWER,
                }
            )  # fmt: skip
    return traces


def _curves_caption(comparison: Comparison, verdict: Verdict) -> str:
    runs = [run for contender in comparison.contenders for run in contender.runs]
    of = [of for of, there in (("test", any(r.test for r in runs)), ("training", any(r.train for r in runs))) if there]
    words = []
    if len(of) == 2:
        words.append("Solid: test; dashed: training.")
    elif of:
        words.append("Solid: test." if of == ["test"] else "Dashed: training; nothing was measured on test cases.")
    seeds = {sum(run.finished for run in contender.runs) for contender in comparison.contenders} - {0}
    if any(count > 1 for count in seeds):
        many = str(next(iter(seeds))) if len(seeds) == 1 else "the finished"
        words.append(
            f"Lines are means over {many} seeds, the shade goes from the smallest to the largest; against the clock "
            "every step stands at its mean time."
        )
    if any(run.finished for run in runs) and not all(run.finished for run in runs):
        words.append("A thin line with a cross at its end is a run that did not finish; it is not in the mean.")
    if verdict.target is not None:
        words.append("Dotted: the target.")
    return " ".join(words)


def _points(contender: Contender) -> list[Point]:
    return [point for run in contender.runs for point in (*run.train, *run.test)]


def _value(point: Point, what: str) -> float | None:
    value = point.error if what == "error" else point.loss
    if value is None or not math.isfinite(value):
        return None
    return 100 * value if what == "error" else value


def _target(verdict: Verdict, what: str) -> float | None:
    if verdict.target is None or verdict.measure.what != what:
        return None
    return 100 * verdict.target if what == "error" else verdict.target


def _mark_target(layout: dict[str, Any], panel: int, target: float, verdict: Verdict) -> None:
    """A thin line; what it is stands over the panel, where no curve crosses it."""
    x, y = f"{axis_name('x', panel)} domain", axis_name("y", panel)
    layout.setdefault("shapes", []).append(
        {
            "type": "line", "xref": x, "x0": 0, "x1": 1, "yref": y, "y0": target, "y1": target, "layer": "below",
            "line": {"color": "@ink", "width": 1, "dash": "1px,3px"},
        }
    )  # fmt: skip
    layout.setdefault("annotations", []).append(
        {
            "text": f"┈ target {verdict.measure.text(verdict.target or 0.0)}", "xref": x, "x": 1, "xanchor": "right",
            "yref": f"{y} domain", "y": 1, "yanchor": "bottom", "yshift": 3,
            "showarrow": False, "font": {"size": 11, "color": "@soft"}, "borderpad": 0,
        }
    )  # fmt: skip


def _half_of_least(values: Sequence[float]) -> float:
    return min((value for value in values if value > 0), default=0.0) / 2


def _vertical(values: Sequence[float], starts: Sequence[float], *, floor: float = 0.0) -> dict[str, Any]:
    """Scale and range of a y axis. Logarithmic where the values span a decade, and only zeros are not positive; what is
    below `floor` is left out of the picture then.

    A run that explodes is cut off at some distance over where all began: the others would be flat lines else.
    """
    if not values:
        return {}
    lowest, highest = min(values), max(values)
    top = min(highest, 3 * max(starts)) if starts and max(starts) > 0 else highest
    positive = [value for value in values if 0 < value <= top and value >= floor]
    if lowest >= 0 and positive and max(positive) > 10 * min(positive):
        low, high = math.log10(min(positive)), math.log10(max(positive))
        room = 0.04 * (high - low)
        return {**log_axis(low - room, high + room), "autorange": False}
    room = 0.04 * ((top - lowest) or abs(top) or 1.0)
    return {"range": [to_six(lowest - room), to_six(top + room)], "autorange": False}


def step_time(comparison: Comparison) -> Figure | None:
    """Stacked bars, one a contender; None where no run says."""
    measured = [(contender, parts) for contender in comparison.contenders if (parts := mean_parts(contender.runs))]
    if not measured:
        return None
    names = part_names(parts for _, parts in measured)
    rows = list(range(len(measured)))
    data = []
    for index, name in enumerate(names):
        values = [1000 * parts.get(name, 0.0) for _, parts in measured]
        data.append(
            {
                "type": "bar", "orientation": "h", "name": in_figure(name), "y": rows, "x": rounded(values),
                "marker": {"color": f"@p{index % 8}", "line": {"color": "@paper", "width": 1.5}}, "width": 0.42,
                "text": [number(value) if value > 0 else "" for value in values], "insidetextanchor": "middle",
                "hovertemplate": f"{in_figure(name)}   <b>%{{text}} ms</b><extra></extra>",
                "textposition": "inside", "textangle": 0, "constraintext": "inside",
                "insidetextfont": {"size": 11, "color": "@ink" if index % 8 in (0, 2) else "@paper"},
            }
        )  # fmt: skip
    totals = [1000 * sum(parts.values()) for _, parts in measured]
    layout = base_layout(
        barmode="stack",
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 11},
        margin={"l": 8, "r": 14, "t": 8, "b": 46},
    )
    layout["xaxis"] = axis_style("milliseconds a step", rangemode="tozero", fixedrange=True)
    layout["yaxis"] = {
        "range": [len(rows) - 0.45, -0.75], "visible": False, "fixedrange": True, "showgrid": False, "zeroline": False
    }  # fmt: skip
    layout["annotations"] = [
        {
            "text": _bar_name(contender.name, 60, total), "xref": "paper", "x": 0,
            "xanchor": "left", "yref": "y", "y": row - 0.27, "yanchor": "bottom", "showarrow": False, "borderpad": 0,
        }
        for row, (contender, _), total in zip(rows, measured, totals, strict=True)
    ]  # fmt: skip
    height = 62 * len(rows) + 70
    short = {f"annotations[{row}].text": _bar_name(one.name, 22, totals[row]) for row, (one, _) in enumerate(measured)}
    listed = "; ".join(f"{one.name} {number(total)} ms" for (one, _), total in zip(measured, totals, strict=True))
    return Figure(
        name="step-time",
        title="Where the time of a step goes",
        says=f"Mean time of a step and its parts: {listed}.",
        data=data,
        layout=layout,
        height=height,
        narrow_height=height,
        narrow=short,
    )


def _bar_name(name: str, limit: int, total: float) -> str:
    return f"<b>{in_figure(shortened(name, limit))}</b>   {number(total)} ms"


def part_names(parts: Iterable[Mapping[str, float]]) -> list[str]:
    """Ours first, in the order of a step; then whatever a user's own log has."""
    there = dict.fromkeys(name for one in parts for name in one)
    return [name for name in PARTS if name in there] + [name for name in there if name not in PARTS]

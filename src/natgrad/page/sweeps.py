"""The figure of the sweep: what every setting came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from natgrad.compare.history import Comparison, Contender, Trial
from natgrad.page.drawing import (
    Figure,
    Look,
    axis_key,
    axis_name,
    axis_style,
    base_layout,
    log_axis,
    looks,
    name_panel,
    panel_grid,
    place_panels,
    rounded,
    to_six,
)
from natgrad.page.words import in_figure, number, setting, shortened


def sweep(comparison: Comparison) -> Figure | None:
    """A panel a contender: every trial's score against its learning rate, rung by rung."""
    pairs = zip(comparison.contenders, looks(comparison), strict=True)
    tuned = [(contender, look) for contender, look in pairs if contender.trials]
    if not tuned:
        return None
    scores = [
        score for one, _ in tuned for trial in one.trials for _, score in trial.rungs
        if score is not None and math.isfinite(score)
    ]  # fmt: skip
    vertical, top = _sweep_vertical(scores)
    measured = "test error (%)" if comparison.score == "error" else "test loss"
    layout = base_layout(hovermode="closest")
    data: list[dict[str, Any]] = []
    for panel, (contender, look) in enumerate(tuned, start=1):
        rate = rate_name([trial.settings for trial in contender.trials])
        anchors = {"xaxis": axis_name("x", panel), "yaxis": axis_name("y", panel)}
        places = [_place_of(trial, index, rate) for index, trial in enumerate(contender.trials)]
        data += [{**trace, **anchors} for trace in _sweep_traces(contender, look, places, top)]
        layout[axis_key("x", panel)] = axis_style(
            "learning rate" if rate in _RATES else in_figure(rate or "trial"), anchor=anchors["yaxis"],
            **_rate_axis(places, named=rate is not None),
        )  # fmt: skip
        same = {"matches": "y"} if panel > 1 else {}
        side = measured if panel == 1 else ""
        layout[axis_key("y", panel)] = axis_style(side, anchor=anchors["xaxis"], **vertical, **same)
        name_panel(layout, panel, look.name)
    columns = 2 if len(tuned) in (2, 4) else min(3, len(tuned))
    rows = math.ceil(len(tuned) / columns)
    height, narrow_height = 290 * rows + 30, 240 * len(tuned) + 20
    wide = panel_grid(rows, columns, gap_x=0.08, height=height)[: len(tuned)]
    narrow = place_panels(layout, wide, panel_grid(len(tuned), 1, height=narrow_height))
    count = sum(len(contender.trials) for contender, _ in tuned)
    caption = (
        f"Up: the {measured}, lower is better. Every mark is one setting. Small open marks: early rungs; filled: the "
        "last rung that the setting reached; ring: chosen; cross at the top: diverged or crashed."
    )
    if any("damping" in trial.settings for contender, _ in tuned for trial in contender.trials):
        caption += " Larger marks have more damping."
    return Figure(
        name="sweep",
        title="The sweep",
        says=f"Scores of {count} trials against their learning rate; the tables below hold the same numbers.",
        data=data,
        layout=layout,
        height=height,
        narrow=narrow,
        narrow_height=narrow_height,
        caption=caption,
    )


_RATES = ("lr", "optimizer.lr", "learning_rate", "optim.lr", "training.lr")


def rate_name(settings: Sequence[Mapping[str, float]]) -> str | None:
    """Which of the settings is the learning rate; the first, where no name says so."""
    names = list(dict.fromkeys(name for one in settings for name in one))
    known = [name for name in names if name in _RATES or name.endswith((".lr", "_lr"))]
    return next(iter([*known, *names]), None)


def _place_of(trial: Trial, index: int, rate: str | None) -> float:
    value = trial.settings.get(rate) if rate is not None else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else float(index + 1)


def _rate_axis(places: Sequence[float], *, named: bool) -> dict[str, Any]:
    if not named or min(places) <= 0:
        return {}
    low, high = math.log10(min(places)), math.log10(max(places))
    room = max(0.12, 0.08 * (high - low))
    if high - low > 1.2:
        return {**log_axis(low - room, high + room), "dtick": 1}
    few = sorted(set(places))
    few = few if len(few) <= 3 else [few[0], few[len(few) // 2], few[-1]]
    return {**log_axis(low - room, high + room), "tickvals": few, "ticktext": [setting(one) for one in few]}


def _sweep_vertical(scores: Sequence[float]) -> tuple[dict[str, Any], float]:
    """The scale of the scores, and where the crosses stand: above all of them. A score far above is cut off."""
    if not scores:
        return {"range": [0, 1], "showticklabels": False}, 0.95
    low, high = min(scores), max(scores)
    if low > 0 and high > 10 * low:
        bottom, top = math.log10(low), math.log10(high)
        span = top - bottom
        return log_axis(bottom - 0.07 * span, top + 0.16 * span), 10 ** (top + 0.1 * span)
    span = (high - low) or abs(high) or 1.0
    return {"range": [to_six(low - 0.1 * span), to_six(high + 0.22 * span)]}, high + 0.14 * span


def _sweep_traces(contender: Contender, look: Look, places: Sequence[float], top: float) -> list[dict[str, Any]]:
    sizes = _damping_sizes(contender.trials)
    paths: dict[str, list[Any]] = {"x": [], "y": []}
    early = _marks()
    last = _marks()
    crosses = _marks()
    rings = _marks()
    for trial, place, size in zip(contender.trials, places, sizes, strict=True):
        heights = [_height(score) for _, score in trial.rungs] or [None]
        for index, height in enumerate(heights):
            final = index == len(heights) - 1
            marks = crosses if height is None else last if final else early
            y = top if height is None else height
            said = _trial_says(trial, index)
            _add(marks, place, y, size if final else 0.6 * size, said)
            if final and trial.chosen:
                _add(rings, place, y, size + 9, said)
        paths["x"] += [*([place] * len(heights)), None]
        paths["y"] += [*(top if height is None else height for height in heights), None]
    common = {"type": "scatter", "mode": "markers", "showlegend": False, "hovertemplate": "%{text}<extra></extra>"}
    colour = look.colour
    styles: list[tuple[dict[str, list[Any]], dict[str, Any]]] = [
        (early, {"symbol": "circle", "color": "@paper", "line": {"color": colour, "width": 1}}),
        (last, {"symbol": "circle", "color": colour, "opacity": 0.9, "line": {"color": "@paper", "width": 1}}),
        (crosses, {"symbol": "x-thin", "color": colour, "line": {"color": colour, "width": 2}}),
        (rings, {"symbol": "circle-open", "color": "@ink", "line": {"color": "@ink", "width": 2}}),
    ]
    traces: list[dict[str, Any]] = [
        {**common, **paths, "mode": "lines", "hoverinfo": "skip", "line": {"color": f"{colour}/0.35", "width": 1}}
    ]
    for marks, style in styles:
        if marks["x"]:
            where = {"x": marks["x"], "y": rounded(marks["y"]), "text": marks["text"]}
            traces.append({**common, **where, "marker": {**style, "size": marks["size"]}})
    return traces


def _marks() -> dict[str, list[Any]]:
    return {"x": [], "y": [], "size": [], "text": []}


def _add(marks: dict[str, list[Any]], x: float, y: float, size: float, text: str) -> None:
    for name, value in (("x", x), ("y", y), ("size", round(size, 1)), ("text", text)):
        marks[name].append(value)


def _height(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


def _trial_says(trial: Trial, index: int) -> str:
    lines = [in_figure(f"{name} {setting(value)}") for name, value in trial.settings.items()]
    if trial.rungs:
        epochs, score = trial.rungs[index]
        after = f"after {epochs} epoch{'' if epochs == 1 else 's'}"
        lines.append(f"{after}: <b>{number(score) if _height(score) is not None else 'diverged'}</b>")
    if trial.chosen and index >= len(trial.rungs) - 1:
        lines.append("chosen")
    if trial.note:
        lines.append(in_figure(shortened(trial.note, 60)))
    return "<br>".join(lines)


def _damping_sizes(trials: Sequence[Trial]) -> list[float]:
    """From 8 to 16 pixels with the logarithm of the damping; 10 where there is none to tell apart."""
    logs = [
        math.log10(value)
        if isinstance(value := trial.settings.get("damping"), int | float) and 0 < value < math.inf
        else None
        for trial in trials
    ]
    known = [value for value in logs if value is not None]
    if not known or min(known) == max(known):
        return [10.0] * len(trials)
    return [
        10.0 if value is None else 8 + 8 * (value - min(known)) / (max(known) - min(known)) for value in logs
    ]  # fmt: skip

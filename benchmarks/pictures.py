"""The pictures of `benchmarks.table`: ratios as bars beside targets and other code, and the parts of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks import disturbed, lines, profiles, records
from benchmarks.lines import Line

COLOURS = {"eigen": "#0072b2", "inverse": "#e69f00", "peer": "#b8b8b8"}
PART_COLOURS = {
    "forward": "#c8c8c8",
    "backward": "#8f8f8f",
    "statistics": "#0072b2",
    "solve": "#d55e00",
    "precondition": "#009e73",
    profiles.REST: "#cc79a7",
    "optimizer": "#555555",
}
THICKNESS = 0.26
TICKS = (1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_NARROW = 0.045  # parts of a bar below this share have no number


def draw_table(found: Sequence[Mapping[str, Any]], *, out: Path) -> bool:
    """A group of bars for each line and way; False, and no picture, where nothing was measured."""
    known = [dict(record) for record in found]
    groups = [
        (line, way, some)
        for line in lines.LINES
        for way in records.ways_of(line, known)
        if (some := _ratios(line, known, way))
    ]
    if not groups:
        return False
    _style()
    figure, panel = pyplot.subplots(figsize=(9.6, 1.5 + 0.78 * len(groups)), layout="constrained")
    several = len({way for _, way, _ in groups}) > 1
    doubted = [_doubted(line, known, way) for line, way, _ in groups]
    for row, (line, _, ratios) in enumerate(groups):
        _group(panel, row, line, ratios, doubted[row])
    values = [v for line, _, ratios in groups for v in (*ratios.values(), *line.peer.values(), *line.target.values())]
    panel.set(xscale="log", xlim=(min(1.0, *values) / 1.01, max(values) * _room(max(values))))
    panel.set_ylim(len(groups) - 0.45, -0.55)
    panel.set_yticks(range(len(groups)), [_label(line, way if several else None) for line, way, _ in groups])
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if tick <= 1.05 * max(values)]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("mean time of a step, as a ratio to SGD's in the same run (logarithmic)")
    panel.axvline(1, color="#333333", linewidth=1.2)
    panel.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines["left"].set_visible(False)
    _legend(figure, doubts=any(doubted))
    devices = " and ".join(
        dict.fromkeys(str(r["device"]).removeprefix("NVIDIA ") for r in known if r["kind"] == "loop")
    )
    figure.suptitle(f"What a step of K-FAC costs: {devices}", x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=170)
    pyplot.close(figure)
    return True


def _style() -> None:
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def _room(largest: float) -> float:
    """To the right of the longest bar, for its number."""
    return float(largest**0.16) * 1.04


def _label(line: Line, way: str | None) -> str:
    parts = line.label.split(", ")
    # Two lines of about the same length.
    cut = min(
        range(1, len(parts)), key=lambda n: max(len(", ".join(half)) for half in (parts[:n], parts[n:])), default=0
    )
    named = ",\n".join(", ".join(half) for half in (parts[:cut], parts[cut:]) if half)
    named = f"{line.number}.  {named}"
    return named if way is None else f"{named} [{line.way(way)}]"


def _ratios(line: Line, found: Sequence[dict[str, Any]], way: str) -> dict[str, float]:
    known = {solver: records.ratio_of(line, one) for solver, one in records.records_of(line, found, way).items()}
    return {solver: ratio for solver, ratio in known.items() if ratio is not None}


def _doubted(line: Line, found: Sequence[dict[str, Any]], way: str) -> set[str]:
    some = records.records_of(line, found, way).items()
    return {solver for solver, one in some if disturbed.unsteady(records.spread_of(one))}


def _group(panel: Any, row: int, line: Line, ratios: Mapping[str, float], doubted: Collection[str]) -> None:
    """The solvers' bars with their targets, and the peer's below."""
    texts = {name: f"{one:.2f} {disturbed.MARK}" if name in doubted else f"{one:.2f}" for name, one in ratios.items()}
    bars = [(solver, ratios[solver], texts[solver]) for solver in ("eigen", "inverse") if solver in ratios]
    if line.peer:
        inverse = f" (inverse {line.peer['inverse']:g})" if "inverse" in line.peer else ""
        bars.append(("peer", line.peer["eigen"], f"{line.peer['eigen']:g}{inverse}"))
    for number, (name, value, text) in enumerate(bars):
        place = row + (number - (len(bars) - 1) / 2) * THICKNESS
        panel.barh(place, value - 1, left=1, height=0.9 * THICKNESS, color=COLOURS[name], linewidth=0)
        target = line.target.get(name)
        if target is not None:
            ends = [place - 0.5 * THICKNESS, place + 0.5 * THICKNESS]
            panel.plot([target, target], ends, color="black", linewidth=2, solid_capstyle="butt", zorder=3)
        # Beside its bar where there is room before the target, else behind both.
        right = max(value, 1.0) if target is not None and target > 1.25 * value else max(value, 1.0, target or 1.0)
        panel.annotate(text, (right, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _legend(figure: Any, *, doubts: bool) -> None:
    handles: list[Any] = [
        Patch(color=COLOURS["eigen"], label="eigen"),
        Patch(color=COLOURS["inverse"], label="inverse"),
        Line2D([], [], color="black", linewidth=0, marker="|", markersize=11, markeredgewidth=2, label="target"),
        Patch(color=COLOURS["peer"], label="peer: the second paper's code, eigen"),
        Line2D([], [], color="#333333", linewidth=1.2, label="SGD = 1"),
    ]
    if doubts:
        handles.append(
            Line2D([], [], color="black", linewidth=0, marker=f"${disturbed.MARK}$", label="SGD was unsteady")
        )
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles), columnspacing=1.6)


# Parts of a step


def draw_profiles(files: Mapping[str, Sequence[Mapping[str, Any]]], *, out: Path) -> None:
    """Stacked bars, the same solver of all files below each other; SGD once."""
    bars = _bars(files)
    if not bars:
        raise ValueError("no profile in these files: make one with --profile")
    _style()
    figure, panel = pyplot.subplots(figsize=(9.6, 1.7 + 0.5 * len(bars)), layout="constrained")
    longest = max(sum(one["parts"].values()) for _, one in bars)
    sgd = next((sum(one["parts"].values()) for _, one in bars if one["solver"] is None), None)
    for row, (_, one) in enumerate(bars):
        left, total = 0.0, sum(one["parts"].values())
        for part in profiles.PARTS:
            width = one["parts"].get(part, 0.0)
            panel.barh(row, width, left=left, height=0.66, color=PART_COLOURS[part], linewidth=0)
            if width > _NARROW * longest:
                colour = "black" if part in ("forward", "backward") else "white"
                share = f"{width / total:.0%}"
                panel.text(left + width / 2, row, share, ha="center", va="center", fontsize=8.5, color=colour)
            left += width
        ratio = f"  ({total / sgd:.2f} × SGD)" if sgd and one["solver"] is not None else ""
        panel.text(total + 0.008 * longest, row, f"{total:.3g} ms{ratio}", va="center", fontsize=9)
    panel.set_yticks(range(len(bars)), [label for label, _ in bars])
    panel.set(xlim=(0, 1.27 * longest), ylim=(len(bars) - 0.5, -0.6), xlabel="ms a step, mean over whole periods")
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    used = [part for part in profiles.PARTS if any(one["parts"].get(part) for _, one in bars)]
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in used]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles), columnspacing=1.2)
    figure.suptitle(_title(bars[-1][1]), x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=170)
    pyplot.close(figure)


def _bars(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    parts = [(stem, one) for stem, found in files.items() for one in found if one["kind"] == "profile"]
    sgd = [("SGD", one) for _, one in parts if one["solver"] is None][-1:]
    solvers = list(dict.fromkeys(one["solver"] for _, one in parts if one["solver"] is not None))
    prefix = len(files) > 1
    return sgd + [
        (f"{stem}: {profiles.name_of(one)}" if prefix else profiles.name_of(one), one)
        for solver in solvers
        for stem, one in parts
        if one["solver"] == solver
    ]


def _title(one: Mapping[str, Any]) -> str:
    configuration = records.configuration_of(one)
    precision = {"tf32": "TF32", "fp32": "FP32"}.get(configuration.precision, configuration.precision)
    intervals = f", {one['factor']}/{one['inverse']}" if one["solver"] is not None else ""
    return (
        f"Parts of a step: {configuration.network.label}, batch {configuration.batch}, {precision}{intervals}, "
        f"{str(one['device']).removeprefix('NVIDIA ')}"
    )

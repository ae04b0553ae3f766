"""The tables, as text in cells: what stands in them, without how it looks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from natgrad.compare.arrivals import Measure, Row, Spread, clear_first, count, seconds_to, steps_to
from natgrad.compare.history import UNFINISHED, Comparison, Contender, Run
from natgrad.compare.verdict import Verdict
from natgrad.page.public import without_paths
from natgrad.page.words import THIN, counted, grouped, number, percent, setting
from natgrad.report import memory


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`more` stands smaller under the text, `mark` is the word that says who won."""

    text: str
    more: str = ""
    mark: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of every row names it. `numbers` are the columns that are set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: tuple[int, ...] = ()


def times(verdict: Verdict) -> Table:
    """Who reached the target when."""
    rows = verdict.rows
    columns = (
        [_spread(row.updates, lambda value: count(value).replace(",", THIN)) for row in rows],
        [_spread(row.seconds, number) for row in rows],
        [_spread(row.best, lambda value: _best(value, verdict.measure)) for row in rows],
        [_spread(row.step_seconds, lambda value: number(1000 * value)) for row in rows],
    )
    values: tuple[tuple[Sequence[Sequence[float]], str], ...] = (
        ([steps_to(row) for row in rows], "fewest"),
        ([seconds_to(row) for row in rows], "fastest"),
        ([row.bests for row in rows], "lowest"),
        ([row.step_times for row in rows], "shortest"),
    )
    marked = [_marked(cells, each, word) for cells, (each, word) in zip(columns, values, strict=True)]
    lines = [
        (Cell(text=row.name, more=without_paths(row.note)), Cell(text=_arrived(row)), *cells)
        for row, *cells in zip(rows, *marked, strict=True)
    ]
    return Table(
        caption="Time to the target: mean over seeds, and from the smallest to the largest",
        columns=(
            "", "seeds that arrived", "updates", "seconds of training", f"best {verdict.measure.name}", "ms a step"
        ),
        rows=tuple(lines),
        numbers=(1, 2, 3, 4, 5),
    )  # fmt: skip


def _best(value: float, measure: Measure) -> str:
    return f"{number(100 * value)}{THIN}%" if measure.what == "error" else number(value)


def _arrived(row: Row) -> str:
    if not row.arrivals:
        return "no runs"
    return f"{sum(one is not None for one in row.arrivals)} of {len(row.arrivals)}"


def _spread(spread: Spread | None, text: Any) -> Cell:
    if spread is None:
        return Cell(text="–")
    low, high = text(spread.low), text(spread.high)
    return Cell(text=text(spread.mean), more=f"{low} to {high}" if low != high else "")


def _marked(cells: Sequence[Cell], values: Sequence[Sequence[float]], word: str) -> list[Cell]:
    """The first of all gets the word; where seeds overlap too much to tell, nobody does."""
    first = clear_first(values)
    return [dataclasses.replace(cell, mark=word if index == first else "") for index, cell in enumerate(cells)]


def trials(contender: Contender) -> Table:
    """Every setting that was tried, and its score on each rung."""
    names = list(dict.fromkeys(name for trial in contender.trials for name in trial.settings))
    rungs = sorted({epochs for trial in contender.trials for epochs, _ in trial.rungs})
    noted = any(trial.note for trial in contender.trials)
    rows = []
    for index, trial in enumerate(contender.trials, start=1):
        reached = dict(trial.rungs)
        scores = [
            Cell(text="" if rung not in reached else "diverged" if reached[rung] is None else number(reached[rung]))
            for rung in rungs
        ]
        first = Cell(text=str(index), mark="chosen" if trial.chosen else "")
        rows.append((first, *_settings(trial.settings, names), *scores, *([Cell(text=trial.note)] if noted else [])))
    heads = [f"after {counted(rung, 'epoch')}" for rung in rungs]
    return Table(
        caption=f"{contender.name}: {counted(len(contender.trials), 'trial')}",
        columns=("trial", *names, *heads, *(["note"] if noted else [])),
        rows=tuple(rows),
        numbers=tuple(range(1, 1 + len(names) + len(rungs))),
    )


def coverages(comparison: Comparison) -> list[Table]:
    """What K-FAC does with each parameter, of the first run of each contender that says; identical ones once."""
    found: list[tuple[list[str], list[Mapping[str, Any]]]] = []
    for contender in comparison.contenders:
        lines = next((list(run.coverage) for run in contender.runs if run.coverage), None)
        if lines is None:
            continue
        same = next((names for names, other in found if other == lines), None)
        if same is None:
            found.append(([contender.name], lines))
        else:
            same.append(contender.name)
    return [_coverage(names, lines) for names, lines in found]


def _coverage(names: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> Table:
    covered = [line for line in lines if not line.get("reason")]
    weights, of_all = _elements(covered), _elements(lines)
    share = f", {percent(weights / of_all)} of the weights" if of_all else ""
    size = sum(_whole(line.get("bytes")) for line in lines)
    summary = f"{grouped(len(covered))} of {counted(len(lines), 'parameter')}{share}; {memory(size)} of factors"
    return Table(
        caption=f"{', '.join(names)}: {summary}",
        columns=("parameter", "block", "factors", "weights", "memory"),
        rows=tuple(_coverage_row(line) for line in lines),
        numbers=(3, 4),
    )


def _coverage_row(line: Mapping[str, Any]) -> tuple[Cell, ...]:
    name = Cell(text=str(line.get("parameter", "")))
    elements = Cell(text=grouped(_whole(line.get("elements"))) if line.get("elements") else "–")
    if reason := line.get("reason"):
        return name, Cell(text="left to the optimizer", more=str(reason)), Cell(text=""), elements, Cell(text="")
    block = Cell(text=str(line.get("block", "")), more=str(line.get("note") or ""))
    size = memory(_whole(line.get("bytes"))) if line.get("bytes") else "–"
    return name, block, Cell(text=str(line.get("factors", ""))), elements, Cell(text=size)


def _elements(lines: Iterable[Mapping[str, Any]]) -> int:
    return sum(_whole(line.get("elements")) for line in lines)


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def chosen(comparison: Comparison) -> Table | None:
    """The settings that each contender ran with; None where none says."""
    names = list(dict.fromkeys(name for contender in comparison.contenders for name in contender.settings))
    if not names:
        return None
    rows = [(Cell(text=one.name), *_settings(one.settings, names)) for one in comparison.contenders]
    numbers = tuple(range(1, 1 + len(names)))
    return Table(caption="Settings of the runs", columns=("", *names), rows=tuple(rows), numbers=numbers)


def _settings(settings: Mapping[str, float], names: Sequence[str]) -> list[Cell]:
    return [Cell(text=setting(settings[name]) if name in settings else "–") for name in names]


def runs(comparison: Comparison) -> Table:
    """Every run and how it ended; contenders without runs have a line as well."""
    everything = [run for contender in comparison.contenders for run in contender.runs]
    folders = short_folders(everything)
    rows: list[tuple[Cell, ...]] = []
    for contender in comparison.contenders:
        if not contender.runs:
            rows.append((Cell(text=contender.name, more=contender.note), *([Cell(text="–")] * 2), Cell(text="no runs"),
                         *([Cell(text="–")] * 3)))  # fmt: skip
        for index, run in enumerate(contender.runs):
            rows.append(
                (
                    Cell(text=contender.name, more="" if index else contender.note),
                    Cell(text=folders[id(run)]),
                    Cell(text="–" if run.seed is None else str(run.seed)),
                    Cell(text=ending(run), more="; ".join(run.warnings)),
                    Cell(text=_steps(run)),
                    Cell(text=number(run.seconds)),
                    Cell(text=number(None if run.step_seconds is None else 1000 * run.step_seconds)),
                )
            )
    return Table(
        caption=f"{counted(len(everything), 'run')}, {sum(run.finished for run in everything)} of them finished",
        columns=("", "folder", "seed", "how it ended", "updates", "seconds", "ms a step"),
        rows=tuple(rows),
        numbers=(2, 4, 5, 6),
    )


def ending(run: Run) -> str:
    """In words."""
    if run.finished:
        return "finished"
    if run.reason == UNFINISHED:
        return "no end: killed, or still training"
    if run.reason.startswith("SIG") and run.reason.isidentifier():
        return f"stopped early ({run.reason})"
    return run.reason or "ended without a reason"


def short_folders(runs: Sequence[Run]) -> dict[int, str]:
    """Without what they have in common, which tells where somebody keeps things; by the run's id. Where they have
    nothing in common, the last part of each is all that is told.
    """
    paths = [os.path.normpath(run.folder) for run in runs]
    try:
        common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    except ValueError:  # some are absolute
        common = os.sep
    if common == os.sep:
        return {id(run): os.path.basename(path) for run, path in zip(runs, paths, strict=True)}
    return {id(run): os.path.relpath(path, common or ".") for run, path in zip(runs, paths, strict=True)}


def _steps(run: Run) -> str:
    if run.planned_steps is None or run.steps >= run.planned_steps:
        return grouped(run.steps)
    return f"{grouped(run.steps)} of {grouped(run.planned_steps)}"


_ABOUT = (
    ("recipe", "recipe"),
    ("data", "data"),
    ("device", "device"),
    ("parameters", "parameters"),
    ("batch", "batch"),
    ("epochs", "epochs"),
    ("steps_per_epoch", "updates an epoch"),
    ("ranks", "ranks"),
)
_ENVIRONMENT = (
    ("natgrad", "natgrad"),
    ("git_commit", "commit"),
    ("torch", "torch"),
    ("python", "Python"),
    ("cuda", "CUDA"),
    ("cudnn", "cuDNN"),
    ("device", "device"),
    ("cpu", "processor"),
    ("threads", "threads"),
    ("ranks", "ranks"),
    ("platform", "system"),
    ("started", "started"),
)


def about(comparison: Comparison) -> Table | None:
    """What was trained: the facts of the runs' start lines."""
    return _facts("What was trained", _ABOUT, [run.about for one in comparison.contenders for run in one.runs])


def machine(comparison: Comparison) -> Table | None:
    """Versions and hardware; nothing of the host's name, folders or variables, since pages are shown around."""
    everyone = [run.environment for one in comparison.contenders for run in one.runs]
    return _facts("Versions and machine", _ENVIRONMENT, everyone)


def _facts(caption: str, names: Sequence[tuple[str, str]], said: Sequence[Mapping[str, Any]]) -> Table | None:
    rows = []
    for key, label in names:
        values = list(dict.fromkeys(text for one in said if (text := _fact(key, one.get(key)))))
        if key == "started" and len(values) > 1:
            values = [f"{min(values)} to {max(values)}"]
        if values:
            more = "not the same in all runs" if len(values) > 1 else ""
            rows.append((Cell(text=label), Cell(text="; ".join(values), more=more)))
    return Table(caption=caption, columns=("", ""), rows=tuple(rows)) if rows else None


def _fact(key: str, value: Any) -> str:
    if key == "git_commit" and value:
        commit, dirty, _ = str(value).partition("-dirty")
        return f"{commit[:12]}{dirty and ', with changes'}"
    if isinstance(value, Mapping):
        parts = [str(value["name"])] if value.get("name") else []
        if value.get("usable_cores"):
            parts.append(counted(_whole(value["usable_cores"]), "core"))
        if value.get("memory"):
            parts.append(memory(_whole(value["memory"])))
        return ", ".join(parts)
    if key == "parameters" and isinstance(value, int):
        return grouped(value)
    return "" if value is None else str(value)

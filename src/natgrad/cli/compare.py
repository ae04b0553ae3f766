"""``natgrad compare`` and ``natgrad report`` in a terminal: how far it is, what came out, and where the page is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from natgrad import page, recipes
from natgrad.cli import formatting as form
from natgrad.compare.arrivals import Measure, Row, Spread, count, duration, measure_of
from natgrad.compare.comparison import (
    FILE,
    ComparisonError,
    Plan,
    Watcher,
    begin,
    briefly,
    compare,
    load_plan,
    save_plan,
)
from natgrad.compare.contenders import Entry, named
from natgrad.compare.history import Comparison
from natgrad.compare.tuning import Sweep
from natgrad.compare.verdict import Verdict, judge
from natgrad.compare.worker import CRASHED, DIVERGED, REFUSED, Job, StoppedError, Worker
from natgrad.training import ranks
from natgrad.training.run import new_folder

PAGE = "report.html"
DEFAULT = "digits"
CONTENDERS = ("sgd", "adamw", "kfac")
"""Those of a comparison that names none."""
WIDE = 110
"""Columns from which on the table has room for ranges."""


def planned(
    recipe: str,
    changes: list[str],
    *,
    specs: list[str] | None,
    trials: int | None,
    seeds: int | None,
    target: str | None,
    out: Path | None,
    resume: bool,
    device: str | None,
) -> tuple[Plan, Path]:
    """What is to be compared and where, written down there: a new comparison, or one that goes on."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ComparisonError("natgrad compare is one process, which starts others: leave out torchrun")
    with ranks.started(device):
        pass  # one that is not there is told before anything is written
    asked = {"specs": tuple(named(specs)) if specs else None, "trials": trials, "seeds": seeds}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if resume:
        folder = out or Path(recipe)
        if changes:
            raise ComparisonError(f"a comparison goes on with its own recipe: leave out {' '.join(changes)}")
        before = load_plan(folder)
        given["specs"] = tuple(dict.fromkeys((*before.specs, *given.get("specs", ()))))
        plan = _checked(dataclasses.replace(before, **given), target)
        if out is not None and recipe != DEFAULT and recipes.label(recipe) != plan.title and Path(recipe) != out:
            raise ComparisonError(f"{folder} holds a comparison of {plan.title}: choose another --out for {recipe}")
        save_plan(plan, folder)
        return plan, folder
    if (Path(recipe) / FILE).is_file():
        raise ComparisonError(f"{recipe} holds a comparison: go on with --resume, or make its page: natgrad report")
    specs_given = {"specs": CONTENDERS, **given}
    plan = _checked(Plan(title=recipes.label(recipe), recipe=recipes.load(recipe, changes), **specs_given), target)
    folder = out or new_folder(f"compare-{plan.title}")
    begin(plan, folder)
    return plan, folder


def _checked(plan: Plan, target: str | None) -> Plan:
    """The plan with its target, and contenders that can run."""
    goal = plan.target if target is None else _target(target, measure_of_plan(plan))
    return dataclasses.replace(plan, target=goal).checked()


def _target(text: str, measure: Measure) -> float:
    try:
        return measure.read(text)
    except ValueError as error:
        raise ComparisonError(f"--target: {error}") from error


def run_comparison(plan: Plan, folder: Path, *, device: str | None, console: Console) -> str:
    """Runs what has not been run; returns the signal's name where somebody asked to stop, else nothing."""
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker(device))
        stack.enter_context(_signals_passed_on(worker))
        watcher = stack.enter_context(_watcher(console))
        try:
            compare(plan, folder, worker, watcher)
        except StoppedError as stopped:
            return str(stopped)
    return ""


@contextlib.contextmanager
def _signals_passed_on(worker: Worker) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the run that is under way, which saves."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        worker.interrupt(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watcher(console: Console) -> _Live | _Lines:
    drawable = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    return _Live(console) if drawable else _Lines(console)


class _Lines(Watcher):
    """A line for every run that ends, for files and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._measure = Measure()
        self._begun = time.monotonic()
        self._done = self._jobs = 0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to put back; there for what `_Live` needs."""

    def begun(self, plan: Plan, folder: Path) -> None:
        """What is compared."""
        self._measure = measure_of_plan(plan)
        self._jobs = plan.jobs
        self._print(_head(plan, folder))

    def job_ended(self, job: Job, reason: str, score: float | None) -> None:
        """What came of a run."""
        self._done += 1
        came = f"{self._measure.name} {self._measure.text(score)}" if score is not None else briefly(reason)
        self._line(f"[{form.duration(time.monotonic() - self._begun)}] {self._done}/{self._jobs}  {job.label}: {came}")

    def job_told(self, job: Job, kind: str, value: Any) -> None:
        """Warnings only; those of a sweep, where settings are meant to fail, are in the files of its runs."""
        if kind == "warned" and not job.tuning:
            self.warned(f"{job.label}: {value}")

    def chosen(self, entry: Entry, found: Sweep) -> None:
        """What a sweep chose."""
        if found.settings is not None and found.trials:
            self._line(f"{entry.name}: {_settings(found.settings)} chosen from {len(found.trials)} settings")

    def warned(self, text: str) -> None:
        """On a line."""
        self._line(f"warning: {' '.join(text.split())}")

    def _line(self, text: str) -> None:
        self._print(Text(text))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)


class _Live(_Lines):
    """A bar for everything, one for the run under way, and above them what is worth scrolling back to."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),  # not to the edge, where the ^C of Ctrl-C would begin a new line
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._whole = self._one = TaskID(0)
        self._epochs = 0.0

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begun(self, plan: Plan, folder: Path) -> None:
        super().begun(plan, folder)
        self._whole = self._progress.add_task("comparison", total=plan.epochs, words="")
        self._one = self._progress.add_task("", total=1, words="", visible=False)

    def job_begun(self, job: Job) -> None:
        self._progress.reset(self._one, description=job.label, total=1, words="", visible=True)

    def job_told(self, job: Job, kind: str, value: Any) -> None:
        super().job_told(job, kind, value)
        if kind == "steps":
            done, total = value
            self._progress.update(self._one, completed=done, total=total, words=f"{done:,}/{total:,} steps")
            self._progress.update(self._whole, completed=self._epochs + job.recipe.training.epochs * done / total)
        elif kind == "tested":
            score = value.loss if value.accuracy is None else 1 - value.accuracy
            self._progress.update(self._one, words=f"{self._measure.name} {self._measure.text(score)}")

    def job_ended(self, job: Job, reason: str, score: float | None) -> None:
        self._epochs += job.recipe.training.epochs
        self._done += 1
        self._progress.update(self._whole, completed=self._epochs, words=f"{self._done}/{self._jobs} runs")
        self._progress.update(self._one, visible=False)
        if reason.startswith((CRASHED, REFUSED)) or (reason.startswith(DIVERGED) and not job.tuning):
            self.warned(f"{job.label}: {briefly(reason)}")
        elif not job.tuning and score is not None:
            self._print(Text.assemble((f"{job.label}  ", "dim"), f"{self._measure.name} {self._measure.text(score)}"))

    def chosen(self, entry: Entry, found: Sweep) -> None:
        if found.settings is not None and found.trials:
            best = min(score for trial in found.trials if trial.chosen for _, score in trial.rungs if score is not None)
            self._print(
                Text.assemble(
                    (f"{entry.name}  ", "bold"),
                    (f"{_settings(found.settings)}, the best of {len(found.trials)}: ", ""),
                    f"{self._measure.name} {self._measure.text(best)}",
                )
            )

    def warned(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), (" ".join(text.split()), "yellow")))


def measure_of_plan(plan: Plan) -> Measure:
    """What the runs of a plan will be judged by."""
    return Measure(what=plan.score)


def _settings(settings: dict[str, float]) -> str:
    return ", ".join(f"{name} {form.number(value)}" for name, value in settings.items())


def _head(plan: Plan, folder: Path) -> Text:
    epochs = plan.recipe.training.epochs
    rungs = ", ".join(f"{rung.settings} for {form.plural(rung.epochs, 'epoch')}" for rung in plan.ladder)
    entries = [
        ("recipe", plan.title),
        ("contenders", ", ".join(entry.name for entry in plan.entries)),
        ("tuning", f"{form.plural(plan.trials, 'setting')} each: {rungs}" if rungs else "none"),
        ("then", f"{form.plural(plan.seeds, 'seed')} of {form.plural(epochs, 'epoch')}"),
        ("folder", str(folder)),
    ]
    lines = [Text.assemble((f"{label:<12}", "dim"), value) for label, value in entries]
    return Text("\n").join([*lines, Text("")])


def write_page(path: Path, comparison: Comparison, verdict: Verdict, console: Console) -> bool:
    """Writes the page; where that fails the verdict still stands."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        page.write(path, comparison, verdict)
    except (page.PageError, OSError) as error:
        console.print(
            Text.assemble(("warning: ", "bold yellow"), (f"the page could not be written: {error}", "yellow"))
        )
        return False
    return True


def show(comparison: Comparison, verdict: Verdict, *, path: Path | None, console: Console) -> None:
    """The verdict, the table behind it, and where the page is."""
    parts: list[Any] = [Text(""), Text(verdict.sentence, "bold")]
    parts += [Text(line) for line in verdict.advice]
    parts += [Text(""), _table(verdict, ranges=console.width >= WIDE), Text(verdict.target_says, "dim")]
    parts += [Text(f"Note: {note}.", "yellow") for note in comparison.notes]
    console.print(Group(*parts))
    if path is not None:
        console.print(Text.assemble(("\npage  ", "dim"), str(path)), soft_wrap=True)


def _table(verdict: Verdict, *, ranges: bool) -> Table:
    """Means over seeds, with their `ranges` where there is room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for title in ("updates to target", "time to target", f"best {verdict.measure.name}", "step"):
        table.add_column(title, justify="right")
    for row in verdict.rows:
        table.add_row(
            Text(row.name, "bold" if row.uses_kfac else ""),
            _to_target(row, row.updates, count, ranges=ranges),
            _to_target(row, row.seconds, duration, ranges=ranges),
            _spread(row.best, verdict.measure.text, ranges=ranges),
            _spread(row.step_seconds, duration, ranges=False),
            *([shorten(briefly(row.note), 60, placeholder=" …")] if row.note else []),
        )
    return table


def _to_target(row: Row, spread: Spread | None, text: Callable[[float], str], *, ranges: bool) -> str:
    if spread is not None:
        return _spread(spread, text, ranges=ranges)
    came = sum(one is not None for one in row.arrivals)
    return f"{came} of {len(row.arrivals)} seeds" if came else "never" if row.arrivals else "not run"


def _spread(spread: Spread | None, text: Callable[[float], str], *, ranges: bool) -> str:
    if spread is None:
        return ""
    mean = text(spread.mean)
    alone = not ranges or text(spread.low) == text(spread.high)
    return mean if alone else f"{mean} ({text(spread.low)} to {text(spread.high)})"


def report(comparison: Comparison, *, out: Path, console: Console, target: str | None = None) -> bool:
    """Judges, writes the page and shows both; False where the page could not be written."""
    if target is not None:
        goal = _target(target, measure_of(comparison.contenders))
        comparison = dataclasses.replace(comparison, target=goal)
    out = out / PAGE if out.is_dir() else out
    verdict = judge(comparison)
    written = write_page(out, comparison, verdict, console)
    show(comparison, verdict, path=out.absolute() if written else None, console=console)
    return written

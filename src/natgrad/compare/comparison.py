"""A comparison from beginning to end: a sweep for each contender, then all of them on the same seeds, in turns.

The folder is all the memory there is: a run that has come to its end is read, any other one is run. So a comparison
that was stopped goes on where it was, and the page is made from the same folders as the decisions were.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from natgrad.compare.contenders import Entry, entries
from natgrad.compare.history import Comparison, Contender, HistoryError, Run, differences, read
from natgrad.compare.tuning import Outcome, Rung, Sweep, design, full_runs, rungs, shortened, sweep
from natgrad.compare.worker import CRASHED, DIVERGED, REFUSED, Job, Worker
from natgrad.recipes import Recipe
from natgrad.recipes.values import RecipeError, as_table, build
from natgrad.training.files import write_text_atomically
from natgrad.training.run import from_anywhere

FILE = "comparison.json"
_VERSION = 1


class ComparisonError(Exception):
    """A comparison that cannot begin or go on, in words for its owner."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared. `trials`: settings that each contender's sweep tries, one for none; `seeds`: runs of each."""

    title: str
    recipe: Recipe
    specs: tuple[str, ...]
    trials: int = 8
    seeds: int = 5
    target: float | None = None

    def checked(self) -> Plan:
        """Itself, once its contenders have been made: whatever is wrong with them is told then."""
        _ = self.entries
        return self

    @cached_property
    def entries(self) -> list[Entry]:
        """The contenders."""
        return entries(self.recipe, self.specs)

    @property
    def score(self) -> Literal["error", "loss"]:
        """What runs are judged by."""
        return "error" if self.recipe.training.loss == "cross-entropy" else "loss"

    @cached_property
    def ladder(self) -> list[Rung]:
        """The rungs of every sweep."""
        return rungs(self.trials, self.recipe.training.epochs)

    @property
    def epochs(self) -> int:
        """Of all runs together."""
        tuning = sum(rung.settings * rung.epochs for entry in self.entries for rung in self.rungs(entry))
        return tuning + self.seeds * self.recipe.training.epochs * len(self.entries)

    @property
    def jobs(self) -> int:
        """Runs, all together."""
        tuning = sum(rung.settings for entry in self.entries for rung in self.rungs(entry))
        return tuning + self.seeds * len(self.entries)

    def rungs(self, entry: Entry) -> list[Rung]:
        """Those of a contender: none where all its settings are fixed."""
        return self.ladder if entry.centre() else []

    def sweep(self, entry: Entry, outcome: Callable[[int, int, Mapping[str, float]], Outcome | None]) -> Sweep:
        """A contender's."""
        return sweep(design(entry.centre(), self.trials), self.rungs(entry), outcome)

    def trial(self, folder: Path, entry: Entry, index: int, level: int, settings: Mapping[str, float]) -> Job:
        """A run of the sweep: a whole, short training."""
        rung = self.ladder[level]
        recipe = shortened(entry.with_settings(settings) if index else entry.recipe, rung.epochs)
        words = ", ".join(f"{name} {value:.2g}" for name, value in settings.items())
        return Job(
            kind=entry.slug,
            title=self.title,
            label=f"{entry.name}: {words}, {_counted(rung.epochs, 'epoch')}",
            folder=folder / entry.slug / "tuning" / f"epochs-{rung.epochs}" / f"{index + 1:02d}",
            recipe=_keeping_one(recipe),
            tuning=True,
        )

    def final(self, folder: Path, entry: Entry, number: int, settings: Mapping[str, float]) -> Job:
        """A whole training with the settings that the sweep chose; `number` counts seeds from 1.

        The sweep's own seed is none of them: what it chose may have been lucky there. The settings are in the folder's
        name, since a sweep that goes on with more trials may choose others.
        """
        recipe = entry.recipe if dict(settings) == entry.centre() else entry.with_settings(settings)
        seed = recipe.training.seed + number
        training = dataclasses.replace(recipe.training, seed=seed)
        return Job(
            kind=entry.slug,
            title=self.title,
            label=f"{entry.name}: seed {seed}",
            folder=folder / entry.slug / _as_name({**settings, "seed": seed}),
            recipe=_keeping_one(dataclasses.replace(recipe, training=training)),
        )

    def said(self) -> str:
        """The budget, in words."""
        epochs, seeds = self.recipe.training.epochs, self.seeds
        finals = f"{_counted(seeds, 'seed')} of {_counted(epochs, 'epoch')} each"
        alike = "Initial weights and the order of the data are the same for all, seed by seed, and runs took turns."
        if not self.ladder:
            return f"Nothing was tuned: every contender ran as the recipe has it, {finals}. {alike}"
        climb = ", ".join(f"{rung.settings} for {_counted(rung.epochs, 'epoch')}" for rung in self.ladder)
        budget = full_runs(self.ladder, epochs)
        swept = any("damping" in entry.centre() for entry in self.entries)
        damping = ", with K-FAC together with the damping" if swept else ""
        fixed = any(entry.fixed & {"optimizer.lr", "kfac.damping"} for entry in self.entries)
        alike += " What a contender's own name sets was not tuned." if fixed else ""
        return (
            f"Every contender was tuned alike: {self.trials} settings of the learning rate{damping}, chosen by the "
            f"{self.score} of test cases in successive halving ({climb}), as much as {budget:.2g} whole "
            f"training{'' if budget == 1 else 's'}; then {finals}, on other seeds. {alike}"
        )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _as_name(settings: Mapping[str, float]) -> str:
    return "-".join(f"{name}-{value:.6g}" for name, value in settings.items())


def _keeping_one(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, keep=1))


class Watcher:
    """Whoever wants to know how a comparison goes; what is not overridden is not listened to."""

    def begun(self, plan: Plan, folder: Path) -> None:
        """Once."""

    def job_begun(self, job: Job) -> None:
        """A run begins, or goes on."""

    def job_told(self, job: Job, kind: str, value: Any) -> None:
        """What the run says: see `natgrad.compare.worker.Tell`."""

    def job_ended(self, job: Job, reason: str, score: float | None) -> None:
        """How it ended; also of runs that had ended before."""

    def chosen(self, entry: Entry, found: Sweep) -> None:
        """A sweep is over."""

    def warned(self, text: str) -> None:
        """Something went wrong, and the comparison goes on."""


def begin(plan: Plan, folder: Path) -> None:
    """Writes down what is to be compared, so that the comparison can go on without being told again."""
    if (folder / FILE).exists():
        raise ComparisonError(f"{folder} holds a comparison already: go on with --resume, or choose another --out")
    if folder.exists() and not folder.is_dir():
        raise ComparisonError(f"{folder} is a file: choose another --out for the results")
    if folder.is_dir() and any(folder.iterdir()):
        raise ComparisonError(f"{folder} holds something else: choose another --out for the results")
    save_plan(plan, folder)


def save_plan(plan: Plan, folder: Path) -> None:
    """Also that of a comparison that goes on with more seeds or contenders than before."""
    table = {
        "version": _VERSION,
        "title": plan.title,
        "optimizers": list(plan.specs),
        "trials": plan.trials,
        "seeds": plan.seeds,
        "target": plan.target,
        "recipe": as_table(from_anywhere(plan.recipe)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / FILE, json.dumps(table, indent=2) + "\n")
    except OSError as error:
        raise ComparisonError(f"the results cannot be written to {folder}: {error.strerror or error}") from error


def load_plan(folder: Path) -> Plan:
    """What a folder's comparison compares."""
    try:
        table = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if table["version"] != _VERSION:
            raise ComparisonError(f"{folder / FILE} has version {table['version']}, and this natgrad knows {_VERSION}")
        return Plan(
            title=table["title"],
            recipe=build(table["recipe"]),
            specs=tuple(table["optimizers"]),
            trials=table["trials"],
            seeds=table["seeds"],
            target=table["target"],
        ).checked()
    except (FileNotFoundError, NotADirectoryError):
        raise ComparisonError(f"there is no comparison in {folder}: a folder that holds one has a {FILE}") from None
    except OSError as error:
        raise ComparisonError(f"{folder / FILE} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, RecipeError):
            raise
        raise ComparisonError(f"{folder / FILE} is damaged: {error!r}") from error


def compare(plan: Plan, folder: Path, worker: Worker, watcher: Watcher) -> None:
    """Runs whatever of a comparison has not come to its end. What one run does to itself ends no other."""
    with _alone_in(folder):
        _Comparing(plan, folder, worker, watcher).everything()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes at work in one folder would spoil each other's runs."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ComparisonError(f"another process is at work on {folder}: let it come to its end first") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


class _Comparing:
    def __init__(self, plan: Plan, folder: Path, worker: Worker, watcher: Watcher) -> None:
        self._plan, self._folder, self._worker, self._watcher = plan, folder, worker, watcher
        self._refused: dict[str, str] = {}
        self._tried: set[Path] = set()

    def everything(self) -> None:
        plan = self._plan
        self._watcher.begun(plan, self._folder)
        found = {entry.slug: self._sweep(entry) for entry in plan.entries}
        for number in range(1, plan.seeds + 1):
            for entry in plan.entries:  # in turns, so that a machine that slows down slows all of them
                settings = found[entry.slug].settings
                if settings is not None:
                    self._outcome(plan.final(self._folder, entry, number, settings))

    def _sweep(self, entry: Entry) -> Sweep:
        plan = self._plan

        def outcome(index: int, level: int, settings: Mapping[str, float]) -> Outcome:
            return self._outcome(plan.trial(self._folder, entry, index, level, settings))

        found = plan.sweep(entry, outcome)
        self._watcher.chosen(entry, found)
        if found.settings is None:
            self._watcher.warned(f"{entry.name} is left out: {_why_none(found)}")
        return found

    def _outcome(self, job: Job) -> Outcome:
        known = outcome_of(job.folder)
        again = known is not None and known.note.startswith((CRASHED, REFUSED)) and job.folder not in self._tried
        if known is None or again:
            if job.kind in self._refused:
                return Outcome(None, note=self._refused[job.kind])  # as its first run was
            self._run(job)
            known = outcome_of(job.folder) or Outcome(None, note=f"{CRASHED}: it left nothing that can be read")
        self._watcher.job_ended(job, known.note or "finished", known.score)
        if job.tuning:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
        return known

    def _run(self, job: Job) -> None:
        self._tried.add(job.folder)
        self._watcher.job_begun(job)
        reason = self._worker.run(job, lambda kind, value: self._watcher.job_told(job, kind, value))
        if reason.startswith(REFUSED):
            self._refused[job.kind] = reason  # every other run of this contender would be too


def _why_none(found: Sweep) -> str:
    notes = [trial.note for trial in found.trials if trial.note]
    refused = [note for note in notes if note.startswith(REFUSED)]  # one of them ends the sweep
    if not found.complete and not refused:
        return "its sweep is not at its end"
    alike = briefly((refused or notes)[0]) + (", and others" if len(set(notes)) > 1 and not refused else "")
    return f"no setting could be trained ({alike})"


def briefly(reason: str) -> str:
    """How a run ended, without what its owner could do about it."""
    return re.split(r"[;.] |: nothing is saved", reason)[0]


def outcome_of(folder: Path) -> Outcome | None:
    """What a run came to: the error of its last test, or the loss; None where it has not come to an end."""
    try:
        found = read(folder)
    except HistoryError:
        return None
    if found.reason.startswith((DIVERGED, CRASHED, REFUSED)):
        return Outcome(None, note=found.reason)
    if not found.finished:
        return None
    last = found.test[-1] if found.test else None
    if last is None or last.loss is None:
        return Outcome(None, note=f"{DIVERGED}: the test loss is no number")
    return Outcome(last.loss if last.error is None else last.error, tie_break=last.loss)


def gather(folder: Path) -> Comparison:
    """What a comparison's folder holds by now, for the verdict and the page."""
    plan = load_plan(folder)
    contenders = tuple(_contender(plan, folder, entry) for entry in plan.entries)
    runs = [run for one in contenders for run in one.runs]
    stopped = sum(not run.finished for run in runs)
    missing = plan.seeds * len(plan.entries) - len(runs)
    notes = differences(runs)
    if stopped or missing:
        notes.append(
            f"{len(runs) - stopped} of {plan.seeds * len(plan.entries)} runs came to their end: what is said here is "
            "said of what there is"
        )
    return Comparison(
        title=plan.title,
        contenders=contenders,
        target=plan.target,
        score=plan.score,
        tuning=plan.said(),
        notes=tuple(notes),
    )


def _contender(plan: Plan, folder: Path, entry: Entry) -> Contender:
    def outcome(index: int, level: int, settings: Mapping[str, float]) -> Outcome | None:
        return outcome_of(plan.trial(folder, entry, index, level, settings).folder)

    found = plan.sweep(entry, outcome)
    runs: tuple[Run, ...] = ()
    if found.settings is not None:
        runs = tuple(_runs(plan, folder, entry, found.settings))
    return Contender(
        name=entry.name,
        runs=runs,
        uses_kfac=entry.uses_kfac,
        settings=found.settings or {},
        trials=found.trials,
        note="" if runs else _why_none(found) if found.settings is None else "not run yet",
    )


def _runs(plan: Plan, folder: Path, entry: Entry, settings: Mapping[str, float]) -> Iterator[Run]:
    for number in range(1, plan.seeds + 1):
        job = plan.final(folder, entry, number, settings)
        try:
            found = read(job.folder, name=entry.name, seed=job.recipe.training.seed)
        except HistoryError:
            continue
        yield dataclasses.replace(found, uses_kfac=entry.uses_kfac)

"""What runs measured, read from their folders: the curves, where the time went, and what K-FAC said of itself."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from natgrad.recipes.values import parsed
from natgrad.training import environment
from natgrad.training.metrics_file import read_counting
from natgrad.training.run import ENVIRONMENT, METRICS, RECIPE

UNFINISHED = "unfinished"
"""The `Run.reason` of one that is still going, or was killed."""


class HistoryError(Exception):
    """A folder that holds no run, in words for whoever named it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place on a run's curves. `seconds` are those of training; what was not measured or is no number is None."""

    step: int
    seconds: float
    loss: float | None
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What K-FAC said at a training line."""

    step: int
    seconds: float
    predicted_kl: float | None = None
    clip_factor: float | None = None
    damping: float | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block of K-FAC at some step: condition number with damping, and steps since it was decomposed."""

    step: int
    name: str
    condition: float | None
    age: int | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. `reason` is how it ended: "finished", a signal's name, `UNFINISHED`, or an error's words."""

    folder: Path
    name: str
    seed: int | None = None
    uses_kfac: bool = False
    train: tuple[Point, ...] = ()
    test: tuple[Point, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)  # mean seconds a step
    readings: tuple[Reading, ...] = ()
    layers: tuple[Layer, ...] = ()
    coverage: tuple[Mapping[str, Any], ...] = ()  # natgrad.report.Line as dicts
    reason: str = UNFINISHED
    steps: int = 0
    seconds: float = 0.0
    planned_steps: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # the "start" line: data, device, batch, parameters, ...
    settings: Mapping[str, Any] = field(default_factory=dict)  # the recipe's table
    environment: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether it came to its planned end."""
        return self.reason == "finished"

    @property
    def open(self) -> bool:
        """Whether more might have come of it: it is still going, was killed, or somebody stopped it."""
        return self.reason == UNFINISHED or self.reason in signal.Signals.__members__

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step, everything of training included."""
        return self.seconds / self.steps if self.steps and self.seconds > 0 else None


_OF_KFAC = ("predicted_kl", "clip_factor", "damping")


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / METRICS).is_file()


def read(folder: Path, *, name: str | None = None, seed: int | None = None) -> Run:
    """The run in a folder; `name` and `seed` where it does not know them itself."""
    try:
        lines, broken = read_counting(folder / METRICS)
    except OSError as error:
        raise HistoryError(f"there is no run in {folder}: {METRICS} cannot be read ({error.strerror})") from error
    if not lines:
        raise HistoryError(f"there is no run in {folder}: {METRICS} holds no line of a run")
    settings = _settings(folder)
    about = next((line for line in lines if line["kind"] == "start"), {})
    train = [line for line in lines if line["kind"] == "train"]
    end: Mapping[str, Any] = next((line for line in reversed(lines) if line["kind"] in ("end", "start", "resume")), {})
    warnings = [str(line.get("text")) for line in lines if line["kind"] == "warning"]
    if broken:
        warnings.append(f"lines of {METRICS} that cannot be read: {broken}; they are left out")
    last = max((line["step"] for line in lines if line["kind"] in ("train", "test", "end")), default=0)
    facts = environment.recorded(folder / ENVIRONMENT)
    return Run(
        folder=folder,
        name=name or _name(about, settings, folder),
        seed=_seed(about, settings) if seed is None else seed,
        uses_kfac=_uses_kfac(about, settings, train),
        train=tuple(_point(line, line.get("seconds")) for line in train),
        test=tuple(_point(line, _trained(line, train)) for line in lines if line["kind"] == "test"),
        parts=_mean_parts(train),
        readings=tuple(_reading(line) for line in train if any(line.get(name) is not None for name in _OF_KFAC)),
        layers=tuple(layer for line in lines if line["kind"] == "layers" for layer in _layers(line)),
        coverage=tuple(next((_rows(line, "rows") for line in lines if line["kind"] == "coverage"), ())),
        reason=str(end.get("reason", UNFINISHED)) if end.get("kind") == "end" else UNFINISHED,
        steps=last,
        seconds=max(
            (_number(line.get("seconds")) or 0.0 for line in [*train, end] if line.get("kind") != "start"), default=0.0
        ),
        planned_steps=_whole(about.get("total_steps")),
        about=about,
        settings=settings,
        environment=facts[-1] if facts else {},
        warnings=tuple(warnings),
    )


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return parsed((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _name(about: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> str:
    """What a run calls itself, or its optimizer, or its folder."""
    if isinstance(about.get("name"), str):
        return str(about["name"])
    optimizer = settings.get("optimizer", {}).get("name")
    if optimizer is None:
        return folder.absolute().name
    return label(optimizer, uses_kfac=settings.get("kfac", {}).get("enabled", True))


def label(optimizer: str, *, uses_kfac: bool) -> str:
    """An optimizer of a recipe, as people write it."""
    written = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "muon": "Muon"}
    plain = written.get(optimizer, optimizer.rpartition(":")[2])
    if not uses_kfac:
        return plain
    return "K-FAC" if optimizer == "sgd" else f"K-FAC + {plain}"


def _seed(about: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    seed = about.get("seed", settings.get("training", {}).get("seed"))
    return seed if isinstance(seed, int) else None


def _uses_kfac(about: Mapping[str, Any], settings: Mapping[str, Any], train: Sequence[Mapping[str, Any]]) -> bool:
    if isinstance(about.get("uses_kfac"), bool):
        return bool(about["uses_kfac"])
    if "kfac" in settings:
        return bool(settings["kfac"].get("enabled", True))
    return any(line.get("damping") is not None for line in train)


def _point(line: Mapping[str, Any], seconds: Any) -> Point:
    accuracy = _number(line.get("accuracy"))
    return Point(
        step=line["step"],
        seconds=_number(seconds) or 0.0,
        loss=_number(line.get("loss")),
        error=None if accuracy is None else 1 - accuracy,
    )


def _trained(line: Mapping[str, Any], train: Sequence[Mapping[str, Any]]) -> Any:
    """Seconds of training before a test; runs of older versions have them in their training lines only."""
    if line.get("trained") is not None:
        return line["trained"]
    before = [one.get("seconds") for one in train if one["step"] <= line["step"]]
    return before[-1] if before else 0.0


def _mean_parts(train: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds a step, over all steps: lines stand for as many as lie between them."""
    total: dict[str, float] = {}
    before = steps = 0
    for line in train:
        parts = line.get("parts")
        since, before = line["step"] - before, line["step"]
        if isinstance(parts, Mapping) and since > 0:
            steps += since
            for name, seconds in parts.items():
                total[name] = total.get(name, 0.0) + since * (_number(seconds) or 0.0)
    return {name: seconds / steps for name, seconds in total.items()} if steps else {}


def _reading(line: Mapping[str, Any]) -> Reading:
    return Reading(
        step=line["step"],
        seconds=_number(line.get("seconds")) or 0.0,
        predicted_kl=_number(line.get("predicted_kl")),
        clip_factor=_number(line.get("clip_factor")),
        damping=_number(line.get("damping")),
    )


def _layers(line: Mapping[str, Any]) -> list[Layer]:
    return [
        Layer(
            step=line["step"],
            name=str(one.get("name")),
            condition=_number(one.get("condition")),
            age=_whole(one.get("age")),
        )
        for one in _rows(line, "layers")
    ]


def _rows(line: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Of a line that anybody may have written."""
    rows = line.get(name)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def mean_parts(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds a step by part, over the runs that say."""
    said = [run.parts for run in runs if run.parts]
    names = dict.fromkeys(name for parts in said for name in parts)
    means = {name: sum(_finite(parts.get(name)) for parts in said) / len(said) for name in names}
    return means if any(value > 0 for value in means.values()) else {}


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


_UNLIKE = {"data": "data", "parameters": "number of parameters", "batch": "batch", "device": "device"}


def differences(runs: Sequence[Run]) -> list[str]:
    """What makes runs hard to compare."""
    notes = []
    for fact, words in _UNLIKE.items():
        values = list(dict.fromkeys(str(run.about[fact]) for run in runs if fact in run.about))
        if len(values) > 1:
            notes.append(f"these runs are not alike: their {words} differs ({', '.join(values[:4])})")
    return notes


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting of a sweep. `rungs`: epochs trained and what came out (None: diverged or crashed), in order."""

    settings: Mapping[str, float]
    rungs: tuple[tuple[int, float | None], ...]
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train: all its runs, one a seed, and how its settings were found."""

    name: str
    runs: tuple[Run, ...]
    uses_kfac: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)  # what the sweep chose
    trials: tuple[Trial, ...] = ()
    note: str = ""  # why there is nothing of it, or what is special about it


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that the page and the verdict are made from."""

    title: str
    contenders: tuple[Contender, ...]
    target: float | None = None  # to reach; None: what the best without K-FAC reached
    score: Literal["error", "loss"] = "loss"  # what the trials' scores are, of test cases
    tuning: str = ""  # the budget that each had, in a sentence
    notes: tuple[str, ...] = ()  # what a reader must know: other data, stopped early, ...

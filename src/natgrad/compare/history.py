"""What runs measured, read from their folders: the curves, where the time went, and what K-FAC said of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from natgrad.recipes.values import parsed
from natgrad.training import environment
from natgrad.training.metrics_file import read_counting

METRICS, RECIPE, ENVIRONMENT, MEMBER = "metrics.jsonl", "recipe.toml", "environment.json", "member.json"
UNFINISHED = "unfinished"


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
    def step_seconds(self) -> float | None:
        """Mean time of a step, everything of training included."""
        return self.seconds / self.steps if self.steps and self.seconds > 0 else None


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
    tuning: str = ""  # the budget that each had, in a sentence
    notes: tuple[str, ...] = ()  # what a reader must know: other data, stopped early, ...

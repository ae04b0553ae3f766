"""What a run tells while it goes: to the terminal, to the files, to whoever listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from natgrad.metrics import LayerMetrics
from natgrad.report import Line

PARTS = ("data", "model", "statistics", "solve", "precondition")
"""What a step's time is split into. ``model``: forward, backward and the optimizer."""
EXCHANGE = "exchange"
"""And on several ranks: K-FAC's waiting for others."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The run begins, or goes on from a checkpoint. `device` and `data` are in words."""

    recipe: str
    folder: Path
    device: str
    data: str
    parameters: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    batch: int
    ranks: int
    step: int = 0

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.step > 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Means over the steps since the last one of these. `parts` are seconds a step, `seconds` those of training since
    the beginning of the run, `remaining` an estimate.
    """

    step: int
    epoch: float
    loss: float
    accuracy: float | None
    lr: float
    damping: float | None
    predicted_kl: float | None
    clip_factor: float | None
    parts: Mapping[str, float]
    step_seconds: float
    cases_per_second: float
    seconds: float
    remaining: float


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The test cases, seen after `step` steps and `trained` seconds of training. `best` is whether no earlier
    evaluation was better; `seconds` are its own.
    """

    step: int
    epoch: float
    loss: float
    accuracy: float | None
    top5: float | None
    cases: int
    seconds: float
    best: bool
    trained: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Looked:
    """K-FAC's blocks after `step` steps; with the first of these comes what it does with every parameter."""

    step: int
    layers: Sequence[LayerMetrics]
    coverage: Sequence[Line] | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end. `reason` is ``"finished"``, or the name of the signal that asked for it; `checkpoint` is the last one
    there is, and `saved` whether it holds the end.
    """

    step: int
    reason: str
    seconds: float
    folder: Path
    checkpoint: Path | None
    best: Evaluated | None
    saved: bool = True
    ranks: int = 1


class Listener:
    """Whoever wants to know; what is not overridden is not listened to."""

    def started(self, event: Started) -> None:
        """Once, before the first step."""

    def stepped(self, step: int) -> None:
        """After every step; must cost next to nothing."""

    def progress(self, event: Progress) -> None:
        """Every so many steps."""

    def evaluating(self, done: int, total: int) -> None:
        """During an evaluation: so many of its batches are done."""

    def evaluated(self, event: Evaluated) -> None:
        """After an evaluation."""

    def looked(self, event: Looked) -> None:
        """After some of the evaluations, where there is K-FAC."""

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint is on disk."""

    def warned(self, text: str) -> None:
        """Something that the user should know went wrong, and training goes on."""

    def finished(self, event: Finished) -> None:
        """Once, after everything is saved."""

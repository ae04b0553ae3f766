"""Who was first at the target, by updates and by the clock: the arithmetic, and the sentence that says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from natgrad.compare.history import Comparison, Contender, Point, Run


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What the target is about: the error or the loss, of test cases or of training."""

    of: Literal["test", "train"] = "test"
    what: Literal["error", "loss"] = "error"

    @property
    def name(self) -> str:
        """``test error``."""
        return f"{'training' if self.of == 'train' else self.of} {self.what}"

    def value(self, point: Point) -> float | None:
        """Of a point of a curve."""
        return point.error if self.what == "error" else point.loss

    def text(self, value: float) -> str:
        """``3.4 %``, or ``0.0123``."""
        return f"{100 * value:.3g} %" if self.what == "error" else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where a run first reached the target."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, smallest and largest over seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender in the table of times to the target; `arrivals` has one entry a run, None where it never came.

    `updates` and `seconds` are None unless every run arrived; `best` is over runs, each at its best moment.
    """

    name: str
    uses_kfac: bool
    arrivals: tuple[Arrival | None, ...]
    updates: Spread | None
    seconds: Spread | None
    best: Spread | None
    step_seconds: Spread | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer. `sentence` is the whole of it in one; `advice` says what would change it."""

    sentence: str
    advice: tuple[str, ...]
    measure: Measure
    target: float | None
    target_says: str
    rows: tuple[Row, ...]

"""When each run was at the target, and who was first: the arithmetic behind the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

from natgrad.compare.history import Contender, Point, Run

CHANCE = 0.05
"""How often chance alone may put one in front that is no better."""
CLOSE = 0.05
"""With one seed each there is no spread: then differences up to this part are called a tie."""


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

    def read(self, text: str) -> float:
        """A target as people write it: ``5%`` and ``0.05`` are the same error; a loss is a number."""
        percent = text.strip().endswith("%")
        try:
            value = float(text.strip().rstrip("%").strip()) / (100 if percent else 1)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"a target is a number such as 5% or 0.05, got {text!r}")
        if self.what == "error" and not 0 <= value < 1:
            raise ValueError(f"the target is a {self.name}: between 0 and 1, or with a percent sign, got {text!r}")
        if self.what == "loss" and percent:
            raise ValueError(f"the target is a {self.name}, which has no percent, got {text!r}")
        return value


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
    """A contender in the table of times to the target; `arrivals` has an entry a run, None where it never came. Runs
    that were stopped on their way, or are still on it, have none.

    `bests` are the best values of its runs, `step_times` the mean times of their steps.
    """

    name: str
    uses_kfac: bool
    arrivals: tuple[Arrival | None, ...]
    bests: tuple[float, ...] = ()
    step_times: tuple[float, ...] = ()
    note: str = ""

    @property
    def updates(self) -> Spread | None:
        """To the target; None unless every run arrived."""
        return spread(steps_to(self)) if self._arrived else None

    @property
    def seconds(self) -> Spread | None:
        """The same by the clock."""
        return spread(seconds_to(self)) if self._arrived else None

    @property
    def best(self) -> Spread | None:
        """Over runs, each at its best moment."""
        return spread(self.bests) if self.bests else None

    @property
    def step_seconds(self) -> Spread | None:
        """Mean time of a step."""
        return spread(self.step_times) if self.step_times else None

    @property
    def _arrived(self) -> bool:
        return bool(self.arrivals) and None not in self.arrivals


def measure_of(contenders: Sequence[Contender]) -> Measure:
    """The error where there is one, else the loss; of test cases where all runs have seen some.

    Runs that came to their end decide: those that crashed before their first test say nothing about the others.
    """
    everything = [run for one in contenders for run in one.runs if run.test or run.train]
    runs = [run for run in everything if run.finished] or everything
    of: Literal["test", "train"] = "test" if all(run.test for run in runs) else "train"
    known = [run for run in runs if _values(run, Measure(of=of, what="loss")) or _values(run, Measure(of=of))]
    return Measure(of=of, what="error" if all(_values(run, Measure(of=of)) for run in known) else "loss")


def _values(run: Run, measure: Measure) -> list[tuple[Point, float]]:
    points = run.test if measure.of == "test" else run.train
    pairs = [(point, measure.value(point)) for point in points]
    return [(point, value) for point, value in pairs if value is not None and math.isfinite(value)]


def best_of(run: Run, measure: Measure) -> float | None:
    """The smallest value that a run reached."""
    return min((value for _, value in _values(run, measure)), default=None)


def arrival(run: Run, measure: Measure, target: float) -> Arrival | None:
    """Where a run was first at the target or below."""
    reached = (point for point, value in _values(run, measure) if value <= target + 1e-12 * abs(target))
    first = next(reached, None)
    return None if first is None else Arrival(step=first.step, seconds=first.seconds)


@dataclass(frozen=True)
class Target:
    """What is to be reached; `whose` it is, `how` many of its seeds reached it and what `kind` of contender it is, all
    empty where it was given.
    """

    value: float | None
    whose: str = ""
    how: str = ""
    kind: str = ""


def natural_target(contenders: Sequence[Contender], measure: Measure) -> Target:
    """What the best contender without K-FAC reached with every seed; of all where all have K-FAC.

    Contenders whose seeds all came to their end are preferred to those with some that did, and these to those that are
    still going. What diverged or crashed sets no target.
    """
    plain = [one for one in contenders if not one.uses_kfac]
    candidates = [found for one in plain if (found := _set_by(one, measure)) is not None]
    candidates = candidates or [found for one in contenders if (found := _set_by(one, measure)) is not None]
    return min(candidates, key=lambda one: one[:2])[-1] if candidates else Target(None)


def _set_by(contender: Contender, measure: Measure) -> tuple[int, float, Target] | None:
    """The target that a contender would set, and what it is ranked by: the mean of what its seeds reached."""
    finished = [run for run in contender.runs if run.finished]
    runs = finished or [run for run in contender.runs if run.open]
    bests = [best for run in runs if (best := best_of(run, measure)) is not None]
    if not bests:
        return None
    rank = 0 if len(finished) == len(contender.runs) else 1 if finished else 2
    words = ("with every seed", f"with {len(bests)} of its {len(contender.runs)} seeds", "so far")[rank]
    kind = "the best there is" if contender.uses_kfac else "the best without K-FAC"
    return rank, sum(bests) / len(bests), Target(max(bests), contender.name, words, kind)


def row_of(contender: Contender, measure: Measure, target: float | None) -> Row:
    """A contender's line of the table."""
    reached = [(run, None if target is None else arrival(run, measure, target)) for run in contender.runs]
    # What was stopped on its way says nothing about when it would have been there.
    arrivals = tuple(one for run, one in reached if one is not None or not run.open)
    bests = (best_of(run, measure) for run in contender.runs)
    times = (run.step_seconds for run in contender.runs)
    return Row(
        name=contender.name,
        uses_kfac=contender.uses_kfac,
        arrivals=arrivals,
        bests=tuple(best for best in bests if best is not None),
        step_times=tuple(time for time in times if time is not None),
        note=contender.note or _ends(contender.runs),
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean and range."""
    return Spread(mean=sum(values) / len(values), low=min(values), high=max(values))


def _ends(runs: Sequence[Run]) -> str:
    """How runs ended that did not come to their end."""
    ends = [run.reason.split(":")[0] for run in runs if not run.finished]
    return ", ".join(f"{ends.count(end)} of {len(runs)} {end}" for end in dict.fromkeys(ends))


Order = Literal["first", "second", "tie", "neither"]
_EXACT = 20  # seeds of each up to which orders are counted


def order(ours: Sequence[float], theirs: Sequence[float], *, chances: tuple[float, float] = (CHANCE, CHANCE)) -> Order:
    """Who was first, a number a seed, infinity for never: decided by the ranks of all of them (Mann and Whitney's
    test, one-sided), where chance would do it less often than `chances` say, for ours and for theirs.

    Two seeds each cannot be that sure: then it takes both of one before both of the other. With a single one, a
    difference of up to `CLOSE` is a tie.
    """
    if not any(map(math.isfinite, (*ours, *theirs))):
        return "neither"
    if not ours or not theirs:
        return "first" if ours else "second"
    if _is_before(ours, theirs, chances[0]):
        return "first"
    return "second" if _is_before(theirs, ours, chances[1]) else "tie"


def _is_before(ours: Sequence[float], theirs: Sequence[float], chance: float) -> bool:
    if min(len(ours), len(theirs)) == 1:
        return max(ours) * (1 + CLOSE) < min(theirs)
    if min(len(ours), len(theirs)) == 2:
        return max(ours) < min(theirs)
    lost = sum(1.0 if mine > its else 0.5 if mine == its else 0.0 for mine in ours for its in theirs)
    return _by_chance(len(ours), len(theirs), math.ceil(lost)) <= chance


def _by_chance(first: int, second: int, lost: int) -> float:
    """How often so few pairs, or fewer, have the second in front where nobody is better."""
    if first + second > 2 * _EXACT:
        mean, variance = first * second / 2, first * second * (first + second + 1) / 12
        return NormalDist(mean, math.sqrt(variance)).cdf(lost + 0.5)
    return sum(_ways(first, second, count) for count in range(lost + 1)) / math.comb(first + second, first)


@cache
def _ways(first: int, second: int, lost: int) -> int:
    """Orders of so many and so many in which just so many pairs have the second in front."""
    if lost < 0:
        return 0
    if first == 0 or second == 0:
        return int(lost == 0)
    return _ways(first - 1, second, lost - second) + _ways(first, second - 1, lost)


def clear_first(columns: Sequence[Sequence[float]]) -> int | None:
    """Which of several is first before each of the others; None where nobody is."""
    chance = CHANCE / max(1, len(columns) - 1)  # it was picked from several
    ahead = [
        index
        for index, ours in enumerate(columns)
        if ours
        and all(
            order(ours, theirs, chances=(chance, chance)) == "first"
            for other, theirs in enumerate(columns)
            if other != index
        )
    ]
    return ahead[0] if len(ahead) == 1 and len(columns) > 1 else None


def _column(row: Row, field: Callable[[Arrival], float]) -> list[float]:
    return [math.inf if one is None else field(one) for one in row.arrivals]


def steps_to(row: Row) -> list[float]:
    """Updates to the target, a number a run; infinity is never."""
    return _column(row, lambda one: float(one.step))


def seconds_to(row: Row) -> list[float]:
    """The same by the clock."""
    return _column(row, lambda one: one.seconds)


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row to speak of: by the clock, then by how many seeds arrived, then by its best value."""

    def key(row: Row) -> tuple[float, int, float]:
        mean = math.inf if row.seconds is None else row.seconds.mean
        came = sum(one is not None for one in row.arrivals)
        return mean, -came, math.inf if row.best is None else row.best.mean

    return min((row for row in rows if row.arrivals), key=key, default=None)


@dataclass(frozen=True)
class Race:
    """K-FAC against its fastest rival, and who was first by updates and by the clock.

    Each was picked from its kind, and the best of many is good by chance more often: so its chances are divided by how
    many there were.
    """

    ours: Row
    theirs: Row
    by_updates: Order
    by_clock: Order
    chances: tuple[float, float]

    @classmethod
    def of(cls, rows: Sequence[Row], ours: Row, theirs: Row) -> Race:
        """With the chances that the number of contenders leaves."""
        with_kfac = sum(row.uses_kfac and bool(row.arrivals) for row in rows)
        without = sum(not row.uses_kfac and bool(row.arrivals) for row in rows)
        chances = (CHANCE / max(1, with_kfac), CHANCE / max(1, without))
        by_updates = order(steps_to(ours), steps_to(theirs), chances=chances)
        return cls(ours, theirs, by_updates, order(seconds_to(ours), seconds_to(theirs), chances=chances), chances)


def count(mean: float) -> str:
    """A mean of whole numbers: ``4.5``, ``1,261``."""
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def duration(seconds: float) -> str:
    """``1.2 s``, ``350 ms``, ``4 min 05 s``, ``2 h 10 min``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

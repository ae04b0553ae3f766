"""The answer in one sentence: does K-FAC pay, by updates and by the clock?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from natgrad.compare.advice import advise
from natgrad.compare.arrivals import (
    Measure,
    Order,
    Row,
    duration,
    fastest,
    measure_of,
    natural_target,
    order,
    row_of,
    seconds_to,
    steps_to,
)
from natgrad.compare.history import Comparison


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer. `sentence` is the whole of it in one; `advice` says what would change it."""

    sentence: str
    advice: tuple[str, ...]
    measure: Measure
    target: float | None
    target_says: str
    rows: tuple[Row, ...]


def judge(comparison: Comparison) -> Verdict:
    """The verdict on a comparison. Its target is an error (0.05 is 5 %) or, where nothing is classified, a loss; where
    none is given, it is what the best contender without K-FAC reached with every seed.
    """
    measure = measure_of(comparison.contenders)
    goal, says = comparison.target, "given"
    if goal is None:
        goal, says = natural_target(comparison.contenders, measure)
    rows = tuple(row_of(one, measure, goal) for one in comparison.contenders)
    sentence, ours, theirs = _sentence(rows, measure, goal, says)
    return Verdict(
        sentence=sentence,
        advice=advise(comparison, ours=ours, theirs=theirs),
        measure=measure,
        target=goal,
        target_says=_target_in_words(measure, goal, says),
        rows=rows,
    )


def _target_in_words(measure: Measure, target: float | None, says: str) -> str:
    if target is None:
        return "There is no target: nothing was measured."
    goal = f"Target: {measure.name} of {measure.text(target)} or less"
    how = ", as given." if says == "given" else f", which {says}, the best without K-FAC, reached with every seed."
    return f"{goal}{how} An arrival is the first test at which a run was there."


def _sentence(
    rows: Sequence[Row], measure: Measure, target: float | None, says: str
) -> tuple[str, Row | None, Row | None]:
    """The verdict, the row of K-FAC that it speaks of, and that of its best rival."""
    ours = fastest(row for row in rows if row.uses_kfac)
    theirs = fastest(row for row in rows if not row.uses_kfac)
    if target is None or (ours is None and theirs is None):
        return "No verdict: no run measured anything.", ours, theirs
    goal = f"{measure.text(target)} {measure.name}"
    if ours is None or theirs is None:
        return _only_one_kind(rows, goal, ours, theirs), ours, theirs
    by_clock = order(seconds_to(ours), seconds_to(theirs))
    whose = "" if says == "given" else f", what {says} reaches with every seed"
    arrivals = _arrivals(ours, theirs, goal, whose, measure)
    text = f"{_opening(ours, theirs, by_clock)}: {arrivals}{_one_seed(ours, theirs)}."
    return text, ours, theirs


def _opening(ours: Row, theirs: Row, by_clock: Order) -> str:
    by_updates = order(steps_to(ours), steps_to(theirs))
    if by_clock == "neither":
        return "No verdict"
    if by_clock == "first":
        return f"{ours.name} pays here"
    if by_clock == "tie":
        return {
            "first": f"{ours.name} saves updates here, but by the clock it is a tie",
            "second": f"{ours.name} does not pay here: by the clock it is a tie, and it needs more updates",
        }.get(by_updates, f"{ours.name} and {theirs.name} are too close to tell apart")
    if by_updates == "first":
        return f"{ours.name} saves updates here, but it does not pay by the clock"
    return f"{ours.name} does not pay here"


def _arrivals(ours: Row, theirs: Row, goal: str, whose: str, measure: Measure) -> str:
    if ours.seconds is None and theirs.seconds is None:
        return f"not every seed of anybody reaches {goal}; {_came(ours, measure)}, {_came(theirs, measure)}"
    if ours.seconds is None or theirs.seconds is None:
        there, other = (ours, theirs) if ours.seconds is not None else (theirs, ours)
        return f"{there.name} reaches {goal} after {_where(there)}; {_came(other, measure)}"
    assert ours.updates is not None
    assert theirs.updates is not None
    by_updates, by_clock = order(steps_to(ours), steps_to(theirs)), order(seconds_to(ours), seconds_to(theirs))
    ratios = (
        f"{_ratio(ours.updates.mean, theirs.updates.mean, fewer='fewer updates', more='as many updates')} and "
        f"{_ratio(ours.seconds.mean, theirs.seconds.mean, fewer='less time', more='as much time')}"
    )
    return (
        f"to {goal}{whose}, {ours.name} takes {_where(ours)}, and {theirs.name}, the fastest without it, "
        f"{_where(theirs)}: {ratios}{_overlap(by_updates, by_clock)}{_ends_better(ours, theirs, measure)}"
    )


def _overlap(by_updates: Order, by_clock: Order) -> str:
    """What of the ratios is not to be trusted."""
    ties = [name for name, who in (("updates", by_updates), ("time", by_clock)) if who == "tie"]
    if not ties:
        return ""
    return f", but the seeds overlap too much in {'both' if len(ties) == 2 else ties[0]} to tell"


def _ends_better(ours: Row, theirs: Row, measure: Measure) -> str:
    """Where one gets that the other never does: the target is not all."""
    if ours.best is None or theirs.best is None or min(len(ours.bests), len(theirs.bests)) == 1:
        return ""
    if order(ours.bests, theirs.bests) in ("first", "second"):
        mine, its = measure.text(ours.best.mean), measure.text(theirs.best.mean)
        return f"; at its best, {ours.name} comes to {mine} and {theirs.name} to {its}"
    return ""


def _where(row: Row) -> str:
    assert row.updates is not None
    assert row.seconds is not None
    return f"{row.updates.mean:,.0f} updates and {duration(row.seconds.mean)}"


def _came(row: Row, measure: Measure) -> str:
    """Of a row whose seeds did not all arrive."""
    came = sum(one is not None for one in row.arrivals)
    if came:
        return f"{row.name} does with only {came} of {len(row.arrivals)} seeds"
    best = " (nothing it gave was a number)" if row.best is None else f" (its best is {measure.text(row.best.low)})"
    return f"{row.name} never does{best}"


def _ratio(ours: float, theirs: float, *, fewer: str, more: str) -> str:
    """``3.1 times fewer updates``, ``1.7 times as much time``."""
    if ours <= 0 or theirs <= 0:
        return more  # both at the very beginning: there is no ratio
    factor = theirs / ours if theirs >= ours else ours / theirs
    if f"{factor:.2f}" == "1.00":
        return more
    return f"{_times(factor)} times {fewer if theirs > ours else more}"


def _times(factor: float) -> str:
    return f"{factor:.2f}" if factor < 1.2 else f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"


def _one_seed(ours: Row, theirs: Row) -> str:
    alone = len(ours.arrivals) == 1 or len(theirs.arrivals) == 1
    return " (with one seed, nobody knows the spread)" if alone else ""


def _only_one_kind(rows: Sequence[Row], goal: str, ours: Row | None, theirs: Row | None) -> str:
    """A ranking: there is nothing, or nothing else, that has K-FAC."""
    first = ours or theirs
    assert first is not None
    why = "no run with K-FAC" if ours is None else "only runs with K-FAC"
    if first.seconds is None:
        return f"No verdict on K-FAC, with {why}: nobody reached {goal} with every seed."
    return f"No verdict on K-FAC, with {why}: {first.name} is the first at {goal}, after {_where(first)}."

"""The answer in one sentence: does K-FAC pay, by updates and by the clock?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from natgrad.compare.advice import advise
from natgrad.compare.arrivals import (
    Measure,
    Race,
    Row,
    Target,
    clear_first,
    count,
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
    target = natural_target(comparison.contenders, measure) if comparison.target is None else Target(comparison.target)
    rows = tuple(row_of(one, measure, target.value) for one in comparison.contenders)
    sentence, race = _sentence(rows, measure, target)
    return Verdict(
        sentence=sentence,
        advice=advise(comparison, race),
        measure=measure,
        target=target.value,
        target_says=_target_in_words(measure, target, _looks_every(comparison, measure)),
        rows=rows,
    )


def _looks_every(comparison: Comparison, measure: Measure) -> int:
    """Updates between two looks at the measure, the most there are: arrivals are known no better than that."""
    runs = [run for one in comparison.contenders for run in one.runs]
    steps = [[0, *(point.step for point in (run.test if measure.of == "test" else run.train))] for run in runs]
    return max((after - before for one in steps for before, after in itertools.pairwise(one)), default=0)


def _target_in_words(measure: Measure, target: Target, every: int) -> str:
    if target.value is None:
        return "There is no target: nothing was measured."
    whose = f"which {target.whose}, {target.kind}, reached {target.how}" if target.whose else "as given"
    look = "test" if measure.of == "test" else "line"
    looks = f"; there was one every {every:,} updates" if every > 1 else ""
    return (
        f"Target: {measure.name} of {measure.text(target.value)} or less, {whose}. An arrival is the first {look} at "
        f"which a run was there{looks}."
    )


def _sentence(rows: Sequence[Row], measure: Measure, target: Target) -> tuple[str, Race | None]:
    """The verdict, and the race that it speaks of, if there is one."""
    ours = fastest(row for row in rows if row.uses_kfac)
    theirs = fastest(row for row in rows if not row.uses_kfac)
    if target.value is None or (ours is None and theirs is None):
        return "No verdict: no run came to its end with a number.", None
    goal = f"{measure.text(target.value)} {measure.name}"
    if ours is None or theirs is None:
        return _only_one_kind(rows, goal, with_kfac=ours is not None), None
    race = Race.of(rows, ours, theirs)
    whose = f", what {target.whose} reaches {target.how}" if target.whose else ""
    text = f"{_opening(race)}: {_arrivals(race, goal, whose, measure)}{_one_seed(ours, theirs)}."
    return text, race


def _opening(race: Race) -> str:
    name = race.ours.name
    if race.by_clock == "neither":
        return "No verdict"
    if race.by_clock == "first":
        return f"{name} pays here"
    if race.by_clock == "tie":
        return {
            "first": f"{name} saves updates here, but by the clock it is a tie",
            "second": f"{name} does not pay here: by the clock it is a tie, and it needs more updates",
        }.get(race.by_updates, f"{name} and {race.theirs.name} are too close to tell apart")
    if race.by_updates == "first":
        return f"{name} saves updates here, but it does not pay by the clock"
    return f"{name} does not pay here"


def _arrivals(race: Race, goal: str, whose: str, measure: Measure) -> str:
    ours, theirs = race.ours, race.theirs
    if ours.seconds is None and theirs.seconds is None:
        return f"not every seed of anybody reaches {goal}; {_came(ours, measure)}, {_came(theirs, measure)}"
    if ours.seconds is None or theirs.seconds is None:
        there, other = (ours, theirs) if ours.seconds is not None else (theirs, ours)
        return f"{there.name} reaches {goal} after {_where(there)}; {_came(other, measure)}"
    assert ours.updates is not None
    assert theirs.updates is not None
    ratios = (
        f"{_ratio(ours.updates.mean, theirs.updates.mean, fewer='fewer updates', more='as many updates')} and "
        f"{_ratio(ours.seconds.mean, theirs.seconds.mean, fewer='less time', more='as much time')}"
    )
    return (
        f"to {goal}{whose}, {ours.name} takes {_where(ours)}, and {theirs.name}, the fastest without it, "
        f"{_where(theirs)}: {ratios}{_overlap(race)}{_ends_better(race, measure)}"
    )


def _overlap(race: Race) -> str:
    """Which of the two differences are not to be trusted."""
    ours, theirs = race.ours, race.theirs
    pairs = (("updates", race.by_updates, steps_to), ("time", race.by_clock, seconds_to))
    ties = [name for name, who, values in pairs if who == "tie" and sorted(values(ours)) != sorted(values(theirs))]
    if not ties:
        return ""
    which = "both are" if len(ties) == 2 else f"the {ties[0]} {'are' if ties[0] == 'updates' else 'is'}"
    return f" ({which} within what chance does with so few seeds)"


def _ends_better(race: Race, measure: Measure) -> str:
    """Where one gets that the other never does: the target is not all."""
    ours, theirs = race.ours, race.theirs
    if ours.best is None or theirs.best is None or min(len(ours.bests), len(theirs.bests)) == 1:
        return ""
    if order(ours.bests, theirs.bests, chances=race.chances) == "tie":
        return ""
    mine, its = measure.text(ours.best.mean), measure.text(theirs.best.mean)
    return f"; at its best, {ours.name} comes to {mine} and {theirs.name} to {its}"


def _where(row: Row) -> str:
    assert row.updates is not None
    assert row.seconds is not None
    return f"{_updates(row.updates.mean)} and {duration(row.seconds.mean)}"


def _updates(mean: float) -> str:
    return f"{count(mean)} update{'' if count(mean) == '1' else 's'}"


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


def _only_one_kind(rows: Sequence[Row], goal: str, *, with_kfac: bool) -> str:
    """A ranking: there is nothing, or nothing else, that has K-FAC."""
    why = "No verdict: everybody here has K-FAC" if with_kfac else "No verdict: nobody here has K-FAC"
    there = [row for row in rows if row.arrivals]
    if len(there) == 1 and there[0].seconds is not None:
        return f"{why}; {there[0].name} reaches {goal} after {_where(there[0])}."
    first = clear_first([seconds_to(row) for row in there])
    if first is not None and there[first].seconds is not None:
        return f"{why}; {there[first].name} is the first at {goal}, after {_where(there[first])}."
    arrived = any(one is not None for row in there for one in row.arrivals)
    return f"{why}; nobody is clearly the first at {goal}." if arrived else f"{why}; nobody reached {goal}."

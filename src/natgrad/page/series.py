"""Curves of several seeds as one: the mean, and the smallest and largest around it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Line = Sequence[tuple[float, float | None]]
"""One seed: (x, y), x ascending; y is None where it is no number."""

POINTS = 300
"""More than these no screen shows; longer curves are thinned out."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Over seeds; None where one of them is no number."""

    x: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    seeds: int


def by_step(lines: Sequence[Line], *, points: int = POINTS) -> Curve | None:
    """At the steps that all seeds have; where those are few, at all between."""
    lines = [line for line in map(cleaned, lines) if line]
    if not lines:
        return None
    common = set.intersection(*({x for x, _ in line} for line in lines))
    if 2 * len(common) < max(len(line) for line in lines):
        return between(lines, points=points)
    return _over(lines, thinned(sorted(common), points))


def between(lines: Sequence[Line], *, points: int = POINTS) -> Curve | None:
    """At the steps of any seed, the others interpolated: from where the last begins to where the first ends.

    None where they have none in common.
    """
    lines = [line for line in map(cleaned, lines) if line]
    if not lines:
        return None
    if all(len(line) == 1 for line in lines):  # one evaluation each
        middle = sum(line[0][0] for line in lines) / len(lines)
        return _over([[(middle, line[0][1])] for line in lines], [middle])
    first, last = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    grid = sorted({x for line in lines for x, _ in line if first <= x <= last})
    return _over(lines, thinned(grid, points)) if grid else None


def timed(curve: Curve, clocks: Sequence[Line]) -> Curve:
    """A curve over steps against the clock: every step at the mean of the moments at which the seeds took it.

    Nothing is lost where one seed was slower than another, as it would be at equal moments.
    """
    moments = [[moment for clock in clocks if (moment := at(clock, x)) is not None] for x in curve.x]
    kept = [index for index, all_of_them in enumerate(moments) if all_of_them]
    return Curve(
        x=tuple(sum(moments[index]) / len(moments[index]) for index in kept),
        mean=tuple(curve.mean[index] for index in kept),
        low=tuple(curve.low[index] for index in kept),
        high=tuple(curve.high[index] for index in kept),
        seeds=curve.seeds,
    )


def at(line: Line, x: float) -> float | None:
    """The value there, on the straight line between its neighbours; None outside, and next to what is no number."""
    index = bisect_left(line, x, key=lambda point: point[0])
    if index == len(line):
        return None
    right, after = line[index]
    if right == x:
        return after
    if index == 0:
        return None
    left, before = line[index - 1]
    if before is None or after is None:
        return None
    return before + (after - before) * (x - left) / (right - left)


def cleaned(line: Iterable[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """In order, one value an x (the last said), and None for what is not finite."""
    values = {x: y if y is not None and math.isfinite(y) else None for x, y in line if math.isfinite(x)}
    return sorted(values.items(), key=lambda point: point[0])


def thinned(values: Sequence[float], points: int) -> list[float]:
    """At most so many of them, evenly, with both ends."""
    if len(values) <= points:
        return list(values)
    return [values[round(index * (len(values) - 1) / (points - 1))] for index in range(points)]


def _over(lines: Sequence[Line], grid: Sequence[float]) -> Curve:
    mean, low, high = [], [], []
    for x in grid:
        here = [y for line in lines if (y := at(line, x)) is not None]
        whole = len(here) == len(lines)
        mean.append(sum(here) / len(here) if whole else None)
        low.append(min(here) if whole else None)
        high.append(max(here) if whole else None)
    return Curve(x=tuple(grid), mean=tuple(mean), low=tuple(low), high=tuple(high), seeds=len(lines))

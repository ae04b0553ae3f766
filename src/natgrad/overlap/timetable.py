"""Work spread over steps so that no step is much longer than others. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def spread_evenly(costs: Sequence[Mapping[int, float]], slots: int, busy: Collection[int] = ()) -> list[list[int]]:
    """For every slot the pieces of work in it, by number. `costs` has, for every piece, the seconds that it takes each
    rank: ranks wait for each other, so that the longest in a slot counts. `busy` slots get nothing while there are
    others.

    No slot is longer than it has to be, which is the largest piece or the mean; and as few are used as that allows,
    far apart: a step with any work in it waits for the device.
    """
    free = [slot for slot in range(slots) if slot not in busy] or list(range(slots))
    bound = _bound(costs, len(free))
    bins: list[list[int]] = []
    loads: list[dict[int, float]] = []
    for number in sorted(range(len(costs)), key=lambda one: -max(costs[one].values(), default=0.0)):
        fitting = [n for n, load in enumerate(loads) if _longest(load, costs[number]) <= bound]
        if not fitting and len(bins) < len(free):
            bins.append([])
            loads.append({})
            fitting = [len(bins) - 1]
        # The fullest that still has room; where none has, the one that is then the shortest.
        among = fitting or range(len(bins))
        best = (max if fitting else min)(among, key=lambda one: _longest(loads[one], costs[number]))
        bins[best].append(number)
        for rank, seconds in costs[number].items():
            loads[best][rank] = loads[best].get(rank, 0.0) + seconds
    result: list[list[int]] = [[] for _ in range(slots)]
    for place, members in enumerate(bins):
        result[free[place * len(free) // len(bins)]] = members
    return result


def _bound(costs: Sequence[Mapping[int, float]], slots: int) -> float:
    """What the longest slot takes at least: the largest piece, or a rank's whole work evenly spread."""
    ranks = {rank for cost in costs for rank in cost}
    totals = [sum(cost.get(rank, 0.0) for cost in costs) for rank in ranks]
    largest = max((max(cost.values(), default=0.0) for cost in costs), default=0.0)
    return max(largest, max(totals, default=0.0) / slots) * (1 + 1e-9)


def _longest(load: Mapping[int, float], cost: Mapping[int, float]) -> float:
    return max((load.get(rank, 0.0) + seconds for rank, seconds in cost.items()), default=0.0)

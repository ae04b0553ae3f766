"""Work spread over steps so that no step is much longer than others. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def spread_evenly(costs: Sequence[Mapping[int, float]], slots: int, busy: Collection[int] = ()) -> list[list[int]]:
    """For every slot the pieces of work in it, by number. `costs` has, for every piece, the seconds that it takes each
    rank: ranks wait for each other, so that the longest in a slot counts. `busy` slots get nothing while there are
    others.

    The largest first, each to the slot that is then the shortest.
    """
    free = [slot for slot in range(slots) if slot not in busy] or list(range(slots))
    loads: dict[int, dict[int, float]] = {slot: {} for slot in free}
    result: list[list[int]] = [[] for _ in range(slots)]

    def longest(slot: int, cost: Mapping[int, float]) -> tuple[float, float]:
        load = loads[slot]
        return max(load.get(rank, 0.0) + seconds for rank, seconds in cost.items()), sum(load.values())

    for number in sorted(range(len(costs)), key=lambda one: -sum(costs[one].values())):
        slot = min(free, key=lambda one: longest(one, costs[number]))
        result[slot].append(number)
        for rank, seconds in costs[number].items():
            loads[slot][rank] = loads[slot].get(rank, 0.0) + seconds
    return result

"""Putting items into bins so that the fullest is as empty as can easily be had. Pure, and knows nothing of K-FAC.

Longest processing time first, improved by moves and swaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDS = 64  # of moves and swaps
_CLOSE = 1.001  # to what no placement can beat: not worth another round


@dataclass(frozen=True)
class Item:
    """Something to be put into a bin of one or more ranks: seconds that its ranks can share, seconds of the longest
    part, which they cannot, and seconds that each of them spends.
    """

    shared: float
    longest: float
    each: float

    def load(self, size: float) -> float:
        """Seconds of this alone in a bin of so many ranks."""
        return max(self.shared / size, self.longest) + self.each

    def __add__(self, other: Item) -> Item:
        return Item(self.shared + other.shared, max(self.longest, other.longest), self.each + other.each)


_NOTHING = Item(0.0, 0.0, 0.0)


def fill(items: Sequence[Item], sizes: Sequence[int], pinned: Mapping[int, int]) -> list[int]:
    """The bin of each item, such that the fullest bin is as empty as can easily be had. `sizes`: ranks of each bin;
    `pinned`: items whose bin is given. Ties go by order.
    """
    contents: list[list[int]] = [[] for _ in sizes]
    sums = [_NOTHING] * len(sizes)

    def put(item: int, bin_: int) -> None:
        contents[bin_].append(item)
        sums[bin_] += items[item]

    for item, bin_ in sorted(pinned.items()):
        put(item, bin_)
    ranks = sum(sizes)
    own = [item.load(ranks / len(sizes)) for item in items]
    free = [item for item in range(len(items)) if item not in pinned]
    for item in sorted(free, key=lambda item: (-own[item], item)):
        put(item, min(range(len(sizes)), key=lambda b: ((sums[b] + items[item]).load(sizes[b]), b)))
    _improve(items, sizes, contents, set(pinned))
    where = {item: bin_ for bin_, inside in enumerate(contents) for item in inside}
    return [where[item] for item in range(len(items))]


def _improve(items: Sequence[Item], sizes: Sequence[int], contents: list[list[int]], stuck: set[int]) -> None:
    """Takes an item out of the fullest bin, or swaps it for a lighter one, in the way that helps most, while any does.

    Plain numbers instead of sums of items: this is the inner loop.
    """
    if not items:
        return
    each = sum(item.each for item in items) * min(sizes)
    least = max((sum(item.shared for item in items) + each) / sum(sizes), *(item.load(max(sizes)) for item in items))
    for _ in range(_ROUNDS):
        sums = [sum((items[item] for item in inside), _NOTHING) for inside in contents]
        loads = [total.load(size) for total, size in zip(sums, sizes, strict=True)]
        full = max(range(len(sizes)), key=lambda b: (loads[b], -b))
        if loads[full] <= _CLOSE * least:
            return
        found = _best_exchange(items, sizes, contents, stuck, full, loads[full])
        if found is None:
            return
        out, other, back = found
        contents[full].remove(out)
        contents[other].append(out)
        if back is not None:
            contents[other].remove(back)
            contents[full].append(back)


def _best_exchange(
    items: Sequence[Item],
    sizes: Sequence[int],
    contents: Sequence[Sequence[int]],
    stuck: set[int],
    full: int,
    limit: float,
) -> tuple[int, int, int | None] | None:
    """Which item should leave the full bin, for which bin, and for which item of that; None where nothing gets the
    fuller of the two below `limit`.
    """
    best, found = limit * (1 - 1e-9), None
    rests = [_without(items, inside, stuck) for inside in contents]
    for out, shared, longest, every in rests[full][1:]:
        assert out is not None, "the first entry alone is of the whole bin"
        a = items[out]
        for other, entries in enumerate(rests):
            if other == full:
                continue
            for back, other_shared, other_longest, other_every in entries:
                b = _NOTHING if back is None else items[back]
                there = max((other_shared + a.shared) / sizes[other], other_longest, a.longest) + other_every + a.each
                if there >= best:
                    continue
                here = max((shared + b.shared) / sizes[full], longest, b.longest) + every + b.each
                if here < best:
                    best, found = max(here, there), (out, other, back)
    return found


def _without(
    items: Sequence[Item], inside: Sequence[int], stuck: set[int]
) -> list[tuple[int | None, float, float, float]]:
    """What is in a bin (shared, longest, each), whole, and without each item that may leave."""
    total = sum((items[item] for item in inside), _NOTHING)
    longest = sorted((items[item].longest for item in inside), reverse=True)
    entries: list[tuple[int | None, float, float, float]] = [(None, total.shared, total.longest, total.each)]
    for number in inside:
        if number not in stuck:
            item = items[number]
            left = longest[1:] if item.longest == longest[0] else longest
            entries.append((number, total.shared - item.shared, left[0] if left else 0.0, total.each - item.each))
    return entries

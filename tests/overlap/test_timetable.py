"""Work spread over steps, and things that belong together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.connected import connected
from natgrad.overlap.timetable import spread_evenly

SECONDS = st.floats(1e-6, 10, allow_nan=False)
PIECE = st.dictionaries(st.integers(0, 3), SECONDS, min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECE, max_size=30), st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_every_piece_is_in_one_slot_that_is_not_busy(costs, slots, busy):
    found = spread_evenly(costs, slots, busy)
    assert len(found) == slots
    assert sorted(number for slot in found for number in slot) == list(range(len(costs)))
    if len(busy & set(range(slots))) < slots:
        assert all(not found[slot] for slot in busy if slot < slots)


@settings(max_examples=300, deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=40), st.integers(1, 12))
def test_no_slot_is_longer_than_the_mean_and_the_largest_piece(seconds, slots):
    """One rank: the largest first, each to the shortest slot."""
    found = spread_evenly([{0: one} for one in seconds], slots)
    loads = [sum(seconds[number] for number in slot) for slot in found]
    mean = sum(seconds) / slots
    assert max(loads) <= max(2 * mean, max(seconds)) * (1 + 1e-9)
    assert max(loads) <= (mean + max(seconds)) * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECE, min_size=1, max_size=30), st.integers(1, 12))
def test_on_several_ranks_no_slot_is_longer_than_all_means_and_the_largest_piece(costs, slots):
    """Of a slot the rank that takes longest counts: each is at most as loaded as all together in the mean."""
    found = spread_evenly(costs, slots)
    ranks = range(4)
    loads = [max(sum(costs[number].get(rank, 0.0) for number in slot) for rank in ranks) for slot in found]
    total = sum(sum(cost.values()) for cost in costs)
    largest = max(max(cost.values()) for cost in costs)
    assert max(loads) <= (total / slots + largest) * (1 + 1e-9)


@given(st.lists(PIECE, max_size=20), st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_the_timetable_is_the_same_every_time(costs, slots, busy):
    assert spread_evenly(costs, slots, busy) == spread_evenly([dict(one) for one in costs], slots, sorted(busy))


def test_ranks_are_filled_side_by_side():
    """Pieces of two ranks go into one slot: they are made at the same time."""
    found = spread_evenly([{0: 1.0}, {1: 1.0}, {0: 1.0}, {1: 1.0}], 2)
    assert sorted(sorted(slot) for slot in found) == [[0, 1], [2, 3]] or sorted(sorted(s) for s in found) == [
        [0, 3],
        [1, 2],
    ]


def test_busy_slots_are_used_where_there_are_no_others():
    assert spread_evenly([{0: 1.0}, {0: 2.0}], 2, busy=[0, 1]) == [[1], [0]]
    assert spread_evenly([], 3) == [[], [], []]


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({}, []),
        ({"a": [], "b": []}, [["a"], ["b"]]),
        ({"a": [1], "b": [2], "c": [1]}, [["a", "c"], ["b"]]),
        ({"a": [1], "b": [2], "c": [1, 2]}, [["a", "c", "b"]]),
        ({"a": [1], "b": [2], "c": [3], "d": [3, 2], "e": [1]}, [["a", "e"], ["c", "d", "b"]]),
        ({"a": [1, 1], "b": [1]}, [["a", "b"]]),
    ],
)
def test_what_has_something_in_common_is_together(keys, groups):
    found = connected(keys)
    assert sorted(sorted(group) for group in found) == sorted(sorted(group) for group in groups)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, 20), st.lists(st.integers(0, 8), max_size=3), max_size=12))
def test_groups_are_those_of_a_search(keys):
    def reach(start: int) -> set[int]:
        found, ahead = {start}, [start]
        while ahead:
            one = ahead.pop()
            for other in keys:
                if other not in found and set(keys[one]) & set(keys[other]):
                    found.add(other)
                    ahead.append(other)
        return found

    groups = connected(keys)
    assert sorted(thing for group in groups for thing in group) == sorted(keys)
    for group in groups:
        assert set(group) == reach(group[0])

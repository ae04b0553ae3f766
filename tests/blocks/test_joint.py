"""Small tensors as one: what is remembered of them is what they are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from natgrad.blocks import joint as joint_of
from natgrad.blocks.factor import Factor, commit
from natgrad.blocks.joint import Joined, Rows, joint
from natgrad.blocks.kronecker import Orientation, commit_counts

CPU = torch.device("cpu")


def members(count: int) -> list[Joined]:
    return [Joined(torch.tensor(float(number), dtype=torch.float64)) for number in range(count)]


def factor() -> Factor:
    return Factor(1, 2, diagonal=True, dtype=torch.float32, device=CPU)


def test_the_same_members_are_joined_once() -> None:
    some = members(3)
    together = joint(some)
    assert joint(some) is together
    together.whole.add_(1)
    assert [float(member.own) for member in some] == [1, 2, 3]


def test_other_members_are_joined_anew() -> None:
    some = members(3)
    first = joint(some)
    assert joint(some[:2]) is not first
    second = joint(some)
    assert second is not first
    assert joint([some[0], some[2], some[1]]).whole.tolist() == [0, 2, 1]


def test_numbers_are_those_of_this_time() -> None:
    together = joint(members(2))
    first = together.counted([3, 4])
    assert together.counted([3, 4]) is first
    assert together.counted([3, 5]).tolist() == [3, 5]
    assert together.counted([3, 4.0]).tolist() == [3, 4]


def test_numbers_that_only_the_device_knows_are_read_every_time() -> None:
    together = joint(members(2))
    count = torch.tensor(7.0)
    counts: list[Rows] = [3, count]
    assert together.counted(counts).tolist() == [3, 7]
    count.fill_(8)
    assert together.counted(counts).tolist() == [3, 8]
    assert together.counted([3, 8]).tolist() == [3, 8]


def test_numbers_of_another_stream_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    together = joint(members(2))
    first = together.counted([3, 4])
    monkeypatch.setattr(joint_of, "stream_of", lambda device: 1)
    second = together.counted([3, 4])
    assert second is not first
    assert together.counted([3, 4]) is second


def test_numbers_go_to_devices_that_have_no_streams() -> None:
    together = joint([Joined(torch.zeros((), dtype=torch.float64, device="meta"))])
    assert together.counted([3]).device.type == "meta"


def test_no_factor_keeps_another_alive() -> None:
    some = [factor() for _ in range(3)]
    for one in some:
        one.add(torch.ones(1, 2), 1)
    commit(some, 0.5)
    last, memory = weakref.ref(some[-1]), weakref.ref(some.pop().sum)
    gc.disable()
    try:
        del one
        assert last() is None
        assert memory() is None
    finally:
        gc.enable()


def test_factors_that_move_in_turn_each_keep_their_own() -> None:
    first, second, third = (factor() for _ in range(3))
    for some, rows in (((first, second), 1), ((first, third), 2), ((first, second), 4)):
        for one in some:
            one.add(torch.full((1, 2), float(rows)), rows)
        commit((first, second, third), 0.5)
    for one, wanted in ((first, 4 + 0.5 * (2 + 0.5)), (second, 4.5), (third, 2)):
        assert one.sum.tolist() == [[wanted] * 2]
        assert float(one.weight) == wanted


def test_counts_of_rows_and_terms_fade() -> None:
    orientations = [Orientation([factor()]) for _ in range(2)]
    for terms in (2.0, 2.0, 3.0):
        for number, orientation in enumerate(orientations):
            orientation.add_rows(1 + number)
        commit_counts(orientations, 0.5, terms)
    assert [one.counts.tolist() for one in orientations] == [[1.75, 4.5], [3.5, 4.5]]
    assert not any(one.has_pending or one.pending_rows for one in orientations)

"""Where time goes: parts that add up to the whole, and a K-FAC that marks its own without changing a bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers import Hand
from natgrad import KFAC
from natgrad.clock import Clock, NoClock


def test_parts_add_up_to_the_whole(hand: Hand) -> None:
    clock = Clock()
    for part, seconds in (("data", 1), ("model", 4), ("data", 2), ("model", 8)):
        clock.switch(part)
        hand.move(seconds)
    clock.switch(None)
    seconds, times = clock.take()
    assert seconds == {"data": 3, "model": 12}
    assert times == {"data": 2, "model": 2}
    assert sum(seconds.values()) == hand.now - 100


def test_an_inner_part_gives_time_back_to_the_outer_one(hand: Hand) -> None:
    clock = Clock()
    with clock.part("outer"):
        hand.move(1)
        with clock.part("inner"):
            hand.move(2)
            with clock.part("inmost"):
                hand.move(4)
            hand.move(8)
        assert clock.present == "outer"
        hand.move(16)
    assert clock.present is None
    hand.move(32)
    assert clock.take()[0] == {"outer": 17, "inner": 10, "inmost": 4}


def test_an_error_inside_gives_time_back_too(hand: Hand) -> None:
    clock = Clock()
    clock.switch("model")
    with pytest.raises(ZeroDivisionError), clock.part("solve"):  # noqa: PT012
        hand.move(1)
        raise ZeroDivisionError
    hand.move(2)
    clock.switch(None)
    assert clock.take()[0] == {"solve": 1, "model": 2}


def test_time_of_nobody_is_not_counted(hand: Hand) -> None:
    clock = Clock()
    hand.move(1)
    assert clock.switch("data") is None
    hand.move(2)
    assert clock.switch(None) == "data"
    hand.move(4)
    assert clock.switch("data") is None
    hand.move(8)
    clock.switch(None)
    assert clock.take() == ({"data": 10}, {"data": 2})


def test_what_was_taken_does_not_come_again(hand: Hand) -> None:
    clock = Clock()
    assert clock.take() == ({}, {})
    clock.switch("data")
    hand.move(1)
    clock.switch("model")
    hand.move(2)
    assert clock.take() == ({"data": 1}, {"data": 1})  # the present part has not ended
    hand.move(4)
    clock.switch(None)
    assert clock.take() == ({"model": 6}, {"model": 1})
    assert clock.take() == ({}, {})


def test_a_long_run_keeps_nothing_but_what_is_open(hand: Hand) -> None:
    clock = Clock()
    for _ in range(1000):
        with clock.part("model"):
            hand.move(1)
        clock.take()
    assert len(clock._marks) == 1


def test_no_clock_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> float:
        raise AssertionError("it looked at the time")

    monkeypatch.setattr(time, "perf_counter", asked)
    clock = NoClock()
    with clock.part("model"):
        assert clock.switch("data") is None
    assert clock.take() == ({}, {})
    assert not clock._marks


# K-FAC's parts


def trained(
    steps: int, *, clock: Clock | None, each: Callable[[Clock], None] = lambda clock: None, **options: object
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, **{"factor_update_steps": 2, "inv_update_steps": 4, **options}).attach(optimizer)
    if clock is not None:
        kfac.clock = clock
        assert kfac.clock is clock
    for _ in range(steps):
        if clock is not None:
            clock.switch("model")
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.randn(5, 1, 4, 4)), torch.randint(4, (5,))).backward()
        optimizer.step()
        if clock is not None:
            assert clock.switch(None) == "model"
            each(clock)
    return [*(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_kfac_marks_its_parts_and_statistics_only_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, fisher: str
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    steps: list[tuple[dict[str, float], dict[str, int]]] = []
    trained(6, clock=Clock(), each=lambda clock: steps.append(clock.take()), fisher=fisher)
    for number, (seconds, times) in enumerate(steps):
        assert ("statistics" in seconds) == (number % 2 == 0)
        assert times["solve"] == times["precondition"] == 1
        assert seconds.keys() - {"statistics"} == {"model", "solve", "precondition"}
        assert times["model"] == 1  # it goes on after each of the others
        assert all(seconds[part] >= count for part, count in times.items())
    assert len({frozenset(times.items()) for _, times in steps[::2]}) == 1


def test_parts_begin_more_often_than_they_have_something_to_do() -> None:
    """As the documentation of `Clock.take` says: decompositions are counted elsewhere."""
    clock = Clock()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    kfac = KFAC(model, lr=0.1)
    kfac.clock = clock
    for _ in range(10):
        model.zero_grad()
        functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
        kfac.step()
    _, times = clock.take()
    assert times["solve"] == times["precondition"] == 10
    assert times["statistics"] > 1
    assert kfac.metrics()["decompositions"] == 2  # both sides, once


@pytest.mark.parametrize("options", [{}, {"fisher": "sampled"}, {"solver": "inverse", "kl_clip": None}])
def test_a_clock_changes_no_bit(options: dict[str, object]) -> None:
    for bare, clocked in zip(trained(6, clock=None, **options), trained(6, clock=Clock(), **options), strict=True):
        assert torch.equal(bare, clocked)


def test_a_kfac_has_no_clock_until_it_is_given_one() -> None:
    assert isinstance(KFAC(nn.Linear(2, 2), kl_clip=None).clock, NoClock)


def test_what_is_recomputed_for_statistics_is_their_time() -> None:
    """A checkpointed region runs forward, again for autograd, and once more for K-FAC."""
    kept: list[str | None] = []

    class Region(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(kfac.clock.present)
            return super().forward(x)

    region = Region(3, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = region

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, x.tanh(), use_reentrant=False)

    model = Model()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1)
    kfac.clock = Clock()
    functional.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 3).backward()
    assert sorted(map(str, kept)) == ["None", "None", "statistics"]
    kfac.detach()  # the region holds on to it, and others would run eagerly

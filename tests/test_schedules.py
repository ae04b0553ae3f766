"""Ready-made schedules: their values at the edges, how they compose and print, and K-FAC driven by them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from natgrad import KFAC, schedules


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (schedules.constant(3), {0: 3, 10**6: 3}),
        (schedules.steps(1.0, factor=0.5, at=[10, 20]), {0: 1, 9: 1, 10: 0.5, 19: 0.5, 20: 0.25, 99: 0.25}),
        (schedules.exponential(2.0, factor=0.5, every=10), {0: 2, 9: 2, 10: 1, 29: 0.5}),
        (schedules.exponential(0.01, factor=0.96, every=0.5).epochs(10), {4: 0.01, 5: 0.0096, 10: 0.01 * 0.96**2}),
        (schedules.warmup(4), {0: 0.1, 2: 0.55, 4: 1, 100: 1}),
        (schedules.warmup(4, start=0.5).epochs(10), {0: 0.5, 20: 0.75, 40: 1, 50: 1}),
        (schedules.cosine(1.0, over=10, end=0.2), {0: 1, 5: 0.6, 10: 0.2, 11: 0.2}),
        (schedules.constant(2) * schedules.warmup(2, start=0.5), {0: 1, 1: 1.5, 2: 2}),
        (0.5 * schedules.constant(2), {0: 1}),
        (schedules.constant(2).then(schedules.steps(1, factor=3, at=[5]), at=10), {9: 2, 10: 1, 14: 1, 15: 3}),
        (schedules.exponential(10, factor=1.5).whole(), {0: 10, 1: 15, 2: 22}),
        (schedules.steps(1.0, factor=0.1, at=[1]).epochs(100), {99: 1, 100: 0.1}),
    ],
)
def test_values(schedule: schedules.Schedule, values: dict[int, float]) -> None:
    for step, value in values.items():
        assert math.isclose(schedule(step), value, rel_tol=1e-12)


def test_schedules_print_themselves() -> None:
    both = schedules.steps(1e-3, factor=0.5, at=[40, 80]) * schedules.warmup(5)
    assert repr(both.epochs(391)) == "(steps(0.001, factor=0.5, at=[40, 80]) * warmup(5, start=0.1)).epochs(391)"
    for schedule in (
        both,
        both.epochs(3),
        schedules.cosine(1.0, over=3, end=0.1).then(schedules.constant(2), at=4).whole(),
    ):
        again = eval(repr(schedule), vars(schedules))  # what is printed makes it
        assert [again(step) for step in range(300)] == [schedule(step) for step in range(300)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant("1"), "value must be a finite number, got '1'"),
        (lambda: schedules.exponential(1, factor=0.5, every=0), "every must be a finite number above 0, got 0"),
        (lambda: schedules.cosine(1, over=-1, end=0.1), "over must be a finite number above 0"),
        (lambda: schedules.constant(1).epochs(0), "steps_per_epoch must be a whole number"),
        (lambda: schedules.constant(1) * "2", "factor must be a finite number"),
        (lambda: schedules.steps(1, factor=math.nan, at=[1]), "factor must be a finite number"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_kfac_follows_them() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    epoch = schedules.driven(schedules.steps(1e-2, factor=0.1, at=[1]))
    cap = schedules.exponential(1e-3, factor=0.5, every=1).epochs(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    kfac = KFAC(
        model,
        damping=epoch,
        kl_clip=cap,
        factor_update_steps=1,
        inv_update_steps=schedules.steps(1, factor=2, at=[2]),
    ).attach(optimizer)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        metrics = kfac.metrics()
        seen.append((metrics["damping"], metrics["decomposition_age"]))
        assert math.isclose(metrics["predicted_kl"], cap(step) / 2, rel_tol=1e-5)  # the cap acts
        if step == 1:
            epoch.step()
    assert seen == [(1e-2, 0), (1e-2, 0), (1e-3, 1), (1e-3, 0)]
    other = schedules.driven(schedules.steps(1e-2, factor=0.1, at=[1]))
    other.load_state_dict(epoch.state_dict())
    assert other(0) == epoch(0) == 1e-3


def test_kfacs_checkpoint_holds_where_a_driven_schedule_is() -> None:
    model = nn.Linear(3, 2)
    damping = schedules.driven(schedules.steps(1.0, factor=0.5, at=[1, 2]))
    cap = schedules.driven(schedules.constant(1e-3))
    kfac = KFAC(model, lr=0.1, damping=damping, kl_clip=cap)
    damping.step()
    model(torch.randn(4, 3)).logsumexp(1).sum().backward()
    kfac.step()
    fresh = schedules.driven(schedules.steps(1.0, factor=0.5, at=[1, 2]))
    other = KFAC(model, lr=0.1, damping=fresh, kl_clip=1e-3)
    other.load_state_dict(kfac.state_dict())
    assert fresh(0) == 0.5
    plain = KFAC(model, lr=0.1, damping=3e-3)  # a number where the checkpoint had a schedule
    plain.load_state_dict(kfac.state_dict())
    model.zero_grad()
    model(torch.randn(4, 3)).logsumexp(1).sum().backward()
    plain.step()
    assert plain.metrics()["damping"] == 3e-3

"""Levenberg-Marquardt damping: its rule, what it does on a quadratic, and that a comparison never moves the weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC, AdaptiveDamping, TrustRegion


@pytest.mark.parametrize(
    ("before", "after", "predicted", "expected"),
    [
        (10.0, 9.0, -1.0, 0.5),  # ρ = 1: the model can be trusted
        (10.0, 9.5, -1.0, 1.0),  # ρ = ½
        (10.0, 9.9, -1.0, 2.0),  # ρ = 0.1: it promised too much
        (10.0, 11.0, -1.0, 2.0),  # worse than before
        (10.0, math.inf, -1.0, 2.0),
        (10.0, math.nan, -1.0, 2.0),
        (10.0, 11.0, 0.5, 2.0),  # an increase, as the model itself predicted: the step is too long
        (10.0, 9.0, 0.5, 1.0),  # a decrease that it did not: momentum knows more
        (math.nan, 9.0, -1.0, 1.0),  # a bad batch says nothing
        (math.inf, math.inf, -1.0, 1.0),
        (10.0, 9.0, math.nan, 1.0),
        (10.0, 10.0 + 1e-9, -1e-9, 1.0),  # rounding
    ],
)
def test_one_comparison(before: float, after: float, predicted: float, expected: float) -> None:
    damping = AdaptiveDamping(1.0, every=1, rate=0.5)
    damping.compare(0, before=before, after=after, predicted=predicted, resolution=1e-8)
    assert damping(123) == expected


def test_bounds_and_what_happens_at_the_floor() -> None:
    damping = AdaptiveDamping(1.0, every=4, rate=0.5, low=1e-1, high=2.0)
    assert [damping.due(step) for step in range(5)] == [False, False, False, True, True]
    damping.compare(3, before=1.0, after=0.0, predicted=-1.0, resolution=0)
    assert damping(0) == 0.1  # rate⁴ = 1/16, but not below the bound
    assert damping.due(4)  # every step from now on
    damping.compare(4, before=1.0, after=2.0, predicted=-1.0, resolution=0)
    assert damping(0) == pytest.approx(0.2)  # one step has passed: one factor
    assert not damping.due(5)
    for step in (8, 12, 16):
        damping.compare(step, before=1.0, after=2.0, predicted=-1.0, resolution=0)
    assert damping(0) == 2.0


def test_state() -> None:
    damping = AdaptiveDamping(1.0, every=2, rate=0.5)
    damping.compare(1, before=1.0, after=0.0, predicted=-1.0, resolution=0)
    other = AdaptiveDamping(3.0, every=2, rate=0.5)
    other.load_state_dict(damping.state_dict())
    assert (other(0), other.ratio, other.due(2), other.due(3)) == (0.25, 1.0, False, True)
    narrow = AdaptiveDamping(3.0, low=1.0)
    narrow.load_state_dict(damping.state_dict())
    assert narrow(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, "start must be above 0"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"rate": 1.0}, "rate must be below 1"),
        ({"rate": 1.5}, "rate must be above 0 and at most 1"),
        ({"start": 1e-3, "low": 1e-2}, "start must be between low and high"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveDamping(**options)


def linear_problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A quadratic objective: a linear layer with a Gaussian predictive, whose one block is the exact Fisher."""
    torch.manual_seed(0)
    return nn.Linear(4, 2).double(), torch.randn(16, 4).double(), torch.randn(16, 2).double()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_on_a_quadratic_the_model_is_exact_and_damping_falls(optimizer: str) -> None:
    model, x, y = linear_problem()
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    }
    stepper = makers[optimizer](model.parameters())
    damping = AdaptiveDamping(1.0, every=2, rate=0.9, low=1e-3)
    kfac = KFAC(
        model, damping=damping, fisher="exact", predictive="gaussian", factor_update_steps=1, inv_update_steps=1
    ).attach(stepper)

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / 32

    kfac.objective = loss
    ratios = []
    for _ in range(8):
        stepper.zero_grad()
        loss().backward()
        stepper.step()
        ratios.append(kfac.metrics().get("reduction_ratio"))
    assert ratios[0] is None
    assert ratios[1::2] == pytest.approx([1.0] * 4, abs=1e-9)
    assert kfac.damping == pytest.approx(0.9**8)
    assert damping(0) == 1.0  # the user's object may be given to another KFAC


def test_l2_belongs_to_the_model_of_the_loss() -> None:
    model, x, y = linear_problem()
    stepper = torch.optim.SGD(model.parameters(), lr=0.5)
    damping = AdaptiveDamping(1.0, every=1, rate=0.9)
    kfac = KFAC(model, damping=damping, l2=0.3, predictive="gaussian").attach(stepper)

    def loss() -> Tensor:
        penalty = 0.15 * sum(p.square().sum() for p in model.parameters())
        return (model(x) - y).square().sum() / 32 + penalty

    kfac.objective = loss
    loss().backward()
    stepper.step()
    assert kfac.metrics()["reduction_ratio"] == pytest.approx(1.0, abs=1e-9)


def train(
    model: nn.Module, x: Tensor, y: Tensor, damping: Any, *, steps: int, lr: float, **options: Any
) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    stepper = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    kfac = KFAC(model, damping=damping, factor_update_steps=1, inv_update_steps=1, **options).attach(stepper)
    used = []
    for _ in range(steps):
        stepper.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        kfac.objective = lambda: functional.cross_entropy(model(x), y)
        stepper.step()
        used.append(float(kfac.metrics()["damping"]))  # type: ignore[arg-type]
    return used, [p.detach().clone() for p in model.parameters()]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("lr", [0.1, 30.0])
def test_a_comparison_never_moves_the_weights(lr: float) -> None:
    """The same λ from a plain callable give the same weights, bit for bit; dropout and batch norm included."""
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(16) % 3
    start = net()
    adaptive, plain = copy.deepcopy(start), copy.deepcopy(start)
    damping = AdaptiveDamping(0.1, every=2, rate=0.7)
    used, weights = train(adaptive, x, y, damping, steps=9, lr=lr, kl_clip=None)
    assert len(set(used)) > 1
    assert min(used) < 0.1 if lr < 1 else max(used) > 0.1
    _, expected = train(plain, x, y, lambda step: used[step], steps=9, lr=lr, kl_clip=None)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(adaptive.buffers(), plain.buffers(), strict=True))


def test_a_nan_batch_changes_neither_damping_nor_weights() -> None:
    model, x, y = linear_problem()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    damping = AdaptiveDamping(1.0, every=1)
    kfac = KFAC(model, damping=damping, predictive="gaussian").attach(stepper)
    before = [p.detach().clone() for p in model.parameters()]
    bad = x * math.nan

    def loss() -> Tensor:
        return (model(bad) - y).square().sum() / 16

    kfac.objective = loss
    loss().backward()
    with pytest.warns(UserWarning, match="NaN or inf"):
        stepper.step()
    assert kfac.damping == 1.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_objective_is_asked_for_before_anything_changes() -> None:
    model, x, y = linear_problem()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, damping=AdaptiveDamping(every=2), predictive="gaussian").attach(stepper)
    for step in range(2):
        stepper.zero_grad()
        (model(x) - y).square().sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        if step == 0:
            stepper.step()
            continue
        with pytest.raises(RuntimeError, match="AdaptiveDamping needs the loss of the batch again: set kfac.objective"):
            stepper.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert kfac.steps == 1
        with pytest.raises(TypeError, match="a function without arguments"):
            kfac.objective = 3.0  # type: ignore[assignment]


def test_without_an_optimizer_to_look_at() -> None:
    model, x, y = linear_problem()
    for options in ({"damping": AdaptiveDamping()}, {"kl_clip": TrustRegion(1e-3, of="step")}):
        kfac = KFAC(model, lr=0.1, predictive="gaussian", **options)
        (model(x) - y).square().sum().backward()
        with pytest.raises(ValueError, match="look at what the optimizer does"):
            kfac.step()


def test_steps_called_by_hand_with_an_optimizer_given() -> None:
    results = []
    for attached in (True, False):
        model, x, y = linear_problem()
        stepper = torch.optim.SGD(model.parameters(), lr=0.5)
        damping = AdaptiveDamping(1.0, every=1)
        kfac = KFAC(model, damping=damping, predictive="gaussian", optimizer=None if attached else stepper)
        if attached:
            kfac.attach(stepper)
        for _ in range(3):
            stepper.zero_grad()
            kfac.objective = lambda m=model, a=x, b=y: (m(a) - b).square().sum() / 32
            kfac.objective().backward()
            if not attached:
                kfac.step()
            stepper.step()
        results.append((kfac.damping, [p.detach().clone() for p in model.parameters()]))
        kfac.detach()
        assert not stepper._optimizer_step_post_hooks
    assert results[0][0] == results[1][0] < 1
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_kfacs_checkpoint_holds_it() -> None:
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(16) % 3
    runs = []
    for stop in (None, 3):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        stepper = torch.optim.SGD(model.parameters(), lr=0.3)
        kfac = KFAC(model, damping=AdaptiveDamping(0.1, every=2), factor_update_steps=1).attach(stepper)
        for step in range(6):
            if step == stop:
                state = kfac.state_dict()
                kfac.detach()
                kfac = KFAC(model, damping=AdaptiveDamping(7.0, every=2), factor_update_steps=1).attach(stepper)
                kfac.load_state_dict(state)
            stepper.zero_grad()
            kfac.objective = lambda m=model: functional.cross_entropy(m(x), y)
            kfac.objective().backward()
            stepper.step()
        runs.append((kfac.metrics()["damping"], [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))

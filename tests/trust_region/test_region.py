"""The trust region, in float64: the papers' rules by hand, the step really taken, and the KL divergence measured."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import exact_fisher, flat
from natgrad import KFAC, TrustRegion, schedules

TIGHT = {"rtol": 1e-9, "atol": 1e-14}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 4, generator=generator).double(), torch.arange(32) % 3


def weights(model: nn.Module) -> Tensor:
    return flat([p.detach().clone() for p in model.parameters()])


def dense_fisher(kfac: KFAC) -> Tensor:
    return torch.block_diag(*(block.to_dense() for block in kfac.blocks))


def one_step(
    model: nn.Module, region: TrustRegion | None, optimizer: torch.optim.Optimizer, *, steps: int = 1, **options: Any
) -> tuple[KFAC, Tensor, Tensor]:
    """(K-FAC, the last step, the exact Fisher before it)."""
    x, y = batch()
    kfac = KFAC(model, kl_clip=region, factor_update_steps=1, inv_update_steps=1, **options).attach(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.objective = lambda: functional.cross_entropy(model(x), y)
        before = weights(model)
        unwatched = copy.deepcopy(model)
        fisher = exact_fisher(unwatched(x), list(unwatched.parameters()), "categorical", 32)
        optimizer.step()
    return kfac, weights(model) - before, fisher


def test_equation_14_through_several_steps() -> None:
    """η_k = min(η_max, √(c_k / vᵀF̂v)), c_k = c_0 ζ^k, with the damped F̂ of the blocks; η_max is the learning rate."""
    model, (x, y) = net(), batch()
    cap = schedules.exponential(1e-2, factor=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
    options = {"damping": 1e-2, "factor_update_steps": 1, "inv_update_steps": 1}
    kfac = KFAC(model, kl_clip=TrustRegion(cap), **options).attach(optimizer)
    rates = []
    for step in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        gradient, before = flat([p.grad.clone() for p in model.parameters()]), weights(model)
        optimizer.step()
        damped = dense_fisher(kfac) + 1e-2 * torch.eye(len(before)).double()
        v = torch.linalg.solve(damped, gradient)
        rate = min(0.7, math.sqrt(1e-2 * 0.3**step / float(v @ damped @ v)))
        torch.testing.assert_close(weights(model) - before, -rate * v, **TIGHT)
        rates.append(rate)
        metrics = kfac.metrics()
        assert metrics["predicted_kl"] == pytest.approx(0.5 * rate**2 * float(v @ damped @ v))
    assert max(rates) < 0.7  # the cap decides, and the last is shorter for it
    assert rates[-1] < rates[0]
    history = kfac.history()
    assert history["step"] == list(range(6))
    assert history["kl_cap"] == pytest.approx([1e-2 * 0.3**k for k in range(6)])
    assert history["predicted_kl"] == pytest.approx([0.5e-2 * 0.3**k for k in range(6)])
    assert history["clip_factor"] == pytest.approx([rate / 0.7 for rate in rates])
    assert history["damping"] == [1e-2] * 6


def test_a_large_cap_leaves_the_learning_rate_alone() -> None:
    model = net()
    kfac, step, _ = one_step(model, TrustRegion(1e3), torch.optim.SGD(model.parameters(), lr=1e-3))
    free = net()
    _, expected, _ = one_step(free, None, torch.optim.SGD(free.parameters(), lr=1e-3))
    assert torch.equal(step, expected)
    assert kfac.metrics()["clip_factor"] == 1.0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "lars": lambda p: pytest.importorskip("pytorch_optimizer").LARS(p, lr=1.0, trust_coefficient=0.1),
    "lamb": lambda p: pytest.importorskip("pytorch_optimizer").Lamb(p, lr=0.1),
}


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("curvature", ["factored", "exact"])
def test_the_step_taken_keeps_to_the_cap_in_front_of_any_optimizer(solver: str, optimizer: str, curvature: str) -> None:
    model = net()
    region = TrustRegion(1e-4, of="step", curvature=curvature)
    options = {"solver": solver, "damping": 1e-13}
    kfac, step, fisher = one_step(model, region, OPTIMIZERS[optimizer](model.parameters()), steps=3, **options)
    metric = fisher if curvature == "exact" else dense_fisher(kfac)
    length = float(step @ metric @ step)
    tolerance = 1e-2 if solver == "inverse" else 1e-7  # pi damps by √λ
    assert length <= 1e-4 * (1 + tolerance)
    assert kfac.metrics()["predicted_kl"] == pytest.approx(0.5 * length, rel=tolerance)
    history = kfac.history()
    assert history["clip_factor"][0] < 1
    assert all(kl <= 0.5e-4 * (1 + 1e-9) for kl in history["predicted_kl"])
    free = net()
    _, uncut, _ = one_step(free, TrustRegion(1e-4), OPTIMIZERS[optimizer](free.parameters()), **options)
    first = net()
    _, cut, _ = one_step(first, region, OPTIMIZERS[optimizer](first.parameters()), **options)
    assert float(torch.cosine_similarity(uncut, cut, dim=0)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("solver", "rule"), [("eigen", "joint"), ("eigen", "pi"), ("inverse", "pi"), ("inverse", "plain")]
)
def test_the_step_of_plain_sgd_is_measured_as_its_gradient(solver: str, rule: str) -> None:
    """With the damping in F̂ the two are one rule, whatever the solver."""
    found = []
    for of in ("gradient", "step"):
        model = net()
        options = {"solver": solver, "damping_rule": rule, "damping": 1e-2}
        kfac, _, _ = one_step(
            model, TrustRegion(1e-4, of=of), torch.optim.SGD(model.parameters(), lr=0.5), steps=3, **options
        )
        found.append((weights(model), kfac.history()["clip_factor"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-8, atol=1e-10)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-8)
    assert max(found[0][1]) < 1


@pytest.mark.parametrize(("optimizer", "follows"), [("sgd", True), ("adam", False), ("lars", False), ("lamb", False)])
def test_what_the_clip_on_the_gradient_means_in_front_of_others(optimizer: str, follows: bool) -> None:
    """A cap a hundred times smaller makes SGD's step ten times shorter; what rescales gradients hardly notices."""
    lengths = []
    for cap in (1e-4, 1e-6):
        model = net()
        _, step, _ = one_step(model, TrustRegion(cap), OPTIMIZERS[optimizer](model.parameters()))
        lengths.append(float(step[:20].norm()))  # a matrix: LARS leaves vectors alone
    assert lengths[0] / lengths[1] == pytest.approx(10.0 if follows else 1.0, rel=1e-2)


@pytest.mark.parametrize("curvature", ["factored", "exact"])
def test_adams_step_is_cut_to_the_cap(curvature: str) -> None:
    model = net()
    region = TrustRegion(1e-4, of="step", curvature=curvature)
    kfac, step, fisher = one_step(model, region, torch.optim.Adam(model.parameters(), lr=0.1), steps=3, damping=1e-13)
    metric = fisher if curvature == "exact" else dense_fisher(kfac)
    assert float(step @ metric @ step) == pytest.approx(1e-4, rel=1e-7)


def test_a_step_inside_the_region_is_left_bit_for_bit() -> None:
    results = []
    for region in (None, TrustRegion(1e6, of="step"), TrustRegion(1e6, of="step", curvature="exact")):
        model = net()
        one_step(model, region, torch.optim.Adam(model.parameters(), lr=0.1), steps=3)
        results.append(weights(model))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_exact_fisher_of_the_gradients_step() -> None:
    model = net()
    groups = [{"params": list(model[0].parameters()), "lr": 0.3}, {"params": list(model[2].parameters()), "lr": 2.0}]
    region = TrustRegion(1e-4, curvature="exact")
    kfac, step, fisher = one_step(model, region, torch.optim.SGD(groups), steps=2)
    assert float(step @ fisher @ step) == pytest.approx(1e-4, rel=1e-9)
    assert kfac.metrics()["predicted_kl"] == pytest.approx(0.5e-4)
    free = net()
    groups = [{"params": list(free[0].parameters()), "lr": 0.3}, {"params": list(free[2].parameters()), "lr": 2.0}]
    _, uncut, _ = one_step(free, None, torch.optim.SGD(groups))
    first = net()
    groups = [{"params": list(first[0].parameters()), "lr": 0.3}, {"params": list(first[2].parameters()), "lr": 2.0}]
    _, cut, _ = one_step(first, region, torch.optim.SGD(groups))
    assert float(torch.cosine_similarity(uncut, cut, dim=0)) == pytest.approx(1.0)


@pytest.mark.parametrize("of", ["gradient", "step"])
def test_the_kl_predicted_is_the_kl_measured_to_second_order(of: str) -> None:
    """On a softmax network: the relative error vanishes with the length of the step, √cap."""
    x, _ = batch()
    errors = []
    caps = [1e-2, 1e-4, 1e-6]
    for cap in caps:
        model = net()
        before = model(x).detach().log_softmax(-1)
        region = TrustRegion(cap, of=of, curvature="exact")
        kfac, _, _ = one_step(model, region, torch.optim.SGD(model.parameters(), lr=100.0))
        after = model(x).detach().log_softmax(-1)
        measured = float((before.exp() * (before - after)).sum(-1).mean())
        predicted = kfac.metrics()["predicted_kl"]
        assert predicted == pytest.approx(0.5 * cap)
        errors.append(abs(measured / (0.5 * cap) - 1))
    assert errors[0] < 0.3
    for longer, shorter in itertools.pairwise(errors):
        assert shorter < longer / 5  # a tenth of the length: a tenth of the error


def test_a_step_that_is_not_finite_is_not_taken() -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, kl_clip=TrustRegion(1e-3, of="step")).attach(optimizer)
    functional.cross_entropy(model(x), y).backward()
    before = weights(model)
    optimizer.param_groups[0]["weight_decay"] = math.inf
    optimizer.step()
    assert torch.equal(weights(model), before)


def test_other_hooks_see_the_step_that_is_left() -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    seen: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(weights(model)))
    KFAC(model, kl_clip=TrustRegion(1e-6, of="step")).attach(optimizer)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(seen[0], weights(model))


def test_parameters_without_a_block_count_in_the_exact_fisher_only_as_far_as_they_move() -> None:
    """`of="step"` looks at all that moves; the gradient's clip at what K-FAC preconditions."""
    model = net()
    region = TrustRegion(1e-5, of="step", curvature="exact")
    kfac, step, fisher = one_step(model, region, torch.optim.SGD(model.parameters(), lr=1.0), exclude="0.*")
    assert float(step @ fisher @ step) == pytest.approx(1e-5, rel=1e-9)
    assert float(step[:25].norm()) > 0
    kfac.detach()


def test_options() -> None:
    with pytest.raises(ValueError, match=r"of must be one of 'gradient', 'step'"):
        TrustRegion(1e-3, of="weights")
    with pytest.raises(ValueError, match="curvature must be one of"):
        TrustRegion(1e-3, curvature="dense")
    with pytest.raises(ValueError, match="kl_clip must be above 0"):
        TrustRegion(0)
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, kl_clip=TrustRegion(1e-3, curvature="exact")).attach(optimizer)
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="curvature='exact' needs the loss of the batch again"):
        optimizer.step()
    assert repr(TrustRegion(schedules.constant(1))) == ("TrustRegion(constant(1), of='gradient', curvature='factored')")

"""The objective along a direction, in float64 against dense Jacobians, on many kinds of model; it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import exact_fisher, flat, jacobian
from natgrad import Categorical, Gaussian
from natgrad.statistics.predictive import checked_predictive
from natgrad.trust_region.objective import Along, Objective

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def mlp(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator).double(), torch.arange(8) % 3


def direction_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}


def along(
    model: nn.Module,
    closure: Callable[[], Tensor],
    predictive: Any = "categorical",
    *,
    targets: Any = None,
    fisher: bool = True,
) -> tuple[Objective, Along, dict[str, Tensor]]:
    objective = Objective(model, checked_predictive(predictive), lambda: targets)
    direction = direction_of(model)
    return objective, objective.along(closure, dict(model.named_parameters()), direction, fisher=fisher), direction


@pytest.mark.parametrize("predictive", ["categorical", "bernoulli", "gaussian"])
def test_value_slope_and_fisher_equal_the_dense_ones(predictive: str) -> None:
    model, (x, y) = mlp(), batch()

    def closure() -> Tensor:
        return functional.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    objective, found, direction = along(model, closure, predictive)
    delta = flat(list(direction.values()))
    grads = torch.autograd.grad(closure(), list(model.parameters()))
    value, gradient = objective.gradient(closure, dict(model.named_parameters()))
    torch.testing.assert_close(value, closure().detach(), **TIGHT)
    torch.testing.assert_close(flat(list(gradient.values())), flat(list(grads)), **TIGHT)
    dense = exact_fisher(model(x), list(model.parameters()), predictive, 8)
    assert found.fisher is not None
    torch.testing.assert_close(found.fisher, delta @ dense @ delta, **TIGHT)
    torch.testing.assert_close(objective.value(closure), closure().detach(), **TIGHT)


def test_ignored_targets_and_label_weights() -> None:
    model, (x, _) = mlp(), batch()
    y = torch.tensor([0, 1, -100, 2, 1, -100, 0, 2])
    weights = torch.tensor([1.0, 2.0, 0.5]).double()
    predictive = Categorical(ignore_index=-100, label_weights=weights)
    _, found, direction = along(model, lambda: model(x).sum(), predictive, targets=y)
    delta, kept = flat(list(direction.values())), y >= 0
    own = weights[y[kept]]
    parts = [exact_fisher(model(x[kept][i : i + 1]), list(model.parameters()), "categorical", 1) for i in range(6)]
    dense = sum(w * part for w, part in zip(own, parts, strict=True)) / own.sum()
    assert found.fisher is not None
    torch.testing.assert_close(found.fisher, delta @ dense @ delta, **TIGHT)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.label, self.mean = mlp(5), nn.Linear(5, 3).double(), nn.Linear(5, 2).double()
        self.spread = nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Any:
        hidden = self.trunk(x).tanh()
        return {"label": self.label(hidden), "box": (self.mean(hidden), self.spread(hidden).exp())}


def test_heads_and_a_learned_variance() -> None:
    model, (x, _) = TwoHeads(), batch()
    predictive = {"label": "categorical", "box": Gaussian("learned")}
    _, found, direction = along(model, lambda: model(x)["label"].sum(), predictive)
    delta, parameters = flat(list(direction.values())), list(model.parameters())
    out = model(x)
    mean, variance = out["box"]
    dense = exact_fisher(out["label"], parameters, "categorical", 8)
    for root, weight in ((mean, 1 / variance), (variance, 1 / (2 * variance**2))):
        jac = jacobian(root, parameters)
        dense = dense + torch.einsum("ap,a,aq->pq", jac, weight.detach().flatten(), jac) / 8
    assert found.fisher is not None
    torch.testing.assert_close(found.fisher, delta @ dense @ delta, **TIGHT)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: torch.distributions.Normal(out, 0.5),
        lambda out: torch.distributions.Independent(torch.distributions.Bernoulli(logits=out), 1),
        lambda out: torch.distributions.Categorical(logits=out),
    ],
)
def test_a_users_distribution(make: Any) -> None:
    model, (x, _) = mlp(), batch()
    _, found, direction = along(model, lambda: model(x).sum(), make)
    kind = {"Normal": "gaussian", "Independent": "bernoulli", "Categorical": "categorical"}[type(make(x)).__name__]
    dense = exact_fisher(model(x), list(model.parameters()), kind, 8) * (4 if kind == "gaussian" else 1)
    delta = flat(list(direction.values()))
    assert found.fisher is not None
    torch.testing.assert_close(found.fisher, delta @ dense @ delta, **TIGHT)


def test_a_distribution_whose_fisher_is_not_known() -> None:
    model, (x, _) = mlp(), batch()
    with pytest.raises(ValueError, match="curvature='exact' knows categorical, Bernoulli and normal"):
        along(model, lambda: model(x).sum(), lambda out: torch.distributions.Poisson(out.exp()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gauss_newton_is_that_of_the_objective_whatever_its_scale(reduction: str) -> None:
    """Two calls of the model, a squared loss and a classification, and a factor."""
    model, (x, y) = mlp(), batch()

    def of_outputs(one: Tensor, two: Tensor) -> Tensor:
        squared = functional.mse_loss(one, torch.ones_like(one), reduction=reduction)
        return 3 * (squared + functional.cross_entropy(two, y, reduction=reduction))

    def closure() -> Tensor:
        return of_outputs(model(x), model(2 * x))

    objective, found, direction = along(model, closure, fisher=False)
    delta, parameters = flat(list(direction.values())), list(model.parameters())
    hessians: Any = torch.autograd.functional.hessian(of_outputs, (model(x).detach(), model(2 * x).detach()))
    expected = torch.zeros((), dtype=torch.float64)
    derivatives = [jacobian(model(part), parameters) @ delta for part in (x, 2 * x)]
    for i, one in enumerate(derivatives):
        for j, two in enumerate(derivatives):
            expected = expected + one @ hessians[i][j].reshape(len(one), len(two)) @ two
    torch.testing.assert_close(objective.gauss_newton(closure, found), expected, **TIGHT)
    assert found.fisher is None


def test_a_loss_without_curvature() -> None:
    model, (x, _) = mlp(), batch()
    objective, found, _ = along(model, lambda: model(x).abs().mean(), fisher=False)
    assert float(objective.gauss_newton(lambda: model(x).abs().mean(), found)) == 0


class Noisy(nn.Module):
    """Dropout, batch norm, an attribute and a list that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        result: Tensor = self.net(x)
        return result


def test_it_leaves_no_trace_and_draws_the_same_random_numbers_every_time() -> None:
    model, (x, y) = Noisy(), batch()
    functional.cross_entropy(model(x), y).backward()
    before, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def closure() -> Tensor:
        return functional.cross_entropy(model(x), y)

    objective, found, _ = along(model, closure)
    values = [objective.value(closure) for _ in range(3)]
    objective.gauss_newton(closure, found)
    values.append(objective.gradient(closure, dict(model.named_parameters()))[0])
    assert all(torch.equal(value, values[0]) for value in values)
    assert all(torch.equal(one, other) for one, other in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(noise, torch.get_rng_state())
    assert (model.calls, len(model.seen)) == (1, 1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert "forward" not in vars(model)
    assert not model._forward_hooks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x).mean(1))
        return result


class Scaled(nn.Module):
    """Fused attention, which knows no forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(functional.scaled_dot_product_attention(self.q(x), self.k(x), x).mean(1))
        return result


@pytest.mark.parametrize("kind", [Recurrent, Attention, Scaled])
@pytest.mark.parametrize("training", [True, False])
def test_models_with_fused_kernels(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model, x = kind().double().train(training), torch.randn(5, 3, 4).double()
    _, found, direction = along(model, lambda: model(x).sum())
    dense = exact_fisher(model(x), list(model.parameters()), "categorical", 5)
    delta = flat(list(direction.values()))
    assert found.fisher is not None
    torch.testing.assert_close(found.fisher, delta @ dense @ delta, **TIGHT)


def test_a_compiled_model_is_run_eagerly() -> None:
    model, (x, y) = mlp(), batch()
    compiled = torch.compile(model, backend="eager")
    plain = along(model, lambda: functional.cross_entropy(model(x), y))[1]
    found = along(model, lambda: functional.cross_entropy(compiled(x), y))[1]
    assert found.fisher is not None
    assert plain.fisher is not None
    assert torch.equal(found.fisher, plain.fisher)


class _OnlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_errors_say_what_to_do() -> None:
    model, (x, _) = mlp(), batch()
    with pytest.raises(RuntimeError, match="did not call the model"):
        along(model, lambda: torch.zeros(()))
    with pytest.raises(TypeError, match=r"one element, got a tensor of shape \(8, 3\)"):
        along(model, lambda: model(x))
    with pytest.raises(TypeError, match="one element, got float"):
        along(model, lambda: float(model(x).sum()))  # type: ignore[arg-type, return-value]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = _OnlyBackward.apply(self.net(x))
            return result

    odd = Odd()
    with pytest.raises(RuntimeError, match="an operation without: use TrustRegion"):
        along(odd, lambda: odd(x).sum())

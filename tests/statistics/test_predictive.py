"""What an output stands for: Fishers of each predictive against autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from helpers import block_of, exact_fisher, flat, gradients, jacobian, one_step
from natgrad import KFAC, Bernoulli, Categorical, Gaussian

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
B, T, K = 4, 3, 3


class Vector(nn.Module):
    """One vector whose block is exact whatever the predictive: what comes out is the predictive's own Fisher."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.vector, self.make = nn.Parameter(torch.randn(2, K)), make

    def forward(self, x: Tensor) -> Any:
        return self.make((x[..., None] * self.vector.reshape(1, *[1] * (x.dim() - 2), 2, K)).sum(-2).tanh())


def setup(make: Callable[[Tensor], Any] = lambda out: out, *, tokens: bool = False) -> tuple[Vector, Tensor]:
    torch.manual_seed(0)
    shape = (B, T, 2) if tokens else (B, 2)
    return Vector(make).double(), torch.randn(shape).double().requires_grad_()


def exact_block(model: Vector, x: Tensor, predictive: Any, targets: Any = None) -> Tensor:
    kfac = KFAC(model, kl_clip=None, fisher="exact", predictive=predictive)
    kfac.targets = targets
    total = torch.zeros((), dtype=torch.float64)
    for tensor in natgrad.capture.outputs.tensors(model(x)):
        total = total + tensor.sum()
    total.backward()
    kfac.step()
    kfac.detach()
    return block_of(kfac, "vector").to_dense()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("predictive", ["categorical", "bernoulli", "gaussian", Categorical(), Bernoulli, Gaussian(1)])
def test_words_and_classes_mean_the_same(predictive: Any, tokens: bool) -> None:
    model, x = setup(tokens=tokens)
    name = predictive if isinstance(predictive, str) else getattr(predictive, "__name__", type(predictive).__name__)
    truth = exact_fisher(model(x), [model.vector], name.lower(), B * (T if tokens else 1))
    torch.testing.assert_close(exact_block(model, x, predictive), truth, **TIGHT)


@pytest.mark.parametrize("tokens", [False, True])
def test_ignored_targets_do_not_count(tokens: bool) -> None:
    model, x = setup(tokens=tokens)
    targets = torch.randint(0, K, x.shape[:-1])
    targets[0], targets[-1] = -100, -100
    keep = targets != -100
    truth = exact_fisher(model(x)[keep], [model.vector], "categorical", int(keep.sum()))
    torch.testing.assert_close(exact_block(model, x, Categorical(ignore_index=-100), targets), truth, **TIGHT)


def test_label_weights_weigh_cases_by_their_targets() -> None:
    model, x = setup()
    targets, weights = torch.tensor([0, 2, 1, 2]), torch.tensor([0.5, 2.0, 3.0]).double()
    own = weights[targets]
    p = model(x).softmax(-1).detach()
    hessian = own[:, None, None] * (p.diag_embed() - p[:, :, None] * p[:, None, :])
    jac = jacobian(model(x), [model.vector]).reshape(B, K, -1)
    truth = torch.einsum("nap,nab,nbq->pq", jac, hessian, jac) / own.sum()
    torch.testing.assert_close(exact_block(model, x, Categorical(label_weights=weights), targets), truth, **TIGHT)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_empirical_fisher_counts_what_the_loss_averages_over(weighted: bool) -> None:
    """As in cross_entropy: targets that count, or the sum of their weights."""
    model, x = setup(tokens=True)
    targets = torch.randint(0, K, (B, T))
    targets[0, 1:] = 1  # ignored
    weights = torch.tensor([0.5, 2.0, 3.0]).double() if weighted else None
    predictive = Categorical(ignore_index=1, label_weights=weights)
    kfac = KFAC(model, kl_clip=None, predictive=predictive)
    kfac.targets = targets
    loss = functional.cross_entropy(model(x).flatten(0, 1), targets.flatten(), weight=weights, ignore_index=1)
    loss.backward()
    kfac.step()
    rows = []
    for case in range(B):
        parts = functional.cross_entropy(
            model(x[case : case + 1])[0], targets[case], weight=weights, ignore_index=1, reduction="sum"
        )
        rows.append(torch.autograd.grad(parts, model.vector)[0].flatten())
    own = (targets != 1).double() if weights is None else weights[targets] * (targets != 1)
    truth = torch.stack(rows).mT @ torch.stack(rows) / own.sum()
    torch.testing.assert_close(block_of(kfac, "vector").to_dense(), truth, **TIGHT)


def test_the_class_axis_can_be_given() -> None:
    """(B, classes, length), as Conv1d makes them."""
    model, x = setup(lambda out: out.mT, tokens=True)
    truth = exact_fisher(model(x).mT, [model.vector], "categorical", B * T)
    torch.testing.assert_close(exact_block(model, x, Categorical(axis=1)), truth, **TIGHT)


def test_a_fixed_variance_divides_the_fisher() -> None:
    model, x = setup()
    truth = exact_fisher(model(x), [model.vector], "gaussian", B) / 0.25
    torch.testing.assert_close(exact_block(model, x, Gaussian(0.25)), truth, **TIGHT)


def learned(out: Tensor) -> tuple[Tensor, Tensor]:
    return out.sin(), out.exp()


def learned_truth(model: Vector, x: Tensor) -> Tensor:
    mean, variance = model(x)
    v = variance.detach().flatten()
    jac_m, jac_v = jacobian(mean, [model.vector]), jacobian(variance, [model.vector])
    return (jac_m.mT @ (jac_m / v[:, None]) + jac_v.mT @ (jac_v / (2 * v[:, None] ** 2))) / B


def test_a_learned_variance_has_a_fisher_of_its_own() -> None:
    for variance in (learned, lambda out: (out.sin(), out.exp().sum(-1)), lambda out: (out.sin(), out.exp()[:, :1])):
        model, x = setup(variance)
        if variance is learned:
            break
        exact_block(model, x, Gaussian("learned"))  # one a case, as nn.GaussianNLLLoss takes it
    torch.testing.assert_close(exact_block(model, x, Gaussian("learned")), learned_truth(model, x), **TIGHT)


def test_heads_add_up_with_their_own_numbers_of_terms() -> None:
    """One prediction a case, and one a token: the loss is the sum of two means."""
    model, x = setup(lambda out: {"class": out.sum(1), "tokens": out.sin(), "other": out.exp()}, tokens=True)
    truth = exact_fisher(model(x)["class"], [model.vector], "categorical", B)
    truth = truth + exact_fisher(model(x)["tokens"], [model.vector], "gaussian", B * T) / 2.0
    found = exact_block(model, x, {"class": "categorical", "tokens": Gaussian(2.0)})
    torch.testing.assert_close(found, truth, **TIGHT)


def test_heads_have_their_own_targets() -> None:
    model, x = setup(lambda out: {"a": out.cos(), "b": out.sin()})
    targets = torch.tensor([0, 1, 2, 9])
    truth = exact_fisher(model(x)["a"][:3], [model.vector], "categorical", 3)
    truth = truth + exact_fisher(model(x)["b"], [model.vector], "bernoulli", B)
    found = exact_block(model, x, {"a": Categorical(ignore_index=9), "b": "bernoulli"}, {"a": targets})
    torch.testing.assert_close(found, truth, **TIGHT)


def test_a_batch_whose_targets_are_all_ignored_warns() -> None:
    model, x = setup()
    kfac = KFAC(model, kl_clip=None, predictive=Categorical(ignore_index=-100))
    kfac.targets = torch.full((B,), -100)
    with pytest.warns(natgrad.NatgradWarning, match="every target of a batch was ignored at step 0"):
        model(x)


def test_a_head_without_targets_that_count_has_no_part() -> None:
    model, x = setup(lambda out: {"a": out.sin(), "b": out.cos()})
    truth = exact_fisher(model(x)["b"], [model.vector], "bernoulli", B)
    ignored = torch.full((B,), -100)
    found = exact_block(model, x, {"a": Categorical(ignore_index=-100), "b": "bernoulli"}, {"a": ignored})
    torch.testing.assert_close(found, truth, **TIGHT)


def test_the_empirical_fisher_of_heads_with_different_terms_says_so() -> None:
    model, x = setup(lambda out: {"class": out.sin().sum(1), "tokens": out.cos()}, tokens=True)
    _kept = KFAC(model, kl_clip=None, predictive={"class": "categorical", "tokens": "bernoulli"})
    with pytest.raises(ValueError, match="heads have different numbers of terms"):
        model(x)


def test_targets_that_are_no_class_do_not_count_and_targets_are_for_one_step() -> None:
    model, x = setup()
    targets, weights = torch.tensor([0, -100, 1, 2]), torch.ones(K).double()
    truth = exact_fisher(model(x)[targets >= 0], [model.vector], "categorical", 3)
    torch.testing.assert_close(exact_block(model, x, Categorical(label_weights=weights), targets), truth, **TIGHT)
    kfac = KFAC(model, kl_clip=None, fisher="exact", predictive=Categorical(ignore_index=0), factor_update_steps=1)
    kfac.targets = targets
    model(x).sum().backward()
    kfac.step()
    with pytest.raises(ValueError, match="they are missing"):
        model(x)


@pytest.mark.parametrize(
    ("make", "predictive", "targets"),
    [
        (lambda out: out, Categorical(ignore_index=0), torch.tensor([0, 1, 2, 1])),
        (lambda out: out, Gaussian(0.25), None),
        (learned, Gaussian("learned"), None),
        (lambda out: {"a": out.cos(), "b": out.sin()}, {"a": "categorical", "b": "bernoulli"}, None),
    ],
)
def test_sampled_fishers_converge_to_the_exact_ones(make: Any, predictive: Any, targets: Tensor | None) -> None:
    model, x = setup(make)
    exact = exact_block(model, x, predictive, targets)
    errors = []
    for draws in (200, 20_000):
        kfac = KFAC(
            model, kl_clip=None, fisher="sampled", predictive=predictive, generator=torch.Generator().manual_seed(0)
        )
        kfac.targets = None if targets is None else targets.repeat(draws)
        output = model(x.repeat(draws, 1))
        sum(tensor.sum() for tensor in natgrad.capture.outputs.tensors(output)).backward()
        kfac.step()
        errors.append(float((block_of(kfac, "vector").to_dense() - exact).norm() / exact.norm()))
        kfac.detach()
    assert errors[0] < 0.5
    assert errors[1] < errors[0] / 3  # 100 times the draws: a tenth, up to luck


def test_missing_or_misshapen_targets_and_heads_say_so() -> None:
    model, x = setup()
    with pytest.raises(
        ValueError, match=r"need the targets, a tensor of shape \(4,\); they are missing: set kfac.targets"
    ):
        exact_block(model, x, Categorical(ignore_index=0))
    with pytest.raises(ValueError, match=r"they have shape \(3,\)"):
        exact_block(model, x, Categorical(ignore_index=0), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="they are a list"):
        exact_block(model, x, Categorical(ignore_index=0), [0, 1, 2, 0])
    with pytest.raises(TypeError, match="targets must be class numbers"):
        exact_block(model, x, Categorical(ignore_index=0), torch.zeros(4))
    with pytest.raises(TypeError, match=r"Categorical\(axis=...\) must be a whole number, got 'x'"):
        Categorical(axis="x")  # type: ignore[arg-type]
    assert Categorical(label_weights=[1, 2, 3]).label_weights.tolist() == [1.0, 2.0, 3.0]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 label_weights for 3 classes"):
        exact_block(model, x, Categorical(label_weights=torch.ones(2)), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="one non-negative number per class"):
        Categorical(label_weights=torch.tensor([-1.0, 1.0]))
    with pytest.raises(ValueError, match="a positive number or 'learned'"):
        Gaussian(0)
    with pytest.raises(ValueError, match=r"returns \(mean, variance\)"):
        exact_block(model, x, Gaussian("learned"))
    with pytest.raises(ValueError, match="a head 'box', which the model's output does not have: Tensor"):
        exact_block(model, x, {"box": "gaussian"})
    with pytest.raises(ValueError, match="has no head"):
        KFAC(model, predictive={})
    with pytest.raises(ValueError, match=r"predictive\['box'\] must be one of .*did you mean 'gaussian'"):
        KFAC(model, predictive={"box": "gausian"})
    with pytest.raises(TypeError, match="or a callable from the output"):
        KFAC(model, predictive=3)
    with pytest.raises(ValueError, match=r"Categorical\(axis=2\)"):
        exact_block(model, x, Categorical(axis=2))


# A part of the batch


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = functional.dropout(self.norm(self.first(x)) * scale, 0.5, self.training)
        result: Tensor = self.head(hidden)
        return result


def test_a_part_of_the_batch_leaves_no_trace_in_the_model_or_its_random_numbers() -> None:
    states = []
    for fraction in (1.0, 0.25):
        torch.manual_seed(0)
        model, x, y = Noisy().double(), torch.randn(16, 3).double(), torch.arange(16) % 3
        generator = torch.Generator().manual_seed(1)
        kfac = KFAC(model, kl_clip=None, fisher="sampled", stats_fraction=fraction, generator=generator)
        loss = functional.cross_entropy(model(x, scale=1.5), y)
        loss.backward()
        states.append([loss.detach(), *gradients(model).values(), *model.buffers(), torch.get_rng_state()])
        kfac.step()
        block = block_of(kfac, "first.weight")
        assert float(block.straight.row.weight) == 16 * fraction
        assert block.straight.counts.tolist() == [16 * fraction] * 2
        kfac.detach()
    for whole, part in zip(*states, strict=True):
        assert torch.equal(whole, part)


def test_a_part_of_the_batch_has_the_factors_of_these_cases_and_repeats_from_a_generator() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)).double(),
        torch.randn(8, 3).double(),
    )
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        kfac = one_step(model, x, lambda out: out.sum(), fisher="sampled", stats_fraction=0.5, generator=generator)
        found.append(flat([block.to_dense() for block in kfac.blocks]))
        kfac.detach()
    assert torch.equal(*found)
    chosen = torch.randperm(8, generator=torch.Generator().manual_seed(5))[:4].sort().values
    a = x[chosen]
    torch.testing.assert_close(kfac.blocks[0].estimate().column[0], a.mT @ a / 4, **TIGHT)


def test_a_part_is_counted_only_with_a_backward_of_the_whole() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3)).double(), torch.randn(8, 3).double()
    kfac = KFAC(model, kl_clip=None, fisher="exact", stats_fraction=0.5, factor_update_steps=1)
    for _ in range(3):
        model(x)  # nobody goes back
    model(x).square().sum().backward()
    kfac.step()
    assert kfac.blocks[0].straight.counts.tolist() == [4.0, 4.0]


def test_impossible_fractions_say_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    for value in (0, 1.5, -1):
        with pytest.raises(ValueError, match="stats_fraction must be above 0 and at most 1"):
            KFAC(model, fisher="sampled", stats_fraction=value)

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x.mean(0))
            return result

    model = TimeFirst()
    _kept = KFAC(model, fisher="sampled", stats_fraction=0.5)
    with pytest.raises(ValueError, match="no input has the batch of 4 along its first axis"):
        model(torch.randn(7, 4, 3))

"""Wrong arguments and models: what the message says, and that nothing changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import natgrad
from helpers import gradients
from natgrad import KFAC, AdaptiveDamping, NatgradWarning, TrustRegion


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module) -> None:
    functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "eigne"}, "solver must be one of 'eigen', 'inverse', got 'eigne' .did you mean 'eigen'"),
        ({"damping_rule": "joined"}, "did you mean 'joint'"),
        ({"solver": "inverse", "damping_rule": "joint"}, "needs solver='eigen'"),
        ({"fisher": "emperical"}, "did you mean 'empirical'"),
        ({"predictive": "softmax"}, "predictive must be one of"),
        ({"sharing": "reduced"}, "sharing must be one of"),
        ({"damping": 0.0}, "damping must be above 0 and finite, got 0.0"),
        ({"damping": float("nan")}, "damping must be above 0"),
        ({"damping": "small"}, "damping must be a number or a callable"),
        ({"factor_decay": 1.0}, "factor_decay must be at least 0 and below 1, got 1.0"),
        ({"kl_clip": -1.0}, "kl_clip must be above 0"),
        ({"factor_update_steps": 0}, "factor_update_steps must be at least 1"),
        ({"inv_update_steps": 2.5}, "inv_update_steps must be a whole number"),
        ({"loss_terms": 0}, "loss_terms must be above 0"),
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"max_factor_size": 0}, "max_factor_size must be a whole number of at least 1"),
        ({"optimizer": "sgd"}, "optimizer must be a torch.optim.Optimizer, got str"),
        ({"dampign": 1.0}, "dampign"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises((ValueError, TypeError), match=message):
        KFAC(model, **options)
    assert not model._forward_hooks


def test_a_bound_on_age_that_cannot_be_kept_is_told() -> None:
    with pytest.warns(NatgradWarning, match="max_staleness=5 is not above inv_update_steps=20"):
        KFAC(mlp(), overlap="background", max_staleness=5, inv_update_steps=20)
    KFAC(mlp(), overlap="background", max_staleness=21, inv_update_steps=20)
    KFAC(mlp(), overlap="background", max_staleness=5, inv_update_steps=lambda step: 20)


def test_who_forgets_to_call_it_is_told_once() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, lr=0.1)

    def batches(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()

    batches(20)  # the gradients of 19 have been thrown away
    with pytest.warns(NatgradWarning, match=r"20 batches in a row .* kfac.attach\(optimizer\)"):
        batches(1)
    batches(40)
    kfac.step()
    batches(12)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("dampings", r" \(did you mean 'damping'\?\)"),
        ("kl_clipping", r" \(did you mean 'kl_clip'\?\)"),
        ("zzz", ""),
    ],
)
def test_an_unknown_option_comes_with_the_one_that_was_meant(option: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^KFAC has no option '{option}'{hint}$"):
        KFAC(mlp(), **{option: 1})


def test_what_is_set_on_a_kfac_is_checked_when_it_is_set() -> None:
    kfac = KFAC(mlp(), kl_clip=None)
    before = kfac.clock
    with pytest.raises(TypeError, match="^kfac.objective must be a function without arguments, or None, got 3"):
        kfac.objective = 3  # type: ignore[assignment]
    for wrong in (3, None):
        with pytest.raises(TypeError, match=r"^kfac\.clock must be a natgrad\.Clock, such as natgrad\.Clock\(device\)"):
            kfac.clock = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"^kfac\.clock got the class Clock: call it, natgrad\.Clock\(\.\.\.\)"):
        kfac.clock = natgrad.Clock  # type: ignore[assignment]
    assert kfac.objective is None
    assert kfac.clock is before
    kfac.objective = None
    kfac.clock = natgrad.Clock()


@pytest.mark.parametrize("option", ["damping", "stats_fraction", "inv_update_steps"])
def test_options_are_not_set_later_without_effect(option: str) -> None:
    kfac = KFAC(mlp())
    with pytest.raises(
        AttributeError, match=rf"^{option} is an option of construction: KFAC\(model, {option}=\.\.\.\)"
    ):
        setattr(kfac, option, 2)
    assert kfac.damping == 1e-3


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("overlap", natgrad.Background),
        ("overlap", natgrad.Staggered),
        ("grafting", natgrad.Grafting),
        ("strategy", natgrad.Strategy),
        ("kl_clip", natgrad.TrustRegion),
        ("damping", natgrad.AdaptiveDamping),
    ],
)
def test_a_class_is_to_be_called(option: str, given: Any) -> None:
    name = given.__name__
    with pytest.raises(TypeError, match=rf"^{option} got the class {name}: call it, natgrad\.{name}\(\.\.\.\)"):
        KFAC(mlp(), **{option: given})


def test_a_callable_that_returns_nonsense_names_the_step() -> None:
    model = mlp()
    kfac = KFAC(model, lr=0.1, damping=lambda step: -1.0)
    backward(model)
    before = gradients(model)
    with pytest.raises(ValueError, match="damping must be above 0 and finite, got -1.0 at step 0"):
        kfac.step()
    assert all(torch.equal(before[name], grad) for name, grad in gradients(model).items())
    assert kfac.steps == 0


def test_not_a_model() -> None:
    with pytest.raises(TypeError, match="takes the model itself, an nn.Module, got generator"):
        KFAC(mlp().parameters())  # type: ignore[arg-type]


def test_no_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        KFAC(nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match="no trainable parameters"):
        KFAC(mlp().requires_grad_(False))


def test_no_supported_parameters() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    _kept = KFAC(model, kl_clip=None, vectors="optimizer")
    with pytest.raises(ValueError, match=r"no parameter of this model can be preconditioned .*0\.weight: vectors="):
        model(torch.randn(6, 4))
    assert not model._forward_hooks  # the model works as before
    model(torch.randn(6, 4))


def test_mixed_and_meta_devices() -> None:
    model = mlp()
    model[2] = nn.Linear(5, 3, device="meta")
    with pytest.raises(ValueError, match=r"one device: .*0\.bias on cpu, 2\.bias on meta"):
        KFAC(model)
    with pytest.raises(ValueError, match="materialise the model"):
        KFAC(nn.Linear(4, 3, device="meta"))


@pytest.mark.parametrize("option", [{"damping": AdaptiveDamping()}, {"kl_clip": TrustRegion(1.0, curvature="exact")}])
def test_what_looks_at_one_batch_refuses_several_ranks(option) -> None:
    class Replicated(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module, self.process_group = module, SimpleNamespace(size=lambda: 4)

    with pytest.raises(ValueError, match="replicated on 4 ranks"):
        KFAC(Replicated(mlp()), **option)


def test_clip_without_a_learning_rate() -> None:
    model = mlp()
    kfac = KFAC(model)
    backward(model)
    before = gradients(model)
    with pytest.raises(ValueError, match=r"pass optimizer= or lr=, attach\(optimizer\), or .* kl_clip=None"):
        kfac.step()
    assert all(torch.equal(before[name], grad) for name, grad in gradients(model).items())


def test_step_before_backward() -> None:
    kfac = KFAC(mlp(), lr=0.1)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        kfac.step()


def test_gradients_without_any_pass_of_the_model() -> None:
    model = mlp()
    kfac = KFAC(model, lr=0.1)
    x = torch.randn(6, 4)
    functional.cross_entropy(model[2](model[1](model[0](x))), torch.arange(6) % 3).backward()
    with pytest.raises(RuntimeError, match=r"saw no forward pass .*kfac\.capture\(loss\)"):
        kfac.step()


def test_a_covered_parameter_with_a_gradient_but_no_statistics() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = nn.Linear(4, 3), nn.Linear(4, 3), True

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) + self.b(x.cos()) if self.both else self.a(x)
            return result

    model = Two()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    backward(model)
    kfac.step()
    model.both = False
    model.zero_grad()
    x = torch.randn(6, 4)
    (functional.cross_entropy(model(x), torch.arange(6) % 3) + model.b(x).sum()).backward()
    with pytest.raises(RuntimeError, match=r"b\.weight: a gradient but no statistics .* exclude="):
        kfac.step()


def test_attach() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model).attach(optimizer)
    with pytest.raises(RuntimeError, match=r"attached to an optimizer already: detach\(\)"):
        kfac.attach(optimizer)
    with pytest.raises(TypeError, match="attach takes a torch.optim.Optimizer, got Sequential"):
        KFAC(model).attach(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        KFAC(model).attach(torch.optim.SGD(mlp().parameters(), lr=0.1))


def test_an_explicit_step_of_an_attached_kfac() -> None:
    model = mlp()
    kfac = KFAC(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model)
    with pytest.raises(RuntimeError, match="twice would be once too often"):
        kfac.step()


class Twice(torch.optim.SGD):
    """Computes gradients twice a step, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, r"several times a step, .* call kfac\.step\(\) at the end of the closure"),
        (torch.optim.LBFGS, "LBFGS runs its closure many times a step"),
    ],
)
def test_an_optimizer_that_runs_its_closure_more_than_once(kind: Any, message: str) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    KFAC(model).attach(optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 0.0

    with pytest.raises(RuntimeError, match=message):
        optimizer.step(closure)


def test_reentrant_checkpointing_names_the_fix() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.region, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(checkpoint(self.region, self.stem(x), use_reentrant=True))
            return result

    model = Reentrant()
    kfac = KFAC(model, kl_clip=None)
    with pytest.raises(RuntimeError, match=r"hides region\.weight, region\.bias from K-FAC: .*use_reentrant=False"):
        backward(model)
    assert "reentrant" in kfac.report()["region.weight"].reason
    kfac = KFAC(model, kl_clip=None, exclude="region.*")
    backward(model)
    kfac.step()
    assert [block.names[0] for block in kfac.blocks] == ["stem.weight", "head.weight"]


def test_complex_and_integer_parameters_are_left_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.shift = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.phase).real + self.shift

    model = Odd()
    kfac = KFAC(model, kl_clip=None)
    backward(model)
    kfac.step()
    assert kfac.report()["phase"].reason == "complex64 parameters are not supported"
    assert kfac.report()["shift"].reason == "int64 parameters are not supported"
    assert kfac.report()["layer.weight"].covered


@pytest.mark.parametrize("options", [{}, {"terms": 6}, {"fisher": "sampled"}, {"loss_terms": 6}])
@pytest.mark.parametrize("trained", [False, True])
def test_capture_of_another_models_loss(options: dict[str, Any], trained: bool) -> None:
    terms = {"terms": options["terms"]} if "terms" in options else {}
    model, other = mlp(), mlp()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, **{key: options[key] for key in options.keys() - terms})
    if trained:
        backward(model)
        kfac.step()
    output = model(torch.randn(6, 4))
    with pytest.raises(ValueError, match=r"^this loss was not made of this model: .*\(0\.weight, 0\.bias, 2\.weight"):
        kfac.capture(other(torch.randn(6, 4)).square().mean(), **terms)
    functional.cross_entropy(output, torch.arange(6) % 3).backward()
    kfac.step()  # what the model's own call gives is still there
    assert all(line.covered for line in kfac.report())


def test_capture_of_a_loss_with_one_of_the_models_modules() -> None:
    model, other = mlp(), mlp()
    kfac = KFAC(model, kl_clip=None)
    model[2] = nn.Linear(5, 3)  # exchanged since
    kfac.capture(model[2](other[1](other[0](torch.randn(6, 4)))).square().mean(), terms=6)


def test_capture() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    with pytest.raises(ValueError, match="attached to its graph"):
        kfac.capture(torch.ones(()))
    with pytest.raises(ValueError, match="how many terms"):
        kfac.capture(model[0](torch.randn(2, 4)).sum())
    sampled = KFAC(model, kl_clip=None, fisher="sampled")
    with pytest.raises(ValueError, match="outputs="):
        sampled.capture(model(torch.randn(2, 4)).sum())


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_predictives_that_do_not_fit_the_output(fisher: str) -> None:
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    _kept = KFAC(flat, kl_clip=None, fisher=fisher)
    with pytest.raises(ValueError, match="needs an output with a class axis"):
        flat(torch.randn(6, 4))
    model = mlp()
    _kept = KFAC(model, kl_clip=None, fisher=fisher, predictive=lambda out: out)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="must return a torch.distributions object, got Tensor"):
        model(torch.randn(6, 4))


def test_exact_fisher_of_an_unknown_distribution() -> None:
    model = mlp()
    _kept = KFAC(model, kl_clip=None, fisher="exact", predictive=lambda out: torch.distributions.Laplace(out, 1.0))
    with pytest.raises(ValueError, match="use fisher='sampled'"):
        model(torch.randn(6, 4))


def test_to_dense_before_statistics() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    assert kfac.blocks == []
    backward(model)
    with pytest.raises(RuntimeError, match=r"block of 0\.weight, 0\.bias has no statistics yet"):
        kfac.blocks[0].to_dense()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stats_fraction": "half"}, "stats_fraction must be above 0 and at most 1, got 'half'"),
        ({"stats_fraction": True}, "stats_fraction must be above 0"),
        ({"max_vector_size": 10.5}, "max_vector_size must be a whole number of at least 1, got 10.5"),
        ({"doubly_factored_above": "4096"}, "doubly_factored_above must be a whole number .*, or None for never"),
        ({"exclude": None}, r"exclude takes name patterns, such as .*, got None"),
        ({"exclude": [3]}, "exclude takes name patterns"),
        ({"exclude": ["*"]}, r"exclude=\['\*'\] leaves no parameter"),
        ({"sharing": {0: "reduce"}}, "sharing takes name patterns"),
        ({"sharing": {"nothing*": "reduce"}}, "sharing='nothing\\*' matches no parameter"),
        ({"sharing": "redcue"}, "sharing must be one of 'expand', 'reduce', got 'redcue' .did you mean 'reduce'"),
        ({"batch_axis": "0"}, "batch_axis must be a whole number, got '0'"),
        ({"doubly_factored": True}, "doubly_factored takes name patterns"),
        ({"vectors": "non"}, "vectors must be one of 'full', 'diagonal', 'optimizer'"),
        ({"fallback": None}, "fallback must be one of 'per-case', 'batch', 'optimizer'"),
        ({"unfuse_recurrent": "no"}, "unfuse_recurrent must be True or False, got 'no'"),
        ({"damping": "1e-3"}, "damping must be a number or a callable"),
        ({"damping_rule": ""}, "damping_rule must be one of"),
    ],
)
def test_arguments_of_the_wrong_kind_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        KFAC(mlp(), **options)


def test_a_rate_beside_an_attached_optimizer_is_refused() -> None:
    model = mlp()
    kfac = KFAC(model, lr=0.5)
    with pytest.raises(ValueError, match="lr= is for loops without an optimizer"):
        kfac.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="load_state_dict takes what state_dict"):
        kfac.load_state_dict("x")
    assert "0 blocks, 0 steps taken" in repr(kfac)

"""natgrad.optim: the same trajectory as the optimizer with a KFAC attached, closures, groups, checkpoints, errors."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional

from natgrad import KFAC
from natgrad.averaging import PolyakAverage
from natgrad.optim import KFACSGD, KFACAdam, KFACAdamW, _base_of

CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (KFACSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-2, "nesterov": True}),
    "adam": (KFACAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 1e-2}),
    "adamw": (KFACAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
}
OPTIONS: dict[str, Any] = {"damping": 1e-2, "factor_update_steps": 2, "inv_update_steps": 3}
every_class = pytest.mark.parametrize("name", CLASSES)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(step)), torch.arange(12) % 3


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: Any, steps: range, after: Callable[[], Any] = lambda: None) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        after()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_with_closures(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:

        def closure(step: int = step) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def separate(name: str, model: nn.Module, params: Any = None, **more: Any) -> Any:
    """The optimizer with a KFAC attached, in two objects."""
    _, base, options = CLASSES[name]
    optimizer = base(model.parameters() if params is None else params, **(options | more))
    KFAC(model, **OPTIONS).attach(optimizer)
    return optimizer


def joined(name: str, model: nn.Module, **more: Any) -> Any:
    cls, _, options = CLASSES[name]
    return cls(model, **options, **OPTIONS, **more)


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@every_class
@pytest.mark.parametrize("more", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}])
def test_the_same_trajectory_as_two_objects(name: str, more: dict[str, Any]) -> None:
    model = network()
    expected = train(model, separate(name, model, **more), range(8))
    model = network()
    optimizer = joined(name, model, **more)
    assert isinstance(optimizer, CLASSES[name][1])
    assert_equal(train(model, optimizer, range(8)), expected)
    assert optimizer.kfac.steps == 8
    assert all(line.covered for line in optimizer.kfac.report())
    assert all(optimizer.param_groups[0][key] == value for key, value in more.items())


@every_class
def test_closures(name: str) -> None:
    model = network()
    losses: list[float] = []
    optimizer = separate(name, model)
    for step in range(6):
        losses.append(loss_of(model, step).item())
        expected = train(model, optimizer, range(step, step + 1))
    model = network()
    with torch.no_grad():  # torch's contract: the closure runs with gradients all the same
        optimizer = joined(name, model)
        assert train_with_closures(model, optimizer, range(6)) == losses
    assert_equal([p.detach() for p in model.parameters()], expected)


@every_class
@pytest.mark.parametrize("plain_made_before", [True, False])
def test_hooks_run_once_a_step_and_after_the_closure(
    name: str, plain_made_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch wraps the step of a class when its first optimizer is made: ours must not depend on who came first."""
    base = CLASSES[name][1]
    if plain_made_before:
        base(network().parameters(), lr=0.1)
        assert base.step.hooked
    else:
        bare = base.step.__wrapped__ if getattr(base.step, "hooked", False) else base.step
        monkeypatch.setattr(base, "step", bare)
        assert not getattr(base.step, "hooked", False)
    model = network()
    optimizer = joined(name, model)
    calls: list[str] = []

    def seen(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(f"{what} {'with' if model[0].weight.grad is not None else 'without'} gradients")

    optimizer.register_step_pre_hook(seen("before"))
    optimizer.register_step_post_hook(seen("after"))
    expected = ["before with gradients", "after with gradients"]
    for step in range(3):
        train_with_closures(model, optimizer, range(step, step + 1))
        assert calls == expected
        calls.clear()
    train(model, optimizer, range(1))
    assert calls == expected
    assert optimizer.kfac.steps == 4


@pytest.mark.parametrize("plain_made_before", [True, False])
def test_a_step_of_ones_own_is_preconditioned_once(plain_made_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs the hooks of both where a subclass's step calls its base's; attached to a plain subclass too."""

    class Mine(KFACSGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure == "fails":
                raise MemoryError
            return super().step(closure)

    if plain_made_before:
        torch.optim.SGD(network().parameters(), lr=0.1)
    else:
        bare = getattr(torch.optim.SGD.step, "__wrapped__", torch.optim.SGD.step)
        monkeypatch.setattr(torch.optim.SGD, "step", bare)
    results = []
    for kind in ("mine", "attached", "reference"):
        model = network()
        if kind == "mine":
            optimizer: Any = Mine(model, lr=0.1)
            kfac = optimizer.kfac
        else:
            optimizer = (Plain if kind == "attached" else torch.optim.SGD)(model.parameters(), lr=0.1)
            kfac = KFAC(model).attach(optimizer)
        train_with_closures(model, optimizer, range(2))
        train(model, optimizer, range(2, 4))
        assert kfac.steps == 4
        results.append([p.detach().clone() for p in model.parameters()])
    assert_equal(results[0], results[2])
    assert_equal(results[1], results[2])


def test_a_step_that_failed_is_over() -> None:
    """Its arguments live on in the traceback; the next step is preconditioned all the same."""

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError
            return super().step(closure)

    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    kfac = KFAC(model).attach(optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(MemoryError) as kept:
        optimizer.step()
    optimizer.fails = False
    train(model, optimizer, range(1, 3))
    assert kfac.steps == 3
    assert kept.tb is not None


@every_class
def test_groups_and_schedulers(name: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].weight, "weight_decay": 0.3}]

    results = []
    for make in (
        lambda model: separate(name, model, groups(model)),
        lambda model: joined(name, model, params=groups(model)),
    ):
        model = network()
        optimizer = make(model)
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, CLASSES[name][2]["lr"]]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, range(3), scheduler.step)
        optimizer.add_param_group({"params": [model[2].bias], "lr": 0.03})
        results.append(train(model, optimizer, range(3, 6)))
        assert optimizer.param_groups[0]["lr"] == 0.02 / 8
    assert_equal(*results)


def test_parameters_of_other_models_and_with_names() -> None:
    model, other = network(), nn.Linear(2, 2)
    groups = [{"params": model.named_parameters()}, {"params": other.named_parameters(), "lr": 0.5}]
    optimizer = KFACSGD(model, params=groups, lr=0.1)
    before = other.weight.detach().clone()
    optimizer.zero_grad()
    (loss_of(model, 0) + other(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(other.weight.data, before - 0.5)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_together_with_an_average() -> None:
    model = network()
    optimizer = KFACSGD(model, lr=0.1)
    average = PolyakAverage(model, decay=0.5).attach(optimizer)
    train_with_closures(model, optimizer, range(3))
    assert average.updates == optimizer.kfac.steps == 3
    with average.applied(), pytest.raises(RuntimeError, match="would train the average"):
        optimizer.step()
    assert optimizer.kfac.steps == 3


def test_a_compiled_step() -> None:
    model = network()
    expected = train(model, joined("sgd", model), range(4))
    model = network()
    optimizer = joined("sgd", model)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for index in range(4):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        step()
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.data, other)


@every_class
def test_detached_it_is_the_plain_optimizer(name: str) -> None:
    _, base, options = CLASSES[name]
    model = network()
    expected = train(model, base(model.parameters(), **options), range(3))
    model = network()
    optimizer = joined(name, model)
    optimizer.kfac.detach()
    assert_equal(train(model, optimizer, range(3)), expected)


# GradScaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_is_passed_on(fused: bool) -> None:
    def run(make: Callable[[nn.Module, Any], Any]) -> list[Tensor]:
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = make(model, scaler)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def two_objects(model: nn.Module, scaler: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        KFAC(model, **OPTIONS).attach(optimizer, grad_scaler=scaler)
        return optimizer

    expected = run(two_objects)
    assert_equal(
        run(lambda model, scaler: KFACSGD(model, lr=0.1, fused=fused, grad_scaler=scaler, **OPTIONS)), expected
    )
    model = network()
    unscaled = train(model, KFACSGD(model, lr=0.1, **OPTIONS), range(4))
    for one, other in zip(expected, unscaled, strict=True):
        torch.testing.assert_close(one, other)


# Checkpoints


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_class
@pytest.mark.parametrize("stop", [1, 5])
def test_continues_bit_for_bit(name: str, stop: int) -> None:
    model = network()
    optimizer = joined(name, model)
    train(model, optimizer, range(stop))
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert state["optimizer"].keys() == {"state", "param_groups", "kfac"}
    whole = train(model, optimizer, range(stop, 9))

    model = network()
    optimizer = joined(name, model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.kfac.steps == stop
    assert_equal(train(model, optimizer, range(stop, 9)), whole)


@every_class
def test_states_of_the_plain_optimizer_go_both_ways(name: str) -> None:
    _, base, options = CLASSES[name]
    model = network()
    plain = base(model.parameters(), **options)
    train(model, plain, range(3))
    optimizer = joined(name, model, foreach=False)
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert optimizer.kfac.steps == 0
    state = optimizer.state_dict()
    for index, entry in plain.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][index][key]))
    train(model, optimizer, range(3))
    assert optimizer.kfac.steps == 3
    base(model.parameters(), **options).load_state_dict(optimizer.state_dict())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = network()
    optimizer = joined("sgd", model)
    train(model, optimizer, range(3))
    fitting = optimizer.state_dict()
    lr, momentum = optimizer.param_groups[0]["lr"], optimizer.state[model[0].weight]["momentum_buffer"].clone()

    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    foreign = KFACSGD(other, lr=0.7, momentum=0.9)
    train(other, foreign, range(2))
    wrong_kfac = foreign.state_dict()
    with pytest.raises(ValueError, match=r"0\.weight has shape \(5, 4\)"):
        optimizer.load_state_dict(wrong_kfac)
    wrong_groups = fitting | {"param_groups": fitting["param_groups"] * 2}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(wrong_groups)
    assert optimizer.param_groups[0]["lr"] == lr
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)
    assert optimizer.kfac.steps == 3
    train(model, optimizer, range(3, 5))


@every_class
def test_distributed_checkpoints_hold_the_optimizers_own_state(name: str) -> None:
    """torch.distributed.checkpoint keeps "state" and "param_groups" alone: K-FAC's own state goes beside it."""
    model = network()
    optimizer = joined(name, model)
    empty = get_optimizer_state_dict(model, optimizer)  # takes a step of its own to create the state
    assert optimizer.kfac.steps == 0
    assert empty.keys() == {"state", "param_groups"}
    train(model, optimizer, range(4))
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "kfac": optimizer.kfac.state_dict()}
    state = copy.deepcopy(state | {"model": model.state_dict()})
    whole = train(model, optimizer, range(4, 8))

    model = network()
    optimizer = joined(name, model)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.kfac.steps == 0
    optimizer.kfac.load_state_dict(state["kfac"])
    assert_equal(train(model, optimizer, range(4, 8)), whole)


# Errors


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("dampin", "damping"),
        ("learning_rate", None),
        ("momentun", "momentum"),
        ("factor_update_step", "factor_update_steps"),
    ],
)
def test_an_unknown_option_names_the_nearest(option: str, near: str | None) -> None:
    model = network()
    hint = r"\(SGD's and KFAC's are known\)" if near is None else rf"\(did you mean '{near}'\?\)"
    with pytest.raises(TypeError, match=f"KFACSGD has no option '{option}' .*{hint}"):
        KFACSGD(model, lr=0.1, **{option: 0.1})
    assert not model._forward_hooks


def test_other_errors_leave_the_model_as_it_was() -> None:
    model = network()
    with pytest.raises(TypeError, match="KFACAdam takes the model itself, .* got generator; .* params="):
        KFACAdam(model.parameters(), lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no option 'optimizer'"):
        KFACSGD(model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="KFACAdamW has no option 'momentum'"):
        KFACAdamW(model, momentum=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        KFACSGD(model, lr=-1.0)
    with pytest.raises(ValueError, match="damping must be above 0"):
        KFACSGD(model, lr=0.1, damping=-1)
    with pytest.raises(ValueError, match="holds none of the model's parameters") as caught:
        KFACSGD(model, params=nn.Linear(2, 2).parameters(), lr=0.1)
    assert not model._forward_hooks, caught  # while someone looks at the error, too


@every_class
def test_copies_are_refused(name: str) -> None:
    model = network()
    optimizer = joined(name, model)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"a {type(optimizer).__name__} cannot be copied or pickled"):
            duplicate(optimizer)
    train(model, optimizer, range(2))


@every_class
def test_only_the_learning_rate_is_an_option_of_both(name: str) -> None:
    base = _base_of(CLASSES[name][0])
    assert base is CLASSES[name][1]
    both = inspect.signature(base).parameters.keys() & inspect.signature(KFAC).parameters.keys()
    assert both == {"lr"}


def test_the_learning_rate_may_come_second() -> None:
    model = network()
    assert KFACSGD(model, 0.3).param_groups[0]["lr"] == 0.3
    with pytest.raises(TypeError, match="lr is a number"):
        KFACSGD(model, lr=lambda step: 0.1)

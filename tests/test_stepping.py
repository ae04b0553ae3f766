"""How far to step, in the company of everything else. Each of these was once wrong."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import flat
from natgrad import KFAC, AdaptiveDamping, PolyakAverage, TrustRegion, schedules
from natgrad.capture.eager import _shared

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=generator).double(), torch.arange(16) % 3


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    x, y = batch(seed)
    return functional.cross_entropy(model(x), y)


def weights(model: nn.Module) -> Tensor:
    return flat([p.detach().clone() for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kfac: KFAC, steps: int) -> list[float]:
    used = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        kfac.objective = lambda seed=step: loss_of(model, seed)
        used.append(kfac.damping)
        optimizer.step()
    return used


# Accumulation


def test_a_window_that_is_shorter_than_what_its_losses_are_divided_by() -> None:
    """The last one of an epoch, in loops that always divide by 4: the Fisher is that of its own cases."""
    blocks = []
    for divisor, parts in ((4, 1), (1, 1), (4, 4)):
        model = net()
        kfac = KFAC(model, kl_clip=None, accumulated_loss=divisor)
        x, y = batch()
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (functional.cross_entropy(model(part_x), part_y) / divisor).backward()
        kfac.step()
        blocks.append([block.to_dense() for block in kfac.blocks])
    for other in blocks[1:]:
        for one, two in zip(blocks[0], other, strict=True):
            torch.testing.assert_close(one, two, **TIGHT)


def test_loss_terms_may_leave_some_batches_to_be_counted() -> None:
    model = net()
    kfac = KFAC(model, kl_clip=None, loss_terms=lambda step: None)  # type: ignore[arg-type, return-value]
    loss_of(model).backward()
    kfac.step()
    assert float(kfac.blocks[0].estimate().scale[0]) == 1.0


# Objectives


def test_what_a_closure_does_to_the_outputs_in_place_is_done_once() -> None:
    ratios = []
    for in_place in (False, True):
        model, (x, y) = nn.Linear(4, 3).double(), batch()
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, damping=AdaptiveDamping(0.1, every=1)).attach(optimizer)

        def loss(m: nn.Module = model, changes: bool = in_place, x: Tensor = x, y: Tensor = y) -> Tensor:
            output = m(x)
            output = output.mul_(5) if changes else output * 5
            return functional.cross_entropy(output, y)

        loss().backward()
        kfac.objective = loss
        optimizer.step()
        ratios.append(kfac.metrics()["reduction_ratio"])
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-9)


def test_a_penalty_over_parameters_that_were_listed_before() -> None:
    """A quadratic: ρ = 1, although the list does not know of the positions that the objective is looked at."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2).double(), torch.randn(16, 4).double(), torch.randn(16, 2).double()
    listed = list(model.parameters())
    optimizer = torch.optim.SGD(listed, lr=0.5)
    kfac = KFAC(model, damping=AdaptiveDamping(1.0, every=1), l2=0.2, predictive="gaussian").attach(optimizer)

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / 32 + 0.1 * sum(p.square().sum() for p in listed)

    kfac.objective = loss
    loss().backward()
    optimizer.step()
    assert kfac.metrics()["reduction_ratio"] == pytest.approx(1.0, abs=1e-9)


def test_gradients_that_the_loop_has_clipped_say_nothing_of_the_model() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2).double(), torch.randn(16, 4).double(), torch.randn(16, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kfac = KFAC(model, damping=AdaptiveDamping(1.0, every=1), predictive="gaussian").attach(optimizer)
    kfac.objective = lambda: (model(x) - y).square().sum() / 32
    kfac.objective().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    assert kfac.metrics()["reduction_ratio"] == pytest.approx(1.0, abs=1e-9)


def test_an_objective_that_differentiates_inside() -> None:
    """A physics-informed loss: the output's derivative by the input is part of it, which no replay of outputs has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    damping = AdaptiveDamping(1.0, every=1)
    kfac = KFAC(model, damping=damping, predictive="gaussian", loss_terms=16).attach(optimizer)
    x = torch.linspace(0, 1, 16).double()[:, None]

    def loss() -> Tensor:
        inputs = x.clone().requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return (slope + output).square().mean() + output[0].square().sum()

    loss().backward()
    kfac.objective = loss
    with pytest.raises(RuntimeError, match="does it differentiate the model"):
        optimizer.step()
    kfac.detach()
    kfac = KFAC(model, kl_clip=TrustRegion(1e-3, curvature="exact"), predictive="gaussian", loss_terms=16)
    kfac.attach(optimizer)
    optimizer.zero_grad()
    loss().backward()
    kfac.objective = loss
    optimizer.step()  # the Fisher asks for outputs alone
    assert kfac.metrics()["predicted_kl"] is not None


def test_a_part_of_the_batch_for_statistics_and_the_objective_in_between() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"fisher": "sampled", "stats_fraction": 0.5, "factor_update_steps": 1, "inv_update_steps": 1}
    kfac = KFAC(model, damping=AdaptiveDamping(0.1, every=1), **options).attach(optimizer)
    assert len(set(train(model, optimizer, kfac, 4))) > 1
    assert float(kfac.blocks[0].straight.row.weight) < 16 * 4


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_whose_objective_fails_is_not_taken(optimizer: str) -> None:
    model = net()
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    stepper = kinds[optimizer](model.parameters(), lr=10.0)
    kfac = KFAC(model, kl_clip=TrustRegion(1e-3, of="step", curvature="exact")).attach(stepper)
    loss_of(model).backward()
    before = weights(model)

    def fails() -> Tensor:
        raise MemoryError

    kfac.objective = fails
    with pytest.raises(MemoryError):
        stepper.step()
    assert torch.equal(weights(model), before)
    assert not model._forward_hooks
    train(model, stepper, kfac, 2)
    assert not torch.equal(weights(model), before)


def test_a_step_that_is_tried_again_after_its_objective_failed() -> None:
    results = []
    for fails_first in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        region = TrustRegion(1e-3, curvature="exact")
        kfac = KFAC(model, kl_clip=region, raw_momentum=0.9, grafting="adam", factor_update_steps=10)
        kfac.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if fails_first and step == 1:
                kfac.objective = lambda: 1.0  # type: ignore[assignment, return-value]
                with pytest.raises(TypeError, match="one element, got float"):
                    optimizer.step()
            kfac.objective = lambda m=model, seed=step: loss_of(m, seed)
            optimizer.step()
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=0, atol=0)


# Adaptive damping


def test_one_object_for_several_kfacs_and_runs() -> None:
    damping = AdaptiveDamping(0.1, every=2)
    runs = []
    for _ in range(2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(train(model, optimizer, KFAC(model, damping=damping).attach(optimizer), 8))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_an_inverse_is_judged_with_the_damping_that_it_holds() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, damping=AdaptiveDamping(10.0, every=1, rate=0.5), solver="inverse", kl_clip=None)
    kfac.attach(optimizer)
    for step in range(4):
        used = train(model, optimizer, kfac, 1)[0]
        assert kfac._curvature.solved_damping == used
        assert used == 10.0 * 0.5**step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coarse_weights_are_compared_by_the_losses_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    kfac = KFAC(model, damping=AdaptiveDamping(1.0, every=1)).attach(optimizer)
    x, y = batch()
    for _ in range(10):
        optimizer.zero_grad()
        kfac.objective = lambda: functional.cross_entropy(model(x.to(dtype)).float(), y)
        kfac.objective().backward()
        optimizer.step()
    assert kfac.damping < 1.0


def test_what_climbs_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    kfac = KFAC(model, damping=AdaptiveDamping()).attach(optimizer)
    with pytest.raises(ValueError, match="minimise the negative"):
        train(model, optimizer, kfac, 1)


# Checkpoints


def test_states_of_schedules_that_do_not_fit_change_nothing() -> None:
    def stepped(**options: Any) -> KFAC:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, **options).attach(optimizer)
        train(model, optimizer, kfac, 2)
        return kfac

    driven = stepped(damping=schedules.driven(schedules.constant(0.1)) * 2)
    adaptive = stepped(damping=AdaptiveDamping(0.1, every=1))
    for source, target in ((driven, adaptive), (adaptive, driven)):
        fresh = target.state_dict()
        with pytest.raises(ValueError, match="the checkpoint's state of damping does not fit"):
            target.load_state_dict({**source.state_dict(), "step": 99})
        assert target.steps == fresh["step"] == 2
    plain = stepped(damping=1e-3)
    before = adaptive.damping
    assert before != 0.1
    adaptive.load_state_dict(plain.state_dict())  # which knows of no adaptive damping: it begins anew
    assert adaptive.damping == 0.1
    plain.load_state_dict(driven.state_dict())


def test_composed_schedules_and_those_of_loss_terms_are_in_the_checkpoint() -> None:
    time = schedules.driven(schedules.steps(1.0, factor=2.0, at=[1]))
    model = net()
    kfac = KFAC(model, lr=time, loss_terms=16 * time, inv_update_steps=(3 * time).whole())
    time.step()
    state = kfac.state_dict()
    fresh = schedules.driven(schedules.steps(1.0, factor=2.0, at=[1]))
    other = KFAC(model, lr=fresh, loss_terms=16, inv_update_steps=(3 * fresh).whole())
    other.load_state_dict(state)
    assert fresh(0) == 2.0


def test_parameters_that_miss_steps_have_their_own_adam_counts() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor, both: bool) -> Tensor:
            result: Tensor = self.a(x) + self.b(x) if both else self.a(x)
            return result

    results = []
    for stop in (None, 3):
        model = Sometimes()
        adam = torch.optim.Adam(model.parameters(), lr=1.0)
        kfac = KFAC(model, kl_clip=None, grafting="adam", factor_update_steps=1)
        for step in range(6):
            if step == stop:
                state = kfac.state_dict()
                kfac.detach()
                kfac = KFAC(model, kl_clip=None, grafting="adam", factor_update_steps=1)
                kfac.load_state_dict(state)
            x, y = batch(step)
            model.zero_grad()
            functional.cross_entropy(model(x, step % 2 == 0), y).backward()
            held = [p.detach().clone() for p in model.parameters()]
            adam.step()
            moved = [(before - p.detach()) for before, p in zip(held, model.parameters(), strict=True)]
            with torch.no_grad():
                for p, before in zip(model.parameters(), held, strict=True):
                    p.copy_(before)
            kfac.step()
            for layer, update in ((model.a, moved[:2]), (model.b, moved[2:])):
                if layer.weight.grad is not None:
                    own = flat([layer.weight.grad, layer.bias.grad]).norm()
                    torch.testing.assert_close(own, flat(update).norm(), rtol=1e-9, atol=0)
        results.append(flat([p.grad for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*results)


def test_an_exchanged_module_has_no_momentum() -> None:
    model = net()
    kfac = KFAC(model, kl_clip=None, raw_momentum=0.9, factor_update_steps=1, inv_update_steps=1)
    for step in range(3):
        if step == 2:
            model[2] = nn.Linear(5, 3).double()
        model.zero_grad()
        loss_of(model, step).backward()
        raw = model[2].weight.grad.clone()
        kfac.step()
    torch.testing.assert_close(kfac._update.buffers._kept["momentum"]["2.weight"], raw, **TIGHT)


def test_adams_moments_of_coarse_gradients_are_fine() -> None:
    model = nn.Linear(4, 3).bfloat16()
    kfac = KFAC(model, kl_clip=None, grafting="adam", raw_momentum=0.5, factor_update_steps=1)
    model(torch.randn(8, 4).bfloat16()).float().logsumexp(1).sum().backward()
    kfac.step()
    kinds = kfac.state_dict()["buffers"]
    assert {t.dtype for kind in ("momentum", "first", "second") for t in kinds[kind].values()} == {torch.float32}


# Hooks


class Decaying(torch.optim.SGD):
    """Does something of its own after its base's step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        return result


@pytest.mark.parametrize("base_known", [True, False])
def test_the_whole_of_a_subclasss_step_is_cut_and_averaged_once(
    base_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if base_known:
        torch.optim.SGD(net().parameters(), lr=0.1)
    else:
        bare = getattr(torch.optim.SGD.step, "__wrapped__", torch.optim.SGD.step)
        monkeypatch.setattr(torch.optim.SGD, "step", bare)
    model = net()
    optimizer = Decaying(model.parameters(), lr=0.1)
    kfac = KFAC(model, kl_clip=TrustRegion(1e-6, of="step"), damping=1e-13).attach(optimizer)
    average = PolyakAverage(model).attach(optimizer)
    loss_of(model).backward()
    before = weights(model)
    optimizer.step()
    step = weights(model) - before
    fisher = torch.block_diag(*(block.to_dense() for block in kfac.blocks))
    assert float(step @ fisher @ step) == pytest.approx(1e-6, rel=1e-6)
    assert average.updates == 1


def test_two_kfacs_and_a_users_hook_on_a_subclass() -> None:
    torch.optim.SGD(net().parameters(), lr=0.1)
    pair = [net(), net()]
    optimizer = Decaying([p for model in pair for p in model.parameters()], lr=0.1)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, dict(kwargs)))
    kfacs = [KFAC(model).attach(optimizer) for model in pair]
    (loss_of(pair[0]) + loss_of(pair[1], 2)).backward()
    optimizer.step()
    assert [kfac.steps for kfac in kfacs] == [1, 1]


def test_an_optimizer_that_is_only_read_keeps_no_kfac_alive() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    holders = _shared._holders
    kfac = KFAC(model, damping=AdaptiveDamping(0.1, every=1), optimizer=optimizer, factor_update_steps=1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        kfac.objective = lambda seed=step: loss_of(model, seed)
        kfac.step()
        optimizer.step()
    gone = weakref.ref(kfac)
    del kfac
    gc.collect()
    assert gone() is None
    assert not model._forward_hooks
    assert _shared._holders == holders


def test_attached_after_steps_by_hand() -> None:
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    kfac = KFAC(model, damping=AdaptiveDamping(0.1, every=1), optimizer=first)
    loss_of(model).backward()
    kfac.objective = lambda: loss_of(model)
    kfac.step()
    first.step()
    once = kfac.damping
    kfac.attach(second)
    train(model, second, kfac, 2)
    assert kfac.damping != once
    assert not first._optimizer_step_post_hooks


def test_a_statistics_step_keeps_nothing_of_the_loop_alive() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, factor_update_steps=1).attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        output = model(x)
        functional.cross_entropy(output, y).backward()
        optimizer.step()
        kept = weakref.ref(output)
        del output
        assert kept() is None


@pytest.mark.parametrize("option", ["factor_update_steps", "inv_update_steps", "factor_decay"])
def test_a_schedule_that_goes_wrong_is_told_before_anything_changes(option: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = 0.9 if option == "factor_decay" else 1
    kfac = KFAC(model, **{option: lambda step: -1 if step > 1 else good}).attach(optimizer)
    train(model, optimizer, kfac, 1)
    # Intervals are asked for one step ahead.
    fails_at = 2 if option != "factor_update_steps" else 1
    train(model, optimizer, kfac, fails_at - 1)
    optimizer.zero_grad()
    loss_of(model).backward()
    raw, before = [p.grad.clone() for p in model.parameters()], weights(model)
    seen = float(kfac.blocks[0].straight.row.weight)
    with pytest.raises(ValueError, match=option):
        optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))
    assert torch.equal(weights(model), before)
    assert (kfac.steps, float(kfac.blocks[0].straight.row.weight)) == (fails_at, seen)


# What a newcomer does


@pytest.mark.parametrize("of", ["gradient", "step"])
def test_a_batch_that_the_model_is_sure_of_is_still_bounded(of: str) -> None:
    """Its own Fisher is next to nothing; the running factors and the damping are not."""
    model = net()
    kind = torch.optim.SGD if of == "gradient" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1.0)
    region = TrustRegion(1e-2, of=of, curvature="exact")
    kfac = KFAC(model, kl_clip=region, raw_momentum=0.9, damping=1e-2).attach(optimizer)
    train(model, optimizer, kfac, 3)
    with torch.no_grad():
        model[2].bias[0] += 50.0
    x, _ = batch()
    optimizer.zero_grad()
    kfac.objective = lambda: functional.cross_entropy(model(x), torch.zeros(16, dtype=torch.long))
    kfac.objective().backward()
    before = weights(model)
    optimizer.step()
    step = weights(model) - before
    assert 0 < 1e-2 * float(step @ step) <= 1e-2 * (1 + 1e-6)


@pytest.mark.parametrize("backward", ["zero_grad and backward", "backward"])
def test_an_objective_that_is_a_training_closure_is_refused_and_leaves_the_gradients(backward: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, damping=AdaptiveDamping(every=1)).attach(optimizer)
    loss_of(model).backward()
    raw = [p.grad.clone() for p in model.parameters()]

    def closure() -> Tensor:
        if "zero" in backward:
            optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    kfac.objective = closure
    with pytest.raises(RuntimeError, match=r"must not call backward\(\)"):
        optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))
    assert kfac.steps == 0


def test_messages_say_what_was_meant() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, damping=AdaptiveDamping(every=1)).attach(optimizer)
    loss_of(model).backward()
    kfac.objective = lambda x: x  # type: ignore[assignment, misc]
    with pytest.raises(TypeError, match="a function without arguments: missing a required argument: 'x'"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"damping got the class AdaptiveDamping: call it"):
        KFAC(model, damping=AdaptiveDamping)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kl_clip got the class TrustRegion: call it"):
        KFAC(model, kl_clip=TrustRegion)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a natgrad.TrustRegion, or None for no clip; got 'step'"):
        KFAC(model, kl_clip="step")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"at must be a list of times, such as \[40, 80\], got 40"):
        schedules.steps(1.0, factor=0.5, at=40)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="driven takes a schedule"):
        schedules.driven(3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        kfac.damping = 1.0  # type: ignore[misc]
    assert kfac.metrics()["reduction_ratio"] is None


def test_an_attached_average_is_not_updated_twice() -> None:
    model = net()
    average = PolyakAverage(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="twice would be once too often"):
        average.update()
    average.detach()
    average.update()
    assert average.updates == 1


def test_momentum_on_both_sides_is_warned_about() -> None:
    model = net()
    kfac = KFAC(model, raw_momentum=0.9)
    with pytest.warns(UserWarning, match=r"raw_momentum .* momentum 0\.5 sums them again after it: use one of the two"):
        kfac.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))

"""The loops that people have: each trains to the same weights as the plain loop, to the tolerance in its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from natgrad import KFAC, AdaptiveDamping, NatgradWarning, TrustRegion, schedules

STEPS, LR = 7, 0.2
OPTIONS: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 3, "damping": 1e-2, "kl_clip": 1e-3}


class Net(nn.Module):
    """A convolution, a norm layer without batch statistics, and two linear layers."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.hidden, self.head = nn.Linear(36, 6), nn.Linear(6, 3)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.hidden(self.norm(self.conv(x)).tanh().flatten(1)).tanh()
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        result: Tensor = self.head(hidden)
        return result


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 2, 3, 3, generator=generator).double(), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.5, **options})


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, called: Any = None, set_to_none: bool = True
) -> list[Tensor]:
    """The weights after a loop that knows nothing of K-FAC; `called` is the model or what wraps it."""
    for x, y in batches():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model if called is None else called, x, y).backward()
        optimizer.step()
    return weights(model)


def plain(**options: Any) -> list[Tensor]:
    """The loop that the others are compared with."""
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS, **options).attach(optimizer)
    return trained(model, optimizer)


# Loops: each trains its own model and returns its weights.


def accumulated(parts: int, *, divided: bool, **options: Any) -> list[Tensor]:
    model = Net().double()
    optimizer = sgd(model, lr=LR if divided else LR / parts)
    KFAC(model, **OPTIONS, accumulated_loss="mean" if divided else "sum", **options).attach(optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_of(model, micro_x, micro_y)
            (loss / parts if divided else loss).backward()
        optimizer.step()
    return weights(model)


class Scaled:
    """A model, its optimizer and K-FAC behind a scaler, attached or stepped by hand."""

    def __init__(self, *, by_hand: bool = False, fused: bool = False, momentum: float = 0.5, **options: Any) -> None:
        self.model = Net().double()
        self.optimizer = sgd(self.model, fused=fused, momentum=momentum)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.by_hand = by_hand
        numbers = {**OPTIONS, **options}
        if by_hand:
            self.kfac = KFAC(self.model, **numbers, optimizer=self.optimizer, grad_scaler=self.scaler)
        else:
            self.kfac = KFAC(self.model, **numbers).attach(self.optimizer, grad_scaler=self.scaler)

    def step(self, x: Tensor, y: Tensor, *, parts: int = 1, set_to_none: bool = True, overflows: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for micro_x, micro_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_of(self.model, micro_x, micro_y) / parts
            self.scaler.scale(loss * math.inf if overflows else loss).backward()
        if self.by_hand:
            self.scaler.unscale_(self.optimizer)
            self.kfac.step()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def scaled(*, fused: bool = False, by_hand: bool = False, parts: int = 1, set_to_none: bool = True) -> list[Tensor]:
    loop = Scaled(by_hand=by_hand, fused=fused, accumulated_loss="mean")
    for x, y in batches():
        loop.step(x, y, parts=parts, set_to_none=set_to_none)
    return weights(loop.model)


def overflowing(*, set_to_none: bool) -> list[Tensor]:
    """Batches whose scaled loss overflows, on steps that take statistics and on others: the scaler skips them."""
    loop = Scaled()
    good = iter(batches())
    for number in range(STEPS + 3):
        overflows = number in (0, 3, 6)
        x, y = batches()[0] if overflows else next(good)
        loop.step(x, y, set_to_none=set_to_none, overflows=overflows)
    return weights(loop.model)


def kept_zero_gradients() -> list[Tensor]:
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    return trained(model, optimizer, set_to_none=False)


def grouped() -> list[Tensor]:
    model = Net().double()
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == flag], "lr": LR} for flag in (True, False)]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    KFAC(model, **OPTIONS).attach(optimizer)
    return trained(model, optimizer)


def compiled(**how: Any) -> list[Tensor]:
    torch._dynamo.reset()
    model = Net().double()
    wrapped = torch.compile(model, **how)
    optimizer = sgd(model)
    KFAC(wrapped, **OPTIONS).attach(optimizer)
    return trained(model, optimizer, called=wrapped)


def compiled_step() -> list[Tensor]:
    """The optimizer's step compiled too, K-FAC's hook in front of it."""
    torch._dynamo.reset()
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        step()
    return weights(model)


def compiled_preconditioning() -> list[Tensor]:
    """Numbers that change with every step do not compile it anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Net().double()
    optimizer = sgd(model, lr=10 * LR)
    options = {**OPTIONS, "kl_clip": lambda step: 1e-3 * (1 + 1e-15 * step), "compile_preconditioning": True}
    KFAC(model, **options).attach(optimizer)
    graphs = []
    for number, (x, y) in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = LR * (1 + 1e-14 * number)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0]
    return weights(model)


def checkpointed() -> list[Tensor]:
    model = Net(checkpointed=True).double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    return trained(model, optimizer)


def evaluated() -> list[Tensor]:
    """Evaluation before and after every step, with and without gradients."""
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    for x, y in batches():
        model.eval()
        with torch.no_grad():
            loss_of(model, x, y)
        loss_of(model, 2 * x, y)  # looked at, never differentiated
        model.train()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        optimizer.step()
    return weights(model)


def with_a_closure(*, by_name: bool) -> list[Tensor]:
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        with torch.no_grad():
            expected = loss_of(model, x, y)
        returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert torch.equal(returned, expected)
    return weights(model)


def scheduled() -> list[Tensor]:
    """A learning-rate scheduler at work, and the schedules of K-FAC's own numbers beside it."""
    model = Net().double()
    optimizer = sgd(model, lr=10 * LR)
    factor = schedules.driven(schedules.constant(1e-2))
    KFAC(model, **{**OPTIONS, "damping": factor, "kl_clip": schedules.constant(1e-3)}).attach(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        scheduler.step()
        factor.step()
    return weights(model)


def two_networks(*, one_optimizer: bool) -> list[Tensor]:
    """An actor and a critic, one K-FAC each: the first trains as if it were alone."""
    model, critic = Net().double(), Net().double()
    optimizers = (
        [torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=LR, momentum=0.5)]
        if one_optimizer
        else [sgd(model), sgd(critic)]
    )
    for net, optimizer in zip((model, critic), optimizers * (2 if one_optimizer else 1), strict=True):
        KFAC(net, **OPTIONS).attach(optimizer)
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, x, y).backward()
        loss_of(critic, x.flip(0), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(model)


def through_another_network() -> list[Tensor]:
    """A GAN's turn: the generator's loss runs through the discriminator, whose gradients are then dropped."""
    model, generator = Net().double(), nn.Conv2d(2, 2, 1).double()
    optimizer, other = sgd(model), torch.optim.SGD(generator.parameters(), lr=1e-3)
    KFAC(model, **OPTIONS).attach(optimizer)
    KFAC(generator, **OPTIONS, loss_terms=16).attach(other)
    for x, y in batches():
        other.zero_grad()
        loss_of(model, generator(x), y).backward()
        other.step()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return weights(model)


def detached_and_attached_again() -> list[Tensor]:
    model = Net().double()
    optimizer = sgd(model)
    kfac = KFAC(model, **OPTIONS).attach(optimizer)
    for number, (x, y) in enumerate(batches()):
        if number == 3:
            kfac.detach()
            kfac.attach(optimizer)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return weights(model)


@dataclass(frozen=True)
class Row:
    """A loop, and how close its weights must be to the plain loop's; 0 means the same bits."""

    loop: Callable[..., list[Tensor]]
    arguments: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0


ROWS = {
    "accumulated over 4 micro-batches, divided": Row(accumulated, {"parts": 4, "divided": True}, 1e-10),
    "accumulated over 16 single cases, divided": Row(accumulated, {"parts": 16, "divided": True}, 1e-10),
    "accumulated over 1": Row(accumulated, {"parts": 1, "divided": True}),
    "accumulated over 4, not divided": Row(accumulated, {"parts": 4, "divided": False}, 1e-10),
    "GradScaler": Row(scaled, {}, 1e-10),
    "GradScaler, fused optimizer": Row(scaled, {"fused": True}, 1e-10),
    "GradScaler, steps called by hand": Row(scaled, {"by_hand": True}, 1e-10),
    "GradScaler, fused, by hand": Row(scaled, {"by_hand": True, "fused": True}, 1e-10),
    "GradScaler, accumulated": Row(scaled, {"parts": 4}, 1e-10),
    "GradScaler, gradients kept": Row(scaled, {"set_to_none": False}, 1e-10),
    "overflow": Row(overflowing, {"set_to_none": True}, 1e-10),
    "overflow, gradients kept": Row(overflowing, {"set_to_none": False}, 1e-10),
    "gradients kept as zeros": Row(kept_zero_gradients),
    "several groups": Row(grouped, {}, 1e-12),
    "compiled, fullgraph": Row(compiled, {"backend": "aot_eager", "fullgraph": True}, 1e-10),
    "compiled, dynamic": Row(compiled, {"backend": "eager", "dynamic": True}, 1e-10),
    "compiled by inductor": Row(compiled, {"fullgraph": True}, 1e-9),
    "compiled optimizer step": Row(compiled_step, {}, 1e-10),
    "compiled preconditioning": Row(compiled_preconditioning, {}, 1e-9),
    "activation checkpointing": Row(checkpointed, {}, 1e-12),
    "evaluation between steps": Row(evaluated),
    "closure": Row(with_a_closure, {"by_name": False}),
    "closure by name": Row(with_a_closure, {"by_name": True}),
    "schedulers": Row(scheduled, {}, 1e-12),
    "actor and critic, one optimizer": Row(two_networks, {"one_optimizer": True}),
    "actor and critic, two optimizers": Row(two_networks, {"one_optimizer": False}),
    "a GAN's discriminator": Row(through_another_network),
    "detached and attached again": Row(detached_and_attached_again),
}


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return plain()


@pytest.mark.parametrize("name", ROWS)
def test_the_same_weights_as_the_plain_loop(name: str, expected: list[Tensor]) -> None:
    row = ROWS[name]
    found = row.loop(**row.arguments)
    start = weights(Net().double())
    assert all(not torch.equal(one, other) for one, other in zip(found, start, strict=True))
    for one, other in zip(found, expected, strict=True):
        if row.tolerance:
            torch.testing.assert_close(one, other, rtol=row.tolerance, atol=row.tolerance)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_fishers_that_make_their_own_loss_need_no_scale(fisher: str) -> None:
    """Accumulated and divided: exact for the exact Fisher, and runs for the sampled one, which draws by micro-batch."""
    found = accumulated(4, divided=True, fisher=fisher)
    if fisher == "exact":
        for one, other in zip(found, plain(fisher=fisher), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert all(torch.isfinite(part).all() for part in found)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_what_a_fused_step_skips_has_no_statistics(set_to_none: bool, by_hand: bool) -> None:
    """K-FAC counts a step that the fused kernel skips; weights and factors must be those of a run without it."""
    options = {**OPTIONS, "factor_update_steps": 1, "inv_update_steps": 1, "factor_decay": 0.5}
    # No momentum: torch's fused SGD leaves its buffer uninitialised where the very first step is skipped.
    loop = Scaled(by_hand=by_hand, fused=True, momentum=0.0, **options)
    model, kfac = loop.model, loop.kfac
    twin = Net().double()
    other = sgd(twin, momentum=0.0)
    reference = KFAC(twin, **options).attach(other)
    for number, (x, y) in enumerate(batches()):
        overflows = number in (0, 2, 5)
        before = weights(model)
        loop.step(x, y, set_to_none=set_to_none, overflows=overflows)
        if overflows:
            assert all(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
            continue
        other.zero_grad()
        loss_of(twin, x, y).backward()
        other.step()
    for one, two in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    for block, like in zip(kfac.blocks, reference.blocks, strict=True):
        torch.testing.assert_close(block.to_dense(), like.to_dense(), rtol=1e-9, atol=1e-12)
    assert kfac.metrics()["rejected_statistics"] == 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_that_kfac_was_not_told_of(fused: bool) -> None:
    model, (x, y) = Net().double(), batches(1)[0]
    optimizer = sgd(model, fused=fused)
    kfac = KFAC(model, **OPTIONS).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, x, y)).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"kfac.attach\(optimizer, grad_scaler=scaler\)"):
        scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
    assert kfac.steps == 0
    # A scaler that is switched off, as bfloat16 loops keep one, is none.
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model, x, y)).backward()
    off.step(optimizer)
    off.update()
    assert kfac.steps == 1


def test_gradients_that_are_still_scaled_are_refused_in_steps_by_hand() -> None:
    model, (x, y) = Net().double(), batches(1)[0]
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    kfac = KFAC(model, **OPTIONS, optimizer=optimizer, grad_scaler=scaler)
    scaler.scale(loss_of(model, x, y)).backward()
    with pytest.raises(RuntimeError, match=r"call grad_scaler.unscale_\(optimizer\) before kfac.step\(\)"):
        kfac.step()
    with pytest.raises(ValueError, match="grad_scaler= needs the optimizer"):
        KFAC(Net().double(), lr=0.1, grad_scaler=scaler)._window.scale.refuse_scaled(None)


def test_adaptive_damping_and_the_step_taken_behind_a_scaler() -> None:
    """Both look at steps that were really taken; the scale makes no difference."""
    results = []
    for scale in (None, 1024.0):
        model = Net().double()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        damping = AdaptiveDamping(0.1, every=2)
        options = {**OPTIONS, "damping": damping, "kl_clip": TrustRegion(1e-3, of="step")}
        kfac = KFAC(model, **options).attach(optimizer, grad_scaler=scaler)
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            kfac.objective = lambda m=model, a=x, b=y: loss_of(m, a, b)
            scaler.step(optimizer)
            scaler.update()
        results.append((kfac.damping, weights(model)))
    assert results[0][0] == results[1][0] != 0.1
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_clipping(when: str) -> None:
    """Attached, before: the raw gradients. After: a hook registered behind K-FAC's. Both equal the loop by hand."""
    results = []
    for attached in (True, False):
        model = Net().double()
        optimizer = sgd(model)
        kfac = KFAC(model, **OPTIONS, optimizer=None if attached else optimizer)
        parameters = list(model.parameters())

        def clip(*_: Any, limited: list[nn.Parameter] = parameters) -> None:
            torch.nn.utils.clip_grad_norm_(limited, 1e-2)

        if attached:
            kfac.attach(optimizer)
            if when == "after":
                optimizer.register_step_pre_hook(clip)
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if when == "before":
                clip()
            if not attached:
                kfac.step()
                if when == "after":
                    clip()
            if not attached and when == "after":
                norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
                assert float(norm) <= 1e-2 * (1 + 1e-9)
            optimizer.step()
        results.append(weights(model))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bf16_autocast_trains_close_to_float32() -> None:
    losses = []
    for enabled in (False, True):
        model = Net()
        optimizer = sgd(model)
        kfac = KFAC(model, **OPTIONS).attach(optimizer)
        values = []
        for x, y in batches(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = loss_of(model, x.float(), y)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        assert all(factor.sum.dtype == torch.float32 for block in kfac.blocks for factor in block.factors())
        losses.append(values)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_parameters_frozen_and_unfrozen_train_when_they_may() -> None:
    """Frozen ones stand still, unfrozen ones have a block and move, from the first step after a statistics step on."""
    model = Net().double()
    model.conv.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    kfac = KFAC(model, **OPTIONS).attach(optimizer)
    moved = []
    for number, (x, y) in enumerate(batches(12)):
        if number == 4:
            model.conv.requires_grad_(True)
        if number == 8:
            model.conv.requires_grad_(False)
            model.conv.weight.grad = model.conv.bias.grad = None
        before = model.conv.weight.detach().clone()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        moved.append(not torch.equal(before, model.conv.weight))
    assert moved == [False] * 4 + [True] * 4 + [False] * 4
    assert "conv.weight" in {name for block in kfac.blocks for name in block.names}


def test_a_model_that_changes_its_dtype_after_its_statistics_says_so() -> None:
    """(Devices: tests/test_cuda.py.)"""
    model = Net()
    kfac = KFAC(model, **OPTIONS, lr=LR)
    model.double()  # before the first pass it does not matter
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    kfac.step()
    assert all(factor.sum.dtype == torch.float64 for block in kfac.blocks for factor in block.factors())


def test_losses_that_are_accumulated_unasked_are_warned_about() -> None:
    model = Net().double()
    optimizer = sgd(model)
    KFAC(model, **OPTIONS).attach(optimizer)
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    with pytest.warns(NatgradWarning, match="accumulated_loss='mean'; otherwise 'sum'"):
        loss_of(model, x, y).backward()


@pytest.fixture(autouse=True)
def _stance() -> Iterator[None]:
    """What was compiled here is forgotten."""
    yield
    torch._dynamo.reset()

"""Polyak averaging: the numbers by hand, the live model untouched, loops and wrappers, checkpoints, errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional

from natgrad import KFAC, NatgradWarning, TrustRegion, schedules
from natgrad.averaging import PolyakAverage


class Everything(nn.Module):
    """Batch norm, a tied and a frozen parameter, and buffers that an average would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.full((4,), 0.1), requires_grad=False)
        self.register_buffer("mask", torch.zeros(4).index_fill(0, torch.tensor([3]), -torch.inf))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.scratch += 1
        return self.last(self.norm(self.first(x)).tanh() + self.frozen) + self.mask


def everything() -> nn.Module:
    torch.manual_seed(0)
    return Everything().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(step)).double(), torch.arange(12) % 3


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.5} | options))


def train(model: nn.Module, optimizer: Any, steps: range, after: Callable[[], None] = lambda: None) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


# The average


@pytest.mark.parametrize(
    "decay",
    [0.9, 0, lambda updates: min(0.9, updates / (updates + 1)), schedules.warmup(4) * 0.9],
    ids=["number", "none", "ramp", "schedule"],
)
@pytest.mark.parametrize("attached", [True, False])
def test_equals_an_average_by_hand(decay: Any, attached: bool) -> None:
    model = everything()
    average, optimizer = PolyakAverage(model, decay=decay), sgd(model)
    history: list[dict[str, Tensor]] = []
    if attached:
        average.attach(optimizer)

    def after_a_step() -> None:
        history.append(tensors(model))
        if not attached:
            average.update()

    train(model, optimizer, range(7), after_a_step)
    assert average.updates == 7
    result = tensors(average.model)
    for name in ("first.weight", "norm.weight", "norm.running_mean", "norm.running_var", "last.bias"):
        expected = history[0][name]
        for updates, now in enumerate(history[1:], start=1):
            xi = decay(updates) if callable(decay) else decay
            expected = xi * expected + (1 - xi) * now[name]
        torch.testing.assert_close(result[name], expected, rtol=1e-12, atol=1e-14)
        if decay == 0.9:
            assert not torch.allclose(result[name], history[-1][name], rtol=1e-3)


def test_what_is_no_statistic_is_copied() -> None:
    """torch's AveragedModel would average counts, rounding down, and make NaN of the mask."""
    model = everything()
    average = PolyakAverage(model, decay=0.9).attach(optimizer := sgd(model))
    train(model, optimizer, range(5))
    result = average.model
    assert int(result.seen) == int(model.seen) == 60
    assert int(result.norm.num_batches_tracked) == 5
    for name in ("mask", "scratch", "frozen"):
        assert torch.equal(getattr(result, name), getattr(model, name)), name


def test_tied_weights_stay_tied() -> None:
    model = everything()
    average = PolyakAverage(model).attach(optimizer := sgd(model))
    train(model, optimizer, range(3))
    assert average.model.first.weight is average.model.last.weight
    with average.applied():
        assert model.first.weight is model.last.weight
        assert torch.equal(model.first.weight, average.model.first.weight)


def test_an_expanded_buffer_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("expanded", torch.ones(1).expand(3))
    average = PolyakAverage(model)
    average.update()
    with average.applied():
        assert model.expanded.stride() == (0,)
    model.double()  # no longer expanded
    average.update()
    with average.applied():
        assert torch.equal(model.expanded, torch.ones(3).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_weights_are_averaged_in_32_bits(dtype: torch.dtype) -> None:
    """A hundredth of a difference of one unit in the last place would be rounded away at every update."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    average = PolyakAverage(model, decay=0.99)
    average.update()
    model.weight.data.fill_(1 + 2 * torch.finfo(dtype).eps)
    for _ in range(400):
        average.update()
    assert average.model.weight.dtype == dtype
    assert torch.equal(average.model.weight, model.weight)
    assert average.state_dict()["average"]["weight"].dtype == torch.float32
    other = PolyakAverage(model, decay=0.99)
    other.load_state_dict(average.state_dict())
    for each in (average, other):
        model.weight.data.fill_(1)
        each.update()
    assert_same(average.state_dict()["average"], other.state_dict()["average"])


def test_follows_the_model_to_another_dtype() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = PolyakAverage(model, decay=0.5)
    model.double()
    average.update()
    first = model.weight.detach().clone()
    model.weight.data.add_(1)
    average.update()
    torch.testing.assert_close(average.model.weight.data, first + 0.5, rtol=1e-15, atol=0)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        with average.applied():
            assert model.weight.dtype == average.model.weight.dtype == dtype
            torch.testing.assert_close(model.weight.data, (first + 0.5).to(dtype), rtol=1e-6, atol=1e-6)


def test_a_model_without_buffers_and_a_layout_of_its_own() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    average = PolyakAverage(model, decay=0.5)
    average.update()
    before = model.weight.detach().clone()
    model.weight.data.add_(1)
    average.update()
    torch.testing.assert_close(average.model.weight.data, before + 0.5)
    with average.applied():
        assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_before_the_first_update_it_is_the_present_weights() -> None:
    model = everything()
    average = PolyakAverage(model)
    model.last.bias.data.fill_(3.0)
    with pytest.warns(NatgradWarning, match="no updates yet and is not attached"):
        assert torch.equal(average.model.last.bias, model.last.bias)
    average.attach(sgd(model))
    model.last.bias.data.fill_(4.0)
    with average.applied():
        assert torch.equal(model.last.bias, torch.full((4,), 4.0).double())
        assert torch.equal(average.model.last.bias, model.last.bias)
    assert average.updates == 0


def test_averages_noise_away() -> None:
    """Steps too large for the noise in the gradients: the last iterate hovers, its average does not."""
    torch.manual_seed(0)
    truth = torch.randn(8, 1)
    model = nn.Linear(8, 1, bias=False)
    optimizer = sgd(model, lr=0.1, momentum=0.0)
    average = PolyakAverage(model, decay=schedules.constant(0.99)).attach(optimizer)
    for _ in range(500):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        functional.mse_loss(model(x), x @ truth + torch.randn(16, 1)).backward()
        optimizer.step()
    x = torch.randn(1000, 8)

    def loss(module: Any) -> float:
        with torch.no_grad():
            return functional.mse_loss(module(x), x @ truth).item()

    last = loss(model)
    with average.applied() as applied:
        assert loss(applied) == loss(average)
    assert loss(average) < 0.3 * last
    assert loss(model) == last


# applied()


@pytest.mark.parametrize("failing", [False, True])
def test_applied_is_the_average_and_puts_everything_back(failing: bool) -> None:
    model = everything()
    average = PolyakAverage(model, decay=0.9).attach(optimizer := sgd(model))
    train(model, optimizer, range(5))
    x, y = batch(99)
    addresses = [p.data_ptr() for p in model.parameters()]
    pending = functional.cross_entropy(model(x), y)  # a graph that waits for its backward
    before = tensors(model)
    try:
        with average.applied() as applied:
            assert applied is model
            assert_same(tensors(model), tensors(average.model))
            assert not torch.equal(model.first.weight, before["first.weight"])
            model(x)  # in training mode: moves statistics and counts
            if failing:
                raise KeyError("from inside")
    except KeyError:
        assert failing
    assert_same(tensors(model), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    pending.backward()
    assert int(average.model.seen) == 60  # what the block did to the statistics is not in the average
    train(model, optimizer, range(5, 7))


def test_training_is_the_same_with_an_average_and_kfac() -> None:
    def run(averaged: bool) -> tuple[list[float], dict[str, Tensor]]:
        model = everything()
        optimizer = sgd(model)
        kfac = KFAC(model, factor_update_steps=2, inv_update_steps=2).attach(optimizer)
        average = PolyakAverage(model).attach(optimizer) if averaged else None
        losses = []
        for step in range(6):
            losses += train(model, optimizer, range(step, step + 1))
            if average is not None:
                with average.applied(), torch.no_grad():
                    model.eval()
                    inside = model(batch(7)[0])
                    model.train()
                assert torch.equal(average(batch(7)[0]), inside)
        assert kfac.steps == 6
        return losses, {name: t for name, t in tensors(model).items() if name not in ("seen", "scratch")}

    plain, averaged = run(False), run(True)
    assert plain[0] == averaged[0]
    assert_same(plain[1], averaged[1])


def test_an_enclosing_autocast_does_not_keep_its_casts() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    average = PolyakAverage(model, decay=0.5)
    average.update()
    model.weight.data.add_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = model(x)
        with average.applied():
            assert not torch.equal(model(x), trained)
        assert torch.equal(model(x), trained)


def test_what_is_refused_inside_applied() -> None:
    model = everything()
    average, optimizer = PolyakAverage(model), sgd(model)  # not attached: refused all the same
    train(model, optimizer, range(2), average.update)
    before = tensors(model)
    with average.applied():
        with pytest.raises(RuntimeError, match=r"applied\(\) inside applied\(\)"), average.applied():
            pass
        with pytest.raises(RuntimeError, match=r"update\(\) inside applied\(\)"):
            average.update()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside applied\(\)"):
            average.load_state_dict(average.state_dict())
        with pytest.raises(RuntimeError, match="would train the average"):
            optimizer.step()
        other = nn.Linear(2, 2)
        train_other = sgd(other)
        other(torch.randn(3, 2)).sum().backward()
        train_other.step()  # another model's optimizer may
    assert_same(tensors(model), before)
    assert average.updates == 2
    optimizer.step()
    with average.applied():
        pass


# Loops


def test_detach_and_attach_again() -> None:
    model = everything()
    average, optimizer = PolyakAverage(model), sgd(model)
    average.detach()
    assert average.attach(optimizer) is average
    train(model, optimizer, range(2))
    with pytest.raises(RuntimeError, match="attached to an optimizer already"):
        average.attach(optimizer)
    average.detach()
    train(model, optimizer, range(2))
    assert average.updates == 2
    average.attach(optimizer)
    train(model, optimizer, range(2))
    assert average.updates == 4
    assert repr(average) == "<PolyakAverage(decay=0.99): 4 updates>"


def test_the_average_sees_the_step_that_a_trust_region_leaves() -> None:
    """K-FAC corrects the step after the optimizer, and has to come first there, whoever was attached first."""
    model = everything()
    average = PolyakAverage(model, decay=0).attach(optimizer := sgd(model, lr=1.0))
    kfac = KFAC(model, kl_clip=TrustRegion(1e-4, of="step")).attach(optimizer)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        assert kfac.metrics()["clip_factor"] < 1
        assert torch.equal(average.model.last.bias, model.last.bias)


def test_a_step_that_only_creates_the_optimizers_state_does_not_count() -> None:
    model = everything()
    optimizer = torch.optim.Adam(model.parameters())
    average = PolyakAverage(model).attach(optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["last.bias"]
    assert average.updates == 0


def test_the_copy_of_an_armed_model_is_not_observed() -> None:
    model = everything()
    optimizer = sgd(model)
    kfac = KFAC(model, factor_update_steps=1, inv_update_steps=1).attach(optimizer)
    average = PolyakAverage(model).attach(optimizer)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        average(x.clone().requires_grad_()).sum().backward()  # with gradients, on an armed step
        loss.backward()
        optimizer.step()
    assert kfac.steps == 3
    assert all(parameter.grad is None for parameter in average.model.parameters())


def test_averages_a_recurrent_model_while_kfac_is_armed() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True)
    KFAC(model, kl_clip=None)
    average = PolyakAverage(model, decay=0.5)
    average.update()
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(average(x)[0], model(x)[0])


@pytest.mark.parametrize("wrapper", ["compiled", "compiled in place", "compiled inside", "ddp", "both"])
def test_wrapped_models(wrapper: str, tmp_path: Any) -> None:
    inner = everything()
    model: Any = inner
    backend = "eager"
    if "ddp" in wrapper or wrapper == "both":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrapper in ("compiled", "both"):
            model = torch.compile(model, backend=backend)
        elif wrapper == "compiled in place":
            model.compile(backend=backend)
        elif wrapper == "compiled inside":
            inner.norm = torch.compile(inner.norm, backend=backend)
        if wrapper in ("ddp", "both"):
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = sgd(model)
        KFAC(model, factor_update_steps=3).attach(optimizer)
        average = PolyakAverage(model, decay=0.9).attach(optimizer)
        history: list[Tensor] = []
        train(model, optimizer, range(4), lambda: history.append(inner.last.bias.detach().clone()))
        expected = history[0]
        for now in history[1:]:
            expected = 0.9 * expected + 0.1 * now
        torch.testing.assert_close(average.model.last.bias.data, expected, rtol=1e-12, atol=0)
        assert set(average.state_dict()["average"]) == {
            *("first.weight", "first.bias", "last.bias", "frozen", "mask", "seen"),
            *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
        }
        x, _ = batch(9)
        inner.eval()
        with average.applied() as applied, torch.no_grad():
            assert applied is model
            torch.testing.assert_close(model(x), average(x), rtol=1e-12, atol=1e-14)
        inner.train()
        train(model, optimizer, range(4, 6))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# Checkpoints


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_continues_bit_for_bit() -> None:
    def ramp(updates: int) -> float:
        return updates / (updates + 1)

    model = everything()
    average = PolyakAverage(model, decay=ramp).attach(optimizer := sgd(model))
    train(model, optimizer, range(3))
    snapshot = average.state_dict()
    state = through_a_file([model.state_dict(), optimizer.state_dict(), snapshot])
    train(model, optimizer, range(3, 6))
    whole = tensors(average.model)
    assert_same(snapshot["average"], state[2]["average"])  # a snapshot, which training does not change
    assert "scratch" not in snapshot["average"]

    model = everything()
    average = PolyakAverage(model, decay=ramp).attach(optimizer := sgd(model))
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    average.load_state_dict(state[2])
    assert average.updates == 3
    train(model, optimizer, range(3, 6))
    resumed = tensors(average.model)
    del resumed["scratch"], whole["scratch"]
    assert_same(resumed, whole)


def test_a_schedule_that_the_loop_drives_goes_on_too() -> None:
    def make() -> tuple[schedules.Driven, PolyakAverage]:
        decay = schedules.driven(schedules.steps(0.5, factor=1.5, at=[2]))
        return decay, PolyakAverage(nn.Linear(1, 1), decay=decay)

    (decay, average), (resumed, other) = make(), make()
    average.update()
    decay.step()
    decay.step()
    other.load_state_dict(through_a_file(average.state_dict()))
    assert resumed(0) == decay(0) == 0.75


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return state | {"average": {key: value for key, value in state["average"].items() if key != name}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: without(state, "norm.running_var"), "norm.running_var is in the model, but not in the state"),
        (
            lambda state: state | {"average": state["average"] | {"other.weight": torch.zeros(1)}},
            "other.weight is in the state, but not in the model",
        ),
        (
            lambda state: state | {"average": state["average"] | {"last.bias": torch.zeros(5)}},
            r"last.bias has shape \(4,\) in the model, in the state \(5,\)",
        ),
        (lambda state: state | {"updates": -1}, "updates must be a whole number"),
        (lambda state: {"version": 1, "updates": 1, "decay": None}, "lacks 'average'"),
        (lambda state: state["average"], "not the state_dict"),
        (lambda state: [state], "not the state_dict"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Callable[[Any], Any], message: str) -> None:
    model = everything()
    average = PolyakAverage(model).attach(optimizer := sgd(model))
    train(model, optimizer, range(3))
    state = average.state_dict()
    train(model, optimizer, range(3, 5))
    before = tensors(average.model)
    with pytest.raises(ValueError, match=message):
        average.load_state_dict(change(state))
    assert_same(tensors(average.model), before)
    assert average.updates == 5


# Errors


@pytest.mark.parametrize("decay", [1.0, 1, -0.1, float("nan")])
def test_a_decay_outside_its_range(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
        PolyakAverage(nn.Linear(2, 2), decay=decay)


def test_a_schedule_that_leaves_the_range_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    average = PolyakAverage(model, decay=lambda updates: 0.5 * updates)
    average.update()
    average.update()
    before = tensors(average.model)
    model.weight.data.add_(1)
    with pytest.raises(ValueError, match="decay must be .* below 1, got 1.0 at step 2"):
        average.update()
    assert_same(tensors(average.model), before)
    assert average.updates == 2


def test_wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="takes the model itself, an nn.Module, got generator"):
        PolyakAverage(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decay must be a number or a callable"):
        PolyakAverage(model, decay="0.9")  # type: ignore[arg-type]
    for unmade in (nn.LazyLinear(2), nn.Linear(2, 2, device="meta")):
        with pytest.raises(ValueError, match="weight has no values yet"):
            PolyakAverage(unmade)
    average = PolyakAverage(model)
    with pytest.raises(TypeError, match=r"attach takes a torch.optim.Optimizer, got Linear"):
        average.attach(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        average.attach(sgd(nn.Linear(2, 2)))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(average)


def test_a_model_that_has_changed() -> None:
    model = everything()
    average = PolyakAverage(model)
    average.update()
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="extra has come"):
        average.update()
    del model.extra
    bias, model.last.bias = model.last.bias, None
    with pytest.raises(ValueError, match=r"last\.bias is gone"):
        average.update()
    model.last.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ValueError, match=r"last\.bias has shape \(9,\) now, in the average \(4,\)"), average.applied():
        pass
    model.last.bias = bias
    average.update()
    assert average.updates == 2


# On a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    model = everything()
    model.last.to(torch.bfloat16)
    history = []
    average = PolyakAverage(model, decay=0.9)
    model.cuda()  # after the average was made
    for step in range(4):
        for tensor in (*model.parameters(), model.norm.running_mean):
            tensor.data.add_(0.1)
        history.append(tensors(model))
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            average.update()
            with average.applied():
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
    result = tensors(average.model)
    for name in ("first.bias", "last.bias", "norm.running_mean", "norm.weight"):
        expected = history[0][name].double()
        for now in history[1:]:
            expected = 0.9 * expected + 0.1 * now[name].double()
        assert result[name].is_cuda
        torch.testing.assert_close(result[name], expected.to(result[name].dtype))
    assert_same(tensors(model), history[-1])

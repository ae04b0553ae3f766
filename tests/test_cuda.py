"""On a GPU: the same numbers as on the CPU, and no host sync on an ordinary step."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import gradients
from natgrad import KFAC, AdaptiveDamping, NatgradWarning, TrustRegion
from natgrad.solve.linalg import symmetric_eigen, symmetric_inverse
from natgrad.statistics.gram import second_moment

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, 16, 16, generator=generator).to(dtype), torch.arange(32) % 10


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_cpu_in_float64(solver: str, channels_last: bool) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = convnet().double().to(device)
        x, y = (t.to(device) for t in batch(torch.float64))
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        kfac = KFAC(model, lr=0.1, solver=solver)
        for _ in range(3):
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            kfac.step()
        results.append([grad.cpu() for grad in gradients(model).values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


class Everything(nn.Module):
    """Every norm layer, a slope, a token, a table that only per-case gradients reach, a flattened map, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.instance, self.group = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)
        self.slope, self.flat, self.layer = nn.PReLU(8), nn.Linear(8 * 14 * 14, 12), nn.LayerNorm(12)
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(4))
        self.lstm, self.rms, self.head = nn.LSTM(12, 6, batch_first=True), nn.RMSNorm(6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.group(self.instance(self.conv(x))))
        x = self.layer(self.flat(x.flatten(1)))[:, None]
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        index = torch.arange(12, device=x.device) % 4
        result: Tensor = self.head(self.rms(self.lstm(x + self.table[index].tanh())[0]).mean(1))
        return result


@pytest.mark.parametrize("options", [{}, {"sharing": "reduce", "solver": "inverse"}, {"vectors": "diagonal"}])
def test_the_whole_fisher_equals_the_cpus_in_float64(options: dict[str, str]) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = Everything().double().to(device)
        x, y = (t.to(device) for t in batch(torch.float64))
        kfac = KFAC(model, lr=0.1, doubly_factored_above=100, **options)
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        report = kfac.report()
        assert all(line.covered for line in report)
        assert report["flat.weight"].factors == "A 8² · A 196² · G 12²"
        # An LSTM's cell is another one on a GPU, and only there does it run case by case, for the table.
        same = [block for block in kfac.blocks if "lstm" not in block.key and block.key not in ("table", "flat.weight")]
        results.append({block.key: block.to_dense().cpu() for block in same})
    assert len(results[0]) > 8
    for name, one in results[0].items():
        torch.testing.assert_close(one, results[1][name], rtol=1e-7, atol=1e-9)


def steps_without_waiting(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 7,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Trains; after the first step, which decomposes, nothing may wait for the device."""
    x, y = (tensor.cuda() for tensor in batch())
    scaler = torch.amp.GradScaler("cuda", enabled=False) if scaler is None else scaler
    for step in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_statistics_of_the_whole_fisher_never_wait_for_the_device(sharing: str) -> None:
    model = Everything().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"fallback": "batch", "doubly_factored_above": 100, "sharing": sharing}
    KFAC(model, factor_update_steps=2, **options).attach(optimizer)
    steps_without_waiting(model, optimizer, steps=5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_reduced_factors_of_half_precision_maps_are_close(channels_last: bool) -> None:
    dense = []
    for enabled in (False, True):
        model, (x, y) = convnet().cuda(), batch()
        x, y = x.cuda(), y.cuda()
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        kfac = KFAC(model, kl_clip=None, sharing="reduce")
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        kfac.step()
        dense.append([side for block in kfac.blocks for side in block.estimate().sides])
    for one, other in zip(*dense, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_autocast_factors_are_float32_and_close(dtype: torch.dtype, channels_last: bool) -> None:
    dense = []
    for enabled in (False, True):
        model, (x, y) = convnet().cuda(), batch()
        x, y = x.cuda(), y.cuda()
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        kfac = KFAC(model, kl_clip=None)
        with torch.autocast("cuda", dtype, enabled=enabled):
            loss = functional.cross_entropy(model(x), y)
        warned = pytest.warns(NatgradWarning, match="GradScaler")
        with warned if enabled and dtype == torch.float16 else nullcontext():
            loss.backward()
        kfac.step()
        assert all(factor.sum.dtype == torch.float32 for block in kfac.blocks for factor in block.factors())
        dense.append([block.estimate().row for block in kfac.blocks])
    for one, other in zip(*dense, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.05


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_an_ordinary_step_never_waits_for_the_device(solver: str, tensor_rate: bool) -> None:
    model = convnet().cuda()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if tensor_rate:
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=True)
    kfac = KFAC(model, factor_update_steps=3, solver=solver).attach(optimizer)
    steps_without_waiting(model, optimizer)
    assert kfac.metrics()["skipped_steps"] == 0


@pytest.mark.parametrize("size", [64, 300, 512, 600])
def test_eigendecompositions_are_right_on_both_sides_of_the_padding(size: int) -> None:
    root = torch.randn(2, size, size // 2, device="cuda")
    stack = root @ root.mT / size
    result = symmetric_eigen(stack)
    assert result.vectors.shape == stack.shape
    rebuilt = result.vectors @ result.values.diag_embed() @ result.vectors.mT
    torch.testing.assert_close(rebuilt, stack, rtol=1e-4, atol=1e-4)
    expected = torch.linalg.eigvalsh(stack.double().cpu()).clamp(min=0)
    torch.testing.assert_close(result.values.double().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_model_moved_before_the_first_pass_and_after() -> None:
    model, (x, y) = convnet(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    model.cuda()
    functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    kfac.step()
    model.cpu()
    with pytest.raises(RuntimeError, match=r"moved from cuda:0 to cpu .* state_dict"):
        model(x)


def test_checkpoint_written_on_the_gpu_loads_on_the_cpu() -> None:
    model, (x, y) = convnet().cuda(), batch()
    kfac = KFAC(model, kl_clip=None)
    functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    kfac.step()
    state = kfac.state_dict()
    model.zero_grad()
    model.cpu()
    other = KFAC(model, kl_clip=None)
    other.load_state_dict(state)
    functional.cross_entropy(model(x), y).backward()
    other.step()
    assert all(block.to_dense().device.type == "cpu" for block in other.blocks[:1])


# Training loops


def loop_weights(
    *,
    scaler: bool = False,
    fused: bool = False,
    steps: int = 8,
    mode: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[Tensor], KFAC, list[float]]:
    """A short training on the GPU."""
    gc.collect()  # a KFAC of another test that nobody has collected yet may still ask for eager execution
    torch._dynamo.reset()
    model, (x, y) = convnet().cuda().to(dtype), batch(dtype)
    x, y = x.cuda(), y.cuda()
    called = model if mode is None else torch.compile(model, mode=mode, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=fused)
    scale = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaler)
    numbers: dict[str, Any] = {"factor_update_steps": 3, "inv_update_steps": 3, "damping": 1e-2, **options}
    kfac = KFAC(called, **numbers).attach(optimizer, grad_scaler=scale)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(called(x), y)
        scale.scale(loss).backward()
        kfac.objective = lambda: functional.cross_entropy(called(x), y)
        scale.step(optimizer)
        scale.update()
        losses.append(loss.item())
    return [p.detach().clone() for p in model.parameters()], kfac, losses


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_makes_no_difference(fused: bool) -> None:
    plain, _, _ = loop_weights(dtype=torch.float64)
    scaled, _, _ = loop_weights(dtype=torch.float64, scaler=True, fused=fused)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
def test_float16_with_a_scaler_trains_close_to_float32(fused: bool) -> None:
    """The scale starts far too high: the first steps overflow, are skipped, and leave no statistics."""
    _, _, expected = loop_weights(steps=30)
    model, (x, y) = convnet().cuda(), batch()
    x, y = x.cuda(), y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if not fused else 0.0, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    numbers: dict[str, Any] = {"factor_update_steps": 3, "inv_update_steps": 3, "damping": 1e-2}
    kfac = KFAC(model, **numbers).attach(optimizer, grad_scaler=scaler)
    losses, skipped = [], 0
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        before, scale = model[6].weight.detach().clone(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert torch.equal(before, model[6].weight)
        losses.append(loss.item())
    assert skipped > 2
    assert losses[-1] < 1.2 * expected[-1] + 0.05
    assert kfac.metrics()["rejected_statistics"] == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_of_compilation_trains_as_eagerly(mode: str) -> None:
    plain, _, expected = loop_weights()
    torch._dynamo.utils.counters.clear()
    compiled, kfac, losses = loop_weights(mode=mode)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert losses == pytest.approx(expected, rel=1e-2)
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)  # autotuned kernels use TF32
    assert kfac.metrics()["skipped_steps"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"kl_clip": TrustRegion(1e-4, of="step")},
        {"raw_momentum": 0.9},
        {"grafting": "adam"},
        {"grafting": "sgd", "raw_momentum": 0.5, "l2": 1e-4},
    ],
)
def test_ways_to_step_never_wait_for_the_device(options: dict[str, Any]) -> None:
    model = convnet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, factor_update_steps=3, **options).attach(optimizer)
    steps_without_waiting(model, optimizer)
    assert len(kfac.history()["step"]) == 7


def test_a_fused_optimizer_with_a_scaler_never_waits_for_the_device() -> None:
    model = convnet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    KFAC(model, factor_update_steps=3).attach(optimizer, grad_scaler=scaler)
    steps_without_waiting(model, optimizer, scaler=scaler)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_adaptive_damping_and_exact_curvature(mode: str | None) -> None:
    damping = AdaptiveDamping(0.1, every=2)
    region = TrustRegion(1e-3, of="step", curvature="exact")
    _, kfac, losses = loop_weights(steps=12, mode=mode, damping=damping, kl_clip=region)
    assert losses[-1] < losses[0]
    assert kfac.damping != 0.1
    assert kfac.metrics()["predicted_kl"] == pytest.approx(0.5e-3, rel=1e-3)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_compiled_preconditioning(solver: str) -> None:
    plain, _, _ = loop_weights(dtype=torch.float64, solver=solver)
    compiled, _, _ = loop_weights(dtype=torch.float64, solver=solver, compile_preconditioning=True)
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    model = convnet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, factor_update_steps=3, solver=solver, compile_preconditioning=True).attach(optimizer)
    steps_without_waiting(model, optimizer)


def test_eigendecompositions_by_several_threads_are_those_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 300, 90, generator=generator).cuda()
    stack = rows.mT @ rows
    one, several = symmetric_eigen(stack), symmetric_eigen(stack, threads=4)
    assert torch.equal(one.values, several.values)
    assert torch.equal(one.vectors, several.vectors)
    assert several.failed == [False] * 7
    broken = stack.clone()
    broken[3] = torch.nan
    found = symmetric_eigen(broken, threads=4)
    assert found.failed == [False, False, False, True, False, False, False]
    # What is made again is made in float64, one by one.
    torch.testing.assert_close(found.values[4], one.values[4], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [64, 600])
def test_inverses_of_a_stack_are_those_of_its_matrices(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2 * size, size, generator=generator, dtype=torch.float64).cuda()
    stack = rows.mT @ rows
    found = symmetric_inverse(stack)
    torch.testing.assert_close(
        found.matrices @ stack, torch.eye(size, dtype=stack.dtype, device="cuda").expand(3, -1, -1)
    )
    assert found.failed == [False] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_moments_of_many_rows_with_few_columns(dtype: torch.dtype, turned: bool) -> None:
    """Whole numbers: cut into pieces or not, their sums are exact."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-2, 3, (1, 2**17, 27), generator=generator).to("cuda", dtype)
    rows = rows.mT.contiguous().mT if turned else rows
    expected = rows.double().mT @ rows.double()
    assert torch.equal(second_moment(rows).double(), expected)
    assert torch.equal(
        second_moment(rows[:, :-1]).double(), expected - rows[0, -1].double().outer(rows[0, -1].double())
    )

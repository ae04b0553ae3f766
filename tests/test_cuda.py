"""On a GPU: the same numbers as on the CPU, and no host sync on an ordinary step."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import gradients
from natgrad import KFAC, NatgradWarning
from natgrad.solve.linalg import symmetric_eigen

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
    model, (x, y) = convnet().cuda(), batch()
    x, y = x.cuda(), y.cuda()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if tensor_rate:
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=True)
    kfac = KFAC(model, factor_update_steps=3, solver=solver).attach(optimizer)
    for step in range(7):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            loss.backward()
            optimizer.step()  # factor steps at 3 and 6 included: only decompositions may wait
        finally:
            torch.cuda.set_sync_debug_mode("default")
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

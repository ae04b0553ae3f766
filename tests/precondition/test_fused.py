"""Kernels for all of a step that is not a product, against the same launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.precondition import preconditioner
from natgrad.precondition.fused import Fused

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Left(nn.Module):
    """A weight (in, out), as GPT-2's in other libraries are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 12) / 17)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 12, 3, padding=1),
        nn.Flatten(),
        nn.Linear(12 * 64, 300),
        nn.LayerNorm(300),
        nn.Tanh(),
        Left(),
        nn.Linear(12, 12),
        nn.Linear(12, 12),
    ).cuda()


Disturb = Callable[[int, nn.Module], None]


def nothing(step: int, model: nn.Module) -> None:
    pass


def missing(step: int, model: nn.Module) -> None:
    if step % 2:
        model[3].weight.grad = model[11].bias.grad = None


def nan(step: int, model: nn.Module) -> None:
    if step == 1:
        model[0].weight.grad[0, 0, 0, 0] = torch.nan


def unaligned(step: int, model: nn.Module) -> None:
    """As views of a bucket may lie."""
    for parameter in model.parameters():
        home = torch.zeros(parameter.numel() + 1, device="cuda", dtype=parameter.dtype)
        view = home[1:].as_strided(parameter.shape, parameter.stride())
        parameter.grad = view.copy_(parameter.grad)


def gradients(options: dict[str, Any], disturb: Disturb, *, last: bool, groups: bool) -> list[Tensor]:
    model = network()
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    parts = [{"params": biases, "lr": 0.3}, {"params": weights}] if groups else [{"params": list(model.parameters())}]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    kfac = KFAC(model, optimizer=optimizer, kl_clip=1e-4, **options)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), (torch.arange(8) % 12).cuda()).backward()
        disturb(step, model)
        kfac.step()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.filterwarnings("ignore:.*NaN or inf")
@pytest.mark.parametrize("last", [False, True], ids=["", "channels-last"])
@pytest.mark.parametrize("disturb", [nothing, missing, nan, unaligned])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "inverse"},
        {"damping_rule": "pi"},
        {"max_factor_size": 20},
        {"doubly_factored": ["7.weight"]},
        {"cuda_graph": False},
    ],
    ids=str,
)
def test_the_same_as_launch_by_launch(
    options: dict[str, Any], disturb: Disturb, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    runs = []
    calls: list[int] = []
    original = Fused.run
    monkeypatch.setattr(Fused, "run", lambda *given: calls.append(1) or original(*given))
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(preconditioner, "fused", lambda *given: None)
        runs.append(gradients(options, disturb, last=last, groups=disturb is missing))
        assert calls
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore:.*float16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(preconditioner, "fused", lambda *given: None)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 5)).cuda().to(dtype)
        kfac = KFAC(model, lr=0.1, solver="inverse")
        x, y = torch.randn(16, 300).cuda().to(dtype), (torch.arange(16) % 5).cuda()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        runs.append([p.grad.float() for p in model.parameters()])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "inverse"},
        {"solver": "inverse", "damping_rule": "plain"},
        {"solver": "inverse", "max_factor_size": 20, "max_vector_size": 8},
        {"solver": "inverse", "doubly_factored": ["7.weight"]},
    ],
    ids=str,
)
def test_factors_are_handed_over_as_block_by_block(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    kfac = KFAC(model, lr=0.1, **options)
    functional.cross_entropy(model(torch.randn(8, 3, 8, 8).cuda()), (torch.arange(8) % 12).cuda()).backward()
    kfac.step()
    own, blocks = kfac._preconditioner, list(kfac.blocks)
    assert preconditioner.prepares(blocks)
    together = own.prepare(blocks, 0.01, 1)
    monkeypatch.setattr(preconditioner, "prepares", lambda blocks: False)
    each = own.prepare(blocks, 0.01, 1)
    assert together.keys == each.keys
    dense = {factor.untyped_storage().data_ptr() for factor in together.factors.values() if factor.dim() == 3}
    assert all(f.untyped_storage().data_ptr() not in dense for f in together.factors.values() if f.dim() == 2)
    for found, wanted in ((together.factors, each.factors), (together.scales, each.scales)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))

"""What kernels do of a step, and of preparing factors, against the same operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.precondition import fused, stack
from natgrad.precondition.clip import Clip
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.precondition.rates import Rates
from natgrad.precondition.stack import Stack

OPTIONS: list[dict[str, Any]] = [
    {},
    {"solver": "inverse"},
    {"damping_rule": "pi"},
    {"solver": "inverse", "damping_rule": "plain"},
    {"max_factor_size": 20, "max_vector_size": 8},
    {"solver": "inverse", "doubly_factored": ["11.weight"]},
]


class Left(nn.Module):
    """A weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 12) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 3, padding=1, groups=3),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 6, 3, padding=1),
        nn.Flatten(),
        nn.Linear(6 * 16, 30),
        nn.LayerNorm(30),
        nn.Tanh(),
        Left(),
        nn.Linear(12, 12),
    )


def loss(model: nn.Module) -> Tensor:
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return functional.cross_entropy(model(x), torch.arange(8))


def directions(options: dict[str, Any], *, missing: bool, wrong: bool) -> list[Tensor]:
    """The gradients that three steps leave: in one some are `missing`, or one is NaN."""
    model = network().to(memory_format=torch.contiguous_format if missing else torch.channels_last)
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD([{"params": biases, "lr": 0.3}, {"params": weights}], lr=0.1)
    kfac = KFAC(model, optimizer=optimizer, kl_clip=1e-4, **options)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        if step == 1 and missing:
            model[3].weight.grad = model[15].bias.grad = None
        if step == 1 and wrong:
            model[0].weight.grad[0, 0, 0, 0] = torch.nan
        kfac.step()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.filterwarnings("ignore:.*NaN or inf")
@pytest.mark.parametrize(("missing", "wrong"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_directions(options: dict[str, Any], missing: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = directions(options, missing=missing, wrong=wrong)
    memories: dict[fused.Fused, fused.Memory] = {}  # which last, as a graph's do, and begin as anything
    steps = []

    def by_kernels(
        self: Preconditioner,
        stacks: Sequence[Stack],
        gradients: Mapping[str, Tensor | None],
        damping: float,
        kappa: float | None,
        rates: Sequence[Rates],
        finite: Tensor | None,
        norms: Mapping[str, Tensor] | None,
    ) -> Clip:
        arithmetic = self._fused(stacks, gradients)
        assert arithmetic is not None
        steps.append(1)
        if arithmetic not in memories:
            memories[arithmetic] = arithmetic.memory(lasting=False)
            for matrix in memories[arithmetic].matrices:
                matrix.fill_(torch.nan)
        return arithmetic.run(memories[arithmetic], gradients, damping, kappa, rates, finite)

    monkeypatch.setattr(fused, "able", lambda device: True)
    monkeypatch.setattr(stack, "padded_size", lambda size, device: -(-size // 4) * 4)
    monkeypatch.setattr(Preconditioner, "_replayed", by_kernels)
    found = directions(options, missing=missing, wrong=wrong)
    assert len(steps) == 3
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_factors_to_be_decomposed(options: dict[str, Any]) -> None:
    model = network()
    kfac = KFAC(model, lr=0.1, **options)
    loss(model).backward()
    kfac.step()
    own, blocks = kfac._preconditioner, list(kfac.blocks)
    wanted = own.prepare(blocks, 0.01, 1)
    found = own._preparation(blocks).run(0.01)
    assert found.factors.keys() == wanted.factors.keys()
    for key, factor in found.factors.items():
        torch.testing.assert_close(factor, wanted.factors[key], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.scales, list(wanted.scales.values()), rtol=1e-5, atol=0)

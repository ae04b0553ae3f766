"""What a registry remembers of its blocks is what they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.blocks.registry import Registry


class Changing(nn.Module):
    """Two layers of one input and a sum, which may become layers of different ones; and a matrix that may be used both
    ways.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.apart = self.back = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() + self.second(x.tanh() if self.apart else x).sigmoid()
        out = self.head(hidden)
        return functional.linear(out.tanh(), self.head.weight.T) if self.back else out


def check(registry: Registry) -> tuple[int, int]:
    factors = list(dict.fromkeys(factor for block in registry for factor in block.factors()))
    orientations = [orientation for block in registry for orientation in block.orientations]
    assert registry.factors() == factors
    assert list(registry.orientations()) == orientations
    return len(factors), len(orientations)


def test_factors_and_orientations_follow_the_blocks() -> None:
    torch.manual_seed(0)
    model: Any = Changing()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1, kl_clip=None)
    registry = kfac._registry

    def step() -> tuple[int, int]:
        model.zero_grad()
        functional.cross_entropy(model(torch.randn(8, 3)), torch.arange(8) % 3).backward()
        kfac.step()
        return check(registry)

    assert check(registry) == (0, 0)
    assert step() == (5, 3)  # the two layers have one input factor
    registry.factors().clear()  # the caller's own
    assert step() == (5, 3)
    model.apart = True
    assert step() == (6, 3)
    model.back = True
    assert step() == (8, 4)  # the matrix's other orientation
    registry.drop(["second.weight"])
    assert check(registry) == (6, 3)
    registry.replace([])
    assert check(registry) == (0, 0)

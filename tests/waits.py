"""Works that wait, which this process does itself: there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC, passes
from natgrad.statistics import gpu
from natgrad.statistics.operations import Operation
from natgrad.statistics.waiting import Late


@dataclass(frozen=True)
class Fake:
    """A work that this process does itself."""

    compute: Callable[[Sequence[Tensor]], Tensor]
    results: int = 0
    tensors: int = 1
    cases: int = 2**31

    def plan(self, plan: Any) -> None:
        raise AssertionError("there is no GPU")


def install(monkeypatch: pytest.MonkeyPatch, *, inputs: bool, outputs: bool, results: bool = False) -> None:
    """Works of which `results` say that they take memory."""

    def late(
        operation: Operation,
        derivative: Tensor,
        saved: Any,
        *,
        fraction: float,
        scale: float,
        homogeneous: bool,
        diagonal: Any,
    ) -> Late:
        def input_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.input_factors(tensors, homogeneous=False, diagonal=[False])[0]

        def output_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.output_factor(tensors[0], [], diagonal=diagonal[0]) * scale

        rows, size = operation.rows(saved, derivative), derivative.shape[-1] ** 2 if results else 0
        assert isinstance(rows, int)
        return Late(
            rows,
            Fake(input_factor) if inputs and not homogeneous and not any(diagonal) else None,
            Fake(output_factor, size) if outputs and not operation.keeps_saved else None,
            False,
        )

    monkeypatch.setattr(passes, "late", late)
    monkeypatch.setattr(passes, "ALIGNED_BYTES", 1)

    def moments(works: Sequence[Fake], tensors: Sequence[Tensor]) -> list[Tensor]:
        each = iter(tensors)
        return [work.compute(list(islice(each, work.tensors))) for work in works]

    monkeypatch.setattr(gpu, "moments", moments)


def counted_turns(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Gets the sizes of the derivatives whose factors are made together."""
    plain, found = gpu.moments, list[list[int]]()

    def moments(works: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        found.append([tensor.shape[-1] for tensor in tensors])
        return plain(works, tensors)

    monkeypatch.setattr(gpu, "moments", moments)
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return functional.cross_entropy(model(torch.randn(6, 3, generator=generator)), torch.arange(6) % 4)


def factors(kfac: KFAC) -> list[Tensor]:
    return [factor.mean() for block in kfac.blocks for factor in block.factors()]

"""Kernels are prepared for gradients that lie in one way, and for no others. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.precondition import preconditioner as preconditioner_of
from natgrad.precondition.replay import _Work

Gradients = dict[str, Tensor | None]


@pytest.fixture
def kfac(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(preconditioner_of, "fused", lambda *given: object())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    kfac = KFAC(model, lr=0.1)
    functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    kfac.step()
    return kfac


def fresh(kfac: Any) -> Gradients:
    return {name: torch.ones_like(parameter) for name, parameter in kfac._parameters.items()}


def arithmetic(kfac: Any, **others: Tensor | None) -> Any:
    stacks = kfac._preconditioner._present_stacks()
    return kfac._preconditioner._fused(stacks, {**fresh(kfac), **others})


OTHERS: dict[str, Tensor | None] = {
    "missing": None,
    "transposed": torch.ones(4, 4).T,
    "of another dtype": torch.ones(4, 4, dtype=torch.bfloat16),
    "not aligned": torch.ones(17)[1:].view(4, 4),
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_gradients_have_other_kernels(kfac: Any, how: str) -> None:
    first = arithmetic(kfac)
    assert arithmetic(kfac) is first
    other = arithmetic(kfac, **{"0.weight": OTHERS[how]})
    assert other is not first
    assert arithmetic(kfac, **{"0.weight": OTHERS[how]}) is other
    assert arithmetic(kfac) is first


def test_other_stacks_have_other_kernels(kfac: Any) -> None:
    first = arithmetic(kfac)
    kfac._preconditioner._stacks = None
    assert arithmetic(kfac) is not first


def test_gradients_that_are_always_others_are_done_without(kfac: Any) -> None:
    found = [arithmetic(kfac, **{"0.weight": torch.ones(4, 4 + step)[:, :4]}) for step in range(40)]
    assert found[0] is not None
    assert found[-1] is None


def test_rates_are_found_once_for_the_same_stacks(kfac: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def rate(name: str) -> float:
        asked.append(name)
        return 0.5

    own = kfac._preconditioner
    stacks = own._present_stacks()
    assert own._rates_of(stacks, rate) == [0.5] * len(stacks)
    once = len(asked)
    assert own._rates_of(list(stacks), rate) == [0.5] * len(stacks)
    assert len(asked) == once
    assert own._rates_of(stacks[:1], rate) == [0.5]
    assert len(asked) > once
    assert own._rates_of(stacks[:1], lambda name: 0.25) == [0.25]
    kfac._preconditioner._stacks = None
    assert own._rates_of(own._present_stacks(), lambda name: 1.0) == [1.0] * len(stacks)


def test_a_graph_serves_the_same_work_only(kfac: Any) -> None:
    stacks = kfac._preconditioner._present_stacks()

    def work(gradients: Gradients, kernels: Any) -> _Work:
        return _Work(stacks, gradients, [0] * len(stacks), kernels, capped=True, checked=False)

    whole, kernels = fresh(kfac), object()
    part = {**whole, "0.weight": None}
    assert work(whole, kernels) == work(whole, kernels)
    assert work(whole, kernels) != work(whole, object())
    assert work(whole, None) == work(whole, None)
    assert work(whole, None) != work(part, None)
    assert work(whole, None) != work(whole, kernels)

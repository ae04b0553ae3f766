"""Who takes part is remembered from step to step, until something of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from natgrad import KFAC


def model_of_three() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))


def taking_part(kfac: KFAC) -> set[str]:
    return set(kfac._observer._take_part())


def run(model: nn.Module) -> None:
    model.zero_grad()
    functional.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 3).backward()


def test_the_same_object_comes_again() -> None:
    model = model_of_three()
    kfac = KFAC(model, lr=0.1)
    first = kfac._observer._take_part()
    assert set(first) == {"0.weight", "2.weight", "2.bias"}
    assert kfac._observer._take_part() is first


def test_frozen_parameters_leave_and_come_back() -> None:
    model = model_of_three()
    kfac = KFAC(model, lr=0.1)
    for frozen in (True, False):
        model[2].bias.requires_grad_(not frozen)
        assert ("2.bias" in taking_part(kfac)) is not frozen


def test_what_the_optimizer_does_not_hold_takes_no_part() -> None:
    model = model_of_three()
    kfac = KFAC(model, lr=None, kl_clip=None)
    assert len(taking_part(kfac)) == 3
    optimizer = torch.optim.SGD([model[0].weight, model[2].bias], lr=0.1)
    kfac.attach(optimizer)
    assert taking_part(kfac) == {"0.weight", "2.bias"}
    optimizer.add_param_group({"params": [model[2].weight]})
    run(model)
    optimizer.step()
    assert len(taking_part(kfac)) == 3
    kfac.detach()
    assert len(taking_part(kfac)) == 3


def test_an_exchanged_parameter_takes_part_in_place_of_the_old_one() -> None:
    model = model_of_three()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1)
    for _ in range(2):
        run(model)
        kfac.step()
        assert kfac._observer._take_part()["0.weight"] is model[0].weight
        model[0].weight = nn.Parameter(torch.randn(3, 3))


def test_a_model_that_moves_is_refused_once_it_has_blocks() -> None:
    model = model_of_three()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1)
    run(model)
    kfac.step()

    def look(parameters: Mapping[str, torch.Tensor]) -> None:
        kfac._observer._refuse_moved(parameters, {p.device for p in parameters.values()})

    look(kfac._observer._take_part())
    elsewhere = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"0\.weight moved from cpu to meta"):
        look(elsewhere)
    with pytest.raises(RuntimeError, match=r"2\.weight moved from cpu to meta"):
        look(dict(model.named_parameters()) | {"2.weight": elsewhere["2.weight"]})


def test_a_parameter_under_another_name_takes_part_under_that() -> None:
    """The same objects in the same order: only their names are others."""
    model = model_of_three()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1)
    run(model)
    kfac.step()
    model._modules = {f"new {name}": child for name, child in model._modules.items()}
    run(model)
    kfac.step()
    assert taking_part(kfac) == {"new 0.weight", "new 2.weight", "new 2.bias"}
    assert set(kfac._registry.keys()) == {"new 0.weight", "new 2.weight"}

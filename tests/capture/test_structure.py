"""A model's structure notices whatever changes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from natgrad.capture.structure import Structure
from natgrad.capture.unfused import Unfused


def made() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2, bias=False)))
    model[1].register_parameter("none", None)
    return model


def move_to_the_next(model: Any) -> None:
    """All names and objects are the same, in the same order."""
    weight = model[0].weight
    del model[0].weight, model[0].bias
    model[1].weight = weight


def rename(model: Any) -> None:
    model._modules = {f"new {name}": child for name, child in model._modules.items()}


def replace_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "of_modules"),
    [
        (replace_parameter, False),
        (lambda model: setattr(model[0], "bias", None), False),
        (lambda model: setattr(model[1], "none", nn.Parameter(torch.ones(1))), False),
        (move_to_the_next, False),
        (lambda model: model.append(nn.Tanh()), True),
        (lambda model: model[1].add_module("inner", nn.Tanh()), True),
        (lambda model: model[2].__setitem__(0, nn.Linear(2, 2, bias=False)), True),
        (lambda model: model.__delitem__(1), True),
        (rename, True),
    ],
)
def test_changes_are_noticed(change: Callable[[Any], None], of_modules: bool) -> None:
    model = made()
    whole, modules = Structure(model, parameters=True), Structure(model, parameters=False)
    assert whole.is_present
    assert modules.is_present
    change(model)
    assert not whole.is_present
    assert modules.is_present is not of_modules
    assert Structure(model, parameters=True).is_present


def test_parameters_that_move_between_neighbours_are_noticed() -> None:
    model: Any = nn.Sequential(nn.Module(), nn.Module())
    model[0].weight = nn.Parameter(torch.ones(2))
    structure = Structure(model, parameters=True)
    move_to = model[0].weight
    del model[0].weight
    model[1].weight = move_to
    assert not structure.is_present


def test_values_may_change() -> None:
    model = made()
    structure = Structure(model, parameters=True)
    model.double()
    model[0].weight.requires_grad_(False)
    model.train(False)
    assert structure.is_present


def test_recurrent_layers_that_come_later_are_run_unfused_too() -> None:
    model = made()
    unfused = Unfused(model)
    for recurrent in (nn.GRU(2, 2), nn.LSTM(2, 2)):
        unfused.arm()
        unfused.disarm()
        model[1] = recurrent
        unfused.arm()
        assert len(recurrent._forward_pre_hooks) == 1
        unfused.disarm()
        assert not recurrent._forward_pre_hooks

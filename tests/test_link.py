"""Learning rates and gradients are those of the optimizer's groups as they are now, however these change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from natgrad.link import Link
from natgrad.options import Hyperparameter


class Loop:
    def nothing(self) -> None:
        return


LOOP = Loop()


def linked(*rates: float) -> tuple[Link, nn.Sequential, torch.optim.Optimizer]:
    """One layer a group."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in rates))
    groups: list[dict[str, Any]] = [
        {"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(model, rates, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    link = Link(dict(model.named_parameters()), None, None)
    link.attach(optimizer, LOOP.nothing, LOOP.nothing)
    return link, model, optimizer


def rates(link: Link, *names: str) -> list[Any]:
    link.read()
    return list(map(link.rates(0), names))


def test_schedulers_change_rates() -> None:
    link, _, optimizer = linked(0.1, 0.2)
    assert rates(link, "0.weight", "1.bias") == [0.1, 0.2]
    optimizer.param_groups[1]["lr"] = 0.3
    assert rates(link, "0.weight", "1.bias") == [0.1, 0.3]


def test_loading_a_state_replaces_groups() -> None:
    link, _, optimizer = linked(0.1, 0.2)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert rates(link, "0.weight", "1.weight") == [0.5, 0.2]


def test_parameters_come_go_and_change_groups() -> None:
    link, model, optimizer = linked(0.1, 0.2)
    moved = optimizer.param_groups[0]["params"].pop()
    assert rates(link, "0.weight", "0.bias") == [0.1, 0.0]
    assert not link.holds(moved)
    optimizer.param_groups[1]["params"].append(moved)
    assert rates(link, "0.bias") == [0.2]
    # In place, with as many as before.
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]
    assert rates(link, "0.weight", "1.weight") == [0.2, 0.1]
    extra = nn.Linear(2, 2)
    model.append(extra)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.7})
    assert rates(link, "0.weight") == [0.2]
    assert link.holds(extra.weight)


def test_only_what_the_optimizer_holds_has_a_gradient() -> None:
    link, model, optimizer = linked(0.1, 0.2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    del optimizer.param_groups[1]
    link.read()
    assert [name for name, gradient in link.gradients().items() if gradient is None] == ["1.weight", "1.bias"]
    link.detach()
    assert all(gradient is not None for gradient in link.gradients().values())


def test_rates_of_another_rank_are_not_taken_for_the_optimizers() -> None:
    link, _, _ = linked(0.1, 0.2)
    link.read()
    link.take_over({"0.weight": 0.9})
    assert list(map(link.rates(0), ("0.weight", "1.weight"))) == [0.9, 0.0]
    assert rates(link, "0.weight", "1.weight") == [0.1, 0.2]


def test_a_rate_of_its_own_is_read_once_a_step() -> None:
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.5

    link = Link(dict(nn.Linear(2, 2).named_parameters()), None, Hyperparameter("lr", schedule, above=0))
    rate = link.rates(7)
    assert [rate("weight"), rate("bias")] == [0.5, 0.5]
    assert asked == [7]


def test_a_rate_on_the_cpu_is_a_number() -> None:
    """A tensor there would be a constant of a CUDA graph, and of code that is compiled."""
    link, _, optimizer = linked(0.1, 0.2)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert rates(link, "0.weight", "1.weight") == [0.5, 0.2]
    assert all(isinstance(rate, float) for rate in rates(link, "0.weight", "1.weight"))
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rates(link, "0.weight") == [0.25]


def test_rates_are_the_same_function_as_long_as_they_are_the_same() -> None:
    link, model, optimizer = linked(0.1, 0.2)

    def rate() -> Callable[[str], Any]:
        link.read()
        return link.rates(0)

    first = rate()
    assert rate() is first
    optimizer.param_groups[0]["lr"] = 0.3
    second = rate()
    assert second is not first
    assert second("0.weight") == 0.3
    groups = [group["params"] for group in optimizer.param_groups]
    groups[0][0], groups[1][0] = groups[1][0], groups[0][0]
    third = rate()
    assert third is not second
    assert third("0.weight") == 0.2
    on_device = torch.tensor(0.5, device="meta")
    optimizer.param_groups[0]["lr"] = on_device
    fourth = rate()
    assert fourth("1.weight") is on_device
    assert rate() is fourth
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")
    assert rate() is not fourth
    link._parameters["0.weight"] = model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert rate()("0.weight") == 0.0


def test_a_schedule_of_its_own_is_another_function_where_it_has_changed() -> None:
    parameters = dict(nn.Linear(2, 2).named_parameters())
    link = Link(parameters, None, Hyperparameter("lr", lambda step: 1 / (1 + step // 2), above=0))
    assert link.rates(0) is link.rates(1)
    assert link.rates(2)("weight") == 0.5

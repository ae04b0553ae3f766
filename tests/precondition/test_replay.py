"""Ordinary steps as a CUDA graph: the same bits as launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.precondition.fused import Fused

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    ).cuda()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 8, 8, generator=generator).cuda(), (torch.arange(16) % 10).cuda()


Disturb = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def schedule(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def nan_batch(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 6:
        next(model.parameters()).grad.fill_(torch.nan)


def unused_layer(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step in (4, 5, 6, 9):
        model[3].weight.grad = None


def other_memory(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


def run(disturb: Disturb, *, steps: int = 12, **options: Any) -> tuple[list[Tensor], KFAC, list[float | None]]:
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    kfac = KFAC(model, **{"factor_update_steps": 4, "inv_update_steps": 4, **options})
    kfac.attach(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        disturb(step, model, optimizer)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], kfac, kfac.history()["predicted_kl"]


@pytest.mark.parametrize("disturb", [nothing, schedule, unused_layer, other_memory])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_clip": None, "damping": 1.0},
        {"damping": lambda step: 1e-2 / (1 + step), "kl_clip": lambda step: 1e-3 * 0.9**step},
    ],
)
def test_the_same_bits(disturb: Disturb, solver: str, options: dict[str, Any]) -> None:
    plain, _, plain_kl = run(disturb, solver=solver, cuda_graph=False, **options)
    graph, kfac, graph_kl = run(disturb, solver=solver, **options)
    assert kfac._preconditioner._replay._captured is not None
    assert all(map(torch.equal, plain, graph))
    assert graph_kl == pytest.approx(plain_kl, rel=1e-12)


def test_a_batch_that_is_not_finite_is_dropped() -> None:
    with pytest.warns(match="NaN or inf"):
        plain, _, _ = run(nan_batch, cuda_graph=False)
    with pytest.warns(match="NaN or inf"):
        graph, kfac, _ = run(nan_batch)
    assert kfac.metrics()["skipped_steps"] == 1
    assert all(map(torch.equal, plain, graph))


def test_learning_rates_of_groups_and_on_the_device() -> None:
    results = []
    for graph in (False, True):
        model, (x, y) = network(), data()
        head = list(model[-1].parameters())
        body = [p for p in model.parameters() if all(p is not h for h in head)]
        rate = torch.tensor(0.05, device="cuda")
        optimizer = torch.optim.SGD([{"params": body, "lr": 0.1}, {"params": head, "lr": rate}], lr=0.1)
        kfac = KFAC(model, cuda_graph=graph)
        kfac.attach(optimizer)
        for step in range(8):
            rate.fill_(0.05 / (1 + step))
            if step == 6:  # a number in its place
                optimizer.param_groups[1]["lr"] = 0.01
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_what_a_graph_cannot_hold_is_done_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA graphs are not to be had")

    plain, _, _ = run(nothing, cuda_graph=False)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.warns(match="without a CUDA graph, which could not be made .CUDA graphs are not to be had"):
        found, kfac, _ = run(nothing)
    assert not kfac._preconditioner._replay._works
    assert all(map(torch.equal, plain, found))


def test_garbage_with_another_graph_in_it_waits_until_a_capture_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.graph, self.itself = torch.cuda.CUDAGraph(), self
            with torch.cuda.graph(self.graph):
                torch.ones(3, device="cuda").mul_(2)

    def leave_garbage(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        Cycle()

    def collecting(self: Fused, *given: Any) -> Any:
        assert [[] for _ in range(10**5)]  # more than a collection waits for
        return whole(self, *given)

    plain, _, _ = run(nothing, cuda_graph=False)
    whole = Fused.run
    monkeypatch.setattr(Fused, "run", collecting)
    found, kfac, _ = run(leave_garbage)
    assert kfac._preconditioner._replay._captured is not None
    assert all(map(torch.equal, plain, found))


def test_a_replayed_step_does_not_wait() -> None:
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model)
    kfac.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if step > 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kfac._preconditioner._replay._captured is not None

"""Accelerate needs no more than `attach`: its loop against the plain one, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import natgrad

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

OPTIONS: dict[str, Any] = {
    "damping": 1e-2,
    "factor_update_steps": 3,
    "inv_update_steps": 5,
    "accumulated_loss": "mean",
}
BATCH, BATCHES = 8, 8
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate's state is global."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * BATCHES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (BATCH * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


class Run:
    """A loop with Accelerate; `attach` comes before or after `prepare`."""

    def __init__(
        self, *, accumulate: int = 1, when: str = "after", scaler: torch.amp.GradScaler | None = None, clip: float = 0
    ) -> None:
        self.clip = clip
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = scaler  # Accelerate makes one on a GPU alone
        self.net = network()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.5)
        self.kfac = natgrad.KFAC(self.net, **OPTIONS)
        if when == "before":
            self.kfac.attach(optimizer, grad_scaler=self.accelerator.scaler)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.net, optimizer, batches())
        if when == "after":
            self.kfac.attach(self.optimizer, grad_scaler=self.accelerator.scaler)
        self.accelerator.register_for_checkpointing(self.kfac)

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(x), y))
                if self.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()


def plain_loop(*, epochs: int = 1, accumulate: int = 1, clip: float = 0) -> nn.Sequential:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    kfac = natgrad.KFAC(net, **OPTIONS)
    kfac.attach(optimizer)
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches(), start=1):
            (cross_entropy(net(x), y) / accumulate).backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return net


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loop", [{}, {"accumulate": 2}, {"clip": 0.05}])
def test_trains_like_the_plain_loop(when, loop):
    run = Run(when=when, **loop)
    run.epoch()
    assert run.kfac.steps == BATCHES // loop.get("accumulate", 1)
    assert_equal(run.net, plain_loop(**loop))


@pytest.mark.parametrize("when", ["before", "after"])
def test_scaled_losses_are_unscaled(when):
    run = Run(when=when, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
    run.epoch()
    assert_equal(run.net, plain_loop())


def test_accelerates_checkpoints_resume_exactly(tmp_path):
    run = Run()
    run.epoch()
    run.accelerator.save_state(str(tmp_path))
    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path))
    for one in (run, resumed):
        one.epoch()
        assert one.kfac.steps == 2 * BATCHES
        assert_equal(one.net, plain_loop(epochs=2))

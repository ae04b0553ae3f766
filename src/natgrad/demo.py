"""SGD against K-FAC on scikit-learn's digits, by steps and by seconds: ``python -m natgrad.demo``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit('The demo needs rich and scikit-learn: pip install "natgrad[cli]"') from None

STEPS, BATCH, TRAIN = 300, 100, 1500
LOOK_EVERY = 5
STEP_ROWS = (10, 20, 50, 100, 200, 300)
SECOND_ROWS = (0.5, 1, 2, 4, 8)


def build_model() -> nn.Module:
    """A small convnet, the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def with_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The best of the learning rates 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, by training loss after 300 steps."""
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)


def with_kfac(model: nn.Module) -> torch.optim.Optimizer:
    """K-FAC as a user would add it; all but one setting are the defaults."""
    # No momentum: it would multiply steps that K-FAC has given their length already.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    # The default of 100 is for long runs; these 300 steps would see three decompositions.
    kfac = natgrad.KFAC(model, inv_update_steps=20)
    kfac.attach(optimizer)
    return optimizer


@dataclass(frozen=True)
class Digits:
    """Images and labels, for training and for the test."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Look:
    """How far training has come; `seconds` do not include the looking."""

    step: int
    seconds: float
    loss: float
    accuracy: float


@dataclass
class Course:
    """One optimizer's looks, from the first step to the last."""

    looks: list[Look] = field(default_factory=list)

    def at_step(self, step: int) -> Look:
        """The look at this step."""
        return next(look for look in self.looks if look.step == step)

    def at_second(self, second: float) -> Look | None:
        """The last look by this second, None where training had ended before."""
        if self.looks[-1].seconds < second:
            return None
        return max((look for look in self.looks if look.seconds <= second), key=lambda look: look.step)

    def first_at(self, loss: float) -> Look | None:
        """The first look at this loss or a lower one."""
        return next((look for look in self.looks if look.loss <= loss), None)


def load() -> Digits:
    """The 8 × 8 images in a fixed random order; 1,500 to train with, 297 for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[order].unsqueeze(1)
    labels = torch.tensor(digits.target)[order]
    return Digits(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


@torch.no_grad()
def look(model: nn.Module, digits: Digits, *, step: int, seconds: float) -> Look:
    """Loss on all training cases, accuracy on the test cases."""
    loss = functional.cross_entropy(model(digits.images), digits.labels).item()
    accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    return Look(step, seconds, loss, accuracy)


def train(
    digits: Digits, *, add_optimizer: Callable[[nn.Module], torch.optim.Optimizer], tick: Callable[[], None]
) -> Course:
    """An ordinary training loop: nothing in it knows of K-FAC."""
    model = build_model()
    optimizer = add_optimizer(model)
    batches = torch.Generator().manual_seed(1)
    seconds = 0.0
    course = Course([look(model, digits, step=0, seconds=0.0)])
    for step in range(1, STEPS + 1):
        batch = torch.randint(TRAIN, (BATCH,), generator=batches)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(digits.images[batch]), digits.labels[batch])
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        if step % LOOK_EVERY == 0:
            course.looks.append(look(model, digits, step=step, seconds=seconds))
        tick()
    return course

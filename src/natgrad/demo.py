"""SGD against K-FAC on scikit-learn's digits, by steps and by seconds: ``python -m natgrad.demo``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from natgrad.models import digits_convnet

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit('The demo needs rich and scikit-learn: pip install "natgrad[cli]"') from None

TRAIN, BATCH, EPOCHS = 1500, 100, 20
LOOK_EVERY = 10
STEPS_SHOWN = (10, 20, 50, 100, 200, 300)
SECONDS_SHOWN = (0.5, 1, 2, 4, 8)


def build_model() -> nn.Module:
    """A small convnet, the same initial weights every time."""
    torch.manual_seed(0)
    return digits_convnet()


def use_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The learning rate is the best of 0.05, 0.1, 0.15, 0.2, 0.25, 0.3 and 0.4 by the training loss at the end."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def use_kfac(model: nn.Module) -> torch.optim.Optimizer:
    """The same optimizer without its momentum, which would lengthen steps whose length K-FAC has chosen already."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    # The one setting that is not a default (100): a run of 300 steps would see three decompositions only.
    kfac = natgrad.KFAC(model, inv_update_steps=20)
    kfac.attach(optimizer)
    return optimizer


class Digits(NamedTuple):
    """Images and labels to train and to test with."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Look(NamedTuple):
    """How far training had come after some steps; `seconds` leave out the time that looking takes."""

    step: int
    seconds: float
    loss: float
    accuracy: float


def load() -> Digits:
    """The 8 × 8 images in a fixed random order: 1,500 to train with, 297 to test with."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    return Digits(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


@torch.no_grad()
def look(model: nn.Module, digits: Digits, *, step: int, seconds: float) -> Look:
    """Loss of all training cases, accuracy on the test cases."""
    loss = functional.cross_entropy(model(digits.images), digits.labels).item()
    accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    return Look(step, seconds, loss, accuracy)


def train(
    digits: Digits, *, use_optimizer: Callable[[nn.Module], torch.optim.Optimizer], tick: Callable[[], None]
) -> list[Look]:
    """An ordinary training loop: nothing in it knows of K-FAC."""
    model = build_model()
    optimizer = use_optimizer(model)
    shuffle = torch.Generator().manual_seed(1)
    order = torch.cat([torch.randperm(TRAIN, generator=shuffle) for _ in range(EPOCHS)])
    seconds = 0.0
    looks = [look(model, digits, step=0, seconds=0.0)]
    for step, batch in enumerate(order.split(BATCH), start=1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(digits.images[batch]), digits.labels[batch])
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        if step % LOOK_EVERY == 0:
            looks.append(look(model, digits, step=step, seconds=seconds))
        tick()
    return looks


def side_by_side(runs: Sequence[list[Look]]) -> Table:
    """Loss and accuracy of both runs after the same steps, then after the same seconds."""
    table = Table("after", "SGD: loss", "test", "K-FAC: loss", "test", title="Digits, training loss and test accuracy")
    for step in STEPS_SHOWN:
        table.add_row(f"{step} steps", *(cell for looks in runs for cell in cells(looks[step // LOOK_EVERY])))
    table.add_section()
    for limit in SECONDS_SHOWN:
        table.add_row(f"{limit:g} s", *(cell for looks in runs for cell in cells(last_by(looks, seconds=limit))))
    return table


def last_by(looks: list[Look], *, seconds: float) -> Look | None:
    """None where the run had ended by then."""
    return None if looks[-1].seconds < seconds else [one for one in looks if one.seconds <= seconds][-1]


def cells(one: Look | None) -> tuple[str, str]:
    """As the table shows it."""
    return ("done", "") if one is None else (f"{one.loss:.2g}", f"{one.accuracy:.1%}")


def verdict(sgd: list[Look], kfac: list[Look]) -> str:
    """Who was first at the loss that SGD ends with, by steps and by seconds."""
    goal = sgd[-1].loss
    ours = next((one for one in kfac if one.loss <= goal), None)
    theirs = next(one for one in sgd if one.loss <= goal)
    if ours is None:
        return f"SGD wins, by steps and by seconds: K-FAC did not reach SGD's final training loss ({goal:.2g})."
    by_steps = "K-FAC" if ours.step < theirs.step else "SGD"
    by_seconds = "K-FAC" if ours.seconds < theirs.seconds else "SGD"
    return (
        f"SGD's final training loss ({goal:.2g}) was reached first by {by_steps} in steps (K-FAC {ours.step}, "
        f"SGD {theirs.step}) and by {by_seconds} in seconds (K-FAC {ours.seconds:.1f}, SGD {theirs.seconds:.1f})."
    )


def main() -> None:
    """Trains twice and prints the comparison."""
    console = Console()
    digits = load()
    runs = []
    with Progress(console=console) as progress:
        for name, use_optimizer in (("SGD", use_sgd), ("K-FAC", use_kfac)):
            task = progress.add_task(name, total=TRAIN // BATCH * EPOCHS)
            runs.append(train(digits, use_optimizer=use_optimizer, tick=partial(progress.advance, task)))
    console.print(side_by_side(runs))
    console.print(verdict(*runs))


if __name__ == "__main__":
    main()

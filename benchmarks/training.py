"""``natgrad train`` beside a bare PyTorch loop of the same model: throughput, where the time goes, and curves.

    python -m benchmarks.training cifar10-resnet32 text-gpt data.path=... --steps 200 --out docs/training.json
    python -m benchmarks.training --plot runs/* --out docs/training.png    # curves, from the runs' metrics.jsonl

The bare loop has one batch on the device and does nothing but forward, backward and optimizer; the trainer reads its
data, counts, tells and can be stopped. Both run in turns in one process; the ratio is that of the medians. Evaluations,
checkpoints and Polyak averaging are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from natgrad import data, recipes
from natgrad.recipes import Recipe
from natgrad.recipes.objects import build_model, build_optimizer
from natgrad.training import ranks as processes
from natgrad.training.events import Listener, Progress
from natgrad.training.metrics_file import read
from natgrad.training.ranks import Ranks
from natgrad.training.run import arithmetic, serving
from natgrad.training.stop import Stop
from natgrad.training.trainer import Trainer


class Parts(Listener):
    """Adds up where the trainer's time goes."""

    def __init__(self) -> None:
        self.events: list[Progress] = []

    def progress(self, event: Progress) -> None:
        self.events.append(event)

    def shares(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for event in self.events:
            for part, seconds in event.parts.items():
                sums[part] = sums.get(part, 0.0) + seconds
        total = sum(sums.values()) or 1.0
        return {part: seconds / total for part, seconds in sums.items()}


def bare_loop(recipe: Recipe, trainer: Trainer) -> Callable[[int], None]:
    """As few lines as people write: one batch, no K-FAC."""
    training, device = recipe.training, trainer.ranks.device
    inputs, targets = (tensor.clone() for tensor in next(iter(trainer.data.train.epoch(0, batch=training.batch))))
    torch.manual_seed(training.seed)
    context = recipe.data.context if recipe.data.kind == "text" else None
    model = build_model(recipe.model, classes=trainer.data.classes, context=context).to(device)
    if training.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = torch.compile(model) if training.compile else model
    optimizer = build_optimizer(recipe, model, ranks=1, steps_per_epoch=trainer.steps_per_epoch)
    half = training.precision == "bf16"

    def loop(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                output = run(inputs)
                if trainer.classifies:
                    loss = torch.nn.functional.cross_entropy(
                        output.flatten(0, -2), targets.flatten(), label_smoothing=training.label_smoothing
                    )
                else:
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(output, targets, reduction="sum") / len(
                        targets
                    )
            loss.backward()
            optimizer.step()

    return loop


def timed(loop: Callable[[int], None], steps: int, device: torch.device) -> float:
    """Seconds a step."""
    wait(device)
    began = time.perf_counter()
    loop(steps)
    wait(device)
    return (time.perf_counter() - began) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trainer_loop(trainer: Trainer, stop: Stop) -> Callable[[int], None]:
    """The trainer's own loop, without evaluations and checkpoints; epochs begin where they do."""
    steps = trainer.steps()

    def loop(count: int) -> None:
        for _ in range(count):
            next(steps)
            stop.requested()

    return loop


def measure(recipe: Recipe, cases: dict[str, data.Data], ranks: Ranks, *, steps: int, repeats: int) -> dict[str, Any]:
    """Medians over turns of the bare loop, the trainer without K-FAC and the trainer with it."""
    # For ever, and without what the bare loop has not: an average of the weights.
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, epochs=10**6, polyak=None))
    plain = dataclasses.replace(recipe, kfac=dataclasses.replace(recipe.kfac, enabled=False))
    stop = Stop(ranks)
    told = {"without": Parts(), "with": Parts()}
    trainers = {
        name: Trainer(which, cases[name], ranks=ranks, listener=told[name])
        for name, which in (("without", plain), ("with", recipe))
    }
    loops = {"bare": bare_loop(recipe, trainers["without"])}
    loops |= {name: trainer_loop(trainer, stop) for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(repeats + 1):  # the first warms up
        for name, loop in loops.items():
            took = timed(loop, steps, ranks.device)
            if turn:
                seconds[name].append(took)
        if not turn:
            for parts in told.values():
                parts.events.clear()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "milliseconds": {name: 1000 * value for name, value in medians.items()},
        "all": seconds,
        "without_to_bare": medians["without"] / medians["bare"],
        "with_to_bare": medians["with"] / medians["bare"],
        "cases_per_second": recipe.training.batch / medians["without"],
        "shares_without": told["without"].shares(),
        "shares_with": told["with"].shares(),
    }


@contextlib.contextmanager
def loaded(recipe: Recipe, ranks: Ranks) -> Iterator[data.Data]:
    with contextlib.closing(data.load(recipe.data, **serving(recipe, ranks))) as cases:
        yield cases


def row(name: str, found: dict[str, Any]) -> str:
    ms = found["milliseconds"]
    return (
        f"{name:24s} bare {ms['bare']:8.2f} ms   natgrad train without K-FAC {ms['without']:8.2f} ms, "
        f"{found['without_to_bare']:.3f} ×   with {ms['with']:8.2f} ms, {found['with_to_bare']:.2f} ×   "
        f"data {found['shares_without'].get('data', 0):.1%} without, {found['shares_with'].get('data', 0):.1%} with   "
        f"{found['cases_per_second']:,.0f} cases/s"
    )


def curves(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    return {folder.name: read(folder / "metrics.jsonl") for folder in folders}


def draw(runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Training loss (thin) and test accuracy or loss of each recipe; a run with and one without K-FAC are one panel."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, lines in runs.items():
        recipe, _, variant = name.partition("--")
        groups.setdefault(recipe, {})[variant or "kfac"] = lines
    figure, panels = pyplot.subplots(2, len(groups), figsize=(4.2 * len(groups), 6.4), squeeze=False)
    looks = {"kfac": ("K-FAC", "#0072b2"), "baseline": ("the same without K-FAC", "#555555")}
    for column, (recipe, variants) in enumerate(groups.items()):
        upper, lower = panels[0][column], panels[1][column]
        for variant, lines in variants.items():
            train = [line for line in lines if line["kind"] == "train"]
            test = [line for line in lines if line["kind"] == "test"]
            label, colour = looks.get(variant, (variant, None))
            upper.plot([t["epoch"] for t in train], [t["loss"] for t in train], colour, lw=1, label=label)
            key = "loss" if recipe.startswith("text") else "accuracy"
            values = [t[key] * (1 if key == "loss" else 100) for t in test]
            lower.plot([t["epoch"] for t in test], values, colour, marker=".", label=label)
            lower.set_ylabel("test loss" if key == "loss" else "test accuracy, %")
        upper.set_title(recipe)
        upper.set_ylabel("training loss")
        lower.set_xlabel("epoch")
        for panel in (upper, lower):
            panel.grid(alpha=0.3)
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.spines[["top", "right"]].set_visible(False)
        upper.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("recipes", nargs="*", help="recipes, each followed by its overrides")
    add("--steps", type=int, default=20, help="in a turn: short ones, so that the machine is the same for all")
    add("--repeats", type=int, default=15)
    add("--device")
    add("--out", type=Path)
    add("--plot", nargs="+", type=Path, help="folders of runs, named RECIPE or RECIPE--baseline")
    given = parser.parse_args(argv)
    if given.plot:
        draw(curves(given.plot), given.out or Path("training.png"))
        return
    wanted: list[tuple[str, list[str]]] = []
    for word in given.recipes:
        if "=" in word:
            wanted[-1][1].append(word)
        else:
            wanted.append((word, []))
    results = {}
    with processes.started(given.device) as ranks:
        for name, overrides in wanted:
            recipe = recipes.load(name, overrides)
            # Each with its own: files are decoded for one epoch at a time.
            with arithmetic(recipe), loaded(recipe, ranks) as some, loaded(recipe, ranks) as others:
                cases = {"without": some, "with": others}
                results[name] = measure(recipe, cases, ranks, steps=given.steps, repeats=given.repeats)
            print(row(name, results[name]), flush=True)
    if given.out:
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
        given.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "recipes": results}, indent=1))


if __name__ == "__main__":
    main()

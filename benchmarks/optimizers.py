"""K-FAC in front of SGD, Adam, AdamW, LARS and LAMB: a small convnet on digits, mini-batches of 100.

``python -m benchmarks.optimizers`` trains each optimizer alone, behind K-FAC with the KL clip on the gradient, and
behind K-FAC with the trust region on the step really taken, each with the best of the same three learning rates (by
the training loss at the end). It prints a table and writes docs/optimizers.png and docs/optimizers.json. The KL
divergence of a step is measured on its own batch, before and after it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from pytorch_optimizer import LARS, Lamb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.digits import convnet, load_cases

STEPS, BATCH, LOOK_EVERY = 300, 100, 10
CAP, STEP_CAP = 1e-3, 1e-4
VARIANTS = ("alone", "K-FAC, clip on the gradient", "K-FAC, clip on the step")
COLOURS = dict(zip(VARIANTS, ("#7f7f7f", "#e08214", "#2166ac"), strict=True))
Make = Callable[[Any, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Kind:
    make: Make
    rates: tuple[float, float, float]
    momentum: float = 0.0
    """What the guide's rule multiplies the cap on the gradient with, (1 − μ)², where momentum adds up steps."""


KINDS: dict[str, Kind] = {
    "SGD": Kind(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), (0.03, 0.1, 0.3), momentum=0.9),
    "Adam": Kind(lambda p, lr: torch.optim.Adam(p, lr=lr), (1e-3, 3e-3, 1e-2)),
    "AdamW": Kind(lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.01), (1e-3, 3e-3, 1e-2)),
    "LARS": Kind(lambda p, lr: LARS(p, lr=lr, momentum=0.9, trust_coefficient=0.01), (0.3, 1.0, 3.0), momentum=0.9),
    "LAMB": Kind(lambda p, lr: Lamb(p, lr=lr), (3e-3, 1e-2, 3e-2)),
}


@dataclass(frozen=True)
class Run:
    rate: float
    losses: list[float]
    """Training loss of all cases, every so many steps."""
    divergence: float | None
    """Median KL divergence of a step, on its own batch."""

    @property
    def last(self) -> float:
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def use_kfac(model: nn.Module, optimizer: torch.optim.Optimizer, kind: Kind, variant: str) -> None:
    if variant == VARIANTS[0]:
        return
    region = natgrad.TrustRegion(STEP_CAP, of="step")
    if variant == VARIANTS[1]:
        region = natgrad.TrustRegion(CAP * (1 - kind.momentum) ** 2)
    natgrad.KFAC(model, kl_clip=region, factor_update_steps=5, inv_update_steps=10).attach(optimizer)


def divergence(before: Tensor, after: Tensor) -> float:
    """The mean KL divergence between the predictions of two sets of logits."""
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def train(kind: Kind, rate: float, variant: str, *, steps: int, tick: Callable[[], None]) -> Run:
    pixels, labels = load_cases()
    images = pixels.reshape(-1, 1, 8, 8)
    model = convnet()
    optimizer = kind.make(model.parameters(), rate)
    use_kfac(model, optimizer, kind, variant)
    shuffle = torch.Generator().manual_seed(1)
    order = torch.cat([torch.randperm(len(images), generator=shuffle) for _ in range(1 + steps * BATCH // len(images))])
    losses, divergences = [], []
    for step, chosen in enumerate(order.split(BATCH)[: steps + 1]):
        if step % LOOK_EVERY == 0:
            with torch.no_grad():
                losses.append(functional.cross_entropy(model(images), labels).item())
        if step == steps:
            break
        optimizer.zero_grad()
        logits = model(images[chosen])
        functional.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
        if step % LOOK_EVERY == LOOK_EVERY // 2:
            with torch.no_grad():
                divergences.append(divergence(logits.detach(), model(images[chosen])))
        tick()
    return Run(rate, losses, statistics.median(divergences) if divergences else None)


Results = dict[str, dict[str, Run]]


def table(results: Results) -> Table:
    result = Table(title=f"Digits, {STEPS} steps: training loss at the end, and KL of a step", title_justify="left")
    result.add_column("optimizer")
    for variant in VARIANTS:
        result.add_column(variant, justify="right")
    for name, runs in results.items():
        cells = [f"{runs[v].last:.1e} (lr {runs[v].rate:g})\n{runs[v].divergence or 0:.0e}" for v in VARIANTS]
        result.add_row(name, *cells)
    return result


def draw(results: Results, *, out: Path) -> None:
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = pyplot.subplots(
        1, len(results), figsize=(2.5 * len(results), 3.2), layout="constrained", sharey=True
    )
    for panel, (name, runs) in zip(panels, results.items(), strict=True):
        for variant in VARIANTS:
            run = runs[variant]
            steps = [LOOK_EVERY * number for number in range(len(run.losses))]
            panel.plot(steps, run.losses, color=COLOURS[variant], linewidth=1.6, label=variant)
        panel.set(title=name, yscale="log", xlabel="step", xlim=(0, STEPS), ylim=(1e-9, 5))
    panels[0].set_ylabel("training loss")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="K-FAC in front of other optimizers.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "optimizers.png")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: Results = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(KINDS) * len(VARIANTS) * 3 * given.steps)
        for name, kind in KINDS.items():
            results[name] = {}
            for variant in VARIANTS:
                progress.update(task, description=f"{name}, {variant}")
                runs = [
                    train(kind, rate, variant, steps=given.steps, tick=lambda: progress.update(task, advance=1))
                    for rate in kind.rates
                ]
                results[name][variant] = min(runs, key=lambda run: run.last)
    console.print(table(results))
    draw(results, out=given.out)
    written = {
        "torch": str(torch.__version__),
        "cap_on_the_gradient": CAP,
        "cap_on_the_step": STEP_CAP,
        "runs": {
            name: {
                variant: {"lr": run.rate, "loss": run.last, "median_kl_of_a_step": run.divergence}
                for variant, run in runs.items()
            }
            for name, runs in results.items()
        },
    }
    given.out.with_suffix(".json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()

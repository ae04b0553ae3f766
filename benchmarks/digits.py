"""K-FAC against SGD and Adam on scikit-learn's digits, full batch, one thread: a deep autoencoder and a convnet.

``python benchmarks/digits.py`` prints one table a problem and writes docs/digits.png and docs/digits.json. SGD and Adam
get the best of five learning rates each, chosen by the lowest training loss they come to; K-FAC has one setting, the
same for both problems, found by hand in about a hundred trials: more tuning than the others got. The exit status is 1
where K-FAC misses a goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC

CASES = 1500
SEED = 0
WIDTHS = (64, 128, 64, 32, 12, 32, 64, 128, 64)
CODE = 12
COLOURS = {"SGD": "#7f7f7f", "Adam": "#e08214", "K-FAC": "#2166ac"}

# K-FAC, in front of SGD, both problems. Half of the usual momentum: the KL clip bounds each step as if there were none.
KFAC_LR = 0.3
KFAC_MOMENTUM = 0.5
KFAC_DAMPING = 1e-3
KFAC_KL_CLIP = 1e-2
EARLY_STEPS = 50


def refresh_interval(step: int) -> int:
    """Early factors change too fast for an old decomposition: five steps' age cost the autoencoder 50 steps."""
    return 1 if step < EARLY_STEPS else 5


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str
    title: str
    build: Callable[[], nn.Module]
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]
    predictive: str
    sgd_rates: Sequence[float]
    adam_rates: Sequence[float]
    goal: float
    """K-FAC is to need at most this share of the steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    optimizer: str
    rate: float
    losses: list[float]
    """Entry k: the loss after k steps."""
    seconds: list[float]
    """Entry k: CPU time of the first k steps."""

    @property
    def best(self) -> float:
        return min(loss for loss in self.losses if math.isfinite(loss))

    def steps_to(self, loss: float) -> int | None:
        return next((step for step, value in enumerate(self.losses) if value <= loss), None)


def autoencoder(seed: int = SEED) -> nn.Module:
    """64-128-64-32-12-32-64-128-64, tanh except the code and the output, weights N(0, 1/fan_in), zero biases."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for position, (fan_in, fan_out) in enumerate(itertools.pairwise(WIDTHS)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=fan_in**-0.5)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if fan_out != CODE and position < len(WIDTHS) - 2:
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)


def convnet() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_cases() -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1 and labels of 1,500 digits."""
    digits = load_digits()
    chosen = numpy.random.RandomState(0).permutation(len(digits.data))[:CASES]
    return torch.tensor(digits.data[chosen] / 16, dtype=torch.float32), torch.tensor(digits.target[chosen])


def load_pixels() -> Tensor:
    return load_cases()[0]


def problems() -> list[Problem]:
    pixels, labels = load_cases()
    return [
        Problem(
            name="autoencoder",
            title="Deep autoencoder",
            build=autoencoder,
            inputs=pixels,
            loss=lambda out: functional.binary_cross_entropy_with_logits(out, pixels, reduction="sum") / len(pixels),
            predictive="bernoulli",
            sgd_rates=(0.0075, 0.015, 0.03, 0.06, 0.12),
            adam_rates=(0.0025, 0.005, 0.01, 0.02, 0.04),
            goal=1 / 3,
        ),
        Problem(
            name="convnet",
            title="Convnet classifier",
            build=convnet,
            inputs=pixels.reshape(-1, 1, 8, 8),
            loss=lambda out: functional.cross_entropy(out, labels),
            predictive="categorical",
            sgd_rates=(0.025, 0.05, 0.1, 0.2, 0.4),
            adam_rates=(0.0075, 0.015, 0.03, 0.06, 0.12),
            goal=1 / 2,
        ),
    ]


def train(problem: Problem, *, optimizer: str, rate: float, steps: int, tick: Callable[[], None]) -> Run:
    model = problem.build()
    stepper: torch.optim.Optimizer
    if optimizer == "Adam":
        stepper = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        momentum = KFAC_MOMENTUM if optimizer == "K-FAC" else 0.9
        stepper = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    if optimizer == "K-FAC":
        kfac = KFAC(
            model,
            damping=KFAC_DAMPING,
            kl_clip=KFAC_KL_CLIP,
            factor_update_steps=1,
            inv_update_steps=refresh_interval,
            fisher="sampled",
            predictive=problem.predictive,
            generator=torch.Generator().manual_seed(SEED),
        )
        kfac.attach(stepper)

    losses, seconds = [], [0.0]
    # CPU time: on a machine that others use as well, the clock on the wall measures them too.
    start = time.process_time()
    for _ in range(steps):
        stepper.zero_grad()
        loss = problem.loss(model(problem.inputs))
        loss.backward()
        stepper.step()
        losses.append(loss.item())
        seconds.append(time.process_time() - start)
        tick()
    with torch.no_grad():
        losses.append(problem.loss(model(problem.inputs)).item())
    return Run(optimizer=optimizer, rate=rate, losses=losses, seconds=seconds)


def compare(problem: Problem, *, steps: int, quick: bool, progress: Progress) -> dict[str, list[Run]]:
    """Every run of every optimizer, best first."""
    rates = {"SGD": problem.sgd_rates, "Adam": problem.adam_rates, "K-FAC": (KFAC_LR,)}
    if quick:
        rates = {name: some[len(some) // 2 :][:1] for name, some in rates.items()}
    task = progress.add_task(problem.name, total=steps * sum(map(len, rates.values())))
    found: dict[str, list[Run]] = {}
    for name, some in rates.items():
        runs = []
        for rate in some:
            progress.update(task, description=f"{problem.name}, {name}, lr {rate:g}")
            runs.append(
                train(problem, optimizer=name, rate=rate, steps=steps, tick=lambda: progress.update(task, advance=1))
            )
        found[name] = sorted(runs, key=lambda run: run.best)
    progress.update(task, description=problem.name)
    return found


def table(problem: Problem, found: dict[str, list[Run]]) -> Table:
    kfac = found["K-FAC"][0]
    steps = len(kfac.losses) - 1
    result = Table(title=f"{problem.title}, {steps} steps", title_justify="left")
    headings = ("optimizer", "best lr", "best loss", "CPU seconds", "K-FAC there after")
    for position, heading in enumerate(headings):
        result.add_column(heading, justify="right" if position else "left")
    for name, runs in found.items():
        best = runs[0]
        reached = kfac.steps_to(best.best)
        there = "never" if reached is None else f"{reached} steps, {kfac.seconds[reached]:.1f} s"
        result.add_row(name, f"{best.rate:g}", f"{best.best:.4g}", f"{best.seconds[-1]:.1f}", there)
    return result


def met(problem: Problem, found: dict[str, list[Run]]) -> bool:
    kfac = found["K-FAC"][0]
    limit = int((len(kfac.losses) - 1) * problem.goal)
    reached = [kfac.steps_to(found[name][0].best) for name in ("SGD", "Adam")]
    return all(step is not None and step <= limit for step in reached)


def numbers(found: dict[str, list[Run]]) -> dict[str, Any]:
    kfac = found["K-FAC"][0]
    result: dict[str, Any] = {}
    for name, runs in found.items():
        best = runs[0]
        reached = kfac.steps_to(best.best)
        result[name] = {
            "learning_rate": best.rate,
            "best_loss": best.best,
            "cpu_seconds": round(best.seconds[-1], 2),
            "kfac_steps_to_best_loss": reached,
            "kfac_cpu_seconds_to_best_loss": None if reached is None else round(kfac.seconds[reached], 2),
            "best_loss_by_learning_rate": {f"{run.rate:g}": run.best for run in sorted(runs, key=lambda run: run.rate)},
        }
    return result


def draw(results: Sequence[tuple[Problem, dict[str, list[Run]]]], *, out: Path) -> None:
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = pyplot.subplots(1, len(results), figsize=(9, 3.9), layout="constrained")
    for panel, (problem, found) in zip(panels, results, strict=True):
        kfac = found["K-FAC"][0]
        steps = len(kfac.losses) - 1
        for name, runs in found.items():
            width = 2.2 if name == "K-FAC" else 1.4
            panel.plot(runs[0].losses, color=COLOURS[name], linewidth=width, label=f"{name}, lr {runs[0].rate:g}")
        for name in ("SGD", "Adam"):
            best = found[name][0].best
            reached = kfac.steps_to(best)
            if reached is None:
                continue
            panel.plot([reached, steps], [best, best], color=COLOURS[name], linewidth=0.9, linestyle=(0, (4, 3)))
            label = f"{name}'s best: K-FAC at step {reached}"
            panel.plot([reached], [best], "o", color=COLOURS[name], markeredgecolor="white", label=label, zorder=5)
        panel.set(title=problem.title, xlabel="step", yscale="log", xlim=(-0.01 * steps, steps))
        low, high = panel.get_ylim()
        if high < 10 * low:  # within one power of ten its multiples need labels of their own
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
            panel.yaxis.set_major_formatter(ScalarFormatter())
            panel.yaxis.set_minor_locator(NullLocator())
        panel.legend(frameon=False, loc="upper right", fontsize=9)
    panels[0].set_ylabel("training loss")
    figure.savefig(out, dpi=200)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="K-FAC against SGD and Adam on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "digits.png")
    parser.add_argument("--quick", action="store_true", help="only the middle one of each five learning rates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    console = Console()
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results = [
            (problem, compare(problem, steps=arguments.steps, quick=arguments.quick, progress=progress))
            for problem in problems()
        ]
    for problem, found in results:
        console.print(table(problem, found))

    draw(results, out=arguments.out)
    written = {
        "torch": str(torch.__version__),
        "steps": arguments.steps,
        "kfac": {"learning_rate": KFAC_LR, "momentum": KFAC_MOMENTUM, "damping": KFAC_DAMPING, "kl_clip": KFAC_KL_CLIP},
        "problems": {problem.name: numbers(found) for problem, found in results},
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(written, indent=2) + "\n")
    missed = [problem.name for problem, found in results if not met(problem, found)]
    if missed:
        console.print(f"K-FAC needs more than its share of the steps: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())

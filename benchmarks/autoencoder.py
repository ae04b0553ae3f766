"""A deep autoencoder on digits, full batch, three seeds: adaptive damping with the pi and with the joint rule.

``python -m benchmarks.autoencoder`` prints the losses after 100 and 400 steps, writes docs/autoencoder.png and
docs/autoencoder.json, and looks into why the joint rule can seem much worse than pi. The exit status is 1 where the
documented configuration misses its goal. SGD and Adam have the best of four learning rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.ticker import NullLocator, ScalarFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.digits import autoencoder, load_pixels
from natgrad.solve.damping import divisor
from natgrad.solve.linalg import symmetric_eigen

STEPS, SEEDS, L2 = 400, (0, 1, 2), 1e-5
GOALS = {100: 15.6, 400: 14.2}
LOOKED_AT = (20, 60, 150)
DAMPINGS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


def refresh_interval(step: int) -> int:
    return 1 if step < 50 else 5


@dataclass(frozen=True)
class Setting:
    name: str
    rule: str
    raw_momentum: float
    """Where the momentum of 0.9 is: summed before preconditioning, or by SGD after it."""
    documented: bool = False
    colour: str = "#000000"
    dash: str = "-"


SETTINGS = (
    Setting("pi, momentum before", "pi", 0.9, documented=True, colour="#2166ac"),
    Setting("joint, momentum before", "joint", 0.9, documented=True, colour="#b2182b"),
    Setting("pi, momentum after", "pi", 0.0, colour="#2166ac", dash="--"),
    Setting("joint, momentum after", "joint", 0.0, colour="#b2182b", dash="--"),
)


def objective(model: nn.Module, pixels: Tensor) -> Tensor:
    """Cross-entropy summed over pixels, averaged over cases, and L2."""
    fit = functional.binary_cross_entropy_with_logits(model(pixels), pixels, reduction="sum") / len(pixels)
    return fit + 0.5 * L2 * sum(parameter.square().sum() for parameter in model.parameters())


def documented(model: nn.Module, setting: Setting, seed: int) -> tuple[natgrad.KFAC, torch.optim.Optimizer]:
    """The configuration of the guide's section on adaptive damping, and the same with momentum in the optimizer."""
    if setting.raw_momentum:
        region = natgrad.TrustRegion(natgrad.schedules.cosine(0.2, over=STEPS, end=0.005), curvature="exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        region = natgrad.TrustRegion(0.1, of="step", curvature="exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    kfac = natgrad.KFAC(
        model,
        damping=natgrad.AdaptiveDamping(0.1),
        damping_rule=setting.rule,
        kl_clip=region,
        l2=L2,
        raw_momentum=setting.raw_momentum,
        factor_update_steps=1,
        inv_update_steps=refresh_interval,
        fisher="sampled",
        predictive="bernoulli",
        generator=torch.Generator().manual_seed(seed),
    )
    return kfac.attach(optimizer), optimizer


@dataclass(frozen=True)
class Run:
    losses: list[float]
    """Entry k: after k steps."""
    dampings: list[float]


def minimise(
    model: nn.Module, optimizer: torch.optim.Optimizer, pixels: Tensor, *, steps: int, tick: Callable[[], None]
) -> list[float]:
    """The losses after every number of steps, from 0 on."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(model, pixels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick()
    with torch.no_grad():
        losses.append(objective(model, pixels).item())
    return losses


def train(
    pixels: Tensor, setting: Setting, *, seed: int, steps: int, tick: Callable[[], None]
) -> tuple[Run, nn.Module, natgrad.KFAC]:
    model = autoencoder(seed)
    kfac, optimizer = documented(model, setting, seed)
    kfac.objective = lambda: objective(model, pixels)
    losses = minimise(model, optimizer, pixels, steps=steps, tick=tick)
    dampings = [float(value or 0) for value in kfac.history()["damping"]]
    return Run(losses, dampings), model, kfac


def train_first_order(
    pixels: Tensor, make: Callable[[Any], torch.optim.Optimizer], *, seed: int, steps: int
) -> list[float]:
    model = autoencoder(seed)
    return minimise(model, make(model.parameters()), pixels, steps=steps, tick=lambda: None)


FIRST_ORDER: dict[str, list[Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": [partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.0075, 0.015, 0.03, 0.06)],
    "Adam": [partial(torch.optim.Adam, lr=lr) for lr in (0.005, 0.01, 0.02, 0.04)],
}


# Why joint can seem worse


@dataclass(frozen=True)
class Look:
    """A direction v = (F̂ + λ)⁻¹∇ by one rule, measured with the exact Fisher F of the batch."""

    rule: str
    damping: float
    underestimate: float
    """vᵀFv / vᵀF̂v: how much more curvature there is than the blocks say."""
    best_rate: float
    """∇ᵀv / vᵀFv: the learning rate that is best for this direction."""
    reduction: float
    """(∇ᵀv)² / 2vᵀFv: how far the loss falls with it, by the quadratic model."""


def look(model: nn.Module, kfac: natgrad.KFAC, pixels: Tensor) -> list[Look]:
    """Both rules on the same factors, in float64."""
    wide, data = autoencoder(0).double(), pixels.double()
    wide.load_state_dict(model.state_dict())
    loss = functional.binary_cross_entropy_with_logits(wide(data), data, reduction="sum") / len(data)
    parameters = dict(wide.named_parameters())
    gradient = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    positions = {name: parameter.detach() for name, parameter in parameters.items()}
    found = []
    for rule in ("joint", "pi"):
        for damping in DAMPINGS:
            direction: dict[str, Tensor] = {}
            factored = 0.0
            for block in kfac.blocks:
                direction |= solved(block, gradient, rule, damping)
                factored += float(block.quadratic({name: part.float() for name, part in direction.items()}))
            slope = sum(float((gradient[name] * direction[name]).sum()) for name in gradient)
            derivatives: Any = torch.func.jvp(
                lambda state: torch.func.functional_call(wide, state, (data,)), (positions,), (direction,)
            )
            output, moved = derivatives
            p = output.sigmoid()
            exact = float((p * (1 - p) * moved.square()).sum()) / len(data)
            found.append(Look(rule, damping, exact / factored, slope / exact, slope**2 / (2 * exact)))
    return found


def solved(block: Any, gradient: dict[str, Tensor], rule: str, damping: float) -> dict[str, Tensor]:
    """A linear layer's part of the direction."""
    estimate = block.estimate()
    row, column = (symmetric_eigen(side.double()) for side in (estimate.row, estimate.column))
    matrix = torch.cat([layout.to_matrix(gradient[layout.name]) for layout in block.layouts], dim=2)
    rotated = row.vectors.mT @ matrix @ column.vectors
    rotated = rotated / divisor(rule, [row.values, column.values], estimate.scale.double(), damping)
    result = (row.vectors @ rotated @ column.vectors.mT)[0]
    return {block.weight.name: result[:, :-1].contiguous(), block.bias.name: result[:, -1].contiguous()}


# Output


def table(runs: dict[str, list[Run]], baselines: dict[str, list[list[float]]]) -> Table:
    result = Table(title=f"Deep autoencoder on digits, {len(next(iter(runs.values())))} seeds", title_justify="left")
    for position, heading in enumerate(("", "after 100 steps", f"after {STEPS}", "damping at the end")):
        result.add_column(heading, justify="right" if position else "left")

    def spread(values: Sequence[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    for name, some in runs.items():
        ends = " ".join(f"{run.dampings[-1]:.0e}" for run in some)
        result.add_row(name, spread([run.losses[100] for run in some]), spread([run.losses[-1] for run in some]), ends)
    for name, curves in baselines.items():
        result.add_row(name, spread([c[100] for c in curves]), spread([c[-1] for c in curves]), "")
    return result


def looks_table(step: int, looks: Sequence[Look]) -> Table:
    result = Table(title=f"The two rules on the same factors, after {step} steps", title_justify="left")
    for heading in ("rule", "λ", "vᵀFv / vᵀF̂v", "best learning rate", "loss reduction with it"):
        result.add_column(heading, justify="right" if heading != "rule" else "left")
    for one in looks:
        result.add_row(
            one.rule, f"{one.damping:g}", f"{one.underestimate:.0f}", f"{one.best_rate:.3f}", f"{one.reduction:.3f}"
        )
    return result


def draw(runs: dict[str, list[Run]], baselines: dict[str, list[list[float]]], *, out: Path) -> None:
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 4), layout="constrained", width_ratios=[3, 2])
    for name, colour in (("SGD", "#999999"), ("Adam", "#e08214")):
        for number, curve in enumerate(baselines.get(name, [])):
            left.plot(curve, color=colour, linewidth=1.1, label=f"{name}, best of four rates" if not number else None)
    for setting in SETTINGS:
        for number, run in enumerate(runs[setting.name]):
            label = f"K-FAC, {setting.name}" if not number else None
            style = {"color": setting.colour, "linestyle": setting.dash, "linewidth": 1.3}
            left.plot(run.losses, label=label, **style)
            right.plot(run.dampings, **style)
    left.set(xlabel="step", ylabel="training loss", yscale="log", ylim=(13.8, 30), xlim=(0, STEPS))
    left.set_yticks([14, 15, 16, 18, 20, 25, 30])
    left.yaxis.set_major_formatter(ScalarFormatter())
    left.yaxis.set_minor_locator(NullLocator())
    left.legend(frameon=False, fontsize=9)
    right.set(xlabel="step", ylabel="damping λ", yscale="log", xlim=(0, STEPS))
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def met(runs: dict[str, list[Run]]) -> bool:
    """Whether the documented configuration keeps to the goals, with every seed."""
    chosen = [run for setting in SETTINGS if setting.documented for run in runs[setting.name]]
    return all(run.losses[min(step, len(run.losses) - 1)] <= goal for run in chosen for step, goal in GOALS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description="Adaptive damping on a deep autoencoder.")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "autoencoder.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, pixels, seeds = Console(), load_pixels(), SEEDS[: arguments.seeds]
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: dict[str, list[Run]] = {}
    looks: dict[int, list[Look]] = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=STEPS * len(SETTINGS) * len(seeds))
        for setting in SETTINGS:
            progress.update(task, description=setting.name)
            runs[setting.name] = [
                train(pixels, setting, seed=seed, steps=STEPS, tick=lambda: progress.update(task, advance=1))[0]
                for seed in seeds
            ]
        progress.update(task, description="SGD, Adam")
        baselines = {
            name: [
                min(
                    (train_first_order(pixels, make, seed=seed, steps=STEPS) for make in makers),
                    key=lambda curve: curve[-1],
                )
                for seed in seeds
            ]
            for name, makers in FIRST_ORDER.items()
        }
        progress.update(task, description="looking inside")
        for steps in LOOKED_AT:
            _, model, kfac = train(pixels, SETTINGS[0], seed=0, steps=steps, tick=lambda: None)
            looks[steps] = look(model, kfac, pixels)
    console.print(table(runs, baselines))
    for steps, some in looks.items():
        console.print(looks_table(steps, some))
    draw(runs, baselines, out=arguments.out)
    written = {
        "torch": str(torch.__version__),
        "goals": GOALS,
        "loss": {
            name: {str(step): [round(run.losses[step], 4) for run in some] for step in GOALS}
            for name, some in runs.items()
        },
        "first_order": {
            name: {str(step): [round(curve[step], 4) for curve in curves] for step in GOALS}
            for name, curves in baselines.items()
        },
        "mean_loss": {name: statistics.mean(run.losses[-1] for run in some) for name, some in runs.items()},
        "rules": {str(steps): [vars(one) for one in some] for steps, some in looks.items()},
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(written, indent=2) + "\n")
    return 0 if met(runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())

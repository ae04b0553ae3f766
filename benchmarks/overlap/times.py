"""How long every step takes, where decompositions are made in the step, in turns, or beside training.

All configurations run one after the other in one process, SGD first and again at the end. The times of steps are those
between events on the training stream, one after each step, which nobody waits for; the mean is that of the whole wall
time. The warm-up has the first decomposition in it, and the second, for which threads and streams are made. Labels are
drawn anew in every step: a model that has learned its one batch by heart has no curvature left to decompose.

Of synchronous K-FAC with a refresh every 100 steps one step in 100 refreshes: that is what p99 leaves out, and worst
shows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.approximations.common import facts, text_table
from benchmarks.command import device_of, written_by
from benchmarks.laps import Laps, background_ended, counters, differences, oldest
from benchmarks.overlap.common import (
    COLOURS,
    OVERLAPS,
    chosen,
    every,
    set_style,
    write,
)
from benchmarks.workloads import (
    NETWORKS,
    PRECISIONS,
    SOLVERS,
    Configuration,
    Trainer,
    Workload,
    failing_into,
)

SGD = "sgd"
METHODS = (SGD, *(f"{solver}/{overlap}" for solver in SOLVERS for overlap in OVERLAPS))
SPIKE = 2.0  # times the median
LABELS = {
    "none": "all at once, in the step",
    "staggered": "staggered",
    "cpu": "background, CPU",
    "gpu": "background, GPU stream",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure."""

    steps: int
    warmup: int
    factor_steps: int
    inv_steps: int

    def kfac(self, method: str) -> dict[str, Any] | None:
        """Options of K-FAC; None for SGD."""
        if method == SGD:
            return None
        solver, overlap = method.split("/")
        return {
            "solver": solver,
            "overlap": OVERLAPS[overlap],
            "factor_update_steps": self.factor_steps,
            "inv_update_steps": self.inv_steps,
        }


@dataclass(kw_only=True)
class Measured:
    """One configuration. `ages`: of the oldest decomposition in use, after every step; `means`: of each turn."""

    name: str
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    metrics: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    error: str | None = None

    def summary(self, sgd: Measured | None) -> dict[str, float | int]:
        """In milliseconds, and relative to SGD's; empty where nothing was measured."""
        if not self.ms:
            return {}
        found: dict[str, float | int] = {
            "median": statistics.median(self.ms),
            "p99": percentile(self.ms, 0.99),
            "worst": max(self.ms),
            "mean": statistics.fmean(self.means),
            "worst_to_median": max(self.ms) / statistics.median(self.ms),
            "spikes": len(self.spikes()),
        }
        if sgd is not None and sgd.ms:
            found["median_to_sgd"] = found["median"] / statistics.median(sgd.ms)
            found["mean_to_sgd"] = found["mean"] / statistics.fmean(sgd.means)
        if self.ages:
            found |= {"mean_age": statistics.fmean(self.ages), "largest_age": max(self.ages)}
        return found

    def spikes(self) -> list[int]:
        """The steps that take more than twice the time of the median one."""
        return [number for number, ms in enumerate(self.ms) if ms > SPIKE * statistics.median(self.ms)]


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest that so large a part of all does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


# Measuring


def measure(measured: Measured, work: Workload, settings: Settings) -> None:
    """Adds what one configuration does, and leaves nothing of it behind."""
    with failing_into(measured), background_ended():
        _train(measured, work, settings)
    work.device.settle()


def _train(measured: Measured, work: Workload, settings: Settings) -> None:
    trainer = Trainer(work, kfac=settings.kfac(measured.name))
    try:
        _time_steps(measured, trainer, work, settings)
    finally:
        if trainer.kfac is not None:
            trainer.kfac.detach()


def _time_steps(measured: Measured, trainer: Trainer, work: Workload, settings: Settings) -> None:
    device, kfac = work.device, trainer.kfac
    # SGD has no second refresh to wait for, and its two turns are one configuration's steps together.
    warmup, steps = (settings.warmup, settings.steps) if kfac else (min(20, settings.warmup), -(-settings.steps // 2))
    for _ in range(warmup):
        _step(trainer, work)
    laps, ages = Laps(device), []
    device.reset_peak()
    start = device.now()
    laps.mark()
    for _ in range(steps):
        _step(trainer, work)
        laps.mark()
        if kfac is not None:
            ages.append(oldest(kfac))
    measured.means.append(1e3 * (device.now() - start) / steps)
    measured.ms += _rounded(differences(laps.seconds()))
    measured.host_ms += _rounded(differences(laps.host_seconds()))
    measured.ages += ages
    measured.peak_bytes = device.peak()
    if kfac is not None:
        measured.metrics = counters(kfac)


def _step(trainer: Trainer, work: Workload) -> None:
    work.draw_targets()
    trainer.step()


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in seconds]


# Reporting


def rows(found: Sequence[Measured]) -> list[list[str]]:
    """A table."""
    columns = {
        "median": "median",
        "p99": "p99",
        "worst": "worst",
        "mean": "mean",
        "worst_to_median": "worst/median",
        "median_to_sgd": "median x SGD",
        "mean_to_sgd": "mean x SGD",
        "spikes": f"> {SPIKE:g}x median",
        "mean_age": "mean age",
        "largest_age": "largest",
    }
    forms = dict.fromkeys(("median", "p99", "worst", "mean"), ".1f")
    forms |= {"spikes": "d", "mean_age": ".0f", "largest_age": "d"}
    last = {"decomposition_age": "last", "late_decompositions": "late", "background_failures": "failures"}
    result = [["ms a step", *columns.values(), *last.values(), "peak memory"]]
    sgd = sgd_of(found)
    for one in found:
        summary = one.summary(sgd)
        cells = [format(summary[name], forms.get(name, ".2f")) if name in summary else "-" for name in columns]
        counted = [str(one.metrics[name]) if one.metrics else "-" for name in last]
        memory = "-" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.2f} GiB"
        result.append([one.name if one.error is None else f"{one.name} (failed)", *cells, *counted, memory])
    return result


def sgd_of(found: Sequence[Measured]) -> Measured | None:
    """What others are compared with."""
    return next((one for one in found if one.name == SGD and one.ms), None)


def records(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """For machines to read."""
    sgd = sgd_of(found)
    return [{"name": one.name, "summary": one.summary(sgd), **asdict(one)} for one in found]


def restored(found: Mapping[str, Any]) -> list[Measured]:
    """From a JSON file."""
    return [Measured(**{name: run[name] for name in Measured.__dataclass_fields__}) for run in found["runs"]]


def draw(found: Sequence[Measured], *, title: str, out: Path) -> None:
    """Every step of every configuration over time: a panel each, solvers beside each other."""
    kfacs = {one.name: one for one in found if one.ms and one.name != SGD}
    solvers = [solver for solver in SOLVERS if any(name.startswith(f"{solver}/") for name in kfacs)]
    overlaps = [overlap for overlap in OVERLAPS if any(name.endswith(f"/{overlap}") for name in kfacs)]
    if not kfacs:
        return
    sgd = sgd_of(found)
    set_style()
    size = (max(6.0, 5.6 * len(solvers)), 1.1 + 1.75 * len(overlaps))
    figure, panels = pyplot.subplots(
        len(overlaps), len(solvers), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for row, overlap in enumerate(overlaps):
        for column, solver in enumerate(solvers):
            panel = panels[row][column]
            one = kfacs.get(f"{solver}/{overlap}")
            if one is None:
                panel.set_axis_off()
                continue
            _strip(panel, one, sgd, COLOURS[overlap])
            panel.set_title(f"{solver}, {LABELS[overlap]}", loc="left", fontsize=10, color=COLOURS[overlap])
    everything = [ms for one in (*kfacs.values(), *([sgd] if sgd else [])) for ms in one.ms]
    steps = max(len(one.ms) for one in kfacs.values())
    limits = {"xlim": (-0.015 * steps, 1.01 * steps), "ylim": (min(everything) / 1.25, max(everything) * 4)}
    panels[0][0].set(yscale="log", **limits)
    panels[0][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(everything) < 40 * min(everything) else (1,)))
    panels[0][0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panels[0][0].yaxis.set_minor_formatter(NullFormatter())
    for panel in panels[-1]:
        panel.set_xlabel("step")
    for row_of in panels:
        row_of[0].set_ylabel("ms")
    if sgd is not None:
        title += f"; dashed: SGD, {statistics.median(sgd.ms):.3g} ms"
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=170)
    pyplot.close(figure)


def _strip(panel: Any, one: Measured, sgd: Measured | None, colour: str) -> None:
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    panel.set_axisbelow(True)
    if sgd is not None:
        panel.axhline(statistics.median(sgd.ms), color=COLOURS[SGD], linewidth=1, linestyle=(0, (4, 3)))
    median, spikes = statistics.median(one.ms), one.spikes()
    panel.vlines(range(len(one.ms)), median, [max(ms, median) for ms in one.ms], color=colour, linewidth=0.8, alpha=0.6)
    panel.plot(one.ms, ".", color=colour, markersize=3.5, markeredgewidth=0)
    panel.plot(spikes, [one.ms[step] for step in spikes], "o", color=colour, markersize=5, markeredgewidth=0)
    summary = one.summary(sgd)
    words = [f"{name} {summary[name]:.3g}" for name in ("median", "p99")]
    words.append(f"worst {summary['worst']:,.0f} ms" if summary["worst"] >= 100 else f"worst {summary['worst']:.3g} ms")
    if "mean_to_sgd" in summary:
        words.append(f"mean {summary['mean_to_sgd']:.2f} × SGD")
    panel.text(0.995, 0.97, "   ".join(words), transform=panel.transAxes, ha="right", va="top", fontsize=9)


def title_of(head: Mapping[str, Any]) -> str:
    """What the picture shows, in words."""
    # What is called size now was called image when docs/overlap-times.json was written.
    found = {"size" if name == "image" else name: value for name, value in head["workload"].items()}
    work, settings = Configuration(**found), head["settings"]
    often = [every(settings[name], "step") for name in ("factor_steps", "inv_steps")]
    precision = {"tf32": "TF32", "fp32": "FP32"}.get(work.precision, work.precision)
    return (
        f"Time of every step: {work.network.label}, batch {work.batch}, {work.data}, {precision}, "
        f"{head['device'].removeprefix('NVIDIA ')}\n"
        f"statistics {often[0]}, decompositions {often[1]}"
    )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--model", choices=sorted(NETWORKS), default="resnet50")
    add("--batch", type=int, default=128)
    add("--size", type=int, help="height and width, or tokens (default: what the model is made for)")
    add("--precision", choices=PRECISIONS, help="default tf32 on a GPU, else fp32")
    add("--steps", type=int, default=320, help="measured, of each configuration (default %(default)s)")
    add("--warmup", type=int, help="steps before (default: those between decompositions, and 10)")
    add("--factor-steps", type=int, default=10, help="statistics every so many steps (default %(default)s)")
    add("--inv-steps", type=int, default=100, help="decompositions every so many steps (default %(default)s)")
    add("--only", help=f"with commas, of {', '.join(METHODS)} (default all that the device can)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("docs"), help="the folder of overlap-times.json and .png")
    add("--plot-only", type=Path, metavar="JSON", help="draw the picture of an earlier run again, beside it")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> bool:
    """Measures, prints a table, writes JSON and a picture; whether all of it worked."""
    if given.plot_only is not None:
        with written_by("benchmarks.overlap times", given.plot_only):
            earlier = json.loads(given.plot_only.read_text())
            runs, title = restored(earlier), title_of(earlier)
        draw(runs, title=title, out=given.plot_only.with_suffix(".png"))
        return True
    if min(given.batch, given.steps, given.factor_steps, given.inv_steps) < 1:
        raise ValueError("--batch, --steps, --factor-steps and --inv-steps are at least 1")
    device = device_of(given.device)
    names = chosen(given.only, METHODS, [name for name in METHODS if device.is_cuda or not name.endswith("/gpu")])
    settings = Settings(
        steps=given.steps,
        warmup=given.inv_steps + 10 if given.warmup is None else given.warmup,
        factor_steps=given.factor_steps,
        inv_steps=given.inv_steps,
    )
    precision = given.precision or ("tf32" if device.is_cuda else "fp32")
    device.set_precision(precision)
    configuration = Configuration(model=given.model, batch=given.batch, precision=precision, size=given.size)
    work = Workload(configuration, device)
    head = facts(device, workload=asdict(work.configuration), settings=asdict(settings))
    print(f"{work.configuration} on {device}, torch {torch.__version__}", flush=True)
    out: Path = given.out / "overlap-times.json"
    found = {name: Measured(name=name) for name in names}
    for name in [*names, *([SGD] if SGD in names else [])]:
        measure(found[name], work, settings)
        write(out, head, records(list(found.values())))  # a run that is stopped leaves what it has
        if found[name].means:
            print(f"{name}: {found[name].means[-1]:.2f} ms a step, worst {max(found[name].ms):.1f}", flush=True)
    measured = list(found.values())
    print(text_table(rows(measured)))
    draw(measured, title=title_of(head), out=out.with_suffix(".png"))
    return all(one.error is None for one in measured)

"""CIFAR-10 with the first paper's convnet (section 6.1, Figure 2): do decompositions beside training cost progress?

Four panels: training loss and test error, by updates and by the clock. All variants of a seed start from the same
weights and see the same crops and flips in the same order, from images that are on the device. Nothing interrupts
training: it leaves copies of the weights behind, which are tested when it is over, and decompositions in the background
get no time that the clock does not count. The training loss is that of the first training images, as they are.

The speed-up is that at equal progress: the seconds until the synchronous run has a training loss, over the seconds
until another has; for the synchronous run's last loss, for some before, and for the last that both have.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from rich.console import Console
from torch import Tensor

from benchmarks.approximations.common import facts, progress_bar, text_table
from benchmarks.cifar10 import Images, Settings, Training, Variant, batches, label_powers, load, padded, shuffled_crops
from benchmarks.command import device_of, written_by
from benchmarks.laps import Laps, background_ended, counters, oldest
from benchmarks.overlap.common import (
    COLOURS,
    OVERLAPS,
    chosen,
    every,
    set_style,
    write,
)
from benchmarks.workloads import Device

BASELINE = "synchronous"
VARIANTS = {
    "sgd": Variant(label="SGD with momentum", colour=COLOURS["sgd"], kfac=None),
    BASELINE: Variant(label="K-FAC, synchronous", colour=COLOURS["none"], kfac={}),
    "staggered": Variant(
        label="K-FAC, staggered", colour=COLOURS["staggered"], kfac={"overlap": OVERLAPS["staggered"]}
    ),
    "cpu": Variant(label="K-FAC, background (CPU)", colour=COLOURS["cpu"], kfac={"overlap": OVERLAPS["cpu"]}),
    "gpu": Variant(label="K-FAC, background (GPU stream)", colour=COLOURS["gpu"], kfac={"overlap": OVERLAPS["gpu"]}),
}
DEFAULT = ("sgd", BASELINE, "staggered", "cpu")
# By updates these lie on each other: each must let the others be seen.
LINES: dict[str, tuple[Any, float]] = {
    "sgd": ("-", 1.5),
    BASELINE: ("-", 3.0),
    "staggered": ((0, (1, 1.2)), 2.0),
    "cpu": ((0, (5, 2)), 1.6),
    "gpu": ((0, (5, 1.5, 1, 1.5)), 1.6),
}
LEVELS = (0.25, 0.5, 0.75, 1.0)  # of the synchronous run's updates, whose losses are to be reached


@dataclass(kw_only=True)
class Run:
    """One training run: numbers at each mark, of which the first is before the first update."""

    variant: str
    seed: int
    updates: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)
    mean_age: float | None = None
    metrics: dict[str, int] = field(default_factory=dict)

    def loss_at(self, part: float) -> float:
        """The lowest training loss so far, after a part of all updates."""
        return min(self.train_loss[: 1 + max(1, round(part * (len(self.updates) - 1)))])

    def until(self, loss: float, of: Sequence[float]) -> float | None:
        """Which of `of`, seconds or updates, it took to a training loss, interpolated; None: it never got there."""
        best = 0
        for index, value in enumerate(self.train_loss):
            if value <= loss:
                above = self.train_loss[best]
                part = (above - loss) / (above - value) if above > value else 0.0
                return of[best] + part * (of[index] - of[best])
            if value < self.train_loss[best]:
                best = index
        return None


# Training


class Marks:
    """Copies of the weights and moments, made without waiting."""

    def __init__(self, training: Training, device: Device) -> None:
        self._training, self.laps = training, Laps(device)
        self.updates: list[int] = []
        self._weights: list[dict[str, Tensor]] = []

    def add(self, update: int) -> None:
        """Here."""
        self.laps.mark()
        self.updates.append(update)
        self._weights.append({name: value.clone() for name, value in self._training.model.state_dict().items()})

    def tested(self, images: Images) -> list[tuple[float, float]]:
        """Loss and share of wrong answers at each."""
        found = []
        for weights in self._weights:
            self._training.model.load_state_dict(weights)
            found.append(self._training.test(images))
        return found


def train(
    name: str,
    settings: Settings,
    data: tuple[Images, Images, Images],
    *,
    seed: int,
    spacing: int,
    device: Device,
    tick: Callable[[int], None] = lambda count: None,
) -> Run:
    """All epochs of one variant. `data`: the padded training images, those that the training loss is of, the test's."""
    images, some, test = data
    steps = settings.epochs * (len(images) // settings.batch)
    generator = torch.Generator(device.torch).manual_seed(seed)
    training = Training(VARIANTS[name], settings, seed=seed, steps=steps, device=device)
    marks, ages, update = Marks(training, device), [], 0
    with background_ended():
        try:
            device.now()
            marks.add(0)
            for _ in range(settings.epochs):
                for pixels, labels in batches(shuffled_crops(images, generator), settings.batch):
                    training.step(pixels, labels)
                    update += 1
                    if training.kfac is not None:
                        ages.append(oldest(training.kfac))
                    if update % spacing == 0 or update == steps:
                        marks.add(update)
                        tick(update - marks.updates[-2])
            run = Run(variant=name, seed=seed, updates=marks.updates)
            run.seconds = [round(moment, 4) for moment in marks.laps.seconds()]
            if training.kfac is not None:
                run.metrics, run.mean_age = counters(training.kfac), statistics.fmean(ages)
        finally:
            training.close()
    run.train_loss = [loss for loss, _ in marks.tested(some)]
    run.test_loss, run.test_error = (list(column) for column in zip(*marks.tested(test), strict=True))
    return run


def warm_up(name: str, settings: Settings, images: Images, *, device: Device) -> None:
    """Some steps, with two decompositions: libraries choose their algorithms before anything is timed."""
    count = 2 * settings.inv_steps + 2 if device.is_cuda else 1
    training = Training(VARIANTS[name], settings, seed=0, steps=count, device=device)
    (pair, *_) = batches(shuffled_crops(images.first(settings.batch), _generator(device)), settings.batch)
    with background_ended():
        try:
            for _ in range(count):
                training.step(*pair)
        finally:
            training.close()


def _generator(device: Device) -> torch.Generator:
    return torch.Generator(device.torch).manual_seed(0)


# Comparing


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """How many times the seconds and the updates of another run the synchronous one takes to a training loss; means
    over seeds, None where one never gets there.
    """

    loss: float
    clock: float | None
    updates: float | None


def speed_ups(runs: Sequence[Run], name: str) -> list[SpeedUp]:
    """To the training losses that the synchronous run has at each of `LEVELS`."""
    return [_speed_up(runs, name, partial(_loss_of_first, level)) for level in LEVELS]


def _loss_of_first(level: float, base: Run, own: Run) -> float:
    return base.loss_at(level)


def common_speed_up(runs: Sequence[Run], name: str) -> SpeedUp:
    """To the last training loss that both have."""
    return _speed_up(runs, name, lambda base, own: max(base.loss_at(1.0), own.loss_at(1.0)))


def _speed_up(runs: Sequence[Run], name: str, goal: Callable[[Run, Run], float]) -> SpeedUp:
    pairs = [(base, own, goal(base, own)) for base, own in _pairs(runs, name)]
    clock = [_ratio(base.until(loss, base.seconds), own.until(loss, own.seconds)) for base, own, loss in pairs]
    updates = [_ratio(base.until(loss, base.updates), own.until(loss, own.updates)) for base, own, loss in pairs]
    mean_loss = _mean([loss for *_, loss in pairs])
    return SpeedUp(loss=mean_loss, clock=_mean_or_none(clock), updates=_mean_or_none(updates))


def progress_difference(runs: Sequence[Run], name: str) -> float:
    """How much larger the training loss is than the synchronous run's after as many updates: the mean over the second
    half of training, as a part.
    """
    parts = []
    for base, own in _pairs(runs, name):
        half = len(base.updates) // 2
        parts += [mine / theirs - 1 for mine, theirs in zip(own.train_loss[half:], base.train_loss[half:], strict=True)]
    return statistics.fmean(parts)


def spread_of_seeds(runs: Sequence[Run]) -> float | None:
    """The same between synchronous runs of two seeds, without sign: what is not to be taken for a difference."""
    of = [run for run in runs if run.variant == BASELINE]
    if len(of) < 2:
        return None
    half = len(of[0].updates) // 2
    parts = []
    for number, one in enumerate(of):
        for other in of[:number]:
            means = [statistics.fmean(run.train_loss[half:]) for run in (one, other)]
            parts.append(abs(means[0] / means[1] - 1))
    return statistics.fmean(parts)


def _pairs(runs: Sequence[Run], name: str) -> list[tuple[Run, Run]]:
    """The synchronous run and another of the same seed."""
    of = {(run.variant, run.seed): run for run in runs}
    seeds = [seed for variant, seed in of if variant == name and (BASELINE, seed) in of]
    return [(of[BASELINE, seed], of[name, seed]) for seed in seeds]


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _mean_or_none(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known and len(known) == len(numbers) else None


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Of every variant with the synchronous run, for machines to read; needs one run of each at least."""
    found: dict[str, Any] = {"spread_of_seeds": spread_of_seeds(runs)}
    for name in by_variant(runs):
        if name != BASELINE and _pairs(runs, name):
            found[name] = {
                "seconds_ratio": _mean(
                    [base.seconds[-1] / own.seconds[-1] for base, own in _pairs(runs, name) if own.seconds[-1]]
                ),
                "to_the_last_loss_of_both": asdict(common_speed_up(runs, name)),
                "to_losses_of_the_synchronous_run": {
                    str(level): asdict(one) for level, one in zip(LEVELS, speed_ups(runs, name), strict=True)
                },
                "train_loss_at_equal_updates": progress_difference(runs, name),
            }
    return found


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """In the order of `VARIANTS`."""
    found = {name: [run for run in runs if run.variant == name] for name in VARIANTS}
    return {name: some for name, some in found.items() if some}


# Reporting


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A table of means over seeds."""
    header = ["", "train loss", "test loss", "test error", "ms an update", "mean age", "late", "failures"]
    result = [header]
    for name, some in by_variant(runs).items():
        ages = [run.mean_age for run in some if run.mean_age is not None]
        counts = [
            str(sum(run.metrics[counter] for run in some)) if some[0].metrics else "-"
            for counter in ("late_decompositions", "background_failures")
        ]
        result.append(
            [
                VARIANTS[name].label,
                f"{_mean([run.train_loss[-1] for run in some]):.4f}",
                f"{_mean([run.test_loss[-1] for run in some]):.4f}",
                f"{100 * _mean([run.test_error[-1] for run in some]):.2f} %",
                f"{_mean([1e3 * run.seconds[-1] / run.updates[-1] for run in some]):.2f}",
                f"{_mean(ages):.1f}" if ages else "-",
                *counts,
            ]
        )
    return result


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers)


def sentences(runs: Sequence[Run]) -> list[str]:
    """What the comparison says, in words; a dash where a loss is not reached, or was there from the start."""
    told = []
    for name in by_variant(runs):
        if name == BASELINE or not _pairs(runs, name):
            continue
        common, levels = common_speed_up(runs, name), speed_ups(runs, name)
        each = ", ".join(f"{one.loss:.3f} {_times(one.clock)} (updates {_times(one.updates)})" for one in levels)
        told.append(
            f"{VARIANTS[name].label}: speed-up by the clock at equal progress: to the synchronous run's last training "
            f"loss {_times(levels[-1].clock)}, to the last that both have ({common.loss:.3f}) {_times(common.clock)} "
            f"(updates {_times(common.updates)}). On the way: {each}. "
            f"Training loss at equal updates {progress_difference(runs, name):+.1%}."
        )
    spread = spread_of_seeds(runs)
    if spread is not None:
        told.append(f"Two synchronous runs of different seeds: training losses {spread:.1%} apart.")
    return told


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x{ratio:.2f}"


def draw(runs: Sequence[Run], *, title: str, out: Path) -> None:
    """Training loss and test error, by updates above and by the clock below."""
    set_style()
    figure, panels = pyplot.subplots(2, 2, figsize=(10.5, 7.4), layout="constrained", sharey="col")
    for name, some in by_variant(runs).items():
        updates = [float(update) for update in some[0].updates]
        seconds = [_mean(column) for column in zip(*(run.seconds for run in some), strict=True)]
        losses = [run.train_loss for run in some]
        errors = [[100 * error for error in run.test_error] for run in some]
        for row, places in zip(panels, (updates, seconds), strict=True):
            for panel, curves in zip(row, (losses, errors), strict=True):
                # Before the first update all are the same, and far above.
                _curve(panel, places[1:], [curve[1:] for curve in curves], name)
    for row, label in zip(panels, ("updates", "seconds of training"), strict=True):
        for panel, name in zip(row, ("Training loss", "Test error (%)"), strict=True):
            panel.set(yscale="log", xlabel=label, title=f"{name}, by {label.split()[0]}", xlim=(0, None))
            panel.grid(axis="y", color="#e4e4e4", linewidth=0.7)
            panel.set_axisbelow(True)
            label_powers(panel)
    _note_speed_ups(panels[1][0], runs)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels), handlelength=3.2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=170)
    pyplot.close(figure)


def _curve(panel: Any, places: Sequence[float], curves: Sequence[Sequence[float]], name: str) -> None:
    columns = list(zip(*curves, strict=True))
    style, width = LINES[name]
    alpha = 0.45 if name == BASELINE else 1.0
    colour, marker = VARIANTS[name].colour, "o" if len(columns) < 3 else None
    panel.plot(
        places,
        [_mean(column) for column in columns],
        color=colour,
        linestyle=style,
        linewidth=width,
        alpha=alpha,
        marker=marker,
        label=VARIANTS[name].label,
    )
    if len(curves) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        panel.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)


def _note_speed_ups(panel: Any, runs: Sequence[Run]) -> None:
    """In the corner that curves that fall leave free."""
    names = [name for name in by_variant(runs) if name not in (BASELINE, "sgd") and _pairs(runs, name)]
    ratios = {name: common_speed_up(runs, name).clock for name in names}
    lines = [f"{VARIANTS[name].label} {_times(ratio)}".replace(" x", " × ") for name, ratio in ratios.items()]
    if lines:
        text = "\n".join(["speed-up to the last loss of both:", *lines])
        panel.text(0.985, 0.97, text, transform=panel.transAxes, ha="right", va="top", fontsize=9)


def title_of(head: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """What the picture shows, in words."""
    settings, seeds = Settings(**head["settings"]), len({run.seed for run in runs})
    spread = f"; mean and range of {seeds} seeds" if seeds > 1 else ""
    return (
        f"The first paper's convnet on CIFAR-10, batch {settings.batch}, {settings.epochs} epochs, "
        f"{head['device'].removeprefix('NVIDIA ')}\n"
        f"statistics {every(settings.factor_steps, 'update')}, decompositions {every(settings.inv_steps, 'update')}"
        f"{spread}"
    )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--data", type=Path, help="folder of the official batches, python or binary")
    add("--only", help=f"with commas, of {', '.join(VARIANTS)} (default {','.join(DEFAULT)})")
    add("--seeds", type=int, default=1, help="how many (default %(default)s)")
    add("--epochs", type=int, default=20)
    add("--batch", type=int, default=512)
    add("--lr", type=float, default=0.05, help="of SGD (default %(default)s)")
    add("--kfac-lr", type=float, default=0.1)
    add("--momentum", type=float, default=0.9, help="of both")
    add("--weight-decay", type=float, default=5e-4, help="of both")
    add("--damping", type=float, default=1e-3)
    add("--kl-clip", type=float, default=1e-4, help="at the start (default %(default)s)")
    add("--factor-steps", type=int, default=1, help="statistics every so many steps (default %(default)s)")
    add("--inv-steps", type=int, default=10, help="decompositions every so many steps (default %(default)s)")
    add("--every", type=int, default=50, help="updates from one point of the curves to the next (default %(default)s)")
    add("--limit", type=int, help="only the first so many images for training, and for testing")
    add("--precision", choices=("fp32", "tf32"), help="default tf32 on a GPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("docs"), help="the folder of overlap-cifar10.json and .png")
    add("--plot-only", type=Path, metavar="JSON", help="draw the picture of an earlier run again, beside it")
    parser.set_defaults(run=run)


def settings_of(given: argparse.Namespace) -> Settings:
    """In the other benchmark's words."""
    same = ("epochs", "batch", "lr", "momentum", "weight_decay", "kfac_lr", "damping", "kl_clip")
    return Settings(
        model="convnet",
        kfac_momentum=given.momentum,
        kfac_weight_decay=given.weight_decay,
        factor_steps=given.factor_steps,
        inv_steps=given.inv_steps,
        **{name: getattr(given, name) for name in same},
    )


def run(given: argparse.Namespace) -> bool:
    """Trains, prints tables, writes JSON and a picture."""
    if given.plot_only is not None:
        with written_by("benchmarks.overlap cifar10", given.plot_only):
            earlier = json.loads(given.plot_only.read_text())
            runs = [Run(**one) for one in earlier["runs"]]
            title = title_of(earlier, runs)
        draw(runs, title=title, out=given.plot_only.with_suffix(".png"))
        return True
    if given.data is None:
        raise ValueError("--data is needed: the folder of CIFAR-10's official batches")
    settings, device = settings_of(given), device_of(given.device)
    names = chosen(given.only, list(VARIANTS), DEFAULT)
    device.set_precision(given.precision or ("tf32" if device.is_cuda else "fp32"))
    training, test = (part.first(given.limit) for part in load(given.data, device.torch))
    steps = settings.epochs * (len(training) // settings.batch)
    if steps == 0:
        raise ValueError(f"{len(training)} training images are fewer than one batch of {settings.batch}")
    cropped = Images(pixels=padded(training.pixels), labels=training.labels)
    data = (cropped, training.first(len(test)), test)
    head = facts(device, train_cases=len(training), test_cases=len(test), settings=asdict(settings))
    print(f"convnet on {device}, {len(training)} training images, {steps} updates a run", flush=True)
    for name in names:
        warm_up(name, settings, cropped, device=device)
    return _train_all(names, settings, data, given, head, device, steps)


def _train_all(
    names: Sequence[str],
    settings: Settings,
    data: tuple[Images, Images, Images],
    given: argparse.Namespace,
    head: Mapping[str, Any],
    device: Device,
    steps: int,
) -> bool:
    out: Path = given.out / "overlap-cifar10.json"
    runs: list[Run] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=given.seeds * len(names) * steps)
        for seed in range(given.seeds):
            for name in names:
                progress.update(task, description=f"{name}, seed {seed}")
                one = train(
                    name,
                    settings,
                    data,
                    seed=seed,
                    spacing=given.every,
                    device=device,
                    tick=lambda count: progress.update(task, advance=count),
                )
                runs.append(one)
                # A run that is stopped leaves what it has.
                write(out, {**head, "comparison": comparison(runs)}, [asdict(run) for run in runs])
                progress.console.print(
                    f"{name}, seed {seed}: training loss {one.train_loss[-1]:.4f}, "
                    f"test error {100 * one.test_error[-1]:.2f} %, {one.seconds[-1]:.1f} s",
                    soft_wrap=True,
                )
    print(text_table(rows(runs)))
    console = Console()
    for sentence in sentences(runs):
        console.print(sentence, soft_wrap=True, highlight=False)
    draw(runs, title=title_of(head, runs), out=out.with_suffix(".png"))
    return True

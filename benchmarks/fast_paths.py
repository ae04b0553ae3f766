"""CIFAR-10 with K-FAC's fast paths on and off: training curves that have to lie on each other.

    python -m benchmarks.fast_paths --data FOLDER                      # ResNet-20, 10 epochs, three seeds
    python -m benchmarks.fast_paths --data FOLDER --model convnet --out docs/fast-paths-convnet.json
    python -m benchmarks.fast_paths --plot-only docs/fast-paths.json

*exact* is float32 without TF32 and every fast path off, *fast* is TF32 (on a GPU) with all of them on. Both start from
the same weights and see the same crops and flips in the same order. What is told is the largest distance between their
means over seeds, after any epoch, as a part, and that in spreads of seeds: the standard deviation of exact runs over
their seeds, as a part, of all epochs together. A distance of means of n seeds that is nothing but noise is about √(2/n)
of it, and the largest of several epochs more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from benchmarks import cifar10
from benchmarks.approximations.common import facts, progress_bar, text_table
from benchmarks.cifar10 import (
    MODELS,
    Images,
    Run,
    Settings,
    Variant,
    label_powers,
    load,
    padded,
)
from benchmarks.command import check_out, device_of, momentum, not_negative, positive, whole, written_by
from benchmarks.laps import background_ended
from benchmarks.overlap.common import set_style, write
from benchmarks.workloads import Device

EXACT, FAST = "exact", "fast"
LABELS = {EXACT: "all fast paths off, float32", FAST: "all fast paths on, TF32 on a GPU"}
COLOURS = {EXACT: "#0072b2", FAST: "#d55e00"}
CURVES = {"train_loss": "training loss", "test_error": "test error"}


def variant_options(name: str) -> tuple[dict[str, Any], AbstractContextManager[Any]]:
    """Options of KFAC, and what to train in. The one place where the fast paths are switched.

    Statistics follow torch's switch for TF32, which is off where they are exact: then there are patches, in float32.
    """
    return {"cuda_graph": name == FAST}, nullcontext()


@contextmanager
def in_variant(name: str, device: Device) -> Iterator[dict[str, Any]]:
    """With the variant's arithmetic and switches; the options of its KFAC."""
    device.set_precision("tf32" if name == FAST and device.is_cuda else "fp32")
    options, context = variant_options(name)
    with context:
        yield options


# Training


def train(
    name: str,
    settings: Settings,
    data: tuple[Images, Images],
    *,
    seed: int,
    device: Device,
    tick: Callable[[int], None] = lambda count: None,
) -> Run:
    """All epochs of one variant. `data` is the padded training set and the test set."""
    with in_variant(name, device) as options, background_ended():
        variant = Variant(label=LABELS[name], colour=COLOURS[name], kfac=options)
        return cifar10.train(name, settings, data, seed=seed, device=device, tick=tick, variant=variant)


# Comparing


def compared(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """By curve: the largest distance of the means after any epoch, as a part and in deviations of the exact runs' seeds
    (not known for one seed); empty while one variant lacks seeds that the other has.
    """
    by = {name: [run for run in runs if run.variant == name] for name in (EXACT, FAST)}
    if not by[EXACT] or {run.seed for run in by[EXACT]} != {run.seed for run in by[FAST]}:
        return {}
    found = {}
    for curve in CURVES:
        columns = {name: list(zip(*(getattr(run, curve) for run in some), strict=True)) for name, some in by.items()}
        means = {name: [statistics.fmean(column) for column in some] for name, some in columns.items()}
        parts = [abs(two / one - 1) if one else 0.0 for one, two in zip(means[EXACT], means[FAST], strict=True)]
        epoch = max(range(len(parts)), key=parts.__getitem__)
        told = {
            "largest_distance": abs(means[FAST][epoch] - means[EXACT][epoch]),
            "relative": parts[epoch],
            "after_epoch": epoch + 1.0,
            "last_exact": means[EXACT][-1],
            "last_fast": means[FAST][-1],
        }
        if len(by[EXACT]) > 1:
            # Of all epochs together: that of a few seeds after one epoch is too uncertain to divide by.
            spreads = [statistics.stdev(column) / (statistics.fmean(column) or 1.0) for column in columns[EXACT]]
            told["spread_of_seeds"] = statistics.fmean(spread**2 for spread in spreads) ** 0.5
            told["in_spreads"] = parts[epoch] / (told["spread_of_seeds"] or 1.0)
        found[curve] = told
    return found


def sentences(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the comparison says, in words."""
    result = []
    for curve, told in found.items():
        text = (
            f"{CURVES[curve]}: at the end {told['last_exact']:.4f} exact, {told['last_fast']:.4f} fast; "
            f"largest distance of the means {told['largest_distance']:.4f} ({told['relative']:.1%}), "
            f"after epoch {told['after_epoch']:.0f}"
        )
        if "in_spreads" in told:
            text += f"; that is {told['in_spreads']:.2f} deviations of seeds (one is {told['spread_of_seeds']:.1%})"
        result.append(text)
    return result


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A table of all runs."""
    result = [["", "seed", "train loss", "test loss", "test error", "seconds", "trouble"]]
    for run in runs:
        numbers = [f"{run.train_loss[-1]:.4f}", f"{run.test_loss[-1]:.4f}", f"{100 * run.test_error[-1]:.2f} %"]
        trouble = ", ".join(f"{count:g} {name}" for name, count in run.trouble.items())
        result.append([run.variant, str(run.seed), *numbers, f"{run.seconds[-1]:.1f}", trouble or "-"])
    return result


def draw(runs: Sequence[Run], *, title: str, out: Path) -> None:
    """Training loss and test error of both on top of each other: means as lines, every seed as a thin one."""
    set_style()
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    for name, style, width, alpha in ((EXACT, "-", 3.2, 0.5), (FAST, (0, (4, 1.6)), 1.7, 1.0)):
        some = [run for run in runs if run.variant == name]
        if not some:
            continue
        epochs = range(1, len(some[0].train_loss) + 1)
        losses, errors = [run.train_loss for run in some], [[100 * e for e in run.test_error] for run in some]
        for panel, curves in zip(panels, (losses, errors), strict=True):
            for curve in curves if len(curves) > 1 else ():
                panel.plot(epochs, curve, color=COLOURS[name], linewidth=0.6, alpha=0.5)
            means = [statistics.fmean(column) for column in zip(*curves, strict=True)]
            look = {"color": COLOURS[name], "linestyle": style, "linewidth": width, "alpha": alpha}
            marker = "o" if len(epochs) == 1 else None
            panel.plot(epochs, means, label=LABELS[name], marker=marker, **look)
    for panel, name in zip(panels, ("Training loss", "Test error (%)"), strict=True):
        panel.set(yscale="log", xlabel="epoch", title=name)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        panel.set_axisbelow(True)
        label_powers(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2, handlelength=3.2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=170)
    pyplot.close(figure)


def title_of(head: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """What the picture shows, in words."""
    settings, seeds = Settings(**head["settings"]), len({run.seed for run in runs})
    network = {"resnet20": "ResNet-20", "convnet": "The first paper's convnet"}[settings.model]
    spread = f", {seeds} seeds (thin) and their mean" if seeds > 1 else ""
    return (
        f"{network} on CIFAR-10 with K-FAC, {settings.factor_steps}/{settings.inv_steps}, batch {settings.batch}, "
        f"{head['device'].removeprefix('NVIDIA ')}{spread}"
    )


# The command


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of CIFAR-10's official batches, python or binary")
    add("--model", choices=sorted(MODELS), default="resnet20")
    add("--variants", default=f"{EXACT},{FAST}", help="with a comma (default %(default)s)")
    add("--seeds", type=whole(1), default=3, help="how many (default %(default)s)")
    add("--epochs", type=whole(1), default=10)
    add("--batch", type=whole(1), default=128)
    add("--lr", type=positive, default=0.1)
    add("--momentum", type=momentum, default=0.9)
    add("--weight-decay", type=not_negative, default=5e-4)
    add("--damping", type=positive, default=1e-3)
    add("--kl-clip", type=positive, default=1e-4, help="at the start (default %(default)s)")
    add("--factor-steps", type=whole(1), default=10, help="statistics every so many steps (default %(default)s)")
    add("--inv-steps", type=whole(1), default=100, help="decompositions every so many steps (default %(default)s)")
    add("--limit", type=whole(1), help="only the first so many images for training, and for testing")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("docs/fast-paths.json"), help="JSON; the picture goes beside it as .png")
    add("--plot-only", type=Path, metavar="JSON", help="the comparison and picture of an earlier run again")
    return parser


def settings_of(given: argparse.Namespace) -> Settings:
    """In the other benchmark's words; its SGD does not run here."""
    same = ("model", "epochs", "batch", "lr", "momentum", "weight_decay", "damping", "kl_clip")
    return Settings(
        kfac_lr=given.lr,
        kfac_momentum=given.momentum,
        kfac_weight_decay=given.weight_decay,
        factor_steps=given.factor_steps,
        inv_steps=given.inv_steps,
        **{name: getattr(given, name) for name in same},
    )


def train_all(given: argparse.Namespace) -> tuple[dict[str, Any], list[Run]]:
    """Both variants of every seed; a run that is stopped leaves what it has."""
    if given.data is None:
        raise ValueError("--data is needed: the folder of CIFAR-10's official batches")
    names = given.variants.split(",")
    if not set(names) <= set(LABELS):
        raise ValueError(f"--variants takes {', '.join(LABELS)}, got {given.variants}")
    check_out("--out", given.out)
    settings, device = settings_of(given), device_of(given.device)
    training, test = (part.first(given.limit) for part in load(given.data, device.torch))
    data = (Images(pixels=padded(training.pixels), labels=training.labels), test)
    steps = settings.epochs * (len(training) // settings.batch)
    if steps == 0:
        raise ValueError(f"{len(training)} training images are fewer than one batch of {settings.batch}")
    head = facts(device, train_cases=len(training), test_cases=len(test), settings=asdict(settings))
    print(f"{settings.model} on {device}, {len(training)} training images, {steps} steps a run", flush=True)
    runs: list[Run] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=given.seeds * len(names) * steps)

        def tick(count: int) -> None:
            progress.update(task, advance=count)

        for seed in range(given.seeds):
            for name in names:
                progress.update(task, description=f"{name}, seed {seed}")
                runs.append(train(name, settings, data, seed=seed, device=device, tick=tick))
                write(given.out, {**head, "comparison": compared(runs)}, [asdict(run) for run in runs])
    return head, runs


def earlier(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """What `train_all` has written; ValueError names a file that is something else, as another benchmark's runs are."""
    with written_by("benchmarks.fast_paths", path):
        head = json.loads(path.read_text())
        runs = [Run(**run) for run in head["runs"]]
        title_of(head, runs)
        if not {run.variant for run in runs} <= set(LABELS):
            raise KeyError(LABELS)
    return head, runs


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints, writes JSON and a picture."""
    parser = arguments()
    given = parser.parse_args(argv)
    try:
        if given.plot_only is not None:
            given.out = given.plot_only
            head, runs = earlier(given.plot_only)
        else:
            head, runs = train_all(given)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(text_table(rows(runs)))
    print("\n".join(sentences(compared(runs))), flush=True)
    draw(runs, title=title_of(head, runs), out=given.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

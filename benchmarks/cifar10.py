"""CIFAR-10 with SGD and with K-FAC in front of it: which Fisher, expand or reduce, with and without norm blocks.

    python -m benchmarks.cifar10 --data FOLDER                                # ResNet-20, 10 epochs, two seeds
    python -m benchmarks.cifar10 --data FOLDER --model convnet --out docs/cifar10-convnet.json
    python -m benchmarks.cifar10 --plot-only docs/cifar10.json

FOLDER holds the official python or binary batches; those of the five training batches that are there are used. All
variants of a seed start from the same weights and see the same crops and flips in the same order. K-FAC takes its steps
under a KL clip: where that sets their length, the learning rate does not, so the cosine schedule is applied to the
clip's square root as well. Seconds are those of training alone, with the device waited for at the end of each epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.approximations.common import text_table
from benchmarks.command import device_of, written_by
from benchmarks.workloads import Device
from natgrad.models import cifar_convnet, resnet20

SIZE, MARGIN = 32, 4
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TEST_BATCH = 1000
MODELS: dict[str, Callable[[], nn.Module]] = {"resnet20": resnet20, "convnet": cifar_convnet}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """SGD, or K-FAC in front of it where `kfac` has its options."""

    label: str
    colour: str
    kfac: Mapping[str, Any] | None
    needs_norm: bool = False


VARIANTS = {
    "sgd": Variant(label="SGD", colour="#555555", kfac=None),
    "empirical": Variant(label="K-FAC", colour="#0072b2", kfac={}),
    "sampled": Variant(label="K-FAC, sampled Fisher", colour="#d55e00", kfac={"fisher": "sampled"}),
    "reduce": Variant(label="K-FAC, reduce", colour="#009e73", kfac={"sharing": "reduce"}),
    "no-norm": Variant(
        label="K-FAC, norm layers left to SGD", colour="#cc79a7", kfac={"vectors": "optimizer"}, needs_norm=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; what `Variant` does not say."""

    model: str
    epochs: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    kfac_lr: float
    kfac_momentum: float
    kfac_weight_decay: float
    damping: float
    kl_clip: float
    factor_steps: int
    inv_steps: int


@dataclass(kw_only=True)
class Run:
    """One training run, a number an epoch; seconds from the start of training."""

    variant: str
    seed: int
    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    clip_factor: list[float] = field(default_factory=list)
    trouble: dict[str, float] = field(default_factory=dict)


# Data


@dataclass(frozen=True, kw_only=True)
class Images:
    """Pixels (N, height, width, 3) as uint8 and labels (N,), on the device."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Images:
        """Some of them."""
        return Images(pixels=self.pixels[:count], labels=self.labels[:count])


def load(folder: Path, device: torch.device) -> tuple[Images, Images]:
    """Training and test images from the official batches, python or binary, in the folder or one below it."""
    for place in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        for suffix in (".bin", ""):
            files = [path for n in range(1, 6) if (path := place / f"data_batch_{n}{suffix}").is_file()]
            test = place / f"test_batch{suffix}"
            if files and test.is_file():
                return _images(files, device), _images([test], device)
    raise FileNotFoundError(f"{folder} holds no data_batch_1 and test_batch of CIFAR-10, python or binary (.bin)")


def _images(files: Sequence[Path], device: torch.device) -> Images:
    pixels, labels = zip(*(_read(path) for path in files), strict=True)
    planes = torch.from_numpy(numpy.concatenate(pixels).reshape(-1, 3, SIZE, SIZE)).to(device)
    return Images(
        pixels=planes.permute(0, 2, 3, 1).contiguous(),
        labels=torch.from_numpy(numpy.concatenate(labels)).to(device).long(),
    )


def _read(path: Path) -> tuple[Any, Any]:
    """Pixels (N, 3072), channel by channel, and labels (N,)."""
    if path.suffix == ".bin":
        rows = numpy.fromfile(path, dtype=numpy.uint8).reshape(-1, 1 + 3 * SIZE * SIZE)
        return rows[:, 1:].copy(), rows[:, 0].copy()
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    return numpy.asarray(batch[b"data"], dtype=numpy.uint8), numpy.asarray(batch[b"labels"], dtype=numpy.uint8)


def padded(pixels: Tensor) -> Tensor:
    """(N, 32, 32, 3) → (N, 40, 40, 3), black around."""
    return functional.pad(pixels, (0, 0, MARGIN, MARGIN, MARGIN, MARGIN))


def shuffled_crops(images: Images, generator: torch.Generator) -> Images:
    """An epoch's images in a new order, each a random window of the padded one, every second mirrored."""
    count, device = len(images), images.pixels.device
    order = torch.randperm(count, generator=generator, device=device)
    top, left = torch.randint(2 * MARGIN + 1, (2, count, 1), generator=generator, device=device)
    mirrored = torch.randint(2, (count, 1), generator=generator, device=device).bool()
    along = torch.arange(SIZE, device=device)
    rows = top + along
    columns = left + torch.where(mirrored, SIZE - 1 - along, along)
    pixels = images.pixels[order[:, None, None], rows[:, :, None], columns[:, None, :]]
    return Images(pixels=pixels, labels=images.labels[order])


def normalised(pixels: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) → float32 (N, 3, H, W)."""
    mean, deviation = (pixels.new_tensor(numbers, dtype=torch.float32) for numbers in (MEAN, DEVIATION))
    scaled = (pixels.float() / 255 - mean) / deviation
    return scaled.permute(0, 3, 1, 2).contiguous()


# Training


def cosine(step: int, steps: int) -> float:
    """From 1 at the first step down to nearly 0 at the last."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


class Training:
    """A model with its optimizer, and a K-FAC in front of it where the variant has one."""

    def __init__(self, variant: Variant, settings: Settings, *, seed: int, steps: int, device: Device) -> None:
        torch.manual_seed(seed)
        self.model = MODELS[settings.model]().to(device.torch)
        with_kfac = variant.kfac is not None
        self._rate = settings.kfac_lr if with_kfac else settings.lr
        self._optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=self._rate,
            momentum=settings.kfac_momentum if with_kfac else settings.momentum,
            weight_decay=settings.kfac_weight_decay if with_kfac else settings.weight_decay,
        )
        self._step, self._steps = 0, steps
        self.kfac: natgrad.KFAC | None = None
        if variant.kfac is not None:
            self.kfac = natgrad.KFAC(
                self.model,
                damping=settings.damping,
                # Its last steps stay above zero, as the option must.
                kl_clip=lambda step: settings.kl_clip * max(cosine(step, steps), 1e-3) ** 2,
                factor_update_steps=settings.factor_steps,
                inv_update_steps=settings.inv_steps,
                generator=torch.Generator(device.torch).manual_seed(seed),
                **variant.kfac,
            )
            self.kfac.attach(self._optimizer)

    def step(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """One step; the loss stays on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * cosine(self._step, self._steps)
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(normalised(pixels)), labels)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self._optimizer.step()
        self._step += 1
        return loss.detach()

    @torch.no_grad()
    def test(self, images: Images) -> tuple[float, float]:
        """Loss and share of wrong answers."""
        self.model.eval()
        loss, wrong = 0.0, 0
        for pixels, labels in batches(images, TEST_BATCH, whole=False):
            logits = self.model(normalised(pixels))
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            wrong += int((logits.argmax(1) != labels).sum())
        self.model.train()
        return loss / len(images), wrong / len(images)

    def close(self) -> None:
        """K-FAC must not go on watching."""
        if self.kfac is not None:
            self.kfac.detach()


def batches(images: Images, size: int, *, whole: bool = True) -> Sequence[tuple[Tensor, Tensor]]:
    """In order; only whole ones, or the rest as well."""
    pairs = list(zip(images.pixels.split(size), images.labels.split(size), strict=True))
    return [pair for pair in pairs if len(pair[1]) == size] if whole else pairs


def train(
    name: str,
    settings: Settings,
    data: tuple[Images, Images],
    *,
    seed: int,
    device: Device,
    tick: Callable[[int], None],
    variant: Variant | None = None,
) -> Run:
    """All epochs of one variant, by default of that name. `data` is the padded training set and the test set."""
    images, test = data
    per_epoch = len(images) // settings.batch
    generator = torch.Generator(device.torch).manual_seed(seed)
    steps = settings.epochs * per_epoch
    training = Training(VARIANTS[name] if variant is None else variant, settings, seed=seed, steps=steps, device=device)
    run = Run(variant=name, seed=seed)
    seconds = 0.0
    try:
        for _ in range(settings.epochs):
            start = device.now()
            total = torch.zeros((), device=device.torch)
            for pixels, labels in batches(shuffled_crops(images, generator), settings.batch):
                total += training.step(pixels, labels)
                tick(1)
            seconds += device.now() - start
            loss, error = training.test(test)
            run.train_loss.append(total.item() / per_epoch)
            run.test_loss.append(loss)
            run.test_error.append(error)
            run.seconds.append(round(seconds, 3))
            if training.kfac is not None:
                metrics = training.kfac.metrics()
                run.clip_factor.append(float(metrics["clip_factor"] or 0.0))
                names = ("rejected_statistics", "failed_decompositions", "skipped_steps")
                run.trouble = {name: float(metrics[name] or 0) for name in names if metrics[name]}
    finally:
        training.close()
    return run


def warm_up(name: str, settings: Settings, images: Images, *, device: Device) -> float:
    """Seconds a step, decompositions apart; makes libraries choose their algorithms before anything is timed."""
    count = min(settings.factor_steps, len(images) // settings.batch)
    training = Training(VARIANTS[name], settings, seed=0, steps=2 * count + 2, device=device)
    some = batches(shuffled_crops(images.first(count * settings.batch), _generator(device)), settings.batch)
    training.step(*some[0])
    if device.is_cuda:
        for pair in some:
            training.step(*pair)
    start = device.now()
    for pair in some:
        training.step(*pair)
    seconds = device.now() - start
    training.close()
    return seconds / count


def _generator(device: Device) -> torch.Generator:
    return torch.Generator(device.torch).manual_seed(0)


# Reporting


def summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A table of means over seeds, with the range of the test error."""
    rows = [["", "train loss", "test loss", "test error", "range", "seconds an epoch", "x SGD"]]
    baseline = _mean([run.seconds[-1] for run in runs if run.variant == "sgd"])
    for name, some in by_variant(runs).items():
        errors = [100 * run.test_error[-1] for run in some]
        seconds = _mean([run.seconds[-1] for run in some])
        rows.append(
            [
                VARIANTS[name].label,
                f"{_mean([run.train_loss[-1] for run in some]):.4f}",
                f"{_mean([run.test_loss[-1] for run in some]):.4f}",
                f"{_mean(errors):.2f} %",
                f"{min(errors):.2f}-{max(errors):.2f}",
                f"{seconds / len(some[0].seconds):.2f}",
                f"{seconds / baseline:.2f}" if baseline else "",
            ]
        )
    return rows


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """In the order of `VARIANTS`."""
    found = {name: [run for run in runs if run.variant == name] for name in VARIANTS}
    return {name: some for name, some in found.items() if some}


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else 0.0


def write(path: Path, settings: Settings, runs: Sequence[Run], facts: Mapping[str, Any]) -> None:
    """All of it, as JSON; lists on one line."""
    lines = ",\n    ".join(json.dumps(asdict(run)) for run in runs)
    head = json.dumps({**facts, "settings": asdict(settings)}, indent=2).removesuffix("\n}")
    path.write_text(f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n')


def draw(runs: Sequence[Run], *, title: str, out: Path) -> None:
    """Training loss and test error against epochs, and test error against seconds."""
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for name, some in by_variant(runs).items():
        epochs = [epoch + 1.0 for epoch in range(len(some[0].train_loss))]
        seconds = [_mean(column) for column in zip(*(run.seconds for run in some), strict=True)]
        losses = [run.train_loss for run in some]
        errors = [[100 * error for error in run.test_error] for run in some]
        for panel, places, curves in zip(panels, (epochs, epochs, seconds), (losses, errors, errors), strict=True):
            _curve(panel, places, curves, VARIANTS[name])
    panels[0].set(yscale="log", xlabel="epoch", title="Training loss")
    panels[1].set(yscale="log", xlabel="epoch", title="Test error (%)")
    panels[2].set(yscale="log", xlabel="seconds of training", title="Test error (%)", xlim=(0, None))
    for panel in panels:
        label_powers(panel)
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        panel.set_axisbelow(True)
    for panel in panels[:2]:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels), columnspacing=1.6)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.savefig(out, dpi=200)
    pyplot.close(figure)


def _curve(panel: Any, places: Sequence[float], curves: Sequence[Sequence[float]], variant: Variant) -> None:
    columns = list(zip(*curves, strict=True))
    marker = "o" if len(columns) <= 15 else None
    means = [_mean(column) for column in columns]
    style = {"color": variant.colour, "marker": marker, "markersize": 3.5, "linewidth": 1.8}
    panel.plot(places, means, label=variant.label, **style)
    if len(curves) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        panel.fill_between(places, low, high, color=variant.colour, alpha=0.18, linewidth=0)


def label_powers(panel: Any) -> None:
    """Numbers on an axis that may have few powers of ten or none."""
    low, high = panel.get_ylim()
    if high < 30 * low:  # within little more than a power of ten its multiples need labels of their own
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 4 * low else (1, 1.5, 2, 3, 5, 7)
        panel.yaxis.set_major_locator(LogLocator(subs=subs))
        formatter = ScalarFormatter()
        formatter.set_scientific(False)
        panel.yaxis.set_major_formatter(formatter)
        panel.yaxis.set_minor_locator(NullLocator())


def title_of(settings: Settings, seeds: int) -> str:
    """What the picture shows, in words."""
    network = {"resnet20": "ResNet-20", "convnet": "The first paper's convnet"}[settings.model]
    spread = f", mean and range of {seeds} seeds" if seeds > 1 else ""
    return f"{network} on CIFAR-10, batch {settings.batch}, {settings.epochs} epochs, cosine schedule{spread}"


# The command


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="CIFAR-10 with SGD and with K-FAC's variants.")
    add = parser.add_argument
    add("--data", type=Path, help="folder of the official batches, python or binary")
    add("--model", choices=sorted(MODELS), default="resnet20")
    add("--variants", default=",".join(VARIANTS), help="with commas (default %(default)s)")
    add("--seeds", default="0,1", help="with commas (default %(default)s)")
    add("--epochs", type=int, default=10)
    add("--batch", type=int, default=128)
    add("--lr", type=float, help="of SGD (default 0.1; convnet 0.02)")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=5e-4)
    add("--kfac-lr", type=float, default=0.1)
    add("--kfac-momentum", type=float, default=0.9)
    add("--kfac-weight-decay", type=float, default=5e-4)
    add("--damping", type=float, default=1e-3)
    add("--kl-clip", type=float, help="at the start (default 1e-2 (1 - momentum)²)")
    add("--factor-steps", type=int, default=10, help="statistics every so many steps (default %(default)s)")
    add("--inv-steps", type=int, default=100, help="decompositions every so many steps (default %(default)s)")
    add("--train-cases", type=int, help="only the first so many")
    add("--test-cases", type=int, help="only the first so many")
    add("--precision", choices=("fp32", "tf32"), help="default tf32 on a GPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("docs/cifar10.json"), help="JSON; the picture goes beside it as .png")
    add("--plot-only", type=Path, metavar="JSON", help="draw the picture of an earlier run again, beside it")
    return parser


def settings_of(given: argparse.Namespace) -> Settings:
    """With the defaults that depend on others."""
    kl_clip = round(1e-2 * (1 - given.kfac_momentum) ** 2, 9) if given.kl_clip is None else given.kl_clip
    rate = {"resnet20": 0.1, "convnet": 0.02}[given.model] if given.lr is None else given.lr
    names = [name for name in Settings.__dataclass_fields__ if name not in ("kl_clip", "lr")]
    return Settings(kl_clip=kl_clip, lr=rate, **{name: getattr(given, name) for name in names})


def chosen_variants(given: str, model: str) -> list[str]:
    """Those asked for that apply: without norm layers none can be left to SGD."""
    names = given.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants takes {', '.join(VARIANTS)}, got {unknown[0]}")
    return [name for name in names if model != "convnet" or not VARIANTS[name].needs_norm]


def redraw(path: Path) -> None:
    """The picture of a JSON file; ValueError names one that is something else."""
    with written_by("benchmarks.cifar10", path):
        found = json.loads(path.read_text())
        runs = [Run(**run) for run in found["runs"]]
        settings = Settings(**found["settings"])
        if not {run.variant for run in runs} <= set(VARIANTS):  # of `benchmarks.fast_paths`
            raise KeyError(VARIANTS)
    draw(runs, title=title_of(settings, len({run.seed for run in runs})), out=path.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints a table, writes JSON and a picture."""
    parser = arguments()
    given = parser.parse_args(argv)
    if given.plot_only is not None:
        try:
            redraw(given.plot_only)
        except ValueError as error:
            parser.error(str(error))
        return 0
    if given.data is None:
        parser.error("--data is needed: the folder of CIFAR-10's official batches")
    settings = settings_of(given)
    try:
        names, device = chosen_variants(given.variants, given.model), device_of(given.device)
    except ValueError as error:
        parser.error(str(error))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    device.set_precision(given.precision or ("tf32" if device.is_cuda else "fp32"))
    training, test = (part.first(n) for part, n in zip(load(given.data, device.torch), _cases(given), strict=True))
    data = (Images(pixels=padded(training.pixels), labels=training.labels), test)
    steps = settings.epochs * (len(training) // settings.batch)
    if steps == 0:
        parser.error(f"{len(training)} training images are fewer than one batch of {settings.batch}")
    facts = {
        "natgrad": natgrad.__version__,
        "torch": str(torch.__version__),
        "device": str(device),
        "train_cases": len(training),
        "test_cases": len(test),
    }
    print(f"{settings.model} on {device}, {len(training)} training images, {steps} steps a run", flush=True)
    estimates = {name: warm_up(name, settings, data[0], device=device) for name in names}
    minutes = len(seeds) * steps * sum(estimates.values()) / 60
    each = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in estimates.items())
    print(f"ms a step without decompositions: {each}; about {minutes:.1f} minutes in all", flush=True)

    runs: list[Run] = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console()) as progress:
        task = progress.add_task("", total=len(seeds) * len(names) * steps)
        for seed in seeds:
            for name in names:
                progress.update(task, description=f"{name}, seed {seed}")
                run = train(
                    name,
                    settings,
                    data,
                    seed=seed,
                    device=device,
                    tick=lambda count: progress.update(task, advance=count),
                )
                runs.append(run)
                write(given.out, settings, runs, facts)  # a run that is stopped leaves what it has
                trouble = f", {run.trouble}" if run.trouble else ""
                progress.console.print(
                    f"{name}, seed {seed}: training loss {run.train_loss[-1]:.4f}, "
                    f"test error {100 * run.test_error[-1]:.2f} %, {run.seconds[-1]:.1f} s{trouble}",
                    soft_wrap=True,
                )
    print(text_table(summary_rows(runs)))
    draw(runs, title=title_of(settings, len(seeds)), out=given.out.with_suffix(".png"))
    return 0


def _cases(given: argparse.Namespace) -> tuple[int | None, int | None]:
    return given.train_cases, given.test_cases


if __name__ == "__main__":
    raise SystemExit(main())

"""What the papers' approximations cost and save: three measurements, each a table and, with ``--out``, JSON.

    python -m benchmarks.approximations alexnet    # AlexNet's first linear layer with three factors and with two
    python -m benchmarks.approximations reduce     # expand (KFC) and reduce (Appendix A), per layer of ResNet-50
    python -m benchmarks.approximations sharing    # factors that layers have in common, kept and decomposed once

*alexnet*: a 9216-input linear layer on a feature map of 256 × 36 has three factors by default (Ba et al. 2017, section
4); with ``doubly_factored_above=None`` it has two, one of them 9217². Steps of each kind are timed alone.

*reduce*: for every distinct convolution of ResNet-50, the time of the two ways' input and output factors beside the
layer's own forward and backward pass in the same run; totals count each convolution as often as it occurs.

*sharing*: factors and eigendecompositions of one K-FAC step, as they are, and as they would be if each block had its
own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.timing import (
    DECOMPOSE,
    KINDS,
    PRECISIONS,
    PRECONDITION,
    STEP,
    Configuration,
    Device,
    Plan,
    Trainer,
    Workload,
)
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.models import GPT, AlexNet, GoogLeNet, resnet50
from natgrad.solve.solver import solve_eigen
from natgrad.statistics.operations import Convolution

GIB, MIB = 2**30, 2**20


# Common


def text_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows of cells in columns; the first so many columns are set to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def megabytes(count: int | None) -> str:
    """In MiB, or a dash."""
    return "-" if count is None else f"{count / MIB:,.1f} MiB"


def milliseconds(seconds: float | None) -> str:
    """With three digits or more, or a dash."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def median_seconds(call: Callable[[], Any], device: Device, *, repeats: int, at_least: float = 0.0) -> float:
    """Of one call, called before. Calls too short for the clock are timed several together."""
    call()
    start = device.now()
    call()
    once = device.now() - start
    together = max(1, min(100, int(at_least / max(once, 1e-6))))
    times = []
    for _ in range(repeats):
        start = device.now()
        for _ in range(together):
            call()
        times.append((device.now() - start) / together)
    return statistics.median(times)


def facts(device: Device, **more: Any) -> dict[str, Any]:
    """What was measured where."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "natgrad": natgrad.__version__,
        "torch": str(torch.__version__),
        "device": str(device),
        **more,
    }


def progress_bar() -> Progress:
    """The bar of all three."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console())


def own_factors(blocks: Iterable[KroneckerBlock]) -> dict[Hashable, Factor]:
    """Each block's factors by block and number: shared ones appear once a block."""
    return {(block.key, number): factor for block in blocks for number, factor in enumerate(block.factors())}


def distinct_factors(blocks: Iterable[KroneckerBlock]) -> dict[Hashable, Factor]:
    """Every factor once."""
    return {factor: factor for factor in own_factors(blocks).values()}


def decomposition_bytes(factor: Factor) -> int:
    """Eigenvalues and, where the factor is not diagonal, eigenvectors."""
    values = factor.sum.numel() // (1 if factor.diagonal else factor.sum.shape[-1])
    return (values + (0 if factor.diagonal else factor.sum.numel())) * factor.sum.element_size()


@torch.no_grad()
def decomposing_seconds(factors: Mapping[Hashable, Factor], device: Device, *, repeats: int) -> float:
    """Of the eigendecompositions of all of them, alone on the device."""
    means = {key: factor.mean() for key, factor in factors.items()}
    times = []
    for _ in range(repeats):
        start = device.now()
        solve_eigen(means)
        times.append(device.now() - start)
    return statistics.median(times)


# AlexNet: three factors or two


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the steps of one method cost: medians of seconds and peak bytes by kind of step; on the CPU no peaks."""

    name: str
    seconds: dict[str, float]
    peak_bytes: dict[str, int | None]
    factor_bytes: int = 0
    decomposition_bytes: int = 0
    report_bytes: int = 0
    eigen_seconds: float | None = None
    line: str = ""
    failed: float = 0.0

    @property
    def peak(self) -> int | None:
        """The most over all kinds of step."""
        return max((peak for peak in self.peak_bytes.values() if peak is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images and labels, the same for every method."""

    images: Tensor
    labels: Tensor


def step_costs(
    name: str,
    build: Callable[[], nn.Module],
    data: Batch,
    device: Device,
    *,
    kfac: Mapping[str, Any] | None,
    layer: str,
    repeats: int,
    tick: Callable[[str], None] = lambda what: None,
) -> StepCosts:
    """Times each kind of step of SGD (`kfac` None) or of K-FAC with these options, and what it keeps.

    `layer` is the parameter whose line of the report is kept.
    """
    device.settle()
    before = device.allocated() - data.images.nbytes - data.labels.nbytes
    torch.manual_seed(0)
    model = build().to(device.torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    plan = Plan()
    preconditioner = (
        None if kfac is None else natgrad.KFAC(model, optimizer=optimizer, **plan.options(), **kfac)  # type: ignore[arg-type]
    )

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(data.images), data.labels).backward()  # type: ignore[no-untyped-call, unused-ignore]
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()

    def timed() -> float:
        start = device.now()
        step()
        return device.now() - start

    kinds = (STEP,) if preconditioner is None else KINDS
    tick(f"{name}: first step")
    step()
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for kind in kinds:
        tick(f"{name}: {kind}")
        # Not timed: the step in which the plan is made, and one in which cuDNN chooses its algorithms.
        untimed = 0 if kind == DECOMPOSE else 1
        plan.add([PRECONDITION, *[kind] * (untimed + repeats)])
        for _ in range(1 + untimed):
            step()
        device.reset_peak()
        seconds[kind] = statistics.median([timed() for _ in range(repeats)])
        peak = device.peak()
        peaks[kind] = None if peak is None else peak - before
        if preconditioner is not None:
            _check_kind(preconditioner, kind)
    if preconditioner is None:
        return StepCosts(name=name, seconds=seconds, peak_bytes=peaks)
    tick(f"{name}: eigendecompositions alone")
    factors = distinct_factors(preconditioner.blocks)
    report = preconditioner.report()
    line = report[layer]
    costs = StepCosts(
        name=name,
        seconds=seconds,
        peak_bytes=peaks,
        factor_bytes=sum(factor.bytes for factor in factors.values()),
        decomposition_bytes=sum(map(decomposition_bytes, factors.values())),
        report_bytes=report.bytes,
        eigen_seconds=decomposing_seconds(factors, device, repeats=repeats),
        line=f"{line.parameter}: {line.block}, {line.factors}, {megabytes(line.bytes)}",
        failed=float(preconditioner.metrics()["failed_decompositions"] or 0),
    )
    preconditioner.detach()
    return costs


def _check_kind(kfac: natgrad.KFAC, kind: str) -> None:
    """The times would be worth nothing if steps did not do what was planned."""
    metrics = kfac.metrics()
    did = (metrics["factor_age"] == 0, metrics["decomposition_age"] == 0)
    if did != (kind != PRECONDITION, kind == DECOMPOSE):
        raise RuntimeError(f"a step planned as {kind!r} (took statistics, decomposed) = {did}")


def alexnet_rows(results: Sequence[StepCosts]) -> list[list[str]]:
    """A row a quantity, a column a method."""
    sgd = results[0].seconds[STEP]

    def row(label: str, cell: Callable[[StepCosts], str]) -> list[str]:
        return [label, *(cell(result) for result in results)]

    def time_of(kind: str) -> Callable[[StepCosts], str]:
        def cell(result: StepCosts) -> str:
            seconds = result.seconds.get(kind)
            return "" if seconds is None else f"{milliseconds(seconds)} ms (x{seconds / sgd:.2f})"

        return cell

    kfac = results[1:]
    rows = [
        row("", lambda result: result.name),
        ["SGD step", f"{milliseconds(sgd)} ms", *[""] * len(kfac)],
        *(row(f"{kind} step", time_of(kind)) for kind in KINDS),
        row(
            "eigendecompositions alone",
            lambda result: "" if result.eigen_seconds is None else f"{milliseconds(result.eigen_seconds)} ms",
        ),
        row("factors", lambda result: megabytes(result.factor_bytes) if result.factor_bytes else ""),
        row("decompositions", lambda result: megabytes(result.decomposition_bytes) if result.factor_bytes else ""),
    ]
    if results[0].peak is not None:
        rows.append(row("peak memory", lambda result: megabytes(result.peak)))
    return rows


def run_alexnet(given: argparse.Namespace, device: Device) -> dict[str, Any]:
    """The subcommand."""
    batch = given.batch or (128 if device.is_cuda else 8)
    generator = torch.Generator().manual_seed(0)
    data = Batch(
        images=torch.randn(batch, 3, given.image, given.image, generator=generator).to(device.torch),
        labels=torch.randint(given.classes, (batch,), generator=generator).to(device.torch),
    )
    every: dict[str, Mapping[str, Any] | None] = {
        "SGD": None,
        "three factors": {},
        "two factors": {"doubly_factored_above": None},
    }
    chosen = ["SGD", *(name for name in every if name.split()[0] in given.cases.split(","))]
    with progress_bar() as progress:
        task = progress.add_task("", total=2 + 5 * (len(chosen) - 1))
        results = [
            step_costs(
                name,
                lambda: AlexNet(num_classes=given.classes),
                data,
                device,
                kfac=every[name],
                layer="classifier.1.weight",
                repeats=given.repeats,
                tick=lambda what: progress.update(task, description=what, advance=1),
            )
            for name in chosen
        ]
    where = f"AlexNet, {given.image}x{given.image}, batch {batch}, {given.precision}, on {device}"
    print(f"{where}, torch {torch.__version__}")
    print(text_table(alexnet_rows(results)))
    for result in results[1:]:
        print(f"{result.name}: {result.line}")
        if result.report_bytes != result.factor_bytes + result.decomposition_bytes:
            print(f"{result.name}: report() counts {megabytes(result.report_bytes)}, not the sum of the two above")
        if result.failed:
            print(f"{result.name}: {result.failed:g} decompositions failed")
    return {
        **facts(device, benchmark="alexnet", batch=batch, image=given.image, precision=given.precision),
        "methods": [asdict(result) for result in results],
    }


# Reduce beside expand


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What decides the cost of a convolution's factors, apart from the batch."""

    inputs: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    image: tuple[int, int]
    first: bool
    """Reads the images themselves: its backward pass makes no derivative of them."""

    def __str__(self) -> str:
        stride = "" if self.stride == (1, 1) else f" /{self.stride[0]}"
        return f"{self.inputs}→{self.outputs} {self.kernel[0]}×{self.kernel[1]}{stride} on {self.image[0]}²"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A geometry, the first convolution that has it, and how many there are."""

    name: str
    geometry: Geometry
    count: int


def collect_layers(model: nn.Module, image: int) -> list[Layer]:
    """The distinct convolutions of a model on the CPU for images of this size, in the order in which they run."""
    seen: dict[Geometry, list[str]] = {}
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}

    def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        assert not isinstance(module.padding, str)
        if module.groups != 1 or any(d != 1 for d in module.dilation):
            raise NotImplementedError(f"{names[module]} has groups or dilation")
        height, width = arguments[0].shape[2:]
        geometry = Geometry(
            inputs=module.in_channels,
            outputs=module.out_channels,
            kernel=(module.kernel_size[0], module.kernel_size[1]),
            stride=(module.stride[0], module.stride[1]),
            padding=(module.padding[0], module.padding[1]),
            image=(height, width),
            first=not seen,
        )
        seen.setdefault(geometry, []).append(names[module])

    handles = [module.register_forward_pre_hook(note) for module in names]
    with torch.no_grad():
        model(torch.zeros(1, 3, image, image))
    for handle in handles:
        handle.remove()
    return [Layer(name=found[0], geometry=geometry, count=len(found)) for geometry, found in seen.items()]


WAYS = ("expand", "reduce")
SIDES = ("input", "output")


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Seconds: of the layer's forward and backward pass, and of its factors by way and side."""

    layer: Layer
    own: float
    factors: dict[str, dict[str, float]]

    def total(self, way: str) -> float:
        """Both factors."""
        return sum(self.factors[way].values())

    def ratio(self, way: str, side: str | None = None) -> float:
        """To the layer's own time."""
        return (self.total(way) if side is None else self.factors[way][side]) / self.own


def layer_costs(layer: Layer, device: Device, *, batch: int, precision: str, repeats: int) -> LayerCosts:
    """Times one convolution and its factors."""
    geometry = layer.geometry
    half = precision == "bf16"
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if half else torch.float32,
        "device": device.torch,
    }
    form = torch.channels_last if half else torch.contiguous_format
    convolution = nn.Conv2d(
        geometry.inputs,
        geometry.outputs,
        geometry.kernel,
        stride=geometry.stride,
        padding=geometry.padding,
        bias=False,
        **options,
    )
    convolution.to(memory_format=form)  # type: ignore[call-overload]  # missing in the stubs
    x = torch.randn(batch, geometry.inputs, *geometry.image, **options).relu_().to(memory_format=form)
    x.requires_grad_(not geometry.first)
    derivative = torch.randn_like(convolution(x))
    wanted = [convolution.weight] if geometry.first else [convolution.weight, x]

    def own() -> None:
        torch.autograd.grad(convolution(x), wanted, derivative)

    at_least = 0.01 if device.is_cuda else 0.0

    def seconds(call: Callable[[], Any]) -> float:
        return median_seconds(call, device, repeats=repeats, at_least=at_least)

    factors: dict[str, dict[str, float]] = {}
    saved = [x.detach()]
    for way in WAYS:
        operation = Convolution(
            kernel=geometry.kernel,
            stride=geometry.stride,
            padding=geometry.padding,
            dilation=(1, 1),
            transposed=False,
            output_padding=(0, 0),
            groups=1,
            reduced=way == "reduce",
        )
        factors[way] = {
            "input": seconds(lambda o=operation: o.input_factors(saved, homogeneous=False, diagonal=[False])),  # type: ignore[misc]
            "output": seconds(lambda o=operation: o.output_factor(derivative, saved, diagonal=False)),  # type: ignore[misc]
        }
    return LayerCosts(layer=layer, own=seconds(own), factors=factors)


def weighted_totals(costs: Sequence[LayerCosts]) -> dict[str, float]:
    """Seconds over all convolutions: their own, and each way's input and output factors and their sum."""
    totals = {"own": sum(cost.layer.count * cost.own for cost in costs)}
    for way in WAYS:
        for side in SIDES:
            totals[f"{way} {side}"] = sum(cost.layer.count * cost.factors[way][side] for cost in costs)
        totals[way] = sum(totals[f"{way} {side}"] for side in SIDES)
    return totals


def reduce_rows(costs: Sequence[LayerCosts], iteration: float | None) -> list[list[str]]:
    """Times in ms and ratios to the layer's own time; totals at the end."""
    headings = "first of them,convolution,number,own,expand A,expand G,ratio,reduce A,reduce G,ratio,reduce / expand"
    rows = [headings.split(",")]
    for cost in costs:
        cells = [cost.layer.name, str(cost.layer.geometry), str(cost.layer.count), milliseconds(cost.own)]
        for way in WAYS:
            cells += [*(milliseconds(cost.factors[way][side]) for side in SIDES), f"{cost.ratio(way):.2f}"]
        rows.append([*cells, f"{cost.total('reduce') / cost.total('expand'):.2f}"])
    totals = weighted_totals(costs)
    bases = {"all, to the convolutions' own time": totals["own"]}
    if iteration is not None:
        bases["all, to a whole iteration of SGD"] = iteration
    for label, base in bases.items():
        cells = [label, "", str(sum(cost.layer.count for cost in costs)), milliseconds(base)]
        for way in WAYS:
            cells += [*(milliseconds(totals[f"{way} {side}"]) for side in SIDES), f"{totals[way] / base:.2f}"]
        rows.append([*cells, f"{totals['reduce'] / totals['expand']:.2f}"])
    return rows


def draw_reduce(
    labels: Sequence[str], ratios: Mapping[str, Sequence[tuple[float, float]]], title: str, out: Path
) -> None:
    """Bars a layer: expand and reduce, the input factor dark and the output factor light on top of it."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = {"expand": ("#b35806", "#fdb863"), "reduce": ("#2166ac", "#92c5de")}
    names = {"expand": "expand (KFC)", "reduce": "reduce (Appendix A)"}
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panel = pyplot.subplots(figsize=(11, 5.4), layout="constrained")
    width = 0.4
    middles = [*range(len(labels) - 1), len(labels) - 0.5]  # the last bars, of all layers together, stand apart
    for number, way in enumerate(WAYS):
        places = [middle + (number - 0.5) * width for middle in middles]
        inputs, outputs = zip(*ratios[way], strict=True)
        panel.bar(places, inputs, width, color=colours[way][0])
        panel.bar(places, outputs, width, bottom=inputs, color=colours[way][1])
    panel.set_xticks(middles, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8.5)
    panel.set_xlim(-0.7, middles[-1] + 0.7)
    panel.set_ylabel("factors / layer's forward + backward")
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    panel.set_axisbelow(True)
    handles = [
        Patch(color=colours[way][side], label=f"{names[way]}: {letter}")
        for way in WAYS
        for side, letter in enumerate(("A, inputs", "G, outputs"))
    ]
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles))
    figure.savefig(out, dpi=200)
    pyplot.close(figure)


def run_reduce(given: argparse.Namespace, device: Device) -> dict[str, Any]:
    """The subcommand."""
    batch = given.batch or (128 if device.is_cuda else 8)
    layers = collect_layers(resnet50(), given.image)
    costs: list[LayerCosts] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(layers) + 1)
        for layer in layers:
            progress.update(task, description=str(layer.geometry))
            costs.append(layer_costs(layer, device, batch=batch, precision=given.precision, repeats=given.repeats))
            progress.update(task, advance=1)
        progress.update(task, description="a whole iteration")
        configuration = Configuration(model="resnet50", batch=batch, precision=given.precision, image=given.image)
        trainer = Trainer(Workload(configuration, device))
        iteration = median_seconds(trainer.step, device, repeats=given.repeats)
        progress.update(task, advance=1)
    where = f"ResNet-50, {given.image}x{given.image}, batch {batch}, {given.precision}, on {device}"
    print(f"{where}, torch {torch.__version__}; times in ms, own: forward and backward pass")
    print(text_table(reduce_rows(costs, iteration), left=2))
    totals = weighted_totals(costs)
    if given.plot is not None:
        ratios = {way: [(cost.ratio(way, "input"), cost.ratio(way, "output")) for cost in costs] for way in WAYS}
        ratios = {way: [*pairs, tuple_of_totals(totals, way)] for way, pairs in ratios.items()}
        expand, reduce = (totals[way] / totals["own"] for way in WAYS)
        whole = f"all {sum(layer.count for layer in layers)}: {expand:.2f}, {reduce:.2f}"
        labels = [*(_bar_label(cost.layer) for cost in costs), whole]
        draw_reduce(labels, ratios, f"Time of the factors: {where}", given.plot)
    return {
        **facts(device, benchmark="reduce", batch=batch, image=given.image, precision=given.precision),
        "iteration_seconds": iteration,
        "totals_seconds": totals,
        "ratio_to_convolutions": {way: totals[way] / totals["own"] for way in WAYS},
        "ratio_to_iteration": {way: totals[way] / iteration for way in WAYS},
        "layers": [{**asdict(cost), "ratio": {way: cost.ratio(way) for way in WAYS}} for cost in costs],
    }


def tuple_of_totals(totals: Mapping[str, float], way: str) -> tuple[float, float]:
    """A way's ratios over all layers, input and output side."""
    return totals[f"{way} input"] / totals["own"], totals[f"{way} output"] / totals["own"]


def _bar_label(layer: Layer) -> str:
    return f"{layer.geometry}" + (f" (×{layer.count})" if layer.count > 1 else "")


# Factors that layers share


class SeparateAttention(nn.Module):
    """A transformer block, pre-norm, with queries, keys and values from a linear layer each, as most models have it."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) → (N, T, width)."""
        normal = self.norm1(x)
        query, key, value = (
            layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class SeparateGPT(nn.Module):
    """A language model of one such block."""

    def __init__(self, *, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(SeparateAttention(width, heads=heads))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) → (N, T, vocabulary)."""
        logits: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return logits


@dataclass(frozen=True, kw_only=True)
class SharingCosts:
    """Numbers, bytes and seconds of factors and decompositions, with (`shared`) and without (`own`) sharing."""

    name: str
    blocks: int
    factors: dict[str, int]
    factor_bytes: dict[str, int]
    decomposition_bytes: dict[str, int]
    seconds: dict[str, float]
    note: str


def sharing_costs(
    name: str,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    device: Device,
    *,
    prefix: str = "",
    repeats: int = 3,
) -> SharingCosts:
    """One K-FAC step, and what it keeps for the blocks whose names begin with `prefix`."""
    kfac = natgrad.KFAC(model, kl_clip=None)
    logits = model(inputs)
    functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()  # type: ignore[no-untyped-call, unused-ignore]
    kfac.step()
    whole = distinct_factors(kfac.blocks).values()
    expected = sum(factor.bytes + decomposition_bytes(factor) for factor in whole)
    reported = kfac.report().bytes
    note = "" if reported == expected else f"report() counts {megabytes(reported)}, its blocks {megabytes(expected)}"
    blocks = [block for block in kfac.blocks if block.key.startswith(prefix)]
    ways = {"shared": distinct_factors(blocks), "own": own_factors(blocks)}
    kfac.detach()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):  # in turns
        for way, factors in ways.items():
            seconds[way].append(decomposing_seconds(factors, device, repeats=1))
    return SharingCosts(
        name=name,
        blocks=len(blocks),
        factors={way: len(factors) for way, factors in ways.items()},
        factor_bytes={way: sum(factor.bytes for factor in factors.values()) for way, factors in ways.items()},
        decomposition_bytes={way: sum(map(decomposition_bytes, factors.values())) for way, factors in ways.items()},
        seconds={way: statistics.median(times) for way, times in seconds.items()},
        note=note,
    )


def sharing_rows(results: Sequence[SharingCosts]) -> list[list[str]]:
    """Two rows a model."""
    rows = [["", "", "blocks", "factors", "bytes", "decompositions", "decomposing (ms)"]]
    for result in results:
        for way, label in (("own", "each its own"), ("shared", "shared")):
            rows.append(
                [
                    result.name if way == "own" else "",
                    label,
                    str(result.blocks) if way == "own" else "",
                    str(result.factors[way]),
                    megabytes(result.factor_bytes[way]),
                    megabytes(result.decomposition_bytes[way]),
                    milliseconds(result.seconds[way]),
                ]
            )
        saved = [1 - part["shared"] / part["own"] for part in _quantities(result)]
        rows.append(["", "saved", "", *(f"{share:.0%}" for share in saved)])
    return rows


def _quantities(result: SharingCosts) -> Iterable[Mapping[str, float]]:
    return (result.factors, result.factor_bytes, result.decomposition_bytes, result.seconds)


def run_sharing(given: argparse.Namespace, device: Device) -> dict[str, Any]:
    """The subcommand."""
    batch = given.batch or (32 if device.is_cuda else 4)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, given.image, given.image, generator=generator).to(device.torch)
    labels = torch.randint(1000, (batch,), generator=generator).to(device.torch)
    vocabulary = 256
    tokens, following = torch.randint(vocabulary, (2, batch, given.length), generator=generator).to(device.torch)
    heads = max(1, given.width // 64)
    torch.manual_seed(0)
    models: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, str]] = {
        "GoogLeNet": (GoogLeNet, images, labels, ""),
        "block of GPT, q, k, v in one": (
            lambda: GPT(
                vocabulary=vocabulary,
                context=given.length,
                layers=1,
                heads=heads,
                width=given.width,
                tied=False,
            ),
            tokens,
            following,
            "blocks.0.",
        ),
        "block with q, k, v apart": (
            lambda: SeparateGPT(vocabulary=vocabulary, width=given.width, heads=heads),
            tokens,
            following,
            "blocks.0.",
        ),
    }
    results = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(models))
        for name, (build, inputs, targets, prefix) in models.items():
            progress.update(task, description=name)
            model = build().to(device.torch)
            results.append(sharing_costs(name, model, inputs, targets, device, prefix=prefix, repeats=given.repeats))
            progress.update(task, advance=1)
    print(
        f"Shared factors on {device}, torch {torch.__version__}: GoogLeNet at {given.image}x{given.image}, "
        f"transformers {given.width} wide"
    )
    print(text_table(sharing_rows(results), left=2))
    for result in results:
        if result.note:
            print(f"{result.name}: {result.note}")
    return {
        **facts(device, benchmark="sharing", batch=batch, image=given.image, width=given.width, length=given.length),
        "models": [asdict(result) for result in results],
    }


# The command


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the papers' approximations cost and save.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "alexnet": "three factors or two for AlexNet's first linear layer",
        "reduce": "Appendix A's factors beside KFC's, per layer of ResNet-50",
        "sharing": "factors that layers have in common",
    }
    added = {name: commands.add_parser(name, help=text, description=text) for name, text in helps.items()}
    for name, command in added.items():
        add = command.add_argument
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--batch", type=int, help=f"default {'32, CPU 4' if name == 'sharing' else '128, CPU 8'}")
        add("--image", type=int, default=64 if name == "sharing" else 224, help="default %(default)s")
        add("--precision", choices=PRECISIONS[:2] if name != "reduce" else PRECISIONS, help="default tf32, CPU fp32")
        add("--repeats", type=int, help="medians of so many (default 5, CPU 3)")
        add("--out", type=Path, help="write JSON to this file")
    added["alexnet"].add_argument("--classes", type=int, default=1000)
    added["alexnet"].add_argument("--cases", default="three,two", help="factors of the first linear layer: three, two")
    added["reduce"].add_argument("--plot", type=Path, help="write the picture to this file")
    added["sharing"].add_argument("--width", type=int, default=768, help="of the transformer blocks")
    added["sharing"].add_argument("--length", type=int, default=64, help="of the sequences")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement."""
    given = arguments().parse_args(argv)
    device = Device(given.device)
    given.precision = given.precision or ("tf32" if device.is_cuda else "fp32")
    given.repeats = given.repeats or (5 if device.is_cuda else 3)
    device.set_precision(given.precision)
    start = time.perf_counter()
    run = {"alexnet": run_alexnet, "reduce": run_reduce, "sharing": run_sharing}[given.command]
    found = run(given, device)
    print(f"({time.perf_counter() - start:.0f} s in all)", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""For every distinct convolution of ResNet-50, the time of expand's and reduce's input and output factors beside the
layer's own forward and backward pass in the same run; totals count each convolution as often as it occurs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.approximations.common import (
    facts,
    median_seconds,
    milliseconds,
    progress_bar,
    text_table,
)
from benchmarks.workloads import (
    Configuration,
    Device,
    Trainer,
    Workload,
)
from natgrad.models import resnet50
from natgrad.statistics.operations import Convolution


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
            raise ValueError(f"{names[module]} has groups or dilation")
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
        configuration = Configuration(model="resnet50", batch=batch, precision=given.precision, size=given.image)
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

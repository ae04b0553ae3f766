"""A 9216-input linear layer on a feature map of 256 × 36 has three factors by default (Ba et al. 2017, section 4); with
``doubly_factored_above=None`` it has two, one of them 9217². Steps of each kind are timed alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.approximations.common import (
    decomposing_seconds,
    decomposition_bytes,
    distinct_factors,
    facts,
    megabytes,
    milliseconds,
    progress_bar,
    text_table,
)
from benchmarks.timing import (
    DECOMPOSE,
    KINDS,
    PRECONDITION,
    STEP,
    Plan,
)
from benchmarks.workloads import Device
from natgrad.models import AlexNet


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

"""Tables, times and factors that the measurements have in common."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import natgrad
from benchmarks.workloads import (
    Device,
)
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.solve.solver import solve_eigen

GIB, MIB = 2**30, 2**20


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

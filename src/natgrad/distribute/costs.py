"""What K-FAC's work and messages cost, as a model to place work by: defaults for kinds of devices, or measured.

Placements compare costs with each other, so that a model within a factor of two serves. All ranks must use the same
one, or they would place work differently: `slowest` makes one of several.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.options import choice
from natgrad.solve.linalg import symmetric_eigen, symmetric_inverse

Table = tuple[tuple[int, float], ...]

_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)
_REPEATS = 3


@dataclass(frozen=True)
class Costs:
    """What work and messages cost on one kind of machine, in seconds.

    `eigen` and `inverse`: (n, seconds of one eigendecomposition, or Cholesky inverse), sizes increasing; in between
    they are interpolated, log to log, and beyond the ends they grow and shrink by n³.
    `flops`: of matrix products, per second. `bandwidth`: bytes per second that one rank sends. `latency`: seconds that
    a message costs whatever its size.
    """

    device: str
    eigen: Table
    inverse: Table
    flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name in ("eigen", "inverse"):
            # Frozen, and yet lists, as JSON has them, become what can be compared and hashed.
            object.__setattr__(self, name, _table(name, getattr(self, name)))
        for name in ("flops", "bandwidth", "latency"):
            _positive(f"Costs.{name}", getattr(self, name))

    @staticmethod
    def of(device: torch.device | str) -> Costs:
        """The numbers of a kind of device, ``"cuda"`` or ``"cpu"``, which need not be there."""
        return default_costs(torch.device(device))

    def solve(self, solver: str, size: int, *, stack: int = 1, diagonal: bool = False) -> float:
        """Seconds of decomposing a stack of factors of one size: one after the other, as batching does not help."""
        tables = {"eigen": self.eigen, "inverse": self.inverse}
        table = tables[choice("solver", solver, tuple(tables))]
        # A diagonal is decomposed by looking at it: next to nothing, but not nothing, so that many are spread too.
        return stack * (size / self.flops if diagonal else _interpolated(table, size))

    def message(self, bytes_: float, calls: int = 1) -> float:
        """Seconds of some messages. In a ring or a pipeline all ranks pass them on at the same time, so that the number
        of ranks does not matter.
        """
        return bytes_ / self.bandwidth + calls * self.latency

    def products(self, solver: str, shape: tuple[int, int, int], diagonal: Sequence[bool]) -> float:
        """Seconds of preconditioning one block (stack, rows, columns). `diagonal`: of its sides, row side first.

        Into the eigenbasis and back, or once with an inverse; a diagonal side is free. Several column sides count as
        equally large: their sizes are not in the shape.
        """
        stack, rows, columns = shape
        times = {"eigen": 2, "inverse": 1}[choice("solver", solver, ("eigen", "inverse"))]
        others = len(diagonal) - 1
        sizes = [float(rows)] + [float(columns ** (1 / others))] * others if others else [float(rows)]
        inner = sum(size for size, free in zip(sizes, diagonal, strict=True) if not free)
        return times * 2.0 * stack * rows * columns * inner / self.flops


def default_costs(device: torch.device) -> Costs:
    """Costs without measuring: an H200's for any GPU, two cores' for everything else."""
    if device.type == "cuda":
        # Measured, torch 2.11. From 288 to 512 matrices are padded to 513 (`natgrad.solve.linalg`); small ones cost
        # their launches. The link is a modest guess: NCCL between machines; within one it is several times as fast.
        return Costs(
            device="NVIDIA H200",
            eigen=(
                (1, 0.4e-3),
                (16, 0.42e-3),
                (32, 0.76e-3),
                (64, 1.15e-3),
                (128, 2.2e-3),
                (256, 5.5e-3),
                (512, 5.8e-3),
                (1024, 11e-3),
                (2304, 32e-3),
                (4608, 128e-3),
            ),
            inverse=(
                (1, 0.34e-3),
                (128, 0.36e-3),
                (256, 0.39e-3),
                (512, 0.59e-3),
                (1024, 1.2e-3),
                (2304, 3.4e-3),
                (4608, 12e-3),
            ),
            flops=50e12,
            bandwidth=20e9,
            latency=30e-6,
        )
    # Measured in float32 with two threads. The link is a guess: Gloo on one machine or a plain network.
    return Costs(
        device="CPU",
        eigen=(
            (16, 0.03e-3),
            (64, 0.28e-3),
            (128, 0.56e-3),
            (256, 2.7e-3),
            (576, 15e-3),
            (1152, 81e-3),
            (2304, 584e-3),
        ),
        inverse=(
            (16, 0.018e-3),
            (64, 0.049e-3),
            (128, 0.2e-3),
            (256, 0.68e-3),
            (576, 4e-3),
            (1152, 16e-3),
            (2304, 110e-3),
        ),
        flops=180e9,
        bandwidth=1e9,
        latency=200e-6,
    )


def known_costs(given: Costs | str | None, device: torch.device) -> Costs:
    """Of this device, as `Strategy.costs` has them: given, to be measured, or those of its kind."""
    if isinstance(given, Costs):
        return given
    return measure(device) if given == "measured" else default_costs(device)


def measure(device: torch.device, *, seconds: float = 2.0) -> Costs:
    """Costs of this device, timed in float32 within about so many seconds; the link's are the defaults.

    Sizes are tried smallest first, for as long as the next one, by n³, is expected to fit in.
    """
    _positive("seconds", seconds)
    eigen: list[tuple[int, float]] = []
    inverse: list[tuple[int, float]] = []
    flops = 0.0
    with torch.no_grad():
        _once(_SIZES[0], device)  # loads libraries, which is nobody's cost
        start = time.perf_counter()
        for index, size in enumerate(_SIZES):
            began = time.perf_counter()
            times = _once(size, device)
            eigen.append((size, times[0]))
            inverse.append((size, times[1]))
            flops = max(flops, 2.0 * size**3 / times[2])
            now = time.perf_counter()
            following = _SIZES[min(index + 1, len(_SIZES) - 1)]
            if now - start + (now - began) * (following / size) ** 3 > seconds:
                break
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    name = f"{name}, measured"
    return replace(default_costs(device), device=name, eigen=tuple(eigen), inverse=tuple(inverse), flops=flops)


def slowest(costs: Sequence[Costs]) -> Costs:
    """One model for ranks that measured different ones: of everything the worst, over the sizes that all have.

    At a refresh all wait for the slowest.
    """
    if not costs:
        raise ValueError("slowest needs the costs of at least one rank")
    return Costs(
        device=" / ".join(dict.fromkeys(each.device for each in costs)),
        eigen=_worst("eigen", [each.eigen for each in costs]),
        inverse=_worst("inverse", [each.inverse for each in costs]),
        flops=min(each.flops for each in costs),
        bandwidth=min(each.bandwidth for each in costs),
        latency=max(each.latency for each in costs),
    )


def _worst(name: str, tables: Sequence[Table]) -> Table:
    common = set.intersection(*({size for size, _ in table} for table in tables))
    if not common:
        raise ValueError(f"the ranks' costs of {name} have no size in common: measure the same sizes on all")
    return tuple((size, max(dict(table)[size] for table in tables)) for size in sorted(common))


def _once(size: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds of an eigendecomposition, an inverse and a product of this size."""
    generator = torch.Generator().manual_seed(size)  # the training's random numbers stay as they are
    half = torch.randn(size, size, generator=generator, dtype=torch.float32, device="cpu").to(device)
    matrix = (half @ half.mT / size + 0.1 * torch.eye(size, dtype=torch.float32, device=device))[None]
    functions: tuple[Callable[[Tensor], Any], ...] = (symmetric_eigen, symmetric_inverse, lambda m: m @ m)
    first, second, third = (_timed(function, matrix) for function in functions)
    return first, second, third


def _timed(function: Callable[[Tensor], Any], matrix: Tensor) -> float:
    taken = []
    for _ in range(1 + _REPEATS):
        _wait(matrix.device)
        start = time.perf_counter()
        function(matrix)
        _wait(matrix.device)
        taken.append(max(time.perf_counter() - start, 1e-9))  # a coarse clock may stand still
    return statistics.median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _interpolated(table: Table, size: int) -> float:
    """Seconds at a size: log to log between its neighbours, n³ beyond the ends."""
    for (small, low), (large, high) in itertools.pairwise(table):
        if small < size < large:
            return low * math.pow(high / low, math.log(size / small) / math.log(large / small))
        if size == large:
            return high
    nearest, seconds = table[0] if size <= table[0][0] else table[-1]
    return seconds * (size / nearest) ** 3


def _table(name: str, value: Any) -> Table:
    try:
        table = tuple((size, seconds) for size, seconds in value)
    except (TypeError, ValueError):
        raise TypeError(f"Costs.{name} must be pairs (size, seconds), got {value!r}") from None
    if not table:
        raise ValueError(f"Costs.{name} must have at least one pair (size, seconds)")
    before = 0
    for size, seconds in table:
        if not isinstance(size, int) or isinstance(size, bool) or size <= before:
            raise ValueError(f"Costs.{name} must have whole sizes that increase from 1, got {size!r} after {before}")
        _positive(f"Costs.{name} at size {size}", seconds)
        before = size
    return table


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")

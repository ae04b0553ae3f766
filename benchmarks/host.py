"""Where the host's time goes in a step of a small network: forward, backward, K-FAC and optimizer by the host's clock.

A step of a small network takes as long as Python needs to launch it. K-FAC adds to that with every hook; and what is
decomposed beside training takes cores, and the interpreter. So there is a loop in which nothing is decomposed, loops in
which it is in the step, beside training, and beside training by one worker, and loops beside processes that keep cores
busy. SGD has its turns before and after each, and in one thread too, as steps with statistics run.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import natgrad
from benchmarks import disturbed
from benchmarks.command import device_of, part, whole
from benchmarks.laps import background_ended, differences
from benchmarks.loops import step
from benchmarks.workloads import NETWORKS, PRECISIONS, SOLVERS, Configuration, Trainer, Workload

PHASES = ("forward", "backward", "K-FAC", "optimizer")
_EARLY = 4  # the last step that decomposes while a loop warms up
_NEVER = 1_000_000_000
# Decomposes without end, with a low priority, as threads beside training do.
_BUSY = """
import os, sys, torch
os.setpriority(os.PRIO_PROCESS, 0, 10)
torch.set_num_threads(1)
size = int(sys.argv[1])
rows = torch.randn(size, size)
while True:
    torch.linalg.eigh(rows @ rows.mT)
"""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is measured: SGD, or K-FAC where there are options for it."""

    name: str
    kfac: dict[str, Any] | None = None
    busy: int = 0  # processes beside it
    one_thread: bool = False  # backward passes in the calling thread


@dataclass(frozen=True, kw_only=True)
class Found:
    """Milliseconds of a step: by the clock, of SGD's turns before and after, and medians of phases on the host."""

    name: str
    mean: float
    turns: tuple[float, float]
    phases: list[float]
    worst: float
    age: int | None

    @property
    def spread(self) -> float:
        """How much SGD's turns differ."""
        return max(self.turns) / min(self.turns)

    def cells(self) -> list[str]:
        """For a table."""
        phases = [f"{phase:.2f}" for phase in self.phases]
        age = "-" if self.age is None else str(self.age)
        sgd = statistics.fmean(self.turns)
        ratio = f"{self.mean / sgd:.2f}" + (f" {disturbed.MARK}" if disturbed.unsteady(self.spread) else "")
        return [self.name, f"{self.mean:.2f}", f"{sgd:.2f}", ratio, *phases, f"{self.worst:.1f}", age]


HEADER = ["", "ms a step", "SGD", "x SGD", *PHASES, "worst on the host", "age"]
_NARROWEST = 7  # what numbers take, which are not known when the head is printed
EXPLAINED = (
    "SGD: its own step, in turns before and after this loop; phases: medians by the host's clock, without waiting",
    "worst on the host: the longest step of all, by its phases; age: steps since the oldest factors in use were taken",
)


def line_of(cells: Sequence[str], some: Sequence[Loop]) -> str:
    """Cells in columns that fit all loops, before these have been measured."""
    name, *numbers = cells
    widths = [max(len(head), _NARROWEST) for head in HEADER[1:]]
    set_right = (cell.rjust(width) for cell, width in zip(numbers, widths, strict=True))
    return "  ".join([name.ljust(max(len(loop.name) for loop in some)), *set_right])


def loops(*, solver: str, factor: int, inverse: int, fraction: float, busy: int) -> list[Loop]:
    """All that are compared."""
    options = {"solver": solver, "factor_update_steps": factor, "stats_fraction": fraction}

    def early(step: int) -> int:
        return 1 if step <= _EARLY else _NEVER

    nothing, often = {**options, "inv_update_steps": early}, {**options, "inv_update_steps": inverse}
    found = [
        Loop(name="SGD"),
        Loop(name="SGD, one thread", one_thread=True),
        Loop(name="nothing decomposed", kfac=nothing),
        Loop(name="in the step", kfac=often),
        Loop(name="beside training", kfac={**often, "overlap": "background"}),
        Loop(name="by one worker", kfac={**often, "overlap": natgrad.Background("cpu", workers=1)}),
    ]
    if busy:
        found += [
            Loop(name=f"SGD, {busy} busy cores", busy=busy),
            Loop(name=f"nothing decomposed, {busy} busy cores", kfac=nothing, busy=busy),
        ]
    return found


def measure(loop: Loop, work: Workload, sgd: Trainer, *, steps: int, busy_size: int) -> Found:
    """Between two turns of SGD. `busy_size` is that of the matrices that others decompose."""
    turn = max(1, steps // 3)
    before = mean_ms(sgd, work, turn)
    with background_ended(), kept_busy(loop.busy, busy_size):
        trainer = sgd if loop.kfac is None else Trainer(work, kfac=loop.kfac)
        try:
            with torch.autograd.set_multithreading_enabled(not loop.one_thread):
                for _ in range(2 * _EARLY + min(steps, 20)):
                    step(trainer, work)
                start = work.device.now()
                moments = [phases(trainer, work) for _ in range(steps)]
                mean = 1e3 * (work.device.now() - start) / steps
            age = None if trainer.kfac is None else trainer.kfac.metrics()["decomposition_age"]
        finally:
            if trainer.kfac is not None:
                trainer.kfac.detach()
    return Found(
        name=loop.name,
        mean=mean,
        turns=(before, mean_ms(sgd, work, turn)),
        phases=[statistics.median(phase) for phase in zip(*moments, strict=True)],
        worst=max(map(sum, moments)),
        age=None if age is None else int(age),
    )


def mean_ms(trainer: Trainer, work: Workload, steps: int) -> float:
    """Of a step in a loop."""
    start = work.device.now()
    for _ in range(steps):
        step(trainer, work)
    return 1e3 * (work.device.now() - start) / steps


def phases(trainer: Trainer, work: Workload) -> list[float]:
    """Milliseconds of the host in each phase of a step, which waits for nothing."""
    work.draw_targets()
    moments = {"": time.perf_counter()}
    trainer.step(mark=lambda phase: moments.update({phase: time.perf_counter()}))
    moments.setdefault("kfac.step", moments["backward"])
    ends = [moments[name] for name in ("", "forward", "backward", "kfac.step", "optimizer.step")]
    return [1e3 * seconds for seconds in differences(ends)]


@contextmanager
def kept_busy(processes: int, size: int) -> Iterator[None]:
    """So many cores, by others, with matrices of this size."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY, str(size)]) for _ in range(processes)]
    try:
        if others:
            time.sleep(10)  # they import torch
        yield
    finally:
        for other in others:
            other.send_signal(signal.SIGKILL)
            other.wait()


def device_busy(trainer: Trainer, work: Workload, *, steps: int = 3) -> tuple[float, int] | None:
    """Milliseconds of kernels in a step, and how many; None where there is no GPU."""
    if not work.device.is_cuda:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step(trainer, work)
        work.device.now()
    kernels = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    return sum(event.time_range.elapsed_us() for event in kernels) / (1e3 * steps), len(kernels) // steps


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    add = parser.add_argument
    add("--model", choices=sorted(NETWORKS), default="resnet32")
    add("--batch", type=whole(1), default=128)
    add("--size", type=whole(1), help="of images, or tokens")
    add("--precision", choices=PRECISIONS, help="default tf32 on a GPU, else fp32")
    add("--solver", choices=SOLVERS, default="eigen")
    add("--factor", type=whole(1), default=1, help="steps between statistics (default %(default)s)")
    add("--inverse", type=whole(1), default=10, help="steps between decompositions (default %(default)s)")
    add("--fraction", type=part, default=0.5, help="stats_fraction (default %(default)s)")
    add("--busy", type=whole(0), default=0, help="cores that others keep busy in two more loops (default %(default)s)")
    add("--busy-size", type=whole(1), default=577, help="of the matrices that they decompose (default %(default)s)")
    add("--steps", type=whole(1), default=200, help="of a loop (default %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = arguments()
    given = parser.parse_args(argv)
    try:
        device = device_of(given.device)
        precision = given.precision or ("tf32" if device.is_cuda else "fp32")
        device.set_precision(precision)
        work = Workload(
            Configuration(model=given.model, batch=given.batch, precision=precision, size=given.size), device
        )
        sgd = Trainer(work)
        mean_ms(sgd, work, 10)
    except ValueError as error:
        parser.error(str(error))
    print(f"{device}, torch {torch.__version__}: {work.configuration}, {given.solver}, {given.factor}/{given.inverse}")
    some = loops(
        solver=given.solver, factor=given.factor, inverse=given.inverse, fraction=given.fraction, busy=given.busy
    )
    found = []
    print("\n" + line_of(HEADER, some), flush=True)
    for loop in some:
        found.append(measure(loop, work, sgd, steps=given.steps, busy_size=given.busy_size))
        print(line_of(found[-1].cells(), some), flush=True)
    doubts = disturbed.sentences({f"around “{one.name}”": one.spread for one in found})
    print("\n".join(["", *EXPLAINED, *doubts]))
    busy = device_busy(sgd, work)
    if busy is not None:
        print(f"\nthe GPU works {busy[0]:.2f} ms of a step of SGD, in {busy[1]} kernels: what is beyond is the host")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Timing the kinds of step of several methods in turns, on one workload: what `benchmarks.step_cost` reports."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import Configuration, Device, Trainer, Workload, failing_into

STEP, PRECONDITION, FACTOR, DECOMPOSE = "step", "precondition", "factor", "decompose"
KINDS = (PRECONDITION, FACTOR, DECOMPOSE)
_NEVER = 1_000_000_000


def _configuration(model: str, batch: int, precision: str) -> Configuration:
    return Configuration(model=model, batch=batch, precision=precision)


SUITES = {
    "cpu": [_configuration("resnet20", 128, "fp32")],
    "h200": [
        _configuration("resnet32", 128, "tf32"),
        *(_configuration("resnet50", batch, precision) for precision in ("tf32", "bf16") for batch in (32, 128)),
        _configuration("gpt", 48, "bf16"),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """How often statistics are taken and factors decomposed, in steps."""

    factor: int
    inverse: int

    def __str__(self) -> str:
        return f"{self.factor}/{self.inverse}"

    def amortised(self, cost: dict[str, float]) -> float:
        """The mean cost of a step, from the cost of each kind: a decomposition step takes statistics too."""
        taking = self.inverse // self.factor
        counts = {PRECONDITION: self.inverse - taking, FACTOR: taking - 1, DECOMPOSE: 1}
        return sum(count * cost[kind] for kind, count in counts.items()) / self.inverse


INTERVALS = (Intervals(factor=10, inverse=100), Intervals(factor=1, inverse=10))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure."""

    solvers: tuple[str, ...]
    rounds: int
    steps: int
    budget: float
    compile_sgd: bool
    compile: bool
    profile: bool
    json: Path | None


class Plan:
    """Which step of a KFAC does what: its intervals, as callables of the step. Steps not planned only precondition.

    A KFAC decides at the end of a step whether the next one takes statistics, so a plan has to be made one step
    ahead.
    """

    def __init__(self) -> None:
        self._kinds = [DECOMPOSE]  # the first step always is one

    def add(self, kinds: Iterable[str]) -> None:
        """Continues the plan."""
        self._kinds += kinds

    def options(self) -> dict[str, Callable[[int], int]]:
        """For KFAC."""
        return {"factor_update_steps": self._factor_interval, "inv_update_steps": self._inverse_interval}

    def _factor_interval(self, step: int) -> int:
        return _NEVER if self._kind(step) == PRECONDITION else 1

    def _inverse_interval(self, step: int) -> int:
        return 1 if self._kind(step) == DECOMPOSE else _NEVER

    def _kind(self, step: int) -> str:
        return self._kinds[step] if step < len(self._kinds) else PRECONDITION


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Some steps of one kind: seconds of the median step and of the fastest, and the device's peak memory."""

    seconds: float
    best: float
    peak: int | None


class Method:
    """A trainer in its turns."""

    def __init__(self, name: str, work: Workload, *, solver: str | None = None, compiled: bool = False) -> None:
        self.name = name
        self.solver = solver
        self._device = work.device
        self._device.settle()
        before = self._device.allocated() - work.data_bytes
        self._plan = None if solver is None else Plan()
        options = None if self._plan is None else {"solver": solver, **self._plan.options()}
        self.trainer = Trainer(work, kfac=options, compiled=compiled)
        self.trainer.step()
        self._check_first_of_each_kind()
        # Memory is measured now: later, other methods' models are there too. The first round is for cuDNN to choose
        # its algorithms, which takes workspaces of its own.
        steps = 3 if self._device.is_cuda else 1
        segments = self.round(steps)
        if self._device.is_cuda:
            segments = self.round(steps)
        self.peaks = {kind: s.peak - before for kind, s in segments.items() if s.peak is not None}

    def round(self, steps: int) -> dict[str, Segment]:
        """Takes all kinds of step, several times each. The rarer and dearer decompositions are taken less often."""
        kinds = (STEP,) if self._plan is None else KINDS
        counts = {kind: max(1, steps // 5) if kind == DECOMPOSE else steps for kind in kinds}
        # Not timed: after another method's turn, caches are cold.
        self._lead([kind for kind in kinds for _ in range(counts[kind])])
        return {kind: self._segment(count) for kind, count in counts.items()}

    def _segment(self, count: int) -> Segment:
        self._device.reset_peak()
        times = [self.trainer.timed() for _ in range(count)]
        return Segment(seconds=statistics.median(times), best=min(times), peak=self._device.peak())

    def _lead(self, then: Sequence[str]) -> None:
        """Plans the next steps and takes one before them.

        It lets each turn end with a K-FAC that waits for nothing: one that waits for statistics makes compiled models
        of the whole process run eagerly.
        """
        if self._plan is not None:
            self._plan.add([PRECONDITION, *then])
        self.trainer.step()

    def _check_first_of_each_kind(self) -> None:
        """The times would be worth nothing if steps did not do what the plan says."""
        kfac = self.trainer.kfac
        if kfac is None:
            return
        self._lead(KINDS)
        for kind in KINDS:
            self.trainer.step()
            metrics = kfac.metrics()
            did = (metrics["factor_age"] == 0, metrics["decomposition_age"] == 0)
            if did != (kind != PRECONDITION, kind == DECOMPOSE):
                raise RuntimeError(f"a step planned as {kind!r} (took statistics, decomposed) = {did}")

    def troubles(self) -> str | None:
        """What K-FAC counted that makes its steps cheaper or dearer than usual."""
        if self.trainer.kfac is None:
            return None
        metrics = self.trainer.kfac.metrics()
        names = ("rejected_statistics", "failed_decompositions", "skipped_steps")
        return ", ".join(f"{metrics[name]} {name}" for name in names if metrics[name]) or None

    def stop(self) -> None:
        """At the end: K-FAC must not go on waiting for statistics, see `_lead`."""
        if self.trainer.kfac is not None:
            self.trainer.kfac.detach()

    def single(self, kind: str, take: Callable[[Trainer], Any]) -> Any:
        """What `take` makes of one step of a kind."""
        self._lead([] if self._plan is None else [kind])
        return take(self.trainer)


# Measuring


@dataclass(kw_only=True)
class Result:
    """What one method costs. Seconds by kind of step: the medians of each round, and of the fastest step of all."""

    name: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    trouble: str | None = None

    @property
    def peak(self) -> int | None:
        """Most memory over all kinds of step."""
        return max(self.peaks.values(), default=None)

    def median_ms(self) -> dict[str, float]:
        """By kind of step."""
        return {kind: 1e3 * statistics.median(times) for kind, times in self.seconds.items()}

    def ratios(self, baseline: Result) -> dict[str, list[float]]:
        """To the baseline's step in the same round, by kind of step; empty where one of both failed."""
        steps = baseline.seconds.get(STEP, [])
        by_kind = {
            kind: [own / other for own, other in zip(times, steps, strict=False)]
            for kind, times in self.seconds.items()
        }
        return {kind: ratios for kind, ratios in by_kind.items() if ratios}

    def ratio(self, baseline: Result) -> dict[str, float]:
        """Medians over rounds, by kind of step."""
        return {kind: statistics.median(ratios) for kind, ratios in self.ratios(baseline).items()}

    def best_ratio(self, baseline: Result) -> dict[str, float]:
        """Of the fastest steps, by kind of step."""
        if STEP not in baseline.best:
            return {}
        return {kind: seconds / baseline.best[STEP] for kind, seconds in self.best.items()}

    def add(self, segments: dict[str, Segment]) -> None:
        """Takes in a round."""
        for kind, segment in segments.items():
            self.seconds.setdefault(kind, []).append(segment.seconds)
            self.best[kind] = min(segment.best, self.best.get(kind, math.inf))


def amortised(ratio: dict[str, float]) -> dict[str, float]:
    """The ratios at the usual intervals, from those of each kind of step."""
    if not all(kind in ratio for kind in KINDS):
        return {}
    return {str(intervals): intervals.amortised(ratio) for intervals in INTERVALS}


def measure(work: Workload, settings: Settings) -> list[Result]:
    """All methods in turns; SGD first."""
    start = time.perf_counter()
    planned: list[tuple[str, dict[str, Any]]] = [("SGD", {})]
    if settings.compile_sgd:
        planned.append(("SGD compiled", {"compiled": True}))
    planned += [(f"K-FAC {solver}", {"solver": solver, "compiled": settings.compile}) for solver in settings.solvers]
    results = [Result(name=name) for name, _ in planned]
    methods: list[tuple[Method, Result]] = []
    for (name, options), result in zip(planned, results, strict=True):
        with failing_into(result):
            methods.append((Method(name, work, **options), result))
            result.peaks = methods[-1][0].peaks
    longest = 0.0
    for number in range(settings.rounds):
        begin = time.perf_counter()
        if number > 0 and begin - start + longest > settings.budget:
            print(
                f"(stopped after {number} of {settings.rounds} rounds: another would go beyond {settings.budget:g} s)"
            )
            break
        _one_round(methods, settings.steps)
        longest = max(longest, time.perf_counter() - begin)
    for method, result in methods:
        with failing_into(result):
            result.trouble = method.troubles()
    for method, result in methods:
        if settings.profile and method.name != "SGD compiled" and result.error is None:
            with failing_into(result):
                profile(method, work)
        method.stop()
    return results


def _one_round(methods: Iterable[tuple[Method, Result]], steps: int) -> None:
    for method, result in methods:
        if result.error is None:
            with failing_into(result):
                result.add(method.round(steps))
            if result.error is not None:
                method.stop()


# Profiling


def profile(method: Method, work: Workload) -> None:
    """Prints where the time of a factor step and of a step that only preconditions goes."""
    for kind in (STEP,) if method.solver is None else (FACTOR, PRECONDITION):
        label = "step" if kind == STEP else f"{kind} step"
        phases: dict[str, float] = method.single(kind, Trainer.phases)
        parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in phases.items())
        print(f"\n{work.configuration}, {method.name}, one {label}. Phases in ms: {parts}")
        events = method.single(kind, lambda trainer: _profiled(trainer, work.device))
        operators = [event for event in events if event.device_type.name == "CPU"]
        if not work.device.is_cuda:
            _print_top("operators by CPU time", operators, "self_cpu_time_total")
            continue
        _print_top("operators by the GPU time of what they launch", operators, "self_device_time_total")
        kernels = [event for event in events if event.device_type.name != "CPU"]
        _print_top("kernels by GPU time", kernels, "self_device_time_total")
        _print_top("operators by CPU time", operators, "self_cpu_time_total")


def _profiled(trainer: Trainer, device: Device) -> Iterable[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.step()
        device.now()
    events: Iterable[Any] = profiler.key_averages()
    return events


def _print_top(title: str, events: Iterable[Any], attribute: str, *, count: int = 15) -> None:
    costs = sorted(((getattr(event, attribute), event.count, event.key) for event in events), reverse=True)
    total = sum(cost for cost, _, _ in costs)
    print(f"  {title} ({total / 1e3:.1f} ms in all)")
    for cost, calls, name in costs[:count]:
        print(f"    {cost / 1e3:9.2f} ms {cost / max(total, 1e-9):6.1%} {calls:6d} x  {name[:80]}")

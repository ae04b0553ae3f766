"""Real loops of K-FAC in turns with SGD: the mean step and the worst, how old decompositions are, and memory.

A contender (`benchmarks.contenders`) takes at least 300 steps, whose number is a multiple of its interval, after a
warm-up that ends when the second decomposition is in use. SGD takes its turns before, after (long ones on a GPU, whose
host may be slow for seconds), and in between, so that the drift of a machine cancels; but not while decompositions are
made in the background: they would go on while SGD has its turn, for nothing. Targets are drawn anew in every step.

Times of single steps are those between events on the training stream, which nobody waits for; the mean is that of the
whole wall time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import disturbed
from benchmarks.contenders import Contender
from benchmarks.laps import Laps, background_ended, counters, decomposes, differences, oldest
from benchmarks.workloads import Trainer, Workload, failing_into

LONGEST_WARM_UP = 200  # steps that are waited for one that is made in the background
# Steps between SGD's turns. Few on a CPU, which is rarely ours alone; on a GPU each end of a turn is waited for.
STRETCH = {"cpu": 10, "cuda": 100}
# Seconds of SGD's turns before and after a loop, at least, as far as half the loop's steps go. Hosts are slow for
# seconds at a time: a shorter turn would meet such a stretch, or miss it, where a loop has its share.
LONG_TURN = {"cpu": 0.0, "cuda": 3.0}


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How to measure."""

    steps: int = 300
    sgd_steps: int = 50
    repeats: int = 3
    budget: float = 60.0
    compile_sgd: bool = False


@dataclass(kw_only=True)
class Repeat:
    """One loop of a contender. Memory is that of its own model, optimizer, K-FAC and data; None where nobody counts.
    `cpu_ratio` compares the seconds of all cores, on a CPU: others who use it disturb them less than the wall's.
    `sgd_fastest_ms` and `sgd_slowest_ms` are of SGD's turns around the loop and in it.
    """

    mean_ms: float
    sgd_ms: float
    sgd_fastest_ms: float
    sgd_slowest_ms: float
    compiled_ms: float | None
    cpu_ratio: float | None
    ms: list[float]
    mean_age: float
    largest_age: int
    peak_bytes: int | None
    sgd_peak_bytes: int | None
    state_bytes: int
    counters: dict[str, int]

    @property
    def sgd_spread(self) -> float:
        """How much SGD's turns differed."""
        return self.sgd_slowest_ms / self.sgd_fastest_ms


@dataclass(kw_only=True)
class Measured:
    """All repeats of a contender; what is told of them is the median."""

    contender: Contender
    repeats: list[Repeat] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.contender)

    def ratios(self) -> list[float]:
        """Mean step over SGD's, of every repeat."""
        return [one.mean_ms / one.sgd_ms for one in self.repeats]

    def summary(self) -> dict[str, float]:
        """What is known, by name; empty where nothing is."""
        if not self.repeats:
            return {}
        found: dict[str, float] = {
            "mean_ms": statistics.median(one.mean_ms for one in self.repeats),
            "sgd_ms": statistics.median(one.sgd_ms for one in self.repeats),
            # As the ratio, that of the repeat in the middle: where most were undisturbed, it is one of them.
            "sgd_spread": statistics.median_high(one.sgd_spread for one in self.repeats),
            "ratio": statistics.median(self.ratios()),
            "worst_to_median": statistics.median(max(one.ms) / statistics.median(one.ms) for one in self.repeats),
            "mean_age": statistics.fmean(one.mean_age for one in self.repeats),
            "largest_age": max(one.largest_age for one in self.repeats),
            "state_bytes": self.repeats[-1].state_bytes,
        }
        compiled = [one.mean_ms / one.compiled_ms for one in self.repeats if one.compiled_ms]
        if compiled:
            found["compiled_ratio"] = statistics.median(compiled)
        cores = [one.cpu_ratio for one in self.repeats if one.cpu_ratio]
        if cores:
            found["cpu_ratio"] = statistics.median(cores)
        peaks = [one.peak_bytes for one in self.repeats if one.peak_bytes]
        sgd = self.repeats[-1].sgd_peak_bytes
        if peaks and sgd:
            found["peak_bytes"] = max(peaks)
            found["peak_ratio"] = max(peaks) / sgd
            found["memory_beyond"] = (max(peaks) - sgd - found["state_bytes"]) / sgd
        return found


# Measuring


class Baseline:
    """SGD, eager and where asked for compiled too. It stays; contenders come and go."""

    def __init__(self, work: Workload, settings: LoopSettings) -> None:
        self._work, self._steps = work, settings.sgd_steps
        device = work.device
        device.settle()
        before = device.allocated() - work.data_bytes
        self._eager = self._warm(Trainer(work))
        device.reset_peak()
        seconds = self.turn().seconds
        long_turn = math.ceil(LONG_TURN[device.torch.type] / seconds)
        self._boundary_steps = max(self._steps, min(long_turn, settings.steps // 2))
        peak = device.peak()
        self.peak = None if peak is None else peak - before
        self._compiled: Trainer | None = None
        self.name, self.error = "compiled SGD", None
        if settings.compile_sgd:
            with failing_into(self):
                self._compiled = self._warm(Trainer(work, compiled=True))
        self.boundary()

    name: str
    error: str | None

    def _warm(self, trainer: Trainer) -> Trainer:
        for _ in range(min(10, self._steps)):
            step(trainer, self._work)
        return trainer

    def turn(self, steps: int | None = None) -> Mean:
        """Of eager SGD."""
        return mean_step(self._eager, self._work, steps or self._steps)

    def boundary(self) -> None:
        """A turn while no K-FAC is there: one that waits for statistics makes compiled models run eagerly."""
        steps = self._boundary_steps
        self.latest = self.turn(steps)
        self.latest_compiled = None if self._compiled is None else mean_step(self._compiled, self._work, steps)


@dataclass(frozen=True)
class Mean:
    """Of some steps: seconds by the clock, and of all cores."""

    seconds: float
    cores: float


def step(trainer: Trainer, work: Workload) -> None:
    """On new targets."""
    work.draw_targets()
    trainer.step()


def mean_step(trainer: Trainer, work: Workload, steps: int) -> Mean:
    """Of a loop that waits for nothing but its end."""
    start, cores = work.device.now(), time.process_time()
    for _ in range(steps):
        step(trainer, work)
    return Mean((work.device.now() - start) / steps, (time.process_time() - cores) / steps)


def measure_once(contender: Contender, work: Workload, sgd: Baseline, settings: LoopSettings) -> Repeat:
    """One loop, between two turns of SGD, which leaves nothing behind."""
    before, compiled_before = sgd.latest, sgd.latest_compiled
    work.device.settle()
    loop = _Loop(work, resident=work.device.allocated() - work.data_bytes)
    turns, stretches = [before], list[int]()
    left, each = contender.length(settings.steps), STRETCH[work.device.torch.type]
    with background_ended():
        trainer = contender.trainer(work)
        try:
            _warm_up(contender, trainer, work)
            while left:
                if stretches:
                    turns.append(sgd.turn(max(1, min(settings.sgd_steps, each // 2, left // 2))))
                stretches.append(loop.run(trainer, least=min(each, left), most=left))
                left -= stretches[-1]
            assert trainer.kfac is not None, "contenders have one"
            counted, state = counters(trainer.kfac), trainer.kfac.report().bytes
        finally:
            if trainer.kfac is not None:
                trainer.kfac.detach()
    del trainer
    sgd.boundary()
    turns.append(sgd.latest)
    compiled = [mean.seconds for mean in (compiled_before, sgd.latest_compiled) if mean is not None]
    # SGD's time of as many steps: for each stretch the mean of its turns before and after.
    pairs = list(zip(stretches, turns, turns[1:], strict=False))
    others = sum(length * (one.seconds + two.seconds) / 2 for length, one, two in pairs)
    cores = sum(length * (one.cores + two.cores) / 2 for length, one, two in pairs)
    return Repeat(
        mean_ms=1e3 * loop.seconds / len(loop.ms),
        sgd_ms=1e3 * others / len(loop.ms),
        sgd_fastest_ms=1e3 * min(turn.seconds for turn in turns),
        sgd_slowest_ms=1e3 * max(turn.seconds for turn in turns),
        cpu_ratio=None if work.device.is_cuda else loop.cores / cores,
        compiled_ms=1e3 * statistics.fmean(compiled) if compiled else None,
        ms=loop.ms,
        mean_age=statistics.fmean(loop.ages),
        largest_age=max(loop.ages),
        peak_bytes=loop.peak,
        sgd_peak_bytes=sgd.peak,
        state_bytes=state,
        counters=counted,
    )


def _warm_up(contender: Contender, trainer: Trainer, work: Workload) -> None:
    """Until the second decomposition of all factors is in use, which takes its time in the background."""
    assert trainer.kfac is not None, "contenders have one"
    for _ in range(contender.warm_up):
        step(trainer, work)
    preconditioner = trainer.kfac._preconditioner
    for _ in range(LONGEST_WARM_UP):
        if preconditioner.decompositions >= 2 * len(preconditioner._sides):
            return
        step(trainer, work)


class _Loop:
    """Adds up stretches. `resident`: bytes that are SGD's."""

    def __init__(self, work: Workload, *, resident: int) -> None:
        self._work, self._resident = work, resident
        self.seconds = self.cores = 0.0
        self.ms: list[float] = []
        self.ages: list[int] = []
        self.peak: int | None = None

    def run(self, trainer: Trainer, *, least: int, most: int) -> int:
        """So many steps, whose number is returned: more than `least` while something is decomposed beside them."""
        device, kfac = self._work.device, trainer.kfac
        assert kfac is not None, "contenders have one"
        laps = Laps(device)
        device.reset_peak()
        start, cores = device.now(), time.process_time()
        laps.mark()
        steps = 0
        while steps < least or (steps < most and decomposes(kfac)):
            step(trainer, self._work)
            laps.mark()
            self.ages.append(oldest(kfac))
            steps += 1
        self.seconds += device.now() - start
        self.cores += time.process_time() - cores
        self.ms += [round(1e3 * seconds, 3) for seconds in differences(laps.seconds())]
        peak = device.peak()
        if peak is not None:
            self.peak = max(self.peak or 0, peak - self._resident)
        return steps


def measure_loops(
    work: Workload,
    contenders: Sequence[Contender],
    settings: LoopSettings,
    tell: Callable[[Measured], None] = lambda one: None,
) -> list[Measured]:
    """Every contender once, and again as long as that fits into the budget; `tell` hears of each that has ended."""
    found = [Measured(contender=contender) for contender in contenders]
    start = time.perf_counter()
    sgd = Baseline(work, settings)
    for text in raised(contenders, settings.steps, sgd.latest.seconds):
        print(text, flush=True)
    longest = 0.0
    for number in range(settings.repeats):
        begin = time.perf_counter()
        if number and begin - start + longest > settings.budget:
            print(
                f"({number} of {settings.repeats} repeats: another would go beyond {settings.budget:g} s)", flush=True
            )
            break
        for one in found:
            if one.error is None:
                with failing_into(one):
                    one.repeats.append(measure_once(one.contender, work, sgd, settings))
                tell(one)
        longest = max(longest, time.perf_counter() - begin)
    return found


def raised(contenders: Sequence[Contender], steps: int, seconds: float) -> list[str]:
    """What loops take where that is not what was asked for, and roughly how long, by `seconds` of SGD's step."""
    told = []
    for one in {contender.intervals: contender for contender in contenders}.values():
        length = one.length(steps)
        if length != steps:
            least = seconds * (1.5 * length + one.warm_up)  # SGD's turns in between are half as many
            told.append(
                f"({length} steps of each loop at {one.intervals}, not {steps}: whole intervals of decompositions; "
                f"with SGD's turns each takes about {least:.0f} s or more)"
            )
    return told


# Reporting

COLUMNS = {
    "mean_ms": "ms a step",
    "sgd_ms": "SGD",
    "ratio": "x SGD",
    "compiled_ratio": "x compiled",
    "cpu_ratio": "x core seconds",
    "worst_to_median": "worst/median",
    "mean_age": "mean age",
    "largest_age": "largest",
    "peak_ratio": "peak x SGD",
    "state_bytes": "factors, decompositions",
    "memory_beyond": "beyond, of SGD's",
}


RATIOS = ("ratio", "compiled_ratio")  # of times by the clock, which others on the machine disturb


def rows(found: Sequence[Measured]) -> list[list[str]]:
    """A table."""
    result = [["", *COLUMNS.values(), "range", "SGD's turns"]]
    for one in found:
        summary = one.summary()
        name = one.name if one.error is None else f"{one.name} (failed)"
        result.append([name, *(cell(summary, column) for column in COLUMNS), *_ranges(one)])
    return result


def _ranges(one: Measured) -> list[str]:
    if not one.repeats:
        return ["-", "-"]
    fastest, slowest = min(r.sgd_fastest_ms for r in one.repeats), max(r.sgd_slowest_ms for r in one.repeats)
    return [f"{min(one.ratios()):.3f}-{max(one.ratios()):.3f}", f"{fastest:.2f}-{slowest:.2f}"]


def cell(summary: Mapping[str, float], column: str) -> str:
    """A number as it is written, or a dash."""
    if column not in summary:
        return "-"
    value = summary[column]
    if column == "state_bytes":
        return f"{value / 2**20:,.0f} MiB"
    if column == "memory_beyond":
        return f"{value:+.1%}"
    mark = f" {disturbed.MARK}" if column in RATIOS and disturbed.unsteady(summary.get("sgd_spread")) else ""
    form = {"mean_ms": ".2f", "sgd_ms": ".2f", "ratio": ".3f", "mean_age": ".0f", "largest_age": ".0f"}
    return format(value, form.get(column, ".2f")) + mark

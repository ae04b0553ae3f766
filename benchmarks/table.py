"""What K-FAC costs beside SGD, beside other code and beside its targets: one table and a picture.

    python -m benchmarks.table                                # all lines that this device can; --lines 1,5 or names
    python -m benchmarks.table --ways plain,background,fast --lines resnet50
    python -m benchmarks.table --profile                      # the share of each part of a step, ResNet-50, 10/100
    python -m benchmarks.table --merge one.json two.json --out docs/step-cost.json     # later ones win
    python -m benchmarks.table --plot-only docs/step-cost.json
    python -m benchmarks.table --plot-profile before.json after.json --out docs/profile.png

A ratio is that of the mean over at least 300 steps of a real loop to SGD's in the same run, the median of repeats
(`benchmarks.loops`). Everything counts: statistics, decompositions, waiting for them. On a GPU: ResNet-50 at three
settings, CIFAR's ResNet-32 against eager and compiled SGD, and GPT-2's small network on 48 sequences of 1024 tokens,
with a vocabulary of 1024: a head of GPT-2's 50257 words is left out, since its factor would be diagonal and its
products would be most of the step. On a CPU: ResNet-20.

✓ and ✗ are of the target; ? stands there where SGD's own turns differed so much that something else must have used the
machine (`benchmarks.disturbed`).

Memory: peak over SGD's, and what is beyond SGD's peak, factors and decompositions, as a part of SGD's peak.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import disturbed, lines, profiles
from benchmarks.approximations.common import text_table
from benchmarks.command import budget, check_out, device_of, whole
from benchmarks.contenders import Contender, chosen_ways, names_of_ways
from benchmarks.lines import PEER, PEER_WORST, TARGET_MEMORY, TARGET_WORST, Line, chosen_lines
from benchmarks.loops import LoopSettings, Measured, measure_loops, rows
from benchmarks.records import (
    Record,
    loop_record,
    merged,
    ratio_of,
    read,
    record_of,
    records_of,
    spread_of,
    ways_of,
    write,
)
from benchmarks.workloads import SOLVERS, Configuration, Device, Failure, Workload, failing_into

PICTURE = ".png"

# The table


def table_rows(found: Sequence[Record]) -> list[list[str]]:
    """A row for every line and way that was measured."""
    header = ["", "line", "way", "peer", "target", "eigen", "inverse", "worst/median", "peak x SGD", "beyond", "age"]
    header.append("core seconds")
    result = [header]
    for line in lines.LINES:
        result += [
            [line.number, line.label, way, *_cells(line, records_of(line, found, way))] for way in ways_of(line, found)
        ]
    return result


def _summaries(records: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """Of each solver, in the order of the table's columns; empty where nothing is known."""
    return {solver: records[solver]["summary"] if solver in records else {} for solver in SOLVERS}


def _both(summaries: Mapping[str, Mapping[str, float]], name: str, form: str) -> str:
    return " / ".join(format(one[name], form) if name in one else "-" for one in summaries.values())


def _cells(line: Line, records: Mapping[str, Record]) -> list[str]:
    summaries = _summaries(records)
    numbers = [" / ".join(f"{of[s]:.2f}" if s in of else "-" for s in SOLVERS) for of in (line.peer, line.target)]
    ages = " / ".join(f"{one['mean_age']:.0f} ({one['largest_age']:.0f})" if one else "-" for one in summaries.values())
    return [
        *numbers,
        *(_reached(line, solver, records.get(solver)) for solver in SOLVERS),
        _both(summaries, "worst_to_median", ".1f"),
        _both(summaries, "peak_ratio", ".2f"),
        _both(summaries, "memory_beyond", "+.1%"),
        ages,
        _both(summaries, "cpu_ratio", ".2f"),
    ]


def _reached(line: Line, solver: str, record: Record | None) -> str:
    ratio, target = ratio_of(line, record), line.target.get(solver)
    if record is not None and record["error"] is not None:
        return "failed" if ratio is None else f"{ratio:.3f} (failed later)"
    if ratio is None:
        return "-"
    if disturbed.unsteady(spread_of(record)):
        return f"{ratio:.3f} {disturbed.MARK}"
    return f"{ratio:.3f}" if target is None else f"{ratio:.3f} {'✓' if ratio <= target else '✗'}"


def sentences(found: Sequence[Record]) -> list[str]:
    """The two lines that are about other numbers: the worst step, and memory."""
    told: list[str] = []
    beyond: dict[str, list[str]] = {}
    for line in lines.LINES:
        for way in ways_of(line, found):
            summaries = _summaries(records_of(line, found, way))
            if line.number == "1" and any(summaries.values()):
                worst = ", ".join(f"{name} {one['worst_to_median']:.2f}" for name, one in summaries.items() if one)
                told.append(f"7. Worst step over median step, {line.label}, {way}: {worst}")
                told[-1] += f" (peer {PEER_WORST}, target {TARGET_WORST:g})"
            if not line.compiled and any("memory_beyond" in one for one in summaries.values()):
                beyond.setdefault(way, []).append(f"{line.number}: {_both(summaries, 'memory_beyond', '+.1%')}")
    for way, numbers in beyond.items():
        told.append(f"8. Memory beyond SGD's peak, factors and decompositions, as a part of SGD's peak, {way}, by line")
        told[-1] += f" (target {TARGET_MEMORY:.0%}): {', '.join(numbers)}"
    return told


def doubts(found: Sequence[Record]) -> list[str]:
    """What lessens the worth of these numbers."""
    spreads, once = {}, []
    for line in lines.LINES:
        some = [one for way in ways_of(line, found) for one in records_of(line, found, way).values()]
        known = [spread for spread in map(spread_of, some) if spread is not None]
        if known:
            spreads[f"on line {line.number}"] = max(known)
        if any(len(one["repeats"]) == 1 for one in some):
            once.append(line.number)
    told = disturbed.sentences(spreads)
    if once:
        told.append(f"One run of each on {_named(once)}: a ✓ or ✗ of one run says little, --repeats takes more.")
    return told


def _named(numbers: Sequence[str]) -> str:
    return f"line {numbers[0]}" if len(numbers) == 1 else f"lines {', '.join(numbers)}"


def report(found: Sequence[Record]) -> None:
    """Prints all that is known."""
    loops = [record for record in found if record["kind"] == "loop"]
    if loops:
        where = " and ".join(dict.fromkeys(f"{one['device']}, torch {one['torch']}" for one in loops))
        print(f"\n{where}; eigen / inverse; ages of decompositions in steps:")
        print("  mean (largest); beyond: memory beyond SGD's, factors and decompositions, of SGD's;")
        print("  core seconds (CPU): the ratio of those, which others on the machine disturb less than the clock's")
        print(text_table(table_rows(found), left=3))
        print("\n".join([*doubts(found), *sentences(found), PEER]), flush=True)
    parts = [record for record in found if record["kind"] == "profile"]
    if parts:
        print(f"\nms a step and share of each part, {parts[0]['model']}, batch {parts[0]['batch']}")
        print(text_table(profiles.rows(parts)), flush=True)


# Measuring


class Run:
    """Collects records, and writes them as they come: a run that is stopped leaves what it has."""

    def __init__(self, device: Device, out: Path) -> None:
        self._device, self._out = device, out
        self.records: list[Record] = []
        self.worked = True

    def add(self, record: Record) -> None:
        self.records = merged([*self.records, record])
        write(self._out, self.records)

    def _workload(self, configuration: Configuration) -> Workload:
        self._device.set_precision(configuration.precision)
        # Otherwise the models of earlier configurations count as recompilations of this one's.
        torch.compiler.reset()
        return Workload(configuration, self._device)

    def loops(self, some: Sequence[Line], ways: Sequence[str], solvers: Sequence[str], settings: LoopSettings) -> None:
        """All contenders of the lines of one workload, which share SGD's turns."""
        configuration = some[0].configuration
        contenders = list(
            dict.fromkeys(
                Contender(solver=solver, way=line.way(way), intervals=line.intervals)
                for line in some
                for way in ways
                for solver in solvers
            )
        )
        failure = Failure(str(configuration))
        start = time.perf_counter()
        with failing_into(failure):
            print(f"\n{configuration}: {len(contenders)} loops of {settings.steps} steps or more a repeat", flush=True)
            work = self._workload(configuration)
            found = measure_loops(work, contenders, settings, lambda one: self._tell(work, one))
            self.worked &= all(one.error is None for one in found)
            print(f"\n{configuration} ({time.perf_counter() - start:.0f} s)\n{text_table(rows(found))}", flush=True)
        self.worked &= failure.error is None

    def _tell(self, work: Workload, one: Measured) -> None:
        self.add(loop_record(work, one))
        if one.repeats and one.error is None:
            mark = f" {disturbed.MARK}" if disturbed.unsteady(one.repeats[-1].sgd_spread) else ""
            print(f"{work.configuration}, {one.name}: x{one.ratios()[-1]:.3f}{mark}", flush=True)

    def profile(self, line: Line, ways: Sequence[str], solvers: Sequence[str], *, steps: int) -> None:
        """SGD's parts and those of every contender."""
        failure = Failure(f"profile of {line.configuration}")
        period = line.intervals.inverse
        with failing_into(failure):
            work = self._workload(line.configuration)
            contenders = [Contender(solver=s, way=way, intervals=line.intervals) for way in ways for s in solvers]
            for contender in (None, *contenders):
                parts = profiles.measure_profile(work, contender, steps=math.ceil(steps / period) * period)
                self.add({**record_of("profile", work, contender), "parts": parts})
        self.worked &= failure.error is None


# The command


_WHOLE = "raised to whole intervals of decompositions, 100 for 10/100"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--lines", help="numbers or names, with commas (default: all that the device can; none with --profile)")
    add("--ways", default="fast", help=f"{', '.join(names_of_ways())}, or several with + (default %(default)s)")
    add("--solver", default=",".join(SOLVERS), help="eigen, inverse or both, with a comma (default %(default)s)")
    add("--steps", type=whole(1), default=300, help=f"of a loop, at least: {_WHOLE} (default %(default)s)")
    add("--sgd-steps", type=whole(1), help="of one of SGD's turns, at most (default 50, CPU 10)")
    add("--repeats", type=whole(1), default=3, help="of all loops, at most (default %(default)s)")
    add("--budget", type=budget, help="seconds for a workload, the first repeat apart (default 60, CPU 900)")
    add("--compile-sgd", action="store_true", help="compiled SGD beside every line, not only where one asks for it")
    add("--compile", action="store_true", help="K-FAC with a compiled model")
    add("--profile", action="store_true", help="the share of each part of a step of ResNet-50 (CPU: ResNet-20), 10/100")
    add("--profile-steps", type=whole(1), default=100, help="at least, to whole intervals too (default %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSON; the picture goes beside it as .png (default step-cost.json)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--plot-only", type=Path, metavar="JSON", help="the table and picture of an earlier run again")
    add("--merge", type=Path, nargs="+", metavar="JSON", help="several runs as one; later ones win")
    add("--plot-profile", type=Path, nargs="+", metavar="JSON", help="the profiles of some runs in one picture, --out")
    return parser


def measured(given: argparse.Namespace) -> Run:
    """Runs what the command line asks for."""
    device = device_of(given.device)
    ways, solvers = chosen_ways(given.ways, compiled=given.compile), given.solver.split(",")
    if not set(solvers) <= set(SOLVERS):
        raise ValueError(f"--solver takes {' or '.join(SOLVERS)}, got {given.solver}")
    sgd_steps = given.sgd_steps or (50 if device.is_cuda else 10)
    kind, seconds = device.torch.type, 60.0 if device.is_cuda else 900.0
    chosen = [] if given.profile and given.lines is None else chosen_lines(given.lines, kind, lines.LINES)
    run = Run(device, given.out)
    print(f"{device}, torch {torch.__version__}", flush=True)
    if given.profile:
        able = chosen_lines(None, kind, lines.LINES)
        run.profile(able[0], ways, solvers, steps=given.profile_steps)
    for configuration in dict.fromkeys(line.configuration for line in chosen):
        some = [line for line in chosen if line.configuration == configuration]
        settings = LoopSettings(
            steps=given.steps,
            sgd_steps=sgd_steps,
            repeats=given.repeats,
            budget=seconds if given.budget is None else given.budget,
            compile_sgd=given.compile_sgd or any(line.compiled for line in some),
        )
        run.loops(some, ways, solvers, settings)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes JSON and a picture; 1 where something failed."""
    from benchmarks import pictures  # a machine without matplotlib can measure

    parser = arguments()
    given = parser.parse_args(argv)
    start = time.perf_counter()
    worked = True
    try:
        if given.out is not None:
            check_out("--out", given.out)
            if given.out.suffix == PICTURE and not given.plot_profile and given.plot_only is None:
                raise ValueError(f"--out {given.out} is for JSON: the picture goes beside it as {PICTURE}")
        if given.plot_profile:
            files = {path.stem: read(path) for path in given.plot_profile}
            given.out = given.out or Path("profile.png")
            pictures.draw_profiles(files, out=given.out)
            print(f"picture: {given.out}")
            return 0
        if given.plot_only is not None:
            given.out, found = given.out or given.plot_only, read(given.plot_only)
            if not any(record["kind"] == "loop" for record in found):
                raise ValueError(f"{given.plot_only} has no loops to draw; profiles are for --plot-profile")
        elif given.merge:
            found = merged(record for path in given.merge for record in read(path))
            given.out = given.out or Path("step-cost.json")
            write(given.out, found)
        else:
            given.out = given.out or Path("step-cost.json")
            run = measured(given)
            found, worked = run.records, run.worked
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    report(found)
    if pictures.draw_table(found, out=given.out.with_suffix(PICTURE)):
        print(f"picture: {given.out.with_suffix(PICTURE)}")
    print(f"({time.perf_counter() - start:.0f} s in all)")
    return 0 if worked else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What a step of K-FAC costs, as a ratio to the same step of SGD.

    python -m benchmarks.step_cost                      # the suite of this machine: cpu, or h200 where there is a GPU
    python -m benchmarks.step_cost --model resnet50 --batch 128 --precision bf16 --solver eigen --profile
    python -m benchmarks.step_cost --model gpt --batch 48 --precision bf16 --loop 300 --ways plain,background

Three kinds of step are timed apart: one that only preconditions, one that takes statistics too (*factor*), and one
that also decomposes the factors (*decompose*). What K-FAC costs at given intervals follows by counting: at 10/100
(statistics every 10 steps, decompositions every 100), 100 steps are 90 that only precondition, 9 factor steps and
1 decomposition step. ``--loop N`` takes the mean over N steps of real loops (`benchmarks.loops`), in any of the
``--ways``: plain, background, one-worker, two-workers, staggered, reduce, fast, or several with +.

``--table`` is ``python -m benchmarks.table``: real loops again, beside targets and other code, with a picture.

All methods take turns in each round, a ratio compares medians of the same round, and its median over rounds is
reported with the range: a machine's speed drifts more than the methods differ. Where others use the machine too, look
at the row *best*, which compares the fastest steps of all rounds.

Precision: fp32 means no TF32 anywhere. tf32 allows it in products and convolutions. bf16 is autocast with
channels-last weights and images; what stays in float32 there (K-FAC's own products) may use TF32 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import disturbed
from benchmarks.approximations.common import facts, text_table
from benchmarks.command import budget, check_out, device_of, whole
from benchmarks.contenders import Contender, chosen_ways, names_of_ways
from benchmarks.loops import LoopSettings, Measured, measure_loops, rows
from benchmarks.table import main as table_main
from benchmarks.timing import (
    DECOMPOSE,
    FACTOR,
    INTERVALS,
    KINDS,
    PRECONDITION,
    STEP,
    SUITES,
    Result,
    Settings,
    amortised,
    measure,
)
from benchmarks.workloads import NETWORKS, PRECISIONS, SOLVERS, Configuration, Device, Workload, failing_into

_RARE, _OFTEN = INTERVALS
EXPLAINED = (
    f"{PRECONDITION}: a step that only does that; {FACTOR}: takes statistics too; {DECOMPOSE}: decomposes them as well",
    f"{_RARE} and {_OFTEN}: the mean step with statistics and decompositions that often, counted from those kinds",
    "range: of the ratio, round by round; best: the fastest step of its kind over SGD's fastest, of all rounds",
)


def table(results: Sequence[Result]) -> str:
    """A block of lines a method: times, ratios to SGD, their range over rounds, ratios of the fastest steps."""
    sgd = results[0]
    compiled = next((result for result in results if result.name == "SGD compiled"), None)
    lines = [["", "", *KINDS, *map(str, INTERVALS), "peak memory"]]
    for result in results:
        lines += _method_rows(result, sgd, compiled)
    return text_table(lines, left=2)


def _method_rows(result: Result, sgd: Result, compiled: Result | None) -> list[list[str]]:
    empty = [""] * len(INTERVALS)
    name = result.name if result.error is None else f"{result.name} (failed)"
    memory = "-" if result.peak is None else f"{result.peak / 2**30:.2f} GiB"
    found = [[name, "ms", *_by_kind(result.median_ms(), "{:.1f}"), *empty, memory]]
    if result is sgd:
        return found
    for label, baseline in (("x SGD", sgd), ("x compiled", compiled)):
        ratios = {} if baseline is None or baseline is result else result.ratios(baseline)
        if baseline is None or not ratios:
            continue
        ratio = memory_ratio(result, baseline)
        means = _by_intervals(result.ratio(baseline))
        found.append(["", label, *_by_kind(result.ratio(baseline)), *means, f"{ratio:.2f}" if ratio else ""])
        if baseline is sgd:
            spread = {kind: f"{min(values):.2f}-{max(values):.2f}" for kind, values in ratios.items()}
            best = result.best_ratio(sgd)
            found.append(["", "range", *_by_kind(spread, "{}"), *empty, ""])
            found.append(["", "best", *_by_kind(best), *_by_intervals(best), ""])
    return found


def _by_kind(values: Mapping[str, float | str], form: str = "{:.2f}") -> list[str]:
    """A cell for each kind of step. SGD's has no kind: it stands under the cheapest."""
    values = {PRECONDITION if kind == STEP else kind: value for kind, value in values.items()}
    return [form.format(values[kind]) if kind in values else "" for kind in KINDS]


def _by_intervals(ratio: dict[str, float]) -> list[str]:
    means = amortised(ratio)
    return [f"{means[str(intervals)]:.2f}" if means else "" for intervals in INTERVALS]


def memory_ratio(result: Result, baseline: Result) -> float | None:
    """Peak memory relative to the baseline's, where it is known."""
    return result.peak / baseline.peak if result.peak and baseline.peak else None


def summary(work: Workload, results: Sequence[Result]) -> str:
    """One line."""
    sgd = results[0]
    parts = [f"SGD {sgd.median_ms()[STEP]:.1f} ms" if sgd.seconds else "SGD failed"]
    for result in results[1:]:
        ratio = result.ratio(sgd)
        means = amortised(ratio)
        if means:
            parts.append(f"{result.name} " + ", ".join(f"x{mean:.2f} at {name}" for name, mean in means.items()))
        elif STEP in ratio:
            parts.append(f"{result.name} x{ratio[STEP]:.2f}")
        if result.error is not None:
            parts.append(f"{result.name} failed ({result.error[:100]})")
    return f"{work.configuration} on {work.device}: " + "; ".join(parts)


def records(work: Workload, results: Sequence[Result], settings: Settings) -> Iterator[dict[str, Any]]:
    """One dictionary a method, for machines to read."""
    sgd = results[0]
    for result in results:
        ratio = result.ratio(sgd)
        yield {
            **facts(work.device, benchmark="step_cost", **asdict(work.configuration)),
            "method": result.name,
            "steps": settings.steps,
            "rounds": len(next(iter(result.seconds.values()), [])),
            "ms": result.median_ms(),
            "ratio": ratio,
            "ratio_range": {kind: [min(r), max(r)] for kind, r in result.ratios(sgd).items()},
            "amortised": amortised(ratio),
            "best_ratio": result.best_ratio(sgd),
            "best_amortised": amortised(result.best_ratio(sgd)),
            "peak_bytes": result.peaks,
            "memory_ratio": memory_ratio(result, sgd),
            "trouble": result.trouble,
            "error": result.error,
        }


def report(work: Workload, results: Sequence[Result], settings: Settings) -> str:
    """Prints the table and the summary, appends the records; returns the summary."""
    rounds = len(results[0].seconds.get(STEP, []))
    where = f"{work.device}, torch {torch.__version__}"
    print(f"\n{work.configuration} on {where}, {rounds} rounds of {settings.steps} steps")
    print("\n".join([table(results), *EXPLAINED]))
    for result in results:
        if result.trouble is not None:
            print(f"{result.name}: not all steps went well: {result.trouble}")
        if result.error is not None:
            print(f"{result.name}: {result.error}")
    line = summary(work, results)
    print(line, flush=True)
    _append(settings, records(work, results, settings))
    return line


def _append(settings: Settings, found: Iterable[Mapping[str, Any]]) -> None:
    if settings.json is not None:
        with settings.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)


def report_loops(work: Workload, found: Sequence[Measured], settings: Settings) -> None:
    """Prints the table of real loops, appends the records."""
    print(f"\nloops of {work.configuration}; the mean over all steps")
    spreads = {f"beside {one.name}": one.summary()["sgd_spread"] for one in found if one.repeats}
    print("\n".join([text_table(rows(found)), *disturbed.sentences(spreads)]), flush=True)
    what = facts(work.device, benchmark="loop", **asdict(work.configuration))
    _append(settings, ({**what, "method": one.name, **one.summary(), "error": one.error} for one in found))


# The command


def run(
    configuration: Configuration,
    device: Device,
    settings: Settings,
    loops: LoopSettings | None = None,
    ways: Sequence[str] = (),
) -> tuple[str, bool]:
    """Measures one configuration and prints its report. Returns the summary, and whether all of it worked."""
    whole = Result(name=str(configuration))
    with failing_into(whole):
        device.set_precision(configuration.precision)
        # Otherwise the models of earlier configurations count as recompilations of this one's.
        torch.compiler.reset()
        work = Workload(configuration, device)
        results = measure(work, settings)
        line, errors = report(work, results, settings), [result.error for result in results]
        if loops is not None:
            contenders = [
                Contender(solver=solver, way=way, intervals=intervals)
                for intervals in INTERVALS
                for way in ways
                for solver in settings.solvers
            ]
            found = measure_loops(work, contenders, loops)
            report_loops(work, found, settings)
            errors += [one.error for one in found]
        return line, not any(errors)
    return f"{configuration}: failed ({whole.error})", False


_WHOLE = "raised to whole intervals of decompositions"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a step of K-FAC costs, as a ratio to the same step of SGD.")
    add = parser.add_argument
    add("--suite", choices=sorted(SUITES), help="a set of workloads; by default the one of this device")
    add("--model", choices=sorted(NETWORKS), help="one workload instead of a suite")
    add("--batch", type=whole(1), help="with --model (default 128)")
    add("--precision", choices=PRECISIONS, help="with --model (default fp32)")
    add("--size", type=whole(1), help="with --model: height and width, or tokens (default: what the model is made for)")
    add("--classes", type=whole(1), help="with --model: classes, or words of a GPT (default 1000, CIFAR 10, GPT 1024)")
    add("--solver", default=",".join(SOLVERS), help="eigen, inverse or both, with a comma (default %(default)s)")
    add("--rounds", type=whole(1), help="turns of each method (default 5, CPU 8)")
    add("--steps", type=whole(1), help="steps of each kind in a round; a fifth of it decompose (default 10, CPU 2)")
    add("--budget", type=budget, help="seconds for the rounds of a workload, the first apart (default 55, CPU 180)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile-sgd", action="store_true", help="SGD with a compiled model as a second baseline")
    add("--compile", action="store_true", help="K-FAC with a compiled model too")
    add("--loop", type=whole(0), default=0, metavar="N", help=f"also the mean over N steps of real loops, {_WHOLE}")
    add("--ways", default="plain", help=f"of loops: {', '.join(names_of_ways())}, or several with + (default plain)")
    add("--table", action="store_true", help="python -m benchmarks.table, with its options")
    add("--profile", action="store_true", help="also where the time of single steps goes")
    add("--json", type=Path, help="append one line of JSON a method to this file")
    return parser


def parsed(
    argv: Sequence[str] | None,
) -> tuple[list[Configuration], Device, Settings, LoopSettings | None, list[str]]:
    """What the command line asks for."""
    parser = arguments()
    given = parser.parse_args(argv)
    try:
        if given.json is not None:
            check_out("--json", given.json)
        device, ways = device_of(given.device), chosen_ways(given.ways, compiled=given.compile)
    except ValueError as error:
        parser.error(str(error))
    solvers = tuple(given.solver.split(","))
    if not set(solvers) <= set(SOLVERS):
        parser.error(f"--solver takes {' or '.join(SOLVERS)}, got {given.solver}")
    single = [name for name in ("batch", "precision", "size", "classes") if getattr(given, name) is not None]
    if given.model is None and single:
        parser.error(f"--{single[0]} belongs to --model")
    if given.model is not None and given.suite is not None:
        parser.error("--model or --suite, not both")
    if given.model is None:
        configurations = SUITES[given.suite or ("h200" if device.is_cuda else "cpu")]
    else:
        one = Configuration(
            model=given.model,
            batch=given.batch or 128,
            precision=given.precision or "fp32",
            size=given.size,
            classes=given.classes,
        )
        configurations = [one]
    if given.precision == "tf32" and not device.is_cuda:
        parser.error("tf32 needs a GPU")
    seconds = 55.0 if device.is_cuda else 180.0
    settings = Settings(
        solvers=solvers,
        # Many short rounds on the CPU, which is rarely ours alone.
        rounds=given.rounds or (5 if device.is_cuda else 8),
        steps=given.steps or (10 if device.is_cuda else 2),
        budget=seconds if given.budget is None else given.budget,
        compile_sgd=given.compile_sgd,
        compile=given.compile,
        profile=given.profile,
        json=given.json,
    )
    loops = None
    if given.loop:
        sgd_steps = min(50, given.loop)
        loops = LoopSettings(steps=given.loop, sgd_steps=sgd_steps, repeats=1, compile_sgd=given.compile_sgd)
    return configurations, device, settings, loops, ways


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where something in it failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--table" in words:
        words.remove("--table")
        return table_main(words)
    configurations, device, settings, loops, ways = parsed(words)
    start = time.perf_counter()
    outcomes = [run(configuration, device, settings, loops, ways) for configuration in configurations]
    if len(outcomes) > 1:
        print("\n" + "\n".join(line for line, _ in outcomes))
    print(f"({time.perf_counter() - start:.0f} s in all)")
    return 0 if all(worked for _, worked in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Where the time of a step goes, on ranks of this machine, and how much each rank decomposes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from benchmarks.ranks.common import Loop, Outcome, Table, on_ranks
from benchmarks.ranks.traffic import ORDINARY, REFRESH, STATISTICS
from natgrad import Clock

FACTOR_STEPS, REFRESH_STEPS = 2, 6  # of six steps one decomposes, two more take statistics, three do neither
PERIODS = 3  # of so many steps, and one before
WHOLE, REST = "step", "the rest"
KINDS = (ORDINARY, STATISTICS, REFRESH)


@dataclass(frozen=True)
class Timed:
    """Of one rank: seconds of every step by part, `WHOLE` among them, how many factors it decomposed, and how long one
    refresh of them should take.
    """

    steps: list[dict[str, float]]
    decompositions: int
    modelled: float


@dataclass(frozen=True)
class Times:
    """Of all ranks: medians in seconds by kind of step and part, of the rank that takes longest, and each rank's share
    of the decompositions, by number and by modelled time.
    """

    ranks: int
    strategy: str
    solver: str
    parts: dict[str, dict[str, float]]
    fastest: dict[str, float]
    shares: list[float]
    modelled_shares: list[float]


def kind_of(step: int) -> str:
    """Of a step, from 0."""
    return REFRESH if step % REFRESH_STEPS == 0 else STATISTICS if step % FACTOR_STEPS == 0 else ORDINARY


def time_steps(strategy: str, solver: str, model: str, batch: int, image: int) -> Timed:
    """Runs on every rank."""
    loop = Loop(
        model,
        batch=batch,
        image=image,
        solver=solver,
        factor_update_steps=FACTOR_STEPS,
        inv_update_steps=REFRESH_STEPS,
        strategy=strategy,
    )
    loop.kfac.clock = clock = Clock()
    steps = []
    for _ in range((1 + PERIODS) * REFRESH_STEPS):
        start = time.perf_counter()
        loop.step()
        whole = time.perf_counter() - start
        parts, _ = clock.take()
        steps.append({WHOLE: whole, **parts, REST: whole - sum(parts.values())})
    placement = loop.kfac.plan().placement
    rank = dist.get_rank() if dist.is_initialized() else 0
    decompositions = int(loop.kfac.metrics()["decompositions"] or 0)
    return Timed(steps[REFRESH_STEPS:], decompositions, placement.solve_seconds[rank])


def summarised(ranks: int, strategy: str, solver: str, timed: Sequence[Timed]) -> Times:
    """Medians over steps, and of them the largest over ranks."""
    parts: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    fastest: dict[str, float] = {}
    for one in timed:
        for kind in KINDS:
            own = [step for number, step in enumerate(one.steps) if kind_of(number) == kind]
            fastest[kind] = max(fastest.get(kind, 0.0), min(step[WHOLE] for step in own))
            for part in dict.fromkeys(part for step in own for part in step):
                median = statistics.median(step.get(part, 0.0) for step in own)
                parts[kind][part] = max(parts[kind].get(part, 0.0), median)
    shares = _shares([one.decompositions for one in timed])
    return Times(ranks, strategy, solver, parts, fastest, shares, _shares([one.modelled for one in timed]))


def _shares(each: Sequence[float]) -> list[float]:
    return [one / sum(each) for one in each]


def run_times() -> Outcome:
    """ResNet-20 on 1, 2 and 4 ranks; hybrid's teams are of one where there are two ranks."""
    model, batch, image = "resnet20", 32, 32
    found = []
    for solver in ("eigen", "inverse"):
        for ranks in (1, 2, 4):
            for strategy in {1: ("one rank",), 2: ("comm-opt", "layer-wise")}.get(
                ranks, ("comm-opt", "layer-wise", "hybrid")
            ):
                timed = on_ranks(time_steps, ranks, strategy, solver, model, batch, image)
                found.append(summarised(ranks, strategy, solver, timed))
    title = f"Time of a step in ms, {model}, {batch} cases of {image}×{image} a rank"
    return Outcome([table(found, title)], [asdict(each) for each in found])


def table(found: Sequence[Times], title: str) -> Table:
    """Every part that the clock knows is a column."""
    known = dict.fromkeys(part for each in found for parts in each.parts.values() for part in parts)
    parts = [WHOLE, *(part for part in known if part not in (WHOLE, REST)), REST]
    rows = []
    for each in found:
        for kind in KINDS:
            cells = [_ms(each.parts[kind], part) for part in parts]
            cells.insert(1, _ms(each.fastest, kind))
            shares = [_percent(each.shares), _percent(each.modelled_shares)] if kind == REFRESH else ["", ""]
            rows.append([each.strategy, str(each.ranks), each.solver, kind, *cells, *shares])
    header = ["strategy", "ranks", "solver", "kind of step", WHOLE, "fastest", *parts[1:]]
    return Table(
        title,
        [*header, "decomposed by rank", "in modelled time"],
        rows,
        f"Medians over {PERIODS * REFRESH_STEPS} steps (statistics every {FACTOR_STEPS}, a refresh every "
        f"{REFRESH_STEPS}), of each the slowest rank's. One thread a rank, {os.cpu_count()} cores: more ranks than "
        "cores wait for each other in every part. *The rest* is forward, backward, DDP and the optimizer.",
    )


def _ms(seconds: Mapping[str, float], name: str) -> str:
    return f"{1e3 * seconds[name]:.1f}" if name in seconds else "-"


def _percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.0%}" for share in shares)

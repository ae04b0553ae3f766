"""The share of each part of a step: forward, backward, statistics, solve, precondition, optimizer.

By `natgrad.Clock`, whose events nobody waits for: a part lasts from when the device gets to it until it gets to the
next one. What runs beside training, on cores or on other streams, is not in it, as far as it delays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import natgrad
from benchmarks.contenders import Contender
from benchmarks.laps import background_ended
from benchmarks.loops import step
from benchmarks.workloads import Trainer, Workload

REST = "the rest of K-FAC"
PARTS = ("forward", "backward", "statistics", "solve", "precondition", REST, "optimizer")


def measure_profile(work: Workload, contender: Contender | None, *, steps: int) -> dict[str, float]:
    """Milliseconds a step by part, over whole periods; None is SGD."""
    work.device.settle()
    with background_ended():
        if contender is None:
            trainer, warm_up = Trainer(work), min(20, steps)
        else:
            trainer, warm_up = contender.trainer(work), contender.warm_up
        try:
            for _ in range(warm_up):
                step(trainer, work)
            return _shares(trainer, work, steps)
        finally:
            if trainer.kfac is not None:
                trainer.kfac.detach()


def _shares(trainer: Trainer, work: Workload, steps: int) -> dict[str, float]:
    clock = natgrad.Clock(work.device.torch)
    if trainer.kfac is not None:
        trainer.kfac.clock = clock
    following = {"forward": "backward", "backward": REST, "kfac.step": "optimizer", "optimizer.step": "forward"}
    if trainer.kfac is None:
        following["backward"] = "optimizer"

    def mark(phase: str) -> None:
        clock.switch(following[phase])

    work.device.now()
    clock.switch("forward")
    for _ in range(steps):
        work.draw_targets()
        trainer.step(mark=mark)
    clock.switch(None)
    work.device.now()
    seconds, _ = clock.take()
    return {part: 1e3 * seconds[part] / steps for part in PARTS if part in seconds}


def rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A table of records: milliseconds a step, and the share of each part."""
    result = [["", "ms a step", *PARTS]]
    for one in found:
        total = sum(one["parts"].values())
        cells = [f"{one['parts'][p]:.2f} ({one['parts'][p] / total:.1%})" if p in one["parts"] else "-" for p in PARTS]
        result.append([name_of(one), f"{total:.2f}", *cells])
    return result


def name_of(record: Mapping[str, Any]) -> str:
    """In a table or picture."""
    return "SGD" if record["solver"] is None else f"{record['solver']}, {record['way']}"

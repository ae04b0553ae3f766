"""Who is compared with SGD: a solver, a way to run K-FAC, and its intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import Intervals
from benchmarks.workloads import Device, Trainer, Workload
from natgrad import Background

COMPILE = "compile"
# The options of KFAC in each way. "fast/inverse", "fast/cpu", "fast/cuda" and "fast/cuda/inverse" would add to "fast"
# where they apply, and "fast+reduce" is both. `benchmarks.table` compares "fast" with the targets.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce": {"sharing": "reduce"},
    "background": {"overlap": "background"},
    "staggered": {"overlap": "staggered"},
    COMPILE: {},  # the model is compiled
    "fast": {"overlap": "background", "stats_fraction": 0.5},
    # For networks that are bound by the host, where every busy core slows the thread that launches.
    "one-worker": {"overlap": Background("cpu", workers=1)},
    "two-workers": {"overlap": Background("cpu", workers=2)},
    "in-step": {"overlap": None},
    "quarter": {"stats_fraction": 0.25},  # more rows than anybody needs: GPT's 48k tokens
    "fast/cpu": {"overlap": None},  # the cores that would decompose are those that train
}
EARLY = 10  # the step of the second decomposition, at the latest


def names_of_ways() -> list[str]:
    """Those that can be asked for."""
    return [name for name in WAYS if "/" not in name]


def chosen_ways(given: str, *, compiled: bool) -> list[str]:
    """Of ``--ways`` and ``--compile``."""
    ways = given.split(",")
    for way in ways:
        for name in way.split("+"):
            if name not in names_of_ways():
                raise ValueError(f"--ways takes {', '.join(names_of_ways())}, or several with +; got {name!r}")
    return [f"{way}+{COMPILE}" if compiled and COMPILE not in way.split("+") else way for way in ways]


def way_options(way: str, solver: str, device: Device) -> dict[str, Any]:
    """For KFAC, intervals apart."""
    found: dict[str, Any] = {"solver": solver}
    kind = device.torch.type
    for name in way.split("+"):
        for key in (name, f"{name}/{kind}", f"{name}/{solver}", f"{name}/{kind}/{solver}"):
            found |= WAYS.get(key, {})
    return found


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is compared with SGD."""

    solver: str
    way: str
    intervals: Intervals

    def __str__(self) -> str:
        return f"{self.solver}, {self.way}, {self.intervals}"

    def trainer(self, work: Workload) -> Trainer:
        """With its K-FAC, which decomposes twice while it warms up, however rarely it does later."""
        early, late = self._early, self.intervals.inverse
        options = way_options(self.way, self.solver, work.device)
        options["factor_update_steps"] = self.intervals.factor
        options["inv_update_steps"] = lambda step: early if step <= early else late
        return Trainer(work, kfac=options, compiled=COMPILE in self.way.split("+"))

    @property
    def warm_up(self) -> int:
        """Steps."""
        return 2 * self._early

    @property
    def _early(self) -> int:
        return max(self.intervals.factor, min(self.intervals.inverse, EARLY))

    def length(self, steps: int) -> int:
        """At least so many steps: whole periods, with the right number of each kind of step."""
        period = self.intervals.inverse
        return math.ceil(steps / period) * period

"""Clocks that nobody waits for, and the rest that both measurements have in common."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot

import natgrad
from benchmarks.timing import Device

COLOURS = {"none": "#0072b2", "cpu": "#d55e00", "gpu": "#cc79a7", "staggered": "#009e73", "sgd": "#555555"}
OVERLAPS: dict[str, Any] = {
    "none": None,
    "staggered": "staggered",
    "cpu": natgrad.Background("cpu"),
    "gpu": natgrad.Background("gpu"),
}
COUNTERS = (
    "late_decompositions",
    "background_failures",
    "failed_decompositions",
    "rejected_statistics",
    "skipped_steps",
)
_WORKERS = "natgrad-"  # how the names of K-FAC's threads begin


class Laps:
    """Marks between steps, made without waiting for the device: by its clock where it has one, and by the host's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._host: list[float] = []

    def mark(self) -> None:
        """Now, for the host; for the device, when it has come to here."""
        self._host.append(time.perf_counter())
        if self._device.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """From the first mark to each, by the device's clock; waits for it."""
        if not self._device.is_cuda:
            return self.host_seconds()
        self._device.now()
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]

    def host_seconds(self) -> list[float]:
        """From the first mark to each, by the host's clock."""
        return [moment - self._host[0] for moment in self._host]


def differences(moments: Sequence[float]) -> list[float]:
    """Between each and the next."""
    return [after - before for before, after in itertools.pairwise(moments)]


def oldest(kfac: natgrad.KFAC) -> int:
    """How many steps ago the factors were taken whose decomposition is the oldest in use. What metrics() calls
    decomposition_age, but without waiting for the device.
    """
    last = kfac._step - 1
    return max((last - member.solved_at for member in kfac._preconditioner.solved.values()), default=0)


def counters(kfac: natgrad.KFAC) -> dict[str, int]:
    """What K-FAC has counted, and the age of its decompositions now; waits for the device."""
    metrics = kfac.metrics()
    return {name: int(metrics[name] or 0) for name in (*COUNTERS, "decomposition_age", "decompositions")}


@contextmanager
def background_ended(*, wait: float = 60.0) -> Iterator[None]:
    """In the end waits for the threads of K-FACs that were made here and have been detached: what they still decompose
    would slow down who comes next.
    """
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith(_WORKERS):
                thread.join(wait)


def write(path: Path, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """All of it, as JSON, a run on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n    ".join(json.dumps(run) for run in runs)
    text = json.dumps(head, indent=2).removesuffix("\n}")
    path.write_text(f'{text},\n  "runs": [\n    {lines}\n  ]\n}}\n')


def chosen(given: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The names of ``--only``, in the order of `known`."""
    names = list(default) if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--only takes {', '.join(known)}; got {name}")
    return [name for name in known if name in names]


def set_style() -> None:
    """Of both pictures."""
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def every(count: int, what: str) -> str:
    """How often: every update, every 10 updates."""
    return f"every {what}" if count == 1 else f"every {count} {what}s"

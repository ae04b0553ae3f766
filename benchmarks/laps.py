"""Clocks that nobody waits for, and what a K-FAC can be asked without waiting."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import natgrad
from benchmarks.workloads import Device

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


def decomposes(kfac: natgrad.KFAC) -> bool:
    """Whether something is being decomposed beside training, or has been and is yet to be taken over."""
    jobs = kfac._curvature.jobs
    return jobs is not None and len(jobs) > 0


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

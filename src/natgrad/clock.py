"""Where the time of training steps goes, measured without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_MARKS = 1000  # kept until they are added up
_NOTHING = nullcontext()


class Clock:
    """Splits time into parts. On a GPU it is the device's own time, between events in its queue: a part lasts from when
    the device gets to it until it gets to the next one, waiting for the host included.

    ``kfac.clock = Clock(device)`` makes a KFAC mark its parts: ``statistics``, ``solve`` and ``precondition``.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._marks: deque[tuple[str | None, Any, bool]] = deque()  # what began, when, and whether it went on
        self._spare: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self.present: str | None = None

    def switch(self, part: str | None, *, again: bool = False) -> str | None:
        """From now on time belongs to this part; None is nobody's. Returns whose it was. `again`: it only goes on."""
        before, self.present = self.present, part
        self._marks.append((part, self._stamp(), again))
        if len(self._marks) > _MARKS:
            self._add_up()
        return before

    def part(self, name: str) -> AbstractContextManager[None]:
        """The time inside belongs to this part, and afterwards to the one before it, which goes on."""
        return self._part(name)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before, again=True)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds by part since the last call, as far as the device has got, and how often each part began.

        The latter tells how many steps of one's own parts there were; of K-FAC's it is not how often they had something
        to do. ``solve`` begins in every step, to see whether decompositions are due, and ``statistics`` several times
        in a step that takes them. ``kfac.metrics()["decompositions"]`` counts those that were made.
        """
        self._add_up()
        taken, self._seconds, self._times = (self._seconds, self._times), {}, {}
        return taken

    def _add_up(self) -> None:
        while len(self._marks) > 1 and self._reached(self._marks[1][1]):
            part, began, again = self._marks.popleft()
            if part is not None:
                self._seconds[part] = self._seconds.get(part, 0.0) + self._between(began, self._marks[0][1])
                self._times[part] = self._times.get(part, 0) + (not again)
            if self._cuda:
                self._spare.append(began)

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _reached(self, stamp: Any) -> bool:
        return not self._cuda or stamp.query()

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1000 if self._cuda else float(ended - began)


class NoClock(Clock):
    """Measures nothing, for nothing."""

    def switch(self, part: str | None, *, again: bool = False) -> str | None:
        """Does nothing."""
        return None

    def part(self, name: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return _NOTHING

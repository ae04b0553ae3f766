"""Ctrl-C and SIGTERM: the step under way is finished, everything saved, and all ranks stop together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from natgrad.training.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody has asked to stop. A second Ctrl-C is not waited with."""

    def __init__(self, ranks: Ranks, *, tell: Callable[[str], None] | None = None) -> None:
        self._ranks = ranks
        self._tell = tell
        self._signal = 0
        self._asked: tuple[Any, torch.Tensor] | None = None
        self.reason = ""

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Catches the signals inside a ``with`` block."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may
            return
        before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._signal and self._tell is not None:
            again = "; Ctrl-C again does not wait for it" if number == signal.SIGINT else ""
            self._tell(f"{signal.Signals(number).name}: saving and stopping after this step{again}")
        self._signal = number

    def requested(self) -> bool:
        """Whether to stop now; the same answer on all ranks, which must all ask, equally often.

        What one rank knows the others know when they ask next: their answers travel while a step is computed.
        """
        number = self._signal
        if self._ranks.count > 1:
            number = self._agreed(number)
        if number:
            self.reason = signal.Signals(number).name
        return bool(number)

    def _agreed(self, mine: int) -> int:
        agreed = 0
        if self._asked is not None:
            work, flag = self._asked
            work.wait()
            agreed = int(flag)
        if agreed:
            self._asked = None
            return agreed
        flag = torch.tensor(mine)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.hosts, async_op=True)
        self._asked = (work, flag)
        return 0

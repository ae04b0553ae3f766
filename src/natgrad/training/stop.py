"""What all ranks do in the same step because one of them wants it: stop, after Ctrl-C or SIGTERM, and save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from natgrad.training.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAVE = 1  # the other bits of a wish are those of SIGNALS, by their numbers


class Agreed(NamedTuple):
    """What all ranks do now."""

    stop: bool
    save: bool


class Agreement:
    """What any rank wants, all know when they ask next: the wishes travel while a step is computed, and none waits."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._under_way: tuple[Any, torch.Tensor] | None = None

    def of(self, mine: int) -> int:
        """The bits of all ranks' wishes, the same on all of them, which must all ask, equally often.

        What is granted now is not asked for again, by the wish that had been sent before it was known.
        """
        if self._ranks.count == 1:
            return mine
        granted = 0
        if self._under_way is not None:
            work, bits = self._under_way
            work.wait()
            granted = int(bits)
        bits = torch.tensor(mine & ~granted)
        work = dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=self._ranks.hosts, async_op=True)
        self._under_way = (work, bits)
        return granted


class Stop:
    """Whether somebody has asked to stop. A second Ctrl-C is not waited with."""

    def __init__(self, ranks: Ranks, *, tell: Callable[[str], None] | None = None) -> None:
        self._agreement = Agreement(ranks)
        self._tell = tell
        self._signal = 0
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

    def agreed(self, *, save: bool = False) -> Agreed:
        """Whether to stop, and whether to `save` as some rank wants; all ranks must ask, equally often.

        The first of some ranks to hear of a signal is one step ahead of the others: all stop, or save, in the next.
        """
        wanted = self._agreement.of((_SAVE if save else 0) | (1 << self._signal if self._signal else 0))
        for number in SIGNALS:
            if wanted & 1 << number:
                self.reason = number.name
        return Agreed(stop=wanted > _SAVE, save=bool(wanted & _SAVE))

    def requested(self) -> bool:
        """Whether to stop now; the same answer on all ranks, which must all ask, equally often."""
        return self.agreed().stop

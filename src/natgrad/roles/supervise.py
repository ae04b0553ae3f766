"""torchrun ends everybody when a process that it has started dies. So the helper that it starts only watches: the work
is done by a child, which may die as often as it likes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch

_QUICK = 10.0  # seconds: whoever has lived longer is no bug in the first lines of a script
_TRIES = 5
_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds
_CALM = 60.0  # seconds
_GRACE = 1.0  # seconds from a request to end to the end


def supervised(who: str, *, over: Callable[[], bool] = lambda: False) -> int:
    """Returns in a child of this process, with the number of times that one was started before; this process watches
    over it, starts another one when it dies, and ends when it has ended well or training is `over`. `who` names it.
    """
    if torch.cuda.is_initialized() or _spoilt():
        raise RuntimeError(
            f"CUDA is in use already in the process that should become {who}: call natgrad.roles.take() first in the "
            "script, before anything asks for a GPU"
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("call natgrad.roles.take() in the main thread")
    return _Supervisor(who, over).run()


class _Supervisor:
    def __init__(self, who: str, over: Callable[[], bool]) -> None:
        self._who, self._over = who, over
        self._worker = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._reading, self._writing = os.pipe()  # the end of writing is ours alone: it closes with us

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._end)
        incarnation, quick, pause, lasted = 0, 0, _PAUSE, False
        while True:
            begun = time.monotonic()
            if self._fork():
                return incarnation
            code = os.waitstatus_to_exitcode(os.waitpid(self._worker, 0)[1])
            self._worker = 0
            if code == 0:
                os._exit(0)
            lived = time.monotonic() - begun
            lasted |= lived > _QUICK
            # One that has worked once is not given up later, whatever has happened: training goes on without it.
            killed = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)  # by somebody: no bug
            quick += lived <= _QUICK and not lasted and not killed
            died = f"{self._who} died ({f'killed by signal {-code}' if code < 0 else f'exit code {code}'})"
            if quick == _TRIES:
                _say(f"{died} {_TRIES} times shortly after its start: given up")
                os._exit(128 - code if code < 0 else code)
            if lived > _CALM:
                pause = _PAUSE
            time.sleep(pause)  # a request to end, which goes to all at once, is heard here at the latest
            pause = min(2 * pause, _LONGEST_PAUSE)
            if self._over():
                os._exit(0)
            _say(f"{died}; started again")
            incarnation += 1

    def _fork(self) -> bool:
        """Whether this is the child."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        self._worker = _forked()
        if self._worker:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return False
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(self._writing)
        threading.Thread(target=_end_with, args=(self._reading,), daemon=True, name="natgrad supervisor").start()
        return True

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        for one in self._handlers:
            signal.signal(one, signal.SIG_IGN)
        if self._worker:
            _stop(self._worker)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)


def _forked() -> int:
    sys.stdout.flush()  # or both would write it
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which take() comes before
        return os.fork()


def _stop(worker: int) -> None:
    """Asks a child to end, and then no longer."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(worker, signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while not os.waitpid(worker, os.WNOHANG)[0]:
            if time.monotonic() > until:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
                return
            time.sleep(0.02)


def _end_with(reading: int) -> None:
    """Ends this process as soon as the supervisor's is no more, however that ended."""
    os.read(reading, 1)
    os._exit(1)


def _spoilt() -> bool:
    """Whether a child could not use CUDA any more. torch knows, but only in the child."""
    if not torch.backends.cuda.is_built():
        return False
    asked = _forked()
    if not asked:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]) != 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"natgrad: {text}", file=sys.stderr, flush=True)

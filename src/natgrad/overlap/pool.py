"""Threads for work in the background that never keep a process from ending."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LAST_WAIT = 20.0
"""Seconds that the end of the interpreter waits for pieces that are being worked on."""

NICENESS = 10
"""Of threads that step back."""

PATIENCE = 0.5
"""Seconds that a thread waits for more to do: a small network asks again sooner, and to start threads takes a step as
long as all that it has to prepare for them."""

ending = threading.Event()
"""Set at the end of the interpreter: who waits for somebody else need not any more."""


class DaemonPool(Executor):
    """Like a ThreadPoolExecutor, with daemon threads: one that hangs costs its results, not the end of the process.
    They end when there is nothing to do: at once where they have threads of LAPACK, which slow training down.

    Each thread has `torch_threads` threads of torch and LAPACK for itself. A process that was forked starts its own.
    `steps_back`: where cores are scarce others go first (Linux).
    """

    def __init__(self, workers: int, *, torch_threads: int | None, name: str, steps_back: bool = False) -> None:
        self._workers, self._torch_threads, self._name = workers, torch_threads, name
        self._steps_back = steps_back
        self._closed = False
        self._work = _Work()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs a function in one of the threads."""
        if self._work.process != os.getpid():
            self._work = _Work()
        if self._closed:
            raise RuntimeError("this pool has been shut down")
        future: Future[T] = Future()
        with self._work.more:
            if len(self._work.queue) >= self._work.idle and len(self._work.threads) < self._workers:
                self._start_thread()  # where there is no room for another nothing has been queued
            self._work.queue.append(_Piece(future, fn, args, kwargs))
            self._work.more.notify()
        return future

    def _start_thread(self) -> None:
        # torch keeps the number of threads for each thread, and the last one set for threads to come: it is put back.
        before, started = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(
            target=_run,
            args=(self._work, self._torch_threads, started, self._steps_back),
            name=f"{self._name}-{len(self._work.threads)}",
            daemon=True,
        )
        thread.start()
        self._work.threads.append(thread)
        _working.add(self._work)
        if self._torch_threads is not None:
            started.wait()
            torch.set_num_threads(before)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes nothing more: what is queued is done, or cancelled."""
        self._closed = True
        if self._work.process != os.getpid():
            return
        self._work.close()
        if cancel_futures:
            self._work.cancel()
        if wait:
            self._work.join(None)


@dataclass
class _Piece:
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function(*self.arguments, **self.keywords)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Work:
    """What there is to do, and who does it, in one process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.more = threading.Condition()
        self.queue: deque[_Piece] = deque()
        self.threads: list[threading.Thread] = []
        self.idle = 0  # threads that wait
        self._closed = False

    def next(self, patience: float) -> _Piece | None:
        """For a thread, which ends where nothing comes for so many seconds."""
        with self.more:
            if not self.queue and not self._closed and patience > 0:
                self.idle += 1
                self.more.wait_for(lambda: self.queue or self._closed, patience)
                self.idle -= 1
            if self.queue:
                return self.queue.popleft()
            self.threads.remove(threading.current_thread())
            return None

    def close(self) -> None:
        """Nothing more will come."""
        with self.more:
            self._closed = True
            self.more.notify_all()

    def cancel(self) -> None:
        """Gives up what has not begun."""
        with self.more:
            given_up, self.queue = list(self.queue), deque()
        for piece in given_up:
            piece.future.cancel()

    def join(self, seconds: float | None) -> None:
        """Waits for the threads, for so long at most."""
        until = None if seconds is None else time.monotonic() + seconds
        for thread in list(self.threads):
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _run(work: _Work, torch_threads: int | None, started: threading.Event, steps_back: bool) -> None:
    if steps_back and sys.platform == "linux":
        with contextlib.suppress(OSError):  # of this thread, and of those of LAPACK that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    if torch_threads is not None:
        # A thread takes the number over that was last set anywhere when it first asks: it must have asked before.
        torch.get_num_threads()
        torch.set_num_threads(torch_threads)
    started.set()
    patience = PATIENCE if torch_threads == 1 else 0.0
    while (piece := work.next(patience)) is not None:
        piece.do()
        del piece  # nothing of it is kept while the next one is looked for


_working: weakref.WeakSet[_Work] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread that came back to an interpreter that is gone would crash it: what is being worked on is finished."""
    ending.set()
    present = [work for work in _working if work.process == os.getpid()]
    for work in present:
        work.close()
        work.cancel()
    until = time.monotonic() + LAST_WAIT
    for work in present:
        work.join(max(0.0, until - time.monotonic()))

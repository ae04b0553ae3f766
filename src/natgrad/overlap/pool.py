"""Threads for work in the background that never keep a process from ending."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Tasks = queue.SimpleQueue["_Job | None"]

LAST_WAIT = 20.0
"""Seconds that the end of the interpreter waits for pieces that are being worked on."""

ending = threading.Event()
"""Set at the end of the interpreter: who waits for somebody else need not any more."""


class DaemonPool(Executor):
    """Like a ThreadPoolExecutor, with daemon threads: one that hangs costs its results, not the end of the process.

    Each thread has `torch_threads` threads of torch and LAPACK for itself. A process that was forked starts its own.
    """

    def __init__(self, workers: int, *, torch_threads: int | None, name: str) -> None:
        self._closed = False
        self._workers, self._torch_threads, self._name = workers, torch_threads, name
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs a function in one of the threads."""
        if self._process != os.getpid():
            self._begin()
        if self._closed:
            raise RuntimeError("this pool has been shut down")
        future: Future[T] = Future()
        self._tasks.put((future, fn, args, kwargs))
        if len(self._threads) < self._workers:
            self._start_thread()
        return future

    def _start_thread(self) -> None:
        # torch keeps the number of threads for each thread, and the last one set for threads to come: it is put back.
        before, started = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(
            target=_work,
            args=(self._tasks, self._torch_threads, started),
            name=f"{self._name}-{len(self._threads)}",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)
        _running[thread] = (self._process, self._tasks)
        if self._torch_threads is not None:
            started.wait()
            torch.set_num_threads(before)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the threads end: after what is queued, or without it."""
        if self._process != os.getpid():
            return
        self._closed = True
        if cancel_futures:
            _cancel(self._tasks)
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def __del__(self) -> None:
        self.shutdown(wait=False)


def _work(tasks: _Tasks, torch_threads: int | None, started: threading.Event) -> None:
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    started.set()
    while (job := tasks.get()) is not None:
        future, function, arguments, keywords = job
        if future.set_running_or_notify_cancel():
            try:
                result = function(*arguments, **keywords)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        # Nothing of a finished piece is kept until the next one comes.
        del job, future, function, arguments, keywords


def _cancel(tasks: _Tasks) -> None:
    """Gives up what is queued."""
    while True:
        try:
            job = tasks.get_nowait()
        except queue.Empty:
            return
        if job is not None:
            job[0].cancel()


# Threads, of which each is there as long as it runs, with their process and what they take their work from: a pool that
# nobody holds any more may have some that are still at it.
_running: weakref.WeakKeyDictionary[threading.Thread, tuple[int, _Tasks]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """A thread that came back to an interpreter that is gone would crash it: what is being worked on is finished."""
    ending.set()
    own = {thread: tasks for thread, (process, tasks) in list(_running.items()) if process == os.getpid()}
    for tasks in own.values():
        _cancel(tasks)
    for tasks in own.values():  # one for each thread
        tasks.put(None)
    until = time.monotonic() + LAST_WAIT
    for thread in own:
        thread.join(max(0.0, until - time.monotonic()))

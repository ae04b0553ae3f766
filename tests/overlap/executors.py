"""Executors that are slow, late or wrong on purpose, and ways to tell two runs apart by a bit."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from distribute.mixed import Loop
from natgrad.overlap.job import Job


class Erratic(Executor):
    """Takes some random milliseconds, and of every two pieces one until somebody waits for it. Gets bytes."""

    def __init__(self, seed: int = 0) -> None:
        self.threads: list[threading.Thread] = []
        self._waited_for = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._random = random.Random(seed)
        self._count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._count += 1
        pause = None if self._count % 2 == 0 else self._random.uniform(0, 4e-3)
        return self._pool.submit(self._run, pause, fn, args, kwargs)

    def _run(self, pause: float | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.threads.append(threading.current_thread())
        if pause is None:
            self._be_late()
        else:
            time.sleep(pause)
        return fn(*args, **kwargs)

    def _be_late(self) -> None:
        still = False
        while not still and self._waited_for.wait(5):
            time.sleep(5e-3)  # who waits for something else, which is there, is gone by then
            still = self._waited_for.is_set()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    @contextmanager
    def told(self) -> Iterator[Erratic]:
        """Inside, it learns that somebody waits."""
        result = Job.result

        def waiting(job: Job, *arguments: Any, **options: Any) -> Any:
            self._waited_for.set()
            try:
                return result(job, *arguments, **options)
            finally:
                self._waited_for.clear()

        with mock.patch.object(Job, "result", waiting), self:
            yield self


class ErraticThreads(ThreadPoolExecutor):
    """The same in threads that natgrad knows to share memory with."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(2)
        self.threads: list[threading.Thread] = []
        self._pauses = random.Random(seed)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        pause = self._pauses.uniform(0, 4e-3)

        def run() -> Any:
            self.threads.append(threading.current_thread())
            time.sleep(pause)
            return fn(*args, **kwargs)

        return super().submit(run)


class Held(Executor):
    """Does nothing before it is let go, and then everything at once in the thread that lets it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], Any]] = []
        self.asked = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        self.asked += 1
        return future

    def release(self) -> None:
        while self.waiting:
            future, fn, args = self.waiting.pop()
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args))


class Answering(Executor):
    """Answers with what a function makes of the work and its arguments, at once; an error becomes the future's."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(fn, *args))
        except BaseException as error:
            future.set_exception(error)
        return future


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(1e-3)


def digest(value: Any) -> str:
    """Equal where everything is, bit for bit; counts of what went how are left out."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name in value:
            if name != "metrics":
                sha.update(f"{name}:".encode())
                _feed(sha, value[name])
    elif isinstance(value, list | tuple):
        sha.update(f"{len(value)}[".encode())
        for one in value:
            _feed(sha, one)
    elif isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().cpu().contiguous().numpy().tobytes())
    else:
        sha.update(repr(value).encode())


def fingerprint(loop: Loop) -> tuple[str, str]:
    """Of weights and of the whole state."""
    weights = {name: parameter.detach() for name, parameter in loop.model.named_parameters()}
    return digest(weights), digest(loop.kfac.state_dict())

"""Inverse workers: decompositions made by other processes, from bytes to bytes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from natgrad.overlap.tasks import solve_packed
from natgrad.roles.post import AGAIN, Caller, Post, Story, Way
from natgrad.roles.wire import Wire

if TYPE_CHECKING:
    from natgrad.roles.role import Role

P = ParamSpec("P")
T = TypeVar("T")

_GOOD, _BAD = b"+", b"-"
_LOOK = 0.2  # seconds between two looks at what cannot wake anybody up
_GRACE = 2.0  # seconds for what is under way when training is over
_WORKERS_PER_TASK = 3  # one that ends every worker it meets is given up


class WorkerError(RuntimeError):
    """What an inverse worker could not do, in its own words."""


# The worker


def serve(role: Role, *, threads: int | None = None) -> bool:
    """The life of an inverse worker: decomposes what gradient ranks send, one task at a time, until training is over.
    Whether nothing was left under way then.
    """
    tasks: queue.Queue[_Order] = queue.Queue()

    def take_orders(wire: Wire) -> None:
        while True:
            order = _Order(wire, wire.receive())
            tasks.put(order)
            while not wait([order.answer], _LOOK).done:
                if post.over:
                    return
            status, content = order.answer.result()
            wire.send(status)
            wire.send(content)

    def work() -> None:  # in one thread, since each would have a pool of others of its own
        if threads is not None:
            torch.set_num_threads(threads)
        while not post.over:
            try:
                order = tasks.get(timeout=_LOOK)
            except queue.Empty:
                continue
            order.answer.set_result(_made(order))

    post = Post(role, take_orders)
    worker = threading.Thread(target=work, daemon=True, name="natgrad inverse worker")
    worker.start()
    post.wait()
    post.close()
    worker.join(_GRACE)
    return not worker.is_alive()


@dataclass(frozen=True)
class _Order:
    wire: Wire
    payload: bytes
    answer: Future[tuple[bytes, bytes]] = field(default_factory=Future)


def _made(order: _Order) -> tuple[bytes, bytes]:
    if not order.wire.quiet:
        return _BAD, b"nobody waits for it any more"
    try:
        return _GOOD, solve_packed(order.payload)
    except Exception as error:
        return _BAD, f"{type(error).__name__}: {error}".encode()


# Those who ask


@dataclass(eq=False)
class _Task:
    payload: bytes
    future: Future[Any]
    begun: int = 0  # by so many workers


class InverseWorkers(Caller, Executor):
    """The inverse workers of a run, as a gradient rank sees them. Tasks go to whoever is free; one whose worker is
    lost goes to another. Where none can be reached, futures fail at once with a `ConnectionError`, rather than wait;
    only for the first of them they wait `patience` seconds. A worker that takes longer than `timeout` seconds counts
    as lost, and its future fails with a `TimeoutError`. `on_change` is told in a line, by another thread, who is lost
    and who is back.
    """

    def __init__(
        self, role: Role, *, patience: float = 60.0, timeout: float = 300.0, on_change: Story | None = None
    ) -> None:
        if role.inverse < 1:
            raise ValueError("there are no inverse workers: natgrad.roles.take(inverse=1) makes one")
        super().__init__()
        self._patience, self.timeout = patience, timeout
        self._until = time.monotonic() + patience
        self._news = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._wires: dict[Way, Wire] = {}
        self._met = self._closed = False
        self._ways = [Way(role, "inverse", index, on_change) for index in range(role.inverse)]
        self.threads = [
            threading.Thread(target=self._work, args=(way,), daemon=True, name=f"natgrad {way.who}")
            for way in self._ways
        ]
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> int:
        """How many workers are connected."""
        with self._news:
            return len(self._wires)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hands a task over: `solve_packed` and its bytes, nothing else, since only bytes travel."""
        if fn is not solve_packed or kwargs or len(args) != 1 or not isinstance(args[0], bytes):
            raise ValueError("inverse workers take submit(solve_packed, payload), with a payload of bytes, alone")
        task = _Task(args[0], Future())
        with self._news:
            if self._closed:
                raise RuntimeError("cannot submit after shutdown")
            self._tasks.append(task)
            self._news.notify_all()
        self._refuse()
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks. Those that were submitted are done, unless they are cancelled; without waiting, that
        includes the ones under way, which fail.
        """
        with self._news:
            self._closed = True
            cancelled = list(self._tasks) if cancel_futures else []
            if cancel_futures:
                self._tasks.clear()
                for wire in () if wait else self._wires.values():
                    wire.cut()
            self._news.notify_all()
        for task in cancelled:
            if not task.begun and task.future.cancel():
                task.future.set_running_or_notify_cancel()
            elif task.begun:
                task.future.set_exception(ConnectionError("the inverse workers were shut down"))
        if wait:
            for thread in self.threads:
                thread.join()

    def hang_up(self) -> None:
        """Gives up all there is to do."""
        self.shutdown(wait=False, cancel_futures=True)

    def _work(self, way: Way) -> None:
        while (wire := self._connected(way)) is not None:
            task = None
            try:
                while (task := self._next(wire)) is not None:
                    self._ask(wire, task)
                    task = None  # done: not to be given back
                return
            except OSError as error:
                self._forget(way)
                if not self._closed:
                    way.lose(error)
                if task is not None:
                    self._give_back(task, way, error)
                self._refuse()
            finally:
                self._forget(way)
                wire.close()

    def _connected(self, way: Way) -> Wire | None:
        """Looks for a worker until it is there, or nothing is left to do."""
        while True:
            with self._news:
                if self._closed and not self._tasks:
                    return None
            wire = way.call()
            with self._news:
                if wire is not None:
                    self._wires[way] = wire
                    self._met = True
                    return wire
            self._refuse()
            with self._news:
                self._news.wait_for(lambda: self._closed, AGAIN)
                if self._closed and self._tasks:
                    self._news.wait(_LOOK)

    def _next(self, wire: Wire) -> _Task | None:
        """The next task, if the worker is still there; none when all is done."""
        while True:
            with self._news:
                if not wire.quiet:
                    raise ConnectionError("it has ended, or left")
                if self._tasks:
                    task = self._tasks.popleft()
                    if task.begun or task.future.set_running_or_notify_cancel():
                        task.begun += 1
                        return task
                elif self._closed:
                    return None
                else:
                    self._news.wait(_LOOK)

    def _ask(self, wire: Wire, task: _Task) -> None:
        wire.send(task.payload)
        status = wire.receive(self.timeout)
        content = wire.receive(self.timeout)
        if status == _GOOD:
            task.future.set_result(content)
        else:
            task.future.set_exception(WorkerError(content.decode(errors="replace")))

    def _give_back(self, task: _Task, way: Way, error: OSError) -> None:
        if isinstance(error, TimeoutError):
            task.future.set_exception(TimeoutError(f"{way.who}: {error}"))
        elif task.begun < _WORKERS_PER_TASK:
            with self._news:
                self._tasks.appendleft(task)
                self._news.notify_all()
        else:
            task.future.set_exception(ConnectionError(f"{task.begun} inverse workers were lost over it: {error}"))

    def _refuse(self) -> None:
        """Fails all that waits, where nobody can be reached."""
        with self._news:
            if self._wires or not (self._met or time.monotonic() > self._until):
                return
            doomed = list(self._tasks)
            self._tasks.clear()
        if doomed:
            why = "; ".join(f"{way.who}: {way.trouble}" for way in self._ways)
            came = "" if self._met else f" none came within {self._patience:g} s;"
            error = ConnectionError(f"no inverse worker is reachable:{came} {why}")
            for task in doomed:
                if task.begun or task.future.set_running_or_notify_cancel():
                    task.future.set_exception(error)

    def _forget(self, way: Way) -> None:
        with self._news:
            self._wires.pop(way, None)

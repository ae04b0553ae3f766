"""Decompositions that have been asked for and not been taken over yet."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait

import torch
from torch import Tensor

from natgrad.overlap.piles import Piles
from natgrad.overlap.places import Complain, Place, Solutions
from natgrad.overlap.tasks import Task, cut
from natgrad.precondition.preconditioner import Request
from natgrad.solve.solver import Side, Solved, solve


class Job:
    """A request under way. `due` is the step at which its result is taken over; None: as soon as it has come."""

    def __init__(self, request: Request, due: int | None, solved: Solved) -> None:
        self.request, self.due = request, due
        self._solved = solved
        self._tasks: Sequence[Task] = ()
        self._futures: list[Future[Solutions]] = []
        self._process = os.getpid()
        self._until = time.monotonic()
        self.gave_up = False  # on something that is still being worked on

    @staticmethod
    def begin(request: Request, due: int | None, place: Place, solver: str, timeout: float) -> Job:
        """Starts to decompose. Diagonal factors take less time than asking."""
        diagonal = {key: factor for key, factor in request.factors.items() if factor.dim() == 2}
        dense = {key: factor for key, factor in request.factors.items() if factor.dim() == 3}
        job = Job(request, due, solve(diagonal, solver))
        job._tasks = cut(dense, solver, place.piece)
        job._until += timeout
        try:
            job._tasks = place.bring(job._tasks)
            job._futures = place.begin(job._tasks) if job._tasks else []
        except Exception as error:  # no room for another thread, or for copies: made in the step that asks for it
            job._futures = [_failed(error) for _ in job._tasks]
        # What has been brought elsewhere is not kept here as well, nor is the memory of all by a small part of it.
        request.factors |= {key: factor.clone() for key, factor in diagonal.items()}
        request.factors |= {k: factor for task in job._tasks for k, factor in zip(task.keys, task.factors, strict=True)}
        return job

    @property
    def lost(self) -> bool:
        """Whether it began in a process that this one was forked from: its threads are not here, and a lock that one
        held, of a future too, is held for ever.
        """
        return self._process != os.getpid()

    @property
    def ready(self) -> bool:
        """Whether taking it over takes no waiting; true also of one that has had its time."""
        return self.lost or time.monotonic() > self._until or all(future.done() for future in self._futures)

    @property
    def late(self) -> bool:
        """Whether it is still being worked on."""
        return not self.lost and not all(future.done() for future in self._futures)

    def result(self, complain: Complain, *, stays: bool = False) -> Solved:
        """All solutions; what has failed, or does not come in time, is made here. Those in the host's memory go to
        where they are taken over, unless they are only looked at, and it all `stays` for later.
        """
        if not self.lost:
            self.gave_up |= bool(wait(self._futures, timeout=max(0.0, self._until - time.monotonic())).not_done)
        for task, future in zip(self._tasks, self._futures, strict=True):
            found = self._result(task, future, complain)
            if isinstance(found, Piles) and not stays:
                found = found.sent()
            for key, one in zip(task.keys, found, strict=True):
                _use_here(one.side)
                self._solved.sides[key], self._solved.failed[key] = one.side, one.failed
        self._tasks, self._futures = (), []
        return self._solved

    def _result(self, task: Task, future: Future[Solutions], complain: Complain) -> Solutions:
        error = self._problem(future)
        if error is None:
            return future.result()
        if not self.lost:
            future.cancel()
        complain(error)
        return task.solve_at_home()

    def _problem(self, future: Future[Solutions]) -> BaseException | None:
        if self.lost:
            return RuntimeError("this process was forked while decompositions were under way")
        if not future.done():
            return TimeoutError("it took longer than the timeout of overlap=")
        return CancelledError("it was given up") if future.cancelled() else future.exception()

    def cancel(self) -> None:
        """Gives up what has not begun: nobody asks for it any more."""
        for future in self._futures if not self.lost else ():
            future.cancel()


def finished(request: Request, due: int | None, solved: Solved) -> Job:
    """One from a checkpoint."""
    return Job(request, due, solved)


def _failed(error: Exception) -> Future[Solutions]:
    future: Future[Solutions] = Future()
    future.set_exception(error)
    return future


def _use_here(side: Side) -> None:
    """Memory that another stream has written, and this one will read, is not given away before."""
    for part in (side.matrix, side.values):
        if isinstance(part, Tensor) and part.is_cuda:
            part.record_stream(torch.cuda.current_stream(part.device))

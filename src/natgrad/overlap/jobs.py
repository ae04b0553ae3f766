"""Decompositions that have been asked for and not been taken over yet: in the order in which they were."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator

import torch

from natgrad.blocks.registry import Registry
from natgrad.distribute.costs import Costs
from natgrad.errors import Warner
from natgrad.metrics import Metrics
from natgrad.overlap.job import Job
from natgrad.overlap.options import READY, Background
from natgrad.overlap.places import Place, place_of
from natgrad.precondition.preconditioner import Preconditioner, Request
from natgrad.solve.solver import Solved


class Jobs:
    """Requests under way, and when they are taken over. `several`: there are other ranks, which do the same.
    `costs` are those of the device and of two cores.
    """

    def __init__(
        self,
        options: Background,
        *,
        device: torch.device,
        solver: str,
        several: bool,
        metrics: Metrics,
        warner: Warner,
        costs: Callable[[], tuple[Costs, Costs]],
    ) -> None:
        self.when_ready = options.delay == READY or (options.delay is None and not several)
        self._options = options
        self._metrics, self._warner = metrics, warner
        self._solver = solver
        self._complaints: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._place: Place = place_of(options, device, self._complaints.put, costs, several=several)
        self._under_way: deque[Job] = deque()
        self._landed_at: int | None = None

    @property
    def where(self) -> str:
        """Where decompositions are made, for people."""
        return self._place.name

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._under_way)

    @property
    def full(self) -> bool:
        """Whether another request has to wait for the one that is under way."""
        return self.when_ready and len(self._under_way) > 0

    def rests(self, step: int) -> bool:
        """Whether one process has to wait with a request: there is one under way, or it has just been taken over. The
        memory that its copies were in is free a step later, and one step does not do both.
        """
        return self.full or (self.when_ready and step == self._landed_at)

    @property
    def at_once(self) -> bool:
        """Whether what is asked for is taken over in the same step."""
        return self._options.delay == 0

    def begin(self, request: Request, interval: int) -> None:
        """Starts to decompose what is to be taken over later."""
        if self.full:
            return  # on several ranks all ask again when the next one is due
        due = None if self.when_ready else request.step + self._delay(interval)
        self._under_way.append(Job.begin(request, due, self._place, self._solver, 2 * self._options.timeout))

    def _delay(self, interval: int) -> int:
        delay = self._options.delay
        return max(1, interval // 2) if not isinstance(delay, int) else delay

    def land(self, step: int, preconditioner: Preconditioner, registry: Registry) -> int:
        """Takes over, before this step, what is due or has come. Returns how many decompositions failed."""
        failed = 0
        while self._under_way and self._is_due(self._under_way[0], step, preconditioner):
            job = self._under_way.popleft()
            self._landed_at = step
            self._metrics.late_decompositions += job.late
            request = job.request.still(registry, preconditioner.keys)
            failed += preconditioner.install(request, self._result(job))
        self._hear()
        return failed

    def _is_due(self, job: Job, step: int, preconditioner: Preconditioner) -> bool:
        if job.ready if job.due is None else step >= job.due:
            return True
        bound = self._options.max_staleness
        if bound is None:
            return False
        # Steps alone decide, also where there is a delay: ranks come to the same, and so does the next run.
        solved = preconditioner.solved
        ages = [step - solved[block.key].solved_at for block in job.request.scales if block.key in solved]
        return max(ages, default=0) >= bound

    def _result(self, job: Job, *, stays: bool = False) -> Solved:
        result = job.result(self._complaints.put, stays=stays)
        if job.gave_up:
            self._place.close()  # its threads hang: the next request gets others
        return result

    def finish(self) -> list[tuple[Job, Solved]]:
        """Waits for everything, and takes nothing over: for a checkpoint."""
        done = [(job, self._result(job, stays=True)) for job in self._under_way]
        self._hear()
        return done

    def replace(self, jobs: list[Job]) -> None:
        """Forgets what is under way, for that of a checkpoint."""
        for job in self._under_way:
            job.cancel()
        self._under_way = deque(jobs)

    def close(self) -> None:
        """Lets all threads end after what there is to do; the next request starts others."""
        self._place.close()

    def _hear(self) -> None:
        """Counts and tells what went wrong elsewhere."""
        while not self._complaints.empty():
            error = self._complaints.get()
            self._metrics.background_failures += 1
            self._warner.once(
                "background",
                f"a decomposition in the background did not come by step {{step}} ({type(error).__name__}: {error}); "
                "it was made again here, and training goes on with the last one until then. kfac.metrics() keeps count",
            )

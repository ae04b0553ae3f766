"""Where decompositions are made: in threads of this process, on a stream beside training, or by any executor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.distribute.costs import Costs, default_costs, measure
from natgrad.overlap.options import Background
from natgrad.overlap.piles import Piles, host_memory
from natgrad.overlap.pool import DaemonPool, ending
from natgrad.overlap.tasks import SMALL_PIECE, Solution, Task, check, pack, solve_packed, solve_tensors, unpack
from natgrad.solve.solver import Side

Solutions = Sequence[Solution]
Complain = Callable[[BaseException], None]  # told of what went wrong, from any thread


class Place(Protocol):
    """Somewhere to make decompositions."""

    name: str
    piece: int  # elements of factors that are decomposed together, where there are many

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks as they are begun and kept: with copies of factors that are needed where they are no longer."""

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Starts; the results will be on the tasks' device, or in memory from which it takes them by itself."""

    def close(self) -> None:
        """Ends what it has started, as soon as it can; another `begin` starts anew."""


def place_of(
    options: Background,
    device: torch.device,
    complain: Complain,
    costs: Callable[[], tuple[Costs, Costs]],
    *,
    several: bool = False,
) -> Place:
    """What the options name, or the best of what there is. `costs` are those of the device and of two cores, asked for
    when there is a choice. `several`: there are other ranks, to which solutions are sent from the device.
    """
    if not isinstance(options.where, str):
        return Elsewhere(options.where, timeout=options.timeout, complain=complain)
    if options.where == "step":
        return InStep(options)
    if options.where == "gpu" and device.type != "cuda":
        raise ValueError(f"where='gpu' needs a model on a GPU: this one is on {device}")
    if options.where == "gpu":
        return Stream()
    on_cores = Threads(options, to_device=several)
    if options.where == "cpu" or device.type != "cuda":
        return on_cores
    return Cheaper(on_cores, Stream(), lambda tasks: choose(tasks, math.prod(_sizes(options, tasks)), *costs()))


def _sizes(options: Background, tasks: Sequence[Task]) -> tuple[int, int]:
    """Workers, and threads of LAPACK of each; the same for the same request. Those for small factors have some pieces
    to do each, unless it is said how many there are: a step waits until all of them have started.
    """
    workers, threads = options.sizes(max((factor.shape[-1] for task in tasks for factor in task.factors), default=0))
    if options.workers is None and threads == 1:
        workers = min(workers, max(1, -(-len(tasks) // _PIECES_A_WORKER)))
    return workers, threads


_PIECES_A_WORKER = 4


def choose(tasks: Sequence[Task], cores: int, on_device: Costs, on_two_cores: Costs) -> str:
    """Where decompositions should cost training the least, by what they take here and there.

    Cores cost it next to nothing (a fiftieth of their time), and a GPU all of the time that it takes, beside training
    or not (ResNet-50 on an H200: 1.17 and 1.41 times SGD with eigendecompositions, 1.14 and 1.16 with inverses). So
    cores are preferred, unless they would not come to an end: if decompositions in the step would take a twelfth of
    training's time, which is much, cores that are twelve times as slow just keep up with them.
    """
    there, here = (
        sum(
            costs.solve(task.solver, factor.shape[-1], stack=factor.shape[0])
            for task in tasks
            for factor in task.factors
        )
        for costs in (on_device, on_two_cores)
    )
    return "cpu" if here * 2 / cores <= _MUCH_SLOWER * there else "gpu"


# A judgement, not a measurement: with the default costs it puts ResNet-50's eigendecompositions on three cores or more.
_MUCH_SLOWER = 12


def costs_of_two_cores(given: Costs | str | None) -> Costs:
    """As `Strategy.costs` has it, which of this machine says no more than whether they are to be measured."""
    host = torch.device("cpu")
    if given != "measured":
        return default_costs(host)
    return DaemonPool(1, torch_threads=2, name="natgrad-measure").submit(measure, host).result()


class InStep:
    """In the step itself: nothing runs beside it. On the CPU with as many `threads` of LAPACK as a worker beside
    training has: their number shows in the last bits.
    """

    name = "step"
    piece = SMALL_PIECE

    def __init__(self, options: Background) -> None:
        self._options = options

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """As they are."""
        return tasks

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Decomposes at once."""
        before = torch.get_num_threads()
        torch.set_num_threads(_sizes(self._options, tasks)[1])
        try:
            return [_finished(solve_tensors(task.solver, task.factors)) for task in tasks]
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """There is nothing to end."""


class Threads:
    """CPU threads of this process, beside training. Of a GPU's factors they have copies, and solutions stay in the
    host's memory until they are taken over, unless they go `to_device` at once: a GPU has better uses for its memory.
    """

    name = "cpu"
    # A thread takes the interpreter from training with every operation, a few for each stack of factors.
    piece = 2**22

    def __init__(self, options: Background, *, to_device: bool = False) -> None:
        self._options, self._to_device = options, to_device
        self._pool: DaemonPool | None = None
        self._pool_sizes = (0, 0)
        self._copied: torch.cuda.Event | None = None

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Copies of a GPU's factors, beside training: nobody waits for them but who decomposes."""
        if not tasks or tasks[0].device.type != "cuda":
            return tasks
        with _Beside(tasks[0].device, _event(tasks)) as stream:
            assert stream is not None, "there is a GPU"
            copies = iter(_pinned([factor for task in tasks for factor in task.factors], stream))
            brought = [
                Task(task.solver, task.keys, tuple(islice(copies, len(task.keys))), task.device) for task in tasks
            ]
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        return brought

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Starts one piece a thread."""
        pool, copied = self._pool_for(tasks), self._copied
        piles = [Piles(task, pinned=copied is not None) for task in tasks]
        if self._to_device:
            return [
                pool.submit(_on_the_host_and_back, one, task.device, copied)
                for one, task in zip(piles, tasks, strict=True)
            ]
        return [pool.submit(_on_the_host, one, copied) for one in piles]

    def _pool_for(self, tasks: Sequence[Task]) -> DaemonPool:
        workers, threads = sizes = _sizes(self._options, tasks)
        if sizes != self._pool_sizes:
            self.close()
        if self._pool is None:
            # A GPU's training needs a core or two, and those at once; training on the CPU needs its share of all.
            beside_gpu = tasks[0].device.type == "cuda"
            self._pool = DaemonPool(workers, torch_threads=threads, name="natgrad-solve", steps_back=beside_gpu)
            self._pool_sizes = sizes
        return self._pool

    def close(self) -> None:
        """Threads end after what they are doing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


class Stream:
    """One thread with a stream of the GPU that the factors are on."""

    name = "gpu"
    piece = SMALL_PIECE

    def __init__(self) -> None:
        self._pool: DaemonPool | None = None

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """As they are."""
        return tasks

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Starts one piece after the other."""
        if self._pool is None:
            self._pool = DaemonPool(1, torch_threads=None, name="natgrad-stream")
        ready = _event(tasks)
        return [self._pool.submit(_on_the_device, task, ready) for task in tasks]

    def close(self) -> None:
        """The thread ends after what it is doing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


class Cheaper:
    """Cores or the GPU, whatever is better for a request. That is the same for the same request, so that a run which
    repeats it, or goes on from a checkpoint, gets the same bits.
    """

    def __init__(self, threads: Threads, stream: Stream, choose: Callable[[Sequence[Task]], str]) -> None:
        self.name = "auto"
        self.piece = threads.piece
        self._places: dict[str, Place] = {threads.name: threads, stream.name: stream}
        self._choose = choose

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """To where it costs less."""
        self.name = self._choose(tasks)
        return self._places[self.name].bring(tasks)

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Where they were brought to."""
        return self._places[self.name].begin(tasks)

    def close(self) -> None:
        """Of both."""
        for place in self._places.values():
            place.close()


class Elsewhere:
    """A user's executor. A thread of this process takes the factors there and the solutions back, looks at them, and
    makes for itself what does not come, or not right.
    """

    name = "executor"
    piece = SMALL_PIECE  # it may have any number of workers

    def __init__(self, executor: Executor, *, timeout: float, complain: Complain) -> None:
        self._executor, self._timeout, self._complain = executor, timeout, complain
        self._pool: DaemonPool | None = None
        self._rest = 0  # requests for which one that hangs is not asked, twice as many each time
        self._resting = 0

    def bring(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """As they are."""
        return tasks

    def begin(self, tasks: Sequence[Task]) -> list[Future[Solutions]]:
        """Starts all pieces."""
        if self._pool is None:
            self._pool = DaemonPool(1, torch_threads=1, name="natgrad-ferry")
        futures: list[Future[Solutions]] = [Future() for _ in tasks]
        self._pool.submit(self._ferry, list(tasks), futures, _event(tasks))
        return futures

    def close(self) -> None:
        """The thread ends after what it is doing; the executor is its owner's."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _ferry(self, tasks: list[Task], futures: list[Future[Solutions]], ready: torch.cuda.Event | None) -> None:
        try:
            self._carry(tasks, futures, ready)
        except BaseException as error:  # told to who waits for it
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _carry(self, tasks: list[Task], futures: list[Future[Solutions]], ready: torch.cuda.Event | None) -> None:
        until = time.monotonic() + self._timeout
        with _Beside(tasks[0].device, ready):
            here = [Task(task.solver, task.keys, _to_host(task.factors)) for task in tasks]
            rests, self._resting = self._resting > 0, max(0, self._resting - 1)
            silent = TimeoutError("it did not answer in time before, and is not asked for a while")
            asked = [silent if rests else self._ask(task) for task in here]
            for task, own, answer, future in zip(tasks, here, asked, futures, strict=True):
                if future.set_running_or_notify_cancel():
                    future.set_result(_to_device(self._answered(own, answer, until), task.device))
            if not rests:
                hangs = time.monotonic() >= until
                self._rest = self._resting = min(_LONGEST_REST, 2 * self._rest or 1) if hangs else 0

    def _ask(self, task: Task) -> Future[Any] | Exception:
        try:
            # Threads share memory; everything else gets bytes, which every executor can carry.
            if isinstance(self._executor, ThreadPoolExecutor | DaemonPool):
                return self._executor.submit(solve_tensors, task.solver, task.factors)
            return self._executor.submit(solve_packed, pack(task))
        except Exception as error:  # a broken pool, or one that has been shut down
            return error

    def _answered(self, task: Task, answer: Future[Any] | Exception, until: float) -> Solutions:
        """What has come back, or made here."""
        try:
            if isinstance(answer, Exception):
                raise answer
            found = _awaited(answer, until)
            solutions: Solutions = unpack(found) if isinstance(found, bytes) else found
            check(task, solutions)
        except BaseException as error:  # a worker that has left, too
            if isinstance(answer, Future):
                answer.cancel()
            if ending.is_set():
                raise  # nobody will ask for it
            self._complain(error)
            return solve_tensors(task.solver, task.factors)
        return solutions


def _awaited(answer: Future[Any], until: float) -> Any:
    """What an executor answers, waited for in short turns: the end of the interpreter comes in between."""
    while True:
        turn = max(0.0, min(_TURN, until - time.monotonic()))
        try:
            return answer.result(timeout=turn)
        except Exception:  # every library has its own for "not yet"
            if answer.done() or turn < _TURN or ending.is_set():
                raise


_TURN = 0.25  # seconds
_LONGEST_REST = 64  # requests


def _finished(result: Solutions) -> Future[Solutions]:
    future: Future[Solutions] = Future()
    future.set_result(result)
    return future


# Between the device and the host, beside the training stream


def _event(tasks: Sequence[Task]) -> torch.cuda.Event | None:
    """When the factors will be there."""
    if tasks[0].device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tasks[0].device))
    return event


def _on_the_host(piles: Piles, copied: torch.cuda.Event | None) -> Piles:
    """Of factors in the host's memory, once copies are there; solutions stay there."""
    if copied is not None:
        copied.synchronize()
    return piles.solve()


def _on_the_host_and_back(piles: Piles, device: torch.device, copied: torch.cuda.Event | None) -> Solutions:
    found = _on_the_host(piles, copied)
    with _Beside(device, copied):
        return _to_device(found.sent(), device)


def _on_the_device(task: Task, ready: torch.cuda.Event | None) -> Solutions:
    with _Beside(task.device, ready) as stream:
        found = solve_tensors(task.solver, task.factors)
        if stream is not None:
            stream.synchronize()
    return found


class _Beside:
    """Work on a stream of one's own, once the factors are ready; nothing where there is no GPU."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self._device, self._ready = device, ready

    def __enter__(self) -> torch.cuda.Stream | None:
        if self._ready is None:
            return None
        self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_event(self._ready)
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        if self._ready is not None:
            self._context.__exit__(*error)


def _to_host(factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies in pinned memory, once they are there; the host's own as they are."""
    if factors[0].device.type != "cuda":
        return tuple(factors)
    stream = torch.cuda.current_stream(factors[0].device)
    copies = _pinned(factors, stream)
    stream.synchronize()
    return copies


def _pinned(factors: Sequence[Tensor], stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
    """Copies in pinned memory, on their way on this stream."""
    by_home: dict[int, list[int]] = {}
    for number, factor in enumerate(factors):
        by_home.setdefault(factor.untyped_storage().data_ptr(), []).append(number)
        factor.record_stream(stream)
    copies: dict[int, Tensor] = {}
    for numbers in by_home.values():
        copies |= zip(numbers, _copied_together([factors[number] for number in numbers]), strict=True)
    return tuple(copies[number] for number in range(len(factors)))


# Elements of factors that are copied as one. Where decompositions are asked for in the step that takes the last ones
# over, their memory is not free yet, and as much again is pinned: half a second for a gigabyte (an H200's host). Many
# small pieces are free one by one, and used again.
_TOGETHER = 2**23


def _copied_together(factors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of one tensor as one copy, unless that is large, or has mostly other things."""
    offsets = [int(factor.storage_offset()) for factor in factors]
    start = min(offsets)
    length = max(offset + factor.numel() for offset, factor in zip(offsets, factors, strict=True)) - start
    all_dense = all(factor.is_contiguous() for factor in factors)
    if not all_dense or length > min(_TOGETHER, 2 * sum(factor.numel() for factor in factors)):
        return [_pinned_copy(factor) for factor in factors]
    whole = _pinned_copy(factors[0].as_strided((length,), (1,), start))
    parts = zip(factors, offsets, strict=True)
    return [whole.as_strided(factor.shape, factor.stride(), offset - start) for factor, offset in parts]


def _pinned_copy(tensor: Tensor) -> Tensor:
    return host_memory(tensor.shape, tensor.dtype, pinned=True).copy_(tensor, non_blocking=True)


def _to_device(solutions: Solutions, device: torch.device) -> Solutions:
    if device.type != "cuda":
        return solutions
    moved, kept = [], []
    for solution in solutions:
        own = (solution.side.matrix, solution.side.values)
        pinned = [None if part is None else part if part.is_cuda else part.contiguous().pin_memory() for part in own]
        kept.append(pinned)
        parts = [None if p is None else p.to(device, non_blocking=True) for p in pinned]
        moved.append(Solution(Side(*parts), solution.failed))
    torch.cuda.current_stream(device).synchronize()
    return moved

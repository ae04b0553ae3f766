"""Trains for long with decompositions made by somebody unreliable, and looks whether anything is left behind.

    python -m benchmarks.soak --steps 5000 --ranks 2 --seed 0

A tiny network on some ranks. Whoever decomposes takes a random time, raises, answers nonsense, does not answer in time,
or is a process that gets killed. Half of the steps with a fixed delay, half with what is ready, within a bound of
staleness. All the time replicas must be the same, bit for bit; at the end a process must have no more threads, open
files and memory than after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import natgrad

TIMEOUT = 0.1  # seconds that a decomposition may take
EVERY = 100  # steps from one comparison of replicas to the next
STALE = 8  # steps
MODULE = "natgrad.overlap.tasks"  # what workers need


class Unreliable(Executor):
    """Most of the time it does what it is asked to."""

    def __init__(self, seed: int) -> None:
        self.did: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._threads = ThreadPoolExecutor(4)
        self._workers: ProcessPoolExecutor | None = None
        started = threading.Barrier(5)
        for _ in range(4):  # all threads from the beginning, so that they can be counted
            self._threads.submit(started.wait)
        started.wait()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs a function, or does not."""
        (how,) = self._random.choices(
            ["well", "error", "nonsense", "late", "process", "killed"], weights=[70, 8, 8, 2, 10, 2]
        )
        self.did[how] += 1
        if how in ("process", "killed"):
            return self._in_a_process(how, fn, *args)
        pause = 2 * TIMEOUT if how == "late" else self._random.uniform(0, 5e-3)
        return self._threads.submit(_misbehave, how, pause, self._random.randrange(3), fn, *args)

    def _in_a_process(self, how: str, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            future = self._pool().submit(fn, *args)
        except BrokenProcessPool:
            self._end_workers()
            future = self._pool().submit(fn, *args)
        if how == "killed" and self._workers is not None:
            for process in list((self._workers._processes or {}).values()):
                if process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
        return future

    def _pool(self) -> ProcessPoolExecutor:
        if self._workers is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([MODULE])
            self._workers = ProcessPoolExecutor(1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
            self._workers.submit(os.getpid).result()  # a worker takes a while to come
        return self._workers

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None

    def rest(self) -> None:
        """Ends processes: what is counted then are the threads of all times."""
        self._end_workers()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends everything."""
        self._end_workers()
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _misbehave(how: str, pause: float, which: int, fn: Callable[..., Any], *args: Any) -> Any:
    time.sleep(pause)
    if how == "error":
        raise OSError("lost on the way")
    answer = fn(*args)
    return answer if how != "nonsense" else [None, b"nonsense", answer[: len(answer) // 2]][which]


@dataclass(frozen=True)
class Held:
    """What a process has."""

    threads: int
    files: int
    memory: int  # bytes

    @staticmethod
    def now() -> Held:
        gc.collect()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), memory)

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.files} open files, {self.memory / 2**20:.1f} MiB"

    def no_more_than(self, before: Held) -> bool:
        """Memory may differ a little: allocators keep some."""
        allowed = before.memory * 1.05 + 2**24
        return self.threads <= before.threads and self.files <= before.files and self.memory <= allowed


@dataclass(frozen=True)
class Phase:
    """How a part of a run went on one rank."""

    name: str
    steps: int
    compared: int
    early: Held
    end: Held
    failures: int
    late: int
    oldest: int
    told: int  # warnings
    did: dict[str, int]

    def __str__(self) -> str:
        did = ", ".join(f"{count} {how}" for how, count in sorted(self.did.items()))
        return (
            f"{self.name}: {self.steps} steps, replicas compared {self.compared} times; {self.failures} failures "
            f"({did}), {self.late} waited for, oldest decomposition {self.oldest} steps, {self.told} warning\n"
            f"    after a tenth: {self.early}\n    at the end:    {self.end}"
        )


PHASES: dict[str, dict[str, Any]] = {
    "delay=3, comm-opt": {"delay": 3, "strategy": "comm-opt"},
    "ready, layer-wise": {"delay": "ready", "strategy": "layer-wise", "max_staleness": STALE},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 4)).double()


def replicas_are_one(model: nn.Module) -> None:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, sha.hexdigest())
    if len(set(told)) > 1:
        raise AssertionError("replicas have come apart")


def train(rank: int, name: str, steps: int, seed: int) -> Phase:
    """One part of the run."""
    executor = Unreliable(1000 * seed + rank)
    model = network()
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kfac = natgrad.KFAC(
        replicated,
        optimizer=optimizer,
        factor_update_steps=1,
        inv_update_steps=2,
        damping=1e-2,
        overlap=natgrad.Background(executor, timeout=TIMEOUT),
        **PHASES[name],
    )
    kfac.attach(optimizer)
    generator = torch.Generator().manual_seed(seed + 17 * rank)
    early, compared, oldest = None, 0, 0
    with executor, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(steps):
            x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            y = (x[:, :4] + 0.1 * x[:, 1:5]).argmax(1)
            optimizer.zero_grad()
            functional.cross_entropy(replicated(x), y).backward()
            optimizer.step()
            age = kfac.metrics()["decomposition_age"]
            oldest = max(oldest, int(age or 0))
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                replicas_are_one(model)
                compared += 1
            if step + 1 == steps // 10:
                early = _rested(executor)
        end = _rested(executor)
    numbers = kfac.metrics()
    kfac.detach()
    ours = [one for one in told if issubclass(one.category, natgrad.NatgradWarning)]
    assert early is not None, "there are at least ten steps"
    return Phase(
        name,
        steps,
        compared,
        early,
        end,
        int(numbers["background_failures"] or 0),
        int(numbers["late_decompositions"] or 0),
        oldest,
        len(ours),
        dict(executor.did),
    )


def _rested(executor: Unreliable) -> Held:
    """Once nothing is being worked on."""
    executor._pool()
    executor.rest()
    time.sleep(5 * TIMEOUT)
    return Held.now()


def judged(phase: Phase) -> list[str]:
    """What is wrong with a phase."""
    problems = []
    if not phase.end.no_more_than(phase.early):
        problems.append(f"{phase.name}: something is left behind: {phase.early} became {phase.end}")
    wrong = sum(phase.did.get(how, 0) for how in ("error", "nonsense", "late"))
    if phase.failures < wrong - 2:  # the last ones may not have been asked for
        problems.append(f"{phase.name}: {wrong} pieces went wrong, and {phase.failures} were counted")
    if phase.told != (phase.failures > 0):
        problems.append(f"{phase.name}: {phase.told} warnings")
    if "ready" in phase.name and phase.oldest > STALE:
        problems.append(f"{phase.name}: a decomposition was {phase.oldest} steps old")
    return problems


def on_rank(rank: int, ranks: int, steps: int, seed: int) -> list[Phase]:
    """All phases, in a process group that is there."""
    torch.set_num_threads(1)
    return [train(rank, name, steps // len(PHASES), seed) for name in PHASES]


def _rank(rank: int, store: str, ranks: int, steps: int, seed: int, queue: Any) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
        found = on_rank(rank, ranks, steps, seed)
        dist.barrier()
        dist.destroy_process_group()
        queue.put((rank, found))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        common = (os.path.join(folder, "store"), given.ranks, given.steps, given.seed, queue)
        processes = [context.Process(target=_rank, args=(rank, *common)) for rank in range(given.ranks)]
        for process in processes:
            process.start()
        answers = dict(queue.get() for _ in processes)
        for process in processes:
            process.join(30)
    problems = []
    for rank, found in sorted(answers.items()):
        if isinstance(found, str):
            problems.append(f"rank {rank} failed:\n{found}")
            continue
        for phase in found:
            print(f"rank {rank}, {phase}")
            problems += judged(phase)
    codes = [process.exitcode for process in processes]
    print(f"exit codes {codes}, {time.perf_counter() - began:.0f} s")
    if problems or any(codes):
        raise SystemExit("\n".join(problems) or "a rank did not end well")
    print("replicas identical bit for bit, nothing left behind")


if __name__ == "__main__":
    main()

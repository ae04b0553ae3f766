"""Nothing is left behind: not by a KFAC that goes, not by a process that ends or forks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import natgrad
from distribute.mixed import Loop
from natgrad.overlap import places, pool
from natgrad.overlap.job import Job
from natgrad.overlap.pool import DaemonPool
from overlap.executors import Held, digest, fingerprint, until

OPTIONS: dict[str, Any] = {"delay": 4, "inv_update_steps": 3}


@pytest.fixture(autouse=True)
def _alone() -> None:
    """Nothing of other tests is at work."""
    gc.collect()
    until(lambda: not ours())


@pytest.fixture
def gate(monkeypatch):
    """Solves in natgrad's threads wait until it is set."""
    event = threading.Event()

    def waits(piles: Any, ready: Any) -> Any:
        event.wait(20)
        return piles.solve()

    monkeypatch.setattr(places, "_on_the_host", waits)
    yield event
    event.set()


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("natgrad-")]


def test_a_kfac_that_nobody_holds_goes_at_once_and_its_threads_after_it(gate):
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=2), **OPTIONS).run(5)
    assert len(ours()) == 1
    reference = weakref.ref(loop.kfac)
    del loop.kfac
    loop.optimizer = None
    gc.collect()
    assert reference() is None
    assert len(ours()) == 1  # in the middle of something
    gate.set()
    until(lambda: not ours())


def test_an_executors_ferry_goes_with_the_kfac():
    held = Held()
    loop = Loop(0, 1, overlap=held, **OPTIONS).run(5)
    until(lambda: held.asked == 1)
    reference = weakref.ref(loop.kfac)
    del loop
    gc.collect()
    assert reference() is None
    held.release()
    until(lambda: not ours())


def test_detaching_lets_threads_end_and_attaching_goes_on():
    expected = fingerprint(Loop(0, 1, **OPTIONS).run(12))
    loop = Loop(0, 1, overlap=natgrad.Background("cpu"), **OPTIONS).run(5)
    loop.kfac.detach()
    until(lambda: not ours())
    loop.kfac.attach(loop.optimizer)
    assert fingerprint(loop.run(12, skip=5)) == expected
    loop.kfac.detach()
    loop.kfac.detach()
    until(lambda: not ours())


def test_detaching_in_the_middle_loses_nothing(gate):
    expected = fingerprint(Loop(0, 1, **OPTIONS).run(12))
    loop = Loop(0, 1, overlap=natgrad.Background("cpu"), **OPTIONS).run(5)
    loop.kfac.detach()
    gate.set()
    loop.kfac.attach(loop.optimizer)
    assert fingerprint(loop.run(12, skip=5)) == expected
    assert loop.kfac.metrics()["background_failures"] == 0


@pytest.mark.parametrize("torch_threads", [1, 3, None])
def test_threads_of_torch_stay_as_they_were(torch_threads):
    before = torch.get_num_threads()
    seen = []

    def look() -> None:
        seen.append(torch.get_num_threads())

    def in_a_new_thread() -> int:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return seen.pop()

    try:
        torch.set_num_threads(2)
        assert in_a_new_thread() == 2
        workers = DaemonPool(2, torch_threads=torch_threads, name="natgrad-test")
        inside = {workers.submit(torch.get_num_threads).result() for _ in range(2)}
        assert inside == {2 if torch_threads is None else torch_threads}
        assert torch.get_num_threads() == 2
        assert in_a_new_thread() == 2
        workers.shutdown()
    finally:
        torch.set_num_threads(before)


def test_a_run_leaves_the_threads_of_torch_alone():
    before = torch.get_num_threads()
    Loop(0, 1, overlap=natgrad.Background("cpu", workers=2, threads=2), **OPTIONS).run(6)
    with ThreadPoolExecutor(1) as new:
        assert new.submit(torch.get_num_threads).result() == before == torch.get_num_threads()


# The pool


def test_a_pool_is_an_executor():
    workers = DaemonPool(2, torch_threads=None, name="natgrad-test")
    assert list(workers.map(abs, [-1, 2, -3])) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0).result()
    assert workers.submit(int, "5").result() == 5
    assert workers.submit(threading.current_thread).result().daemon
    workers.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        workers.submit(abs, 1)


def test_a_pool_finishes_what_is_queued_or_does_not():
    for cancel in (False, True):
        workers, event = DaemonPool(1, torch_threads=None, name="natgrad-test"), threading.Event()
        first, second = workers.submit(event.wait, 10), workers.submit(abs, -1)
        until(first.running)
        workers.shutdown(wait=False, cancel_futures=cancel)
        event.set()
        assert first.result(10)
        assert second.cancelled() if cancel else second.result(10) == 1


def test_threads_end_when_there_is_nothing_to_do():
    workers = DaemonPool(2, torch_threads=2, name="natgrad-test")
    threads = {workers.submit(threading.current_thread).result() for _ in range(5)}
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert workers.submit(abs, -1).result() == 1  # and others begin
    workers.shutdown()


def test_a_thread_keeps_the_number_of_torch_threads_that_it_was_given():
    before, gate = torch.get_num_threads(), threading.Event()
    workers = DaemonPool(1, torch_threads=3, name="natgrad-test")

    def look() -> int:
        gate.wait(10)
        return torch.get_num_threads()

    try:
        seen = workers.submit(look)
        torch.set_num_threads(2)
        gate.set()
        assert seen.result() == 3
    finally:
        torch.set_num_threads(before)
        workers.shutdown()


def test_a_finished_piece_is_not_kept():
    class Thing:
        pass

    workers = DaemonPool(1, torch_threads=None, name="natgrad-test")
    thing = Thing()
    reference = weakref.ref(thing)
    workers.submit(id, thing).result()
    del thing
    until(lambda: reference() is None)
    workers.shutdown()


# The end of a process

BEGIN = """
import sys, threading, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import natgrad
from distribute.mixed import Loop
from natgrad.overlap import places, pool

began = threading.Event()

def slow(piles, ready):
    began.set()
    time.sleep({seconds})
    torch.linalg.eigh(torch.randn(300, 300))  # comes back to torch when the main thread is at its end
    return piles.solve()

def hanging(piles, ready):
    began.set()
    time.sleep(1000)

loop = Loop(0, 1, overlap=natgrad.Background("cpu"), delay=4, inv_update_steps=3).run(3)
"""


ENDINGS = {
    "while one is being made": ("places._on_the_host = slow; loop.run(5, skip=3); began.wait()", 0),
    "after the KFAC has gone": (
        "places._on_the_host = slow; loop.run(5, skip=3); began.wait(); loop.kfac.detach(); del loop; sys.exit(7)",
        7,
    ),
    "while one hangs": (
        "pool.LAST_WAIT = 0.2; places._on_the_host = hanging; loop.run(5, skip=3); began.wait()",
        0,
    ),
    "after giving one up that hangs": (
        "import warnings; warnings.simplefilter('ignore'); pool.LAST_WAIT = 0.2; places._on_the_host = hanging\n"
        "loop = Loop(0, 1, overlap=natgrad.Background('cpu', timeout=0.1), delay=1, inv_update_steps=3).run(5)\n"
        "assert began.is_set() and loop.kfac.metrics()['background_failures'] == 1",
        0,
    ),
    "while an executor does not answer": (
        "from concurrent.futures import Executor, Future\n"
        "class Forgetful(Executor):\n"
        "    def submit(self, *arguments): began.set(); return Future()\n"
        "loop = Loop(0, 1, overlap=Forgetful(), delay=4, inv_update_steps=3).run(5)\n"
        "began.wait(); pool.LAST_WAIT = 1000",
        0,
    ),
    "with an error": ("places._on_the_host = slow; loop.run(5, skip=3); began.wait(); raise KeyError('mine')", 1),
}


@pytest.fixture(scope="module")
def endings() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: most of the time goes into importing torch."""
    root = Path(natgrad.__file__).parents[2]
    begin = BEGIN.format(paths=[str(root / "src"), str(root / "tests")], seconds=0.3)
    quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {
        name: subprocess.Popen([sys.executable, "-c", begin + text], **quiet) for name, (text, _) in ENDINGS.items()
    }
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_as_it_should(ending, endings):
    _, code = ENDINGS[ending]
    _, complaints = endings[ending].communicate(timeout=60)  # less than hangs do
    assert endings[ending].returncode == code, complaints
    if code == 1:
        assert complaints.strip().endswith("KeyError: 'mine'")
        assert complaints.count("Traceback") == 1
    else:
        assert complaints == ""


def test_the_end_of_a_process_waits_for_threads_of_pools_that_have_gone(monkeypatch):
    """Daemon threads that come back from C++ to an interpreter that is gone crash it."""
    monkeypatch.setattr(pool, "ending", threading.Event())
    event = threading.Event()
    workers = DaemonPool(1, torch_threads=None, name="natgrad-test")
    workers.submit(event.wait, 10)
    queued = workers.submit(abs, 1)
    (thread,) = workers._work.threads
    del workers
    gc.collect()
    timer = threading.Timer(0.1, event.set)
    timer.start()
    pool._end()
    assert not thread.is_alive()
    assert queued.cancelled()


# Forks


def in_a_child(function: Any) -> str:
    """What a function returns in a forked process; an error is its text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning", "ignore::DeprecationWarning")
def test_parent_and_child_of_a_fork_both_go_on(gate):
    expected = digest(Loop(0, 1, **OPTIONS).run(16).model.state_dict())
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), **OPTIONS).run(5)
    assert len(loop.kfac._curvature.jobs) == 1

    def go_on() -> str:
        gate.set()
        loop.run(16, skip=5)
        failures = loop.kfac.metrics()["background_failures"]
        return f"{digest(loop.model.state_dict())} {failures}"

    assert in_a_child(go_on) == f"{expected} 1"  # what the parent's thread works on the child makes itself
    gate.set()
    assert go_on() == f"{expected} 0"


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning", "ignore::DeprecationWarning")
def test_a_fork_in_the_middle_of_an_answer_does_not_hang(gate):
    """A thread may hold the lock of a future at that moment: in the child nobody will ever let it go."""
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), **OPTIONS).run(5)
    (job,) = loop.kfac._curvature.jobs
    assert isinstance(job, Job)
    (future,) = job._futures
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with future._condition:
            locked.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(10)

    def go_on() -> str:
        import signal

        signal.alarm(8)  # ends a child that hangs
        gate.set()
        state = loop.kfac.state_dict()
        loop.run(12, skip=5)
        loop.kfac.load_state_dict(state)
        return f"{loop.kfac.steps}"

    answer = in_a_child(go_on)
    done.set()
    thread.join()
    assert answer == "5"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_only_ends_disturbs_nobody(gate):
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), **OPTIONS).run(5)

    def end() -> str:
        loop.kfac.detach()
        pool._end()
        return "ended"

    assert in_a_child(end) == "ended"
    gate.set()
    assert fingerprint(loop.run(12, skip=5)) == fingerprint(Loop(0, 1, **OPTIONS).run(12))

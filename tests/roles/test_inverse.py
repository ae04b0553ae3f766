from __future__ import annotations

import gc
import os
import socket
import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from tests.roles.conftest import Hosts, pause, wait_for

from natgrad.overlap.tasks import Task, pack, solve_packed
from natgrad.roles import InverseWorkers, WorkerError, inverse
from natgrad.roles.inverse import serve
from natgrad.roles.wire import connected


def task(size: int = 20, seed: int = 0) -> bytes:
    torch.manual_seed(seed)
    root = torch.randn(2, size, size)
    return pack(Task("eigen", ("a",), (root @ root.mT,)))


class Asking(InverseWorkers):
    """One that remembers what it was told."""

    def __init__(self, hosts: Hosts, count: int = 1, **options: Any) -> None:
        self.stories: list[str] = []
        super().__init__(hosts.role(inverse=count), on_change=self.stories.append, **options)


def slowly(seconds: float) -> Any:
    """A worker that is slow at tasks of another size than the first."""

    def work(payload: bytes) -> bytes:
        if len(payload) > len(task()):
            time.sleep(seconds)
        return solve_packed(payload)

    return work


def worker(hosts: Hosts, index: int = 0, incarnation: int = 0, *, slow: float = 0) -> Any:
    def live() -> None:
        if slow:
            inverse.solve_packed = slowly(slow)
        serve(hosts.role("inverse", index, incarnation=incarnation))

    return hosts.start(live)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "AGAIN", 0.1)


def test_answers_are_those_of_this_process_bit_by_bit(hosts: Hosts) -> None:
    worker(hosts), worker(hosts, 1)
    with Asking(hosts, 2) as workers:
        payloads = [task(size, size) for size in range(2, 30)]
        futures = [workers.submit(solve_packed, payload) for payload in payloads]
        for payload, future in zip(payloads, futures, strict=True):
            assert future.result(20) == solve_packed(payload)
        wait_for(lambda: workers.alive == 2)
        assert list(workers.map(solve_packed, payloads[:2])) == [solve_packed(one) for one in payloads[:2]]
    assert workers.alive == 0
    assert workers.stories == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.submit(solve_packed, task())


def test_several_ranks_share_a_worker(hosts: Hosts) -> None:
    worker(hosts)
    with Asking(hosts) as one, Asking(hosts) as other:
        futures = [workers.submit(solve_packed, task()) for workers in (one, other) for _ in range(5)]
        assert {future.result(20) for future in futures} == {solve_packed(task())}


def test_an_error_of_the_worker_is_told_and_it_goes_on(hosts: Hosts) -> None:
    worker(hosts)
    with Asking(hosts) as workers:
        with pytest.raises(WorkerError, match=r"\w+: "):
            workers.submit(solve_packed, b"no task").result(20)
        assert workers.submit(solve_packed, task()).result(20) == solve_packed(task())
        for wrong in ((len, b""), (solve_packed, "text"), (solve_packed,), (solve_packed, b"", b"")):
            with pytest.raises(ValueError, match="with a payload of bytes, alone"):
                workers.submit(*wrong)
    with pytest.raises(ValueError, match="there are no inverse workers"):
        InverseWorkers(hosts.role(inverse=0))


@pytest.mark.usefixtures("impatient")
def test_a_task_whose_worker_dies_is_done_by_another(hosts: Hosts) -> None:
    dying = worker(hosts, slow=30)
    with Asking(hosts, 2) as workers:
        wait_for(lambda: workers.alive == 1)
        future = workers.submit(solve_packed, task(40))
        wait_for(future.running)
        worker(hosts, 1)
        wait_for(lambda: workers.alive == 2)
        dying.kill()
        assert future.result(20) == solve_packed(task(40))
        assert workers.alive == 1
        assert len(workers.stories) == 1
        assert workers.stories[0].startswith("inverse worker 0 is lost: ")


@pytest.mark.usefixtures("impatient")
def test_the_last_worker_is_missed_at_once_and_welcomed_back(hosts: Hosts) -> None:
    dying = worker(hosts, slow=30)
    with Asking(hosts) as workers:
        futures = [workers.submit(solve_packed, task(40)) for _ in range(3)]
        wait_for(futures[0].running)
        begun = time.monotonic()
        dying.kill()
        for future in futures:
            with pytest.raises(ConnectionError, match=r"no inverse worker is reachable: inverse worker 0: "):
                future.result(20)
        with pytest.raises(ConnectionError, match="no inverse worker is reachable"):
            workers.submit(solve_packed, task()).result(20)
        assert time.monotonic() - begun < 5  # not after the 30 s of its task
        assert workers.alive == 0
        worker(hosts, incarnation=1)
        wait_for(lambda: workers.alive == 1)
        assert workers.submit(solve_packed, task()).result(20) == solve_packed(task())
        assert workers.stories[1:] == ["inverse worker 0 is back"]


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_dies_in_idleness_is_missed(hosts: Hosts) -> None:
    dying = worker(hosts)
    with Asking(hosts) as workers:
        assert workers.submit(solve_packed, task()).result(20) == solve_packed(task())
        dying.kill()
        wait_for(lambda: workers.alive == 0, 2)
        worker(hosts, incarnation=1)
        wait_for(lambda: workers.alive == 1)
        assert workers.submit(solve_packed, task()).result(20) == solve_packed(task())


@pytest.mark.usefixtures("impatient")
def test_a_task_that_ends_every_worker_is_given_up(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "solve_packed", lambda payload: os._exit(1))
    for index in range(4):
        hosts.start(lambda index=index: serve(hosts.role("inverse", index)))
    monkeypatch.undo()
    with Asking(hosts, 4) as workers:
        wait_for(lambda: workers.alive == 4)
        with pytest.raises(ConnectionError, match="3 inverse workers were lost over it"):
            workers.submit(solve_packed, task()).result(20)
        assert workers.alive == 1


def test_a_worker_that_hangs_is_lost_in_time(hosts: Hosts) -> None:
    hanging = worker(hosts)
    workers = Asking(hosts, timeout=0.3)
    wait_for(lambda: workers.alive == 1)
    pause(hanging.pid)
    with pytest.raises(TimeoutError, match=r"inverse worker 0: no answer within 0\.3 s"):
        workers.submit(solve_packed, task()).result(20)
    assert workers.alive == 0
    with pytest.raises(ConnectionError, match="no inverse worker is reachable"):
        workers.submit(solve_packed, task()).result(2)
    hanging.kill()
    workers.shutdown()


@pytest.mark.usefixtures("impatient")
def test_the_first_worker_is_waited_for_with_patience(hosts: Hosts) -> None:
    with Asking(hosts, patience=20) as workers:
        future = workers.submit(solve_packed, task())
        time.sleep(0.3)
        assert not future.done()
        worker(hosts)
        assert future.result(20) == solve_packed(task())


@pytest.mark.usefixtures("impatient")
def test_patience_has_an_end(hosts: Hosts) -> None:
    with Asking(hosts, patience=0.3) as workers:
        futures = [workers.submit(solve_packed, task()) for _ in range(2)]
        for future in futures:
            with pytest.raises(ConnectionError, match=r"none came within 0\.3 s; inverse worker 0: it has not told"):
                future.result(5)


def test_strangers_are_refused_and_the_rest_is_served(hosts: Hosts) -> None:
    worker(hosts)
    role = hosts.role()
    address, _, _ = wait_for(lambda: role.directory.find("inverse", 0))
    silent = socket.create_connection(address)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(1000), os.urandom(10_000)):
        with socket.create_connection(address) as stranger:
            stranger.sendall(garbage)
    with pytest.raises(ConnectionError, match="handshake"):
        connected(address, b"another key")
    wire = connected(address, role.directory.token)
    wire._connection.send_bytes(b"of another length than expected")  # by one who knows the key
    with pytest.raises(ConnectionError):
        wire.receive(5)
    wire.close()
    with Asking(hosts) as workers:
        assert workers.submit(solve_packed, task()).result(20) == solve_packed(task())
    silent.close()


def test_shutting_down(hosts: Hosts) -> None:
    busy = worker(hosts, slow=30)
    workers = Asking(hosts)
    futures = [workers.submit(solve_packed, task(40)) for _ in range(3)]
    wait_for(futures[0].running)
    begun = time.monotonic()
    workers.shutdown(wait=False, cancel_futures=True)
    assert wait(futures, 5).not_done == set()
    assert isinstance(futures[0].exception(), ConnectionError)
    assert futures[1].cancelled()
    assert futures[2].cancelled()
    workers.shutdown()
    assert time.monotonic() - begun < 3
    assert workers.stories == []
    busy.kill()


def test_a_worker_ends_with_the_training_even_in_a_task(hosts: Hosts) -> None:
    busy, idle = worker(hosts, slow=30), worker(hosts, 1)
    workers = Asking(hosts)
    future = workers.submit(solve_packed, task(40))
    wait_for(future.running)
    hosts.role().close()
    for process in (idle, busy):
        process.join(6)
        assert process.exitcode == 0
    with pytest.raises(ConnectionError):
        future.result(5)
    workers.shutdown()


def test_nothing_is_left_open(hosts: Hosts) -> None:
    worker(hosts)
    role = hosts.role()
    wait_for(lambda: role.directory.find("inverse", 0))
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with InverseWorkers(role) as workers:
            workers.submit(solve_packed, task()).result(20)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)

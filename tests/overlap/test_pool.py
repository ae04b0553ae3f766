"""Threads that decompose beside training."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from natgrad.overlap.pool import NICENESS, DaemonPool
from overlap.executors import until


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_threads_that_step_back_leave_the_others_as_they_are() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert DaemonPool(1, torch_threads=1, name="test", steps_back=True).submit(niceness).result() == max(
        before, NICENESS
    )
    assert DaemonPool(1, torch_threads=1, name="test").submit(niceness).result() == before
    assert niceness() == before


def test_a_thread_waits_a_little_for_more_to_do() -> None:
    pool = DaemonPool(3, torch_threads=1, name="test")
    first = pool.submit(threading.current_thread).result()
    until(lambda: pool._work.idle == 1)
    again = [pool.submit(threading.current_thread).result() for _ in range(3)]
    assert again == [first] * 3
    until(lambda: pool._work.idle == 1)
    pool.shutdown()
    assert not first.is_alive()


def test_as_many_threads_as_there_is_to_do_are_started_beside_those_that_wait() -> None:
    pool, gate = DaemonPool(3, torch_threads=1, name="test"), threading.Event()
    pool.submit(abs, -1).result()
    until(lambda: pool._work.idle == 1)
    waiting = [pool.submit(gate.wait, 20) for _ in range(5)]
    until(lambda: sum(one.running() for one in waiting) == 3)
    assert len(pool._work.threads) == 3
    gate.set()
    assert all(one.result(20) for one in waiting)
    pool.shutdown()


def test_a_thread_that_waits_is_woken_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more to do, and for the end: nobody waits until its patience is over."""
    monkeypatch.setattr("natgrad.overlap.pool.PATIENCE", 1000.0)
    pool = DaemonPool(1, torch_threads=1, name="test")
    thread = pool.submit(threading.current_thread).result()
    until(lambda: pool._work.idle == 1)
    assert pool.submit(abs, -1).result(20) == 1
    until(lambda: pool._work.idle == 1)
    pool.shutdown(wait=False)
    thread.join(20)
    assert not thread.is_alive()


def test_a_thread_that_has_waited_long_enough_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natgrad.overlap.pool.PATIENCE", 0.05)
    pool = DaemonPool(1, torch_threads=1, name="test")
    thread = pool.submit(threading.current_thread).result()
    thread.join(20)
    assert not thread.is_alive()
    assert pool._work.idle == 0
    assert pool.submit(abs, -1).result(20) == 1
    pool.shutdown()


def test_one_with_threads_of_lapack_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natgrad.overlap.pool.PATIENCE", 1000.0)
    pool = DaemonPool(1, torch_threads=2, name="test")
    thread = pool.submit(threading.current_thread).result()
    thread.join(20)
    assert not thread.is_alive()
    pool.shutdown()

"""Threads that decompose beside training."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from natgrad.overlap.pool import NICENESS, DaemonPool


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

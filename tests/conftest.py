"""For all tests: one thread. Threads that wait for each other take most of the time of such small models, and nearly
all of it where another process uses a core, as another worker of pytest-xdist does. Processes that tests start have one
too.
"""

import gc
import os
import time

import pytest
import torch

from helpers import Hand

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    """Hides modules and tests from the garbage collector, which would touch, and so copy, them in every fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    moved = Hand()
    monkeypatch.setattr(time, "perf_counter", moved)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # a GPU has a clock of its own
    return moved

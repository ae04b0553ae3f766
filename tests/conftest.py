"""For all tests: one thread. Threads that wait for each other take most of the time of such small models, and nearly
all of it where another process uses a core.
"""

import time

import pytest
import torch

from helpers import Hand

torch.set_num_threads(1)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    moved = Hand()
    monkeypatch.setattr(time, "perf_counter", moved)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # a GPU has a clock of its own
    return moved

"""Optimizers that end badly, for comparisons that must not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch


class Raises(torch.optim.SGD):
    """Takes four steps."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken > 4 and not Path(os.environ.get("NATGRAD_TEST_MENDED", "/nowhere")).exists():
            raise RuntimeError("the fifth step is too much")
        return super().step(closure)


class Kills(torch.optim.SGD):
    """As if the machine's memory were not enough."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class Hangs(torch.optim.SGD):
    """Never comes back, and does not look at signals."""

    def step(self, closure=None):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        time.sleep(1000)
        return super().step(closure)

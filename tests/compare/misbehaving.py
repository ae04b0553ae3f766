"""Optimizers that end badly, for comparisons that must not."""

from __future__ import annotations

import multiprocessing
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
        if self.taken > 4 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class Hangs(torch.optim.SGD):
    """Never comes back, and does not look at signals."""

    def step(self, closure=None):
        if multiprocessing.parent_process() is not None:  # not where recipes are checked
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            time.sleep(1000)
        return super().step(closure)


class Explodes(torch.optim.SGD):
    """Its weights are no numbers."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(float("nan"))

"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from functools import cache
from pathlib import Path

# Where Linux says what a container may use: newer systems in one file, older ones in two.
_NEWER = Path("/sys/fs/cgroup/cpu.max")
_OLDER = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def available_cores() -> int:
    """Those of the machine that it is let run on; in a container that has a share of their time, not more than that is
    worth. Who starts more threads there is stopped, all of them, when the share is used up.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    share = _share()
    return cores if share is None else max(1, min(cores, math.floor(share)))


@cache
def _share() -> float | None:
    """Cores' worth of time; None where there is no bound. It stays as it is, and steps of training ask."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = _NEWER.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (path.read_text() for path in _OLDER)
        return None if int(quota) < 0 else int(quota) / int(period)
    return None

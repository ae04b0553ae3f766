"""What command lines of benchmarks have in common: what cannot be is refused in one line, before anything is done."""

from __future__ import annotations

from benchmarks.workloads import Device
from natgrad.training import ranks


def device_of(name: str) -> Device:
    """The device that was asked for; ValueError where it is not there, in the words of ``natgrad train``."""
    return Device(str(ranks.device_of(name, 0)))

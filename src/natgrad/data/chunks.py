"""Batches of data that is held in memory, made many steps at a time, so that a step costs a slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from natgrad.recipes.schema import DataOptions

STEPS = 32
"""Steps made at once, at most."""

ACCELERATOR_BYTES = 64 * 2**20
CPU_BYTES = 8 * 2**20
"""Bytes made at once, at most: where kernels are launched, a lot; on the CPU, what its caches and allocator reuse."""


def in_chunks(
    make: Callable[[slice], tuple[Tensor, Tensor]], *, cases: int, batch: int, case_bytes: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches from a function that makes any range of the cases. What is made must not depend on the range."""
    limit = CPU_BYTES if device.type == "cpu" else ACCELERATOR_BYTES
    chunk = batch * max(1, min(STEPS, limit // (case_bytes * batch)))
    for first in range(0, cases, chunk):
        inputs, targets = make(slice(first, min(first + chunk, cases)))
        yield from zip(inputs.split(batch), targets.split(batch), strict=True)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: from pinned memory, since copies of other memory wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def augmenting_side(options: DataOptions, device: torch.device, make: Callable[[torch.device], object]) -> torch.device:
    """Where crops and flips are made: as told, or where `make` ends sooner. Both make the same."""
    cpu = torch.device("cpu")
    if device.type == "cpu" or options.augment_on == "cpu":
        return cpu
    if options.augment_on == "device":
        return device
    return min((device, cpu), key=lambda side: _seconds(make, side))


def in_words(side: torch.device, device: torch.device) -> str:
    """For a description; nothing where there is no choice."""
    if device.type == "cpu":
        return ""
    return f", augmented on the {'CPU' if side.type == 'cpu' else 'GPU' if device.type == 'cuda' else device.type}"


def _seconds(make: Callable[[torch.device], object], side: torch.device) -> float:
    best = float("inf")
    for attempt in range(4):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        make(side)
        torch.accelerator.synchronize()
        if attempt:  # the first one pays for allocations
            best = min(best, time.perf_counter() - start)
    return best

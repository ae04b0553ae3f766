"""Moving many running sums at once: S ← ξS + new where that is finite; on a GPU in two launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.launches import ALIGNED_BYTES, COUNTABLE, HOST, Launch, able, addresses, kernel, stream_of

_BLOCK = 4096


def finite(moments: Sequence[Tensor]) -> Tensor:
    """Which of some tensors are finite throughout, on the device."""
    if moments[0].device.type == "cpu":  # where the largest norm takes twenty times as long
        return torch.isfinite(torch.stack([torch.stack(torch.aminmax(moment)) for moment in moments])).all(1)
    if not _fit(moments):
        return torch.isfinite(torch.stack(torch._foreach_norm(list(moments), ord=math.inf)))
    device = moments[0].device
    bad = torch.zeros(len(moments), dtype=torch.int32, device=device)
    with torch.cuda.device_of(bad):
        pointers = addresses([moment.data_ptr() for moment in moments], device)
        for launch in _launches("finite_kernel", _counts(moments), 1, device, stream_of(device)):
            launch(pointers, bad)
    return bad == 0


def move(sums: Sequence[Tensor], moments: Sequence[Tensor], flags: Tensor, decay: float) -> None:
    """Takes moments, which nobody needs afterwards, into running sums where their flags are set."""
    device = flags.device
    if _fit(moments) and _fit(sums):
        pairs = [pair for one in zip(sums, moments, strict=True) for pair in one]
        with torch.cuda.device_of(flags):
            pointers = addresses([tensor.data_ptr() for tensor in pairs], device)
            for launch in _launches("move_kernel", _counts(moments), 2, device, stream_of(device)):
                launch(pointers, flags.view(torch.uint8), float(decay))  # compiled for a float, once
    elif device.type == "cpu":
        # Nobody waits for an answer here, and one pass over memory is enough.
        for total, flag, moment in zip(sums, flags.tolist(), moments, strict=True):
            if flag:
                torch.add(moment, total, alpha=decay, out=total)
    else:
        # Into the moments: no third copy of all sums.
        torch._foreach_add_(list(moments), list(sums), alpha=decay)
        for total, flag, moment in zip(sums, flags.unbind(), moments, strict=True):
            torch.where(flag, moment, total, out=total)


def numbers(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers on a device, in float64; nobody waits for them."""
    here = torch.tensor(values, dtype=torch.float64, device=HOST, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def _fit(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can have them."""
    first = tensors[0]
    device = first.device
    if not able(device):
        return False
    return all(
        tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.device == device
        and tensor.data_ptr() % ALIGNED_BYTES == 0
        and tensor.numel() < COUNTABLE
        for tensor in tensors
    )


def _counts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


@lru_cache(maxsize=64)
def _launches(name: str, counts: tuple[int, ...], slots: int, device: torch.device, stream: int) -> list[Launch]:
    """Of a kernel that walks over tensors of so many elements, each with so many pointers: four elements at a time
    where that goes. For one `stream`.
    """
    pieces: dict[int, list[tuple[int, ...]]] = {}
    for number, count in enumerate(counts):
        piece = (*(slots * number + slot for slot in range(slots)), count, number)
        pieces.setdefault(4 if count % 4 == 0 else 1, []).append(piece)
    return [
        Launch(
            kernel("statistics", name),
            rows,
            [-(-row[slots] // _BLOCK) for row in rows],
            device,
            BLOCK=_BLOCK,
            ALIGNED=n,
        )
        for n, rows in pieces.items()
    ]

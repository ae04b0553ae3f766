"""Moving many running sums at once: S ← ξS + new where that is finite; on a GPU in two launches."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from natgrad.launches import ALIGNED_BYTES, COUNTABLE, HOST, Launch, able, addresses, kernel, stream_of

_BLOCK = 4096
_dtype = attrgetter("dtype")


def finite(moments: Sequence[Tensor]) -> Tensor:
    """Which of some tensors are finite throughout, on the device."""
    if moments[0].device.type == "cpu":  # where the largest norm takes twenty times as long
        return torch.isfinite(torch.stack([torch.stack(torch.aminmax(moment)) for moment in moments])).all(1)
    places = list(map(Tensor.data_ptr, moments))
    if not _fit(moments, places):
        return torch.isfinite(torch.stack(torch._foreach_norm(list(moments), ord=math.inf)))
    device = moments[0].device
    with torch.cuda.device_of(moments[0]):
        return _finite(addresses(places, device), _counts(moments), 0, device)


class Sums:
    """Running sums that move together in step after step: what kernels have to know of them is found out once. Whose
    they are keeps them alive, and not this.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._device = tensors[0].device
        self._counts = _counts(tensors)
        self._places = list(map(Tensor.data_ptr, tensors))
        self._fit = _fit(tensors, self._places)

    def move(self, moments: Sequence[Tensor], usable: Tensor | None, decay: float) -> Tensor:
        """Takes in moments, one for each sum, which nobody needs afterwards: where they are finite, and the step is
        `usable`. Returns where that is, on the device.
        """
        if self._fit:
            places = list(map(Tensor.data_ptr, moments))
            if _fit(moments, places):
                return self._launch(moments[0], places, usable, decay)
        flags = _and(finite(moments), usable)
        sums = [tensor for one in self._tensors if (tensor := one()) is not None]
        if self._device.type == "cpu":
            # Nobody waits for an answer here, and one pass over memory is enough.
            for total, flag, moment in zip(sums, flags.tolist(), moments, strict=True):
                if flag:
                    torch.add(moment, total, alpha=decay, out=total)
        else:
            # Into the moments: no third copy of all sums.
            torch._foreach_add_(list(moments), sums, alpha=decay)
            for total, flag, moment in zip(sums, flags.unbind(), moments, strict=True):
                torch.where(flag, moment, total, out=total)
        return flags

    def _launch(self, first: Tensor, places: Sequence[int], usable: Tensor | None, decay: float) -> Tensor:
        """The same by kernels, which find moments, of which this is the `first`, after the sums."""
        count, device = len(self._places), self._device
        with torch.cuda.device_of(first):
            pointers = addresses([*self._places, *places], device)
            flags = _and(_finite(pointers, self._counts, count, device), usable)
            marks = flags.view(torch.uint8)
            for launch in _launches("move_kernel", self._counts, (0, count), device, stream_of(device)):
                launch(pointers, marks, float(decay))  # compiled for a float, once
        return flags


def numbers(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers on a device, in float64; nobody waits for them."""
    here = torch.tensor(values, dtype=torch.float64, device=HOST, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def _finite(pointers: Tensor, counts: tuple[int, ...], first: int, device: torch.device) -> Tensor:
    """Which tensors of so many elements are finite, whose pointers begin with the `first`; by a kernel."""
    bad = torch.zeros(len(counts), dtype=torch.int32, device=device)
    for launch in _launches("finite_kernel", counts, (first,), device, stream_of(device)):
        launch(pointers, bad)
    return bad == 0


def _and(flags: Tensor, usable: Tensor | None) -> Tensor:
    return flags if usable is None else flags & usable.to(flags.device)


def _fit(tensors: Sequence[Tensor], places: Iterable[int]) -> bool:
    """Whether the kernels can have tensors that lie at these places."""
    device = tensors[0].device
    # One question to all of them after the other: there may be hundreds, in every step.
    return (
        able(device)
        and set(map(_dtype, tensors)) == {torch.float32}
        and set(map(Tensor.get_device, tensors)) == {tensors[0].get_device()}
        and all(map(Tensor.is_contiguous, tensors))
        and reduce(or_, places) % ALIGNED_BYTES == 0
        and max(map(Tensor.numel, tensors)) < COUNTABLE
    )


def _counts(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.numel, tensors))


@lru_cache(maxsize=64)
def _launches(
    name: str, counts: tuple[int, ...], firsts: tuple[int, ...], device: torch.device, stream: int
) -> list[Launch]:
    """Of a kernel that walks over tensors of so many elements, each with a pointer from each of the `firsts` on: four
    elements at a time where that goes. For one `stream`.
    """
    pieces: dict[int, list[tuple[int, ...]]] = {}
    for number, count in enumerate(counts):
        piece = (*(first + number for first in firsts), count, number)
        pieces.setdefault(4 if count % 4 == 0 else 1, []).append(piece)
    return [
        Launch(
            kernel("statistics", name),
            rows,
            [-(-row[-2] // _BLOCK) for row in rows],
            device,
            BLOCK=_BLOCK,
            ALIGNED=n,
        )
        for n, rows in pieces.items()
    ]

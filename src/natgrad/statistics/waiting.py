"""Statistics of small layers wait for others of the same shape: a few launches for all of them, not a few for each.

On a GPU a small layer's statistics take longer to launch than to compute. Activations and derivatives are held until
the backward pass is over, or until too much is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from natgrad.statistics import gpu
from natgrad.statistics.gram import second_moment
from natgrad.statistics.operations import Convolution, Operation
from natgrad.statistics.vectors import ByChannel, Vector

# Larger tensors keep the GPU busy longer than their launches take the host.
_SMALL = 2**22
# What may wait, in elements.
_HELD = 2**26


class Work(Protocol):
    """Computes statistics of several layers; equal works can be done together."""

    def moments(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """(K, n, n) of K layers, each given by its tensors."""


@dataclass(frozen=True)
class Inputs:
    """Of a convolution's inputs."""

    convolution: Convolution
    scale: float
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def moments(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Work`."""
        (k, m), (s, t), (p, q), (d, e) = (
            self.convolution.kernel,
            self.convolution.stride,
            self.convolution.padding,
            self.convolution.dilation,
        )
        inputs = [x for x, *_ in layers]
        moments = gpu.moments_of_stack(inputs, kernel=(k, m), stride=(s, t), padding=(p, q), dilation=(d, e))
        return moments if self.scale == 1 else moments.mul_(self.scale)


@dataclass(frozen=True)
class Outputs:
    """Of a convolution's derivatives."""

    scale: float
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def moments(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Work`."""
        return gpu.moments_of_stack([derivative for derivative, *_ in layers]).mul_(self.scale)


@dataclass(frozen=True)
class Vectors:
    """Of the gains or the biases of norm layers, from each case's gradient."""

    gains: bool
    diagonal: bool
    scale: float
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def moments(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Work`."""
        tensors = [torch.stack(each) for each in zip(*layers, strict=True)]
        derivative = tensors[0]
        if self.gains:
            _, x, mean, reciprocal = tensors
            rows = gpu.gain_gradients(derivative.flatten(0, 1), x.flatten(0, 1), mean, reciprocal)
            rows = rows.reshape(*derivative.shape[:3])
        else:
            rows = derivative.sum((3, 4), dtype=torch.float32)
        return second_moment(rows, diagonal=self.diagonal).mul_(self.scale)


Wanted = tuple[Work, Sequence[Tensor]]


def of_inputs(
    operation: Operation, saved: Sequence[Tensor], scale: float, *, homogeneous: bool, diagonal: bool
) -> Wanted | None:
    """The work that a use's inputs are, whose squares are multiplied with `scale`, and what it needs of them, if it can
    wait for others like it.
    """
    if not isinstance(operation, Convolution) or homogeneous or diagonal or not _is_small(saved[0]):
        return None
    if operation.groups > 1 or operation.reduced or not operation.fits_gpu(saved[0]):
        return None
    return Inputs(operation, scale, tuple(saved[0].shape), saved[0].stride(), saved[0].dtype), saved


def of_outputs(
    operation: Operation, derivative: Tensor, saved: Sequence[Tensor], scale: float, *, diagonal: bool
) -> Wanted | None:
    """The same for a use's derivatives, whose squares are multiplied with `scale`."""
    if not _is_small(derivative):
        return None
    shape, strides, dtype = tuple(derivative.shape), derivative.stride(), derivative.dtype
    if isinstance(operation, Convolution):
        plain = operation.groups == 1 and not operation.reduced and not diagonal
        return (Outputs(scale, shape, strides, dtype), (derivative,)) if plain and gpu.takes(derivative) else None
    if not isinstance(operation, Vector) or operation.shape != shape or not gpu.sums(derivative):
        return None
    by_channel = (operation.kept, operation.case_axis, operation.place) == ((1,), 0, None)
    if by_channel and operation.multiplier is None:
        return Vectors(False, diagonal, scale, shape, strides, dtype), (derivative,)
    if by_channel and operation.multiplier == ByChannel() and saved[0].stride() == strides and saved[0].dtype == dtype:
        return Vectors(True, diagonal, scale, shape, strides, dtype), (derivative, *saved)
    return None


def _is_small(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dim() == 4 and 0 < tensor.numel() <= _SMALL


@dataclass(frozen=True)
class _Entry:
    """A layer's tensors, their versions when they came, and who gets the moment."""

    tensors: Sequence[Tensor]
    versions: list[int]
    deliver: Callable[[Tensor], None]

    @property
    def is_intact(self) -> bool:
        return [tensor._version for tensor in self.tensors] == self.versions


class Waiting:
    """The tensors of works that are to be done, and where the moments go."""

    def __init__(self) -> None:
        self._works: dict[Work, list[_Entry]] = {}
        self._held = 0

    def __bool__(self) -> bool:
        return bool(self._works)

    @property
    def is_full(self) -> bool:
        """Whether it is time to `flush`."""
        return self._held > _HELD

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self._works.values()))[0].tensors[0].device

    def put(self, work: Work, tensors: Sequence[Tensor], deliver: Callable[[Tensor], None]) -> None:
        """Holds on to a layer's tensors; `deliver` gets its moment, (1, n, n)."""
        entry = _Entry(tensors, [tensor._version for tensor in tensors], deliver)
        self._works.setdefault(work, []).append(entry)
        self._held += sum(tensor.numel() for tensor in tensors)

    def flush(self) -> bool:
        """Does all works, each for all its layers at once. False where somebody has written into tensors that waited:
        their moments are NaN.
        """
        works, self._works, self._held = self._works, {}, 0
        intact = True
        for work, entries in works.items():
            moments = work.moments([entry.tensors for entry in entries]).split(1)
            for moment, entry in zip(moments, entries, strict=True):
                entry.deliver(moment if entry.is_intact else torch.full_like(moment, torch.nan))
                intact = intact and entry.is_intact
        return intact

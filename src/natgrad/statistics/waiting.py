"""Statistics wait for others: a few launches for all of them, not a few for each.

On a GPU a small layer's statistics take longer to launch than to compute. Activations and derivatives are held until
the backward pass is over, or until too much is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from natgrad.launches import stream_of
from natgrad.statistics import gpu
from natgrad.statistics.gpu import Norm, Patches
from natgrad.statistics.image import Image
from natgrad.statistics.operations import Convolution, Operation
from natgrad.statistics.plans import Work
from natgrad.statistics.vectors import ByChannel, Vector

# Bytes that may wait: `_FIRST`, and a third of those that have been done, up to `_MOST`. About half of what is done
# were activations, which autograd has freed by then as well: a third pays for the derivatives that wait, and leaves
# room for results and copies. Where autograd frees nothing, or only what it has just computed again, less may wait.
_FIRST = 2**26
_MOST = 2**30  # enough for a GPU to be busy with for longer than a host takes to launch it
_MOST_OF_NOTHING_FREED = 2**28
# Elements of results of works that are done together: sums on the way take about as much memory again, and another turn
# of launches takes less time than a GPU takes for so much. Tables of kernels count in 32 bits, too.
_RESULTS = 2**25
_WORTH = 2**20  # bytes that a copy has to let go of: it is a launch of its own
_version = attrgetter("_version")


@dataclass(frozen=True)
class Late:
    """What of a use's statistics can wait: the works for its inputs and its derivatives, or None; and its rows."""

    rows: int
    inputs: Work | None
    output: Work | None
    by_both: bool  # the output's needs what autograd saved too


def late(
    operation: Operation,
    derivative: Tensor,
    saved: Sequence[Tensor],
    *,
    fraction: float,
    scale: float,
    homogeneous: bool,
    diagonal: Sequence[bool],
) -> Late | None:
    """What can wait of the first cases of a use, a `fraction` that stands for all; squares of derivatives are
    multiplied with `scale`. It is the same for all tensors that lie alike.
    """
    if derivative.dim() != 4 or not derivative.is_cuda:
        return None
    if isinstance(operation, Convolution) and not operation.reduced:
        inputs = None if homogeneous or diagonal[1] else _of_inputs(operation, saved[0], fraction)
        output = None if diagonal[0] else _of_derivatives(operation, derivative, fraction, scale)
        return Late(operation.rows(saved, derivative), inputs, output, False)
    if isinstance(operation, Vector):
        vectors = _of_vectors(operation, derivative, saved, fraction, scale, diagonal[0])
        return Late(operation.rows(saved, derivative), None, vectors, vectors is not None and vectors.gains)
    return None


def _of_inputs(operation: Convolution, x: Tensor, fraction: float) -> Patches | None:
    image, scale = _part(x, fraction)
    if image is None or not operation.fits_gpu(x):
        return None
    (k, m), (s, t), (p, q), (d, e) = operation.kernel, operation.stride, operation.padding, operation.dilation
    return gpu.same(Patches(image, operation.groups, (k, m), (s, t), (p, q), (d, e), scale))


def _of_derivatives(operation: Convolution, derivative: Tensor, fraction: float, scale: float) -> Patches | None:
    image, more = _part(derivative, fraction)
    if image is None or not gpu.takes(derivative):
        return None
    return gpu.same(Patches(image, operation.groups, scale=scale * more))


def _of_vectors(
    operation: Vector, derivative: Tensor, saved: Sequence[Tensor], fraction: float, scale: float, diagonal: bool
) -> Norm | None:
    if operation.shape != derivative.shape or not gpu.sums(derivative):
        return None
    image, more = _part(derivative, fraction)
    if image is None or (operation.kept, operation.case_axis, operation.place) != ((1,), 0, None):
        return None
    if operation.multiplier is None:
        return gpu.same(Norm(image, False, True, diagonal, scale * more))
    if operation.multiplier != ByChannel() or _part(saved[0], fraction)[0] != image:
        return None
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in saved[1:]):
        return None
    return gpu.same(Norm(image, True, False, diagonal, scale * more))


def _part(x: Tensor, fraction: float) -> tuple[Image | None, float]:
    """The first cases of a tensor, and of how many each of them stands; None where kernels cannot read it."""
    if x.dim() != 4 or x.numel() == 0:
        return None, 1.0
    cases = math.ceil(fraction * x.shape[0])
    image = Image.of(x, cases)
    return (None if image.along_channels is None else image), x.shape[0] / cases


@dataclass(frozen=True)
class Part:
    """A work of some of an entry's tensors, and who gets its moments."""

    work: Work
    which: tuple[int, ...]
    deliver: tuple[Callable[[Tensor], None], ...]


class Parts:
    """All works of an entry's tensors, which are so many `bytes`. The same in step after step, unlike the tensors: what
    follows from it is found out once.
    """

    def __init__(self, parts: Iterable[Part], bytes: int) -> None:
        self.each = tuple(parts)
        self.bytes = bytes
        self.works = [part.work for part in self.each]
        self.which = [index for part in self.each for index in part.which]
        self.deliver = [deliver for part in self.each for deliver in part.deliver]
        self.results = sum([work.results for work in self.works])
        self.cases = max(work.cases for work in self.works)
        self.grows = 4 * self.results > bytes  # results take more memory than what they are of, if they are to be kept


@dataclass(slots=True)
class _Entry:
    """Tensors that wait, their versions when they came, and what is to be done with them."""

    parts: Parts
    tensors: Sequence[Tensor]
    versions: list[int]
    stream: int  # on which they came
    grows: bool  # to do it takes more memory than it frees

    @property
    def is_intact(self) -> bool:
        return list(map(_version, self.tensors)) == self.versions


class Waiting:
    """The tensors of works that are to be done on one device, and where the moments go. Those that free memory are done
    when there is no room for more of them, the others in the end. `frees` says that autograd frees activations as the
    backward pass goes on.
    """

    def __init__(self, *, frees: bool = True) -> None:
        self._entries: list[_Entry] = []
        self._held = 0  # bytes that are free when what waits is done, but for what grows
        self._room = _FIRST
        self._frees = frees
        self._most = _MOST if frees else _MOST_OF_NOTHING_FREED
        self._done = 0  # bytes that were held

    @property
    def is_full(self) -> bool:
        """Whether it is time to `flush`."""
        return self._held > self._room

    def has_room(self, parts: Parts) -> bool:
        """Whether these can wait together with what does already, if they do not grow."""
        return self._held == 0 or self._held + parts.bytes <= self._room

    def put(self, parts: Parts, tensors: Sequence[Tensor], *, grows: bool) -> None:
        """Holds on to tensors; of what waits to the end, to no more than is read, unless autograd keeps the rest."""
        if grows and self._frees:
            tensors = [_first_cases(tensor, parts.cases) for tensor in tensors]
        stream = stream_of(tensors[0].device)
        self._entries.append(_Entry(parts, tensors, list(map(_version, tensors)), stream, grows))
        if not grows:
            self._held += parts.bytes

    def flush(self, *, everything: bool = True) -> bool:
        """Does all works at once; unless it is `everything`, those that free memory. False where somebody has written
        into tensors that waited: their moments are NaN.
        """
        entries, self._entries = self._entries, []
        if not everything:
            self._entries = [entry for entry in entries if entry.grows]
            entries = [entry for entry in entries if not entry.grows]
        self._done += self._held
        self._held = 0
        self._room = min(_FIRST + self._done // 3, self._most)
        if not entries:
            return True
        now = stream_of(entries[0].tensors[0].device)
        _await([entry for entry in entries if entry.stream != now])
        intact = True
        for own in _groups(entries):
            intact &= _do(own)
        return intact


def _first_cases(tensor: Tensor, cases: int) -> Tensor:
    """A copy of an image's first cases; the tensor itself where the rest is little, or a copy would lie otherwise."""
    if tensor.dim() != 4 or tensor.nbytes * (tensor.shape[0] - cases) < _WORTH * tensor.shape[0]:
        return tensor
    dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor[:cases].clone() if dense else tensor


def _do(entries: Sequence[_Entry]) -> bool:
    """Whether nobody has written into their tensors."""
    works = [work for entry in entries for work in entry.parts.works]
    moments = iter(gpu.moments(works, [entry.tensors[index] for entry in entries for index in entry.parts.which]))
    intact = True
    for entry in entries:
        whole = entry.is_intact
        intact = intact and whole
        for deliver in entry.parts.deliver:
            moment = next(moments)
            deliver(moment if whole else torch.full_like(moment, torch.nan))
    return intact


def together(parts: Sequence[Part]) -> tuple[Part, ...]:
    """A batch norm's gains and biases are one work."""
    found: list[Part] = []
    for part in parts:
        both = _both(found[-1], part) if found else None
        if both is None:
            found.append(part)
        else:
            found[-1] = both
    return tuple(found)


def _both(gains: Part, biases: Part) -> Part | None:
    if not isinstance(gains.work, Norm) or not isinstance(biases.work, Norm) or gains.which[0] != biases.which[0]:
        return None
    work = gpu.joined(gains.work, biases.work)
    return None if work is None else Part(work, gains.which, gains.deliver + biases.deliver)


def _await(entries: Iterable[_Entry]) -> None:
    """Tensors that came on other streams than the present one, of models that use several."""
    for entry in entries:
        device = entry.tensors[0].device
        now = torch.cuda.current_stream(device)
        now.wait_stream(torch.cuda.ExternalStream(entry.stream, device))
        for tensor in entry.tensors:
            tensor.record_stream(now)


def _groups(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    """Entries that are done together."""
    found: list[list[_Entry]] = [[]]
    room = _RESULTS
    for entry in entries:
        results = entry.parts.results
        room -= results
        if room < 0 and found[-1]:
            found.append([])
            room = _RESULTS - results
        found[-1].append(entry)
    return found

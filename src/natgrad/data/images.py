"""Batches of image files: decoded by worker processes, sent to the device while the batch before is trained on."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from natgrad.cores import available_cores
from natgrad.data.base import Damaged, DataError, Place, whole_steps
from natgrad.data.chunks import augmenting_side, upload
from natgrad.data.decoding import Answer, Decoder, Request
from natgrad.data.draws import rank_order
from natgrad.data.pixels import Scale, finished, mirrored
from natgrad.errors import NatgradWarning
from natgrad.recipes.schema import DataOptions

SCALE = Scale(mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))
"""Of ImageNet, as every pretrained network has it."""

PART = 32
"""Images that a worker decodes at a time: all workers share a batch, so that the first does not take long."""

AHEAD = 3
"""Batches decoded ahead, at least."""

RETRIES = 3
"""How often in an epoch workers that were lost are replaced."""

_CUT_OFF = (ConnectionError, EOFError)  # a worker died between its answer and the memory that it is in


def default_workers() -> int:
    """The cores that this process may use, shared among the ranks of this machine, less one for training itself."""
    return min(16, max(1, available_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) - 1))


def files_side(options: DataOptions, place: Place) -> torch.device:
    """Where decoded images are mirrored: measured, where that is open."""
    images = torch.zeros(64, options.size, options.size, 3, dtype=torch.uint8, device="cpu")
    flips = torch.ones(64, dtype=torch.bool, device="cpu")
    return augmenting_side(options, place.device, lambda side: _inputs([images], flips, SCALE, place, side))


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A batch on its way to the device; `there` is when it has arrived, where copies go beside training."""

    inputs: Tensor
    targets: Tensor
    there: torch.cuda.Event | None


class _Plan:
    """What to decode next. The loader asks it anew in every epoch, so that its workers live on."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class ImageFiles:
    """A split of image files. `where` says which side mirrors them, ``"cpu"`` or ``"device"``."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        options: DataOptions,
        seed: int,
        place: Place,
        side: torch.device,
        damaged: Damaged,
        reconstruct: bool,
    ) -> None:
        self.cases = len(decoder)
        self.where = "cpu" if side.type == "cpu" else "device"
        self.workers = default_workers() if options.workers is None else options.workers
        self._decoder, self._flip, self._seed, self._place, self._side = decoder, options.flip, seed, place, side
        self._scale = SCALE.plain() if reconstruct else SCALE
        self._reconstruct, self._damaged = reconstruct, damaged
        self._plan = _Plan()
        self._loader: DataLoader[Answer] | None = None
        self._stream = torch.cuda.Stream(place.device) if place.device.type == "cuda" else None
        self._turn = 0
        # Of which epoch and batch size the workers have begun to decode, after a whole epoch has been served.
        self._begun: tuple[int, int, Iterator[Answer]] | None = None

    def steps(self, batch: int) -> int:
        """Whole steps of an epoch."""
        return whole_steps(self.cases, batch=batch, ranks=self._place.ranks)

    def epoch(self, number: int, *, batch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's training batches from step `start` on. What is left of an epoch before it is dropped."""
        order = self._order(number, batch, start)
        return self._batches(number, order.unbind(), batch, first=start == 0)

    def _order(self, number: int, batch: int, start: int = 0) -> Tensor:
        return rank_order(self.cases, seed=self._seed, epoch=number, batch=batch, start=start, place=self._place)

    def once(self, *, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's cases, in order and from the centre, without those that are damaged."""
        mine = torch.arange(self.cases, device="cpu")[self._place.rank :: self._place.ranks]
        served = False
        for both in self._batches(None, mine.split(batch) if len(mine) else (), batch):
            served = True
            yield both
        # a share of damaged files alone is an empty one, as long as another rank has something
        if not served and len(mine) and not any(map(self._decoder.readable, range(self.cases))):
            raise DataError(f"none of the {self.cases:,} images can be read: they are all damaged")

    def close(self) -> None:
        """Ends the workers. Harmless twice; the next epoch starts new ones."""
        self._turn += 1
        self._end_workers()

    def _end_workers(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        self._loader = self._begun = None
        if iterator is not None:
            iterator._shutdown_workers()  # what its finaliser does, but now

    def _batches(
        self, epoch: int | None, rows: tuple[Tensor, ...], batch: int, *, first: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self._turn += 1
        turn = self._turn
        waiting: deque[_Sent] = deque()
        for answers in self._answers(epoch, rows, batch, first=first):
            if any(len(labels) for _, labels, *_ in answers):
                waiting.append(self._send(answers, flip=self._flip and epoch is not None))
            while len(waiting) > (self._stream is not None):
                yield self._arrived(waiting.popleft())
                self._check(turn)
        while waiting:
            yield self._arrived(waiting.popleft())
            self._check(turn)

    def _check(self, turn: int) -> None:
        """Two epochs at a time would get each other's batches."""
        if self._turn != turn:
            raise RuntimeError("this epoch was left: another one of the same split was begun, or the split was closed")

    def _answers(
        self, epoch: int | None, rows: tuple[Tensor, ...], batch: int, *, first: bool
    ) -> Iterator[list[Answer]]:
        """The parts of each batch, as workers decode them. At the end of a training epoch they go on with the next
        one, which then begins without a wait.
        """
        begun, self._begun = self._begun, None
        served = lost = 0
        parts = begun[2] if begun is not None and first and begun[:2] == (epoch, batch) else None
        while True:
            try:
                if parts is None:
                    parts = self._decoding(epoch, rows[served:], batch)
                for row in rows[served:]:
                    answers = [self._checked(next(parts)) for _ in row.split(PART)]
                    served += 1
                    yield answers
                break
            except (RuntimeError, *_CUT_OFF) as error:
                if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                    raise
                lost += 1
                self._end_workers()
                parts = None
                self._tell_of_loss(error, again=lost <= RETRIES)
        if epoch is not None:
            self._begun = (epoch + 1, batch, parts)

    def _tell_of_loss(self, error: Exception, *, again: bool) -> None:
        """What a batch is made of does not depend on who decodes it: a process that is lost costs a few seconds."""
        what = (
            str(error).splitlines()[0] if isinstance(error, RuntimeError) else f"DataLoader worker is gone: {error!r}"
        )
        text = (
            f"a process that decodes images ended: {what} "
            "(out of memory? try fewer data.workers, or give the machine more shared memory, /dev/shm)"
        )
        if not again:
            raise DataError(text) from error
        warnings.warn(f"{text}; others have taken its place", NatgradWarning, stacklevel=2)

    def _decoding(self, epoch: int | None, rows: tuple[Tensor, ...], batch: int) -> Iterator[Answer]:
        self._plan.requests = self._requests(epoch, rows, batch)
        if self._loader is not None:
            return iter(self._loader)
        self._loader = self._started(batch)
        # torch's handler would raise in the middle of anything when a worker dies; without it, the next batch does.
        here = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD) if here else None
        try:
            return iter(self._loader)
        finally:
            if here and handler is not None:
                signal.signal(signal.SIGCHLD, handler)

    def _requests(self, epoch: int | None, rows: tuple[Tensor, ...], batch: int) -> Iterator[Request]:
        """This epoch's, and for training those of all that follow."""
        yield from ((epoch, part.tolist()) for row in rows for part in row.split(PART))
        for number in itertools.count(epoch + 1) if epoch is not None else ():
            yield from ((number, part.tolist()) for row in self._order(number, batch) for part in row.split(PART))

    def _started(self, batch: int) -> DataLoader[Answer]:
        many: dict[str, Any] = {}
        if self.workers:
            parts = AHEAD * -(-batch // PART)
            many = {"prefetch_factor": max(2, -(-parts // self.workers)), "persistent_workers": True}
        return DataLoader(
            self._decoder,
            sampler=self._plan,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            worker_init_fn=_patient,
            pin_memory=self._stream is not None,
            generator=torch.Generator(device="cpu"),  # or it would draw from the global one
            **many,
        )

    def _checked(self, answer: Answer) -> Answer:
        *_, damaged, failure = answer
        if failure is not None:
            raise DataError(failure)
        for text in damaged:
            self._damaged.add(text)
        return answer

    def _send(self, answers: list[Answer], *, flip: bool) -> _Sent:
        if self._stream is None:
            return self._sent(answers, flip)
        with torch.cuda.stream(self._stream):
            return self._sent(answers, flip)

    def _sent(self, answers: list[Answer], flip: bool) -> _Sent:
        labels = torch.tensor([label for _, some, *_ in answers for label in some], device="cpu")
        flips = torch.tensor([one for _, _, some, *_ in answers for one in some], device="cpu") if flip else None
        inputs = _inputs([images for images, *_ in answers], flips, self._scale, self._place, self._side)
        targets = inputs.flatten(1).clone() if self._reconstruct else upload(labels, self._place.device)
        there = None if self._stream is None else self._stream.record_event()
        return _Sent(inputs=inputs, targets=targets, there=there)

    def _arrived(self, sent: _Sent) -> tuple[Tensor, Tensor]:
        if sent.there is not None:
            stream = torch.cuda.current_stream(self._place.device)
            stream.wait_event(sent.there)
            sent.inputs.record_stream(stream)
            sent.targets.record_stream(stream)
        return sent.inputs, sent.targets


def _inputs(parts: list[Tensor], flips: Tensor | None, scale: Scale, place: Place, side: torch.device) -> Tensor:
    """From decoded parts (n, height, width, 3) to what a model gets. Mirrored on the side, the rest on the device."""
    images = torch.cat([upload(part, side) for part in parts]).permute(0, 3, 1, 2)
    return finished(images if flips is None else mirrored(images, upload(flips, side)), scale, place)


def _as_it_is(answer: Any) -> Any:
    return answer


def _patient(worker: int) -> None:
    """Workers outlive the signals that are sent to a whole job: the main process decides, and then ends them."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _next_time)


def _next_time(number: int, frame: FrameType | None) -> None:
    """A second SIGTERM ends a worker, so that none can stay for good."""
    signal.signal(number, signal.SIG_DFL)

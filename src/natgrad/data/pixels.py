"""Images that are held in memory as bytes: shifted, mirrored and normalised on the way out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from natgrad.data.base import Place, whole_steps
from natgrad.data.chunks import augmenting_side, in_chunks, upload
from natgrad.data.draws import SHIFT, generator, rank_order
from natgrad.recipes.schema import DataOptions


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From bytes to floats: ``(byte / largest - mean) / deviation``, per channel; without means, into [0, 1]."""

    largest: int = 255
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def plain(self) -> Scale:
        """The same into [0, 1], for targets."""
        return Scale(largest=self.largest)

    def __call__(self, images: Tensor) -> Tensor:
        """Floats of images (cases, channels, height, width), in their memory format.

        Subtraction and product are two kernels, which round alike on every device; a fused one would not.
        """
        values = images.float()
        if not self.mean:
            return values.mul_(1 / self.largest)
        shift, factor = _constants(self, values.device)
        return values.sub_(shift).mul_(factor)


@cache
def _constants(scale: Scale, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shift and factor of each channel, kept on the device, since to copy them every time would wait for it."""
    shift = [scale.largest * mean for mean in scale.mean]
    factor = [1 / (scale.largest * deviation) for deviation in scale.deviation]
    both = torch.tensor([shift, factor], dtype=torch.float32, device="cpu").to(device)[..., None, None]
    return both[0], both[1]


def mirrored(images: Tensor, flips: Tensor) -> Tensor:
    """Those with a flip mirrored left to right; images are (cases, channels, height, width)."""
    return torch.where(flips[:, None, None, None], images.flip(-1), images)


def finished(images: Tensor, scale: Scale, place: Place) -> Tensor:
    """The last stage: on the device, laid out as the model wants it, in floats. Bytes are what is sent and laid out."""
    layout = torch.channels_last if place.channels_last else torch.contiguous_format
    return scale(upload(images, place.device).contiguous(memory_format=layout))


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """Padded bytes, flat, from which an image is any rows of `width` bytes.

    Rows that overlap are one view, so that one index operation cuts all images, and copies whole rows at that.
    """

    flat: Tensor
    shape: tuple[int, int, int]
    pad: int

    @classmethod
    def of(cls, images: Tensor, *, pad: int) -> Shifted:
        """Pads images (cases, channels, height, width) with zeros."""
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad)) if pad else images.contiguous()
        channels, height, width = images.shape[1:]
        return cls(flat=padded.flatten(), shape=(channels, height, width), pad=pad)

    def to(self, device: torch.device) -> Shifted:
        """The same on another device."""
        return Shifted(flat=self.flat.to(device), shape=self.shape, pad=self.pad)

    def starts(self, cases: Tensor, down: Tensor | int, right: Tensor | int) -> Tensor:
        """Where the images of these cases begin, when they are cut so far from the padded corner."""
        channels, height, width = self.shape
        row = width + 2 * self.pad
        return cases * (channels * (height + 2 * self.pad) * row) + down * row + right

    def cut(self, starts: Tensor) -> Tensor:
        """The images that begin there, (cases, channels, height, width)."""
        channels, height, width = self.shape
        row, device = width + 2 * self.pad, self.flat.device
        planes = torch.arange(channels, device=device)[:, None] * ((height + 2 * self.pad) * row)
        lines = torch.arange(height, device=device) * row
        rows = self.flat.as_strided((self.flat.numel() - width + 1, width), (1, 1))
        return rows[starts[:, None, None] + (planes + lines)]


def made(held: Shifted, starts: Tensor, flips: Tensor | None, scale: Scale, place: Place) -> Tensor:
    """Inputs of a model: cut and mirrored where the bytes are held, normalised on the device."""
    images = held.cut(starts)
    return finished(images if flips is None else mirrored(images, flips), scale, place)


def memory_side(images: Tensor, options: DataOptions, scale: Scale, place: Place) -> torch.device:
    """Where to hold training images, and so to cut and mirror them: measured on some of them, where that is open."""
    sample = Shifted.of(images[:1024], pad=options.pad)
    starts = sample.starts(torch.arange(len(images[:1024]), device="cpu"), 0, 0)
    flips = torch.ones(len(starts), dtype=torch.bool, device="cpu")
    held = {side: sample.to(side) for side in {torch.device("cpu"), place.device}}

    def make(side: torch.device) -> Tensor:
        return made(held[side], upload(starts, side), upload(flips, side), scale, place)

    return augmenting_side(options, place.device, make)


class MemoryImages:
    """A split of images in memory, as bytes on `side`. `where` calls that ``"cpu"`` or ``"device"``.

    There may be fewer images than labels: they are then used again in turn, which made-up data does.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        scale: Scale,
        seed: int,
        place: Place,
        side: torch.device,
        reconstruct: bool = False,
        pad: int = 0,
        flip: bool = False,
    ) -> None:
        self.cases = len(labels)
        self.where = "cpu" if side.type == "cpu" else "device"
        self._images = len(images)
        self._labels = labels.long()
        self._scale = scale.plain() if reconstruct else scale
        self._seed, self._place, self._side = seed, place, side
        self._reconstruct, self._flip = reconstruct, flip
        self._held = Shifted.of(images, pad=pad).to(side)

    def steps(self, batch: int) -> int:
        """Whole steps of an epoch."""
        return whole_steps(self.cases, batch=batch, ranks=self._place.ranks)

    def epoch(self, number: int, *, batch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's training batches from step `start` on."""
        order = rank_order(
            self.cases, seed=self._seed, epoch=number, batch=batch, start=start, place=self._place
        ).flatten()
        random = generator(self._seed, SHIFT, number)  # drawn by case, not by position: ranks do not change them
        shifts = torch.randint(2 * self._held.pad + 1, (2, self.cases), generator=random, device="cpu")[:, order]
        flips = torch.rand(self.cases, generator=random, device="cpu")[order] < 0.5 if self._flip else None
        return self._batches(order, self._held.starts(order % self._images, *shifts), flips, batch)

    def once(self, *, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's cases, in order and as they are."""
        mine = torch.arange(self.cases, device="cpu")[self._place.rank :: self._place.ranks]
        pad = self._held.pad
        return self._batches(mine, self._held.starts(mine % self._images, pad, pad), None, batch)

    def close(self) -> None:
        """Nothing to end."""

    def _batches(
        self, cases: Tensor, corners: Tensor, mirror: Tensor | None, batch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._place.device
        starts, flips = upload(corners, self._side), None if mirror is None else upload(mirror, self._side)
        labels = upload(self._labels[cases], device)

        def make(part: slice) -> tuple[Tensor, Tensor]:
            inputs = made(self._held, starts[part], None if flips is None else flips[part], self._scale, self._place)
            # a copy, so that a loop may add noise to the inputs in place
            return inputs, inputs.flatten(1).clone() if self._reconstruct else labels[part]

        size = 4 * math.prod(self._held.shape)
        return in_chunks(make, cases=len(cases), batch=batch, case_bytes=size, device=device)

"""A text file, a character a token, cut into windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from natgrad.data.base import DataError, MissingData, Notes, Place, whole_steps
from natgrad.data.chunks import in_chunks, upload
from natgrad.data.draws import SHIFT, generator, rank_order


def read(path: Path, notes: Notes) -> tuple[Tensor, tuple[str, ...]]:
    """Tokens in the smallest type that holds them, and the characters they stand for, sorted."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise MissingData(
            f"there is no text at {path}: put a UTF-8 file there, or name another: data.path=..."
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{path} cannot be read: {reason or error}") from error
    text = _decoded(content, path, notes)
    if not text:
        raise DataError(f"{path} is empty")
    characters = tuple(sorted(set(text)))
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    table = torch.zeros(ord(characters[-1]) + 1, dtype=smallest(len(characters)), device="cpu")
    table[[ord(one) for one in characters]] = torch.arange(len(characters), dtype=table.dtype, device="cpu")
    return table[codes], characters


def split(tokens: Tensor, *, test_part: float, context: int, path: Path) -> tuple[Tensor, Tensor]:
    """The first part for training and the last for testing; each must have a window."""
    training = round(len(tokens) * (1 - test_part))
    parts = tokens[:training], tokens[training:]
    for name, part, change in zip(("training", "test"), parts, ("smaller", "larger"), strict=True):
        if len(part) <= context:
            raise DataError(
                f"the {name} part of {path} has {len(part):,} characters, and one case takes {context + 1:,}: "
                f"choose a smaller data.context, a {change} data.test_part, or a longer text"
            )
    return parts


class Windows:
    """A split of text: windows of `context` characters, each with the characters that follow as its target.

    An epoch tiles the text from a place of its own, so that windows do not always begin at the same characters; the
    number of windows is that of the place that has the fewest.
    """

    where = "device"

    def __init__(self, tokens: Tensor, *, context: int, seed: int, place: Place, training: bool) -> None:
        self.cases = (len(tokens) - 1) // context
        self._offsets = 1
        if training:
            self.cases = max(1, (len(tokens) - context) // context)
            self._offsets = min(context, len(tokens) - self.cases * context)
        self._tokens = tokens.to(place.device)
        self._context, self._seed, self._place = context, seed, place

    def steps(self, batch: int) -> int:
        """Whole steps of an epoch."""
        return whole_steps(self.cases, batch=batch, ranks=self._place.ranks)

    def epoch(self, number: int, *, batch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's training batches from step `start` on."""
        order = rank_order(self.cases, seed=self._seed, epoch=number, batch=batch, start=start, place=self._place)
        random = generator(self._seed, SHIFT, number)
        offset = torch.randint(self._offsets, (1,), generator=random, device="cpu")
        return self._batches(order.flatten() * self._context + offset, batch)

    def once(self, *, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's windows from the beginning, in order; what is left at the end is dropped."""
        mine = torch.arange(self.cases, device="cpu")[self._place.rank :: self._place.ranks]
        return self._batches(mine * self._context, batch)

    def close(self) -> None:
        """Nothing to end."""

    def _batches(self, begin: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        length, starts = self._context + 1, upload(begin, self._place.device)
        windows = self._tokens.as_strided((len(self._tokens) - self._context, length), (1, 1))

        def make(part: slice) -> tuple[Tensor, Tensor]:
            found = windows[starts[part]]
            return found[:, :-1].long().contiguous(), found[:, 1:].long().contiguous()

        return in_chunks(make, cases=len(begin), batch=batch, case_bytes=16 * length, device=self._place.device)


def _decoded(content: bytes, path: Path, notes: Notes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        text = content.decode("utf-8", errors="ignore")
        dropped = len(content) - len(text.encode("utf-8"))
        what = f"byte {error.start:,} (0x{content[error.start]:02x}) is not UTF-8: {error.reason}"
        notes.damage(f"{path}: {what}", skipped=f"{dropped:,} such bytes were dropped")
        return text


def smallest(size: int) -> torch.dtype:
    """The type for so many different tokens."""
    return next(kind for kind in (torch.uint8, torch.int16, torch.int32) if size - 1 <= torch.iinfo(kind).max)

"""What every reader gives, and how it says what is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class DataError(Exception):
    """Data is missing, damaged or does not fit the options. The message is for people."""


class MissingData(DataError):  # noqa: N818
    """There is nothing where the data should be."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where batches go: the device, and which of how many ranks this is."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    channels_last: bool = False


class Split(Protocol):
    """Training or test cases."""

    @property
    def cases(self) -> int:
        """How many there are, on all ranks together."""

    def steps(self, batch: int) -> int:
        """Whole steps of an epoch, with `batch` cases a rank; what is left over is left out this time."""

    def epoch(self, number: int, *, batch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """For training: this rank's batches of an epoch from step `start` on, shuffled and augmented, on the device."""

    def once(self, *, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For evaluation: this rank's cases ``rank::ranks`` once, in order, as they are; the last batch is smaller."""

    def close(self) -> None:
        """Ends worker processes. Harmless twice."""


class Damaged:
    """Files that were skipped while reading, each told once however often it is met."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._untold: list[str] = []

    def add(self, text: str) -> None:
        """Remembers a file and what is wrong with it."""
        if text not in self._known:
            self._known.add(text)
            self._untold.append(text)

    def take(self) -> list[str]:
        """Those that were not taken yet."""
        taken, self._untold = self._untold, []
        return taken


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and test cases, and what a model and a person must know about them.

    `classes` is the vocabulary size for text, `labels` names the classes or characters, `shape` is that of one input,
    `notes` says what was skipped while loading.
    """

    train: Split
    test: Split
    classes: int | None
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    description: str
    notes: tuple[str, ...] = ()
    damaged: Damaged = field(default_factory=Damaged, repr=False)

    def close(self) -> None:
        """Ends worker processes. Harmless twice."""
        self.train.close()
        self.test.close()

    def damaged_seen(self) -> list[str]:
        """Files found damaged, and skipped, since the last call; each is told once."""
        return self.damaged.take()


class Notes:
    """What to do about damage: refuse with the first, or go on and remember each."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.taken: list[str] = []

    def damage(self, text: str, *, skipped: str, mend: str = "mend or remove it") -> None:
        """Something is wrong with a file; `skipped` says what is left out when one goes on, `mend` what else helps."""
        if not self.skip:
            raise DataError(f'{text}; {mend}, or go on without it: data.damaged="skip"')
        self.taken.append(f"{text}; {skipped}")


def whole_steps(cases: int, *, batch: int, ranks: int) -> int:
    """Steps that have all their cases; an epoch without one is an error, since nothing would be trained."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    steps = cases // (batch * ranks)
    if not steps:
        needed = f"{batch:,}" if ranks == 1 else f"{batch:,} × {ranks} ranks = {batch * ranks:,}"
        change = f"choose training.batch={cases // ranks} or less" if cases >= ranks else "use fewer ranks"
        raise DataError(f"there are {cases:,} cases, and one step takes {needed}: {change}")
    return steps


def absolute(path: str) -> Path:
    """As it is shown to people, who may not know the folder that a relative path is looked up in."""
    return Path(path).expanduser().absolute()


def needed(module: str, *, why: str) -> Any:
    """Imports what only data needs, so that the library does without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise DataError(f'{why} needs {name}: pip install "natgrad[cli]" ({error})') from error

"""Checkpoints of a run: written whole or not at all, checked when read, the last few and the best kept.

A file is what `torch.save` writes, followed by one line with the CRC of it all: `torch.load` does not look at the
checksums in its format, and would return flipped bits as weights. It ignores the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from natgrad.report import memory

from .files import link_atomically, remove_leftovers, write_atomically

FORMAT = "natgrad checkpoint"
VERSION = 1
BEST = "best.pt"

_NAME = re.compile(r"step-(\d{8,})\.pt")
_LAST_LINE = b"\nnatgrad crc32 %08x\n"
_LAST_LINE_READ = re.compile(rb"\nnatgrad crc32 ([0-9a-f]{8})\n")
_LAST_LINE_SIZE = len(_LAST_LINE % 0)
_CHUNK = 1 << 20


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the text is for the person at the terminal."""


class NewerCheckpointError(CheckpointError):
    """Whole, but from a natgrad that is newer than this one: falling back to an older file would lose work."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that was read. `damaged` says which newer ones could not be, and why."""

    state: dict[str, Any]
    path: Path
    step: int
    damaged: list[str] = dataclasses.field(default_factory=list)


class Checkpoints:
    """The checkpoints in a folder. Every rank may read; only one may `save` and `mark_best`."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1, got {keep!r}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, state: Mapping[str, Any], *, step: int) -> Path:
        """Writes the state, and when it is safe on disk deletes all but the last `keep` up to this step.

        Checkpoints of later steps are left alone: they are there when the run went back to an earlier one because
        they could not be read, and go when it has come past them.
        """
        path = self.folder / f"step-{step:08d}.pt"
        contents = {"format": FORMAT, "version": VERSION, "step": step, "state": dict(state)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)  # before writing: they may be what fills the disk
            write_atomically(path, lambda file: _write(contents, file))
        except OSError as error:
            raise CheckpointError(self._why_not_written(path, error, contents)) from error
        for old in [one for one in self.paths() if _step(one) <= step][: -self.keep]:
            with contextlib.suppress(OSError):  # the new one is safe, and the next save tries again
                old.unlink()
        return path

    def mark_best(self, path: Path) -> None:
        """Makes best.pt the same file as the checkpoint at `path`, so that it outlives its step."""
        best = self.folder / BEST
        try:
            link_atomically(path, best)
        except OSError as error:
            raise CheckpointError(f"could not make {best} from {path.name}: {_reason(error)}. {_free(best)}") from error

    def latest(self, *, map_location: torch.device | str = "cpu") -> Loaded | None:
        """The newest checkpoint that can be read, best.pt if no other can, or None if there are none at all."""
        damaged: list[str] = []
        best = self.folder / BEST
        for path in [*reversed(self.paths()), *([best] if os.path.lexists(best) else [])]:
            found = _loaded_or_why_not(path, map_location)
            if isinstance(found, Loaded):
                return dataclasses.replace(found, damaged=damaged)
            damaged.append(found)
        if damaged:
            raise CheckpointError(
                "no checkpoint can be read:\n"
                + "".join(f"  {text}\n" for text in damaged)
                + "Put back a copy of one of them, or start again in another folder (--out)."
            )
        return None

    def paths(self) -> list[Path]:
        """The files by step, the newest last; without best.pt and whatever is unfinished."""
        try:
            return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"cannot look for checkpoints in {self.folder}: {_reason(error)}") from error

    def _why_not_written(self, path: Path, error: OSError, contents: Any) -> str:
        try:
            earlier = [one.name for one in self.paths() if _step(one) <= _step(path)]
            before = f"The previous checkpoint {earlier[-1]} is intact." if earlier else "There is no earlier one."
        except CheckpointError as hidden:
            before = f"Earlier ones were not touched ({hidden})."
        return (
            f"could not write the checkpoint {path}: {_reason(error)}. It needs about {memory(_bytes(contents))}; "
            f"{_free(path)} {before} Make room (or look at permissions and quota), then resume."
        )


def load(path: Path, *, map_location: torch.device | str = "cpu") -> Loaded:
    """Reads one checkpoint, wherever it is, or says why it cannot be: missing, damaged, foreign, too new."""
    path = Path(path)
    try:
        _check(path)
        contents = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    except pickle.UnpicklingError as error:  # whole, and yet not to be unpickled
        raise CheckpointError(f"{path} cannot be read with torch {torch.__version__}: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a natgrad checkpoint")
    if contents["version"] > VERSION:
        raise NewerCheckpointError(
            f"{path} has version {contents['version']} of the format, and this natgrad knows up to {VERSION}: "
            "use the natgrad that wrote it, or a newer one"
        )
    return Loaded(state=contents["state"], path=path, step=contents["step"])


def weights(path: Path | str, *, map_location: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The weights that were evaluated, for ``model.load_state_dict``: with Polyak averaging, their average."""
    state = load(Path(path), map_location=map_location).state
    found: dict[str, torch.Tensor] = state["model"] if state["average"] is None else state["average"]["average"]
    return found


def _loaded_or_why_not(path: Path, map_location: torch.device | str) -> Loaded | str:
    try:
        return load(path, map_location=map_location)
    except NewerCheckpointError:
        raise
    except CheckpointError as error:
        return str(error)


class _Stream:
    """What `torch.save` writes to. It takes the CRC of what passes, and keeps the first failure for later.

    torch's writer is C++ that completes its archive while an exception is under way. One from `write` comes out as
    another one (RuntimeError: unexpected pos), or not at all where a destructor meets it; so `write` raises nothing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0
        self.failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            if self.failure is None:
                self._file.write(data)
                self.crc = zlib.crc32(data, self.crc)
        except BaseException as failure:  # also KeyboardInterrupt
            self.failure = failure
        return memoryview(data).nbytes

    def flush(self) -> None:
        """torch calls it at the end; `write_atomically` flushes anyway."""


def _write(contents: dict[str, Any], file: BinaryIO) -> None:
    stream = _Stream(file)
    torch.save(contents, cast("IO[bytes]", stream))
    if stream.failure is not None:
        raise stream.failure
    file.flush()
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
        raise TypeError(
            f"a checkpoint with {', '.join(sorted(unsafe))} could be written but not read back (weights_only); "
            "keep to tensors, numbers, texts, lists and dicts"
        )
    file.write(_LAST_LINE % stream.crc)


def _check(path: Path) -> None:
    """Reads the whole file and compares its CRC with the last line."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            raise CheckpointError(f"{path} is empty")
        file.seek(max(0, size - _LAST_LINE_SIZE))
        last = _LAST_LINE_READ.fullmatch(file.read())
        if last is None:
            raise CheckpointError(f"{path} does not end as natgrad's checkpoints do: cut off, or of another program")
        file.seek(0)
        crc, left = 0, size - _LAST_LINE_SIZE
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise CheckpointError(f"{path} became shorter while it was read")
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    if crc != int(last[1], 16):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _bytes(contents: Any) -> int:
    """What the tensors take, each storage once."""
    storages = {(one.device, one.data_ptr()): one.nbytes() for one in _storages(contents)}
    return sum(storages.values())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(NotImplementedError):  # sparse ones have none of their own
            yield value.untyped_storage()
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _storages(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _storages(one)


def _free(path: Path) -> str:
    folder = next(one for one in path.absolute().parents if os.path.isdir(one))
    try:
        return f"{memory(shutil.disk_usage(folder).free)} are free on its disk."
    except OSError:
        return "how much is free on its disk cannot be found out."


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

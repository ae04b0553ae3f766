"""CIFAR-10 from the files that its authors publish, the python or the binary version."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.data.base import DataError, MissingData, Notes, needed

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORDS = 10_000
"""Of each official file."""

_PIXELS = 3 * 32 * 32
_TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_VERSIONS = {"": "cifar-10-batches-py", ".bin": "cifar-10-batches-bin"}  # a file's ending, the usual subfolder


def read(folder: Path, notes: Notes) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (n, 3, 32, 32) as bytes and labels, of training and test. Damage is refused or noted."""
    found, ending = _where(folder)
    there = [name for name in _TRAINING if (found / (name + ending)).exists()]
    missing = [name + ending for name in _TRAINING if name not in there]
    if missing:
        which = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in {found}"
        notes.damage(which, skipped="trained without", mend="get CIFAR-10 anew")
    training = [_file(found / (name + ending), notes) for name in there]
    images, labels = (torch.cat(parts) for parts in zip(*training, strict=True))
    test = _file(found / (_TEST + ending), notes)
    for name, kept in (("training", labels), ("test", test[1])):
        if not len(kept):
            raise DataError(f"no {name} record of CIFAR-10 in {found} can be used: {'; '.join(notes.taken)}")
    return (images, labels), test


def _where(folder: Path) -> tuple[Path, str]:
    """The folder that has the batches, and how their names end."""
    candidates = [(place, end) for end, usual in _VERSIONS.items() for place in (folder, folder / usual)]
    for place, end in candidates:
        if any((place / (name + end)).exists() for name in _TRAINING) and (place / (_TEST + end)).exists():
            return place, end
    for place, end in candidates:
        for names, what in (((_TEST,), "training batches"), (_TRAINING, _TEST + end)):
            if any((place / (name + end)).exists() for name in names):
                raise MissingData(f"CIFAR-10 in {place} has no {what}: unpack all of the archive there")
    packed = next(iter(sorted(folder.glob("cifar-10-*.tar*"))), None) if folder.is_dir() else None
    if packed is not None:
        raise MissingData(f"CIFAR-10 is still packed: tar -xf {packed} -C {folder}")
    raise MissingData(
        f"there is no CIFAR-10 in {folder}: get the python or the binary version from "
        "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there, "
        "or say where it is with data.path=..."
    )


def _file(path: Path, notes: Notes) -> tuple[Tensor, Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        notes.damage(f"{path}: {error.strerror or error}", skipped="the file is left out")
        return _nothing()
    images, labels = _binary(content, path, notes) if path.suffix else _pickled(content, path, notes)
    wrong = ((labels < 0) | (labels > 9)).nonzero().flatten()
    if len(wrong):
        first = f"record {int(wrong[0])} has the label {int(labels[wrong[0]])}, which is not one of 0 to 9"
        also = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
        notes.damage(f"{path}: {first}{also}", skipped=f"{len(wrong):,} left out")
        kept = (labels >= 0) & (labels <= 9)
        images, labels = images[kept], labels[kept]
    elif len(labels) not in (0, RECORDS):
        notes.taken.append(f"{path}: {len(labels):,} records, where CIFAR-10 has {RECORDS:,}")
    return images, labels


def _binary(content: bytes, path: Path, notes: Notes) -> tuple[Tensor, Tensor]:
    """A byte of label and 3,072 of pixels a record."""
    records, rest = divmod(len(content), 1 + _PIXELS)
    if rest or not records:
        size = f"{len(content):,} bytes, which is not a whole number of records of {1 + _PIXELS:,} bytes"
        notes.damage(f"{path}: {size if rest else 'empty'}", skipped=f"its {records:,} whole records are used")
    if not records:
        return _nothing()
    table = torch.frombuffer(bytearray(content), dtype=torch.uint8)[: records * (1 + _PIXELS)].view(records, -1)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def _pickled(content: bytes, path: Path, notes: Notes) -> tuple[Tensor, Tensor]:
    """A dictionary with ``data``, bytes (n, 3072), and ``labels``, a list."""
    try:
        return _entries(content)
    except DataError as error:
        if error.__cause__ is not None:  # numpy is missing, which is not the file's fault
            raise
        reason = str(error)
    except Exception as error:  # an unpickler may raise anything
        reason = f"cannot be unpickled ({type(error).__name__}: {error})"
    notes.damage(f"{path}: {reason}", skipped="the file is left out")
    return _nothing()


def _entries(content: bytes) -> tuple[Tensor, Tensor]:
    numpy = needed("numpy", why="the python version of CIFAR-10")
    found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise DataError(f"not a batch of CIFAR-10, but a {type(found).__name__}")
    entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
    data, labels = entries.get("data"), entries.get("labels")
    if not isinstance(data, numpy.ndarray) or not isinstance(labels, list):
        raise DataError("not a batch of CIFAR-10: it lacks the array 'data' or the list 'labels'")
    if data.dtype != numpy.uint8 or data.shape != (len(labels), _PIXELS):
        raise DataError(f"data is {data.dtype} {data.shape}, not uint8 {(len(labels), _PIXELS)} as its labels need")
    return torch.from_numpy(data.copy()).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.long, device="cpu")


class _Unpickler(pickle.Unpickler):
    """Makes arrays and nothing else: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """What the official files ask for, by the names of old and new numpy."""
        import numpy

        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(numpy, name)
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
            return numpy.ndarray.__reduce__(numpy.empty(0))[0]  # where it lives depends on the version
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in old protocols
            return _latin1
        raise DataError(f"asks for {module}.{name}, which a batch of CIFAR-10 does not need; it was not run")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _nothing() -> tuple[Tensor, Tensor]:
    images = torch.empty(0, 3, 32, 32, dtype=torch.uint8, device="cpu")
    return images, torch.empty(0, dtype=torch.long, device="cpu")

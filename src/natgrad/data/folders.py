"""Which images there are: folders of class folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from natgrad.data.base import DataError, MissingData, Notes

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TEST_FOLDERS = ("val", "validation", "test")
HELD_BACK = 10
"""One in so many images of a class is for testing, where there is no folder of tests."""


class Files:
    """Paths and labels of images, packed into tensors.

    A million strings would be copied into every worker process, page by page, as their reference counts change.
    """

    def __init__(self, folders: tuple[str, ...], names: list[list[bytes]], labels: list[int]) -> None:
        self._folders = folders
        flat = [name for group in names for name in group]
        counts = torch.tensor([len(group) for group in names], dtype=torch.long, device="cpu")
        self._packed = torch.frombuffer(bytearray(b"".join(flat) or b"\0"), dtype=torch.uint8)
        self._ends = torch.tensor([0, *map(len, flat)], dtype=torch.long, device="cpu").cumsum(0)
        self._groups = torch.arange(len(names), device="cpu").repeat_interleave(counts)
        self.labels = torch.tensor(labels, dtype=torch.long, device="cpu").repeat_interleave(counts)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, case: int) -> str:
        """Where a case is."""
        begin, end = self._ends[case : case + 2].tolist()
        name = os.fsdecode(bytes(self._packed[begin:end].tolist()))
        return os.path.join(self._folders[int(self._groups[case])], name)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Files of both splits, and the classes that labels count. `held_back`: the tests were taken from the images."""

    train: Files
    test: Files
    classes: tuple[str, ...]
    held_back: bool


def find(root: Path, notes: Notes) -> Found:
    """Looks for ``train`` and ``val`` (or ``test``), or for class folders right here."""
    if not root.is_dir():
        raise MissingData(
            f"there is no folder {root}: put train/<class>/*.jpg and val/<class>/*.jpg into it, "
            "or a folder of images for each class, or say where they are with data.path=..."
        )
    try:
        return _separate(root, notes) if (root / "train").is_dir() else _together(root, notes)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be listed: {error.strerror or error}") from error


def _separate(root: Path, notes: Notes) -> Found:
    tests = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if tests is None:
        raise MissingData(f"{root} has the folder train, and none of {', '.join(TEST_FOLDERS)} to test with")
    training = _classes(root / "train", notes)
    classes = tuple(sorted(training))
    testing = _classes(tests, notes)
    for name in sorted(set(testing) - set(training)):
        what = f"{tests / name}: a class that {root / 'train'} has no images of"
        notes.damage(what, skipped=f"its {len(testing.pop(name)):,} images are left out")
    if not testing:
        raise DataError(f"{tests} has no image of the classes of {root / 'train'}")
    return Found(
        train=_files(root / "train", training, classes),
        test=_files(tests, testing, classes),
        classes=classes,
        held_back=False,
    )


def _together(root: Path, notes: Notes) -> Found:
    found = _classes(root, notes)
    classes = tuple(sorted(found))
    parts = {name: _held_back(names) for name, names in found.items()}
    if not any(test for _, test in parts.values()):
        raise DataError(f"{root} has one image of each class, and none is left to test with; add images")
    return Found(
        train=_files(root, {name: train for name, (train, _) in parts.items()}, classes),
        test=_files(root, {name: test for name, (_, test) in parts.items()}, classes),
        classes=classes,
        held_back=True,
    )


def _classes(folder: Path, notes: Notes) -> dict[str, list[bytes]]:
    """The names of the images in each class folder, sorted."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not _hidden(entry.name) and entry.is_dir())
    if not names:
        raise MissingData(f"{folder} has no folders; each image belongs into a folder that is named as its class")
    found: dict[str, list[bytes]] = {}
    for name in names:
        images = sorted(_images(os.fsencode(folder / name)))
        if images:
            found[name] = images
        else:
            notes.damage(f"{folder / name}: no images in it", skipped="the class is left out here")
    if not found:
        raise DataError(f"no folder in {folder} has an image ({', '.join(ENDINGS)})")
    return found


def _images(folder: bytes, below: bytes = b"") -> Iterator[bytes]:
    """Names of images, relative to the class folder, by their endings alone: to look at each would take minutes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _hidden(os.fsdecode(entry.name)):
                continue
            if entry.is_dir():
                yield from _images(entry.path, below + entry.name + b"/")
            elif entry.name.lower().endswith(_ENDINGS):
                yield below + entry.name


_ENDINGS = tuple(ending.encode() for ending in ENDINGS)


def _hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def _held_back(names: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and test: a fixed tenth, by a hash of the names, so that new images move few of the old ones."""
    if len(names) < 2:
        return names, []
    by_hash = sorted(names, key=lambda name: hashlib.blake2b(name, digest_size=8).digest())
    count = max(1, len(names) // HELD_BACK)
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def _files(root: Path, names: dict[str, list[bytes]], classes: tuple[str, ...]) -> Files:
    used = sorted(names)
    return Files(
        tuple(str(root / name) for name in used),
        [names[name] for name in used],
        [classes.index(name) for name in used],
    )

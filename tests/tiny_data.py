"""Tiny data in the formats of the real ones: CIFAR-10's two versions, an ImageNet folder, a text."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy
from PIL import Image

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
WNIDS = ("n01440764", "n02102040", "n02979186", "n03000684")


def write_cifar10_binary(folder: Path, *, records: int = 8) -> Path:
    """The binary version: a byte of label and 3,072 of pixels a record."""
    inside = folder / "cifar-10-batches-bin"
    inside.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels, labels = _records(number, records)
        table = numpy.concatenate([numpy.array(labels, dtype=numpy.uint8)[:, None], pixels], axis=1)
        (inside / f"{name}.bin").write_bytes(table.tobytes())
    return folder


def write_cifar10_python(folder: Path, *, records: int = 8) -> Path:
    """The python version: pickled dictionaries whose keys are bytes."""
    inside = folder / "cifar-10-batches-py"
    inside.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels, labels = _records(number, records)
        batch = {b"batch_label": name.encode(), b"labels": labels, b"data": pixels, b"filenames": [b"x.png"] * records}
        (inside / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def write_imagenet(folder: Path, *, train: int = 4, val: int = 1) -> Path:
    """``train/<wnid>/*.JPEG`` and ``val/<wnid>/*.JPEG``; the numbers are those of images a class."""
    write_classes(folder / "train", images=train)
    write_classes(folder / "val", images=val)
    return folder


def write_classes(folder: Path, *, images: int = 4) -> Path:
    """A folder of images for each class, of different sizes and proportions."""
    random = numpy.random.default_rng(0)
    for wnid in WNIDS:
        (folder / wnid).mkdir(parents=True)
        for number in range(images):
            height, width = random.integers(40, 90, 2)
            pixels = random.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / wnid / f"{wnid}_{number}.JPEG")
    return folder


def write_text(path: Path, *, characters: int = 4000) -> Path:
    """Words in UTF-8, with line breaks and a letter of two bytes."""
    words = "Speak, speak! You are all resolved rather to die than to famish?\nRésolved. "
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((words * (characters // len(words) + 1))[:characters], encoding="utf-8")
    return path


def _records(seed: int, records: int) -> tuple[numpy.ndarray, list[int]]:
    random = numpy.random.default_rng(seed)
    return random.integers(0, 256, (records, 3072), dtype=numpy.uint8), random.integers(0, 10, records).tolist()

"""From a recipe's options to data."""

from __future__ import annotations

from torch import Tensor

from natgrad.data import cifar10, digits, text
from natgrad.data.base import Damaged, Data, DataError, MissingData, Notes, Place, absolute
from natgrad.data.chunks import in_words
from natgrad.data.decoding import Decoder, pillow
from natgrad.data.folders import HELD_BACK, find
from natgrad.data.images import ImageFiles, files_side
from natgrad.data.pixels import MemoryImages, Scale, memory_side
from natgrad.recipes.schema import DataOptions

DIGITS = Scale(largest=16)
CIFAR10 = Scale(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))


def load(options: DataOptions, *, seed: int, place: Place, reconstruct: bool = False) -> Data:
    """Reads the data that the options name, ready to serve batches.

    With `reconstruct`, for autoencoders, targets are the images themselves, flattened, and both are within [0, 1].
    """
    notes = Notes(skip=options.damaged == "skip")
    if options.kind == "text":
        return _text(options, notes, seed=seed, place=place, reconstruct=reconstruct)
    if options.kind == "images":
        return _images(options, notes, seed=seed, place=place, reconstruct=reconstruct)
    if options.kind == "digits":
        images, labels = digits.read()
        train, test = (
            (images[: digits.TRAINING], labels[: digits.TRAINING]),
            (images[digits.TRAINING :], labels[digits.TRAINING :]),
        )
        name, scale, names = "digits", DIGITS, tuple(map(str, range(10)))
    else:
        train, test = cifar10.read(absolute(options.path or "data/cifar10"), notes)
        name, scale, names = "CIFAR-10", CIFAR10, cifar10.LABELS
    return in_memory(
        name, train, test, options, scale, names, seed=seed, place=place, reconstruct=reconstruct, notes=notes.taken
    )


def in_memory(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    options: DataOptions,
    scale: Scale,
    labels: tuple[str, ...],
    *,
    seed: int,
    place: Place,
    reconstruct: bool,
    notes: list[str] | None = None,
) -> Data:
    """Data of images in memory: training ones are augmented, on the faster side; test ones are on the device."""
    side = memory_side(train[0], options, scale, place)
    channels, height, width = train[0].shape[1:]
    return Data(
        train=MemoryImages(
            *train,
            scale=scale,
            seed=seed,
            place=place,
            side=side,
            reconstruct=reconstruct,
            pad=options.pad,
            flip=options.flip,
        ),
        test=MemoryImages(*test, scale=scale, seed=seed, place=place, side=place.device, reconstruct=reconstruct),
        classes=len(labels),
        labels=labels,
        shape=(channels, height, width),
        description=f"{name}: {len(train[1]):,} training and {len(test[1]):,} test images of {height}×{width}"
        + in_words(side, place.device),
        notes=tuple(notes or ()),
    )


def _images(options: DataOptions, notes: Notes, *, seed: int, place: Place, reconstruct: bool) -> Data:
    pillow()  # before the search, which may take long
    if options.path is None:
        raise MissingData('data.kind="images" needs data.path=..., a folder of train/<class>/ and val/<class>/')
    root = absolute(options.path)
    found = find(root, notes)
    side, damaged, skip = files_side(options, place), Damaged(), options.damaged == "skip"
    train, test = (
        ImageFiles(
            Decoder(files, options=options, seed=seed, skip=skip),
            options=options,
            seed=seed,
            place=place,
            side=side,
            damaged=damaged,
            reconstruct=reconstruct,
        )
        for files in (found.train, found.test)
    )
    apart = f" (one in {HELD_BACK} of each class, held back)" if found.held_back else ""
    return Data(
        train=train,
        test=test,
        classes=len(found.classes),
        labels=found.classes,
        shape=(3, options.size, options.size),
        description=f"{root.name}: {train.cases:,} training and {test.cases:,} test images{apart} of "
        f"{len(found.classes):,} class{'es' if len(found.classes) > 1 else ''} at {options.size}×{options.size}, "
        f"decoded by {train.workers or 'no'} worker{'' if train.workers == 1 else 's'}{in_words(side, place.device)}",
        notes=tuple(notes.taken),
        damaged=damaged,
    )


def _text(options: DataOptions, notes: Notes, *, seed: int, place: Place, reconstruct: bool) -> Data:
    if reconstruct:
        raise DataError('text cannot be reconstructed as pixels are: choose training.loss="cross-entropy"')
    if options.path is None:
        raise MissingData('data.kind="text" needs data.path=..., a UTF-8 file')
    path = absolute(options.path)
    tokens, characters = text.read(path, notes)
    parts = text.split(tokens, test_part=options.test_part, context=options.context, path=path)
    return windows(path.name, parts, options, characters, seed=seed, place=place, notes=notes.taken)


def windows(
    name: str,
    parts: tuple[Tensor, Tensor],
    options: DataOptions,
    characters: tuple[str, ...],
    *,
    seed: int,
    place: Place,
    notes: list[str] | None = None,
) -> Data:
    """Data of text, as tokens for training and for testing."""
    train, test = (
        text.Windows(part, context=options.context, seed=seed, place=place, training=training)
        for part, training in zip(parts, (True, False), strict=True)
    )
    return Data(
        train=train,
        test=test,
        classes=len(characters),
        labels=characters,
        shape=(options.context,),
        description=f"{name}: {len(parts[0]):,} training and {len(parts[1]):,} test characters, "
        f"{len(characters):,} different, in windows of {options.context:,}",
        notes=tuple(notes or ()),
    )

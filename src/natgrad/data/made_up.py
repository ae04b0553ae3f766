"""Random cases that look like the real ones to a model, for where those are not at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.data.base import Data, DataError, Place
from natgrad.data.draws import MADE_UP, generator
from natgrad.data.images import SCALE
from natgrad.data.loading import CIFAR10, DIGITS, in_memory, windows
from natgrad.data.text import smallest
from natgrad.recipes.schema import DataOptions

TRAINING, TEST, IMAGES, TEXTS = 4096, 1024, 64, 1024
"""Cases a rank of training and of testing; so many images, used again in turn; windows of text."""


def synthetic(options: DataOptions, *, seed: int, place: Place, reconstruct: bool = False, classes: int) -> Data:
    """Random data of the shapes, types and scale of the real one. Nothing is read, and nothing can be learned."""
    random = generator(seed, MADE_UP)
    if options.kind == "text":
        if reconstruct:
            raise DataError('text cannot be reconstructed as pixels are: choose training.loss="cross-entropy"')
        lengths = [(count * place.ranks + 1) * options.context + 1 for count in (TEXTS, TEXTS // 4)]
        train, test = (
            torch.randint(classes, (length,), generator=random, dtype=smallest(classes), device="cpu")
            for length in lengths
        )
        characters = tuple(f"character {number}" for number in range(classes))
        return windows("made-up text", (train, test), options, characters, seed=seed, place=place)
    shape, scale = {
        "digits": ((1, 8, 8), DIGITS),
        "cifar10": ((3, 32, 32), CIFAR10),
        "images": ((3, options.size, options.size), SCALE),
    }[options.kind]

    def cases(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(scale.largest + 1, (IMAGES, *shape), generator=random, dtype=torch.uint8, device="cpu")
        return images, torch.randint(classes, (count * place.ranks,), generator=random, device="cpu")

    names = tuple(f"class {number}" for number in range(classes))
    name = f"made-up {options.kind}"
    return in_memory(
        name, cases(TRAINING), cases(TEST), options, scale, names, seed=seed, place=place, reconstruct=reconstruct
    )

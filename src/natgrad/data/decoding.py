"""One image file to bytes of the size that a model gets: the cheapest decoding that gives them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from natgrad.data.base import needed
from natgrad.data.draws import CASE, mixed
from natgrad.data.folders import Files
from natgrad.recipes.schema import DataOptions

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in pixels of the file."""

Request = tuple[int | None, list[int]]
"""The epoch, or None for evaluation, and cases."""

Answer = tuple[Tensor, list[int], list[bool], list[str], str | None]
"""Images (n, size, size, 3) as bytes, labels, flips, damaged files, and why to give up, if so.

One tensor, since each costs a file of shared memory on its way to the main process.
"""

_ADVICE = 'mend or remove it, or go on without it: data.damaged="skip"'
_REDUCING_GAP = 2.0  # large images are first averaged down to twice what is needed


class Decoder(Dataset[Answer]):
    """What worker processes run: cases to images. Failures are part of the answer, since a traceback is for nobody."""

    def __init__(self, files: Files, *, options: DataOptions, seed: int, skip: bool) -> None:
        self._files, self._options, self._seed, self._skip = files, options, seed, skip

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, request: Request) -> Answer:
        """Decodes some cases. With `skip`, a damaged one is replaced by the next in training, else left out."""
        epoch, cases = request
        size, damaged = self._options.size, list[str]()
        images = torch.empty(len(cases), size, size, 3, dtype=torch.uint8, device="cpu")
        labels, flips = list[int](), list[bool]()
        for wanted in cases:
            # in training, any readable case will do, and all ranks and workers must agree on which
            for case in ((wanted + further) % len(self) for further in range(1 if epoch is None else len(self))):
                random = Random(mixed(self._seed, CASE, epoch or 0, case))
                flip = random.random() < 0.5
                try:
                    pixels = self._pixels(case, None if epoch is None else random)
                except Exception as error:  # pillow raises whatever a format's reader stumbles over
                    damaged.append(f"{self._files.path(case)}: {_reason(self._files.path(case), error)}")
                    if not self._skip:
                        return images[:0], [], [], damaged, f"{damaged[-1]}; {_ADVICE}"
                    continue
                images[len(labels)] = pixels
                labels.append(int(self._files.labels[case]))
                flips.append(flip)
                break
            else:
                if epoch is not None:
                    why = f"none of the {len(self):,} images can be read: {damaged[0]}, and so on"
                    return images[:0], [], [], damaged, why
        return images[: len(labels)], labels, flips, damaged, None

    def readable(self, case: int) -> bool:
        """Whether a case can be decoded at all."""
        try:
            self._pixels(case, None)
        except Exception:
            return False
        return True

    def _pixels(self, case: int, random: Random | None) -> Tensor:
        """With a random part where there are random numbers, else the centre."""
        options = self._options

        def choose(width: int, height: int) -> Box:
            if random is None or options.crop == "centre":
                return resized_box(width, height, options, None)
            if options.crop == "random":
                return resized_box(width, height, options, random)
            return random_box(width, height, options.smallest_crop, random)

        return decode(self._files.path(case), options.size, choose)


def decode(path: str, size: int, choose: Callable[[int, int], Box]) -> Tensor:
    """Bytes (size, size, 3) of the part of an image that `choose` picks from its width and height.

    Only the part is scaled, a JPEG is decoded at a fraction of its size where that is enough, and the rotation that a
    camera notes is ignored, as most training does.
    """
    with pillow().open(path) as image:
        width, height = image.size
        left, upper, right, lower = choose(width, height)
        image.draft(None, (math.ceil(width * size / (right - left)), math.ceil(height * size / (lower - upper))))
        across, down = image.size[0] / width, image.size[1] / height
        box = (left * across, upper * down, min(right * across, image.size[0]), min(lower * down, image.size[1]))
        small = in_colour(image).resize((size, size), pillow().Resampling.BILINEAR, box, _REDUCING_GAP)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(size, size, 3)


def in_colour(image: Any) -> Any:
    """As RGB, from whatever it is: a palette, grey, 16 bits, CMYK or with transparency."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I"):  # 16 bits of grey, of which pillow would cut off what is above 255
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode == "P":  # its transparency may be a colour of the palette
        image = image.convert("RGBA")
    return image.convert("RGB")


def resized_box(width: int, height: int, options: DataOptions, random: Random | None) -> Box:
    """The part that is left when the image is resized to `resize` and cut to `size`, at random or from the centre."""
    resize = max(options.resize, options.size)
    across = resize / (width if options.square else min(width, height))
    down = resize / (height if options.square else min(width, height))
    wide, high = options.size / across, options.size / down  # of the part, in pixels of the file
    if random is None:
        left, upper = (width - wide) / 2, (height - high) / 2
    else:  # whole pixels of the resized image, as if that had been made
        left = math.floor(random.random() * (math.floor((width - wide) * across + 1e-6) + 1)) / across
        upper = math.floor(random.random() * (math.floor((height - high) * down + 1e-6) + 1)) / down
    left, upper = max(0.0, min(left, width - wide)), max(0.0, min(upper, height - high))
    return left, upper, min(left + wide, width), min(upper + high, height)


def random_box(width: int, height: int, smallest: float, random: Random) -> Box:
    """A part of random area and proportions (3:4 to 4:3): ten tries, then the largest from the centre that has such."""
    shortest, longest = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * (smallest + (1 - smallest) * random.random())
        ratio = math.exp(math.log(shortest) + (math.log(longest) - math.log(shortest)) * random.random())
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = math.floor(random.random() * (width - wide + 1))
            upper = math.floor(random.random() * (height - high + 1))
            return left, upper, left + wide, upper + high
    wide, high = width, height
    if width / height < shortest:
        high = round(width / shortest)
    elif width / height > longest:
        wide = round(height * longest)
    left, upper = (width - wide) // 2, (height - high) // 2
    return left, upper, left + wide, upper + high


def pillow() -> Any:
    """The module ``PIL.Image``."""
    return needed("PIL.Image", why='data.kind="images"')


def _reason(path: str, error: Exception) -> str:
    """Why a file cannot be read, in a line that does not name it again."""
    if isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError):
        return str(error.strerror)
    if os.path.exists(path) and os.path.getsize(path) == 0:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image of a known format, or its beginning is damaged"
    return f"damaged ({type(error).__name__}: {error})"

"""Transposed convolutions as convolutions with stride 1, one for each comb of places.

A kernel element puts the input's pixels on every stride-th place. Elements that are not whole strides apart put them on
other places, and never meet in a patch: the input factor has a block for each set of elements that do meet, which is
that of a small convolution, in place of patches that are zeros for the most part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Comb:
    """What every stride-th place sees along one axis: patches of the input with stride 1, of `kernel` elements, with
    so many zeros `before` and `after` the pixels; less than none are pixels that no place sees.
    """

    kernel: int
    dilation: int
    before: int
    after: int

    @property
    def padding(self) -> int:
        """At both ends."""
        return max(0, min(self.before, self.after))

    @property
    def margins(self) -> tuple[int, int]:
        """Beside that."""
        return self.before - self.padding, self.after - self.padding


def combs(
    pixels: int, places: int, kernel: int, stride: int, padding: int, dilation: int
) -> dict[Comb, list[list[int]]]:
    """Of one axis, those that see a pixel: which kernel elements each one's patches consist of, in the order of the
    pixels that they are on.
    """
    found: dict[Comb, list[list[int]]] = {}
    common = math.gcd(stride, dilation)
    period = stride // common  # from an element to the next one on the same places
    for first in range(min(kernel, period)):
        elements = list(range(first, kernel, period))[::-1]  # a later element is on an earlier pixel
        # Pixel i is on place i · stride + offset, and with element number j of these on that of pixel i + j · step.
        offset, step = first * dilation - padding, dilation // common
        reach = step * (len(elements) - 1)
        # Places from the first to the last that there are, and that see a pixel.
        start, end = -(offset // stride), (places - 1 - offset) // stride + 1
        start, end = max(0, start), min(pixels + reach, end)
        if start < end:
            comb = Comb(len(elements), step, reach - start, end - pixels)
            found.setdefault(comb, []).append(elements)
    return found

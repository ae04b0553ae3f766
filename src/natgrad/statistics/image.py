"""How kernels see an image's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.launches import ALIGNED_BYTES


@dataclass(frozen=True)
class Image:
    """A tensor (N, C, H, W) as it lies in memory, which runs along a pixel's channels or a channel's pixels; None:
    neither.
    """

    shape: tuple[int, ...]
    by_case: int
    along_channels: bool | None
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor, cases: int | None = None) -> Image:
        """A tensor's, or that of its first `cases`."""
        count, channels, height, width = x.shape
        by_case, *strides = x.stride()
        sizes, along_channels = (channels, height, width), None
        if _lies(sizes, strides, (1, width * channels, channels)):
            along_channels = True
        if _lies(sizes, strides, (height * width, width, 1)) and (along_channels is None or height * width > 1):
            along_channels = False
        shape = (count if cases is None else cases, *sizes)
        return Image(shape, by_case if count > 1 else channels * height * width, along_channels, x.dtype)

    @property
    def places(self) -> int:
        """Pixels of a case."""
        return self.shape[2] * self.shape[3]

    @property
    def is_dense(self) -> bool:
        """Whether a case begins where the one before it ends."""
        return self.by_case == self.shape[1] * self.places

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of axes that have one element too."""
        _, channels, _, width = self.shape
        inner = (1, width * channels, channels) if self.along_channels else (self.places, width, 1)
        return self.by_case, *inner


def _lies(sizes: Iterable[int], strides: Iterable[int], steps: Iterable[int]) -> bool:
    return all(size == 1 or stride == step for size, stride, step in zip(sizes, strides, steps, strict=True))


def readable(x: Tensor) -> Tensor:
    """The tensor, or a copy where it does not lie as kernels want it."""
    if Image.of(x).along_channels is None:
        x = x.contiguous()
    return x if x.data_ptr() % ALIGNED_BYTES == 0 else x.clone()

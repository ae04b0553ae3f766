"""How kernels see an image's memory: without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from natgrad.statistics.image import Image, readable


def numbered(*shape: int, last: bool = False) -> Tensor:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize(
    ("x", "along_channels"),
    [
        (numbered(3, 4, 5, 2), False),
        (numbered(3, 4, 5, 2, last=True), True),
        (numbered(3, 4, 1, 1), True),
        (numbered(3, 4, 1, 1, last=True), True),
        (numbered(1, 4, 5, 2, last=True), True),
        (numbered(3, 1, 5, 2, last=True), False),
        (numbered(3, 4, 5, 1, last=True), True),
        (numbered(6, 4, 5, 2)[::2], False),
        (numbered(6, 4, 5, 2, last=True)[1:], True),
        (numbered(3, 8, 5, 2)[:, 2:6], False),
        (numbered(1, 2, 3, 4).expand(3, 2, 3, 4), False),
    ],
)
def test_strides_are_those_of_the_tensor(x: Tensor, along_channels: bool) -> None:
    image = Image.of(x)
    assert image.along_channels == along_channels
    assert torch.equal(x.as_strided(image.shape, image.strides, x.storage_offset()), x)
    part = Image.of(x, 1)
    assert torch.equal(x.as_strided(part.shape, part.strides, x.storage_offset()), x[:1])


@pytest.mark.parametrize("x", [numbered(3, 8, 5, 2, last=True)[:, 2:6], numbered(3, 4, 5, 4)[..., ::2]])
def test_what_lies_otherwise_is_copied(x: Tensor) -> None:
    assert Image.of(x).along_channels is None
    assert Image.of(readable(x)).along_channels is not None
    assert torch.equal(readable(x), x)

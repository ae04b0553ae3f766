"""Transposed convolutions as small convolutions with stride 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import hand
from natgrad.statistics.combs import combs
from natgrad.statistics.operations import Convolution

LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def operation(layer: Any) -> Convolution:
    return Convolution(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, True, layer.output_padding, layer.groups
    )


@st.composite
def layers(draw: Any) -> tuple[Any, torch.Tensor]:
    axes = draw(st.integers(1, 3))
    high = {1: 9, 2: 5, 3: 3}[axes]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    stride, dilation, groups = each(1, high), each(1, 4 if axes == 1 else 2), draw(st.integers(1, 2))
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    channels = groups * draw(st.integers(1, 3))
    layer = LAYERS[axes](
        channels, groups, each(1, high), stride, each(0, high), extra, groups, dilation=dilation
    ).double()
    x = torch.randn(draw(st.integers(1, 3)), channels, *each(1, 6 if axes < 3 else 3)).double()
    return layer, x


@settings(max_examples=300, deadline=None)
@given(given_layer=layers(), homogeneous=st.booleans(), diagonal=st.booleans(), seed=st.integers(0, 100))
def test_factors_equal_those_of_explicit_patches(
    given_layer: Any, homogeneous: bool, diagonal: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = given_layer
    try:
        places = layer(x).shape[2:]
    except RuntimeError:  # an empty output
        assume(False)
    assume(places.numel() > 0)
    x = torch.randn_like(x)
    (moment,) = operation(layer).input_factors([x], homogeneous=homogeneous, diagonal=[diagonal])
    patches = hand.patches(layer, x)
    if homogeneous:
        patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], dim=2)
    wanted = patches.square().sum(1) if diagonal else patches.mT @ patches
    torch.testing.assert_close(moment, wanted, rtol=1e-10, atol=1e-10)


def test_a_diagonal_where_padding_takes_all_pixels_away() -> None:
    """What is left are two places of output padding, which see nothing."""
    layer = nn.ConvTranspose1d(2, 2, 1, 6, 2, 5, 2, dilation=2).double()
    x = torch.randn(3, 2, 1).double()
    assert layer(x).shape[2] == 2
    (moment,) = operation(layer).input_factors([x], homogeneous=True, diagonal=[True])
    assert torch.equal(moment, torch.tensor([[0.0, 6.0], [0.0, 6.0]]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts_and_dtypes(channels_last: bool, dtype: torch.dtype) -> None:
    """Whole numbers that bfloat16 holds have exact sums."""
    layer = nn.ConvTranspose2d(6, 2, 4, 2, 1, groups=2)
    x = torch.randint(-3, 4, (4, 6, 8, 8)).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    before = x.clone()
    (moment,) = operation(layer).input_factors([x], homogeneous=True, diagonal=[False])
    patches = hand.patches(layer.double(), x.double())
    patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], dim=2)
    assert moment.dtype == torch.float32
    torch.testing.assert_close(moment, (patches.mT @ patches).float(), rtol=0, atol=0)
    assert torch.equal(x, before)


def test_an_empty_batch_has_zeros() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, 2)
    (moment,) = operation(layer).input_factors([torch.zeros(0, 2, 4, 4)], homogeneous=True, diagonal=[False])
    assert torch.equal(moment, torch.zeros(1, 19, 19))


def test_each_element_is_in_one_comb() -> None:
    for kernel, stride, dilation in [(4, 2, 1), (5, 3, 1), (3, 1, 2), (7, 4, 2), (6, 6, 4), (2, 5, 3)]:
        places = 19 * stride + dilation * (kernel - 1) + 1
        found = combs(20, places, kernel, stride, 0, dilation)
        elements = [element for own in found.values() for comb in own for element in comb]
        assert sorted(elements) == list(range(kernel))
        for comb, own in found.items():
            for one in own:
                assert len(one) == comb.kernel
                # all of one comb's elements put pixels on the same places
                assert len({element * dilation % stride for element in one}) == 1
    assert len(combs(20, 20 * 8, 8, 8, 0, 1)) == 1  # all of them see the same: one factor is enough


def test_sums_grow_with_the_elements_that_meet() -> None:
    """4 × 4 with stride 2: of 16² pairs of elements a quarter, those of the same four combs."""
    layer = nn.ConvTranspose2d(1, 1, 4, 2, 1)
    (moment,) = operation(layer).input_factors([torch.rand(2, 1, 8, 8)], homogeneous=False, diagonal=[False])
    assert int((moment != 0).sum()) == 4 * math.prod((4, 4))

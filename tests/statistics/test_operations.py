"""Convolution factors against explicit patch extraction, over geometry drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import hand
from natgrad import KFAC
from natgrad.statistics import operations
from natgrad.statistics.gram import second_moment
from natgrad.statistics.operations import Convolution, Embedding

LAYERS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


@st.composite
def geometries(draw: Any) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))
    transposed = draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    high = 3 if axes < 3 else 2
    groups = draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": each(1, high),
        "stride": each(1, high),
        "dilation": each(1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if transposed:
        options["padding"] = each(0, 1)
        limits = zip(options["stride"], options["dilation"], strict=True)
        options["output_padding"] = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in limits)
    else:
        options["padding"] = draw(st.sampled_from(["valid", "same", each(0, 2)]))
        if options["padding"] == "same":
            options["stride"] = (1,) * axes
        options["padding_mode"] = draw(st.sampled_from(["zeros", "circular"]))
    return {
        "axes": axes,
        "transposed": transposed,
        "options": options,
        "size": each(2, 5 if axes < 3 else 3),
        "channels_last": draw(st.booleans()) and axes == 2,
    }


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(geometry=geometries(), sharing=st.sampled_from(["expand", "reduce"]), seed=st.integers(0, 1000))
def test_convolution_blocks_equal_explicit_patch_extraction(geometry: dict[str, Any], sharing: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer = LAYERS[geometry["axes"], geometry["transposed"]](**geometry["options"]).double()
    cases = 2
    x = torch.randn(cases, geometry["options"]["in_channels"], *geometry["size"]).double()
    if geometry["channels_last"]:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    try:
        places = layer(x).shape[2:]
    except RuntimeError:  # kernel larger than the input, or an empty output
        assume(False)
    assume(places.numel() > 0)

    kfac = KFAC(layer, kl_clip=None, loss_terms=cases, sharing=sharing)
    output = layer(x)
    weights = torch.randn_like(output)
    output.retain_grad()
    ((output * weights).sum() / cases).backward()
    kfac.step()

    (block,) = kfac.blocks
    a, g = hand.patches(layer, x), hand.output_rows(layer, weights / cases)
    if layer.bias is not None:
        a = torch.cat([a, torch.ones_like(a[:, :, :1])], dim=2)
    if sharing == "reduce":  # Ba et al. 2017, eq. 17: mean activation, summed derivative of each case
        a = a.reshape(layer.groups, cases, places.numel(), -1).mean(2)
        g = g.reshape(layer.groups, cases, places.numel(), -1).sum(2)
    estimate = block.estimate()
    for group in range(layer.groups):
        A, G, s = hand.kronecker(a[group], g[group], cases)
        torch.testing.assert_close(estimate.column[group], A, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(estimate.row[group], G, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(float(estimate.scale[group]), s)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("homogeneous", [False, True])
def test_second_moment(homogeneous: bool, diagonal: bool) -> None:
    rows = torch.randn(2, 7, 3).double()
    full = torch.cat([rows, torch.ones(2, 7, 1).double()], dim=2) if homogeneous else rows
    expected = full.mT @ full
    if diagonal:
        expected = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(second_moment(rows, homogeneous=homogeneous, diagonal=diagonal), expected)


def test_half_precision_rows_are_summed_in_float32() -> None:
    rows = torch.randn(1, 4096, 3).bfloat16()
    moment = second_moment(rows)
    assert moment.dtype == torch.float32
    torch.testing.assert_close(moment.double(), rows.double().mT @ rows.double(), rtol=1e-4, atol=1e-3)


def test_embedding_leaves_out_the_padding_index() -> None:
    indices = torch.tensor([[0, 2, 2], [1, 0, 2]])
    derivative = torch.randn(2, 3, 4)
    table = Embedding(5, 2)
    assert int(table.rows([indices], derivative)) == 3
    (counts,) = table.input_factors([indices], homogeneous=False, diagonal=[True])
    torch.testing.assert_close(counts, torch.tensor([[2.0, 1.0, 0.0, 0.0, 0.0]]))
    kept = derivative[indices != 2]
    torch.testing.assert_close(table.output_factor(derivative, [indices], diagonal=False)[0], kept.mT @ kept)


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_patches_are_kept_where_they_are_needed(transposed: bool) -> None:
    """And not where the user makes tensors of a model that does not exist yet."""
    convolution = Convolution((3,), (2,), (1,), (1,), transposed, (0,), 1)
    x = torch.randn(2, 3, 5)
    operations._all_visits.cache_clear()
    with torch.device("meta"):
        found = convolution.input_factors([x], homogeneous=True, diagonal=[True])
    torch.testing.assert_close(found, convolution.input_factors([x], homogeneous=True, diagonal=[True]))

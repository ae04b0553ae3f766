"""How tensors lie that kernels are given: what a kernel reads it reads by one image's numbers. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.statistics import gpu, plans
from natgrad.statistics.gpu import Norm, Patches
from natgrad.statistics.image import Image
from natgrad.statistics.plans import Plan

FORMATS = [torch.contiguous_format, torch.channels_last]


def part_of_a_concatenation(form: torch.memory_format) -> Tensor:
    whole = torch.randn(3, 8, 5, 4).contiguous(memory_format=form)
    return whole[:, :4] if form == torch.contiguous_format else whole[:, :, :3]


def every_other(form: torch.memory_format) -> Tensor:
    return torch.randn(6, 8, 5, 4).contiguous(memory_format=form)[::2]


def repeated(form: torch.memory_format) -> Tensor:
    return torch.randn(1, 8, 5, 4).contiguous(memory_format=form).expand(3, -1, -1, -1)


def from_the_second_element_on(form: torch.memory_format) -> Tensor:
    like = torch.empty(3, 8, 5, 4).contiguous(memory_format=form)
    return torch.randn(like.numel() + 1)[1:].as_strided(like.shape, like.stride(), 1)


KINDS = [part_of_a_concatenation, every_other, repeated, from_the_second_element_on]


@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_norm_layers_tensors_lie_alike(
    kind: Any, form: torch.memory_format, other: torch.memory_format, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    derivative = kind(form)
    x = torch.randn(derivative.shape).contiguous(memory_format=other)
    if swapped:
        derivative, x = x, derivative
    given: list[Tensor] = []

    def moments(works: list[Any], tensors: list[Tensor]) -> list[Tensor]:
        given.extend(tensors)
        assert Image.of(given[0]) == Image.of(given[1]) == works[0].image
        assert works[0].image.along_channels is not None
        return given[:1]

    monkeypatch.setattr(gpu, "moments", moments)
    channels = derivative.shape[1]
    gpu.gain_gradients(derivative, x, torch.zeros(channels), torch.ones(channels))
    assert torch.equal(given[0], derivative)
    assert torch.equal(given[1], x)


def kernels_of(work: Patches, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    launched: list[str] = []
    monkeypatch.setattr(plans, "kernel", lambda package, name: name.removesuffix("_kernel"))
    monkeypatch.setattr(plans, "triton_type", lambda value: value)
    monkeypatch.setattr(plans, "Launch", lambda kernel, *given, **options: launched.append(kernel))
    Plan(torch.device("cpu"), [work])
    return launched


def test_cases_apart_are_correlated_in_a_dense_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_CORRELATION_FLOPS", 0.0)
    whole = torch.zeros(4, 64, 6, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    for x, copies in ((whole, 0), (whole[:, :, :4], 1), (whole[::2], 1), (whole[:1].expand(4, -1, -1, -1), 1)):
        found = kernels_of(Patches(Image.of(x), 1, (3, 3), (1, 1), (1, 1)), monkeypatch)
        assert "correlation" in found
        assert found.count("channels_last") == copies


def test_the_square_of_many_channels_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagonal has no columns to sort: 65536² is 0 in 32 bits, by which the kernel would divide."""
    rows: dict[str, Any] = {}
    monkeypatch.setattr(plans, "kernel", lambda package, name: name)
    monkeypatch.setattr(plans, "triton_type", lambda value: value)
    monkeypatch.setattr(plans, "Launch", lambda kernel, numbers, *given, **options: rows.update({kernel: numbers}))
    Plan(torch.device("cpu"), [Norm(Image.of(torch.zeros(2, 2**16, 1, 1)), False, True, True, 1.0)])
    ((*_, count, size, elements, splits, _, _),) = rows["finish_kernel"]
    assert (count, elements, splits) == (2**16, 1, 2)
    assert size**2 < 2**31


def test_a_part_of_what_32_bits_cannot_count_is_not_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "sums", lambda x: True)
    whole = torch.empty(70_000, 64, 32, 32, dtype=torch.bfloat16, device="meta")
    assert gpu.takes(whole[:20_000])
    assert not gpu.takes(whole)
    assert not gpu.takes(whole[:, :8])  # its last case begins as far away
    assert gpu.takes(whole[:1].expand(20_000, -1, -1, -1))

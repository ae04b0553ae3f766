"""Statistics by kernels against patches in float64, several layers in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from natgrad.statistics import gpu, moving, waiting
from natgrad.statistics.gpu import Norm, Patches
from natgrad.statistics.image import Image
from natgrad.statistics.operations import Convolution
from natgrad.statistics.waiting import Part, Parts, Waiting

Pair = tuple[int, int]
KINDS = [
    (torch.float32, torch.contiguous_format),
    (torch.float32, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
    (torch.float16, torch.contiguous_format),
]
# (cases, channels, height, width), kernel, stride, padding, dilation, groups
GEOMETRIES: list[tuple[tuple[int, ...], Pair, Pair, Pair, Pair, int]] = [
    ((3, 16, 7, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 32, 6, 5), (3, 2), (2, 1), (1, 0), (1, 2), 2),
    ((4, 16, 5, 5), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    ((2, 40, 23, 25), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((2, 1, 13, 12), (7, 7), (2, 2), (3, 3), (1, 1), 1),
]
CORRELATED: list[tuple[tuple[int, ...], Pair, Pair]] = [
    ((2, 64, 4, 5), (3, 2), (1, 0)),
    ((1, 64, 2, 2), (2, 2), (1, 0)),
    ((2, 64, 5, 4), (1, 3), (0, 1)),
]


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, form: torch.memory_format, *, seed: int = 0) -> Tensor:
    """Numbers that half precision holds, whose products add up exactly in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype).contiguous(memory_format=form)


def by_patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    convolution = Convolution(kernel, stride, padding, dilation, False, (0, 0), groups)
    return convolution._chunk_factor(x.double(), homogeneous=False)


@pytest.mark.parametrize("kind", KINDS)
def test_input_factors_of_many_layers(kind: tuple[torch.dtype, torch.memory_format]) -> None:
    tensors = [whole_numbers(shape, *kind) for shape, *_ in GEOMETRIES]
    works = [
        gpu.same(Patches(Image.of(x), g, k, s, p, d)) for x, (_, k, s, p, d, g) in zip(tensors, GEOMETRIES, strict=True)
    ]
    for found, x, (_, *geometry) in zip(gpu.moments(works, tensors), tensors, GEOMETRIES, strict=True):
        torch.testing.assert_close(found.double(), by_patches(x, *geometry), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS[:3:2])
def test_input_factors_by_differences_of_offsets(
    kind: tuple[torch.dtype, torch.memory_format], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_CORRELATION_FLOPS", 0.0)
    tensors = [whole_numbers(shape, *kind) for shape, *_ in CORRELATED]
    works = [
        gpu.same(Patches(Image.of(x), kernel=k, padding=p)) for x, (_, k, p) in zip(tensors, CORRELATED, strict=True)
    ]
    assert all(work._correlates(64, True, work._places()) for work in works)
    for found, x, (_, kernel, padding) in zip(gpu.moments(works, tensors), tensors, CORRELATED, strict=True):
        wanted = by_patches(x, kernel, (1, 1), padding, (1, 1), 1)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("diagonal", [False, True])
def test_gains_and_biases_of_norm_layers(kind: tuple[torch.dtype, torch.memory_format], diagonal: bool) -> None:
    shapes = [(4, 24, 7, 7), (5, 130, 3, 2), (2, 8, 1, 1)]
    works, tensors, wanted = [], [], list[Tensor]()
    for shape in shapes:
        derivative, x = (whole_numbers(shape, *kind, seed=seed) for seed in (1, 2))
        mean, reciprocal = torch.arange(shape[1]) % 3 - 1.0, torch.arange(shape[1]) % 2 + 0.5
        works.append(gpu.same(Norm(Image.of(derivative), True, True, diagonal, 2.0)))
        tensors += [derivative, x, mean, reciprocal]
        g, normalised = derivative.double(), (x.double() - mean[:, None, None]) * reciprocal[:, None, None]
        for rows in ((g * normalised).sum((2, 3)), g.sum((2, 3))):
            moment = 2 * rows.mT @ rows
            wanted.append(moment.diagonal()[None] if diagonal else moment[None])
    found = gpu.moments(works, tensors)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


def test_running_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "able", lambda device: True)
    torch.manual_seed(0)
    sums, moments = ([torch.randn(shape) for shape in ((1, 70, 70), (2, 5, 5), (1, 3))] for _ in range(2))
    moments[1][0, 0, 0] = torch.inf
    wanted = [0.9 * old + new if new.isfinite().all() else old.clone() for old, new in zip(sums, moments, strict=True)]
    together = moving.Sums(sums)
    assert together._fit
    flags = together.move(moments, None, 0.9)
    assert flags.tolist() == [True, False, True]
    for one, other in zip(sums, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert moving.finite(moments).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", KINDS[::2])
def test_copies_of_the_cases_that_are_read(
    kind: tuple[torch.dtype, torch.memory_format], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two works of an entry that read different numbers of cases, while somebody writes into their tensors."""
    monkeypatch.setattr(waiting, "_WORTH", 1)
    monkeypatch.setattr(waiting, "stream_of", lambda device: 0)
    own, found, wanted = Waiting(), list[Tensor](), list[Tensor]()
    for (_, *sizes), kernel, stride, padding, dilation, groups in GEOMETRIES:
        derivative, x = (whole_numbers((5, *sizes), *kind, seed=seed) for seed in (1, 2))
        wanted.append(by_patches(x[:2], kernel, stride, padding, dilation, groups))
        wanted.append(by_patches(derivative[:3], (1, 1), (1, 1), (0, 0), (1, 1), 1))
        inputs = gpu.same(Patches(Image.of(x, 2), groups, kernel, stride, padding, dilation))
        outputs = gpu.same(Patches(Image.of(derivative, 3)))
        parts = Parts([Part(inputs, (1,), (found.append,)), Part(outputs, (0,), (found.append,))], 0)
        own.put(parts, [derivative, x], grows=True)
        derivative.fill_(torch.nan)
        x.fill_(torch.nan)
    assert own.flush()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=0)

"""Kernels for statistics on a GPU against patches in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from natgrad.statistics import gpu
from natgrad.statistics.operations import Convolution
from natgrad.statistics.vectors import ByChannel

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FORMATS = [torch.contiguous_format, torch.channels_last]
# (cases, channels, height, width, kernel, stride, padding, dilation, groups)
GEOMETRIES = [
    (3, 16, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 32, 6, 5, (3, 2), (2, 1), (1, 0), (1, 2), 2),
    (2, 8, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1), 1),
    (4, 16, 5, 5, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (2, 40, 23, 25, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 12, 24, 24, (1, 1), (1, 1), (0, 0), (1, 1), 4),
    (2, 256, 7, 7, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (5, 3, 12, 11, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 1, 13, 12, (7, 7), (2, 2), (3, 3), (1, 1), 1),
]
# With stride 1 and many channels, where offsets' differences take the place of pairs.
CORRELATED = [
    (2, 64, 4, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 64, 4, 5, (3, 3), (1, 1), (0, 0), (1, 1), 1),
    (2, 64, 5, 4, (5, 3), (1, 1), (2, 1), (1, 1), 1),
    (3, 128, 9, 9, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 192, 3, 3, (3, 3), (1, 1), (2, 1), (1, 1), 1),
    (1, 64, 2, 2, (2, 2), (1, 1), (0, 0), (1, 1), 1),
    (1, 64, 2, 2, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 64, 5, 4, (3, 1), (1, 1), (1, 0), (1, 1), 1),
    (2, 64, 5, 4, (1, 3), (1, 1), (0, 1), (1, 1), 1),
    (2, 64, 5, 4, (2, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 64, 5, 4, (1, 7), (1, 1), (0, 3), (1, 1), 1),
    # Many rows, whose splits are added up before they are spread: a few, and sixteen at a time.
    (8, 64, 9, 9, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (32, 64, 14, 14, (3, 3), (1, 1), (0, 1), (1, 1), 1),
]
KINDS = [
    (torch.float32, torch.contiguous_format),
    (torch.bfloat16, torch.channels_last),
    (torch.float16, torch.contiguous_format),
    (torch.float32, torch.channels_last),
]
Geometry = tuple[int, int, int, int, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], int]


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def whole_numbers(*shape: int, form: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Numbers that bfloat16 holds, whose products add up exactly in float32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-8, 9, shape, generator=generator).float().cuda().contiguous(memory_format=form)


def factor(x: Tensor, convolution: Convolution, *, homogeneous: bool = False) -> Tensor:
    (moment,) = convolution.input_factors([x], homogeneous=homogeneous, diagonal=[False])
    return moment


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometry", GEOMETRIES + CORRELATED)
def test_input_factors_are_those_of_patches(
    geometry: Geometry, kind: tuple[torch.dtype, torch.memory_format], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_CORRELATION_FLOPS", 0.0 if geometry in CORRELATED else float("inf"))
    *shape, kernel, stride, padding, dilation, groups = geometry
    x = whole_numbers(*shape, form=kind[1]).to(kind[0])
    convolution = Convolution(kernel, stride, padding, dilation, False, (0, 0), groups)
    assert gpu.takes(x)
    found = factor(x, convolution, homogeneous=True)
    torch.testing.assert_close(found.double(), factor(x.double(), convolution, homogeneous=True), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(4, 24, 7, 7), (3, 256, 30, 30), (2, 8, 1, 1), (5, 130, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_output_factors_are_exact(shape: tuple[int, ...], groups: int, form: torch.memory_format) -> None:
    derivative = whole_numbers(*shape, form=form)
    convolution = Convolution((1, 1), (1, 1), (0, 0), (1, 1), False, (0, 0), groups)
    found = convolution.output_factor(derivative, [], diagonal=False)
    wanted = convolution.output_factor(derivative.double(), [], diagonal=False)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(4, 24, 7, 7), (3, 256, 30, 30), (2, 8, 1, 1), (5, 130, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_layers_sums(shape: tuple[int, ...], dtype: torch.dtype, form: torch.memory_format) -> None:
    torch.manual_seed(0)
    derivative, x = (torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form) for _ in range(2))
    mean, reciprocal = torch.randn(shape[1], device="cuda"), torch.rand(shape[1], device="cuda")
    found = ByChannel().gradients(derivative, (x, mean, reciprocal))
    wanted = ByChannel().gradients(derivative.double(), (x.double(), mean.double(), reciprocal.double()))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


def test_a_derivative_of_another_format_than_the_activation() -> None:
    torch.manual_seed(0)
    derivative = torch.randn(2, 16, 5, 5, device="cuda").contiguous(memory_format=torch.channels_last)
    x, mean, reciprocal = torch.randn(2, 16, 5, 5, device="cuda"), torch.randn(16).cuda(), torch.rand(16).cuda()
    wanted = (derivative * (x - mean[:, None, None]) * reciprocal[:, None, None]).sum((2, 3))
    torch.testing.assert_close(gpu.gain_gradients(derivative, x, mean, reciprocal), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("correlated", [False, True])
def test_rounding_stays_within_what_the_docs_say(
    form: torch.memory_format, correlated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_CORRELATION_FLOPS", 0.0 if correlated else float("inf"))
    torch.manual_seed(0)
    x = torch.randn(32, 64, 14, 14, device="cuda").relu().contiguous(memory_format=form)
    convolution = Convolution((3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    wanted = factor(x.double(), convolution)
    assert (factor(x, convolution).double() - wanted).norm() < 5e-4 * wanted.norm()


def test_the_same_bits_every_time() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64, 28, 28, device="cuda")
    convolution = Convolution((3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    first = factor(x, convolution)
    assert all(torch.equal(first, factor(x, convolution)) for _ in range(5))
    assert torch.equal(first, first.mT)


def test_float32_stays_float32_where_tf32_is_off() -> None:
    torch.set_float32_matmul_precision("highest")
    x = torch.randn(4, 16, 8, 8, device="cuda")
    assert not gpu.takes(x)
    assert gpu.takes(x.bfloat16())


@pytest.mark.parametrize("form", FORMATS)
def test_more_cases_than_a_grid_has_places_for(form: torch.memory_format) -> None:
    x = whole_numbers(70_000, 16, 2, 1, form=form)
    convolution = Convolution((1, 1), (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    torch.testing.assert_close(factor(x, convolution).double(), factor(x.double(), convolution), rtol=0, atol=0)
    mean, reciprocal = torch.ones(16).cuda(), torch.ones(16).cuda()
    found = ByChannel().gradients(x, (x, mean, reciprocal))
    torch.testing.assert_close(found, (x * (x - 1)).sum((2, 3)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    x = whole_numbers(4, 16, 5, 5).to("cuda:1")
    convolution = Convolution((3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    torch.testing.assert_close(factor(x, convolution).double(), factor(x.double(), convolution), rtol=0, atol=0)

"""Input factors by self-correlation against patches: those of `functional.unfold`, and the library's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from natgrad.statistics import correlation, ways
from natgrad.statistics.operations import Convolution
from natgrad.statistics.ways import Axis, Way


def convolution(
    kernel: tuple[int, ...],
    *,
    padding: tuple[int, ...] | int = 0,
    dilation: tuple[int, ...] | int = 1,
    stride: tuple[int, ...] | int = 1,
    groups: int = 1,
) -> Convolution:
    def each(value: tuple[int, ...] | int) -> tuple[int, ...]:
        return (value,) * len(kernel) if isinstance(value, int) else value

    return Convolution(kernel, each(stride), each(padding), each(dilation), False, (0,) * len(kernel), groups)


def axes_of(conv: Convolution, x: Tensor) -> tuple[Axis, ...]:
    geometry = zip(x.shape[2:], conv.kernel, conv.dilation, conv.padding, conv.padding, strict=True)
    return tuple(Axis(*numbers) for numbers in geometry)


def by_patches(conv: Convolution, x: Tensor, *, homogeneous: bool = False) -> Tensor:
    return conv._chunk_factor(x, homogeneous=homogeneous)


def unfolded(conv: Convolution, x: Tensor) -> Tensor:
    """Two axes, one group: (places of all cases, channels · kernel)."""
    patches = functional.unfold(x, conv.kernel, dilation=conv.dilation, padding=conv.padding, stride=1)
    return patches.mT.reshape(-1, patches.shape[1])


@pytest.fixture(params=["as it is", "correlations of strips", "patches of strips"])
def prices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small images would have the borders always done by patches."""
    calls = {"as it is": ways.CALL, "correlations of strips": -(10**9), "patches of strips": 10**9}
    monkeypatch.setattr(ways, "CALL", calls[request.param])
    correlation.cheapest.cache_clear()
    yield
    correlation.cheapest.cache_clear()


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize("padding", range(5))
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (5, 5), (3, 1), (1, 3), (2, 5)])
def test_equals_unfolded_patches(kernel: tuple[int, int], dilation: int, padding: int) -> None:
    torch.manual_seed(0)
    conv = convolution(kernel, padding=padding, dilation=dilation)
    for size in ((9, 7), (4, 13), (3, 2), (1, 1)):
        x = torch.randn(3, 2, *size).double()
        if min(conv.places(x.shape)) < 1:
            continue
        rows = unfolded(conv, x)
        moment = correlation.second_moment(x, axes_of(conv, x), 1)
        torch.testing.assert_close(moment[0], rows.mT @ rows, rtol=1e-12, atol=1e-12)
        sums = correlation.patch_sums(x, axes_of(conv, x), 1)
        torch.testing.assert_close(sums[0], rows.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 5), (1, 4), (1, 1)])
def test_all_ways_to_correlations_agree(
    kernel: tuple[int, int], dilation: int, way: Way, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(ways, "costs", lambda *_: [(0, way)])
    monkeypatch.setattr(ways, "SPECTRUM_ELEMENTS", 1000)  # several parts
    for size in ((9, 8), (4, 13), (1, 1)):
        x = torch.randn(5, 2 * groups, *size).double()
        axes = axes_of(convolution(kernel, padding=1, dilation=dilation), x)
        found = correlation._correlations(x, axes, groups)
        expected = torch.zeros_like(found)
        wide = [(axis.reach, axis.reach) for axis in axes]
        around = functional.pad(x, [*wide[1], *wide[0]])
        rows = x.unflatten(1, (groups, -1))
        number = 0
        for i in range(2 * kernel[0] - 1):
            for j in range(2 * kernel[1] - 1):
                later = around[:, :, i * dilation :, j * dilation :][:, :, : size[0], : size[1]]
                later = later.unflatten(1, (groups, -1))
                expected[:, number] = torch.einsum("ngchw,ngdhw->gcd", rows, later)
                number += 1
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


NARROW = [
    ((3,), 1, 1),
    ((2,), 0, 2),
    ((3, 3), 1, 1),
    ((3, 3), 1, 2),
    ((2, 2), 1, 1),
    ((1, 3), (0, 1), 1),
    ((3, 2), (1, 0), 1),
]
NARROW += [((3, 3, 3), 1, 1), ((2, 3, 1), (0, 1, 0), 2)]


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize(("kernel", "padding", "groups"), NARROW)
def test_borders_of_one_pixel_are_added_up(
    kernel: tuple[int, ...], padding: Any, groups: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way is Way.SPECTRAL and len(kernel) > 2:
        pytest.skip("Fourier coefficients are of one or two axes")
    torch.manual_seed(0)
    monkeypatch.setattr(ways, "costs", lambda *_: [(0, way)])
    monkeypatch.setattr(correlation, "cheapest", lambda *_: (0, True))
    monkeypatch.setattr(correlation, "missing", None)  # nobody asks for it
    conv = convolution(kernel, padding=padding, groups=groups)
    for size in ((5, 4, 6), (4, 4, 4), (2, 3, 2)):
        x = torch.randn(3, 2 * groups, *size[: len(kernel)]).double()
        if min(conv.places(x.shape)) < 1:
            continue
        assert correlation.are_narrow(tuple(axis.visible for axis in axes_of(conv, x)))
        moment = correlation.second_moment(x, axes_of(conv, x), groups)
        torch.testing.assert_close(moment, by_patches(conv, x), rtol=1e-12, atol=1e-12)


def test_borders_along_equal_axes_come_together() -> None:
    square, oblong = (Axis(8, 3, 1, 1, 1),) * 2, (Axis(8, 3, 1, 1, 1), Axis(9, 3, 1, 1, 1))
    assert [len(border.members) for border in correlation.borders(square)] == [4, 4]
    assert sorted(len(border.members) for border in correlation.borders(oblong)) == [2, 2, 4]
    assert correlation.borders((Axis(8, 1, 1, 0, 0),) * 2) == ()
    assert not correlation.are_narrow((Axis(8, 5, 1, 2, 2),))
    assert not correlation.are_narrow((Axis(8, 3, 2, 2, 2),))


@pytest.mark.parametrize(
    ("padding", "size", "cases", "channels", "expected"),
    [
        (1, 32, 128, 16, True),
        (1, 8, 128, 64, True),
        (1, 4, 64, 256, False),
        (1, 4, 32, 512, False),
        (2, 8, 128, 64, False),  # nothing is missing
    ],
)
def test_borders_are_added_up_where_sums_are_small(
    padding: int, size: int, cases: int, channels: int, expected: bool
) -> None:
    axes = (Axis(size, 3, 1, padding, padding),) * 2
    assert correlation.are_narrow(axes)
    assert correlation.cheapest(axes, cases, channels, 0)[1] is expected


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("GenuineIntel", "AVX512", Way.SPECTRAL),
        ("AuthenticAMD", "AVX512", Way.GRADIENT),
        ("AuthenticAMD", "AVX2", Way.SPECTRAL),
        (None, "DEFAULT", Way.SPECTRAL),
    ],
)
def test_products_are_left_to_others_where_they_are_slow(
    vendor: str | None, capability: str, expected: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways.processor, "entry", lambda name: vendor if name == "vendor_id" else None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    ways._gradient_price.cache_clear()
    try:
        found = ways.costs((Axis(32, 3, 1, 1, 1),) * 2, 128, 16)
    finally:
        ways._gradient_price.cache_clear()
    assert min(found, key=lambda way: way[0])[1] is expected


@pytest.mark.parametrize("way", [Way.SHIFTED, Way.SPECTRAL])
def test_signals_by_each_way(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv = convolution((4,), padding=1, dilation=2, groups=2)
    x = torch.randn(3, 4, 15).double()
    expected = by_patches(conv, x)
    monkeypatch.setattr(ways, "costs", lambda *_: [(0, way)])
    torch.testing.assert_close(conv._correlated(x, homogeneous=False), expected, rtol=1e-12, atol=1e-12)


@st.composite
def geometries(draw: Any) -> tuple[Convolution, tuple[int, ...]]:
    dimensions = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    conv = convolution(
        each(1, 5 if dimensions < 3 else 3),
        padding=each(0, 5),
        dilation=each(1, 3),
        groups=draw(st.sampled_from([1, 2, 3])),
    )
    size = each(1, {1: 12, 2: 8, 3: 4}[dimensions])
    return conv, (2, conv.groups * draw(st.integers(1, 3)), *size)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(geometry=geometries(), homogeneous=st.booleans(), cheap_calls=st.booleans(), seed=st.integers(0, 1000))
def test_equals_the_patch_path(
    geometry: tuple[Convolution, tuple[int, ...]], homogeneous: bool, cheap_calls: bool, seed: int
) -> None:
    conv, shape = geometry
    assume(min(conv.places(torch.Size(shape))) > 0)
    torch.manual_seed(seed)
    x = torch.randn(shape).double()
    with pytest.MonkeyPatch.context() as patch:
        if cheap_calls:
            patch.setattr(ways, "CALL", -(10**9))
        correlation.cheapest.cache_clear()
        factor = conv._correlated(x, homogeneous=homogeneous)
    correlation.cheapest.cache_clear()
    torch.testing.assert_close(factor, by_patches(conv, x, homogeneous=homogeneous), rtol=1e-12, atol=1e-12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(geometry=geometries(), data=st.data(), homogeneous=st.booleans(), seed=st.integers(0, 1000))
def test_strided_ones_as_their_phases(
    geometry: tuple[Convolution, tuple[int, ...]], data: Any, homogeneous: bool, seed: int
) -> None:
    conv, shape = geometry
    stride = tuple(data.draw(st.integers(1, 4)) for _ in conv.kernel)
    conv = convolution(conv.kernel, padding=conv.padding, stride=stride, groups=conv.groups)
    assume(max(stride) > 1 and min(conv.places(torch.Size(shape))) > 0)
    torch.manual_seed(seed)
    x = torch.randn(shape).double()
    assume(min(axis.seen for axis in conv._phased(x)) > 0)
    factor = conv._correlated(x, homogeneous=homogeneous)
    torch.testing.assert_close(factor, by_patches(conv, x, homogeneous=homogeneous), rtol=1e-12, atol=1e-12)


def test_strided_ones_use_phases_where_it_pays() -> None:
    torch.manual_seed(0)
    conv = convolution((3, 3), stride=2, padding=1)
    x = torch.randn(128, 16, 32, 32)
    assert conv._correlates(x)
    (factor,) = conv.input_factors([x], homogeneous=True, diagonal=[False])
    expected = by_patches(conv, x.double(), homogeneous=True)
    torch.testing.assert_close(factor.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert not conv._correlates(x.double())
    assert not convolution((3, 3), stride=2, dilation=2)._correlates(x)
    # No place's patch sees a pixel.
    assert not convolution((1, 1), stride=3, padding=1)._correlates(x[:, :, :1, :1])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_any_view_of_an_image_will_do(padding: int, groups: int) -> None:
    torch.manual_seed(0)
    conv = convolution((3, 2), padding=padding, groups=groups)
    x = torch.randn(2, 4, 6, 5).double()
    expected = by_patches(conv, x, homogeneous=True)
    wide = torch.randn(2, 9, 8, 7).double()
    wide[:, 1::2, 1:-1, 1:-1] = x
    views = [
        x.to(memory_format=torch.channels_last),
        wide[:, 1::2, 1:-1, 1:-1],
        x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]
    for view in views:
        torch.testing.assert_close(conv._correlated(view, homogeneous=True), expected, rtol=1e-12, atol=1e-12)
    same = x[:1, :, :, :1].expand(2, -1, -1, 5)
    torch.testing.assert_close(conv._correlated(same, homogeneous=True), by_patches(conv, same, homogeneous=True))


def test_the_strips_are_the_places_that_are_missing() -> None:
    axis = Axis(pixels=6, kernel=3, dilation=2, before=1, after=2)
    first, last = correlation.strips(axis)
    assert first.axis.places + axis.places + last.axis.places == axis.complete.places
    assert (first.crop, first.elements) == (slice(0, 3), slice(1, None))
    assert (last.crop, last.elements) == (slice(4, None), slice(0, 1))
    assert not list(correlation.strips(axis.complete))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_factors_use_it_where_it_pays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16, 12, 12).to(dtype)
    conv = convolution((3, 3), padding=1)
    calls = []
    second_moment = correlation.second_moment
    monkeypatch.setattr(correlation, "second_moment", lambda *args: calls.append(args) or second_moment(*args))
    (factor,) = conv.input_factors([x], homogeneous=True, diagonal=[False])
    assert len(calls) == 1
    assert factor.dtype == torch.float32
    expected = by_patches(conv, x.double(), homogeneous=True)
    torch.testing.assert_close(factor.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.max()))

    for other, image in (
        (convolution((1, 1)), x),
        (convolution((3, 3), stride=2), x),
        (convolution((3, 3), padding=1), x[:1, :, :3, :3]),
        (convolution((3, 3), padding=1), x.double()),
    ):
        (factor,) = other.input_factors([image], homogeneous=False, diagonal=[False])
        expected = by_patches(other, image.double())
        torch.testing.assert_close(factor.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.max()))
    assert len(calls) == 1


@pytest.mark.parametrize("way", list(Way))
def test_small_eigenvalues_stay(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the strips away from what is much larger must not cost more digits than the product itself does."""
    torch.manual_seed(0)
    monkeypatch.setattr(ways, "costs", lambda *_: [(0, way)])
    x = torch.rand(32, 8, 10, 10) + 3  # a large mean: one large eigenvalue
    conv = convolution((3, 3))
    exact = by_patches(conv, x.double())
    factor = correlation.second_moment(x, axes_of(conv, x), 1).double()
    lost = torch.linalg.eigvalsh(factor - exact).abs().max() / torch.linalg.eigvalsh(exact).max()
    assert float(lost) < 1e-5
    smallest = torch.linalg.eigvalsh(factor).min() / torch.linalg.eigvalsh(exact).min()
    assert math.isclose(float(smallest), 1, rel_tol=0.05)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 2), (3, 4)])  # fewer places than channels, and more
def test_output_factor_on_the_cpu(size: tuple[int, int], dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    derivative = torch.randn(5, 8, *size).to(dtype)
    conv = convolution((3, 3), padding=1, groups=groups)
    rows = derivative.double().reshape(5, groups, 8 // groups, -1).permute(1, 0, 3, 2).flatten(1, 2)
    factor = conv.output_factor(derivative, [], diagonal=False)
    assert factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(factor.double(), rows.mT @ rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padding", [0, 3, 40])
def test_long_kernels(padding: int) -> None:
    """As many strips of strips as the kernel is long would be too many calls of Python."""
    torch.manual_seed(0)
    conv = convolution((1201,), padding=padding)
    x = torch.randn(1, 1, 1300).double()
    moment = correlation.second_moment(x, axes_of(conv, x), 1)
    torch.testing.assert_close(moment, by_patches(conv, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kernel", "padding"), [((301,), 300), ((301,), 299), ((9, 8), 8), ((5, 5, 5), 3)])
def test_borders_of_long_kernels_are_not_added_up(
    kernel: tuple[int, ...], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix that does it grows with the cube of the kernel: it would be 218 MB for 301 elements."""
    torch.manual_seed(0)
    monkeypatch.setattr(correlation, "_signs", None)  # nobody asks for it
    conv = convolution(kernel, padding=padding)
    x = torch.randn(2, 1, *(310,) if len(kernel) == 1 else (6,) * len(kernel)).double()
    moment = correlation.second_moment(x, axes_of(conv, x), 1)
    torch.testing.assert_close(moment, by_patches(conv, x), rtol=1e-11, atol=1e-11)


def test_how_large_the_matrix_is_that_adds_borders_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, padding, _ in NARROW:
        conv = convolution(kernel, padding=padding)
        axes = axes_of(conv, torch.empty(1, 1, *(5,) * len(kernel)))
        elements = correlation._signs(axes, torch.float32, torch.device("cpu")).numel()
        monkeypatch.setattr(correlation, "_SIGNS", elements)
        assert correlation.are_narrow(axes)
        monkeypatch.setattr(correlation, "_SIGNS", elements - 1)
        assert not correlation.are_narrow(axes)

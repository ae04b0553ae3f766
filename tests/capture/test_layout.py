from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.capture.layout import Layout, from_view, positions, whole


def view_layout(parameter: torch.Tensor, view: torch.Tensor, roles: str) -> Layout | None:
    return from_view("w", parameter.shape, view.shape, view.stride(), int(view.storage_offset()), roles)


@pytest.mark.parametrize(
    ("shape", "view", "roles", "label"),
    [
        ((4, 3), lambda w: w, "rc", "w"),
        ((4, 3), lambda w: w.t(), "rc", "w"),
        ((6, 3), lambda w: w[2:4], "rc", "w[2:4]"),
        ((6, 5), lambda w: w[:, 1:4].t(), "rc", "w[:, 1:4]"),
        ((6, 5), lambda w: w[1:3, 1:4], "rc", "w[1:3, 1:4]"),
        ((2, 3, 4), lambda w: w[1], "cr", "w[1:2]"),
        ((2, 3, 4), lambda w: w.reshape(2, 12), "rc", "w"),
        ((1, 5), lambda w: w, "rc", "w"),
        ((5, 1), lambda w: w, "rc", "w"),
    ],
)
def test_layout_reads_and_writes_what_the_view_shows(shape, view, roles, label) -> None:
    parameter = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    seen = view(parameter)
    layout = view_layout(parameter, seen, roles)
    assert layout is not None
    assert layout.label == label
    matrix = layout.to_matrix(parameter)
    torch.testing.assert_close(matrix[0], seen if roles == "rc" else seen.t())
    torch.testing.assert_close(layout.from_matrix(matrix), layout.region(parameter))
    torch.testing.assert_close(layout.transposed().to_matrix(parameter), matrix.mT)
    assert Layout.from_state(layout.to_state()) == layout


@pytest.mark.parametrize(
    "view", [lambda w: w[::2], lambda w: w.as_strided((2, 2), (1, 1)), lambda w: w.expand(2, 6, 4)[:, 0]]
)
def test_views_that_are_not_boxes_are_refused(view) -> None:
    parameter = torch.zeros(6, 4)
    assert view_layout(parameter, view(parameter), "rc") is None


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.permutations("src"))
def test_whole_parameters_with_any_order_of_roles(a: int, b: int, c: int, roles: list[str]) -> None:
    parameter = torch.randn(a * b, c)
    layout = whole("w", parameter.shape, (a, b, c), "".join(roles))
    matrix = layout.to_matrix(parameter)
    assert matrix.shape == layout.shape
    expected = parameter.reshape(a, b, c).permute([roles.index(role) for role in "src"])
    torch.testing.assert_close(matrix, expected)
    torch.testing.assert_close(layout.from_matrix(matrix), parameter)


def test_positions_put_the_bias_after_the_weight() -> None:
    weight, bias = whole("w", (2, 3), (2, 3), "rc"), from_view("b", (2,), (1, 2), (2, 1), 0, "sr")
    assert bias is not None
    assert positions([weight, bias]).tolist() == [0, 1, 2, 4, 5, 6, 3, 7]


def test_regions_overlap() -> None:
    w = torch.zeros(6, 4)
    first, second, third = (view_layout(w, part, "rc") for part in (w[:3], w[3:], w[2:4]))
    assert first is not None
    assert second is not None
    assert third is not None
    assert not first.overlaps(second)
    assert first.overlaps(third)
    assert second.overlaps(third)

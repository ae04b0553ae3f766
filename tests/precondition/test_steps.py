"""Where kernels look for a gradient's elements: exactly where its matrix has them. Without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from natgrad.capture.layout import Layout, from_view, whole
from natgrad.precondition.fused import _steps


def gathered(layout: Layout, gradient: Tensor) -> Tensor:
    """The matrix as the kernels put it together, from memory alone."""
    steps = _steps(layout, gradient)
    assert steps is not None
    entries, rows, columns = layout.shape
    entry, row, column = torch.meshgrid(*(torch.arange(size) for size in (entries, rows, columns)), indexing="ij")
    at = steps.start + entry * steps.by_entry + row * steps.by_row
    at = at + column // steps.elements * steps.by_block + column % steps.elements * steps.by_element
    memory = gradient.as_strided((gradient.untyped_storage().nbytes() // 8 - gradient.storage_offset(),), (1,))
    return memory[at]


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


CONVOLUTION = whole("w", (6, 4, 3, 2), (6, 24), "rc")
GROUPED = whole("w", (6, 4, 3, 2), (2, 3, 24), "src")


@pytest.mark.parametrize(
    ("layout", "gradient"),
    [
        (whole("w", (5, 7), (5, 7), "rc"), numbered(5, 7)),
        (whole("w", (5, 7), (5, 7), "cr"), numbered(5, 7)),
        (whole("w", (5, 7), (5, 7), "rc"), numbered(7, 5).T),
        (whole("w", (5, 7), (5, 7), "rc"), numbered(5, 9)[:, 1:8]),
        (whole("b", (5,), (5,), "r"), numbered(5)),
        (whole("b", (5,), (5,), "r"), numbered(11)[1::2]),
        (CONVOLUTION, numbered(6, 4, 3, 2)),
        (CONVOLUTION, numbered(6, 4, 3, 2).contiguous(memory_format=torch.channels_last)),
        (GROUPED, numbered(6, 4, 3, 2)),
        (GROUPED, numbered(6, 4, 3, 2).contiguous(memory_format=torch.channels_last)),
        (whole("w", (6, 4, 1, 1), (6, 4), "rc"), numbered(6, 4, 1, 1).contiguous(memory_format=torch.channels_last)),
        (from_view("w", (9, 4), (3, 4), (4, 1), 12, "rc"), numbered(9, 4)),
    ],
)
def test_elements_are_where_the_matrix_has_them(layout: Layout, gradient: Tensor) -> None:
    assert torch.equal(gathered(layout, gradient), layout.to_matrix(gradient))


def test_what_few_numbers_cannot_say_is_left_to_torch() -> None:
    assert _steps(CONVOLUTION, numbered(4, 6, 3, 2).transpose(0, 1)) is None
    assert _steps(CONVOLUTION, numbered(6, 4, 2, 3).transpose(2, 3)) is None
    assert _steps(whole("w", (5, 7), (5, 7), "rc"), torch.zeros(7).expand(5, 7)) is None

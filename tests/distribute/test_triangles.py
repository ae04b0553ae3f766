"""Symmetric matrices survive being folded, at every size."""

from __future__ import annotations

import pytest
import torch

from natgrad.distribute.triangles import fold, folded_numel, unfold


@pytest.mark.parametrize("size", [*range(1, 12), 64, 65])
@pytest.mark.parametrize("stack", [1, 3])
def test_what_is_folded_unfolds_to_the_same_bits(stack, size):
    matrices = torch.randn(stack, size, size)
    matrices = matrices + matrices.mT
    flat = fold(matrices)
    assert flat.shape == (folded_numel(stack, size),) == (stack * size * (size + 1) // 2,)
    assert (unfold(flat, stack, size) == matrices).all()


def test_only_the_upper_triangle_is_looked_at():
    matrix = torch.arange(25.0).view(1, 5, 5)
    upper = matrix.triu()
    assert (unfold(fold(matrix), 1, 5) == upper + upper.triu(1).mT).all()

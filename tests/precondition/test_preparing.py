"""Which factors kernels prepare; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from natgrad import launches
from natgrad.precondition import preparing


class Sum:
    """Of a factor on a GPU that is not there."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

    def __init__(self, size: int) -> None:
        self.numel = lambda: size * size
        self.is_contiguous = lambda: True
        self.data_ptr = lambda: 256


def block(*sizes: int) -> Any:
    sides = [SimpleNamespace(sum=Sum(size)) for size in sizes]
    return SimpleNamespace(straight=SimpleNamespace(sides=sides), swapped=None)


def test_factors_that_32_bits_cannot_count_are_prepared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "able", lambda device: True)
    layer = [block(1280, 5121), block(5120, 1281), block(3840, 1281), block(1280, 1281)]  # GPT-2 large has 36
    assert preparing.prepares(layer * 20)
    assert not preparing.prepares(layer * 36)

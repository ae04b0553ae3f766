from __future__ import annotations

import math

import pytest
import torch

from natgrad.precondition.clip import clip


@pytest.mark.parametrize(
    ("length", "kappa", "factor"), [(4e-3, 1e-3, 0.5), (1e-4, 1e-3, 1.0), (0.0, 1e-3, 1.0), (5.0, None, 1.0)]
)
def test_clip(length: float, kappa: float | None, factor: float) -> None:
    result = clip(torch.tensor(length, dtype=torch.float64), kappa)
    assert float(result.factor) == pytest.approx(factor)
    assert float(result.predicted_kl) == pytest.approx(0.5 * factor**2 * length)
    assert bool(result.finite)


@pytest.mark.parametrize("length", [math.nan, math.inf])
def test_a_length_that_is_not_finite_stops_the_step(length: float) -> None:
    result = clip(torch.tensor(length), 1e-3)
    assert not bool(result.finite)
    assert math.isfinite(float(result.factor))

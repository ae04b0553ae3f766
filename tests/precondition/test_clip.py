from __future__ import annotations

import math

import pytest
import torch

from natgrad.precondition.clip import clip, tighter


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


@pytest.mark.parametrize(("first", "second", "factor"), [(4.0, 1.0, 0.5), (4.0, 16.0, 0.25), (0.5, 4.0, 0.5)])
def test_two_measures_of_one_step(first: float, second: float, factor: float) -> None:
    """The tighter one decides; the KL predicted is that of the second."""
    lengths = torch.tensor([first, second], dtype=torch.float64)
    both = tighter(clip(lengths[0], 1.0), lengths[1], 1.0)
    assert float(both.factor) == pytest.approx(factor)
    assert float(both.predicted_kl) == pytest.approx(0.5 * factor**2 * second)

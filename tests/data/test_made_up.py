"""Made-up data has the shapes, types and scale of the real one, of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from natgrad import data
from natgrad.recipes.schema import DataOptions

PLACE = data.Place(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "shape"), [("digits", (1, 8, 8)), ("cifar10", (3, 32, 32)), ("images", (3, 24, 24)), ("text", (12,))]
)
def test_every_kind(kind: Any, shape: tuple[int, ...]) -> None:
    options = DataOptions(kind=kind, size=24, context=12, pad=2, flip=True)
    found = data.synthetic(options, seed=0, place=PLACE, classes=7)
    assert (found.shape, found.classes, len(found.labels)) == (shape, 7, 7)
    assert "made-up" in found.description
    for x, y in (next(found.train.epoch(0, batch=256)), next(found.test.once(batch=256))):
        assert x.shape == (256, *shape)
        assert y.dtype == torch.int64
        assert (y.min(), y.max()) == (0, 6)
        if kind == "text":
            assert x.dtype == torch.int64
            assert y.shape == x.shape
        else:
            assert x.dtype == torch.float32
            assert y.shape == (256,)
            assert x.isfinite().all()
    again = data.synthetic(options, seed=0, place=PLACE, classes=7)
    assert torch.equal(next(again.train.epoch(1, batch=8))[0], next(found.train.epoch(1, batch=8))[0])
    found.close()


def test_pixels_as_targets() -> None:
    found = data.synthetic(DataOptions(kind="digits"), seed=0, place=PLACE, classes=10, reconstruct=True)
    x, y = next(found.train.epoch(0, batch=16))
    assert torch.equal(y, x.flatten(1))
    assert y.max() <= 1
    with pytest.raises(data.DataError, match="cannot be reconstructed"):
        data.synthetic(DataOptions(kind="text"), seed=0, place=PLACE, classes=10, reconstruct=True)


def test_normalised_as_the_real_ones() -> None:
    found = data.synthetic(DataOptions(kind="cifar10"), seed=0, place=PLACE, classes=10)
    x, _ = next(found.train.epoch(0, batch=256))
    means = (0.5 - torch.tensor([0.4914, 0.4822, 0.4465])) / torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(x.mean((0, 2, 3)), means, rtol=0, atol=0.02)

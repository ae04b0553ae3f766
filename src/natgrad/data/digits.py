"""Scikit-learn's 1,797 handwritten digits, which come with it."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.data.base import needed

TRAINING = 1500
"""How many of the digits are for training; the other 297 are for testing."""


def read() -> tuple[Tensor, Tensor]:
    """Bytes from 0 to 16 (1797, 1, 8, 8) and labels, in a fixed random order: writers are one after the other."""
    found = needed("sklearn.datasets", why='data.kind="digits"').load_digits()
    images = torch.from_numpy(found.images).to(torch.uint8).unsqueeze(1)
    order = torch.randperm(len(images), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    return images[order], torch.from_numpy(found.target).long()[order]

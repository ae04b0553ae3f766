"""Gradients that K-FAC leaves to the optimizer: checked for NaN with the rest, and dropped with the rest.

They go through one flat tensor, so that this takes a handful of launches and not a few per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Guard:
    """A set of gradients as one flat tensor."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        self._flat = torch.cat([gradient.flatten() for gradient in self._gradients]) if self._gradients else None

    def finite(self) -> Tensor | None:
        """Whether all of them are finite, on the device; None where there are none."""
        return None if self._flat is None else torch.isfinite(self._flat).all()

    def drop_unless(self, finite: Tensor) -> None:
        """Sets them to zero, in place, unless `finite`."""
        if self._flat is None:
            return
        kept = torch.where(finite, self._flat, 0).split([gradient.numel() for gradient in self._gradients])
        shaped = [part.reshape(gradient.shape) for part, gradient in zip(kept, self._gradients, strict=True)]
        torch._foreach_copy_(self._gradients, shaped)

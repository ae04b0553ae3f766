"""Gradients that K-FAC leaves to the optimizer: checked for NaN with the rest, and dropped with the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Tensors up to this size go through one flat tensor a dtype, a handful of launches for all; larger ones are not copied.
_SMALL = 2**16


def all_finite(gradients: Sequence[Tensor]) -> Tensor | None:
    """Whether all of them are finite, on the device; None where there are none."""
    if not gradients:
        return None
    return torch.isfinite(torch.stack(torch._foreach_norm(list(gradients), ord=math.inf))).all()


def drop_unless(finite: Tensor, gradients: Sequence[Tensor]) -> None:
    """Sets gradients to zero, in place, unless `finite`; without asking the device where that would mean to wait."""
    if finite.device.type == "cpu":
        for gradient in () if bool(finite) else gradients:
            gradient.zero_()
        return
    small: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() <= _SMALL:
            small.setdefault(gradient.dtype, []).append(gradient)
        else:
            gradient.masked_fill_(~finite, 0)
    for group in small.values():
        flat = torch.cat([gradient.flatten() for gradient in group])
        kept = torch.where(finite, flat, torch.zeros_like(flat)).split([gradient.numel() for gradient in group])
        torch._foreach_copy_(group, [part.reshape(g.shape) for part, g in zip(kept, group, strict=True)])

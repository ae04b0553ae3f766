"""Gradients as a whole: checked for NaN together, dropped together, scaled together, without asking the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Tensors up to this size go through one flat tensor a dtype, a handful of launches for all; larger ones are not copied.
_SMALL = 2**16


def dense(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradients that arithmetic can be done with: present, not sparse, not empty."""
    return {n: g for n, g in gradients.items() if g is not None and g.layout == torch.strided and g.numel()}


def all_finite(gradients: Sequence[Tensor]) -> Tensor | None:
    """Whether all of them are finite, on the device; None where there are none."""
    if not gradients:
        return None
    return torch.isfinite(torch.stack(torch._foreach_norm(list(gradients), ord=math.inf))).all()


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies tensors, in place, with a number on the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in groups.items():
        torch._foreach_mul_(group, factor.to(device, dtype, non_blocking=True))


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

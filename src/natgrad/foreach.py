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
    overwrite_if(~finite, gradients, None)


def overwrite_if(condition: Tensor, targets: Sequence[Tensor], sources: Sequence[Tensor] | None) -> None:
    """Copies sources (None: zeros) into targets where a condition on the device holds; otherwise not a bit changes."""
    if condition.device.type == "cpu":
        for number, target in enumerate(targets if bool(condition) else ()):
            target.zero_() if sources is None else target.copy_(sources[number])
        return
    small: dict[torch.dtype, list[int]] = {}
    for number, target in enumerate(targets):
        if target.numel() <= _SMALL:
            small.setdefault(target.dtype, []).append(number)
        else:
            if sources is None:
                target.masked_fill_(condition, 0)
            else:
                target.copy_(torch.where(condition, sources[number], target))
    for numbers in small.values():
        group = [targets[number] for number in numbers]
        flat = torch.cat([target.flatten() for target in group])
        new = (
            torch.zeros_like(flat) if sources is None else torch.cat([sources[number].flatten() for number in numbers])
        )
        chosen = torch.where(condition, new, flat).split([target.numel() for target in group])
        torch._foreach_copy_(group, [part.reshape(t.shape) for part, t in zip(chosen, group, strict=True)])

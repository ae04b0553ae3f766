"""Tensors of a checkpoint: as they were saved, or an error that names them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.statistics import moving

Name = TypeVar("Name", bound=Hashable)
_PRECISE = (torch.float32, torch.float64)


def stored_tensor(what: str, found: Any, shape: tuple[int, ...]) -> Tensor:
    """A floating-point tensor of this shape, in at least 32 bits: more is not made of fewer, but can be reckoned with.
    `what` names it in errors.
    """
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise ValueError(
            f"{what} is {_described(found)}, expected a floating-point tensor of shape {shape}: load the state as "
            "kfac.state_dict() made it"
        )
    if tuple(found.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(found.shape)} in the checkpoint, the model needs {shape}")
    return found if found.dtype in _PRECISE else found.float()


def not_finite(tensors: Mapping[Name, Tensor]) -> list[Name]:
    """The names of those that hold NaN or inf; asks each device once for a precision."""
    alike: dict[tuple[torch.device, torch.dtype], list[Name]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(name)
    found: set[Name] = set()
    for names in alike.values():
        flags = moving.finite([tensors[name] for name in names]).tolist()
        found.update(name for name, finite in zip(names, flags, strict=True) if not finite)
    return [name for name in tensors if name in found]


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    """Running sums that hold NaN or inf: nothing that is added later makes numbers of them."""
    bad = not_finite(tensors)
    if bad:
        more = f", and so do {len(bad) - 1} more," if len(bad) > 1 else ""
        raise ValueError(
            f"{bad[0]} holds NaN or inf{more} in the checkpoint: load an earlier one, or none, and K-FAC begins with "
            "new statistics"
        )


def _described(found: Any) -> str:
    if found is None:
        return "missing from the checkpoint"
    kind = str(found.dtype).removeprefix("torch.") if isinstance(found, Tensor) else f"a {type(found).__name__}"
    return f"{kind} in the checkpoint"

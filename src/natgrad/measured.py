"""The numbers that a training script gives: what they may be, their means, and their way from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from natgrad.training.tally import Reading

Value = float | Tensor
"""A number, or a tensor that holds one."""

_ROUNDING = 1e-4  # how far outside of 0 to 1 a mean of ones may come to lie
_OURS = ("kind", "time", "not_finite", "seconds", "trained", "step_seconds", "parts")  # not for users to measure


class Mean:
    """Of numbers, and of tensors that nobody waits for: one kernel each."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._on_device: Tensor | None = None
        self._count = 0

    def add(self, value: Value) -> None:
        """One more."""
        self._count += 1
        if not isinstance(value, Tensor):
            self._sum += value
        elif self._on_device is None:
            self._on_device = value.to(_wide(value.device), copy=True)
        else:
            self._on_device += value.to(self._on_device.device, non_blocking=True)

    def value(self) -> Value:
        """Of all so far."""
        return (self._sum if self._on_device is None else self._on_device + self._sum) / self._count


@dataclass(frozen=True)
class Asked:
    """The numbers of a line, some of them on their way from the device. `calls` of `train` told of `steps` steps."""

    step: int
    steps: int
    calls: int
    known: Mapping[str, float | None]
    coming: tuple[str, ...]
    reading: Reading | None

    @classmethod
    def of(cls, numbers: Mapping[str, Value | None], *, step: int, steps: int, calls: int) -> Asked:
        """Sends for those that are tensors."""
        tensors = {name: one for name, one in numbers.items() if isinstance(one, Tensor)}
        known = {name: None if isinstance(one, Tensor) else one for name, one in numbers.items()}
        return cls(
            step, steps, calls, known, tuple(tensors), Reading(_joined([*tensors.values()])) if tensors else None
        )

    def arrived(self) -> bool:
        """Whether `numbers` would not wait."""
        return self.reading is None or self.reading.arrived()

    def numbers(self) -> dict[str, float | None]:
        """All of them; waits where it must."""
        values = [] if self.reading is None else self.reading.values()
        return {**self.known, **dict(zip(self.coming, values, strict=True))}


def _joined(numbers: list[Tensor]) -> Tensor:
    place = numbers[0].device
    return torch.stack([one.to(place, _wide(place), non_blocking=True) for one in numbers])


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have


def measured(
    loss: Value | None, accuracy: Value | None, error: Value | None, more: Mapping[str, Value | None]
) -> tuple[dict[str, Value], dict[str, Value]]:
    """Loss and accuracy, and everything else, without what is None."""
    if accuracy is not None and error is not None:
        raise TypeError("accuracy and error are both given: one says the other")
    if wrong := [name for name in _OURS if name in more]:
        raise ValueError(f"{', '.join(wrong)} cannot be measured: lines have their own; choose another name")
    given = {name: number(name, one) for name, one in {"loss": loss, **more}.items() if one is not None}
    for name, share in (("accuracy", accuracy), ("error", error)):
        if share is not None:
            part = number(name, share)
            if not isinstance(part, Tensor) and not is_share(part):
                raise ValueError(not_a_share(name, part))
            given["accuracy"] = part if name == "accuracy" else 1 - part
    if not given:
        raise TypeError("there is nothing to write: give loss=, accuracy= or another number")
    return (
        {name: one for name, one in given.items() if name in ("loss", "accuracy")},
        {name: one for name, one in given.items() if name not in ("loss", "accuracy")},
    )


def number(name: str, value: Any) -> Value:
    """As Python has it; a tensor with one on a device that would have to be waited for stays there."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(
                f"{name} must be one number, got a tensor of shape {tuple(value.shape)} and type {value.dtype}; "
                "take its mean first"
            )
        value = value.detach().reshape(())
        return read_number(value) if value.device.type == "cpu" else value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a tensor with one, got {type(value).__name__}")
    return int(value) if isinstance(value, Integral) else float(value)


def read_number(value: Value) -> float:
    """Waits for a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def is_share(value: float | None) -> bool:
    """Whether it can be a part of a whole; what is no number may have been one."""
    return value is None or math.isnan(value) or -_ROUNDING <= value <= 1 + _ROUNDING


def not_a_share(name: str, value: float | None) -> str:
    """What to say of a number that is none."""
    return f"{name} must be from 0 to 1, got {value:g}; is it in percent?"

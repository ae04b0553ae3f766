"""Every step's predicted KL, kept on the device until somebody asks."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from natgrad.precondition.clip import Clip

LENGTH = 10_000


class History:
    """The last 10,000 steps: step, damping, KL cap, predicted KL and clip factor."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float | None, float | None, Tensor, Tensor]] = deque(maxlen=LENGTH)

    def add(self, step: int, damping: float | None, cap: float | None, clip: Clip) -> None:
        """Notes one step, without waiting for the device."""
        self._steps.append((step, damping, cap, clip.predicted_kl, clip.factor))

    def columns(self) -> dict[str, list[float | None]]:
        """One list a quantity; waits for the device."""
        steps, dampings, caps, kls, factors = zip(*self._steps, strict=True) if self._steps else ((),) * 5
        numbers = torch.stack([torch.stack(kls), torch.stack(factors)]).tolist() if kls else [[], []]
        return {
            "step": list(steps),
            "damping": list(dampings),
            "kl_cap": list(caps),
            "predicted_kl": numbers[0],
            "clip_factor": numbers[1],
        }

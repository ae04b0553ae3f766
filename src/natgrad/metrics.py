"""Numbers about the last step, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.precondition.clip import Clip
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.linalg import symmetric_eigen

_COUNTERS = ("rejected_statistics", "failed_decompositions", "skipped_steps")


@dataclass
class Metrics:
    """The last step's clip and damping, and counts since the start."""

    clip: Clip | None = None
    damping: float | None = None
    rejected_statistics: int | Tensor = 0
    failed_decompositions: int | Tensor = 0
    skipped_steps: int | Tensor = 0

    def snapshot(
        self, preconditioner: Preconditioner, *, step: int, factors_at: int | None
    ) -> dict[str, float | int | None]:
        """Plain numbers, after `step` steps; waits for the device."""
        solved = list(preconditioner.solved.values())
        low, high = _eigenvalue_range(solved, preconditioner.solver)
        last = step - 1
        return {
            "step": step,
            "predicted_kl": None if self.clip is None else float(self.clip.predicted_kl),
            "clip_factor": None if self.clip is None else float(self.clip.factor),
            "damping": self.damping,
            "eigenvalue_min": low,
            "eigenvalue_max": high,
            "factor_age": None if factors_at is None else last - factors_at,
            "decomposition_age": max((last - member.solved_at for member in solved), default=None),
            **self.state(),
        }

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {name: int(getattr(self, name)) for name in _COUNTERS}

    def load(self, state: dict[str, Any]) -> None:
        """Continues counting from a checkpoint."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))


def _eigenvalue_range(solved: Iterable[SolvedBlock], solver: str) -> tuple[float | None, float | None]:
    """The smallest and largest eigenvalue of the undamped blocks: of their decompositions, or for inverses of their
    factors.
    """
    low: list[Tensor] = []
    high: list[Tensor] = []
    for member in solved:
        if solver == "eigen":
            sides = [side.values for side in member.sides]
            scale = member.scale
        else:
            estimate = member.block.estimate()
            sides = [side if side.dim() == 2 else symmetric_eigen(side).values for side in estimate.sides]
            scale = estimate.scale
        values = [side for side in sides if side is not None]
        low.append((scale * torch.stack([side.amin(-1) for side in values]).prod(0)).amin())
        high.append((scale * torch.stack([side.amax(-1) for side in values]).prod(0)).amax())
    if not low:
        return None, None
    return float(torch.stack(low).amin()), float(torch.stack(high).amax())

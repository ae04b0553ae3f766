"""Numbers about the last step, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.precondition.stack import SolvedBlock
from natgrad.precondition.trust_region import Clip
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

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {name: int(getattr(self, name)) for name in _COUNTERS}

    def load(self, state: dict[str, Any]) -> None:
        """Continues counting from a checkpoint."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))


def eigenvalue_range(solved: Iterable[SolvedBlock], solver: str) -> tuple[float | None, float | None]:
    """The smallest and largest eigenvalue of the undamped blocks: of their decompositions, or for inverses of their
    factors.
    """
    low: list[Tensor] = []
    high: list[Tensor] = []
    for member in solved:
        if solver == "eigen":
            sides = [member.row.values, member.column.values]
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

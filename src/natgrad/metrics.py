"""Numbers about the last step, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.precondition.clip import Clip
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.linalg import symmetric_eigen

_COUNTERS = (
    "rejected_statistics",
    "failed_decompositions",
    "skipped_steps",
    "background_failures",
    "late_decompositions",
)


class Failures:
    """How many of so many did not come out right. What did the device adds up, and is asked when somebody wants to
    know: to add up what did not would be one more launch in every step.
    """

    def __init__(self, known: int = 0) -> None:
        self._tried = known
        self._right: int | Tensor = 0

    def add(self, right: Tensor, of: int = 1) -> None:
        """So many more came out right, `of` so many."""
        self._tried += of
        self._right += right

    def __int__(self) -> int:
        return self._tried - int(self._right)


@dataclass
class Metrics:
    """The last step's clip and damping, and counts since the start."""

    clip: Clip | None = None
    damping: float | None = None
    rejected_statistics: Failures = field(default_factory=Failures)
    failed_decompositions: int | Tensor = 0
    skipped_steps: Failures = field(default_factory=Failures)
    background_failures: int = 0
    late_decompositions: int = 0
    delivery_age: int | None = None  # steps that the parameters of a stats worker's last statistics were behind

    def snapshot(
        self, preconditioner: Preconditioner, *, step: int, factors_at: int | None
    ) -> dict[str, float | int | None]:
        """Plain numbers, after `step` steps; waits for the device."""
        solved = list(preconditioner.solved.values())
        low, high = _eigenvalue_range(known_ranges(preconditioner), preconditioner.solver)
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
            "decompositions": preconditioner.decompositions,
        }

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {name: int(getattr(self, name)) for name in _COUNTERS}

    def load(self, state: dict[str, Any], *, first: bool) -> None:
        """Continues counting from a checkpoint; what ranks count apart goes on with the `first`."""
        for name in _COUNTERS:
            count = int(state[name]) if first or name == "skipped_steps" else 0
            setattr(self, name, Failures(count) if isinstance(getattr(self, name), Failures) else count)


@dataclass(frozen=True)
class LayerMetrics:
    """A block of K-FAC: the range of its eigenvalues without damping, its condition number with it, and how many steps
    ago it was decomposed.
    """

    name: str
    eigenvalue_min: float
    eigenvalue_max: float
    condition: float
    age: int


def known_ranges(preconditioner: Preconditioner) -> list[SolvedBlock]:
    """The blocks whose eigenvalues this process can tell: on several ranks those whose eigenbases it has."""
    solved = [member for member in preconditioner.solved.values() if member.sides]
    return solved if preconditioner.others is None or preconditioner.solver == "eigen" else []


def layer_metrics(solved: Sequence[SolvedBlock], solver: str, damping: float, step: int) -> list[LayerMetrics]:
    """Of some blocks, after `step` steps; waits for the device once."""
    if not solved:
        return []
    ranges = torch.stack([torch.stack(_range(member, solver)).double() for member in solved])
    return [
        LayerMetrics(member.block.key, low, high, (high + damping) / (low + damping), step - 1 - member.solved_at)
        for member, (low, high) in zip(solved, ranges.clamp(min=0).tolist(), strict=True)
    ]


def _eigenvalue_range(solved: Iterable[SolvedBlock], solver: str) -> tuple[float | None, float | None]:
    """The smallest and largest eigenvalue of all blocks."""
    ranges = [_range(member, solver) for member in solved]
    if not ranges:
        return None, None
    return (
        float(torch.stack([low for low, _ in ranges]).amin()),
        float(torch.stack([high for _, high in ranges]).amax()),
    )


def _range(member: SolvedBlock, solver: str) -> tuple[Tensor, Tensor]:
    """The smallest and largest eigenvalue of an undamped block: of its decomposition, for inverses of its factors."""
    if solver == "eigen":
        sides = [side.values for side in member.sides]
        scale = member.scale
    else:
        estimate = member.block.estimate()
        sides = [side if side.dim() == 2 else symmetric_eigen(side).values for side in estimate.sides]
        scale = estimate.scale
    values = [side for side in sides if side is not None]
    low = (scale * torch.stack([side.amin(-1) for side in values]).prod(0)).amin()
    return low, (scale * torch.stack([side.amax(-1) for side in values]).prod(0)).amax()

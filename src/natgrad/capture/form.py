"""What shape of Fisher block a use of a parameter contributes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Where the gradients of a vector's cases come from: its uses, the model run case by case, or only the batch's sum.
USES, PER_CASE, BATCH = "uses", "per-case", "batch"


@dataclass(frozen=True)
class Form:
    """How a block's column side is factored, and what counts as one row.

    `columns` holds the sizes of the column sides, without a bias: one for a weight, two for a weight on a flattened
    feature map (doubly factored), none for a vector. `full` asks for a dense block whatever a vector's size. With
    `reduced` a row is a whole case, averaged over its places, which are told apart by axis `case_axis` of the shape
    before flattening. `note` says why an approximation that was asked for, or a better one, is not used here.
    """

    columns: tuple[int, ...]
    full: bool = False
    reduced: bool = False
    case_axis: int | None = None
    source: str = USES
    note: str = ""

    def fits(self, other: Form) -> bool:
        """Whether statistics of both may be added up: of one shape, and of rows of one kind."""
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        told = self.columns != () or self.case_axis is not None
        return self.columns, self.reduced, self.source, told

    def to_state(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Form:
        """The inverse of `to_state`, also after a round through a file."""
        return cls(**{**state, "columns": tuple(state["columns"])})

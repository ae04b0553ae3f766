"""What the user has chosen, by the names of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TypeVar

T = TypeVar("T")

SHARING = ("expand", "reduce")
VECTORS = ("full", "diagonal", "optimizer")


@dataclass(frozen=True)
class Choices:
    """Which approximation each parameter gets. Mappings go from name patterns to values; the first match counts.

    `feature_maps` holds shapes of flattened inputs, empty where the graph is to show them; inputs above
    `doubly_factored_above` are looked at in any case.
    """

    sharing: Mapping[str, str] = field(default_factory=dict)
    batch_axis: Mapping[str, int] = field(default_factory=dict)
    feature_maps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    doubly_factored_above: int | None = None
    vectors: str = "full"

    def reduces(self, name: str) -> bool:
        """Whether a parameter's rows are whole cases."""
        return first_match(self.sharing, name) == "reduce"

    def axis_of(self, name: str) -> int | None:
        """The user's batch axis."""
        return first_match(self.batch_axis, name)

    def map_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of the feature map that a weight's input is, as the user gave it; () where the graph shall tell."""
        return first_match(self.feature_maps, name)


def first_match(values: Mapping[str, T], name: str) -> T | None:
    """The value of the first pattern that matches a name."""
    return next((value for pattern, value in values.items() if fnmatch(name, pattern)), None)


def split_map(shape: Sequence[int], *, channels_last: bool = False) -> tuple[int, int]:
    """Channels and places: (C, H, W) → (C, H · W), or (H, W, C) → (H · W, C)."""
    if channels_last:
        return math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:])

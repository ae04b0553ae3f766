"""The numbers that may change from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from natgrad.options import Hyperparameter, Interval, Number
from natgrad.trust_region.region import TrustRegion


@dataclass(frozen=True)
class Now:
    """The numbers of one step."""

    cap: float | None
    damping: float
    l2: float
    momentum: float

    @property
    def total_damping(self) -> float:
        """What is added to the Fisher: λ, and the curvature of an L2 term in the loss."""
        return self.damping + self.l2


class Settings:
    """Hyper-parameters, each a number or a callable of the step, and the states of those that have one."""

    def __init__(
        self,
        *,
        damping: Number,
        factor_decay: Number,
        l2: Number,
        raw_momentum: Number,
        factor_update_steps: Number,
        inv_update_steps: Number,
        region: TrustRegion | None,
    ) -> None:
        self.factor_interval = Interval("factor_update_steps", factor_update_steps)
        self.refresh_interval = Interval("inv_update_steps", inv_update_steps)
        self.decay = Hyperparameter("factor_decay", factor_decay, above=0, below=1, inclusive=True)
        self._damping = Hyperparameter("damping", damping, above=0)
        self._l2 = Hyperparameter("l2", l2, above=0, inclusive=True)
        self._momentum = Hyperparameter("raw_momentum", raw_momentum, above=0, below=1, inclusive=True)
        self._cap = None if region is None else region.cap

    def at(self, step: int) -> Now:
        """All that a step needs, checked before anything changes."""
        return Now(
            cap=None if self._cap is None else self._cap.at(step),
            damping=self._damping.at(step),
            l2=self._l2.at(step),
            momentum=self._momentum.at(step),
        )

    def _all(self) -> list[Hyperparameter]:
        own = [self._damping, self.decay, self._l2, self._momentum, self.factor_interval, self.refresh_interval]
        return own if self._cap is None else [*own, self._cap]

    def state(self) -> dict[str, Any]:
        """The states of schedules driven by the loop and of adaptive damping, by option."""
        return {one.name: state for one in self._all() if (state := one.state()) is not None}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        for one in self._all():
            one.load(state.get(one.name))

"""The numbers that may change from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from natgrad.options import Hyperparameter, Interval, Now, Number
from natgrad.trust_region.region import TrustRegion


class Settings:
    """Hyper-parameters, each a number or a callable of the step, and the states of those that have one; of `others`,
    which are read elsewhere, the states alone.
    """

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
        others: Iterable[Hyperparameter],
    ) -> None:
        self._others = list(others)
        self.factor_interval = Interval("factor_update_steps", factor_update_steps)
        self._refresh_interval = Interval("inv_update_steps", inv_update_steps)
        self._decay = Hyperparameter("factor_decay", factor_decay, above=0, below=1, inclusive=True)
        self._damping = Hyperparameter("damping", damping, above=0)
        self._l2 = Hyperparameter("l2", l2, above=0, inclusive=True)
        self.momentum = Hyperparameter("raw_momentum", raw_momentum, above=0, below=1, inclusive=True)
        self._cap = None if region is None else region.cap
        self._always: Now | None = None  # where no step differs from others

    def at(self, step: int) -> Now:
        """All that a step needs, checked before anything changes."""
        if self._always is not None:
            return self._always
        now = Now(
            cap=None if self._cap is None else self._cap.at(step),
            damping=self._damping.at(step),
            l2=self._l2.at(step),
            momentum=self.momentum.at(step),
            decay=self._decay.at(step),
            refresh_interval=self._refresh_interval.at(step),
            next_factor_interval=self.factor_interval.at(step + 1),
        )
        if all(one.is_fixed for one in self._own()):
            self._always = now
        return now

    def _own(self) -> list[Hyperparameter]:
        own = [self._damping, self._decay, self._l2, self.momentum, self.factor_interval, self._refresh_interval]
        return own if self._cap is None else [*own, self._cap]

    def _all(self) -> list[Hyperparameter]:
        return [*self._own(), *self._others]

    def state(self) -> dict[str, Any]:
        """The states of schedules driven by the loop and of adaptive damping, by option."""
        return {one.name: state for one in self._all() if (state := one.state()) is not None}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a checkpoint's states that do not fit, before anything changes."""
        for one in self._all():
            one.check(state.get(one.name))

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        for one in self._all():
            one.load(state.get(one.name))

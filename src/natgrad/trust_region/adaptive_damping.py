"""Levenberg-Marquardt damping: λ follows how well the quadratic model predicts what a step does to the loss."""

from __future__ import annotations

import math

from natgrad.options import Hyperparameter, fraction, whole_number

# Martens & Grosse 2015, section 6.5: below the first the model promised too much, above the second it can be trusted.
TOO_LOW, GOOD = 0.25, 0.75


class AdaptiveDamping:
    """Damping λ that adapts (Levenberg-Marquardt, after Martens & Grosse 2015, section 6.5): pass it as ``damping=``.

    Every so many steps the change of the loss on the step's own batch is compared with what the quadratic model
    ``∇ᵀδ + ½ δᵀCδ`` predicts for the step δ that the optimizer has taken, with C the Gauss-Newton matrix of the loss. ρ
    is their ratio: λ shrinks where ρ > ¾ and grows where ρ < ¼. A comparison changes λ alone, never the weights. It
    needs the loss again::

        kfac.objective = lambda: loss_of(model(x), y)  # before every optimizer.step()

    Args:
        start: λ of the first step. Larger is safer, and takes longer: it shrinks by `rate` a step.
        every: compare every so many steps; at the lower bound, where too little damping does harm fastest, every step.
        rate: λ changes by this factor per step between comparisons: by ``rate ** every`` at each.
        low: lower bound of λ.
        high: upper bound of λ.

    λ of the next step is ``kfac.damping``; every KFAC has its own.
    """

    def __init__(
        self,
        start: float = 1e-3,
        *,
        every: int = 5,
        rate: float = 0.95,
        low: float = 1e-8,
        high: float = 1e4,
    ) -> None:
        bounds = [Hyperparameter(name, value, above=0).at(0) for name, value in (("low", low), ("high", high))]
        self.low, self.high = bounds
        self.start = Hyperparameter("start", start, above=0).at(0)
        whole_number("every", every)
        fraction("rate", rate)
        self.every, self.rate = every, rate
        if rate == 1:
            raise ValueError("rate must be below 1: λ would never change")
        if not self.low <= self.start <= self.high:
            raise ValueError(f"start must be between low and high, {self.low:g} and {self.high:g}; got {start!r}")
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.value = self.start
        self.ratio: float | None = None  # ρ of the last comparison
        self._compared_at = -1

    def fresh(self) -> AdaptiveDamping:
        """The same, at its beginning."""
        return AdaptiveDamping(self.start, every=self.every, rate=self.rate, low=self.low, high=self.high)

    def __call__(self, step: int) -> float:
        """λ, whatever the step."""
        return self.value

    def __repr__(self) -> str:
        bounds = f"low={self.low:g}, high={self.high:g}"
        return f"AdaptiveDamping({self.start:g}, every={self.every}, rate={self.rate}, {bounds})"

    def due(self, step: int) -> bool:
        """Whether the step is to be compared with its prediction."""
        return step - self._compared_at >= self.every or self.value <= self.low

    def compare(self, step: int, *, before: float, after: float, predicted: float, resolution: float) -> None:
        """Takes in one comparison of losses.

        `predicted` is the change that the model predicts, `resolution` what the losses can be told apart by. What
        says nothing (a loss that is not finite before the step, a step or a change too small to see) changes nothing,
        nor does a decrease that the model did not predict, as momentum makes them. A loss that is not finite after the
        step, or higher as the model itself predicted, means that the step was too long.
        """
        steps, self._compared_at = step - self._compared_at, step
        if not math.isfinite(before) or math.isnan(predicted):
            return
        if math.isfinite(after) and abs(after - before) <= resolution and abs(predicted) <= resolution:
            return
        self.ratio = (after - before) / predicted if math.isfinite(after) and predicted < 0 else None
        factor = self.rate ** min(steps, self.every)
        if self.ratio is not None and self.ratio > GOOD:
            self.value = max(self.low, self.value * factor)
        elif (self.ratio is not None and self.ratio < TOO_LOW) or (self.ratio is None and not after <= before):
            self.value = min(self.high, self.value / factor)

    def state_dict(self) -> dict[str, float | int | None]:
        """Where it is, for a checkpoint; KFAC's own state holds it."""
        return {"value": self.value, "ratio": self.ratio, "compared_at": self._compared_at}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Goes on from a checkpoint, within this object's bounds."""
        value, ratio, compared_at = state["value"], state["ratio"], state["compared_at"]
        assert value is not None, "state_dict() stores it"
        assert compared_at is not None, "state_dict() stores it"
        self.value = min(self.high, max(self.low, value))
        self.ratio = ratio
        self._compared_at = int(compared_at)

"""What happens around the optimizer's step: measured before, cut short after, compared with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.foreach import dense
from natgrad.precondition.clip import Clip, clip
from natgrad.settings import Now
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.objective import Along, Closure, Objective
from natgrad.trust_region.region import TrustRegion
from natgrad.trust_region.taken import Taken

Quadratic = Callable[[Mapping[str, Tensor], float], Tensor]  # δᵀF̂δ of a direction, with some damping in F̂
_ROUNDINGS = 8  # losses closer than this many units of rounding cannot be told apart


@dataclass(frozen=True)
class _Pending:
    """A step under way: its number, the numbers that hold for it, and what a comparison needs."""

    step: int
    cap: float | None
    damping: float
    l2: float
    compare: bool
    value: Tensor | None = None
    gradients: Mapping[str, Tensor] | None = None


class Controller:
    """The trust region and the adaptive damping of one KFAC. `closure` computes the present batch's loss anew."""

    def __init__(self, region: TrustRegion | None, damping: AdaptiveDamping | None, objective: Objective) -> None:
        self.region = region
        self.closure: Closure | None = None
        self._damping = damping
        self._objective = objective
        self._taken = Taken()
        self._pending: _Pending | None = None

    @property
    def cuts_steps(self) -> bool:
        """Whether the step that the optimizer takes is cut short, and not the gradient."""
        return self.region is not None and self.region.of == "step"

    @property
    def waiting(self) -> bool:
        """Whether the optimizer's step will be looked at."""
        return self._pending is not None

    @property
    def cap(self) -> float | None:
        """The cap of the step under way."""
        return None if self._pending is None else self._pending.cap

    @property
    def ratio(self) -> float | None:
        """ρ of the last comparison."""
        return None if self._damping is None else self._damping.ratio

    @property
    def needs_optimizer(self) -> bool:
        """Whether the step that the optimizer takes is looked at."""
        return self.cuts_steps or self._damping is not None

    @property
    def exact_gradient(self) -> bool:
        """Whether the preconditioned gradient is measured with the exact Fisher."""
        return self.region is not None and (self.region.of, self.region.curvature) == ("gradient", "exact")

    def _asks(self, step: int) -> str:
        """What needs the objective in a step; empty where nothing does."""
        if self._damping is not None and self._damping.due(step):
            return "AdaptiveDamping"
        return "curvature='exact'" if self.region is not None and self.region.curvature == "exact" else ""

    def check(self, step: int) -> None:
        """Refuses a step that lacks its objective, before anything has changed."""
        asks = self._asks(step)
        if asks and self.closure is None:
            raise RuntimeError(
                f"{asks} needs the loss of the batch again: set kfac.objective = lambda: loss_of(model(x), y) before "
                "optimizer.step()"
            )
        if self.closure is not None and not callable(self.closure):
            raise TypeError(f"kfac.objective must be a function without arguments, got {self.closure!r}")

    def begin(
        self,
        step: int,
        now: Now,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
    ) -> None:
        """Before the gradients are preconditioned: notes what the step will be measured against."""
        self._pending = None
        compare = self._damping is not None and self._damping.due(step)
        if not compare and not self.cuts_steps:
            return
        self._taken.begin(parameters)
        if compare and self._damping is not None and self._damping.curvature == "factored":
            value = self._objective.value(self._closure)
            kept = {name: gradient.clone() for name, gradient in dense(gradients).items()}
            self._pending = _Pending(step, now.cap, now.total_damping, now.l2, compare, value, kept)
        else:
            self._pending = _Pending(step, now.cap, now.total_damping, now.l2, compare)

    def clip_gradient(
        self,
        cap: float | None,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rates: Callable[[str], float | Tensor],
    ) -> Clip:
        """The clip of −α v for preconditioned gradients v, by the exact Fisher of the batch."""
        direction = {name: (-rates(name) * gradient).to(parameters[name].dtype) for name, gradient in gradients.items()}
        along = self._objective.along(self._closure, parameters, direction, fisher=True)
        assert along.fisher is not None, "asked for"
        return clip(along.fisher, cap)

    def finish(self, parameters: Mapping[str, Tensor], factored: Quadratic) -> Clip | None:
        """After the optimizer's step: cuts it to the trust region, and compares what is left of it with its prediction.
        Returns the clip where the step was measured.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        clipped = along = None
        direction = self._taken.difference(parameters)
        if self.cuts_steps:
            if self.region is not None and self.region.curvature == "exact":
                along = self._objective.along(self._closure, self._taken.before, direction, fisher=True)
                length = along.fisher
            else:
                length = factored(direction, pending.damping)
            assert length is not None, "asked for"
            clipped = clip(length, pending.cap)
            direction = self._taken.scale(parameters, clipped.factor, clipped.finite)
        if pending.compare:
            self._compare(pending, factored, direction, along, 1.0 if clipped is None else float(clipped.factor))
        return clipped

    def _compare(
        self,
        pending: _Pending,
        factored: Quadratic,
        direction: Mapping[str, Tensor],
        along: Along | None,
        factor: float,
    ) -> None:
        """`along`, where it is given, belongs to a step 1 / `factor` times as long."""
        assert self._damping is not None, "only adaptive damping compares"
        if pending.value is not None and pending.gradients is not None:
            value, curvature = pending.value, factored(direction, 0.0)
            slope = _product(pending.gradients, direction)
        else:
            if along is None:
                along, factor = self._objective.along(self._closure, self._taken.before, direction, fisher=False), 1.0
            value, slope = along.value, along.slope * factor
            curvature = self._objective.gauss_newton(self._closure, along) * factor**2
        curvature = curvature + pending.l2 * _product(direction, direction)
        after = self._objective.value(self._closure)
        # One copy to the host for all.
        numbers = torch.stack([value, after, slope + 0.5 * curvature]).tolist()
        precision = max(torch.finfo(part.dtype).eps for part in direction.values())
        self._damping.compare(
            pending.step,
            before=numbers[0],
            after=numbers[1],
            predicted=numbers[2],
            resolution=_ROUNDINGS * precision * abs(numbers[0]),
        )

    @property
    def _closure(self) -> Closure:
        assert self.closure is not None, "`check` has been called"
        return self.closure


def _product(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    parts = [(one[name] * other[name]).sum(dtype=torch.float64) for name in one if name in other]
    return torch.stack(parts).sum()

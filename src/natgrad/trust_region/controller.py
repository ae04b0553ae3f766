"""What happens around the optimizer's step: measured before, cut short after, compared with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.options import Now
from natgrad.precondition.clip import Clip, clip, tighter
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.objective import Closure, Objective
from natgrad.trust_region.region import TrustRegion
from natgrad.trust_region.taken import Taken

Quadratic = Callable[[Mapping[str, Tensor], float], Tensor]  # δᵀF̂δ of a direction, with some damping in F̂
_ROUNDINGS = 8  # losses closer than this many units of rounding cannot be told apart


@dataclass(frozen=True)
class _Pending:
    """A step under way: its number, the numbers that hold for it, and where it is to be compared, the objective's value
    and gradient before it.
    """

    step: int
    now: Now
    before: tuple[Tensor, dict[str, Tensor]] | None


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
        return None if self._pending is None else self._pending.now.cap

    @property
    def ratio(self) -> float | None:
        """ρ of the last comparison."""
        return None if self._damping is None else self._damping.ratio

    @property
    def adapts(self) -> bool:
        """Whether the damping follows comparisons."""
        return self._damping is not None

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

    def begin(self, step: int, now: Now, parameters: Mapping[str, Tensor]) -> None:
        """Before the gradients are preconditioned: notes what the step will be measured against."""
        self._pending = None
        compare = self._damping is not None and self._damping.due(step)
        if compare or self.cuts_steps:
            # Not the gradients of the loop, which may be clipped, or of other random numbers.
            before = self._objective.gradient(self._closure, parameters) if compare else None
            self._taken.begin(parameters)
            self._pending = _Pending(step, now, before)

    def length_of_gradient(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rates: Callable[[str], float | Tensor],
    ) -> Tensor:
        """δᵀFδ of δ = −α v for preconditioned gradients v, by the exact Fisher of the batch."""
        direction = {name: (-rates(name) * gradient).to(parameters[name].dtype) for name, gradient in gradients.items()}
        along = self._objective.along(self._closure, parameters, direction, fisher=True)
        assert along.fisher is not None, "asked for"
        return along.fisher

    def finish(self, parameters: Mapping[str, Tensor], factored: Quadratic) -> Clip | None:
        """After the optimizer's step: cuts it to the trust region, and compares what is left of it with its prediction.
        Returns the clip where the step was measured.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        clipped = self._cut(pending.now, parameters, factored) if self.cuts_steps else None
        if pending.before is not None:
            self._compare(pending.step, pending.now.l2, *pending.before, self._taken.difference(parameters))
        return clipped

    def _cut(self, now: Now, parameters: Mapping[str, Tensor], factored: Quadratic) -> Clip:
        direction = self._taken.difference(parameters)
        clipped = clip(factored(direction, now.total_damping), now.cap)
        if self.region is not None and self.region.curvature == "exact":
            try:
                exact = self._objective.along(self._closure, self._taken.before, direction, fisher=True).fisher
            except BaseException:
                self._taken.undo(parameters)  # a step that could not be measured is not taken
                raise
            assert exact is not None, "asked for"
            clipped = tighter(clipped, exact, now.cap)
        self._taken.scale(parameters, clipped.factor, clipped.finite)
        return clipped

    def _compare(
        self,
        step: int,
        l2: float,
        value: Tensor,
        gradient: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
    ) -> None:
        assert self._damping is not None, "only adaptive damping compares"
        along = self._objective.along(self._closure, self._taken.before, direction, fisher=False)
        curvature = self._objective.gauss_newton(self._closure, along) + l2 * _product(direction, direction)
        predicted = _product(gradient, direction) + 0.5 * curvature
        after = self._objective.value(self._closure)
        # One copy to the host for all.
        numbers = torch.stack([value.double(), after.double(), predicted]).tolist()
        self._damping.compare(
            step,
            before=numbers[0],
            after=numbers[1],
            predicted=numbers[2],
            resolution=_ROUNDINGS * torch.finfo(value.dtype).eps * abs(numbers[0]),
        )

    @property
    def _closure(self) -> Closure:
        assert self.closure is not None, "`check` has been called"
        return self.closure


def _product(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    parts = [(one[name] * other[name]).sum(dtype=torch.float64) for name in one if name in other]
    assert parts, "a loss that depends on no parameter has no backward"
    return torch.stack(parts).sum()

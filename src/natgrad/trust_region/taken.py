"""The step that the optimizer really takes: where the parameters were, and how far they went."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Taken:
    """A copy of the parameters from before a step, kept from step to step, and what the step has made of it."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Remembers where the parameters are."""
        kept = self._before
        if {n: (t.shape, t.dtype, t.device) for n, t in kept.items()} != {
            n: (p.shape, p.dtype, p.device) for n, p in parameters.items()
        }:
            self._before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        elif kept:
            torch._foreach_copy_(list(kept.values()), [parameters[name].detach() for name in kept])

    @property
    def before(self) -> dict[str, Tensor]:
        """Where the parameters were."""
        return self._before

    @torch.no_grad()
    def difference(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step δ."""
        now = [parameters[name].detach() for name in self._before]
        return dict(zip(self._before, torch._foreach_sub(now, list(self._before.values())), strict=True))

    @torch.no_grad()
    def scale(self, parameters: Mapping[str, Tensor], factor: Tensor, finite: Tensor) -> dict[str, Tensor]:
        """Makes the step shorter by a factor; none at all where it is not finite. Returns the step that is left."""
        step = self.difference(parameters)
        kept = {name: torch.where(finite, part * factor.to(part.dtype), 0.0) for name, part in step.items()}
        # Exactly as the optimizer left them where nothing is cut: before + (after − before) would round.
        cut = (factor < 1) | ~finite
        for name, before in self._before.items():
            now = parameters[name].detach()
            now.copy_(torch.where(cut, before + kept[name], now))
        return kept

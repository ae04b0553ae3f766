"""The step that the optimizer really takes: where the parameters were, and how far they went."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from natgrad.foreach import drop_unless, multiply_all, overwrite_if


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

    @torch.no_grad()
    def undo(self, parameters: Mapping[str, Tensor]) -> None:
        """Puts the parameters back."""
        if self._before:
            torch._foreach_copy_([parameters[name].detach() for name in self._before], list(self._before.values()))

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
    def scale(self, parameters: Mapping[str, Tensor], factor: Tensor, finite: Tensor) -> None:
        """Makes the step shorter by a factor; none at all where it is not finite."""
        parts = list(self.difference(parameters).values())
        drop_unless(finite, parts)
        multiply_all(parts, factor)
        shorter = torch._foreach_add(list(self._before.values()), parts)
        # Exactly as the optimizer left them where nothing is cut: before + (after − before) would round.
        overwrite_if((factor < 1) | ~finite, [parameters[name].detach() for name in self._before], shorter)

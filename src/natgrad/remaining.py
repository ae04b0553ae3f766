"""Parameters whose use is not recognised: blocks from the gradients of single cases, or of the batch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture import layout as layouts
from natgrad.capture.form import BATCH, PER_CASE, Form
from natgrad.capture.use import Use
from natgrad.statistics.per_case import NotByCaseError, per_case_gradients
from natgrad.statistics.vectors import Vector

FALLBACKS = ("per-case", "batch", "optimizer")
# Larger parameters would need too much memory with one gradient a case.
PER_CASE_ELEMENTS = 2**16


@dataclass(frozen=True)
class Call:
    """One call of the model: its arguments and the number of cases in them. Holds no output, which would hold the
    graph.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    cases: int | None


@dataclass
class Fallback:
    """How far to go for such parameters; shared by all passes. While `busy` the model runs unobserved."""

    model: nn.Module
    select: Callable[[Any], Sequence[Tensor]]
    how: str
    limit: int
    busy: bool = False
    tried: bool = False
    refused: str = ""  # why the model could not be run case by case

    def uses(
        self, names: Mapping[str, str], parameters: Mapping[str, Tensor], call: Call | None, roots: Sequence[Tensor]
    ) -> list[Use]:
        """A use of each named parameter; the names come with the reason why there is no better one."""
        small = {name: parameters[name] for name in names if parameters[name].numel() <= self.limit}
        possible = self.how == "per-case" and call is not None and call.cases is not None
        if possible and small and not self.tried and call is not None:
            self.tried = True
            self.gradients(small, call, [torch.zeros_like(root) for root in roots])
        result = []
        for name, reason in names.items():
            if possible and name in small and not self.refused and call is not None and call.cases is not None:
                result.append(_use(name, parameters[name], PER_CASE, call.cases, reason))
            else:
                why = f"{reason}; {self.refused}" if name in small and self.refused else reason
                result.append(_use(name, parameters[name], BATCH, 1, why))
        return result

    def gradients(
        self, parameters: Mapping[str, Tensor], call: Call, derivatives: Sequence[Tensor | None]
    ) -> dict[str, Tensor]:
        """Each case's gradient; nothing from now on where the model does not allow it."""
        if self.refused or call.cases is None or all(derivative is None for derivative in derivatives):
            return {}
        self.busy = True
        try:
            inputs = (call.arguments, call.keywords)
            return per_case_gradients(self.model, parameters, inputs, self.select, derivatives, call.cases)
        except NotByCaseError as error:
            self.refused = f"not case by case: {error}"
            return {}
        finally:
            self.busy = False


def _use(name: str, parameter: Tensor, source: str, rows: int, note: str) -> Use:
    layout = layouts.whole(name, parameter.shape, parameter.shape, "r" * parameter.dim())
    word = "gradients of cases" if source == PER_CASE else "gradient of the batch"
    operation = Vector(word, (rows, layout.numel), (1,), 0)
    return Use(layout, operation, (), Form((), source=source, note=note))


class Remaining:
    """The fallback parameters of one pass, in the order of its uses."""

    def __init__(
        self, fallback: Fallback, uses: Sequence[Use], parameters: Mapping[str, Tensor], call: Call | None
    ) -> None:
        self.uses = uses
        self._fallback = fallback
        self._call = call
        self.by_case = [(number, use.weight.name) for number, use in enumerate(uses) if use.form.source == PER_CASE]
        self.by_batch = [(number, use.weight.name) for number, use in enumerate(uses) if use.form.source == BATCH]
        self._parameters = {use.weight.name: parameters[use.weight.name] for use in uses}
        # The outputs' derivatives, as the user's backward brings them.
        self.derivatives: dict[int, Tensor] = {}

    def inputs(self, roots: Sequence[Tensor]) -> list[Tensor]:
        """What `gradients` wants the gradients of: outputs, and parameters of which the batch's gradient must do."""
        return [*(roots if self.by_case else ()), *(self._parameters[name] for _, name in self.by_batch)]

    def parameter(self, name: str) -> Tensor:
        """The parameter under a name."""
        return self._parameters[name]

    def gradients(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """The rows (R, elements) of each use, from the gradients of `inputs`."""
        outputs = len(grads) - len(self.by_batch)
        for (number, _), grad in zip(self.by_batch, grads[outputs:], strict=True):
            if grad is not None:
                yield number, grad.detach().reshape(1, -1)
        yield from self.gradients_of_cases(grads[:outputs])

    def gradients_of_cases(self, derivatives: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """The rows of the uses whose cases are told apart."""
        if self._call is None or not self.by_case:
            return
        wanted = {name: self._parameters[name] for _, name in self.by_case}
        found = self._fallback.gradients(wanted, self._call, derivatives)
        for number, name in self.by_case:
            if name in found:
                yield number, found[name].flatten(1)

"""Parameters whose use is not recognised: blocks from the gradients of single cases, or of the batch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.capture import layout as layouts
from natgrad.capture.form import BATCH, PER_CASE, Form
from natgrad.capture.use import Use
from natgrad.per_case import Call, NotByCaseError, add_up, per_case_gradients
from natgrad.statistics.vectors import Vector

FALLBACKS = ("per-case", "batch", "optimizer")
# Larger parameters would need too much memory with one gradient a case.
PER_CASE_ELEMENTS = 2**16
_HALF = (torch.float16, torch.bfloat16)
_DIFFERS = "its cases' gradients do not add up to the batch's: cases see each other, or it draws random numbers"


@dataclass
class Fallback:
    """How far to go for such parameters; shared by all passes. While `busy` the model runs unobserved."""

    model: nn.Module
    how: str
    limit: int
    busy: bool = False
    tried: bool = False
    worked: bool = False
    refused: str = ""  # why the model could not be run case by case
    failures: int = 0  # in a row, after it could

    def uses(
        self,
        names: Mapping[str, str],
        parameters: Mapping[str, Tensor],
        call: Call | str,
        roots: Sequence[Tensor],
    ) -> list[Use]:
        """A use of each named parameter; the names come with the reason why there is no better one.

        `call` is how the model was called, or why that is of no use.
        """
        small = {name: parameters[name] for name in names if parameters[name].numel() <= self.limit}
        if self.how == "per-case" and small and isinstance(call, Call) and not self.tried:
            self.tried = True
            self._try(small, call, roots)
        result = []
        for name, reason in names.items():
            if self.how == "per-case" and name in small and isinstance(call, Call) and not self.refused:
                result.append(_use(name, parameters[name], PER_CASE, call.cases, reason))
                continue
            why = ""
            if self.how == "per-case":
                why = call if isinstance(call, str) else self.refused if name in small else "too large"
            result.append(
                _use(name, parameters[name], BATCH, 1, f"{reason}; not case by case: {why}" if why else reason)
            )
        return result

    def _try(self, parameters: Mapping[str, Tensor], call: Call, roots: Sequence[Tensor]) -> None:
        """Finds out, once, whether cases' gradients can be had and add up, with derivatives drawn at random."""
        draw = torch.Generator(roots[0].device).manual_seed(0)
        given = [torch.randn(r.shape, dtype=r.dtype, device=r.device, generator=draw) for r in roots]
        totals = torch.autograd.grad(roots, list(parameters.values()), given, retain_graph=True, allow_unused=True)
        self.worked = bool(self.gradients(parameters, call, given, dict(zip(parameters, totals, strict=True))))

    def gradients(
        self,
        parameters: Mapping[str, Tensor],
        call: Call,
        derivatives: Sequence[Tensor | None],
        totals: Mapping[str, Tensor | None] | None,
    ) -> dict[str, Tensor]:
        """Each case's gradient; nothing where the model does not allow it, or they are not right.

        Without `totals` they are not checked. What has worked before is given up after three failures in a row.
        """
        if self.refused or all(derivative is None for derivative in derivatives):
            return {}
        try:
            with self.unobserved():
                found = per_case_gradients(self.model, parameters, call, derivatives)
        except NotByCaseError as error:
            return self._failed(str(error))
        half = call.autocast is not None or any(d is not None and d.dtype in _HALF for d in derivatives)
        if totals is not None and not all(
            add_up(gradients, totals[name], exactly=not half) for name, gradients in found.items()
        ):
            return self._failed(_DIFFERS)
        self.failures = 0
        return found

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Runs of the model that are ours, and no batch."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _failed(self, reason: str) -> dict[str, Tensor]:
        self.failures += 1
        if self.failures == 3 or not self.worked:
            self.refused = reason
        return {}


def _use(name: str, parameter: Tensor, source: str, rows: int, note: str) -> Use:
    layout = layouts.whole(name, parameter.shape, parameter.shape, "r" * parameter.dim())
    word = "gradients of cases" if source == PER_CASE else "gradient of the batch"
    operation = Vector(word, (rows, layout.numel), (1,), 0)
    return Use(layout, operation, (), Form((), source=source, note=note))


class Remaining:
    """The fallback parameters of one pass, in the order of its uses."""

    def __init__(
        self, fallback: Fallback, uses: Sequence[Use], parameters: Mapping[str, Tensor], call: Call | str
    ) -> None:
        self.uses = uses
        self.parameters = {use.weight.name: parameters[use.weight.name] for use in uses}
        self._fallback = fallback
        self._by_case = {number for number, use in enumerate(uses) if use.form.source == PER_CASE}
        self._call = call if self._by_case else ""
        # The outputs' derivatives and the parameters' gradients, as the user's backward brings them.
        self.derivatives: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}

    def is_by_case(self, number: int) -> bool:
        """Whether a use's cases are told apart."""
        return number in self._by_case

    def rows(
        self, derivatives: Sequence[Tensor | None], totals: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, Tensor]]:
        """The rows (R, elements) of each use, from the outputs' derivatives and the parameters' gradients."""
        for number, total in enumerate(totals):
            if number not in self._by_case and total is not None:
                yield number, total.detach().reshape(1, -1)
        yield from self._rows_of_cases(derivatives, totals)

    def rows_that_arrived(self, *, alone: bool) -> Iterator[tuple[int, Tensor]]:
        """The rows of the uses whose cases are told apart, after the user's backward; checked against the gradients
        unless other passes had a part in these.
        """
        if self._by_case and isinstance(self._call, Call):
            derivatives = [self.derivatives.get(number) for number in range(len(self._call.positions))]
            totals = [self.totals.get(number) for number in range(len(self.uses))] if alone else None
            yield from self._rows_of_cases(derivatives, totals)

    def _rows_of_cases(
        self, derivatives: Sequence[Tensor | None], totals: Sequence[Tensor | None] | None
    ) -> Iterator[tuple[int, Tensor]]:
        if not self._by_case or not isinstance(self._call, Call):
            return
        names = {self.uses[number].weight.name: number for number in sorted(self._by_case)}
        wanted = {name: self.parameters[name] for name in names}
        own = None if totals is None else {name: totals[number] for name, number in names.items()}
        for name, gradients in self._fallback.gradients(wanted, self._call, derivatives, own).items():
            yield names[name], gradients.reshape(gradients.shape[0], -1)

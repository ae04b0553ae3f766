"""From raw gradients to what the optimizer gets: momentum, preconditioning, grafting, the clip, and NaN kept out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.blocks.registry import Registry
from natgrad.foreach import all_finite, dense, drop_unless, multiply_all
from natgrad.link import Link
from natgrad.options import Now
from natgrad.precondition.buffers import Buffers, Grafting
from natgrad.precondition.clip import Clip, tighter
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.trust_region.controller import Controller
from natgrad.undisturbed import undisturbed


@dataclass(frozen=True)
class _Sorted:
    """The parameters with a solution, and those with no more than a block, for a version of the registry and the keys
    of the solved blocks.
    """

    version: int
    keys: list[str]
    solved: frozenset[str]
    waiting: frozenset[str]


class Update:
    """Replaces gradients in place. `buffers` is what it remembers from step to step."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        registry: Registry,
        link: Link,
        control: Controller,
        grafting: Grafting | None,
    ) -> None:
        self.buffers = Buffers()
        self._parameters = parameters
        self._registry = registry
        self._link = link
        self._control = control
        self._grafting = grafting
        self._sorted = _Sorted(-1, [], frozenset(), frozenset())

    def replace(
        self,
        gradients: Mapping[str, Tensor | None],
        preconditioner: Preconditioner,
        now: Now,
        *,
        step: int,
        usable: Tensor | None,
    ) -> tuple[Clip | None, Tensor | None]:
        """Preconditions, or raises and changes nothing. One NaN anywhere, or a step that is not `usable`, means that
        the batch has no gradient to go by, and all of it is dropped. Returns the clip, and whether the step was finite,
        on the device.
        """
        # The user's objective is run in the middle of it, where the exact Fisher is asked for.
        with self._undone_on_failure(gradients) if self._control.exact_gradient else nullcontext():
            known = self._sort(preconditioner)
            others = dense({name: gradient for name, gradient in gradients.items() if name not in known.solved})
            remembers = now.momentum > 0 or self._grafting is not None
            exact = self._control.exact_gradient
            present = dense(gradients) if remembers or exact else {}
            finite = all_finite(list((present if remembers else others).values()))
            if usable is not None:
                finite = usable if finite is None else finite & usable
            norms = self._remember(present, others, now.momentum, finite) if remembers and finite is not None else None
            # Who steps inside autocast means the objective, not these products; and kernels count on float32.
            with undisturbed(next(iter(self._parameters.values())).device):
                clip = preconditioner.precondition(
                    gradients,
                    damping=now.total_damping,
                    kappa=now.cap,
                    learning_rate=self._link.rates(step),
                    finite=finite,
                    norms=norms,
                )
            if clip is not None and exact:
                clip = self._clip_exactly({n: g for n, g in present.items() if n in known.solved}, clip, now.cap, step)
            finite = finite if clip is None else clip.finite
            if finite is not None and others:
                drop_unless(finite, list(others.values()))
            # A raw gradient at a natural gradient's learning rate is no step to take.
            waiting = [gradient for name, gradient in others.items() if name in known.waiting]
            if waiting:
                torch._foreach_zero_(waiting)
            return clip, finite

    def _sort(self, preconditioner: Preconditioner) -> _Sorted:
        """Which parameters are preconditioned; the same from step to step, until blocks or solutions come or go."""
        version, keys = self._registry.version, list(preconditioner.solved)
        if (self._sorted.version, self._sorted.keys) != (version, keys):
            solved = {name for one in preconditioner.solved.values() for name in one.block.parameters}
            waiting = {name for block in self._registry for name in block.parameters if name not in solved}
            self._sorted = _Sorted(version, keys, frozenset(solved), frozenset(waiting))
        return self._sorted

    @contextmanager
    def _undone_on_failure(self, gradients: Mapping[str, Tensor | None]) -> Iterator[None]:
        raw = [(gradient, gradient.clone()) for gradient in gradients.values() if gradient is not None]
        buffers = copy.deepcopy(self.buffers)
        try:
            yield
        except BaseException:
            self.buffers = buffers
            for gradient, before in raw:
                gradient.copy_(before)
            raise

    def forget(self, changed: Iterable[str]) -> None:
        """Parameters that are others now have no past."""
        self.buffers.forget(changed)

    def _remember(
        self, present: Mapping[str, Tensor], others: Mapping[str, Tensor], momentum: float, finite: Tensor
    ) -> Mapping[str, Tensor] | None:
        """Moves the running averages of raw gradients; returns the tensors whose norms are grafted."""
        drop_unless(finite, list(present.values()))
        if momentum > 0:
            self.buffers.average(present, momentum, finite)
        if self._grafting is None or self._grafting.of == "sgd":
            return None if self._grafting is None else present
        updates = self.buffers.adam(present, self._grafting, finite)
        for name, gradient in others.items():  # what has no block gets the update whose learning rate this is
            gradient.copy_(updates[name])
        return updates

    def _clip_exactly(self, gradients: Mapping[str, Tensor], clip: Clip, cap: float | None, step: int) -> Clip:
        """Clips gradients that the blocks' `clip` has scaled by the exact Fisher of the batch too."""
        parameters = {name: self._parameters[name] for name in gradients}
        length = self._control.length_of_gradient(parameters, gradients, self._link.rates(step))
        both = tighter(clip, length / clip.factor**2, cap)
        own = list(gradients.values())
        multiply_all(own, both.factor / clip.factor)
        drop_unless(both.finite, own)
        return both

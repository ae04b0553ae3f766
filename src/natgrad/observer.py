"""From calls of the model to passes of a window: which parameters take part, and what is looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from natgrad.aside import draw_cases, run_aside, take_cases
from natgrad.capture import outputs
from natgrad.capture.graph import may_reach
from natgrad.capture.structure import Structure
from natgrad.capture.watch import Inputs
from natgrad.errors import Warner
from natgrad.link import Link
from natgrad.options import Terms
from natgrad.parameters import parameters_of
from natgrad.remaining import Fallback
from natgrad.window import Window

_requires_grad, _device = attrgetter("requires_grad"), attrgetter("device")


@dataclass(frozen=True)
class _Candidates:
    """The parameters that take part, and what that was decided from: all parameters and their names, what they say of
    themselves, and those that the optimizer holds.
    """

    names: list[str]
    parameters: Sequence[Tensor]
    flags: list[bool]
    held: Mapping[int, int] | None
    found: Mapping[str, Tensor]


class Observer:
    """Looks at what a model returned. `fraction` is the part of a batch that statistics are taken from."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        window: Window,
        fallback: Fallback,
        link: Link,
        *,
        exclude: tuple[str, ...],
        fraction: float,
        terms: Terms | None,
        warner: Warner,
        expect_backward: Callable[[Collection[torch.device]], None],
    ) -> None:
        if all(any(fnmatch(name, pattern) for pattern in exclude) for name in parameters):
            raise ValueError(f"exclude={list(exclude)} leaves no parameter to precondition")
        self.targets: Any = None
        self.on_exchange: Callable[[list[str]], None] = lambda names: None  # told of parameters that are others now
        self._model = model
        self._parameters = parameters
        self._window = window
        self._fallback = fallback
        self._link = link
        self._exclude = exclude
        self._excluded: dict[str, bool] = {}  # of names that were asked for
        self._structure: Structure | None = None  # of the model, as it was looked at last
        self._candidates = _Candidates([], [], [], None, {})
        self._homes: tuple[int, set[torch.device]] = (-1, set())  # of blocks, for a version of the registry
        self._fraction = fraction
        self._terms = terms
        self._warner = warner
        self._expect_backward = expect_backward  # told of the devices of a pass before it is tapped

    @property
    def knows_terms(self) -> bool:
        """Whether the user has said how many terms the loss is a mean over."""
        return self._terms is not None

    def excludes(self, name: str) -> bool:
        """Whether the user wants a parameter left to the optimizer."""
        if name not in self._excluded:
            self._excluded[name] = any(fnmatch(name, pattern) for pattern in self._exclude)
        return self._excluded[name]

    def why_left(self, name: str, parameter: Tensor) -> str | None:
        """Why a parameter takes no part; None where it does."""
        if not parameter.is_floating_point():
            return f"{str(parameter.dtype).removeprefix('torch.')} parameters are not supported"
        if self.excludes(name):
            return "excluded"
        if not self._link.holds(parameter):
            return "not in the attached optimizer"
        return None if parameter.requires_grad else "frozen (requires_grad=False)"

    def refuse_foreign(self, loss: Tensor) -> None:
        """A loss that another model has made."""
        self._follow_replaced_modules()
        if not may_reach(loss, self._parameters.values()):
            names = list(self._parameters)
            named = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(
                f"this loss was not made of this model: none of its parameters ({named}) is in the loss's graph. Call "
                "capture() of the KFAC whose model has made it"
            )

    def see(self, inputs: Inputs, output: Any) -> str | None:
        """Looks at one call of the model; returns what `tap` returns."""
        if self._fallback.busy:
            return None
        return self.tap(output, inputs=inputs) if self._fraction == 1 else self._tap_part(inputs, output)

    def _tap_part(self, inputs: Inputs, output: Any) -> str | None:
        """A pass of our own over a part of the batch; it counts when the user's backward comes by the whole."""
        prediction = outputs.prediction(output)
        if prediction is None or prediction.dim() == 0 or prediction.numel() == 0 or prediction.grad_fn is None:
            return self.tap(output, inputs=inputs)
        cases = prediction.shape[0]
        chosen = draw_cases(cases, self._fraction, self._window.generator, prediction.device)
        anchors = [tensor.grad_fn for tensor in outputs.attached_tensors(output) if tensor.grad_fn is not None]
        arguments, keywords = take_cases(inputs, cases, chosen)
        targets = None if self.targets is None else take_cases(self.targets, cases, chosen)
        with self._fallback.unobserved():
            part = run_aside(self._model, arguments, keywords)
        return self.tap(part, inputs=(arguments, keywords), targets=targets, anchors=anchors)

    def tap(
        self,
        output: Any,
        *,
        terms: float | None = None,
        loss: Tensor | None = None,
        inputs: Inputs | None = None,
        targets: Any = None,
        anchors: Iterable[Node] | None = None,
    ) -> str | None:
        """Taps the graph of an output, or of a `loss` made by hand; says why, where no parameter has a block at all."""
        attached = outputs.attached_tensors(output)
        roots = [tensor for tensor in attached if tensor.numel() > 0]
        if not roots:
            if attached:
                self._warner.once(
                    "empty", "an empty batch came by at step {step}: it has no statistics and was skipped"
                )
            return None
        if loss is not None and self._window.fisher == "empirical":
            roots = [loss]
        self._follow_replaced_modules()
        candidates = self._take_part()
        devices = set(map(_device, candidates.values()))
        self._refuse_moved(candidates, devices)
        self._expect_backward(devices)
        with torch.enable_grad():
            findings = self._window.observe(
                output,
                roots,
                candidates,
                own_terms=terms,
                step_terms=None if self._terms is None else self._terms.at_step(self._warner.step),
                targets=self.targets if targets is None else targets,
                inputs=inputs,
                anchors=anchors,
                by_hand=loss is not None,
            )
        if findings is None or findings.found or findings.remaining or len(self._window.registry) > 0:
            return None
        reasons = self._window.unrecognised | findings.unrecognised | findings.left
        return "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:5]) or "none is used"

    def _follow_replaced_modules(self) -> None:
        """A module or parameter exchanged since construction takes its name over; what is gone leaves its block."""
        if self._structure is not None and self._structure.is_present:
            return
        # A model may name its parameters itself.
        plain = type(self._model).named_parameters is nn.Module.named_parameters
        self._structure = Structure(self._model, parameters=True) if plain else None
        present = parameters_of(self._model)
        if {name: id(p) for name, p in present.items()} != {name: id(p) for name, p in self._parameters.items()}:
            changed = [name for name, p in self._parameters.items() if present.get(name) is not p]
            self._window.registry.drop(changed)
            self.on_exchange(changed)
            self._parameters.clear()
            self._parameters.update(present)

    def _take_part(self) -> Mapping[str, Tensor]:
        """The parameters that take part; the same object again where nothing of what `why_left` asks has changed."""
        names, present = list(self._parameters), list(self._parameters.values())
        flags = [*map(_requires_grad, present), *map(Tensor.is_floating_point, present)]
        last, held = self._candidates, self._link.held
        same = names == last.names and all(map(is_, present, last.parameters))
        if not same or flags != last.flags or held is not last.held:
            found = {name: p for name, p in self._parameters.items() if self.why_left(name, p) is None}
            self._candidates = last = _Candidates(names, present, flags, held, found)
        return last.found

    def _refuse_moved(self, candidates: Mapping[str, Tensor], devices: set[torch.device]) -> None:
        registry = self._window.registry
        if self._homes[0] != registry.version:
            self._homes = registry.version, {block.straight.row.sum.device for block in registry}
        if len(devices) == 1 and devices == self._homes[1]:
            return
        for block in registry:
            parameter = candidates.get(block.weight.name)
            device = block.straight.row.sum.device
            if parameter is not None and parameter.device != device:
                raise RuntimeError(
                    f"{block.weight.name} moved from {device} to {parameter.device} after its statistics were taken: "
                    "construct KFAC after moving the model, and carry statistics over with state_dict()"
                )

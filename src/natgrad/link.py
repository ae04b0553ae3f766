"""What connects K-FAC to an optimizer: the learning rates of its groups, and the hook in front of its step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.options import Hyperparameter
from natgrad.parameters import any_nonzero
from natgrad.precondition.preconditioner import LearningRate

_LINKS = "_natgrad_links"  # the attribute of an optimizer that knows who is attached to it


class Link:
    """The optimizer that moves a model's parameters, attached or only read, or a learning rate instead of one."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        lr: Hyperparameter | None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._parameters = parameters
        self._optimizer = optimizer
        self._lr = lr
        self._hook: RemovableHandle | None = None
        self._after: RemovableHandle | None = None
        self._rates: dict[int, LearningRate] = {}  # parameter id → the learning rate of its group

    @property
    def attached(self) -> bool:
        """Whether the optimizer's step runs K-FAC."""
        return self._hook is not None

    @property
    def has_rate(self) -> bool:
        """Whether there is a learning rate to read."""
        return self._lr is not None or self._optimizer is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, attached or read."""
        return self._optimizer

    def attach(self, optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Runs `before` right before every step of the optimizer and `after` right after it."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if self.attached:
            raise RuntimeError("this KFAC is attached to an optimizer already: detach() it first")
        if self._lr is not None:
            raise ValueError(
                "lr= is for loops without an optimizer to read it from: leave it out, the attached one has its own"
            )
        mine = {id(parameter) for parameter in self._parameters.values()}
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("this optimizer holds none of the model's parameters")
        for other in vars(optimizer).get(_LINKS, ()):
            if any(id(parameter) in mine for parameter in other._parameters.values()):
                raise RuntimeError(
                    "another KFAC of the same parameters is attached to this optimizer, and twice would be once too "
                    "often: detach() it first, or make a new optimizer"
                )

        def hook(stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _refuse_closure(args, kwargs)
            if not creates_state(stepping):
                before()

        self._optimizer = optimizer
        self.read()
        # A compiled optimizer.step() runs this eagerly.
        self._hook = optimizer.register_step_pre_hook(torch.compiler.disable(hook))
        self.follow(after)
        vars(optimizer).setdefault(_LINKS, weakref.WeakSet()).add(self)

    def follow(self, after: Callable[[], None]) -> None:
        """Runs `after` right after every step of the optimizer, before other hooks look at what it did."""
        if self._after is None and self._optimizer is not None:
            self._after = self._optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: after()))
            hooks = cast("OrderedDict[int, Any]", self._optimizer._optimizer_step_post_hooks)
            hooks.move_to_end(self._after.id, last=False)

    def detach(self) -> None:
        """Undoes `attach` and `follow`."""
        if self._after is not None:
            self._after.remove()
            self._after = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            vars(self._optimizer)[_LINKS].discard(self)

    def read(self) -> None:
        """Reads the learning rates, anew in every step: loading a state replaces groups, schedulers change them."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        self._rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}

    def holds(self, parameter: Tensor) -> bool:
        """Whether the attached optimizer moves a parameter; the gradients of others are not touched."""
        return not self.attached or id(parameter) in self._rates

    def rate(self, name: str, step: int) -> LearningRate:
        """The learning rate of a parameter."""
        if self._lr is not None:
            return self._lr.at(step)
        if self._optimizer is None:
            return 1.0  # no clip: only the logged KL depends on it
        return self._rates.get(id(self._parameters[name]), 0.0)  # a parameter in no group does not move


def _refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = kwargs.get("closure") if len(args) < 2 else args[1]  # args[0] is the optimizer
    if closure is not None:
        raise RuntimeError(
            "an optimizer with a closure computes its gradients inside step(), after K-FAC's turn: "
            "detach() and call kfac.step() at the end of the closure"
        )


def creates_state(optimizer: torch.optim.Optimizer) -> bool:
    """torch.distributed.checkpoint steps an optimizer with zero learning rates and gradients to create its state."""
    groups = optimizer.param_groups
    # It sets numbers, or tensors on the CPU; a rate on a device is the user's own, and is not waited for.
    if any((isinstance(g["lr"], Tensor) and g["lr"].device.type != "cpu") or g["lr"] != 0 for g in groups):
        return False
    return not any_nonzero(parameter.grad for group in groups for parameter in group["params"])

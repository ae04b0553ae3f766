"""What connects K-FAC to an optimizer: the learning rates of its groups, and the hook in front of its step."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.callers import is_inner_step
from natgrad.options import Hyperparameter
from natgrad.parameters import any_nonzero
from natgrad.precondition.rates import LearningRate

_LINKS = "_natgrad_links"  # the attribute of an optimizer that knows who is attached to it


class Link:
    """The optimizer that moves a model's parameters, attached or only read, or a learning rate instead of one."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        lr: Hyperparameter | None,
    ) -> None:
        optimizer = None if optimizer is None else unwrapped(optimizer)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._parameters = parameters
        self._optimizer = optimizer
        self._lr = lr
        self._hook: RemovableHandle | None = None
        self._after: RemovableHandle | None = None
        self._members: list[list[Tensor]] = []  # the parameters of the groups, as they were read last
        self._group_of: dict[int, int] = {}  # parameter id → its group
        self._rates: list[LearningRate] = []  # of the groups
        self._by_name: _ByName | None = None  # the rates that were asked for last

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

    @property
    def momentum(self) -> float:
        """The largest momentum of the optimizer's groups."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return max((float(group.get("momentum") or 0.0) for group in groups), default=0.0)

    @property
    def maximises(self) -> bool:
        """Whether the optimizer climbs."""
        return self._optimizer is not None and any(group.get("maximize") for group in self._optimizer.param_groups)

    def attach(self, optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Runs `before` right before every step of the optimizer and `after` right after it."""
        optimizer = unwrapped(optimizer)
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

        def hook(
            stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if is_inner_step(stepping):
                return args, kwargs
            arguments = run_closure(stepping, args, kwargs)
            if not creates_state(stepping):
                before()
            return arguments

        self._stop_following()
        self._optimizer = optimizer
        self.read()
        # A compiled optimizer.step() runs this eagerly.
        self._hook = optimizer.register_step_pre_hook(torch.compiler.disable(hook))
        self.follow(after)
        vars(optimizer).setdefault(_LINKS, weakref.WeakSet()).add(self)

    def follow(self, after: Callable[[], None]) -> None:
        """Runs a method right after every step of the optimizer, before other hooks look at what it did. It is held
        weakly: an optimizer must not keep alive what only looks at it.
        """
        if self._after is not None or self._optimizer is None:
            return
        method = weakref.WeakMethod(after)

        def hook(stepped: torch.optim.Optimizer, *_: Any) -> None:
            if not is_inner_step(stepped) and (present := method()) is not None:
                present()

        self._after = self._optimizer.register_step_post_hook(torch.compiler.disable(hook))
        hooks = cast("OrderedDict[int, Any]", self._optimizer._optimizer_step_post_hooks)
        hooks.move_to_end(self._after.id, last=False)

    def _stop_following(self) -> None:
        if self._after is not None:
            self._after.remove()
            self._after = None

    def detach(self) -> None:
        """Undoes `attach` and `follow`."""
        self._stop_following()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            vars(self._optimizer)[_LINKS].discard(self)

    def read(self) -> None:
        """Reads the learning rates, anew in every step: loading a state replaces groups, schedulers change them."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        members = [group["params"] for group in groups]
        if not _same_objects(members, self._members):
            self._members = [list(group) for group in members]
            self._group_of = {id(parameter): number for number, group in enumerate(members) for parameter in group}
        self._rates = [_number(group["lr"]) for group in groups]

    def take_over(self, rates: Mapping[str, LearningRate]) -> None:
        """Learning rates of a step that another rank takes."""
        self._members = []  # not those of the optimizer
        self._group_of = {id(self._parameters[name]): number for number, name in enumerate(rates)}
        self._rates = list(rates.values())

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of all parameters; None for those that are not to be touched."""
        if not self.attached:
            return {name: parameter.grad for name, parameter in self._parameters.items()}
        held = self._group_of
        return {name: p.grad if id(p) in held else None for name, p in self._parameters.items()}

    @property
    def held(self) -> Mapping[int, int] | None:
        """What decides on `holds`: another object whenever that may be different; None where all are held."""
        return self._group_of if self.attached else None

    def holds(self, parameter: Tensor) -> bool:
        """Whether the attached optimizer moves a parameter; the gradients of others are not touched."""
        return not self.attached or id(parameter) in self._group_of

    def rates(self, step: int) -> Callable[[str], LearningRate]:
        """The learning rates of parameters by name: the same function, as long as they are the same."""
        group_of: Mapping[int, int] | None = None
        if self._lr is not None or self._optimizer is None:
            rates: list[LearningRate] = [1.0 if self._lr is None else self._lr.at(step)]  # no clip: only the logged KL
        else:
            group_of, rates = self._group_of, [*self._rates, 0.0]  # a parameter in no group does not move
        present = list(self._parameters.values())
        if self._by_name is None or not self._by_name.says(present, group_of, rates):
            self._by_name = _ByName(self._parameters, present, group_of, rates)
        return self._by_name


class _ByName:
    """Learning rates by the names of `parameters`, which are `present` under them now: that of the group of each, or,
    without groups, the first one; the last one for a parameter in none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        present: Sequence[Tensor],
        group_of: Mapping[int, int] | None,
        rates: Sequence[LearningRate],
    ) -> None:
        self._parameters, self._present, self._group_of, self._rates = parameters, present, group_of, rates

    def says(
        self, present: Sequence[Tensor], group_of: Mapping[int, int] | None, rates: Sequence[LearningRate]
    ) -> bool:
        """Whether it would be the same with these."""
        return (
            group_of is self._group_of
            and len(rates) == len(self._rates)
            and all(map(_same_rate, rates, self._rates))
            and _same_objects([present], [self._present])
        )

    def __call__(self, name: str) -> LearningRate:
        if self._group_of is None:
            return self._rates[0]
        return self._rates[self._group_of.get(id(self._parameters[name]), -1)]


def _same_rate(one: LearningRate, other: LearningRate) -> bool:
    """One on a device is the same as long as it is the same tensor: to compare would be to wait."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _number(rate: LearningRate) -> LearningRate:
    """A learning rate on the CPU, which can be read without waiting, as a number: a CUDA graph would go on with the
    value that it was captured with.
    """
    return float(rate) if isinstance(rate, Tensor) and rate.device.type == "cpu" else rate


def _same_objects(groups: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return len(groups) == len(others) and all(
        len(group) == len(other) and all(map(operator.is_, group, other))
        for group, other in zip(groups, others, strict=True)
    )


class _Computed:
    """Stands in for a closure that has been run: optimizers of the usual kind ask for its loss, once."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._asked = 0

    def __call__(self) -> Any:
        self._asked += 1
        if self._asked > 1:
            raise RuntimeError(
                "this optimizer runs its closure several times a step, and K-FAC preconditions only the first: "
                "detach() and call kfac.step() at the end of the closure"
            )
        return self._loss


def run_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the closure of ``optimizer.step(closure)`` before the step, so that there are gradients to precondition;
    returns the step's arguments with its result in its place. `args` begin with the optimizer.
    """
    by_name = len(args) < 2
    closure = kwargs.get("closure") if by_name else args[1]
    if closure is None or isinstance(closure, _Computed):
        return args, kwargs
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RuntimeError(
            "LBFGS runs its closure many times a step and has curvature of its own: use another optimizer with K-FAC"
        )
    with torch.enable_grad():
        computed = _Computed(closure())
    return (args, {**kwargs, "closure": computed}) if by_name else ((args[0], computed, *args[2:]), kwargs)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that only looks like one, as Accelerate's does."""
    while hasattr(optimizer, "optimizer") and "_optimizer_step_pre_hooks" not in vars(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def creates_state(optimizer: torch.optim.Optimizer) -> bool:
    """torch.distributed.checkpoint steps an optimizer with zero learning rates and gradients to create its state."""
    groups = optimizer.param_groups
    # It sets numbers, or tensors on the CPU; a rate on a device is the user's own, and is not waited for.
    if any((isinstance(g["lr"], Tensor) and g["lr"].device.type != "cpu") or g["lr"] != 0 for g in groups):
        return False
    return not any_nonzero(parameter.grad for group in groups for parameter in group["params"])

"""Arming a model: one forward hook, in place only on steps that take statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from natgrad.capture.calling_thread import CallingThread
from natgrad.capture.eager import ForceEager
from natgrad.capture.unfused import Unfused

# Positional and keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Observer = Callable[[Inputs, Any], None]


def innermost(model: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel and torch.compile."""
    while True:
        # A compiled model is known by its wrapper's one attribute: asking for its class would import the compiler.
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


class _ForwardHook:
    """Passes a model's output on. Copies and pickles of an armed model carry a hook that does nothing."""

    def __init__(self, model: nn.Module | None = None, observer: Observer | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._observer = observer

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        if self._observer is not None and self._model is not None and self._model() is module:
            self._observer((arguments, keywords), output)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def compiled_wrapper(model: nn.Module) -> nn.Module | None:
    """The module that torch.compile returned, where the model is one or DDP wraps one."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model if "_orig_mod" in model._modules else None


def is_copied(model: nn.Module) -> bool:
    """Whether DataParallel runs copies of the model on several GPUs."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            return True
        model = model.module
    return False


class Watch:
    """Whether the next passes are observed, and every hook that this needs.

    `owner` is held weakly: dropped, it takes its hooks and its claim on eager execution with it.
    """

    def __init__(
        self, model: nn.Module, owner: object, observe: Callable[[Any, Inputs, Any], None], *, unfuse: bool
    ) -> None:
        self._model = innermost(model)
        reference = weakref.ref(owner)

        def observer(inputs: Inputs, output: Any) -> None:
            if (present := reference()) is not None:
                observe(present, inputs, output)

        self._observer: Observer = observer
        self._compiled = compiled_wrapper(model)
        self._copied = is_copied(model)
        self._eager = ForceEager()
        self._thread = CallingThread()
        self._forward: RemovableHandle | None = None
        self._around: list[RemovableHandle] = []
        self._unfused = Unfused(self._model) if unfuse else None
        weakref.finalize(owner, self.disarm)

    @property
    def armed(self) -> bool:
        """Whether forward passes are observed."""
        return self._forward is not None

    def arm(self) -> None:
        """Observes forward passes from now on; compiled models run eagerly.

        A compiled wrapper that was given to us is run eagerly in its own training calls only. Otherwise anybody may
        compile the model or call a compiled one, and only the process as a whole can be asked to run eagerly.
        """
        if self.armed:
            return
        hook = _ForwardHook(self._model, self._observer)
        self._forward = self._model.register_forward_hook(hook, with_kwargs=True)
        if self._unfused is not None:
            self._unfused.arm()
        if self._compiled is None:
            self._eager.acquire()
        else:
            self._around = [
                self._compiled.register_forward_pre_hook(self._enter),
                self._compiled.register_forward_hook(self._leave, always_call=True),
            ]

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            self._eager.acquire()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._eager.release()

    def expect_backward(self, devices: Collection[torch.device]) -> None:
        """A pass of parameters on these devices is about to be tapped. Several GPUs keep their threads: a single one
        would launch the work of one GPU after that of the other.
        """
        if not self._copied and len(devices) == 1 and next(iter(devices)).type == "cuda":
            self._thread.claim()

    def disarm(self) -> None:
        """Stops observing."""
        self._thread.release()
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        for handle in self._around:
            handle.remove()
        self._around = []
        if self._unfused is not None:
            self._unfused.disarm()
        self._eager.release()

"""Recurrent layers without fused kernels, whose products the graph shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from natgrad.capture.structure import Structure


class _Hook:
    """Copies and pickles of an armed model carry a hook that does nothing."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._action is not None:
            self._action()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Unfused:
    """While armed, `nn.LSTM`, `nn.GRU` and `nn.RNN` modules run step by step in plain products.

    cuDNN and oneDNN compute a whole sequence in one node that hides its products. Switching them off around such a
    module, on steps that take statistics only, gives the same result, more slowly. `always`: without gradients too.
    """

    def __init__(self, model: nn.Module, *, always: bool = False) -> None:
        self._model = model
        self._always = always
        self._structure: Structure | None = None  # of the model, as it was looked at last
        self._recurrent: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._entered: list[ExitStack] = []

    def arm(self) -> None:
        """Runs recurrent modules unfused from now on."""
        if self._structure is None or not self._structure.is_present:
            self._structure = Structure(self._model, parameters=False)
            self._recurrent = [module for module in self._structure.modules if isinstance(module, nn.RNNBase)]
        for module in self._recurrent:
            self._handles.append(module.register_forward_pre_hook(_Hook(self._enter)))
            self._handles.append(module.register_forward_hook(_Hook(self._leave), always_call=True))

    def disarm(self) -> None:
        """Runs them as ever."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self) -> None:
        stack = ExitStack()
        if self._always or torch.is_grad_enabled():
            stack.enter_context(_without_fused_kernels())
        self._entered.append(stack)

    def _leave(self) -> None:
        if self._entered:
            self._entered.pop().close()


@contextmanager
def _without_fused_kernels() -> Iterator[None]:
    # Not the modules' own `flags`, which also set, and warn about, what has nothing to do with this.
    backends: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    before = [backend.enabled for backend in backends]
    for backend in backends:
        backend.enabled = False
    try:
        yield
    finally:
        for backend, enabled in zip(backends, before, strict=True):
            backend.enabled = enabled

"""The user's objective once more: its value, its gradient, and the curvature along a direction, without a trace.

One pass in forward mode, with the parameters' positions and a direction δ as dual numbers, gives the derivative t = Jδ
of the model's outputs. From t follow δᵀFδ = Σ tᵀHt / N with H the Fisher of the predictive distribution, and the
Gauss-Newton curvature of the objective itself, its second derivative along t.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from natgrad.aside import leaving_no_trace
from natgrad.capture import outputs
from natgrad.capture.eager import ForceEager
from natgrad.capture.unfused import Unfused
from natgrad.capture.watch import clean_name
from natgrad.statistics.predictive import Predictive, predicted

Closure = Callable[[], Tensor]


@dataclass(frozen=True)
class Along:
    """A model along a direction δ: its outputs and their derivatives, as trees, call by call; δᵀFδ where asked for."""

    calls: list[tuple[Any, Any]]
    fisher: Tensor | None


class Objective:
    """Evaluates a closure that calls `model` and returns the loss of the present batch. While it does so, `quiet` keeps
    others from looking at the model's calls.
    """

    def __init__(
        self,
        model: nn.Module,
        predictive: Predictive,
        targets: Callable[[], Any],
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model = model
        self._predictive = predictive
        self._targets = targets
        self._quiet = quiet
        self._unfused = Unfused(model, always=True)
        self._eager = ForceEager()

    def value(self, closure: Closure) -> Tensor:
        """The loss as the parameters are now, in its own precision."""
        with self._aside():
            held = {clean_name(name): p.detach() for name, p in self._model.named_parameters()}
            return _one_number(self._call(closure, held)).detach()

    def gradient(self, closure: Closure, parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its gradient, as the parameters are now."""
        with self._aside():
            loss = _one_number(self._call(closure, {}))
            moving = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            grads = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(moving, grads, strict=True) if grad is not None}
        return loss.detach(), {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}

    def along(
        self, closure: Closure, positions: Mapping[str, Tensor], direction: Mapping[str, Tensor], *, fisher: bool
    ) -> Along:
        """The model at some positions of the parameters, along a direction; δᵀFδ where asked for."""
        calls: list[tuple[Any, Any]] = []
        quadratic: list[Tensor] = []
        terms: list[float] = []

        def see(module: nn.Module, arguments: Any, output: Any) -> None:
            # Copies: what the closure or other hooks do to the output in place is done again in a replay.
            calls.append((pytree.tree_map(_primal, output), pytree.tree_map(_tangent, output)))
            if fisher:
                made = predicted(self._predictive, output, outputs.prediction(output), self._targets())
                quadratic.append(made.quadratic())
                terms.append(made.terms)

        handle = self._model.register_forward_hook(see, prepend=True)
        try:
            with self._aside(), forward_ad.dual_level(), _differentiable():
                duals = {
                    name: forward_ad.make_dual(position.detach(), direction[name])
                    for name, position in positions.items()
                    if name in direction
                }
                _one_number(self._call(closure, duals))
        except NotImplementedError as error:
            raise RuntimeError(
                "the exact curvature needs forward-mode derivatives of all that the model does, and this one has an "
                "operation without: use TrustRegion(curvature='factored') and a schedule instead of AdaptiveDamping. "
                f"{str(error).splitlines()[0]}"
            ) from error
        finally:
            handle.remove()
        if not calls:
            raise RuntimeError(
                "kfac.objective did not call the model that K-FAC was given: it must compute the loss of the batch "
                "anew, as in kfac.objective = lambda: loss_of(model(x), y)"
            )
        if all(tangent is None for _, derivatives in calls for tangent in pytree.tree_leaves(derivatives)):
            raise RuntimeError(
                "the exact curvature finds no tensor that depends on the parameters in the model's output: it looks "
                "into tuples, lists and dicts; use TrustRegion(curvature='factored') with this model"
            )
        return Along(calls, torch.stack(quadratic).sum() / sum(terms) if fisher else None)

    def gauss_newton(self, closure: Closure, along: Along) -> Tensor:
        """δᵀCδ for the Gauss-Newton matrix C of the objective: its second derivative along the outputs' derivatives."""
        some = next(t for _, tree in along.calls for t in pytree.tree_leaves(tree) if t is not None)
        shift = torch.zeros((), dtype=torch.float64, device=some.device, requires_grad=True)
        remaining = iter(along.calls)

        def replay(*_: Any, **__: Any) -> Any:
            found = next(remaining, None)
            if found is None:
                raise RuntimeError("The model is called more often the second time.")
            return pytree.tree_map(lambda value, derivative: _shifted(value, derivative, shift), *found)

        with self._aside():
            self._model.forward = replay  # `leaving_no_trace` puts it back
            try:
                loss = _one_number(_called(closure))
            except RuntimeError as error:
                raise RuntimeError(
                    "AdaptiveDamping looks at the loss as a function of the model's outputs, and kfac.objective does "
                    "not compute it from outputs alone (does it differentiate the model, or call it differently every "
                    f"time?): use a schedule for damping. {error}"
                ) from error
            for _ in range(2):
                if not loss.requires_grad:
                    return torch.zeros_like(shift).detach()
                (derivative,) = torch.autograd.grad(loss, shift, create_graph=True, allow_unused=True)
                loss = torch.zeros_like(shift).detach() if derivative is None else derivative
            return loss.detach()

    def _call(self, closure: Closure, parameters: Mapping[str, Tensor]) -> Any:
        around = _Around(self._model, closure)
        # Under the model's own names, which wrappers put more into than ours hold.
        names = {clean_name(name): name for name, _ in self._model.named_parameters()}
        state = {f"model.{names[name]}": tensor for name, tensor in parameters.items()}
        state |= {f"model.{name}": buffer.clone() for name, buffer in self._model.named_buffers()}
        return functional_call(around, state, ())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            stack.enter_context(_gradients_untouched(self._model))
            stack.enter_context(leaving_no_trace(self._model))
            stack.enter_context(torch.enable_grad())  # objectives may differentiate; what is held still has no graph
            self._eager.acquire()
            stack.callback(self._eager.release)
            self._unfused.arm()
            stack.callback(self._unfused.disarm)
            yield


class _Around(nn.Module):
    """What functional_call can exchange the model's parameters in, whatever the closure does."""

    def __init__(self, model: nn.Module, closure: Closure) -> None:
        super().__init__()
        self.model = model
        self._closure = closure

    def forward(self) -> Tensor:
        """The closure."""
        return _called(self._closure)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Without fused attention and encoder layers, which know no forward-mode derivatives."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _called(closure: Closure) -> Tensor:
    try:
        inspect.signature(closure).bind()
    except TypeError as error:
        raise TypeError(f"kfac.objective must be a function without arguments: {error}") from None
    except ValueError:
        pass  # a built-in without a signature
    return closure()


@contextmanager
def _gradients_untouched(model: nn.Module) -> Iterator[None]:
    """Hides the gradients of the loop from a closure, and refuses one that makes its own."""
    hidden = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        made = any(parameter.grad is not None for parameter, _ in hidden)
        for parameter, gradient in hidden:
            parameter.grad = gradient
        if made:  # whatever else went wrong, this is why
            raise RuntimeError("kfac.objective must not call backward(): it returns the loss, and no more")


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise TypeError(f"kfac.objective must return the loss as a tensor of one element, got {shape}")
    return loss.reshape(())


def _primal(leaf: Any) -> Any:
    return forward_ad.unpack_dual(leaf).primal.detach().clone() if isinstance(leaf, Tensor) else leaf


def _tangent(leaf: Any) -> Any:
    tangent = forward_ad.unpack_dual(leaf).tangent if isinstance(leaf, Tensor) else None
    return None if tangent is None else tangent.detach().clone()


def _shifted(value: Any, derivative: Tensor | None, shift: Tensor) -> Any:
    return value if derivative is None else value + (shift * derivative).to(value.dtype)

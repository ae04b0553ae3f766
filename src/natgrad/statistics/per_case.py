"""The gradient of every single case, by running the model case by case under torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from natgrad.statistics.part import own_random_numbers

# The tensors of a model's output that derivatives are given for.
Select = Callable[[Any], Sequence[Tensor]]


class NotByCaseError(RuntimeError):
    """The model cannot be run case by case."""


def per_case_gradients(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    select: Select,
    derivatives: Sequence[Tensor | None],
    cases: int,
) -> dict[str, Tensor]:
    """Each case's gradient (cases, *shape) of the named parameters, from derivatives of the output tensors.

    Tensors whose first axis has the length `cases` are cut into cases, everything else is given to each. Raises
    `NotByCaseError` where the model does not allow it: batch norm in training, control flow that looks at values,
    kernels without a rule for torch.func.
    """
    leaves, structure = pytree.tree_flatten(inputs)
    by_case = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == cases for leaf in leaves]
    used = [number for number, derivative in enumerate(derivatives) if derivative is not None]
    given = [derivative for derivative in derivatives if derivative is not None]
    if not any(by_case) or not given or any(d.dim() == 0 or d.shape[0] != cases for d in given):
        raise NotByCaseError("its inputs or outputs do not have cases along their first axis")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}

    def one(mapped: list[Tensor], derivative: list[Tensor]) -> dict[str, Tensor]:
        rest = iter(mapped)
        whole = [next(rest).unsqueeze(0) if cut else leaf for leaf, cut in zip(leaves, by_case, strict=True)]
        arguments, keywords = pytree.tree_unflatten(whole, structure)

        def outputs(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
            tensors = select(functional_call(model, {**state, **own}, arguments, keywords))
            return tuple(tensors[number] for number in used)

        pull = vjp(outputs, {name: state[name] for name in parameters})[1]
        gradients: dict[str, Tensor] = pull(tuple(part.unsqueeze(0) for part in derivative))[0]
        return gradients

    mapped = [leaf.detach() for leaf, cut in zip(leaves, by_case, strict=True) if cut]

    def attempt(randomness: str) -> dict[str, Tensor] | Exception:
        try:
            with own_random_numbers(model), torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # slow rules of torch.func: nothing the user could do
                gradients: dict[str, Tensor] = vmap(one, randomness=randomness)(mapped, given)
            return {name: gradient.detach() for name, gradient in gradients.items()}
        except Exception as error:  # out of memory too: there is a way that needs less
            return error

    result = attempt("different")
    if isinstance(result, Exception):
        # Random numbers drawn in place into a tensor of the model's (stochastic depth) can only be the same for all.
        again = attempt("same")
        if isinstance(again, Exception):
            # Whatever the model does that torch.func cannot: its own words say it best.
            raise NotByCaseError(str(result).strip().split("\n")[0][:120]) from result
        result = again
    return result

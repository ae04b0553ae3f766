"""The gradient of every single case, by running the model case by case under torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from natgrad.aside import have_cases, leaving_no_trace
from natgrad.capture import outputs


class NotByCaseError(RuntimeError):
    """The model cannot be run case by case."""


@dataclass(frozen=True)
class Call:
    """One call of the model with so many cases, and which tensors of its output derivatives are given for.

    Arguments are kept as detached leaves: the user's own containers may hold outputs, which would hold the graph.
    """

    leaves: tuple[Any, ...]
    structure: Any
    cases: int
    positions: tuple[int, ...]
    autocast: tuple[str, torch.dtype] | None


def make_call(inputs: Any, cases: int, positions: tuple[int, ...], device: torch.device) -> Call:
    """What is needed to make a call of the model once more, under the present autocast."""
    leaves, structure = pytree.tree_flatten(inputs)
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    on = torch.is_autocast_enabled(device.type)
    return Call(kept, structure, cases, positions, (device.type, torch.get_autocast_dtype(device.type)) if on else None)


def per_case_gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], call: Call, derivatives: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Each case's gradient (cases, *shape) of some parameters, from derivatives of the output's tensors.

    Tensors whose first axis has the length `cases` are cut into cases, everything else is given to each. Raises
    `NotByCaseError` where the model does not allow it: buffers written in forward, control flow that looks at values,
    kernels without a rule for torch.func. What comes back is right only if its sum over cases is the batch's
    gradient: see `add_up`.
    """
    leaves, structure, by_case = call.leaves, call.structure, have_cases(call.leaves, call.cases)
    used = [place for place, derivative in zip(call.positions, derivatives, strict=True) if derivative is not None]
    given = [derivative for derivative in derivatives if derivative is not None]
    if not any(by_case) or not given or any(d.dim() == 0 or d.shape[0] != call.cases for d in given):
        raise NotByCaseError("its inputs or outputs do not have cases along their first axis")
    # Under the model's own names, which wrappers put more into than ours hold.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {name: names[id(parameter)] for name, parameter in parameters.items()}
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}

    def one(mapped: list[Tensor], derivative: list[Tensor]) -> dict[str, Tensor]:
        rest = iter(mapped)
        whole = [next(rest).unsqueeze(0) if cut else leaf for leaf, cut in zip(leaves, by_case, strict=True)]
        arguments, keywords = pytree.tree_unflatten(whole, structure)

        def results(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
            tensors = list(outputs.tensors(functional_call(model, {**state, **own}, arguments, keywords)))
            return tuple(tensors[place] for place in used)

        pull = vjp(results, {name: state[name] for name in wanted.values()})[1]
        gradients: dict[str, Tensor] = pull(tuple(part.unsqueeze(0) for part in derivative))[0]
        return gradients

    mapped = [leaf.detach() for leaf, cut in zip(leaves, by_case, strict=True) if cut]
    try:
        with leaving_no_trace(model), torch.enable_grad(), warnings.catch_warnings(), _autocast(call):
            warnings.simplefilter("ignore", UserWarning)  # slow rules of torch.func: nothing the user could do
            gradients: dict[str, Tensor] = vmap(one, randomness="different")(mapped, given)
    except Exception as error:
        raise NotByCaseError(_in_short(error)) from error
    return {name: gradients[raw].detach() for name, raw in wanted.items()}


def _autocast(call: Call) -> Any:
    return nullcontext() if call.autocast is None else torch.autocast(call.autocast[0], call.autocast[1])


def _in_short(error: Exception) -> str:
    """What the model does that torch.func cannot (running out of memory too), mostly in torch's words."""
    text = str(error).strip().split("\n")[0]
    if "in-place" in text or "inplace" in text:
        return "it writes to its buffers or in place, as batch norm does in training"
    return text if len(text) < 100 else text[:100].rsplit(" ", 1)[0] + " ..."


def add_up(gradients: Tensor, total: Tensor | None, *, exactly: bool) -> bool:
    """Whether cases' gradients sum to the batch's. They do not where cases see each other, as in batch norm without
    running statistics, or where the model drew other random numbers this time.
    """
    summed = gradients.sum(0)
    expected = torch.zeros_like(summed) if total is None else total.to(summed.dtype)
    # As far as rounding goes (half precision: not exactly), against the size of what is summed, which may cancel.
    tolerance = 1e-3 if exactly else 3e-2
    size = torch.linalg.vector_norm(gradients) * gradients.shape[0] ** 0.5
    error = torch.linalg.vector_norm(summed - expected)
    return bool((error <= tolerance * size) | ~torch.isfinite(error))

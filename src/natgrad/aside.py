"""Running the user's model once more, without leaving a trace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

_OWN = frozenset(vars(nn.Module()))  # what torch keeps in a module


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Puts back what the model's forward stores on its modules (attributes, lists and dicts of them), and the random
    numbers that it draws. Buffers and parameters are the caller's business, by `functional_call`.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    containers = [
        (value, value.copy())
        for _, values in attributes
        for name, value in values.items()
        if name not in _OWN and isinstance(value, list | dict | set | deque)
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for module, values in attributes:
                vars(module).clear()
                vars(module).update(values)
            for container, before in containers:
                container.clear()
                container.extend(before) if isinstance(container, list | deque) else container.update(before)


def have_cases(leaves: Iterable[Any], cases: int) -> list[bool]:
    """Which inputs have cases along their first axis."""
    return [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == cases for leaf in leaves]


def draw_cases(cases: int, fraction: float, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The indices of a random part of a batch, at least one, in order."""
    count = max(1, math.ceil(fraction * cases))
    where = generator.device if generator is not None else torch.device("cpu")
    return torch.randperm(cases, generator=generator, device=where)[:count].sort().values.to(device)


def take_cases(tree: Any, cases: int, chosen: Tensor) -> Any:
    """Nested inputs with only the chosen cases of every tensor whose first axis runs over cases."""
    leaves, structure = pytree.tree_flatten(tree)
    by_case = have_cases(leaves, cases)
    if not any(by_case):
        raise ValueError(
            f"stats_fraction: no input has the batch of {cases} along its first axis, so that no part of it can be "
            "taken; use stats_fraction=1"
        )
    part = [x.index_select(0, chosen.to(x.device)) if cut else x for x, cut in zip(leaves, by_case, strict=True)]
    return pytree.tree_unflatten(part, structure)


def run_aside(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls a model on copies of its buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with leaving_no_trace(model), torch.enable_grad():
        return functional_call(model, buffers, arguments, keywords)

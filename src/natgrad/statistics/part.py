"""A pass of our own over a part of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree


def draw_cases(cases: int, fraction: float, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The indices of a random part of a batch, at least one, in order."""
    count = max(1, math.ceil(fraction * cases))
    where = generator.device if generator is not None else torch.device("cpu")
    return torch.randperm(cases, generator=generator, device=where)[:count].sort().values.to(device)


def take_cases(tree: Any, cases: int, chosen: Tensor) -> Any:
    """Nested inputs with only the chosen cases of every tensor whose first axis runs over cases."""
    leaves, structure = pytree.tree_flatten(tree)
    by_case = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == cases for leaf in leaves]
    if not any(by_case):
        raise ValueError(
            f"stats_fraction: no input has the batch of {cases} along its first axis, so that no part of it can be "
            "taken; use stats_fraction=1"
        )
    part = [
        leaf.index_select(0, chosen.to(leaf.device)) if cut else leaf for leaf, cut in zip(leaves, by_case, strict=True)
    ]
    return pytree.tree_unflatten(part, structure)


def run_aside(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls a model without leaving a trace: on copies of its buffers, and with the random numbers put back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with own_random_numbers(model), torch.enable_grad():
        return functional_call(model, buffers, arguments, keywords)


@contextmanager
def own_random_numbers(model: nn.Module) -> Iterator[None]:
    """What is drawn in here, dropout above all, leaves the user's random numbers as they were."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        yield

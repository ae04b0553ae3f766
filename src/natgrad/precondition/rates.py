"""The learning rates of a stack's parameters, with which the clip measures the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from natgrad.precondition.stack import Stack

LearningRate: TypeAlias = float | Tensor
Rates: TypeAlias = LearningRate | list[list[LearningRate]]
"""One for all parameters of a stack, or where they differ a list of them for every member."""


def rates_of(stack: Stack, learning_rate: Callable[[str], LearningRate]) -> Rates:
    """The learning rates of a stack's parameters, as one where they are equal."""
    rates = [[learning_rate(layout.name) for layout in member.block.layouts] for member in stack.members]
    first = rates[0][0]
    if all(rate is first or (not isinstance(rate, Tensor) and rate == first) for group in rates for rate in group):
        return first if isinstance(first, Tensor) else float(first)
    return rates


def mapped(rates: Any, function: Callable[[Any], Any]) -> Any:
    """The same with something else in the place of every learning rate."""
    return [[function(rate) for rate in group] for group in rates] if isinstance(rates, list) else function(rates)


def squared_length(stack: Stack, products: Tensor, rates: Rates) -> Tensor:
    """α² vᵀ∇ from v ∘ ∇ (K, rows, columns), with each parameter's own learning rate."""
    if not isinstance(rates, list):
        return products.sum(dtype=torch.float64) * rates**2
    products = products.sum(1, dtype=torch.float64)
    total = products.new_zeros(())
    for member, part, group in zip(stack.members, stack.members_parts(products), rates, strict=True):
        widths = [layout.shape[2] for layout in member.block.layouts]
        for columns, rate in zip(part.split(widths, dim=1), group, strict=True):
            total = total + columns.sum() * rate**2
    return total

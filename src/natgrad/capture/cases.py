"""Which rows of a use belong to one case."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.autograd.graph import Node

from natgrad.capture.graph import Graph, kind, output_shape

# Nodes between a product and the addition of its bias that keep the last axis, the outputs, in place.
RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")


def leading_shape(graph: Graph, node: Node, outputs: int) -> tuple[int, ...]:
    """The shape of a product's rows before they were flattened: (B, T) for a linear layer on (B, T, d).

    Read off the reshape that follows the product: `nn.Linear` puts one there, whether or not its input has a gradient.
    """
    rows = output_shape(node)[:-1]
    while (consumer := graph.only_consumer(node)) is not None and kind(consumer.node) in RESHAPES:
        node = consumer.node
        shape = output_shape(node)
        if shape[-1:] != (outputs,) or math.prod(shape[:-1]) != math.prod(rows):
            break
        if len(shape) > 2:
            return shape[:-1]
    return rows


def case_axis(leading: Sequence[int], cases: int | None, wanted: int | None, known: int | None = None) -> int | str:
    """The axis of `leading` that runs over cases, or why it cannot be told.

    `cases` is the batch size where the model's output says it, `wanted` the user's `batch_axis`, `known` the axis
    found in earlier passes, which decides where two axes have the batch's size.
    """
    if len(leading) == 1:
        axis: int | None = 0
    elif wanted is not None:
        axis = wanted + len(leading) if wanted < 0 else wanted
        if not 0 <= axis < len(leading):
            return f"batch_axis={wanted} is not an axis of {tuple(leading)}"
    else:
        axis = None
    if axis is not None:
        if cases is not None and leading[axis] != cases:
            return f"axis {axis} of {tuple(leading)} is not the batch of {cases}"
        return axis
    if cases is None:
        return "the batch size is not known: pass batch_axis="
    matching = [axis for axis, size in enumerate(leading) if size == cases]
    if not matching:
        return f"no axis of {tuple(leading)} has the batch's size, {cases}"
    if known in matching:
        return known
    if len(matching) > 1 and cases > 1:
        return f"several axes of {tuple(leading)} have the batch's size: pass batch_axis="
    return matching[0]

"""Which rows of a use belong to one case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from natgrad.capture.graph import Graph, Vertex, kind, output_shape

# Nodes between a product and the addition of its bias that keep the last axis, the outputs, in place.
RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")


def leading_shape(graph: Graph, node: Vertex, outputs: int) -> tuple[int, ...]:
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


@dataclass(frozen=True)
class Batch:
    """What is known of the batch: `sizes` of the axes of the model's output but the classes', the batch's first, and
    `wanted`, the axis that the user says runs over cases, and `known`, the one found in earlier passes, which decides
    where two axes have the batch's size.
    """

    sizes: tuple[int, ...] = ()
    wanted: int | None = None
    known: int | None = None

    @property
    def cases(self) -> int | None:
        """How many cases there are, where the output tells it."""
        return self.sizes[0] if self.sizes else None

    def for_axis(self, wanted: int | None, known: int | None = None) -> Batch:
        """The same batch for a parameter with its own batch axis."""
        return Batch(self.sizes, wanted, known)

    def axis(self, leading: Sequence[int]) -> int | str:
        """The axis of `leading` that runs over cases, or why it cannot be told."""
        if len(leading) == 1 or self.wanted is not None:
            axis = 0 if len(leading) == 1 or self.wanted is None else self.wanted % len(leading)
            if self.wanted is not None and not -len(leading) <= self.wanted < len(leading) and len(leading) > 1:
                return f"batch_axis={self.wanted} is not an axis of {tuple(leading)}"
            fits = not self.sizes or leading[axis] in (self.sizes if self.wanted is not None else self.sizes[:1])
            return (
                axis if fits else f"axis {axis} of {tuple(leading)} is not the batch of {self.cases}: pass batch_axis="
            )
        if self.cases is None:
            return "the batch size is not known: pass batch_axis="
        matching = [axis for axis, size in enumerate(leading) if size == self.cases]
        if not matching:
            return f"no axis of {tuple(leading)} has the batch's size, {self.cases}: pass batch_axis="
        if self.known in matching:
            return self.known
        if len(matching) > 1 and self.cases > 1:
            return f"several axes of {tuple(leading)} have the batch's size: pass batch_axis="
        if matching[0] > 0 and leading[0] > self.cases and leading[0] % self.cases == 0:
            # Windows or heads folded into the first axis, of as many tokens as there are cases.
            return f"the first axis of {tuple(leading)} may hold cases too: pass batch_axis="
        return matching[0]


def batch_of(prediction: Tensor | None, axis: int | None) -> Batch:
    """The batch that a prediction is for. `axis` is the user's batch axis for all parameters."""
    if prediction is None or prediction.dim() == 0:
        return Batch()
    shape = tuple(prediction.shape)
    sizes = shape[:1] if len(shape) in (1, 2) or len(shape) > 3 else shape[:-1]
    if axis is not None and -len(sizes) <= axis < len(sizes):
        sizes = (sizes[axis], *(size for other, size in enumerate(sizes) if other != axis % len(sizes)))
    return Batch(sizes)

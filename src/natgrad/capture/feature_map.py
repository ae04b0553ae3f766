"""Finding the feature map that a linear layer's input was, before it was flattened."""

from __future__ import annotations

import math

from natgrad.capture.cases import RESHAPES
from natgrad.capture.choices import split_map
from natgrad.capture.graph import Vertex, kind, output_shape, saved_integers

# What may stand between the flattening and the product: elementwise functions of one activation.
_ACTIVATIONS = ("Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Tanh", "Sigmoid", "Hardtanh", "Hardswish")
_ELEMENTWISE = frozenset(("Mul", "NativeDropout", "Clone", "ToCopy", "Alias", *_ACTIVATIONS))


def feature_map(node: Vertex, argument: int, inputs: int) -> tuple[int, int] | None:
    """How the inputs of a product split into channels and places (C, T), or places and channels where they lie so.

    `argument` is where the product takes its activation. Follows the activation up to the view or flatten that made
    rows of `inputs` elements out of maps; None where there is none, as for raw data.
    """
    producer: Vertex | None = node.next_functions[argument][0]
    while producer is not None and output_shape(producer)[-1:] == (inputs,):
        if kind(producer) in RESHAPES:
            above, output = producer.next_functions[0]
            if above is None:
                return None
            shape = output_shape(above, output)
            if math.prod(shape[1:]) == inputs and len(shape) > 2:
                return split_map(shape[1:], channels_last=_channels_last(producer, len(shape)))
        elif kind(producer) not in _ELEMENTWISE or not _has_one_activation(producer):
            return None
        producer = next((above for above, _ in producer.next_functions if above is not None), None)
    return None


def _has_one_activation(node: Vertex) -> bool:
    return sum(above is not None for above, _ in node.next_functions) == 1


def _channels_last(reshape: Vertex, axes: int) -> bool:
    """Whether a permutation has moved the channels to the end before the flattening."""
    above = reshape.next_functions[0][0]
    while above is not None and kind(above) in ("Clone", "Permute", "ToCopy"):
        if kind(above) == "Permute":
            order = [axis % axes for axis in saved_integers(above, "dims")]
            return order[-1] == 1
        above = above.next_functions[0][0]
    return False

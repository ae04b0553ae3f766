"""Terms of a loss that only measure a parameter."""

from __future__ import annotations

from natgrad.capture.graph import Consumer, Graph, Vertex, kind, output_shape

_MEASURES = ("Pow", "Mul", "Abs", "Sum", "Mean", "Sqrt", "LinalgVectorNorm", "Norm")


def is_penalty(graph: Graph, consumer: Consumer) -> bool:
    """Whether a parameter is only measured here (an L2 or L1 term): functions of it alone, down to one number."""
    node = consumer.node
    while kind(node) in _MEASURES:
        if kind(node) == "Mul" and len(set(node.next_functions)) + len(node.next_functions) != 3:
            return False  # W · W is a measure of W, x · W is not
        if output_shape(node) == ():
            return _only_numbers_above(graph, node)
        following = {other.node for other in graph.consumers[node]}
        if len(following) != 1:
            return False
        node = following.pop()
    return False


def _only_numbers_above(graph: Graph, node: Vertex) -> bool:
    """Whether all that becomes of a number is other numbers, up to the loss: it never meets an activation."""
    above = [consumer.node for consumer in graph.consumers[node]]
    seen: set[Vertex] = set()
    while above:
        node = above.pop()
        if output_shape(node) != ():
            return False
        if node not in seen:
            seen.add(node)
            above += [consumer.node for consumer in graph.consumers[node]]
    return True

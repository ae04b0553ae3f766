"""Biases: which weight's block a vector belongs to, or that it has one of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from natgrad.capture import layout as layouts
from natgrad.capture.cases import RESHAPES, Batch, leading_shape
from natgrad.capture.choices import Choices
from natgrad.capture.form import Form
from natgrad.capture.graph import Consumer, Graph, Vertex, kind, output_shape, saved
from natgrad.capture.layout import Layout, Shape
from natgrad.capture.products import plain_scale
from natgrad.capture.use import Found, Use
from natgrad.capture.vectors import rows_as_cases
from natgrad.statistics.operations import Convolution, Product
from natgrad.statistics.vectors import Place, Vector


@dataclass(frozen=True)
class Bias:
    """A vector added to the outputs of a product, and the node where that happens."""

    product: Vertex
    layout: Layout
    node: Vertex


def as_bias(name: str, shape: Shape, consumer: Consumer, view: Tensor | None) -> Layout | None:
    """The covered part of a vector, where the node may be adding it as a bias."""
    if len(shape) != 1 or view is None or kind(consumer.node) not in ("Addmm", "Convolution", "Add"):
        return None
    # Broadcasting a bias repeats it along leading axes; the last one is the bias itself.
    if any(stride != 0 and size != 1 for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True)):
        return None
    offset = int(view.storage_offset())
    return layouts.from_view(name, shape, view.shape[-1:], view.stride()[-1:], offset, "r")


def biased_product(graph: Graph, consumer: Consumer, size: int) -> Vertex | None:
    """The product or convolution whose output a vector of `size` is added to, if the sum is all that becomes of it."""
    node = consumer.node
    if kind(node) == "Addmm":
        return node if consumer.argument == 0 and plain_scale(node) else None
    if kind(node) == "Convolution":
        return node if consumer.argument == 2 else None
    if saved(node, "alpha") != 1 or len(node.next_functions) != 2:
        return None
    producer = node.next_functions[1 - consumer.argument][0]
    while producer is not None and kind(producer) in (*RESHAPES, "Mm", "Bmm", "Mv"):
        shape = output_shape(producer)
        complete = math.prod(shape) == math.prod(output_shape(node))
        if not complete or shape[-1:] != (size,) or graph.only_consumer(producer) is None:
            return None
        if kind(producer) not in RESHAPES:
            return producer
        producer = producer.next_functions[0][0]
    return None


def with_biases(
    weights: dict[str, list[Found]],
    biases: dict[str, list[Bias]],
    free: dict[str, list[Found]],
    graph: Graph,
    batch: Batch,
    choices: Choices,
    axes: Mapping[str, int | None],
) -> list[Found]:
    """Joins a bias to the weight whose uses alone it is added to; other biases are vectors of their own.

    Not every use of the weight need add it: one that does not has a 0 in the bias's coordinate instead of a 1. `axes`
    are the case axes known from earlier passes.
    """
    by_node: dict[Vertex, Layout] = {bias.product: bias.layout for added in biases.values() for bias in added}
    groups: dict[tuple[str, object], list[Found]] = {}
    for uses in weights.values():
        for one in uses:
            groups.setdefault((one.use.weight.name, one.use.weight.box), []).append(one)
    joined: set[Layout] = set()
    result: list[Found] = []
    for group in groups.values():
        nodes = {one.node for one in group}
        candidates = {by_node[node] for node in nodes if node in by_node}
        bias = candidates.pop() if len(candidates) == 1 else None
        if bias is not None and not (
            _takes_bias(group, bias) and bias.name not in free and _only_here(bias, nodes, biases)
        ):
            bias = None
        if bias is None:
            result += group
            continue
        joined.add(bias)
        stack, rows, _ = group[0].use.weight.shape
        start = bias.box[0][0] if bias.box else 0
        column = layouts.from_view(bias.name, bias.parameter_shape, (stack, rows), (rows, 1), start, "sr")
        for one in group:
            result.append(replace(one, use=replace(one.use, bias=column, adds_bias=one.node in by_node)))
    alone = {name for name, added in biases.items() if any(bias.layout not in joined for bias in added)}
    by_product = {one.node: one for one in result}
    for name in sorted(alone):
        leaf = graph.leaves[name]
        for added in biases[name]:
            one = _free_bias(
                graph, added, by_product.get(added.product), leaf, batch.for_axis(choices.axis_of(name), axes.get(name))
            )
            free.setdefault(name, []).append(one)
    result = [
        replace(one, use=replace(one.use, bias=None, adds_bias=False))
        if one.use.bias is not None and one.use.bias.name in alone
        else one
        for one in result
    ]
    return result + [one for uses in free.values() for one in uses]


def _free_bias(graph: Graph, bias: Bias, product: Found | None, leaf: Vertex, batch: Batch) -> Found:
    """A bias with a block of its own: added to a product whose weight has another bias, none, or two input factors."""
    node, part = bias.node, bias.layout
    shape = output_shape(node)
    whole = layouts.whole(part.name, part.parameter_shape, part.parameter_shape, "r")
    place = None if part.box is None else Place(part.parameter_shape, part.box)
    if kind(node) == "Convolution":
        form = rows_as_cases(batch.for_axis(None).axis(shape[:1]))
        return Found(node, leaf, Use(whole, Vector("bias", shape, (1,), 0, None, place), (), form))
    if product is not None and len(product.use.column_sizes()) == 2 and node is product.node and place is None:
        # With the weight's own rows: its output factor is this block, and costs nothing more.
        return Found(node, leaf, Use(whole, Vector("bias", shape, (1,), None), (), Form((), full=True)))
    leading = leading_shape(graph, node, shape[-1])
    axis = batch.axis(leading)
    own_axis = axis if isinstance(axis, int) else None
    operation = Vector("bias", (*leading, shape[-1]), (len(leading),), own_axis, None, place)
    return Found(node, leaf, Use(whole, operation, (), rows_as_cases(axis)))


def _takes_bias(group: list[Found], bias: Layout) -> bool:
    """Whether the uses have one orientation, in which the vector lies along their outputs."""
    stack, rows, _ = group[0].use.weight.shape
    plain = all(
        isinstance(one.use.operation, Convolution)
        or (
            isinstance(one.use.operation, Product)
            and not one.use.operation.stacked
            and not one.use.operation.weight_on_left
            and one.use.operation.feature_map is None
        )
        for one in group
    )
    return plain and all(one.use.weight == group[0].use.weight for one in group) and bias.numel == stack * rows


def _only_here(bias: Layout, nodes: set[Vertex], biases: dict[str, list[Bias]]) -> bool:
    return all(other.product in nodes for other in biases[bias.name] if other.layout.overlaps(bias))

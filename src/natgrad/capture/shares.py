"""Factors that uses have in common: one activation feeds them, or their outputs are summed (Ba et al. 2017, App. B)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture.cases import RESHAPES
from natgrad.capture.graph import Graph, has_unpack_hook, kind, output_shape, saved
from natgrad.capture.use import Found
from natgrad.statistics.operations import Convolution, Product
from natgrad.statistics.vectors import Vector


def with_shares(graph: Graph, found: list[Found]) -> list[Found]:
    """Numbers activations by where they lie in memory, and derivatives by the sum that they come from."""
    inputs: dict[object, int] = {}
    outputs: dict[object, int] = {}
    result = []
    for one in found:
        packed = not one.use.given and any(has_unpack_hook(one.node, name) for name in one.use.saved)
        alone = packed or one.use.given or len(one.use.column_sizes()) != 1
        activation = None if alone else _activation_identity(one)
        derivative = _derivative_identity(graph, one)
        numbers = [
            None if identity is None else known.setdefault(identity, len(known))
            for identity, known in ((activation, inputs), (derivative, outputs))
        ]
        use = replace(one.use, packed=packed, share_input=numbers[0], share_output=numbers[1])
        result.append(replace(one, use=use))
    return result


def _activation_identity(one: Found) -> object:
    """Equal for uses that read the same tensor in the same way. All saved tensors are alive, so the address of a
    storage names it.
    """
    tensor: Tensor = saved(one.node, one.use.saved[0])
    place = (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )
    return (place, one.use.operation, one.use.weight.shape[2], one.use.bias is not None, one.use.adds_bias)


def _derivative_identity(graph: Graph, one: Found) -> object:
    """Equal for uses whose outputs are summed, so that one derivative reaches all of them, in rows of one kind."""
    operation, outputs = one.use.operation, one.use.weight.shape[1]
    if isinstance(operation, Vector):
        # The bias of a doubly factored layer: its full block is the layer's output factor.
        return (one.node, outputs, "rows") if one.use.form.full else None
    if isinstance(operation, Convolution):
        top = _sum_above(graph, one.node, lambda node: False)
        return None if top is None else (top, operation.groups, operation.reduced, operation.kind)
    if not isinstance(operation, Product) or operation.weight_on_left or operation.stacked:
        return None
    top = _sum_above(graph, one.node, lambda node: kind(node) in RESHAPES and output_shape(node)[-1:] == (outputs,))
    if top is not None:
        return (top, outputs, operation.leading, operation.case_axis)
    return (one.node, outputs, "rows") if operation.feature_map is not None else None


def _sum_above(graph: Graph, node: Node, passes: Callable[[Node], bool]) -> Node | None:
    """The topmost sum that a node's output goes into unchanged, but for nodes that `passes` lets through."""
    added = False
    while (consumer := graph.only_consumer(node)) is not None:
        above = consumer.node
        if kind(above) == "Add":
            if saved(above, "alpha") != 1 or output_shape(above) != output_shape(node):
                break
            added = True
        elif not passes(above):
            break
        node = above
    return node if added else None

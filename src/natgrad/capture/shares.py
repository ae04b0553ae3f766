"""Factors that uses have in common: one activation feeds them, or their outputs are summed (Ba et al. 2017, App. B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture.cases import RESHAPES
from natgrad.capture.graph import Graph, Vertex, has_unpack_hook, kind, output_shape, saved, saved_tensor
from natgrad.capture.use import Found
from natgrad.statistics.operations import Convolution, Product
from natgrad.statistics.vectors import Vector


def with_derivatives(graph: Graph, found: list[Found]) -> list[Found]:
    """Numbers derivatives by the sum that they come from, and says whose activation is packed away."""
    numbers: dict[object, int] = {}
    result = []
    for one in found:
        # What one operation saves is packed by the same hooks: the first tells for all, and questions are asked again
        # in every step.
        packed = one.given is None and any(has_unpack_hook(one.node, name) for name in one.use.saved[:1])
        identity = _derivative_identity(graph, one)
        number = None if identity is None else numbers.setdefault(identity, len(numbers))
        result.append(replace(one, use=replace(one.use, packed=packed, share_output=number)))
    return result


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


def _sum_above(graph: Graph, node: Vertex, passes: Callable[[Vertex], bool]) -> Vertex | None:
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


@dataclass(frozen=True)
class Reading:
    """How a use reads its activation: what the node with this `number` saved under a name. Only those of one `way` can
    have one factor; None where no other reads like this one.
    """

    number: int
    name: str
    way: int | None


def readings(found: Sequence[Found]) -> list[Reading | None]:
    """For each use; None where its input factor is its own in any case."""
    ways = [_way(one) for one in found]
    alike = Counter(ways)
    numbers: dict[object, int] = {}
    return [
        None
        if way is None
        else Reading(
            one.node.number, one.use.saved[0], numbers.setdefault(way, len(numbers)) if alike[way] > 1 else None
        )
        for one, way in zip(found, ways, strict=True)
    ]


def _way(one: Found) -> object:
    use = one.use
    if use.packed or one.given is not None or len(use.column_sizes()) != 1:
        return None
    return (use.operation, use.weight.shape[2], use.bias is not None, use.adds_bias)


class Readings:
    """Those of all uses of a graph: they tell which of them read the same tensor."""

    def __init__(self, readings: Sequence[Reading | None]) -> None:
        self._all = readings
        self._comparable = [one for one in readings if one is not None and one.way is not None]
        every = iter(range(len(readings)))
        self._apart = [None if one is None else next(every) for one in readings]  # where all tensors are different

    def activation_numbers(self, nodes: Sequence[Node]) -> list[int | None]:
        """Equal for uses that read the same tensor in the same way. All saved tensors are alive, so the address of a
        storage names it.
        """
        storages = {_storage(saved_tensor(nodes[one.number], one.name)) for one in self._comparable}
        if len(storages) == len(self._comparable):
            return self._apart
        numbers: dict[object, int] = {}
        return [
            None if one is None else numbers.setdefault(_activation_identity(nodes, one), len(numbers))
            for one in self._all
        ]


def _activation_identity(nodes: Sequence[Node], one: Reading) -> object:
    if one.way is None:
        return one
    tensor = saved_tensor(nodes[one.number], one.name)
    return one.way, _storage(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address

"""Recognising how a node of the graph uses a parameter.

A `Use` is one product, convolution or look-up with a weight (and the bias that is added to it). What is not
recognised is named, so that the report can say why a parameter is left to the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from natgrad.capture import layout as layouts
from natgrad.capture.graph import Consumer, Graph, has_unpack_hook, kind, output_shape, saved, saved_integer, variable
from natgrad.capture.layout import Layout
from natgrad.statistics.operations import Convolution, Embedding, Operation, Product

# Nodes between a product and the addition of its bias that keep the last axis, the outputs, in place.
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
# Nodes that only rearrange a tensor, without repeating it.
_REARRANGEMENTS = (*_RESHAPES, "T", "Transpose", "Permute", "Clone", "ToCopy", "Alias", "Slice", "Select")
_MEASURES = ("Pow", "Mul", "Abs", "Sum", "Mean", "Sqrt", "LinalgVectorNorm", "Norm")
_RECURRENT = "inside a fused recurrent kernel, which hides its products"
_NORM = "norm layer"
_REASONS = {
    "CudnnRnn": _RECURRENT,
    "MkldnnRnnLayer": _RECURRENT,
    "MiopenRnn": _RECURRENT,
    "ThnnFusedLstmCell": _RECURRENT,
    "ThnnFusedGruCell": _RECURRENT,
    "NativeBatchNorm": _NORM,
    "CudnnBatchNorm": _NORM,
    "MiopenBatchNorm": _NORM,
    "NativeLayerNorm": _NORM,
    "NativeGroupNorm": _NORM,
    "FusedRmsNorm": _NORM,
}


@dataclass(frozen=True)
class Use:
    """One use of a weight in one forward pass. Holds no node, so that it keeps no graph alive.

    `bias` belongs to the weight's block; `adds_bias` says whether this use adds it. `share_input` and
    `share_output` number the activations and derivatives of the pass: uses with equal numbers have equal factors.
    `packed` says that reading the activation recomputes or copies it.
    """

    weight: Layout
    operation: Operation
    activation: str
    bias: Layout | None = None
    adds_bias: bool = False
    packed: bool = False
    share_input: int | None = None
    share_output: int | None = None


@dataclass(frozen=True)
class Found:
    """A use, the node that makes it, and the leaf through which the weight's gradient leaves the graph."""

    node: Node
    leaf: Node
    use: Use


@dataclass
class Findings:
    """What one graph says of the model's parameters."""

    found: list[Found] = field(default_factory=list)
    unrecognised: dict[str, str] = field(default_factory=dict)


def find_uses(graph: Graph, parameters: Mapping[str, Tensor]) -> Findings:
    """Every recognised use of `parameters` in a graph; a parameter with a use that is not recognised has none."""
    findings = Findings()
    weights: dict[str, list[Found]] = {}
    vectors: dict[str, list[tuple[Node, Layout]]] = {}
    for name, parameter in parameters.items():
        for consumer, view in graph.uses_of(parameter):
            if _is_penalty(graph, consumer):
                continue
            if (vector := _as_bias(name, parameter, consumer, view)) is not None:
                product = _biased_product(graph, consumer, vector.numel)
                if product is not None:
                    vectors.setdefault(name, []).append((product, vector))
                    continue
            made = _recognise(name, parameter, consumer, view)
            if isinstance(made, str):
                findings.unrecognised[name] = made
            else:
                weights.setdefault(name, []).append(Found(consumer.node, graph.leaves[id(parameter)], made))
    _drop_products_of_parameters(weights, findings)
    _drop_overlapping(weights, findings)
    for name in findings.unrecognised:
        weights.pop(name, None)
        vectors.pop(name, None)
    findings.found = _with_shares(graph, _with_biases(weights, vectors, findings))
    return findings


def _recognise(name: str, parameter: Tensor, consumer: Consumer, view: Tensor | None) -> Use | str:
    """A use without its bias, or why there is none."""
    node_kind = kind(consumer.node)
    if node_kind in _REASONS:
        return _REASONS[node_kind]
    recogniser = _RECOGNISERS.get(node_kind)
    if recogniser is not None and view is None:
        return f"its use by {node_kind} is not a plain view of it"
    if recogniser is not None and view is not None and _is_of_parameters(consumer):
        return "multiplied with another parameter"
    if node_kind == "Embedding" and saved(consumer.node, "sparse"):
        return "an embedding with sparse gradients"
    made = recogniser(name, parameter, consumer, view) if recogniser is not None and view is not None else None
    if made is not None:
        return made
    if parameter.dim() <= 1:
        return f"a vector used by {node_kind}, not the bias of one product"
    return f"its use by {node_kind} is not recognised"


def _is_of_parameters(consumer: Consumer) -> bool:
    """Whether a product's other operand is a bare leaf, rearranged: then its rows are not cases."""
    if kind(consumer.node) not in _OPERANDS:
        return False
    operands = _OPERANDS[kind(consumer.node)]
    for argument, (producer, _) in enumerate(consumer.node.next_functions):
        if argument == consumer.argument or (len(operands) == 3 and argument == 0):
            continue
        while producer is not None and kind(producer) in _REARRANGEMENTS:
            producer = producer.next_functions[0][0]
        if producer is not None and kind(producer) == "AccumulateGrad":
            return isinstance(variable(producer), Parameter)
    return False


def _is_penalty(graph: Graph, consumer: Consumer) -> bool:
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


def _only_numbers_above(graph: Graph, node: Node) -> bool:
    """Whether all that becomes of a number is other numbers, up to the loss: it never meets an activation."""
    above = [consumer.node for consumer in graph.consumers[node]]
    seen: set[Node] = set()
    while above:
        node = above.pop()
        if output_shape(node) != ():
            return False
        if node not in seen:
            seen.add(node)
            above += [consumer.node for consumer in graph.consumers[node]]
    return True


_OPERANDS = {
    "Addmm": ("self", "mat1", "mat2"),
    "Baddbmm": ("self", "batch1", "batch2"),
    "Mm": ("self", "mat2"),
    "Bmm": ("self", "mat2"),
    "Mv": ("self", "vec"),
}


def _product(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """x W and W x, stacked or with the weight repeated."""
    node = consumer.node
    names = _OPERANDS[kind(node)]
    if len(names) == 3 and (consumer.argument == 0 or not _plain_scale(node)):
        return None
    left, right = names[-2:]
    on_left = names[consumer.argument] == left
    roles = "rc" if on_left else "cr"
    stacked = False
    if view.dim() == 3:
        stacked = view.shape[0] > 1 and view.stride(0) != 0
        roles = ("s" if stacked else "e") + roles
    layout = _layout(name, parameter, view, roles)
    if layout is None:
        return None
    return Use(layout, Product(weight_on_left=on_left, stacked=stacked), right if on_left else left)


def _matrix_vector(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """W x for one vector x: one row."""
    layout = _layout(name, parameter, view, "rc") if consumer.argument == 0 else None
    return None if layout is None else Use(layout, Product(), "vec")


def _convolution(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Convolution(input, weight, bias)."""
    node = consumer.node
    if consumer.argument != 1 or not _is_whole(parameter, view):
        return None
    kernel = tuple(parameter.shape[2:])

    def each(name: str) -> tuple[int, ...]:
        values = tuple(saved(node, name))
        return values * len(kernel) if len(values) == 1 else values  # padding="valid" is saved as one number

    operation = Convolution(
        kernel=kernel,
        stride=each("stride"),
        padding=each("padding"),
        dilation=each("dilation"),
        transposed=bool(saved(node, "transposed")),
        output_padding=each("output_padding"),
        groups=int(saved(node, "groups")),
    )
    groups = operation.groups
    axes = (groups, parameter.shape[0] // groups, parameter.shape[1], *kernel)
    roles = "scr" if operation.transposed else "src"
    return Use(layouts.whole(name, parameter.shape, axes, roles + "c" * len(kernel)), operation, "input")


def _embedding(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Embedding(weight, indices) with dense, unscaled gradients."""
    node = consumer.node
    if not _is_whole(parameter, view) or saved(node, "scale_grad_by_freq"):
        return None
    layout = layouts.whole(name, parameter.shape, parameter.shape, "cr")
    return Use(layout, Embedding(parameter.shape[0], saved_integer(node, "padding_idx")), "indices")


_RECOGNISERS = {
    "Addmm": _product,
    "Baddbmm": _product,
    "Mm": _product,
    "Bmm": _product,
    "Mv": _matrix_vector,
    "Convolution": _convolution,
    "Embedding": _embedding,
}


def _layout(name: str, parameter: Tensor, view: Tensor, roles: str) -> Layout | None:
    return layouts.from_view(name, parameter.shape, view.shape, view.stride(), int(view.storage_offset()), roles)


def _is_whole(parameter: Tensor, view: Tensor) -> bool:
    return view.shape == parameter.shape and view.is_contiguous()


def _plain_scale(node: Node) -> bool:
    return bool(saved(node, "alpha") == 1 and saved(node, "beta") == 1)


def _as_bias(name: str, parameter: Tensor, consumer: Consumer, view: Tensor | None) -> Layout | None:
    """The covered part of a vector, where the node may be adding it as a bias."""
    if parameter.dim() != 1 or view is None or kind(consumer.node) not in ("Addmm", "Convolution", "Add"):
        return None
    # Broadcasting a bias repeats it along leading axes; the last one is the bias itself.
    if any(stride != 0 and size != 1 for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True)):
        return None
    offset = int(view.storage_offset())
    return layouts.from_view(name, parameter.shape, view.shape[-1:], view.stride()[-1:], offset, "r")


def _biased_product(graph: Graph, consumer: Consumer, size: int) -> Node | None:
    """The product or convolution whose output a vector of `size` is added to, if the sum is all that becomes of it."""
    node = consumer.node
    if kind(node) == "Addmm":
        return node if consumer.argument == 0 and _plain_scale(node) else None
    if kind(node) == "Convolution":
        return node if consumer.argument == 2 else None
    if saved(node, "alpha") != 1 or len(node.next_functions) != 2:
        return None
    producer = node.next_functions[1 - consumer.argument][0]
    while producer is not None and kind(producer) in (*_RESHAPES, "Mm", "Bmm", "Mv"):
        shape = output_shape(producer)
        complete = math.prod(shape) == math.prod(output_shape(node))
        if not complete or shape[-1:] != (size,) or graph.only_consumer(producer) is None:
            return None
        if kind(producer) not in _RESHAPES:
            return producer
        producer = producer.next_functions[0][0]
    return None


def _drop_products_of_parameters(weights: dict[str, list[Found]], findings: Findings) -> None:
    """Two weights at one node (U V, W W): their rows are not cases, whichever operand they are."""
    holders: dict[Node, list[str]] = {}
    for name, uses in weights.items():
        for one in uses:
            holders.setdefault(one.node, []).append(name)
    for names in holders.values():
        if len(names) > 1:
            findings.unrecognised |= dict.fromkeys(names, "multiplied with another parameter")


def _drop_overlapping(weights: dict[str, list[Found]], findings: Findings) -> None:
    """A parameter used whole in one place and in slices in another has no block of its own; say so."""
    for name, uses in weights.items():
        seen = [one.use.weight for one in uses]
        fitting = all(
            a in (b, b.transposed()) if a.box == b.box else not a.overlaps(b) for a in seen for b in seen if a is not b
        )
        if not fitting:
            findings.unrecognised[name] = "used in regions that overlap without being equal"


def _with_biases(
    weights: dict[str, list[Found]], vectors: dict[str, list[tuple[Node, Layout]]], findings: Findings
) -> list[Found]:
    """Joins a bias to the weight whose uses alone it is added to; other biases are left to the optimizer.

    Not every use of the weight need add it: one that does not has a 0 in the bias's coordinate instead of a 1.
    """
    by_node: dict[Node, Layout] = {node: vector for added in vectors.values() for node, vector in added}
    groups: dict[tuple[str, object], list[Found]] = {}
    for uses in weights.values():
        for one in uses:
            groups.setdefault((one.use.weight.name, one.use.weight.box), []).append(one)
    joined: set[Layout] = set()
    result: list[Found] = []
    for group in groups.values():
        nodes = {one.node for one in group}
        biases = {by_node[node] for node in nodes if node in by_node}
        bias = biases.pop() if len(biases) == 1 else None
        if bias is not None and not (_takes_bias(group, bias) and _only_here(bias, nodes, vectors)):
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
    dropped = {name for name, added in vectors.items() if any(vector not in joined for _, vector in added)}
    findings.unrecognised |= dict.fromkeys(dropped, "a bias that is not added to the products of one weight alone")
    return [
        replace(one, use=replace(one.use, bias=None, adds_bias=False))
        if one.use.bias is not None and one.use.bias.name in dropped
        else one
        for one in result
    ]


def _takes_bias(group: list[Found], bias: Layout) -> bool:
    """Whether the uses have one orientation, in which the vector lies along their outputs."""
    stack, rows, _ = group[0].use.weight.shape
    plain = all(
        isinstance(one.use.operation, Convolution)
        or (
            isinstance(one.use.operation, Product)
            and not one.use.operation.stacked
            and not one.use.operation.weight_on_left
        )
        for one in group
    )
    return plain and all(one.use.weight == group[0].use.weight for one in group) and bias.numel == stack * rows


def _only_here(bias: Layout, nodes: set[Node], vectors: dict[str, list[tuple[Node, Layout]]]) -> bool:
    return all(node in nodes for node, vector in vectors[bias.name] if vector.overlaps(bias))


def _with_shares(graph: Graph, found: list[Found]) -> list[Found]:
    """Numbers activations by where they lie in memory, and derivatives by the sum that they come from."""
    inputs: dict[object, int] = {}
    outputs: dict[object, int] = {}
    result = []
    for one in found:
        packed = has_unpack_hook(one.node, one.use.activation)
        activation = None if packed else _activation_identity(one)
        derivative = _derivative_identity(graph, one)
        numbers = [
            None if identity is None else known.setdefault(identity, len(known))
            for identity, known in ((activation, inputs), (derivative, outputs))
        ]
        use = replace(one.use, packed=packed, share_input=numbers[0], share_output=numbers[1])
        result.append(replace(one, use=use))
    return result


def _activation_identity(one: Found) -> object:
    """Equal for uses that read the same tensor in the same way. All saved tensors are alive, so an address names
    one.
    """
    tensor: Tensor = saved(one.node, one.use.activation)
    place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (place, one.use.operation, one.use.weight.shape[2], one.use.bias is not None, one.use.adds_bias)


def _derivative_identity(graph: Graph, one: Found) -> object:
    """Equal for uses whose outputs are summed, so that one derivative reaches all of them."""
    operation = one.use.operation
    if not isinstance(operation, Product) or operation.weight_on_left or operation.stacked:
        return None
    node, outputs, added = one.node, one.use.weight.shape[1], False
    while (consumer := graph.only_consumer(node)) is not None:
        above = consumer.node
        shape = output_shape(above)
        if kind(above) == "Add":
            if saved(above, "alpha") != 1 or shape != output_shape(node):
                break
            added = True
        elif kind(above) not in _RESHAPES or shape[-1:] != (outputs,):
            break
        node = above
    return (node, outputs) if added else None

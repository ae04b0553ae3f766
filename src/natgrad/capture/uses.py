"""Recognising how a node of the graph uses a parameter.

A `Use` is one product, convolution or look-up with a weight (and the bias that is added to it). What is not
recognised is named, so that the report can
say why a parameter is left to the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture import layout as layouts
from natgrad.capture.graph import Consumer, Graph, has_unpack_hook, kind, output_shape, saved
from natgrad.capture.layout import Layout
from natgrad.statistics.operations import Convolution, Embedding, Operation, Product

# Nodes between a product and the addition of its bias that keep the last axis, the outputs, in place.
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
# Nodes that compute many layers in one fused kernel, and the reentrant checkpoint: what the report says of them.
_FUSED = {
    "CudnnRnn": "inside a fused recurrent kernel, which hides its products",
    "MkldnnRnnLayer": "inside a fused recurrent kernel, which hides its products",
    "MiopenRnn": "inside a fused recurrent kernel, which hides its products",
    "ThnnFusedLstmCell": "inside a fused recurrent cell",
    "ThnnFusedGruCell": "inside a fused recurrent cell",
    "NativeBatchNorm": "norm layer",
    "CudnnBatchNorm": "norm layer",
    "MiopenBatchNorm": "norm layer",
    "NativeLayerNorm": "norm layer",
    "NativeGroupNorm": "norm layer",
    "FusedRmsNorm": "norm layer",
}


@dataclass(frozen=True)
class Use:
    """One use of a weight in one forward pass.

    `share_input` and `share_output` name the activation and the derivative within the pass: uses with equal names
    have equal factors.
    """

    node: Node = field(repr=False)
    weight: Layout
    bias: Layout | None
    operation: Operation
    activation: str
    share_input: object = None
    share_output: object = None


@dataclass
class Findings:
    """What one graph says of the model's parameters."""

    uses: list[Use] = field(default_factory=list)
    unrecognised: dict[str, str] = field(default_factory=dict)


def find_uses(graph: Graph, parameters: Mapping[str, Tensor]) -> Findings:
    """Every recognised use of `parameters` in a graph; a parameter with a use that is not recognised has none."""
    findings = Findings()
    weights: dict[str, list[Use]] = {}
    vectors: dict[str, list[tuple[Node, Layout]]] = {}
    for name, parameter in parameters.items():
        for consumer, view in graph.uses_of(parameter):
            if (vector := _as_bias(name, parameter, consumer, view)) is not None:
                product = _biased_product(graph, consumer, vector.shape[1] * vector.shape[0])
                if product is not None:
                    vectors.setdefault(name, []).append((product, vector))
                    continue
            made = _recognise(name, parameter, consumer, view)
            if isinstance(made, str):
                findings.unrecognised[name] = made
            else:
                weights.setdefault(name, []).append(made)
    for name in findings.unrecognised:
        weights.pop(name, None)
        vectors.pop(name, None)
    _drop_overlapping(weights, findings)
    findings.uses = _with_biases(weights, vectors, findings)
    findings.uses = [_with_shares(graph, use) for use in findings.uses]
    return findings


def _recognise(name: str, parameter: Tensor, consumer: Consumer, view: Tensor | None) -> Use | str:
    """A use without its bias, or why there is none."""
    node_kind = kind(consumer.node)
    if node_kind in _FUSED:
        return _FUSED[node_kind]
    if view is None:
        return f"its use by {node_kind} is not a plain view of it"
    recogniser = _RECOGNISERS.get(node_kind)
    made = recogniser(name, parameter, consumer, view) if recogniser is not None else None
    if made is not None:
        return made
    if parameter.dim() <= 1:
        return f"a vector used by {node_kind}, not the bias of one product"
    return f"its use by {node_kind} is not recognised"


def _product(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Addmm(bias, x, W), Mm(x, W), Mm(W, x), Bmm(x, W) and Bmm(W, x), stacked or with the weight repeated."""
    node = consumer.node
    names = ("self", "mat1", "mat2") if kind(node) in ("Addmm", "Baddbmm") else ("self", "mat2")
    if kind(node) in ("Addmm", "Baddbmm") and (consumer.argument == 0 or not _plain_scale(node)):
        return None
    on_left = names[consumer.argument] != "mat2"
    activation = "mat2" if on_left else names[-2]
    matrix_roles = "rc" if on_left else "cr"
    stacked = False
    if view.dim() == 3:
        stacked = view.shape[0] > 1 and view.stride(0) != 0
        matrix_roles = ("s" if stacked else "e") + matrix_roles
    layout = layouts.from_view(
        name, parameter.shape, view.shape, view.stride(), int(view.storage_offset()), matrix_roles
    )
    if layout is None:
        return None
    return Use(node, layout, None, Product(weight_on_left=on_left, stacked=stacked), activation)


def _matrix_vector(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Mv(W, x): one row."""
    if consumer.argument != 0:
        return None
    layout = layouts.from_view(name, parameter.shape, view.shape, view.stride(), int(view.storage_offset()), "rc")
    return None if layout is None else Use(consumer.node, layout, None, Product(), "vec")


def _convolution(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Convolution(input, weight, bias)."""
    node = consumer.node
    if consumer.argument != 1 or view.shape != parameter.shape or view.stride() != _plain_strides(parameter):
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
    first, second = parameter.shape[0] // groups, parameter.shape[1]
    roles = "scr" if operation.transposed else "src"
    axes = (groups, first, second, *kernel)
    layout = layouts.whole(name, parameter.shape, axes, roles + "c" * len(kernel))
    return Use(node, layout, None, operation, "input")


def _embedding(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Embedding(weight, indices) with dense, unscaled gradients."""
    node = consumer.node
    if view.shape != parameter.shape or saved(node, "sparse") or saved(node, "scale_grad_by_freq"):
        return None
    layout = layouts.whole(name, parameter.shape, parameter.shape, "cr")
    padding = saved(node, "padding_idx")
    padding = padding - 2**64 if padding >= 2**63 else padding
    return Use(node, layout, None, Embedding(parameter.shape[0], int(padding)), "indices")


_RECOGNISERS = {
    "Addmm": _product,
    "Baddbmm": _product,
    "Mm": _product,
    "Bmm": _product,
    "Mv": _matrix_vector,
    "Convolution": _convolution,
    "Embedding": _embedding,
}


def _plain_scale(node: Node) -> bool:
    return bool(saved(node, "alpha") == 1 and saved(node, "beta") == 1)


def _plain_strides(parameter: Tensor) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(parameter.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


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
    """The product, convolution or look-up whose output a vector of `size` is added to, if the sum is all that
    becomes of it.
    """
    node = consumer.node
    if kind(node) == "Addmm":
        return node if consumer.argument == 0 and _plain_scale(node) else None
    if kind(node) == "Convolution":
        return node if consumer.argument == 2 else None
    if saved(node, "alpha") != 1 or len(node.next_functions) != 2:
        return None
    producer = node.next_functions[1 - consumer.argument][0]
    whole_shape = output_shape(node)
    while producer is not None and kind(producer) in (*_RESHAPES, "Mm", "Bmm", "Mv"):
        shape = output_shape(producer)
        complete = _elements(shape) == _elements(whole_shape)
        if not complete or shape[-1] != size or graph.only_consumer(producer) is None:
            return None
        if kind(producer) not in _RESHAPES:
            return producer
        producer = producer.next_functions[0][0]
    return None


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _drop_overlapping(weights: dict[str, list[Use]], findings: Findings) -> None:
    """A parameter used whole in one place and in slices in another has no block of its own; say so."""
    for name, uses in list(weights.items()):
        regions = {use.weight.box for use in uses}
        mixed = any(a.weight.box != b.weight.box and a.weight.overlaps(b.weight) for a in uses for b in uses)
        by_region = {box: [use.weight for use in uses if use.weight.box == box] for box in regions}
        twisted = any(
            layout not in (group[0], group[0].transposed()) for group in by_region.values() for layout in group
        )
        if mixed or twisted:
            findings.unrecognised[name] = "used in regions that overlap without being equal"
            del weights[name]


def _with_biases(
    weights: dict[str, list[Use]], vectors: dict[str, list[tuple[Node, Layout]]], findings: Findings
) -> list[Use]:
    """Joins a bias to its weight where every use of either has the other; other biases are left to the optimizer."""
    by_node: dict[Node, list[Layout]] = {}
    for additions in vectors.values():
        for node, vector in additions:
            by_node.setdefault(node, []).append(vector)
    groups: dict[tuple[str, object], list[Use]] = {}
    for uses in weights.values():
        for use in uses:
            groups.setdefault((use.weight.name, use.weight.box), []).append(use)
    joined: list[Use] = []
    attached: dict[Layout, int] = {}
    for group in groups.values():
        candidates = {tuple(by_node.get(use.node, [])) for use in group}
        bias = next(iter(candidates))[0] if len(candidates) == 1 and len(next(iter(candidates))) == 1 else None
        one_way = all(use.weight == group[0].weight for use in group)
        takes_bias = not isinstance(group[0].operation, Embedding) and not _stacked(group[0])
        if bias is None or not one_way or not takes_bias or not _all_on(bias, group, vectors):
            joined.extend(group)
            continue
        stack, rows, _ = group[0].weight.shape
        column = layouts.from_view(
            bias.name, bias.parameter_shape, (stack, rows), (rows, 1), bias.box[0][0] if bias.box else 0, "sr"
        )
        assert column is not None, "a slice of a vector is a dense box"
        attached[bias] = 1
        joined.extend(Use(use.node, use.weight, column, use.operation, use.activation) for use in group)
    for name, additions in vectors.items():
        if any(vector not in attached for _, vector in additions):
            findings.unrecognised[name] = "a bias that is not added at every use of one weight alone"
    dropped = {name for name in findings.unrecognised if name in vectors}
    return [
        Use(use.node, use.weight, None, use.operation, use.activation)
        if use.bias is not None and use.bias.name in dropped
        else use
        for use in joined
    ]


def _stacked(use: Use) -> bool:
    return isinstance(use.operation, Product) and use.operation.stacked


def _all_on(bias: Layout, group: list[Use], vectors: dict[str, list[tuple[Node, Layout]]]) -> bool:
    """Whether the bias is added to these uses and to nothing else."""
    nodes = {use.node for use in group}
    return all(node in nodes for node, vector in vectors[bias.name] if vector.overlaps(bias))


def _with_shares(graph: Graph, use: Use) -> Use:
    """Names the activation by where it lies in memory, and the derivative by the sum that it comes from."""
    return Use(
        use.node,
        use.weight,
        use.bias,
        use.operation,
        use.activation,
        _activation_identity(use),
        _derivative_identity(graph, use),
    )


def _activation_identity(use: Use) -> object:
    """Equal for uses that read the same tensor in the same way. All saved tensors are alive, so an address names one
    of them.
    """
    if has_unpack_hook(use.node, use.activation):
        return None
    tensor: Tensor = saved(use.node, use.activation)
    place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (place, use.operation, use.weight.shape[2], use.bias is not None)


def _derivative_identity(graph: Graph, use: Use) -> object:
    """Equal for uses whose outputs are summed, so that one derivative reaches all of them."""
    if not isinstance(use.operation, Product) or use.operation.weight_on_left or use.operation.stacked:
        return None
    node, outputs, added = use.node, use.weight.shape[1], False
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

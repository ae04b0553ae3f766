"""Recognising how a node of the graph uses a parameter.

A `Use` is one product, convolution or look-up with a weight (and the bias that is added to it), or one broadcast of a
vector. What is not recognised is named, so that the report can say why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from natgrad.capture import layout as layouts
from natgrad.capture.cases import RESHAPES, case_axis, leading_shape
from natgrad.capture.choices import Choices, split_map
from natgrad.capture.feature_map import feature_map
from natgrad.capture.form import Form
from natgrad.capture.graph import (
    Consumer,
    Graph,
    Spread,
    has_unpack_hook,
    kind,
    output_shape,
    saved,
    saved_integer,
    variable,
)
from natgrad.capture.layout import Layout
from natgrad.capture.vectors import VectorUse, find_spread, find_vector
from natgrad.statistics.operations import Convolution, Embedding, Operation, Product
from natgrad.statistics.vectors import Vector

# Nodes that only rearrange a tensor, without repeating it.
_REARRANGEMENTS = (*RESHAPES, "T", "Transpose", "Permute", "Clone", "ToCopy", "Alias", "Slice", "Select")
_MEASURES = ("Pow", "Mul", "Abs", "Sum", "Mean", "Sqrt", "LinalgVectorNorm", "Norm")
_RECURRENT = "inside a fused recurrent kernel, which hides its products"
_REASONS = dict.fromkeys(
    ("CudnnRnn", "MkldnnRnnLayer", "MiopenRnn", "ThnnFusedLstmCell", "ThnnFusedGruCell"), _RECURRENT
)
_SPARSE = "an embedding with sparse gradients"
_VECTOR = Form(())


@dataclass(frozen=True)
class Use:
    """One use of a weight or vector in one forward pass. Holds no node, so that it keeps no graph alive.

    `saved` names what autograd keeps of the activation. `bias` belongs to the weight's block; `adds_bias` says
    whether this use adds it. `share_input` and `share_output` number the activations and derivatives of the pass:
    uses with equal numbers have equal factors. `packed` says that reading the activation recomputes or copies it.
    """

    weight: Layout
    operation: Operation
    saved: tuple[str, ...]
    form: Form = _VECTOR
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


@dataclass(frozen=True)
class _Bias:
    """A vector added to the outputs of a product, and the node and argument where that happens."""

    product: Node
    layout: Layout
    consumer: Consumer
    view: Tensor


@dataclass
class Findings:
    """What one graph says of the model's parameters. `left` names those that are left alone whatever their gradients
    say; `remaining` is how many of the others are taken care of without a recognised use.
    """

    found: list[Found] = field(default_factory=list)
    remaining: int = 0
    unrecognised: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def find_uses(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    *,
    choices: Choices,
    cases: int | None,
    known: Mapping[str, Form],
) -> Findings:
    """Every recognised use of `parameters` in a graph; a parameter with a use that is not recognised has none.

    `cases` is the batch size, where the model's output tells it; `known` holds the forms of blocks that exist.
    """
    findings = Findings()
    weights: dict[str, list[Found]] = {}
    biases: dict[str, list[_Bias]] = {}
    free: dict[str, list[Found]] = {}
    for name, parameter in parameters.items():
        options = {"cases": cases, "wanted": choices.axis_of(name)}
        leaf = graph.leaves.get(id(parameter))
        spreads: dict[Node, Spread] = {}
        for consumer, view, spread in graph.uses_of(parameter):
            assert leaf is not None, "what is used has a leaf"
            if _is_penalty(graph, consumer):
                continue
            bias = _as_bias(name, parameter, consumer, view)
            if bias is not None and view is not None:
                product = _biased_product(graph, consumer, bias.numel)
                if product is not None:
                    biases.setdefault(name, []).append(_Bias(product, bias, consumer, view))
                    continue
            made = _recognise(name, parameter, consumer, view)
            if isinstance(made, Use):
                weights.setdefault(name, []).append(Found(consumer.node, leaf, made))
            elif (vector := find_vector(graph, name, parameter, consumer, view, **options)) is not None:
                free.setdefault(name, []).append(_found(vector, leaf))
            elif spread is not None and find_spread(name, parameter, spread, **options) is not None:
                spreads[spread.node] = spread
            elif made == _SPARSE:
                findings.left[name] = made
            else:
                findings.unrecognised[name] = made
        for spread in spreads.values():
            vector = find_spread(name, parameter, spread, **options)
            if vector is not None and leaf is not None:
                free.setdefault(name, []).append(_found(vector, leaf))
        if spreads and (name in weights or len(free[name]) > len(spreads)):
            # What else the repeated parameter is used for would be counted twice.
            findings.unrecognised[name] = "repeated for several purposes"
    _drop_products_of_parameters(weights, findings)
    _drop_overlapping(weights, findings)
    _drop_overlapping(free, findings)
    both = (weights.keys() & free.keys()) | (weights.keys() & biases.keys())
    findings.unrecognised |= dict.fromkeys(both, "used as a matrix and as a vector")
    for name in [*findings.unrecognised, *findings.left]:
        for uses in (weights, biases, free):
            uses.pop(name, None)
    weights = {name: _doubly_factored(name, uses, choices, known) for name, uses in weights.items()}
    found = _with_biases(weights, biases, free, graph, parameters, cases, choices)
    found = _with_forms(graph, found, choices, cases, known)
    if choices.vectors == "optimizer":
        left = {one.use.weight.name for one in found if isinstance(one.use.operation, Vector)}
        findings.left |= dict.fromkeys(sorted(left), "vectors='optimizer'")
        found = [one for one in found if one.use.weight.name not in left]
    findings.found = _with_shares(graph, found)
    return findings


def _found(vector: VectorUse, leaf: Node) -> Found:
    return Found(vector.node, leaf, Use(vector.layout, vector.operation, vector.saved))


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
        return _SPARSE
    made = recogniser(name, parameter, consumer, view) if recogniser is not None and view is not None else None
    if made is not None:
        return made
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
    return Use(layout, Product(weight_on_left=on_left, stacked=stacked), (right if on_left else left,))


def _matrix_vector(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """W x for one vector x: one row."""
    layout = _layout(name, parameter, view, "rc") if consumer.argument == 0 else None
    return None if layout is None else Use(layout, Product(), ("vec",))


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
    return Use(layouts.whole(name, parameter.shape, axes, roles + "c" * len(kernel)), operation, ("input",))


def _embedding(name: str, parameter: Tensor, consumer: Consumer, view: Tensor) -> Use | None:
    """Embedding(weight, indices) with dense, unscaled gradients."""
    node = consumer.node
    if not _is_whole(parameter, view) or saved(node, "scale_grad_by_freq"):
        return None
    layout = layouts.whole(name, parameter.shape, parameter.shape, "cr")
    return Use(layout, Embedding(parameter.shape[0], saved_integer(node, "padding_idx")), ("indices",))


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
    while producer is not None and kind(producer) in (*RESHAPES, "Mm", "Bmm", "Mv"):
        shape = output_shape(producer)
        complete = math.prod(shape) == math.prod(output_shape(node))
        if not complete or shape[-1:] != (size,) or graph.only_consumer(producer) is None:
            return None
        if kind(producer) not in RESHAPES:
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


def _doubly_factored(name: str, uses: list[Found], choices: Choices, known: Mapping[str, Form]) -> list[Found]:
    """Splits the inputs of a large linear layer on a flattened feature map into channels and places, where asked or
    above the size limit.
    """
    asked = choices.map_of(name)
    inputs = uses[0].use.weight.shape[2]
    limit = choices.doubly_factored_above
    plain = all(
        isinstance(one.use.operation, Product)
        and one.use.operation == Product()
        and one.use.weight == uses[0].use.weight
        and one.use.weight.box is None
        for one in uses
    )
    if not plain or (asked is None and (limit is None or inputs <= limit)):
        return uses
    if asked:
        if math.prod(asked) != inputs:
            raise ValueError(f"doubly_factored: {name} has {inputs} inputs, which are no feature map of shape {asked}")
        shapes = {split_map(asked)}
    elif name in known and len(known[name].columns) == 2:
        shapes = {(known[name].columns[0], known[name].columns[1])}
    else:
        found = [feature_map(one.node, _activation_argument(one), inputs) for one in uses]
        shapes = {shape for shape in found if shape is not None}
        if len(shapes) != 1 or None in found:
            note = "no feature map was found before it: pass doubly_factored={name: shape}"
            return [replace(one, use=replace(one.use, form=Form((inputs,), note=note))) for one in uses]
    shape = shapes.pop()
    if min(shape) == 1:
        return uses
    operation = Product(feature_map=shape)
    return [replace(one, use=replace(one.use, operation=operation)) for one in uses]


def _activation_argument(one: Found) -> int:
    return _OPERANDS[kind(one.node)].index(one.use.saved[0])


def _with_biases(
    weights: dict[str, list[Found]],
    biases: dict[str, list[_Bias]],
    free: dict[str, list[Found]],
    graph: Graph,
    parameters: Mapping[str, Tensor],
    cases: int | None,
    choices: Choices,
) -> list[Found]:
    """Joins a bias to the weight whose uses alone it is added to; other biases are vectors of their own.

    Not every use of the weight need add it: one that does not has a 0 in the bias's coordinate instead of a 1.
    """
    by_node: dict[Node, Layout] = {bias.product: bias.layout for added in biases.values() for bias in added}
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
        leaf = graph.leaves[id(parameters[name])]
        for added in biases[name]:
            one = _free_bias(graph, added, by_product.get(added.product), leaf, cases, choices.axis_of(name))
            free.setdefault(name, []).append(one)
    result = [
        replace(one, use=replace(one.use, bias=None, adds_bias=False))
        if one.use.bias is not None and one.use.bias.name in alone
        else one
        for one in result
    ]
    return result + [one for uses in free.values() for one in uses]


def _free_bias(
    graph: Graph, bias: _Bias, product: Found | None, leaf: Node, cases: int | None, wanted: int | None
) -> Found:
    """A bias with a block of its own: added to a product whose weight has another bias, none, or two input factors."""
    node = bias.consumer.node
    shape = output_shape(node)
    if kind(node) == "Convolution":
        return Found(node, leaf, Use(bias.layout, Vector("bias", shape, (1,), 0), ()))
    if product is not None and len(_column_sizes(product.use)) == 2 and node is product.node:
        # With the weight's own rows: its output factor is this block, and costs nothing more.
        return Found(node, leaf, Use(bias.layout, Vector("bias", shape, (1,), None), (), Form((), full=True)))
    leading = leading_shape(graph, node, shape[-1])
    axis = 0 if len(leading) == 1 else case_axis(leading, cases, wanted)
    operation = Vector("bias", (*leading, shape[-1]), (len(leading),), axis if isinstance(axis, int) else None)
    return Found(node, leaf, Use(bias.layout, operation, ()))


def _column_sizes(use: Use) -> tuple[int, ...]:
    if isinstance(use.operation, Vector):
        return ()
    if isinstance(use.operation, Product) and use.operation.feature_map is not None:
        return use.operation.feature_map
    return (use.weight.shape[2],)


def _with_forms(
    graph: Graph, found: list[Found], choices: Choices, cases: int | None, known: Mapping[str, Form]
) -> list[Found]:
    """Says of each use how its block is factored and what its rows are; all uses of one weight alike."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(one.use.weight.label, []).append(one)
    result: list[Found] = []
    for label, group in groups.items():
        before = known.get(label)
        note = next((one.use.form.note for one in group if one.use.form.note), "")
        plain = [_formed(one, replace(one.use.form, columns=_column_sizes(one.use), note=note)) for one in group]
        if not choices.reduces(group[0].use.weight.name) or _always_expands(group):
            result += plain
        elif before is not None and not before.reduced:
            result += [_formed(one, replace(one.use.form, note=before.note)) for one in plain]
        else:
            axis = None if before is None else before.case_axis
            reduced = [_reduced(graph, one, cases, choices.axis_of(one.use.weight.name), axis) for one in plain]
            reasons = [one for one in reduced if isinstance(one, str)]
            if reasons:
                note = f"expand: {reasons[0]}"
                result += [_formed(one, replace(one.use.form, note=note)) for one in plain]
            else:
                result += [one for one in reduced if isinstance(one, Found)]
    return result


def _always_expands(group: list[Found]) -> bool:
    return any(isinstance(one.use.operation, Embedding | Vector) or len(_column_sizes(one.use)) != 1 for one in group)


def _formed(one: Found, form: Form) -> Found:
    return replace(one, use=replace(one.use, form=form))


def _reduced(graph: Graph, one: Found, cases: int | None, wanted: int | None, known: int | None) -> Found | str:
    """The use with cases for rows, or why they cannot be told apart."""
    operation = one.use.operation
    form = replace(one.use.form, reduced=True)
    if isinstance(operation, Convolution):
        return replace(one, use=replace(one.use, operation=replace(operation, reduced=True), form=form))
    assert isinstance(operation, Product), "look-ups and vectors are not reduced"
    shape = output_shape(one.node)
    if kind(one.node) == "Mv":
        leading: tuple[int, ...] = (1,)
    elif len(shape) == 3:
        rows = shape[2] if operation.weight_on_left else shape[1]
        leading = (rows,) if operation.stacked else (shape[0], rows)
    elif operation.weight_on_left:
        leading = shape[1:]
    else:
        leading = leading_shape(graph, one.node, shape[-1])
    axis = case_axis(leading, cases, wanted, known)
    if isinstance(axis, str):
        return axis
    operation = replace(operation, leading=leading, case_axis=axis)
    form = replace(form, case_axis=axis if len(leading) > 1 else known)
    return replace(one, use=replace(one.use, operation=operation, form=form))


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


def _only_here(bias: Layout, nodes: set[Node], biases: dict[str, list[_Bias]]) -> bool:
    return all(other.product in nodes for other in biases[bias.name] if other.layout.overlaps(bias))


def _with_shares(graph: Graph, found: list[Found]) -> list[Found]:
    """Numbers activations by where they lie in memory, and derivatives by the sum that they come from."""
    inputs: dict[object, int] = {}
    outputs: dict[object, int] = {}
    result = []
    for one in found:
        packed = any(has_unpack_hook(one.node, name) for name in one.use.saved)
        activation = None if packed or len(_column_sizes(one.use)) != 1 else _activation_identity(one)
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

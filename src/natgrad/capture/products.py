"""Recognising products, convolutions and look-ups with a weight."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from natgrad.capture import layout as layouts
from natgrad.capture.cases import RESHAPES
from natgrad.capture.graph import Consumer, Graph, Vertex, has_unpack_hook, kind, output_shape, saved, saved_integer
from natgrad.capture.layout import Layout, Shape
from natgrad.capture.use import Found, LookUp, Use
from natgrad.statistics.operations import Convolution, Embedding, Product

_RECURRENT = "inside a fused recurrent kernel, which hides its products"

_REASONS = dict.fromkeys(
    ("CudnnRnn", "MkldnnRnnLayer", "MiopenRnn", "ThnnFusedLstmCell", "ThnnFusedGruCell"), _RECURRENT
)

SPARSE = "an embedding with sparse gradients"


def recognise(
    graph: Graph, name: str, parameter: Shape, consumer: Consumer, view: Tensor | None, cases: int | None
) -> Use | str:
    """A use without its bias, or why there is none."""
    node_kind = kind(consumer.node)
    if node_kind in _REASONS:
        return _REASONS[node_kind]
    recogniser = _RECOGNISERS.get(node_kind)
    if recogniser is not None and view is None:
        return f"its use by {node_kind} is not a plain view of it"
    if recogniser is not None and view is not None and _is_of_parameters(graph, consumer, cases):
        return "multiplied with another parameter"
    if node_kind == "Embedding" and saved(consumer.node, "sparse"):
        return SPARSE
    made = recogniser(name, parameter, consumer, view) if recogniser is not None and view is not None else None
    if made is not None:
        return made
    return f"its use by {node_kind} is not recognised"


def _is_of_parameters(graph: Graph, consumer: Consumer, cases: int | None) -> bool:
    """Whether a product's other operand is made of parameters: then its rows are not cases."""
    if kind(consumer.node) not in OPERANDS:
        return False
    added = len(OPERANDS[kind(consumer.node)]) == 3  # argument 0 is not multiplied
    others = [
        producer
        for argument, (producer, _) in enumerate(consumer.node.next_functions)
        if argument != consumer.argument and not (added and argument == 0)
    ]
    return any(producer is not None and graph.is_of_parameters(producer, cases) for producer in others)


def look_up_by_case(graph: Graph, one: Found, cases: int | None) -> Found:
    """A look-up of rows that are then added to every case (positions): seen at the sum, where the cases are apart."""
    if not isinstance(one.use.operation, Embedding) or cases is None or cases == 1:
        return one
    node, shape = one.node, output_shape(one.node)
    while (consumer := graph.only_consumer(node)) is not None and kind(consumer.node) in (*_PASSED, "Add"):
        node = consumer.node
        above = output_shape(node)
        if kind(node) != "Add":
            shape = above
            continue
        aligned = (1,) * (len(above) - len(shape)) + shape
        if saved(node, "alpha") != 1:
            break
        if above == (cases, *aligned[1:]) and aligned[0] == 1:
            if has_unpack_hook(one.node, "indices"):
                break  # reading them would recompute a checkpointed region
            return replace(one, node=node, given=LookUp(one.node.number, cases, above[1:-1]))
        if above != aligned:
            break
    if cases not in output_shape(one.node)[:-1]:
        note = "its rows belong to all cases at once: an empirical Fisher of it contains the mean gradient"
        return replace(one, use=replace(one.use, form=replace(one.use.form, note=note)))
    return one


# Nodes between a look-up and its sum with the cases that keep its values.
_PASSED = (*RESHAPES, "ToCopy", "Alias")

OPERANDS = {
    "Addmm": ("self", "mat1", "mat2"),
    "Baddbmm": ("self", "batch1", "batch2"),
    "Mm": ("self", "mat2"),
    "Bmm": ("self", "mat2"),
    "Mv": ("self", "vec"),
}


def _product(name: str, parameter: Shape, consumer: Consumer, view: Tensor) -> Use | None:
    """x W and W x, stacked or with the weight repeated."""
    node = consumer.node
    names = OPERANDS[kind(node)]
    if len(names) == 3 and (consumer.argument == 0 or not plain_scale(node)):
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


def _matrix_vector(name: str, parameter: Shape, consumer: Consumer, view: Tensor) -> Use | None:
    """W x for one vector x: one row."""
    layout = _layout(name, parameter, view, "rc") if consumer.argument == 0 else None
    return None if layout is None else Use(layout, Product(), ("vec",))


def _convolution(name: str, parameter: Shape, consumer: Consumer, view: Tensor) -> Use | None:
    """Convolution(input, weight, bias)."""
    node = consumer.node
    if consumer.argument != 1 or not _is_whole(parameter, view):
        return None
    kernel = parameter[2:]

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
    axes = (groups, parameter[0] // groups, parameter[1], *kernel)
    roles = "scr" if operation.transposed else "src"
    return Use(layouts.whole(name, parameter, axes, roles + "c" * len(kernel)), operation, ("input",))


def _embedding(name: str, parameter: Shape, consumer: Consumer, view: Tensor) -> Use | None:
    """Embedding(weight, indices) with dense, unscaled gradients."""
    node = consumer.node
    if not _is_whole(parameter, view) or saved(node, "scale_grad_by_freq"):
        return None
    layout = layouts.whole(name, parameter, parameter, "cr")
    return Use(layout, Embedding(parameter[0], saved_integer(node, "padding_idx")), ("indices",))


_RECOGNISERS = {
    "Addmm": _product,
    "Baddbmm": _product,
    "Mm": _product,
    "Bmm": _product,
    "Mv": _matrix_vector,
    "Convolution": _convolution,
    "Embedding": _embedding,
}


def _layout(name: str, parameter: Shape, view: Tensor, roles: str) -> Layout | None:
    return layouts.from_view(name, parameter, view.shape, view.stride(), int(view.storage_offset()), roles)


def _is_whole(parameter: Shape, view: Tensor) -> bool:
    return view.shape == parameter and view.is_contiguous()


def plain_scale(node: Vertex) -> bool:
    """Whether an addmm neither scales its product nor what it adds."""
    return bool(saved(node, "alpha") == 1 and saved(node, "beta") == 1)

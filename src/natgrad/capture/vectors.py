"""Recognising parameters that are broadcast against an activation: norm layers, biases, scales, tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from natgrad.capture import layout as layouts
from natgrad.capture.cases import Batch
from natgrad.capture.form import Form
from natgrad.capture.graph import Consumer, Graph, Spread, Vertex, kind, output_shape, saved
from natgrad.capture.layout import Layout, Shape
from natgrad.capture.use import Found, Use
from natgrad.statistics import vectors
from natgrad.statistics.vectors import Multiplier, Vector

_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_ROW_NORMS = ("NativeLayerNorm", "FusedRmsNorm")


def find_vector(
    graph: Graph,
    name: str,
    parameter: Shape,
    leaf: Vertex,
    consumer: Consumer,
    view: Tensor | None,
    batch: Batch,
) -> Found | None:
    """The use of a parameter as a vector, where each case's gradient can be told; None otherwise."""
    node_kind = kind(consumer.node)
    if view is None:
        return None
    if node_kind in (*_BATCH_NORMS, *_ROW_NORMS, "NativeGroupNorm") and not view.is_contiguous():
        return None
    use: Use | None = None
    if node_kind in _BATCH_NORMS or node_kind == "NativeGroupNorm":
        use = _channel_norm(name, parameter, consumer, batch)
    elif node_kind in _ROW_NORMS:
        use = _row_norm(name, parameter, consumer, batch)
    elif node_kind == "Repeat":
        use = _repeated(graph, name, parameter, consumer.node, batch.cases)
    elif node_kind in ("Add", "Sub", "Mul", "PreluKernel"):
        use = _broadcast(graph, name, parameter, consumer, view, batch)
    return None if use is None else Found(consumer.node, leaf, use)


def rows_as_cases(axis: int | str) -> Form:
    """The form of a vector: where its cases cannot be told apart, a note says so."""
    return Form((), note="" if isinstance(axis, int) else f"rows count as cases: {axis}")


def _channel_norm(name: str, parameter: Shape, consumer: Consumer, batch: Batch) -> Use | None:
    """Batch and group norm: channels on axis 1, cases on axis 0."""
    node = consumer.node
    shape = output_shape(node)
    if consumer.argument not in (1, 2) or parameter != shape[1:2]:
        return None
    layout, form = _whole(name, parameter), rows_as_cases(batch.for_axis(None).axis(shape[:1]))
    if consumer.argument == 2:
        return Use(layout, Vector("norm bias", shape, (1,), 0), (), form)
    names = ("input", "result1", "result2")
    if kind(node) == "NativeGroupNorm":
        norm = vectors.ByChannel(groups=int(saved(node, "group")))
    elif kind(node) == "CudnnBatchNorm" or saved(node, "training"):
        norm = vectors.ByChannel()
    else:
        names, norm = ("input", "running_mean", "running_var"), vectors.ByChannel(eps=float(saved(node, "eps")))
    return Use(layout, Vector("norm gain", shape, (1,), 0, norm), names, form)


def _row_norm(name: str, parameter: Shape, consumer: Consumer, batch: Batch) -> Use | None:
    """Layer and RMS norm: over the last axes. Where cases cannot be told apart, every row counts as one."""
    node = consumer.node
    shape, axes = output_shape(node), len(parameter)
    leading = shape[: len(shape) - axes]
    if consumer.argument not in (1, 2) or parameter != shape[len(leading) :] or not leading:
        return None
    axis = batch.axis(leading)
    kept = tuple(range(len(leading), len(shape)))
    own_axis = axis if isinstance(axis, int) else None
    form = rows_as_cases(axis)
    layout = _whole(name, parameter)
    if consumer.argument == 2:
        return Use(layout, Vector("norm bias", shape, kept, own_axis), (), form)
    if kind(node) == "FusedRmsNorm":
        gain = Vector("norm gain", shape, kept, own_axis, vectors.scaled_by_row)
        return Use(layout, gain, ("input", "result1"), form)
    gain = Vector("norm gain", shape, kept, own_axis, vectors.normalised_by_row)
    return Use(layout, gain, ("input", "result1", "result2"), form)


def _repeated(graph: Graph, name: str, parameter: Shape, node: Vertex, cases: int | None) -> Use | None:
    """Instance norm repeats its vectors for every case and calls batch norm: the copies' gradients are the cases'."""
    repeats, following = tuple(saved(node, "repeats")), graph.only_consumer(node)
    if len(parameter) != 1 or cases is None or repeats != (cases,):
        return None
    if following is None or kind(following.node) not in _BATCH_NORMS:
        return None
    shape = (cases, parameter[0])
    return Use(_whole(name, parameter), Vector("vector", shape, (1,), 0), ())


def _broadcast(
    graph: Graph,
    name: str,
    parameter: Shape,
    consumer: Consumer,
    view: Tensor,
    batch: Batch,
) -> Use | None:
    """x + w, x − w, x · w, and leaky slopes."""
    node = consumer.node
    sign = 1
    if kind(node) in ("Add", "Sub") and consumer.argument == 1:
        sign = saved(node, "alpha") * (1 if kind(node) == "Add" else -1)
        if abs(sign) != 1:
            return None
    other = node.next_functions[1 - consumer.argument][0]
    # What it meets must come from the model's input; a bare tensor may as well be a table of as many rows as cases.
    if len(node.next_functions) != 2 or other is None or graph.is_of_parameters(other, batch.cases):
        return None
    names: tuple[str, ...] = ()
    multiplier: Multiplier | None = None
    if kind(node) == "Mul":
        names, multiplier = (("other", "self")[consumer.argument],), vectors.other_operand
    elif kind(node) == "PreluKernel":
        names, multiplier = ("self",), vectors.negative_part
    word = "bias" if multiplier is None else "scale"
    operation = _over(name, parameter, view, output_shape(node), word, batch, multiplier, sign)
    return None if operation is None else Use(_whole(name, parameter), operation, names)


def find_spread(
    name: str, parameter: Shape, leaf: Vertex, spread: Spread, consumer: Consumer, batch: Batch
) -> Found | None:
    """A parameter expanded over the cases (a class token): its copies' gradients are the cases', whatever follows."""
    shape = output_shape(spread.node)
    operation = _over(name, parameter, spread.view, shape, "token", batch)
    if operation is None:
        return None
    # Copies for the cases go on side by side with them; copies for anything else are spread over the cases later on.
    axis, following = operation.case_axis, output_shape(consumer.node)
    assert axis is not None, "a spread has a case axis"
    if len(following) != len(shape) or following[axis] != shape[axis]:
        return None
    return Found(spread.node, leaf, Use(_whole(name, parameter), operation, ()))


def _over(
    name: str,
    parameter: Shape,
    view: Tensor,
    shape: tuple[int, ...],
    word: str,
    batch: Batch,
    multiplier: Multiplier | None = None,
    sign: int = 1,
) -> Vector | None:
    """A view of a parameter broadcast to `shape`, one axis of which runs over cases."""
    missing = len(shape) - view.dim()
    if missing < 0:
        return None
    own = [
        missing + axis
        for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True))
        if size > 1 and stride != 0
    ]
    free = [axis for axis in range(len(shape)) if axis not in own]
    sizes = [shape[axis] for axis in free]
    known = free.index(batch.known) if batch.known in free else None
    axis: int | str = batch.for_axis(None, known).axis(sizes)
    if batch.wanted is not None and batch.wanted % len(shape) in free:
        axis = batch.for_axis(free.index(batch.wanted % len(shape))).axis(sizes)
    if isinstance(axis, str) or (batch.cases is None and batch.wanted is None):
        return None
    part = _layout(name, parameter, view, [axis - missing for axis in own])
    if part is None:
        return None
    # The block is the whole parameter's, of which this use may see a part (positions up to a batch's length).
    place = None if part.box is None else vectors.Place(parameter, part.box)
    return Vector(word, shape, tuple(own), free[axis], multiplier, place, sign)


def _layout(name: str, parameter: Shape, view: Tensor, axes: Sequence[int]) -> Layout | None:
    sizes, strides = [view.shape[axis] for axis in axes], [view.stride(axis) for axis in axes]
    return layouts.from_view(name, parameter, sizes, strides, int(view.storage_offset()), "r" * len(sizes))


def _whole(name: str, parameter: Shape) -> Layout:
    return layouts.whole(name, parameter, parameter, "r" * len(parameter))

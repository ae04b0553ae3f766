"""Which approximation each use gets: doubly factored inputs, rows that are places or whole cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from natgrad.capture.cases import Batch, leading_shape
from natgrad.capture.choices import Choices, split_map
from natgrad.capture.feature_map import feature_map
from natgrad.capture.form import Form
from natgrad.capture.graph import Graph, kind, output_shape
from natgrad.capture.products import OPERANDS
from natgrad.capture.use import Found
from natgrad.statistics.operations import Convolution, Embedding, Product
from natgrad.statistics.vectors import Vector

_EXPANDED = "expand: "


def doubly_factored(name: str, uses: list[Found], choices: Choices, known: Mapping[str, Form]) -> list[Found]:
    """Splits the inputs of a large linear layer on a flattened feature map into channels and places, where asked or
    above the size limit.
    """
    asked = choices.map_of(name)
    inputs = uses[0].use.weight.shape[2]
    limit = choices.doubly_factored_above
    plain = all(
        one.use.operation == Product() and one.use.weight == uses[0].use.weight and one.use.weight.box is None
        for one in uses
    )
    if asked is None and (limit is None or inputs <= limit):
        return uses
    if not plain:
        note = "doubly_factored is for linear layers that are used whole and in one orientation"
        return uses if asked is None else [_formed(one, replace(one.use.form, note=note)) for one in uses]
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
    return OPERANDS[kind(one.node)].index(one.use.saved[0])


def with_forms(
    graph: Graph, found: list[Found], choices: Choices, batch: Batch, known: Mapping[str, Form]
) -> list[Found]:
    """Says of each use how its block is factored and what its rows are; all uses of one weight alike."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(one.use.weight.label, []).append(one)
    result: list[Found] = []
    for label, group in groups.items():
        before = known.get(label)
        note = next((one.use.form.note for one in group if one.use.form.note), "")
        plain = [_plain(one, note) for one in group]
        if not choices.reduces(group[0].use.weight.name) or _always_expands(group):
            result += plain
        else:
            known_axis = None if before is None else before.case_axis
            own = batch.for_axis(choices.axis_of(group[0].use.weight.name), known_axis)
            reduced = [_reduced(graph, one, own) for one in plain]
            reasons = [f"{_EXPANDED}{one}" for one in reduced if isinstance(one, str)]
            if before is not None and before.note.startswith(_EXPANDED) and own.wanted is None:
                # Guessed to be untold before: their statistics don't mix with those of whole cases.
                reasons = [before.note]
            if reasons:
                result += [_formed(one, replace(one.use.form, note=reasons[0])) for one in plain]
            else:
                result += [one for one in reduced if isinstance(one, Found)]
    return result


def _always_expands(group: list[Found]) -> bool:
    return any(isinstance(one.use.operation, Embedding | Vector) or len(one.use.column_sizes()) != 1 for one in group)


def _plain(one: Found, note: str) -> Found:
    operation = one.use.operation
    axis = operation.case_axis if isinstance(operation, Vector) else None
    return _formed(one, replace(one.use.form, columns=one.use.column_sizes(), case_axis=axis, note=note))


def _formed(one: Found, form: Form) -> Found:
    return replace(one, use=replace(one.use, form=form))


def _reduced(graph: Graph, one: Found, batch: Batch) -> Found | str:
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
    axis = batch.axis(leading)
    if isinstance(axis, str):
        return axis
    operation = replace(operation, leading=leading, case_axis=axis)
    form = replace(form, case_axis=axis if len(leading) > 1 else batch.known)
    return replace(one, use=replace(one.use, operation=operation, form=form))

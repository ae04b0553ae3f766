"""Finding every use of every parameter in one graph.

A use is one product, convolution or look-up with a weight (and the bias that is added to it), or one broadcast of a
vector. What is not recognised is named, so that the report can say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from natgrad.capture.approximation import doubly_factored, with_forms
from natgrad.capture.biases import Bias, as_bias, biased_product, with_biases
from natgrad.capture.cases import Batch
from natgrad.capture.choices import Choices
from natgrad.capture.form import Form
from natgrad.capture.graph import Graph, Vertex
from natgrad.capture.layout import Shape
from natgrad.capture.penalty import is_penalty
from natgrad.capture.products import SPARSE, look_up_by_case, recognise
from natgrad.capture.shares import with_derivatives
from natgrad.capture.use import Found, Sightings, Use
from natgrad.capture.vectors import find_spread, find_vector
from natgrad.statistics.operations import Embedding
from natgrad.statistics.vectors import Vector


def find_uses(
    graph: Graph,
    shapes: Mapping[str, Shape],
    *,
    choices: Choices,
    batch: Batch,
    known: Mapping[str, Form],
) -> Sightings:
    """Every recognised use, in a graph, of parameters of these shapes; one with a use that is not recognised has none.

    `batch` is what is known of the cases; `known` holds the forms of blocks that exist.
    """
    raw = _Raw()
    for name, shape in shapes.items():
        leaf = graph.leaves.get(name)
        if leaf is not None:
            axis = known[name].case_axis if name in known else None
            _sort_uses(raw, graph, name, shape, leaf, batch.for_axis(choices.axis_of(name), axis))
    _drop_products_of_parameters(raw)
    _drop_overlapping(raw.weights, raw.findings)
    both = raw.weights.keys() & (raw.vectors.keys() | raw.biases.keys())
    raw.findings.unrecognised |= dict.fromkeys(both, "used as a matrix and as a vector")
    raw.forget([*raw.findings.unrecognised, *raw.findings.left])
    weights = {name: doubly_factored(name, uses, choices, known) for name, uses in raw.weights.items()}
    axes = {name: form.case_axis for name, form in known.items()}
    found = with_biases(weights, raw.biases, raw.vectors, graph, batch, choices, axes)
    found = with_forms(graph, found, choices, batch, known)
    if choices.vectors == "optimizer":
        left = {one.use.weight.name for one in found if isinstance(one.use.operation, Vector)}
        raw.findings.left |= dict.fromkeys(sorted(left), "vectors='optimizer'")
        found = [one for one in found if one.use.weight.name not in left]
    raw.findings.found = with_derivatives(graph, found)
    return raw.findings


@dataclass
class _Raw:
    """Uses by parameter, sorted by what they are; `biases` may yet join a weight."""

    weights: dict[str, list[Found]] = field(default_factory=dict)
    biases: dict[str, list[Bias]] = field(default_factory=dict)
    vectors: dict[str, list[Found]] = field(default_factory=dict)
    findings: Sightings = field(default_factory=Sightings)

    def forget(self, names: list[str]) -> None:
        for name in names:
            self.weights.pop(name, None)
            self.biases.pop(name, None)
            self.vectors.pop(name, None)


def _sort_uses(raw: _Raw, graph: Graph, name: str, parameter: Shape, leaf: Vertex, batch: Batch) -> None:
    """Looks at each use of one parameter: a weight's, a bias of a product, a vector's, or nothing known."""
    spreads: dict[Vertex, Found] = {}
    for consumer, view, spread in graph.uses_of(leaf, parameter):
        if is_penalty(graph, consumer):
            continue
        bias = as_bias(name, parameter, consumer, view)
        if bias is not None and (product := biased_product(graph, consumer, bias.numel)) is not None:
            raw.biases.setdefault(name, []).append(Bias(product, bias, consumer.node))
            continue
        made = recognise(graph, name, parameter, consumer, view, batch.cases)
        token = None if spread is None else find_spread(name, parameter, leaf, spread, consumer, batch)
        if isinstance(made, Use):
            one = Found(consumer.node, leaf, made)
            raw.weights.setdefault(name, []).append(look_up_by_case(graph, one, batch.cases))
        elif (vector := find_vector(graph, name, parameter, leaf, consumer, view, batch)) is not None:
            raw.vectors.setdefault(name, []).append(vector)
        elif token is not None:
            spreads[token.node] = token
        elif made == SPARSE:
            raw.findings.left[name] = made
        else:
            raw.findings.unrecognised[name] = made
    # The node that repeats a parameter for every case sees each case's gradient, whatever becomes of the copies.
    if spreads and (name in raw.weights or name in raw.vectors or name in raw.biases):
        raw.findings.unrecognised[name] = "repeated for several purposes"
    elif spreads:
        raw.vectors[name] = list(spreads.values())


def _drop_products_of_parameters(raw: _Raw) -> None:
    """Two weights at one node (U V, W W): their rows are not cases, whichever operand they are."""
    holders: dict[Vertex, list[str]] = {}
    for name, uses in raw.weights.items():
        for one in (one for one in uses if not isinstance(one.use.operation, Embedding)):
            holders.setdefault(one.node, []).append(name)
    for names in holders.values():
        if len(names) > 1:
            raw.findings.unrecognised |= dict.fromkeys(names, "multiplied with another parameter")


def _drop_overlapping(weights: dict[str, list[Found]], findings: Sightings) -> None:
    """A parameter used whole in one place and in slices in another has no block of its own; say so."""
    for name, uses in weights.items():
        seen = [one.use.weight for one in uses]
        fitting = all(
            a in (b, b.transposed()) if a.box == b.box else not a.overlaps(b) for a in seen for b in seen if a is not b
        )
        if not fitting:
            findings.unrecognised[name] = "used in regions that overlap without being equal"

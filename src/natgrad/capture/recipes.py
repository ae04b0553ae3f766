"""Remembering what was found in graphs: most are like the one of the last statistics step.

A `Recipe` holds everything that a search has looked at: the graph's links, the parameters' names and shapes, the batch,
the forms of blocks, and every answer that a node gave. Where all of it is the same, so is what would be found, and only
nodes and activations are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture.cases import Batch
from natgrad.capture.choices import Choices
from natgrad.capture.form import Form
from natgrad.capture.graph import Graph, Notes, Questions, Walk, saved_tensor
from natgrad.capture.layout import Shape
from natgrad.capture.search import find_uses
from natgrad.capture.shares import Readings, readings
from natgrad.capture.use import Findings, LookUp, Occurrence, Sightings, Uses

_KEPT = 8  # several networks, a last batch that is smaller, some lengths of sequences
_shape = attrgetter("shape")
_occurrence = partial(tuple.__new__, Occurrence)  # one for every use in every step


class Recipes:
    """Finds every use of every parameter in graphs, by a search only where there is something new."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._kept: list[Recipe] = []  # the last one that was of use comes first

    def find(self, walk: Walk, parameters: Mapping[str, Tensor], batch: Batch, known: Mapping[str, Form]) -> Findings:
        """What `find_uses` finds, in the graph that was walked."""
        leaves, shapes = walk.leaves(parameters.values()), list(map(_shape, parameters.values()))
        given = _Given(walk.ends, walk.links, walk.names, list(parameters), shapes, leaves, batch, known)
        recipe = next((one for one in self._kept if one.fits(given, walk.nodes)), None)
        if recipe is None:
            recipe = self._make(walk, given)
        self._kept = [recipe, *(one for one in self._kept if one is not recipe)][:_KEPT]
        return recipe.fill(walk.nodes)

    def _make(self, walk: Walk, given: _Given) -> Recipe:
        leaves = zip(given.parameters, given.leaves, strict=True)
        graph = Graph(walk, {name: number for name, number in leaves if number is not None})
        shapes = dict(zip(given.parameters, map(tuple, given.shapes), strict=True))
        seen = find_uses(graph, shapes, choices=self._choices, batch=given.batch, known=given.known)
        return Recipe(given, graph.notes, seen)


class _Given(NamedTuple):
    """All that a search starts from; nodes are known by their numbers."""

    ends: int
    links: list[int]
    names: list[str]
    parameters: list[str]
    shapes: list[Shape]
    leaves: list[int | None]
    batch: Batch
    known: Mapping[str, Form]


class Recipe:
    """What a search has looked at, and what it has found. It holds no node and no tensor."""

    def __init__(self, given: _Given, notes: Notes, seen: Sightings) -> None:
        self._given = given
        self._questions = Questions(notes)
        self._nodes = [one.node.number for one in seen.found]
        self._leaves = [one.leaf.number for one in seen.found]
        self._look_ups = [one.given for one in seen.found]
        self._readings = Readings(readings(seen.found))
        self._numbers: list[int | None] = [None] * len(seen.found)  # of the activations of `_uses`
        self._uses = Uses(one.use for one in seen.found)
        self._unrecognised = seen.unrecognised
        self._left = seen.left

    def fits(self, given: _Given, nodes: Sequence[Node]) -> bool:
        """Whether a search that starts from this, in a graph of these nodes, would find the same."""
        return self._given == given and self._questions.same_answers(nodes)

    def fill(self, nodes: Sequence[Node]) -> Findings:
        """The findings in a graph that fits."""
        uses = self._with_inputs(self._readings.activation_numbers(nodes))
        given = [() if look_up is None else (_indices(nodes, look_up),) for look_up in self._look_ups]
        tappers, leaves = map(nodes.__getitem__, self._nodes), map(nodes.__getitem__, self._leaves)
        found = list(map(_occurrence, zip(tappers, leaves, uses, given, strict=True)))
        return Findings(found, uses, dict(self._unrecognised), dict(self._left))

    def _with_inputs(self, numbers: list[int | None]) -> Uses:
        """The uses with the numbers of their activations; the same object as the last time, where these are."""
        if numbers != self._numbers:
            pairs = zip(self._uses, numbers, strict=True)
            self._uses = Uses(replace(use, share_input=number) for use, number in pairs)
            self._numbers = numbers
        return self._uses


def _indices(nodes: Sequence[Node], look_up: LookUp) -> Tensor:
    indices = saved_tensor(nodes[look_up.number], "indices").detach()
    return indices.reshape(look_up.shape).expand(look_up.cases, *look_up.shape)

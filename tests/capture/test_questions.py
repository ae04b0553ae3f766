"""Nodes are asked again what others have been asked: any other answer is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from natgrad.capture.graph import Graph, Questions, Walk, has_unpack_hook, output_shape, saved
from natgrad.capture.shares import Reading, Readings

Pack = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
AS_IT_IS: Pack = (lambda tensor: tensor, lambda tensor: tensor)


def graph_of(*, stride: int = 1, places: int = 5, packed: bool = False, twice: bool = False) -> Walk:
    """Two convolutions; only the second is asked by what it has saved."""
    x = torch.ones(2, 3, places, requires_grad=True)
    weight = torch.ones(3, 3, 1, requires_grad=True)
    hidden = functional.conv1d(x, weight)
    if packed:
        with torch.autograd.graph.saved_tensors_hooks(*AS_IT_IS):
            out = functional.conv1d(hidden, weight, stride=stride)
    else:
        out = functional.conv1d(hidden, weight, stride=stride)
    return Walk([out + functional.conv1d(hidden, weight)] if twice else [out])


def asked(walk: Walk) -> Questions:
    graph = Graph(walk, {})
    last, *_ = (vertex for vertex in graph.vertices if vertex.kind == "Convolution")
    saved(last, "stride"), saved(last, "groups"), has_unpack_hook(last, "input"), output_shape(last)
    return Questions(graph.notes)


def test_the_same_graph_gives_the_same_answers() -> None:
    for packed in (False, True):
        assert asked(graph_of(packed=packed)).same_answers(graph_of(packed=packed).nodes)


@pytest.mark.parametrize("other", [{"stride": 2}, {"packed": True}, {"places": 6}])
def test_another_answer_is_noticed(other: dict[str, Any]) -> None:
    assert not asked(graph_of()).same_answers(graph_of(**other).nodes)
    assert not asked(graph_of(**other)).same_answers(graph_of().nodes)


def test_other_nodes_that_do_not_know_the_answer_are_noticed() -> None:
    questions = asked(graph_of())
    assert not questions.same_answers(Walk([torch.ones(2, requires_grad=True).exp()]).nodes)
    assert not questions.same_answers([])


def readings_of(walk: Walk, *ways: int | None) -> Readings:
    numbers = [number for number, name in enumerate(walk.names) if name.startswith("Convolution")]
    return Readings([None, *(Reading(number, "input", way) for number, way in zip(numbers, ways, strict=True))])


def test_tensors_that_are_the_same_have_the_same_number() -> None:
    apart, together = graph_of(), graph_of(twice=True)
    assert readings_of(apart, 0, 0).activation_numbers(apart.nodes) == [None, 0, 1]
    assert readings_of(apart, 0, 0).activation_numbers(apart.nodes) == [None, 0, 1]
    names = readings_of(together, 0, 0, 0).activation_numbers(together.nodes)
    assert sorted(names[1:]) == [0, 0, 1] or sorted(names[1:]) == [0, 1, 1]
    assert len(set(readings_of(together, 0, 1, 2).activation_numbers(together.nodes))) == 4
    assert len(set(readings_of(together, None, None, None).activation_numbers(together.nodes))) == 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: functional.batch_norm(x, None, None, w, w, training=True),
        lambda x, w: functional.group_norm(x, 3, w, w),
        lambda x, w: functional.layer_norm(x, (3,), w, w),
    ],
    ids=["batch", "group", "layer"],
)
def test_what_an_operation_saves_is_packed_together(norm: Callable[[Tensor, Tensor], Tensor], packed: bool) -> None:
    """`with_derivatives` asks for the first alone."""
    x, weight = torch.randn(4, 3, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*AS_IT_IS) if packed else nullcontext():
        walk = Walk([norm(x, weight)])
    vertex = Graph(walk, {}).vertices[0]
    assert [has_unpack_hook(vertex, name) for name in ("input", "result1", "result2")] == [packed] * 3

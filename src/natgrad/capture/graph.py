"""The autograd graph of one forward pass, and where it uses each parameter.

Walking from the outputs' `grad_fn` to every `AccumulateGrad` and back up through layout-only nodes (T, View, Split,
ToCopy, ...) finds the node that consumes a parameter, whatever module, function or einsum made it (Ba et al. 2017,
Appendix B).

Most graphs are like the one before. So the walk is one tight loop, and what is looked for in a graph goes through
`Vertex`, which notes every question that it was asked: where another graph with the same links gives the same answers,
there is nothing new to be found in it.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

_BUILT_IN = re.compile(r"Backward\d+$")
_MARK = "natgrad"
# Nodes with a missing edge where a number, a mask or a dimension was given, not an activation.
_LOOK_UPS = frozenset(["Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"])  # data says where they look
_TAKE_NUMBERS = frozenset(
    (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Exp",
        "Log",
        "Sqrt",
        "Norm",
        "LinalgVectorNorm",
        "MaskedFill",
        "Clamp",
        "Where",
    )
)


Question: TypeAlias = Callable[[Node, Any], Any]
Notes: TypeAlias = dict[tuple[int, Question, Any], Any]  # (the node's number, what was asked, of what) → the answer


def may_reach(output: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether some of these tensors are in an output's graph, or may be hidden in it by reentrant checkpointing; it
    looks no further than to the first one, which is a few nodes away where there is any.
    """
    wanted = {id(tensor) for tensor in tensors}
    nodes = deque([output.grad_fn])
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        if node is None:
            continue
        name = type(node).__name__
        if name == "CheckpointFunctionBackward":
            return True
        if name == "AccumulateGrad" and id(_attributes(node).variable) in wanted:
            return True
        fresh = {producer for producer, _ in node.next_functions} - seen
        seen |= fresh
        nodes += fresh
    return False


class Walk:
    """The nodes reachable from some outputs, in the order in which they were met: the outputs' own come first.

    `links` is what the graph is like but for the nodes themselves: every node's number, how many producers it has, and
    each producer's number (−1 for none) and output. `names` are the nodes' types'.
    """

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        numbers: dict[Node, int] = {}
        for output in outputs:
            if output.grad_fn is not None:
                numbers.setdefault(output.grad_fn, len(numbers))
        nodes = list(numbers)
        self.ends = len(nodes)
        links: list[int] = []
        sources: list[int] = []
        stack = list(range(len(nodes)))
        while stack:
            number = stack.pop()
            producers = nodes[number].next_functions
            links += number, len(producers)
            if not producers:
                sources.append(number)
            for producer, output_number in producers:
                if producer is None:
                    links += -1, 0
                    continue
                known = numbers.get(producer)
                if known is None:
                    known = numbers[producer] = len(nodes)
                    nodes.append(producer)
                    stack.append(known)
                links += known, output_number
        self.nodes = nodes
        self.links = links
        self.names = [type(node).__name__ for node in nodes]
        # The tensors' ids, and the numbers of the nodes that collect their gradients.
        self._leaves = {
            id(_attributes(nodes[number]).variable): number
            for number in sources
            if self.names[number] == "AccumulateGrad"
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def roots(self) -> list[Node]:
        """The outputs' own nodes."""
        return self.nodes[: self.ends]

    def leaves(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """What `leaf` says of each."""
        return list(map(self._leaves.get, map(id, parameters)))

    def leaf(self, parameter: Tensor) -> int | None:
        """The number of the node that collects a parameter's gradient; None where this graph does not use it."""
        return self._leaves.get(id(parameter))


class Vertex:
    """A node, as those who look for something see it: what it tells them is noted."""

    def __init__(self, node: Node, number: int, kind: str, notes: Notes) -> None:
        self.number = number
        self.kind = kind
        self.next_functions: list[tuple[Vertex | None, int]] = []
        self._node = node
        self._notes = notes

    def ask(self, question: Question, detail: Any) -> Any:
        """The node's answer, which must be something that can be compared, and that keeps nothing alive."""
        answer = question(self._node, detail)
        assert not isinstance(answer, Tensor), "tensors are read when what was found is filled in"
        self._notes[self.number, question, detail] = answer
        return answer


class Questions:
    """All that was asked of the nodes of a graph, node by node, and the answers."""

    def __init__(self, notes: Notes) -> None:
        by_number = sorted(notes.items(), key=lambda item: item[0][0])
        self._asked = []
        attributes: dict[int, dict[str, Any]] = {}
        for (number, question, detail), answer in by_number:
            if question is getattr:
                attributes.setdefault(number, {})[detail] = answer
            elif question is _has_unpack_hook and not answer:
                attributes.setdefault(number, {})[f"{detail}.unpack_hook"] = None
            else:
                self._asked.append((number, question, detail, answer))
        # Most are attributes, and most nodes are asked for the same ones as others: these are read in one go.
        alike: dict[tuple[str, ...], tuple[list[int], list[Any]]] = {}
        for number, own in attributes.items():
            numbers, answers = alike.setdefault(tuple(own), ([], []))
            numbers.append(number)
            answers.append(tuple(own.values()) if len(own) > 1 else next(iter(own.values())))
        self._read = [(attrgetter(*names), *group) for names, group in alike.items()]

    def same_answers(self, nodes: Sequence[Node]) -> bool:
        """Whether these nodes say what those have said."""
        try:
            for read, numbers, answers in self._read:
                if list(map(read, map(nodes.__getitem__, numbers))) != answers:
                    return False
            for number, question, detail, answer in self._asked:
                if question(nodes[number], detail) != answer:
                    return False
        except (AttributeError, IndexError):
            return False  # another class of the same name, or one with fewer outputs
        return True


@dataclass(frozen=True)
class Consumer:
    """A node that takes a producer's output: its argument number `argument`, from the producer's output number
    `output`.
    """

    node: Vertex
    argument: int
    output: int


@dataclass(frozen=True)
class Spread:
    """The node that repeats a parameter, and the view of it before."""

    node: Vertex
    view: Tensor


class Graph:
    """The vertices of a walk, with their consumers. `leaves` are those of parameters, by name; `notes` is all that it
    has told.
    """

    def __init__(self, walk: Walk, leaves: Mapping[str, int]) -> None:
        self.notes: Notes = {}
        self.vertices = [
            Vertex(node, number, _kind(name), self.notes)
            for number, (node, name) in enumerate(zip(walk.nodes, walk.names, strict=True))
        ]
        self.leaves = {name: self.vertices[number] for name, number in leaves.items()}
        self.consumers: dict[Vertex, list[Consumer]] = {vertex: [] for vertex in self.vertices}
        self.roots = frozenset(self.vertices[: walk.ends])
        links = iter(walk.links)
        for number, count in zip(links, links, strict=True):
            vertex = self.vertices[number]
            for argument in range(count):
                producer, output = next(links), next(links)
                above = None if producer < 0 else self.vertices[producer]
                vertex.next_functions.append((above, output))
                if above is not None:
                    self.consumers[above].append(Consumer(vertex, argument, output))

    def only_consumer(self, node: Vertex) -> Consumer | None:
        """The consumer of a node's output where there is exactly one and the output is not the model's own."""
        consumers = self.consumers[node]
        return consumers[0] if len(consumers) == 1 and node not in self.roots else None

    def uses_of(self, leaf: Vertex, shape: Sequence[int]) -> Iterator[tuple[Consumer, Tensor | None, Spread | None]]:
        """Each node that computes with a parameter of this shape, the view of it that the node sees, and what repeated
        it on the way.

        The view is a meta tensor whose strides and offset count a contiguous parameter; None where the layout nodes
        in between are not a plain view.
        """
        start: Tensor | None = torch.empty(shape, device="meta")
        pending: list[tuple[Vertex, list[Tensor | None], Spread | None]] = [(leaf, [start], None)]
        while pending:
            producer, views, spread = pending.pop()
            for consumer in self.consumers[producer]:
                view = views[consumer.output] if consumer.output < len(views) else None
                node = consumer.node
                if kind(node) not in _VIEWS:
                    yield consumer, view, spread
                    continue
                repeats = kind(node) == "Expand" and view is not None and spread is None
                after = Spread(node, view) if repeats and view is not None else spread
                pending.append((node, view_through(node, view), after))

    def is_of_parameters(self, node: Vertex, cases: int | None) -> bool:
        """Whether a node's output depends on parameters alone, not on data, as far as the graph tells. What is
        repeated for each of so many `cases` counts as data: from there on every case has its own.

        A missing edge is data, unless the node may just have been given a number, which leaves its shape alone.
        """
        pending, seen = [node], {node}
        while pending:
            node = pending.pop()
            if kind(node) in _LOOK_UPS or (kind(node) in ("Expand", "Repeat") and output_shape(node)[:1] == (cases,)):
                return False
            if kind(node) == "AccumulateGrad" and not node.ask(_collects_for_parameter, None):
                return False  # data that somebody wants the gradient of
            for producer, _ in node.next_functions:
                if producer is None:
                    others = [output_shape(other, output) for other, output in node.next_functions if other is not None]
                    if kind(node) not in _TAKE_NUMBERS or others != [output_shape(node)]:
                        return False
                elif producer not in seen:
                    seen.add(producer)
                    pending.append(producer)
        return True


def kind(node: Vertex) -> str:
    """A node's operation without the number of its overload: ``AddmmBackward0`` → ``Addmm``.

    A user's own `torch.autograd.Function` has no number (``AddmmBackward``) and keeps its whole name: it may do
    anything.
    """
    return node.kind


@lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    return _BUILT_IN.sub("", name)


def output_shape(node: Vertex, output: int = 0) -> tuple[int, ...]:
    """The shape of a node's forward output."""
    shape: tuple[int, ...] = node.ask(_output_shape, output)
    return shape


def saved(node: Vertex, name: str) -> Any:
    """A number or numbers that autograd saved for backward under a name."""
    return node.ask(getattr, f"_saved_{name}")


def saved_integer(node: Vertex, name: str) -> int:
    """A saved integer; negative ones come back from C++ as unsigned."""
    return _signed(saved(node, name))


def saved_integers(node: Vertex, name: str) -> list[int]:
    """Saved integers, likewise."""
    return [_signed(value) for value in saved(node, name)]


def saved_tensor(node: Node, name: str) -> Tensor:
    """The tensor that autograd saved under a name."""
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor


def has_unpack_hook(node: Vertex, name: str) -> bool:
    """Whether a saved tensor is packed away (checkpointing, offloading), so that reading it costs something."""
    packed: bool = node.ask(_has_unpack_hook, f"_raw_saved_{name}")
    return packed


# What can be asked of a node.


def _output_shape(node: Node, output: int) -> tuple[int, ...]:
    return tuple(_attributes(node)._input_metadata[output].shape)


def _outputs(node: Node, _: None) -> int:
    return len(_attributes(node)._input_metadata)


def _has_unpack_hook(node: Node, name: str) -> bool:
    raw = getattr(node, name, None)
    return raw is None or getattr(raw, "unpack_hook", raw) is not None


def _collects_for_parameter(leaf: Node, _: None) -> bool:
    return isinstance(_attributes(leaf).variable, Parameter)


def marks(node: Node) -> list[object]:
    """Who has tapped a node; kept by the node itself, since its Python object comes and goes."""
    found: list[object] = _attributes(node).metadata.setdefault(_MARK, [])
    return found


def mark(nodes: Iterable[Node], token: object) -> None:
    """Somebody taps these nodes."""
    for node in nodes:
        marks(node).append(token)


def _attributes(node: Node) -> Any:
    """The node, with the attributes that C++ gives it and type checkers do not know."""
    return node


def _signed(value: int) -> int:
    return value - 2**64 if value > sys.maxsize else value


def view_through(node: Vertex, view: Tensor | None) -> list[Tensor | None]:
    """What a layout-only node makes of a view of a parameter, one entry per output; None where it is no longer a
    view.
    """
    outputs: list[Tensor | None] = [None] * node.ask(_outputs, None)
    if view is None:
        return outputs
    try:
        made = _VIEWS[kind(node)](node, view)
    except (RuntimeError, IndexError):
        return outputs
    return list(made) if isinstance(made, tuple) else [made]


def _slice(node: Vertex, view: Tensor) -> Tensor:
    index = [slice(None)] * view.dim()
    bounds = (saved_integer(node, "start"), saved_integer(node, "end"), saved_integer(node, "step"))
    index[saved_integer(node, "dim")] = slice(*bounds)
    return view[tuple(index)]


def _reshape(node: Vertex, view: Tensor) -> Tensor:
    return view.view(output_shape(node))


def _same(node: Vertex, view: Tensor) -> Tensor:
    return view


def _split(node: Vertex, view: Tensor) -> Any:
    return view.split(saved_integer(node, "split_size"), saved_integer(node, "dim"))


def _split_with_sizes(node: Vertex, view: Tensor) -> Any:
    return view.split(list(saved(node, "split_sizes")), saved_integer(node, "dim"))


_VIEWS = {
    "T": lambda node, view: view.t(),
    "Transpose": lambda node, view: view.transpose(saved_integer(node, "dim0"), saved_integer(node, "dim1")),
    "Permute": lambda node, view: view.permute(saved_integers(node, "dims")),
    "Expand": lambda node, view: view.expand(output_shape(node)),
    "View": _reshape,
    "UnsafeView": _reshape,
    "ReshapeAlias": _reshape,
    "Unsqueeze": _reshape,
    "Squeeze": _reshape,
    "Slice": _slice,
    "Select": lambda node, view: view.select(saved_integer(node, "dim"), saved_integer(node, "index")),
    "Split": _split,
    "UnsafeSplit": _split,
    "SplitWithSizes": _split_with_sizes,
    "Unbind": lambda node, view: view.unbind(saved_integer(node, "dim")),
    "ToCopy": _same,
    "Clone": _same,
    "Alias": _same,
}

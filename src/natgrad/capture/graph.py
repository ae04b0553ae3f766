"""The autograd graph of one forward pass, and where it uses each parameter.

Walking from the outputs' `grad_fn` to every `AccumulateGrad` and back up through layout-only nodes (T, View, Split,
ToCopy, ...) finds the node that consumes a parameter, whatever module, function or einsum made it (Ba et al. 2017,
Appendix B).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Consumer:
    """A node that takes a producer's output: its argument number `argument`, from the producer's output number
    `output`.
    """

    node: Node
    argument: int
    output: int


@dataclass(frozen=True)
class Spread:
    """The node that repeats a parameter, and the view of it before."""

    node: Node
    view: Tensor


class Graph:
    """The nodes reachable from some outputs, with their consumers."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.consumers: dict[Node, list[Consumer]] = {}
        self.leaves: dict[int, Node] = {}
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        for node in stack:
            self.consumers.setdefault(node, [])
        stack = list(self.consumers)
        self.roots = frozenset(stack)
        while stack:
            node = stack.pop()
            for argument, (producer, output) in enumerate(node.next_functions):
                if producer is None:
                    continue
                if producer not in self.consumers:
                    self.consumers[producer] = []
                    stack.append(producer)
                    if kind(producer) == "AccumulateGrad":
                        self.leaves[id(variable(producer))] = producer
                self.consumers[producer].append(Consumer(node, argument, output))

    def __contains__(self, node_kind: str) -> bool:
        return any(kind(node) == node_kind for node in self.consumers)

    def only_consumer(self, node: Node) -> Consumer | None:
        """The consumer of a node's output where there is exactly one and the output is not the model's own."""
        consumers = self.consumers[node]
        return consumers[0] if len(consumers) == 1 and node not in self.roots else None

    def uses_of(self, parameter: Tensor) -> Iterator[tuple[Consumer, Tensor | None, Spread | None]]:
        """Each node that computes with a parameter, the view of the parameter that it sees, and what repeated it on
        the way.

        The view is a meta tensor whose strides and offset count a contiguous parameter; None where the layout nodes
        in between are not a plain view.
        """
        leaf = self.leaves.get(id(parameter))
        if leaf is None:
            return
        start: Tensor | None = torch.empty(parameter.shape, device="meta")
        pending: list[tuple[Node, list[Tensor | None], Spread | None]] = [(leaf, [start], None)]
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

    def is_of_parameters(self, node: Node, cases: int | None) -> bool:
        """Whether a node's output depends on parameters alone, not on data, as far as the graph tells. What is
        repeated for each of so many `cases` counts as data: from there on every case has its own.

        A missing edge is data, unless the node may just have been given a number, which leaves its shape alone.
        """
        pending, seen = [node], {node}
        while pending:
            node = pending.pop()
            if kind(node) in _LOOK_UPS or (kind(node) in ("Expand", "Repeat") and output_shape(node)[:1] == (cases,)):
                return False
            if kind(node) == "AccumulateGrad" and not isinstance(variable(node), Parameter):
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


def kind(node: Node) -> str:
    """A node's operation without the number of its overload: ``AddmmBackward0`` → ``Addmm``.

    A user's own `torch.autograd.Function` has no number (``AddmmBackward``) and keeps its whole name: it may do
    anything.
    """
    return _BUILT_IN.sub("", type(node).__name__)


def output_shape(node: Node, output: int = 0) -> tuple[int, ...]:
    """The shape of a node's forward output."""
    return tuple(_attributes(node)._input_metadata[output].shape)


def saved(node: Node, name: str) -> Any:
    """What autograd saved for backward under a name."""
    return getattr(node, f"_saved_{name}")


def saved_integer(node: Node, name: str) -> int:
    """A saved integer; negative ones come back from C++ as unsigned."""
    return _signed(saved(node, name))


def saved_integers(node: Node, name: str) -> list[int]:
    """Saved integers, likewise."""
    return [_signed(value) for value in saved(node, name)]


def has_unpack_hook(node: Node, name: str) -> bool:
    """Whether a saved tensor is packed away (checkpointing, offloading), so that reading it costs something."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return raw is None or getattr(raw, "unpack_hook", raw) is not None


def variable(leaf: Node) -> Tensor:
    """The tensor whose gradient an AccumulateGrad node collects."""
    tensor: Tensor = _attributes(leaf).variable
    return tensor


def marks(node: Node) -> list[object]:
    """Who has tapped a node; kept by the node itself, since its Python object comes and goes."""
    found: list[object] = _attributes(node).metadata.setdefault(_MARK, [])
    return found


def _attributes(node: Node) -> Any:
    """The node, with the attributes that C++ gives it and type checkers do not know."""
    return node


def _signed(value: int) -> int:
    return value - 2**64 if value > sys.maxsize else value


def view_through(node: Node, view: Tensor | None) -> list[Tensor | None]:
    """What a layout-only node makes of a view of a parameter, one entry per output; None where it is no longer a
    view.
    """
    outputs: list[Tensor | None] = [None] * len(_attributes(node)._input_metadata)
    if view is None:
        return outputs
    try:
        made = _VIEWS[kind(node)](node, view)
    except (RuntimeError, IndexError):
        return outputs
    return list(made) if isinstance(made, tuple) else [made]


def _slice(node: Node, view: Tensor) -> Tensor:
    index = [slice(None)] * view.dim()
    bounds = (saved_integer(node, "start"), saved_integer(node, "end"), saved_integer(node, "step"))
    index[saved_integer(node, "dim")] = slice(*bounds)
    return view[tuple(index)]


def _reshape(node: Node, view: Tensor) -> Tensor:
    return view.view(output_shape(node))


def _same(node: Node, view: Tensor) -> Tensor:
    return view


def _split(node: Node, view: Tensor) -> Any:
    return view.split(saved_integer(node, "split_size"), saved_integer(node, "dim"))


def _split_with_sizes(node: Node, view: Tensor) -> Any:
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

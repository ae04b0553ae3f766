"""What is known of one use of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture.form import USES, Form
from natgrad.capture.graph import Vertex
from natgrad.capture.layout import Layout, Shape
from natgrad.statistics.operations import Operation, Product
from natgrad.statistics.vectors import Vector

_VECTOR = Form(())


@dataclass(frozen=True)
class Use:
    """One use of a weight or vector in one forward pass. Holds no node and no tensor, so that it keeps nothing alive.

    `saved` names what autograd keeps of the activation. `bias` belongs to the weight's block; `adds_bias` says
    whether this use adds it. `share_input` and `share_output` number the activations and derivatives of the pass:
    uses with equal numbers have equal factors in this pass. `packed` says that reading the activation recomputes or
    copies it.
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

    def column_sizes(self) -> tuple[int, ...]:
        """How the inputs are factored: not at all, as one, or as channels and places."""
        if isinstance(self.operation, Vector):
            return ()
        if isinstance(self.operation, Product) and self.operation.feature_map is not None:
            return self.operation.feature_map
        return (self.weight.shape[2],)


class Reader:
    """Reads what autograd keeps of the activations of some uses that one node makes."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.sizes = [len(use.saved) for use in uses]
        self.packed = any(use.packed for use in uses)
        names = [f"_saved_{name}" for use in uses for name in use.saved]
        self._single = len(names) == 1
        self._read: Callable[[Any], Any] = attrgetter(*names) if names else lambda node: ()

    def read(self, node: Node) -> list[Tensor]:
        """The tensors of all uses, one after the other."""
        found = self._read(node)
        return [found.detach()] if self._single else list(map(Tensor.detach, found))

    def apart(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """What is one after the other, by use."""
        each = iter(tensors)
        return [list(islice(each, size)) for size in self.sizes]


class Uses:
    """The uses of one pass, numbered, and what follows from them alone. Passes that are alike have the same object, and
    what is known of it holds for all of them.
    """

    def __init__(self, uses: Iterable[Use]) -> None:
        self._all = tuple(uses)
        self._readers: dict[tuple[int, ...], Reader] = {}

    def __iter__(self) -> Iterator[Use]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Use:
        return self._all[number]

    def reader(self, numbers: tuple[int, ...]) -> Reader:
        """For the uses that one node makes."""
        if numbers not in self._readers:
            self._readers[numbers] = Reader([self._all[number] for number in numbers])
        return self._readers[numbers]

    @cached_property
    def recomputed(self) -> bool:
        """Whether some activations are there for a part of the backward pass only."""
        return any(use.packed for use in self)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names of all parameters that are used."""
        return frozenset(layout.name for use in self for layout in (use.weight, use.bias) if layout is not None)

    @cached_property
    def first_of_several(self) -> dict[int, int]:
        """The uses of vectors that have several in this pass, each with the number of the first; of those whose cases
        are told apart, so that their rows are the same.
        """
        groups: dict[str, list[tuple[int, int]]] = {}
        for number, use in enumerate(self):
            operation = use.operation
            if isinstance(operation, Vector) and operation.case_axis is not None and use.form.source == USES:
                groups.setdefault(use.weight.label, []).append((number, operation.shape[operation.case_axis]))
        alike = [numbers for numbers in groups.values() if len({cases for _, cases in numbers}) == 1]
        return {number: group[0][0] for group in alike if len(group) > 1 for number, _ in group}


@dataclass(frozen=True)
class LookUp:
    """The look-up, by its node's number, whose indices are the activation of a use by another node, for each of so many
    `cases`.
    """

    number: int
    cases: int
    shape: Shape


@dataclass(frozen=True)
class Found:
    """A use, the vertex that makes it, and the leaf through which the weight's gradient leaves the graph."""

    node: Vertex
    leaf: Vertex
    use: Use
    given: LookUp | None = None


@dataclass
class Sightings:
    """What the structure of a graph says of the model's parameters; `unrecognised` and `left` as in `Findings`."""

    found: list[Found] = field(default_factory=list)
    unrecognised: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


class Occurrence(NamedTuple):
    """A use in one graph: the node that makes it, the leaf through which the weight's gradient leaves the graph, and
    the activation, where the node has not saved it itself.
    """

    node: Node
    leaf: Node
    use: Use
    given: tuple[Tensor, ...] = ()


@dataclass
class Findings:
    """What one graph says of the model's parameters. `uses` are those of `found`. `left` names parameters that are left
    alone whatever their gradients say; `remaining` is how many of the others are taken care of without a recognised
    use.
    """

    found: list[Occurrence]
    uses: Uses
    unrecognised: dict[str, str]
    left: dict[str, str]
    remaining: int = 0

"""What is known of one use of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from natgrad.capture.form import Form
from natgrad.capture.layout import Layout
from natgrad.statistics.operations import Operation, Product
from natgrad.statistics.vectors import Vector

_VECTOR = Form(())


@dataclass(frozen=True)
class Use:
    """One use of a weight or vector in one forward pass. Holds no node, so that it keeps no graph alive.

    `saved` names what autograd keeps of the activation. `bias` belongs to the weight's block; `adds_bias` says
    whether this use adds it. `share_input` and `share_output` number the activations and derivatives of the pass:
    uses with equal numbers have equal factors in this pass. `packed` says that reading the activation recomputes or
    copies it; `given` holds it where another node than the use's own saved it.
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
    given: tuple[Tensor, ...] = field(default=(), compare=False)

    def column_sizes(self) -> tuple[int, ...]:
        """How the inputs are factored: not at all, as one, or as channels and places."""
        if isinstance(self.operation, Vector):
            return ()
        if isinstance(self.operation, Product) and self.operation.feature_map is not None:
            return self.operation.feature_map
        return (self.weight.shape[2],)


@dataclass(frozen=True)
class Found:
    """A use, the node that makes it, and the leaf through which the weight's gradient leaves the graph."""

    node: Node
    leaf: Node
    use: Use


@dataclass
class Findings:
    """What one graph says of the model's parameters. `left` names those that are left alone whatever their gradients
    say; `remaining` is how many of the others are taken care of without a recognised use.
    """

    found: list[Found] = field(default_factory=list)
    remaining: int = 0
    unrecognised: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

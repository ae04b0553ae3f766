"""One forward pass and its backward: from (activation, derivative) pairs to what they add to the factors.

The *empirical* Fisher listens to the user's own backward pass. The *sampled* and *exact* Fishers run their own,
without weight gradients, right after the forward pass, and
count once the user's backward reaches the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation
from natgrad.capture.graph import saved
from natgrad.statistics.operations import Operation
from natgrad.statistics.predictive import Derivative


@dataclass(frozen=True)
class Tap:
    """Where one use's pairs are read and where they go. Holds no node, so that it keeps no graph alive.

    `packed` says that reading the activation recomputes or copies it; `shared_*` that other uses of the pass have
    the same input or output factor.
    """

    block: KroneckerBlock
    orientation: Orientation
    operation: Operation
    activation: str
    packed: bool
    shared_input: bool
    shared_output: bool


class Pass:
    """The statistics of one forward pass. `terms` is N: the loss is a mean over so many terms, so g = N ĝ."""

    def __init__(self, terms: float) -> None:
        self.terms = terms
        self.counted = False
        self._group = GraphExecGroup()
        self._filled: set[Factor] = set()
        self._waiting: list[Callable[[], None]] = []

    def listen(self, taps: Iterable[tuple[Node, Tap]]) -> list[RemovableHandle]:
        """Empirical: takes each pair when the user's backward reaches its node, once."""
        return [node.register_prehook(self._listener(tap)) for node, tap in taps]

    def _listener(self, tap: Tap) -> Callable[[tuple[Tensor, ...]], None]:
        done = False

        def hook(derivatives: tuple[Tensor, ...]) -> None:
            nonlocal done
            # A second backward through the same graph is not a second batch.
            if done or derivatives[0] is None:
                return
            done = True
            node = torch._C._current_autograd_node()
            with _undisturbed(derivatives[0].device):
                activation = self._read(node, tap)
                self._take_input(tap, activation)
                self._take_output(tap, derivatives[0].detach(), activation, self._filled, self.terms**2)
            self._count()

        return hook

    def differentiate(
        self, taps: list[tuple[Node, Tap]], derivatives: Iterable[Derivative], roots: Iterable[Node]
    ) -> list[RemovableHandle]:
        """Sampled, exact: backward passes of our own; the statistics count when the user's backward reaches a root."""
        edges = [GradientEdge(node, 0) for node, _ in taps]
        reached: dict[int, Tensor] = {}  # tap number → activation, where the operation needs it again
        for derivative in derivatives:
            grads = torch.autograd.grad(
                derivative.root, edges, derivative.gradient, retain_graph=True, allow_unused=True
            )
            filled: set[Factor] = set()
            for number, ((node, tap), grad) in enumerate(zip(taps, grads, strict=True)):
                if grad is None:
                    continue
                with _undisturbed(grad.device):
                    first = number not in reached
                    activation = self._read(node, tap) if first else reached[number]
                    if first:
                        self._take_input(tap, activation)
                        # Convolutions and products need it no more: an empty tensor keeps none of it alive.
                        reached[number] = activation if tap.operation.diagonal_input else activation.new_empty(0)
                    self._take_output(tap, grad, activation, filled, 1.0, counts=first)
        return [root.register_prehook(lambda _: self._count()) for root in roots]

    def _take_input(self, tap: Tap, activation: Tensor) -> None:
        column, rows = tap.orientation.column, tap.operation.rows(activation)
        self._waiting.append(lambda: tap.orientation.add_rows(rows))
        if tap.shared_input and column in self._filled:
            return
        self._filled.add(column)
        homogeneous = tap.block.bias is not None
        moment = tap.operation.input_factor(activation, homogeneous=homogeneous, diagonal=column.diagonal)
        self._waiting.append(lambda: column.add(moment, rows))

    def _take_output(
        self,
        tap: Tap,
        derivative: Tensor,
        activation: Tensor,
        filled: set[Factor],
        scale: float,
        *,
        counts: bool = True,
    ) -> None:
        row = tap.orientation.row
        if tap.shared_output and row in filled:
            return
        filled.add(row)
        rows = tap.operation.rows(activation) if counts else 0
        moment = tap.operation.output_factor(derivative, activation, diagonal=row.diagonal).mul_(scale)
        self._waiting.append(lambda: row.add(moment, rows))

    def _count(self) -> None:
        """The user's backward has come by: what was taken goes into the factors."""
        for add in self._waiting:
            add()
        self.counted = True
        self._waiting.clear()

    def _read(self, node: Node, tap: Tap) -> Tensor:
        if not tap.packed:
            activation: Tensor = saved(node, tap.activation)
        else:
            # A checkpointed region lets each saved tensor be read once, by autograd. Its own group recomputes the
            # region once more, for us.
            with self._group:
                activation = saved(node, tap.activation)
        return activation.detach()


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients and no autocast: statistics keep their precision wherever backward was called from."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield

"""One forward pass and its backward: from (activation, derivative) pairs to what they add to the factors.

The *empirical* Fisher listens to the user's own backward pass. The *sampled* and *exact* Fishers run their own, without
weight gradients, right after the forward pass, and count once the user's backward comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

from natgrad.blocks.factor import Factor
from natgrad.blocks.registry import Tap
from natgrad.capture.graph import saved
from natgrad.capture.uses import Found, Use
from natgrad.statistics.predictive import Derivative


class Owner(Protocol):
    """What a pass belongs to."""

    def begin(self, current: Pass) -> list[Tap]:
        """The pass counts from now on: where do the statistics of its uses go?"""

    def again(self) -> None:
        """A second backward came through a graph that has been counted."""

    def half(self) -> None:
        """The derivatives are float16."""


class Pass:
    """The statistics of one forward pass. `terms` is N: the loss is a mean over so many terms, so g = N ĝ.

    `kind` is a word of its owner's. It lives in hooks on its graph and dies with it, unless a backward makes it
    count. `uses` are numbered; nothing here holds a node.
    """

    def __init__(
        self, owner: Owner, found: Sequence[Found], *, terms: float, kind: str, unrecognised: dict[str, str], limit: int
    ) -> None:
        self.uses = [one.use for one in found]
        self.terms = terms
        self.kind = kind
        self.unrecognised = unrecognised
        self.task = -1  # the backward pass that made it count
        self._limit = limit  # larger sides have diagonal factors
        self.handles: list[RemovableHandle] = []
        self.token = object()  # marks the nodes that this pass has tapped
        self._owner = owner
        self._group = GraphExecGroup()
        self._taps: list[Tap] | None = None
        self._filled: set[Factor] = set()
        # What adds the sums of our own backward passes, once the user's backward comes by.
        self._waiting: list[Callable[[list[Tap]], None]] = []

    def listen(self, found: Iterable[Found]) -> None:
        """Empirical: takes each pair when the user's backward reaches its node, once."""
        for number, one in enumerate(found):
            self.handles.append(one.node.register_prehook(self._listener(number, one.leaf)))

    def _listener(self, number: int, leaf: Node) -> Callable[[tuple[Tensor, ...]], None]:
        done = False

        def hook(derivatives: tuple[Tensor, ...]) -> None:
            nonlocal done
            if derivatives[0] is None or not _differentiates(leaf):
                return
            if done:
                self._owner.again()
                return
            done = True
            if derivatives[0].dtype == torch.float16:
                self._owner.half()
            tap = self._begin()[number]
            with _undisturbed(derivatives[0].device):
                activation = self._read(torch._C._current_autograd_node(), tap.use)
                self._add_input(tap, activation)
                self._add_output(tap, derivatives[0].detach(), activation)

        return hook

    def _begin(self) -> list[Tap]:
        if self._taps is None:
            self._taps = self._owner.begin(self)
        return self._taps

    def _needs(self, factor: Factor, *, shared: bool) -> bool:
        """Whether a factor still lacks a use's statistics: one that uses share is filled by the first of them."""
        if shared and factor in self._filled:
            return False
        self._filled.add(factor)
        return True

    def _add_input(self, tap: Tap, activation: Tensor) -> None:
        column, rows = tap.orientation.column, tap.use.operation.rows(activation)
        tap.orientation.add_rows(rows)
        if self._needs(column, shared=tap.shared_input):
            column.add(_input_factor(tap.use, activation, diagonal=column.diagonal), rows)

    def _add_output(self, tap: Tap, derivative: Tensor, activation: Tensor) -> None:
        row = tap.orientation.row
        if self._needs(row, shared=tap.shared_output):
            moment = tap.use.operation.output_factor(derivative, activation, diagonal=row.diagonal)
            row.add(moment.mul_(self.terms**2), tap.use.operation.rows(activation))

    def differentiate(self, found: Sequence[Found], derivatives: Iterable[Derivative], roots: Iterable[Node]) -> None:
        """Sampled, exact: backward passes of our own; they count when the user's backward comes by."""
        edges = [GradientEdge(one.node, 0) for one in found]
        outputs: dict[int, Tensor] = {}
        activations: dict[int, Tensor] = {}
        rows: dict[int, int | Tensor] = {}
        for derivative in derivatives:
            grads = torch.autograd.grad(
                derivative.root, edges, derivative.gradient, retain_graph=True, allow_unused=True
            )
            for number, (one, grad) in enumerate(zip(found, grads, strict=True)):
                if grad is None:
                    continue
                with _undisturbed(grad.device):
                    if number not in activations:
                        activation = self._read(one.node, one.use)
                        rows[number] = one.use.operation.rows(activation)
                        self._keep_input(number, activation, rows[number])
                        # Only a look-up needs its indices again; nothing else is kept alive.
                        small = one.use.operation.diagonal_input
                        activations[number] = activation if small else activation.new_empty(0)
                    diagonal = one.use.weight.shape[1] > self._limit
                    moment = one.use.operation.output_factor(grad, activations[number], diagonal=diagonal)
                    outputs[number] = moment if number not in outputs else outputs[number].add_(moment)
        for number, moment in outputs.items():
            self._keep_output(number, moment, rows[number])
        nodes = dict.fromkeys([*roots, *(one.node for one in found)])
        self.handles += [node.register_prehook(lambda _: self._count()) for node in nodes]

    def _keep_input(self, number: int, activation: Tensor, rows: int | Tensor) -> None:
        use = self.uses[number]
        moment = _input_factor(use, activation, diagonal=use.weight.shape[2] >= self._limit)

        def deliver(taps: list[Tap]) -> None:
            tap = taps[number]
            tap.orientation.add_rows(rows)
            if self._needs(tap.orientation.column, shared=tap.shared_input):
                tap.orientation.column.add(moment, rows)

        self._waiting.append(deliver)

    def _keep_output(self, number: int, moment: Tensor, rows: int | Tensor) -> None:
        def deliver(taps: list[Tap]) -> None:
            tap = taps[number]
            if self._needs(tap.orientation.row, shared=tap.shared_output):
                tap.orientation.row.add(moment, rows)

        self._waiting.append(deliver)

    def _count(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            taps = self._begin()
            for deliver in waiting:
                deliver(taps)

    def _read(self, node: Node, use: Use) -> Tensor:
        if not use.packed:
            activation: Tensor = saved(node, use.activation)
        else:
            # A checkpointed region lets each saved tensor be read once, by autograd. Its own group recomputes the
            # region once more, for us.
            with self._group:
                activation = saved(node, use.activation)
        return activation.detach()


def _input_factor(use: Use, activation: Tensor, *, diagonal: bool) -> Tensor:
    return use.operation.input_factor(activation, homogeneous=use.adds_bias, diagonal=diagonal)


def _differentiates(leaf: Node) -> bool:
    """Whether the backward pass under way computes this leaf's gradient; one that only probes inputs does not count."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        return True  # torch.autograd.grad with the leaf among its inputs


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients and no autocast: statistics keep their precision wherever backward was called from."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield

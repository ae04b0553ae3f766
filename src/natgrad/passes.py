"""One forward pass and its backward: from (activation, derivative) pairs to what they add to the factors.

The *empirical* Fisher listens to the user's own backward pass. The *sampled* and *exact* Fishers run their own, without
weight gradients, right after the forward pass, and count once the user's backward comes by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

from natgrad.blocks.factor import Factor
from natgrad.blocks.registry import Tap
from natgrad.capture.graph import saved
from natgrad.capture.use import Found, Use
from natgrad.remaining import Remaining
from natgrad.statistics.predictive import Derivative


class Owner(Protocol):
    """What a pass belongs to."""

    def begin(self, current: Pass) -> list[Tap]:
        """The pass counts from now on: where do the statistics of its uses go?"""

    def claims(self, name: str, task: int) -> bool:
        """Whether nobody has taken a parameter's gradient in this backward yet."""

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
        self,
        owner: Owner,
        found: Sequence[Found],
        *,
        terms: float,
        kind: str,
        unrecognised: dict[str, str],
        left: dict[str, str],
        remaining: Remaining,
        diagonals: Callable[[Use], tuple[bool, ...]],
    ) -> None:
        self.uses = [*(one.use for one in found), *remaining.uses]
        self._first_rest = len(found)
        self._remaining = remaining
        self.terms = terms
        self.kind = kind
        self.unrecognised = unrecognised
        self.left = left
        self.task = -1  # the backward pass that made it count
        self._diagonals = diagonals
        self.handles: list[RemovableHandle] = []
        self.token = object()  # marks the nodes that this pass has tapped
        self._owner = owner
        self._group = GraphExecGroup()
        self._taps: list[Tap] | None = None
        self._filled: set[Factor] = set()
        # What adds the sums of our own backward passes, once the user's backward comes by.
        self._waiting: list[Callable[[list[Tap]], None]] = []

    def listen(self, found: Iterable[Found], roots: Iterable[Tensor], leaves: Sequence[Node]) -> None:
        """Empirical: takes each pair when the user's backward reaches its node, once. `leaves` belong to the
        parameters without a recognised use.
        """
        for number, one in enumerate(found):
            self.handles.append(one.node.register_prehook(self._listener(number, one.leaf)))
        if not leaves:
            return
        for number, root in enumerate(roots):
            assert root.grad_fn is not None, "roots are attached"
            self.handles.append(root.grad_fn.register_prehook(self._root_listener(number, root.output_nr, leaves)))
        for number, name in self._remaining.by_batch:
            handle = self._remaining.parameter(name).register_hook(_gradient_listener(weakref.ref(self), number))
            weakref.finalize(self, handle.remove)  # a parameter outlives the graph
            self.handles.append(handle)

    def _root_listener(self, number: int, output: int, leaves: Sequence[Node]) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(derivatives: tuple[Tensor, ...]) -> None:
            if derivatives[output] is not None and any(map(_differentiates, leaves)):
                self._begin()
                if self._remaining.by_case:
                    self._remaining.derivatives.setdefault(number, derivatives[output].detach())

        return hook

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        """Takes in a batch's whole gradient, where nothing else is known; only of the backward that counts."""
        if self._taps is None or self.task != torch._C._current_graph_task_id():
            return
        tap = self._taps[self._first_rest + number]
        if self._owner.claims(tap.use.weight.name, self.task):
            with _undisturbed(gradient.device):
                self._add(tap, gradient.detach().reshape(1, -1), ())

    def finish(self) -> None:
        """Runs the model case by case for what the backward has left to do."""
        if self._taps is None or not self._remaining.derivatives:
            return
        known = self._remaining.derivatives
        derivatives = [known.get(number) for number in range(max(known) + 1)]
        for number, gradients in self._remaining.gradients_of_cases(derivatives):
            with _undisturbed(gradients.device):
                self._add(self._taps[self._first_rest + number], gradients, ())

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
                self._add(tap, derivatives[0].detach(), self._read(torch._C._current_autograd_node(), tap.use))

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

    def _add(self, tap: Tap, derivative: Tensor, saved: Sequence[Tensor]) -> None:
        """Takes in one use's pairs; what another block with the same factor has filled is not computed again."""
        operation, sides = tap.use.operation, tap.orientation.sides
        rows = operation.rows(saved, derivative)
        tap.orientation.add_rows(rows)
        needed = [self._needs(factor, shared=shared) for factor, shared in zip(sides, tap.shared, strict=True)]
        if any(needed[1:]):
            moments = _input_factors(tap.use, saved, [factor.diagonal for factor in sides[1:]])
            for factor, moment, need in zip(sides[1:], moments, needed[1:], strict=True):
                if need:
                    factor.add(moment, rows)
        if needed[0]:
            moment = operation.output_factor(derivative, saved, diagonal=sides[0].diagonal)
            sides[0].add(moment.mul_(self.terms**2), rows)

    def differentiate(
        self,
        found: Sequence[Found],
        derivatives: Iterable[Derivative],
        roots: Sequence[Tensor],
        anchors: Iterable[Node],
    ) -> None:
        """Sampled, exact: backward passes of our own; they count when the user's backward comes by `anchors`."""
        others = self._remaining.inputs(roots)
        edges: list[Any] = [*(GradientEdge(one.node, 0) for one in found), *others]
        outputs: dict[int, Tensor] = {}
        kept: dict[int, Sequence[Tensor]] = {}
        rows: dict[int, int | Tensor] = {}

        def add(number: int, use: Use, derivative: Tensor, saved: Sequence[Tensor]) -> None:
            rows[number] = use.operation.rows(saved, derivative) if number not in rows else rows[number]
            moment = use.operation.output_factor(derivative, saved, diagonal=self._diagonals(use)[0])
            outputs[number] = moment if number not in outputs else outputs[number].add_(moment)

        for derivative in derivatives:
            grads = torch.autograd.grad(
                derivative.roots, edges, derivative.gradients, retain_graph=True, allow_unused=True
            )
            for number, (one, grad) in enumerate(zip(found, grads, strict=False)):
                if grad is None:
                    continue
                with _undisturbed(grad.device):
                    if number not in kept:
                        saved = self._read(one.node, one.use)
                        self._keep_inputs(number, saved, one.use.operation.rows(saved, grad))
                        # Only what the output side looks at is kept alive.
                        small = tuple(tensor.new_empty(0) for tensor in saved)
                        rows[number] = one.use.operation.rows(saved, grad)
                        kept[number] = saved if one.use.operation.keeps_saved else small
                    add(number, one.use, grad, kept[number])
            if others:
                with _undisturbed(derivative.roots[0].device):
                    for index, gradients in self._remaining.gradients(grads[len(found) :]):
                        number = len(found) + index
                        add(number, self.uses[number], gradients, ())
        for number in range(len(found), len(self.uses)):
            if number in rows:
                self._keep_inputs(number, (), rows[number])
        for number, moment in outputs.items():
            self._keep_output(number, moment, rows[number])
        nodes = dict.fromkeys([*anchors, *(one.node for one in found)])
        self.handles += [node.register_prehook(lambda _: self._count()) for node in nodes]

    def _keep_inputs(self, number: int, saved: Sequence[Tensor], rows: int | Tensor) -> None:
        use = self.uses[number]
        moments = _input_factors(use, saved, self._diagonals(use)[1:])

        def deliver(taps: list[Tap]) -> None:
            tap = taps[number]
            tap.orientation.add_rows(rows)
            for factor, moment, shared in zip(tap.orientation.sides[1:], moments, tap.shared[1:], strict=True):
                if self._needs(factor, shared=shared):
                    factor.add(moment, rows)

        self._waiting.append(deliver)

    def _keep_output(self, number: int, moment: Tensor, rows: int | Tensor) -> None:
        def deliver(taps: list[Tap]) -> None:
            tap = taps[number]
            if self._needs(tap.orientation.row, shared=tap.shared[0]):
                tap.orientation.row.add(moment, rows)

        self._waiting.append(deliver)

    def _count(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            taps = self._begin()
            for deliver in waiting:
                deliver(taps)

    def _read(self, node: Node, use: Use) -> tuple[Tensor, ...]:
        if not use.packed:
            return tuple(saved(node, name).detach() for name in use.saved)
        # A checkpointed region lets each saved tensor be read once, by autograd. Its own group recomputes the region
        # once more, for us.
        with self._group:
            return tuple(saved(node, name).detach() for name in use.saved)


def _input_factors(use: Use, saved: Sequence[Tensor], diagonal: Sequence[bool]) -> list[Tensor]:
    return use.operation.input_factors(saved, homogeneous=use.adds_bias, diagonal=diagonal)


def _gradient_listener(current: weakref.ref[Pass], number: int) -> Callable[[Tensor], None]:
    """Holds the pass weakly: a parameter's hooks must not keep a graph alive."""

    def hook(gradient: Tensor) -> None:
        if (present := current()) is not None:
            present.add_gradient(number, gradient)

    return hook


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

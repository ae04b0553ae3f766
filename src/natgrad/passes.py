"""One forward pass and its backward: from (activation, derivative) pairs to what they add to the factors.

The *empirical* Fisher listens to the user's own backward pass. The *sampled* and *exact* Fishers run their own, without
weight gradients, right after the forward pass, and count once the user's backward comes by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import chain, compress
from operator import attrgetter, or_
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import Orientation
from natgrad.blocks.registry import Bundle, Tap
from natgrad.capture.use import Occurrence, Reader, Use, Uses
from natgrad.clock import Clock
from natgrad.launches import ALIGNED_BYTES
from natgrad.remaining import Remaining
from natgrad.statistics import gpu
from natgrad.statistics.gram import second_moment
from natgrad.statistics.plans import Work
from natgrad.statistics.predicted import Derivative
from natgrad.statistics.vectors import Vector
from natgrad.statistics.waiting import Late, Part, Parts, Waiting, late, together
from natgrad.undisturbed import undisturbed

_REMEMBERED = 16  # kinds of tensors of a use
_NEW: Any = object()  # nothing is remembered
_NO_COPIES = nullcontext()  # nothing is done for what waits, so that no time has to be told
_lies = attrgetter("shape", "dtype", "device")


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

    def takes(self, factor: Factor) -> bool:
        """Whether a factor's statistics are taken here, and not by another rank."""

    def factors_of(self, use: Use) -> Sequence[Factor] | None:
        """The factors that a use's statistics will go to, where its block is known."""

    def overwritten(self) -> None:
        """Somebody has written into activations or derivatives that waited."""

    waits: bool  # whether small statistics may wait for others
    frees: bool  # whether a graph is freed by the first backward pass through it
    clock: Clock  # what the time of taking statistics is told to


class Pass:
    """The statistics of one forward pass, or of a `fraction` of its batch. `terms` is N: the loss is a mean over so
    many terms, so g = N ĝ.

    `kind` is a word of its owner's. It lives in hooks on its graph and dies with it, unless a backward makes it
    count. `uses` are numbered; nothing here holds a node.
    """

    def __init__(
        self,
        owner: Owner,
        found: Sequence[Occurrence],
        uses: Uses,
        *,
        terms: float,
        kind: str,
        unrecognised: dict[str, str],
        left: dict[str, str],
        remaining: Remaining,
        diagonals: Callable[[Use], tuple[bool, ...]],
        fraction: float,
    ) -> None:
        self.uses = uses
        self._fraction = fraction
        self._given = {number: one.given for number, one in enumerate(found) if one.given}
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
        self._heard: set[int] = set()  # the uses whose pairs have come in
        # A vector's gradient is the sum over its uses, case by case: they are added up under the first one's number.
        self._first_use = uses.first_of_several
        self._summed: dict[int, Tensor] = {}
        self._late: dict[torch.device, Waiting] = {}
        self._growing: set[Factor] = set()  # something of them waits, or did, that takes more memory when it is done
        self._settled_after = -1  # the backward pass at whose end nothing will wait
        self._lock = RLock()  # of what waits: autograd has a thread for each GPU
        self._rounds = False
        # What adds the sums of our own backward passes, once the user's backward comes by.
        self._waiting: list[Callable[[list[Tap]], None]] = []

    def listen(self, found: Iterable[Occurrence], roots: Iterable[Tensor], leaves: Sequence[Node]) -> None:
        """Empirical: takes each pair when the user's backward reaches its node, once. `leaves` belong to the
        parameters without a recognised use, for which the derivatives of `roots` are kept.
        """
        by_node: dict[Node, list[tuple[int, Node]]] = {}
        for number, one in enumerate(found):
            by_node.setdefault(one.node, []).append((number, one.leaf))
        self.handles += [node.register_prehook(self._listener(uses)) for node, uses in by_node.items()]
        if not leaves:
            return
        for number, root in enumerate(roots):
            assert root.grad_fn is not None, "roots are attached"
            self.handles.append(root.grad_fn.register_prehook(self._root_listener(number, root.output_nr, leaves)))
        for number, parameter in enumerate(self._remaining.parameters.values()):
            handle = parameter.register_hook(_gradient_listener(weakref.ref(self), number))
            weakref.finalize(self, handle.remove)  # a parameter outlives the graph
            self.handles.append(handle)

    def _root_listener(self, number: int, output: int, leaves: Sequence[Node]) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(derivatives: tuple[Tensor, ...]) -> None:
            if derivatives[output] is not None and any(map(_differentiates, leaves)):
                self._begin()
                self._remaining.derivatives.setdefault(number, derivatives[output].detach())

        return hook

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        """Takes in a parameter's whole gradient, of the backward that counts: all that is known, or a check."""
        if self._taps is None or self.task != torch._C._current_graph_task_id():
            return
        if self._remaining.is_by_case(number):
            self._remaining.totals.setdefault(number, gradient.detach().clone())
            return
        tap = self._taps[self._first_rest + number]
        if self._owner.claims(tap.use.weight.name, self.task):
            with self._owner.clock.part("statistics"), undisturbed(gradient.device):
                self._add_rows(tap, gradient.detach().reshape(1, -1))

    @property
    def has_remaining(self) -> bool:
        """Whether some parameters' use was not recognised."""
        return bool(self._remaining.uses)

    def finish(self, *, alone: bool) -> None:
        """Does what the backward has left to do: vectors with several uses, and the model case by case.

        `alone` says that no other pass had a part in the same backward.
        """
        if self._taps is None:
            return
        self.settle()
        for number, gradients in self._summed.items():
            with undisturbed(gradients.device):
                self._add_rows(self._taps[number], gradients)
        self._summed.clear()
        if self._remaining.derivatives:
            for number, gradients in self._remaining.rows_that_arrived(alone=alone):
                with undisturbed(gradients.device):
                    self._add_rows(self._taps[self._first_rest + number], gradients)

    def _listener(self, uses: list[tuple[int, Node]]) -> Callable[[tuple[Tensor, ...]], None]:
        """Listens to one node, for its uses: their numbers, and the leaves of their weights."""
        numbers = tuple([number for number, _ in uses])

        def hook(derivatives: tuple[Tensor, ...]) -> None:
            if derivatives[0] is None:
                return
            reached = [_differentiates(leaf) for _, leaf in uses]
            fresh = numbers if all(reached) else tuple(compress(numbers, reached))
            if not self._heard.isdisjoint(fresh):
                self._owner.again()
                self.settle()  # what a backward pass that broke has left
                fresh = tuple([number for number in fresh if number not in self._heard])
            if fresh:
                self._heard.update(fresh)
                self._take(torch._C._current_autograd_node(), fresh, derivatives[0])

        return hook

    def _take(self, node: Node, numbers: tuple[int, ...], derivative: Tensor) -> None:
        """Takes in the pairs of a node's uses."""
        if derivative.dtype == torch.float16:
            self._owner.half()
        taps, derivative = self._begin(), derivative.detach()
        if self._given and not self._given.keys().isdisjoint(numbers):
            saved: Sequence[Sequence[Tensor]] = [self._read(node, number) for number in numbers]
            held = False
        else:
            reader = self.uses.reader(numbers)
            tensors = [derivative, *self._read_all(node, reader)]
            held = self._hold(numbers, taps, reader, tensors)
            saved = [] if held else reader.apart(tensors[1:])
        if not held:
            with self._owner.clock.part("statistics"), undisturbed(derivative.device):
                for number, own in zip(numbers, saved, strict=True):
                    if number in self._first_use:
                        self._sum(self._first_use[number], taps[number].use, derivative, own, self._summed)
                    else:
                        self._add(taps[number], derivative, own)

    def _hold(self, numbers: tuple[int, ...], taps: Sequence[Tap], reader: Reader, tensors: list[Tensor]) -> bool:
        """Leaves all that a node's tensors lead to for later, where that is possible: a short way for most layers."""
        if not self._owner.waits:
            return False
        key, bundles = (numbers, self._lie(tensors)), taps[numbers[0]].bundles
        bundle = bundles.get(key, _NEW)
        if bundle is _NEW:
            if len(bundles) >= _REMEMBERED:
                bundles.clear()
            bundle = bundles[key] = self._bundle(numbers, taps, tensors[0], reader.apart(tensors[1:]))
        if bundle is None or not all(map(self._owner.takes, bundle.factors)):
            return False
        if not self._wait(bundle.parts, tensors, bundle.factors):
            return False
        for orientation, rows in bundle.rows:
            orientation.add_rows(rows)
        return True

    def _bundle(
        self, numbers: Sequence[int], taps: Sequence[Tap], derivative: Tensor, saved: Sequence[Sequence[Tensor]]
    ) -> Bundle | None:
        """What a node's tensors lead to; None where some of it cannot wait, or is shared with other uses."""
        rows: list[tuple[Orientation, int]] = []
        factors: list[Factor] = []
        parts: list[Part] = []
        first = 1  # the derivative comes before what was saved for each use
        for number, own in zip(numbers, saved, strict=True):
            tap = taps[number]
            can_wait = self._late_of(tap, derivative, own)
            if can_wait is None or any(tap.shared) or number in self._first_use:
                return None
            rows.append((tap.orientation, can_wait.rows))
            for factor, work, which in _works(can_wait, tap.orientation.sides, range(first, first + len(own))):
                if work is None:
                    return None
                factors.append(factor)
                parts.append(Part(work, which, (partial(factor.add, rows=can_wait.rows),)))
            first += len(own)
        size = sum(tensor.nbytes for tensor in (derivative, *chain.from_iterable(saved)))
        return Bundle(tuple(rows), tuple(factors), Parts(together(parts), size))

    def _begin(self) -> list[Tap]:
        if self._taps is None:
            self._taps = self._owner.begin(self)
            self._rounds = gpu.rounds()
        return self._taps

    def _needs(self, factor: Factor, *, shared: bool) -> bool:
        """Whether a factor still lacks a use's statistics: one that uses share is filled by the first of them."""
        if not shared:
            return self._owner.takes(factor)
        if factor in self._filled or not self._owner.takes(factor):
            return False
        self._filled.add(factor)
        return True

    def _add(self, tap: Tap, derivative: Tensor, saved: Sequence[Tensor]) -> None:
        """Takes in one use's pairs; what another block with the same factor has filled is not computed again."""
        operation, sides = tap.use.operation, tap.orientation.sides
        needed = [self._needs(factor, shared=shared) for factor, shared in zip(sides, tap.shared, strict=True)]
        can_wait = self._late_of(tap, derivative, saved) if self._owner.waits else None
        rows = operation.rows(saved, derivative) if can_wait is None else can_wait.rows
        tap.orientation.add_rows(rows)
        if can_wait is not None:
            tensors = (derivative, *saved)
            for side, (factor, work, which) in enumerate(_works(can_wait, sides, range(1, len(tensors)))):
                if needed[side] and work is not None:
                    own = [tensors[index] for index in which]
                    part = Part(work, tuple(range(len(which))), (partial(factor.add, rows=rows),))
                    needed[side] = not self._wait(Parts([part], sum(tensor.nbytes for tensor in own)), own, (factor,))
        if not any(needed):
            return
        scale = 1.0
        if self._fraction < 1:
            operation, derivative, saved = operation.part(derivative, saved, self._fraction)
            # A part stands for the whole: other uses of the weight may have other parts.
            scale = _ratio(rows, operation.rows(saved, derivative))
        if any(needed[1:]):
            diagonal = [factor.diagonal for factor in sides[1:]]
            moments = operation.input_factors(saved, homogeneous=tap.use.adds_bias, diagonal=diagonal)
            for factor, moment, need in zip(sides[1:], moments, needed[1:], strict=True):
                if need:
                    factor.add(moment if scale == 1 else moment.mul_(scale), rows)
        if needed[0]:
            moment = operation.output_factor(derivative, saved, diagonal=sides[0].diagonal)
            sides[0].add(moment.mul_(scale * self.terms**2), rows)

    def _late_of(self, tap: Tap, derivative: Tensor, saved: Sequence[Tensor]) -> Late | None:
        """What of a use's statistics can wait; decided once for tensors that lie alike."""
        key = self._lie((derivative, *saved))
        if key in tap.late:
            return tap.late[key]
        if len(tap.late) >= _REMEMBERED:
            tap.late.clear()
        tap.late[key] = late(
            tap.use.operation,
            derivative,
            saved,
            fraction=self._fraction,
            scale=self.terms**2,
            homogeneous=tap.use.adds_bias,
            diagonal=[factor.diagonal for factor in tap.orientation.sides],
        )
        return tap.late[key]

    def _lie(self, tensors: Sequence[Tensor]) -> Hashable:
        """All that decides what can wait, and what is to be computed."""
        return self._fraction, self.terms, self._rounds, *map(_lies, tensors), *map(Tensor.stride, tensors)

    def _wait(self, parts: Parts, tensors: Sequence[Tensor], factors: Collection[Factor]) -> bool:
        """Leaves works for later, whose moments go to `factors`; not where kernels cannot read a tensor."""
        if reduce(or_, map(Tensor.data_ptr, tensors)) % ALIGNED_BYTES:
            return False
        task = torch._C._current_graph_task_id()
        if task != self._settled_after:
            # At the end of the backward pass at the latest: who goes on after it may write where activations are.
            self._settled_after = task
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        device = tensors[0].device
        with self._lock:
            late = self._late.get(device)
            if late is None:
                late = self._late[device] = Waiting(frees=self._owner.frees and not self.uses.recomputed)
            grows = parts.grows and self._grow(factors)
            if not grows and not late.has_room(parts):
                self._flush(device, late, everything=False)
            with self._owner.clock.part("statistics") if grows else _NO_COPIES:
                late.put(parts, tensors, grows=grows)
            if late.is_full:
                self._flush(device, late, everything=False)
        return True

    def _grow(self, factors: Collection[Factor]) -> bool:
        """Whether moments are the first of their factors in this pass: others are added to them and freed."""
        new = self._growing.isdisjoint(factors)
        if new:
            self._growing.update(factors)
        return new

    def settle(self) -> None:
        """Computes what has waited for others."""
        with self._lock:
            late, self._late = self._late, {}
            for device, own in late.items():
                self._flush(device, own, everything=True)

    def _flush(self, device: torch.device, late: Waiting, *, everything: bool) -> None:
        with self._owner.clock.part("statistics"), undisturbed(device):
            if not late.flush(everything=everything):
                self._owner.overwritten()

    def _sum(self, first: int, use: Use, derivative: Tensor, saved: Sequence[Tensor], into: dict[int, Tensor]) -> None:
        assert isinstance(use.operation, Vector), "only vectors are summed over their uses"
        gradients = use.operation.gradients(derivative, saved)
        into[first] = gradients if first not in into else into[first] + gradients

    def _add_rows(self, tap: Tap, gradients: Tensor) -> None:
        """Takes in a vector's gradients, case by case."""
        row = tap.orientation.row
        tap.orientation.add_rows(gradients.shape[0])
        if self._needs(row, shared=tap.shared[0]):
            moment = second_moment(gradients[None], diagonal=row.diagonal)
            row.add(moment.mul_(self.terms**2), gradients.shape[0])

    def differentiate(
        self,
        found: Sequence[Occurrence],
        derivatives: Iterable[Derivative],
        roots: Sequence[Tensor],
        anchors: Iterable[Node],
    ) -> None:
        """Sampled, exact: backward passes of our own; they count when the user's backward comes by `anchors`."""
        parameters = list(self._remaining.parameters.values())
        inner = list(roots) if parameters else []
        edges: list[Any] = [*(GradientEdge(one.node, 0) for one in found), *inner, *parameters]
        moments: dict[int, Tensor] = {}
        kept: dict[int, Sequence[Tensor]] = {}
        rows: dict[int, int | Tensor] = {}

        def add(number: int, moment: Tensor) -> None:
            moments[number] = moment if number not in moments else moments[number].add_(moment)

        for derivative in derivatives:
            grads = torch.autograd.grad(
                derivative.roots, edges, derivative.gradients, retain_graph=True, allow_unused=True
            )
            summed: dict[int, Tensor] = {}
            for number, (one, grad) in enumerate(zip(found, grads, strict=False)):
                if grad is None:
                    continue
                use = one.use
                with undisturbed(grad.device):
                    if number not in kept:
                        saved = self._read(one.node, number)
                        rows[number] = use.operation.rows(saved, grad)
                        if self._first_use.get(number, number) == number:
                            self._keep_inputs(number, saved, rows[number])
                        # Only what the output side looks at is kept alive.
                        small = tuple(tensor.new_empty(0) for tensor in saved)
                        kept[number] = saved if use.operation.keeps_saved else small
                    if number in self._first_use:
                        self._sum(self._first_use[number], use, grad, kept[number], summed)
                    elif self._wants(use)[0]:
                        diagonal = self._diagonals(use)[0]
                        add(number, use.operation.output_factor(grad, kept[number], diagonal=diagonal))
            if parameters:
                ends = len(found), len(found) + len(inner)
                for index, gradients in self._remaining.rows(grads[ends[0] : ends[1]], grads[ends[1] :]):
                    summed[len(found) + index] = gradients
            for number, gradients in summed.items():
                with undisturbed(gradients.device):
                    rows.setdefault(number, gradients.shape[0])
                    add(number, second_moment(gradients[None], diagonal=self._diagonals(self.uses[number])[0]))
        for number, moment in moments.items():
            if number not in kept:
                self._keep_inputs(number, (), rows[number])
            self._keep_output(number, moment, rows[number])
        nodes = dict.fromkeys([*anchors, *(one.node for one in found)])
        self.handles += [node.register_prehook(lambda _: self.count()) for node in nodes]

    def _wants(self, use: Use) -> list[bool]:
        """Which sides of a use are to be computed here: all, where its block is not known yet."""
        factors = self._owner.factors_of(use)
        return [True] * (1 + len(use.form.columns)) if factors is None else [self._owner.takes(f) for f in factors]

    def _keep_inputs(self, number: int, saved: Sequence[Tensor], rows: int | Tensor) -> None:
        use = self.uses[number]
        moments = _input_factors(use, saved, self._diagonals(use)[1:]) if any(self._wants(use)[1:]) else None

        def deliver(taps: list[Tap]) -> None:
            tap = taps[number]
            tap.orientation.add_rows(rows)
            if moments is None:
                return
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

    def count(self) -> None:
        """Adds what our own backward passes have found."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            taps = self._begin()
            for deliver in waiting:
                deliver(taps)

    def _read(self, node: Node, number: int) -> Sequence[Tensor]:
        """The activation of one use."""
        return self._given[number] if number in self._given else self._read_all(node, self.uses.reader((number,)))

    def _read_all(self, node: Node, reader: Reader) -> list[Tensor]:
        """The activations of a node's uses, one after the other."""
        if not reader.packed:
            return reader.read(node)
        # A checkpointed region lets each saved tensor be read once, by autograd. Its own group recomputes the region
        # once more, for us.
        with self._owner.clock.part("statistics"), self._group:
            return reader.read(node)


def _works(
    late: Late, sides: Sequence[Factor], saved: Sequence[int]
) -> Iterator[tuple[Factor, Work | None, tuple[int, ...]]]:
    """The work for each side, and of which tensors it is: the derivative comes first, what was `saved` has numbers."""
    yield sides[0], late.output, (0, *saved) if late.by_both else (0,)
    for number, factor in enumerate(sides[1:]):
        yield factor, late.inputs if number == 0 else None, tuple(saved[:1])


def _ratio(whole: int | Tensor, part: int | Tensor) -> float:
    """Rows of a batch to those of its part; where only the device knows them, all are taken."""
    return 1.0 if isinstance(whole, Tensor) or isinstance(part, Tensor) or part == 0 else whole / part


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

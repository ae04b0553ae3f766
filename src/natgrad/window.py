"""All passes between two steps that take statistics: from a model's output to taps on its graph, and from there into
the running averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from natgrad.blocks.factor import Factor, Preview, commit, preview, scale_moments
from natgrad.blocks.kronecker import KroneckerBlock, Orientation, commit_counts
from natgrad.blocks.registry import Registry, Tap
from natgrad.capture import outputs
from natgrad.capture.cases import batch_of
from natgrad.capture.choices import Choices
from natgrad.capture.form import PER_CASE, USES
from natgrad.capture.graph import Graph, Vertex, Walk, mark, marks
from natgrad.capture.recipes import Recipes
from natgrad.capture.use import Findings, Use, Uses
from natgrad.capture.watch import Inputs
from natgrad.clock import Clock, NoClock
from natgrad.loss_scale import LossScale
from natgrad.options import Hyperparameter, choice
from natgrad.passes import Pass
from natgrad.per_case import Call, make_call
from natgrad.remaining import Fallback, Remaining
from natgrad.statistics.predicted import Predicted, Several, count_predictions
from natgrad.statistics.predictive import Predictive, asks_more, predicted

ACCUMULATED = ("sum", "mean")
FISHERS = ("empirical", "sampled", "exact")
# How a pass counts towards N: by its own terms; once for all passes of a step (the user's loss_terms); not at all,
# because it goes on from an earlier pass of the same loss.
OWN, STEP, CONNECTED = "own", "step", "connected"
_has_pending = attrgetter("has_pending")
# Batches in a row of whose gradients nothing comes, until somebody says so: a scaler may skip some steps in a row.
_FOR_NOTHING = 20


def checked_accumulation(value: Any) -> Hyperparameter | str | None:
    """The option `accumulated_loss`: a word, or the number that every loss is divided by."""
    if value is None or isinstance(value, str):
        return None if value is None else choice("accumulated_loss", value, ACCUMULATED)
    return Hyperparameter("accumulated_loss", value, above=0)


@dataclass(frozen=True)
class Elsewhere:
    """What only other ranks have statistics of in this step."""

    orientations: list[Orientation]
    factors: list[Factor]


class Window:
    """What has been seen since the last step that took statistics. `problem` says why a pass could not be used."""

    def __init__(
        self,
        registry: Registry,
        parameters: Mapping[str, Tensor],
        *,
        fisher: str,
        predictive: Predictive,
        generator: torch.Generator | None,
        choices: Choices,
        fallback: Fallback,
        accumulated: Hyperparameter | str | None,
        scale: LossScale,
        takes: Callable[[Factor], bool],
        fraction: float,
        warn: Callable[[str, str], None],
    ) -> None:
        self._fraction = fraction  # of each batch that an empirical Fisher is taken from
        self.registry = registry
        self.scale = scale
        self.clock: Clock = NoClock()
        self.on_backward: Callable[[], None] | None = None  # called when a backward pass is over that counted
        self.waits = True  # see `overwritten`
        self.frees = True  # see `again`
        self.takes = takes  # whether this process computes a factor's statistics, or another rank does
        self._accumulated = accumulated
        self._period: object = None  # the scaler's, in which the counted passes were seen
        self._choices = choices
        self._recipes = Recipes(choices)
        self._fallback = fallback
        self.fisher = fisher
        self.predictive = predictive
        self.generator = generator
        self.unrecognised: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.problem = ""
        self.ignored = False  # a batch came by of which no prediction counts
        self._parameters = parameters
        self._warn = warn
        # Passes that no backward has reached live in the hooks of their graphs alone.
        self._open: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._by_hand: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._counted: list[Pass] = []
        self._delivered = 0.0  # loss terms that stats workers have counted
        self._claimed: set[tuple[str, int]] = set()
        self._for_nothing = 0  # batches since the last step whose gradients were thrown away

    def observe(
        self,
        output: Any,
        roots: list[Tensor],
        parameters: Mapping[str, Tensor],
        *,
        own_terms: float | None = None,
        step_terms: float | None = None,
        targets: Tensor | None = None,
        inputs: Inputs | None = None,
        anchors: Iterable[Node] | None = None,
        by_hand: bool = False,
    ) -> Findings | None:
        """Taps the graph of one forward pass; None where the number of its terms is unknown.

        N is the user's `own_terms` of this pass, `step_terms` of a whole step, or the predictions in the output.
        `inputs` are the model's, where the output comes from a call of it. `anchors` are the nodes whose backward
        makes the pass count, where they are not the output's own.
        """
        prediction = outputs.prediction(output)
        distribution = None
        if self.fisher != "empirical" or (own_terms is None and step_terms is None):
            distribution = self._distribution(output, prediction, targets)
        counted = self._count(prediction, distribution, own_terms, step_terms)
        if counted is None:
            return None
        terms, how = counted
        for current in self._counted:
            current.settle()  # a backward pass that was not gone through to its end has left something that waits
        walk = Walk(roots)
        self._refuse_hidden(walk, parameters)
        batch = batch_of(prediction, self._choices.batch_axis.get("*"))
        candidates = parameters
        if self.unrecognised:
            candidates = {name: p for name, p in parameters.items() if name not in self.unrecognised}
        findings = self._recipes.find(walk, candidates, batch, self.registry.forms())
        found, passed_before = findings.found, {current.token for current in (*self._open, *self._counted)}
        if passed_before:
            found = [one for one in found if not _marked(one.node, passed_before)]
        unknown = self._unknown(walk, findings, parameters)
        last = _last(walk, [root for root in roots if root.dim() > 0]) if unknown else []
        call = self._call(output, last, inputs, batch.cases) if unknown else ""
        rest = self._fallback.uses(unknown, parameters, call, last)
        remaining = Remaining(self._fallback, rest, parameters, call)
        findings.remaining = len(remaining.uses)
        if not found and not remaining.uses:
            return findings
        if len(found) < len(findings.found) and how == OWN:
            how = CONNECTED
        everything = len(found) == len(findings.found) and not remaining.uses
        current = Pass(
            self,
            found,
            findings.uses if everything else Uses([*(one.use for one in found), *remaining.uses]),
            terms=terms,
            kind=how,
            unrecognised=findings.unrecognised,
            left=findings.left,
            remaining=remaining,
            diagonals=self.registry.diagonals,
            fraction=self._fraction,
        )
        mark({one.node for one in found}, current.token)
        self._open.add(current)
        if by_hand:
            self._by_hand.add(current)
        if self.fisher == "empirical" or distribution is None:
            leaves = [walk.leaf(parameters[use.weight.name]) for use in remaining.uses]
            current.listen(found, last or roots, [walk.nodes[leaf] for leaf in leaves if leaf is not None])
        else:
            sampled = self.fisher == "sampled"
            derivatives = [distribution.sampled(self.generator)] if sampled else distribution.exact()
            current.differentiate(found, derivatives, last, walk.roots if anchors is None else anchors)
        return findings

    def _count(
        self,
        prediction: Tensor | None,
        distribution: Predicted | None,
        own_terms: float | None,
        step_terms: float | None,
    ) -> tuple[float, str] | None:
        """N, and how it counts; None where it is not known or nothing counts."""
        if self.fisher == "empirical" and own_terms is not None:
            return own_terms, OWN
        if self.fisher == "empirical" and step_terms is not None:
            return step_terms, STEP
        if distribution is None and prediction is None:
            self.problem = (
                "the model's output holds no prediction tensor to count loss terms in: pass loss_terms= "
                "(how many terms the loss is a mean over), or kfac.capture(loss, terms=...)"
            )
            return None
        terms = 0.0 if prediction is None else count_predictions(prediction)
        terms = terms if distribution is None else distribution.terms
        if terms == 0:
            self.ignored = True
            self._warn("ignored", "every target of a batch was ignored at step {step}: it has no statistics")
            return None
        return terms, OWN

    def _distribution(self, output: Any, prediction: Tensor | None, targets: Tensor | None) -> Predicted | None:
        """What the output stands for; for the empirical Fisher only where more than its shape is asked for."""
        if self.fisher == "empirical" and not asks_more(self.predictive):
            return None
        made = predicted(self.predictive, output, prediction, targets)
        if self.fisher == "empirical" and isinstance(made, Several) and not made.of_equal_terms():
            raise ValueError(
                "the heads have different numbers of terms, and the empirical Fisher knows one N for the whole loss: "
                "use fisher='sampled', or pass loss_terms="
            )
        return made

    def _call(self, output: Any, roots: list[Tensor], inputs: Inputs | None, cases: int | None) -> Call | str:
        """How the model can be run case by case, or why not."""
        if inputs is None:
            return "the loss was captured by hand"
        if cases is None or not roots:
            return "the number of cases is not known"
        if self._choices.batch_axis.get("*", 0) != 0:
            return "its cases are not along the first axis"
        places = {id(tensor): place for place, tensor in enumerate(outputs.tensors(output))}
        return make_call(inputs, cases, tuple(places[id(root)] for root in roots), roots[0].device)

    def _unknown(self, walk: Walk, findings: Findings, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """The parameters without a recognised use, now or in an earlier pass, that this graph holds, and why."""
        if self._fallback.how == "optimizer":
            return {}
        return {
            name: reason
            for name, reason in {**self.unrecognised, **findings.unrecognised}.items()
            if name in parameters and walk.leaf(parameters[name]) is not None
        }

    def begin(self, current: Pass) -> list[Tap]:
        """A backward has reached a pass."""
        current.task = torch._C._current_graph_task_id()
        another = all(other.task != current.task for other in self._counted)
        # Gradients were thrown away since (a skipped batch, another network's turn; a step that the scaler skipped):
        # so are their statistics.
        if self._counted and another and (self._has_no_gradient(current) or self._period is not self.scale.period):
            self._discard()
            self._warn_of_nothing()
        self._period = self.scale.period
        if (
            self.fisher == "empirical"
            and self._accumulated is None
            and current.kind == OWN
            and any(o.task != current.task and o.kind == OWN for o in self._counted)
        ):
            self._warn(
                "accumulated",
                "several backward passes feed one step: each loss is taken to be a mean over its own predictions. "
                "Where each is divided by their number, pass accumulated_loss='mean'; otherwise 'sum'",
            )
        for other in self._counted:
            other.settle()  # before factors are shared, or no longer: a copy has what has come in so far
        self._open.discard(current)
        if self.on_backward is not None and another:
            torch.autograd.Variable._execution_engine.queue_callback(self.on_backward)
        self._counted.append(current)
        self.unrecognised |= current.unrecognised
        self.left |= current.left
        if self._fallback.how == "optimizer":
            self._drop(current.unrecognised)
        self._drop(current.left)
        return self.registry.assign(current.uses)

    def _warn_of_nothing(self) -> None:
        """A KFAC whose step nobody calls takes statistics of every batch, for nothing."""
        self._for_nothing += 1
        if self._for_nothing == _FOR_NOTHING:
            self._warn(
                "for nothing",
                f"gradients of {_FOR_NOTHING} batches in a row were thrown away without a step of K-FAC, which has "
                "preconditioned none of them and costs time: kfac.attach(optimizer), or kfac.step() before every "
                "optimizer.step(); kfac.detach() switches it off",
            )

    def _has_no_gradient(self, current: Pass) -> bool:
        """Whether none of a pass's parameters has."""
        return all(self._parameters[name].grad is None for name in current.uses.parameters)

    def _drop(self, reasons: Mapping[str, str]) -> None:
        """Parameters that had a block and are now left to the optimizer."""
        lost = self.registry.drop(reasons)
        if lost:
            reason = reasons[next(name for name in reasons if lost[0].startswith(name))]
            self._warn("dropped", f"{', '.join(lost)} is left to the optimizer from step {{step}} on: {reason}")

    def claims(self, name: str, task: int) -> bool:
        """Whether a parameter's gradient in one backward is asked for the first time: passes may share it."""
        new = (name, task) not in self._claimed
        self._claimed.add((name, task))
        return new

    def factors_of(self, use: Use) -> list[Factor] | None:
        """The factors that a use's statistics will go to; None where its block is not known yet."""
        block = self.registry.find(use.weight.label)
        if block is None:
            return None
        orientation = block.straight if use.weight == block.weight else block.swapped
        fits = orientation is not None and len(orientation.sides) == 1 + len(use.form.columns)
        return orientation.sides if orientation is not None and fits else None

    def again(self) -> None:
        """A second backward came through a graph that has been counted."""
        self.frees = False
        self._warn(
            "again",
            "a second backward went through the same graph at step {step}; only the first counts as statistics. "
            "For a loss of several parts use (loss1 + loss2).backward()",
        )

    def overwritten(self) -> None:
        """Somebody has written into activations or derivatives during the backward pass, while they waited for others:
        from now on nothing waits.
        """
        self.waits = False
        self._warn(
            "overwritten",
            "activations or derivatives were written into during the backward pass (an in-place norm? a reversible "
            "layer?) while their statistics waited: at step {step} these were refused, from now on they are taken at "
            "once",
        )

    def half(self) -> None:
        """The derivatives are float16: probably of a scaled loss, whose scale must be known to be undone."""
        if not self.scale.known:
            self._warn(
                "float16",
                "derivatives are float16, and K-FAC knows of no GradScaler. If one scales the loss, its scale is taken "
                "for curvature and training stops: attach(optimizer, grad_scaler=scaler)",
            )

    def _refuse_hidden(self, walk: Walk, parameters: Mapping[str, Tensor]) -> None:
        if "CheckpointFunctionBackward" not in walk:
            return
        hidden = [name for name, parameter in parameters.items() if walk.leaf(parameter) is None]
        if hidden:
            reason = "hidden by reentrant activation checkpointing: use use_reentrant=False"
            self.unrecognised |= dict.fromkeys(hidden, reason)
            raise RuntimeError(
                f"reentrant activation checkpointing hides {', '.join(hidden[:3])}{' ...' if len(hidden) > 3 else ''} "
                "from K-FAC: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), which is exact, "
                "or exclude= these parameters"
            )

    def automatic_terms(self) -> float | None:
        """The predictions of one call of the model since the last backward: pairs and triplets have as many each."""
        return max((current.terms for current in self._open if current not in self._by_hand), default=None)

    def forget_automatic(self) -> None:
        """Drops passes that the model's own calls began and no backward has reached."""
        for current in list(self._open):
            if current not in self._by_hand:
                self._forget(current)

    def _forget(self, current: Pass) -> None:
        for handle in current.handles:
            handle.remove()
        self._open.discard(current)

    @property
    def terms(self) -> float:
        """Loss terms of all passes that counted; 0 where none did."""
        by_kind = {how: [p.terms for p in self._counted if p.kind == how] for how in (OWN, STEP, CONNECTED)}
        # What a connected pass goes on from has counted too, unless no gradient got there.
        own = sum(by_kind[OWN]) + max(by_kind[STEP], default=0) or max(by_kind[CONNECTED], default=0)
        return own + self._delivered

    def accept(self, terms: float) -> None:
        """Somebody else's statistics have been added to the blocks' own."""
        self._delivered += terms

    def count(self) -> None:
        """Counts the passes of a sampled or exact Fisher without a backward of the user's coming by."""
        for current in list(self._open):
            current.count()

    @property
    def backwards(self) -> int:
        """How many backward passes have counted."""
        return len({current.task for current in self._counted})

    @property
    def is_all(self) -> bool:
        """Whether nothing is left to do once the backward passes are over, and no scaler can still refuse them."""
        return self.scale.factor is None and not any(current.has_remaining for current in self._counted)

    def finish(self) -> bool:
        """Does what is left to do once the backward passes are over; False where some of it could not be done and is
        better tried with the next batch.
        """
        before = self._fallback.refused
        tasks = [current.task for current in self._counted]
        for current in self._counted:
            current.finish(alone=tasks.count(current.task) == 1)
        return self._fallback.refused == before

    def commit(
        self, step: int, decay: float, usable: Tensor | None = None, elsewhere: Elsewhere | None = None
    ) -> Tensor:
        """Moves the running averages of every block that was used, here or on other ranks, by what came in as
        derivatives of a mean; unless the whole step is not `usable`.

        Returns which factors were finite, on the device; others were refused.
        """
        used = self._used()
        if self.fisher == "empirical":
            scale_moments((orientation.row for orientation in used), self._loss_factor(step))
        commit_counts(used if elsewhere is None else [*used, *elsewhere.orientations], decay, self.terms)
        resting = () if elsewhere is None else elsewhere.factors
        finite = commit(self.registry.factors(), decay, usable, resting)
        self._forget_passes()  # of what came in nothing is left
        return finite

    def preview(self, step: int, decay: float, elsewhere: Elsewhere) -> tuple[Preview, dict[Orientation, Tensor]]:
        """What `commit` would make of factors, and of the orientations' rows and terms, without doing it."""
        loss = self._loss_factor(step) if self.fisher == "empirical" else 1.0
        assert not isinstance(loss, Tensor), "no scaler is at work"
        scales = {orientation.row: loss**2 for orientation in self._used()}
        counts = {o: o.counts for o in self.registry.orientations()}
        for orientation in (*self._used(), *elsewhere.orientations):
            rows = torch.as_tensor(orientation.pending_rows, dtype=torch.float64, device=orientation.counts.device)
            added = torch.stack([rows, rows.new_full((), self.terms)])
            counts[orientation] = orientation.counts * decay + added
        return preview(self.registry.factors(), decay, scales, elsewhere.factors), counts

    @property
    def contents(self) -> tuple[Pass, ...]:
        """The passes that have counted, to tell whether others have come since."""
        return tuple(self._counted)

    def _used(self) -> list[Orientation]:
        return [orientation for orientation in self.registry.orientations() if orientation.has_pending]

    def _loss_factor(self, step: int) -> float | Tensor:
        """What the derivatives of the losses lack to be those of a mean over their own terms: the micro-batches that
        each was divided by, less what a scaler multiplied it with.
        """
        own = {current.task for current in self._counted if current.kind == OWN}
        factor = 1.0
        if own and isinstance(self._accumulated, Hyperparameter):
            factor = self._accumulated.at(step)
        elif own and self._accumulated == "mean":
            factor = float(len(own))
        scaled = self.scale.factor
        return factor if scaled is None else factor / scaled.double()

    def close(self) -> None:
        """Forgets everything that did not reach the running averages."""
        self._discard()
        self._forget_passes()

    def _forget_passes(self) -> None:
        for current in list(self._open):
            self._forget(current)
        self._forget_counted()
        self._for_nothing = 0
        self.problem = ""
        self.ignored = False

    def _forget_counted(self) -> None:
        self._counted = []
        self._delivered = 0.0
        self._claimed.clear()

    def _discard(self) -> None:
        """Forgets the passes that counted, with what came in from them."""
        self._forget_counted()
        for orientation in self.registry.orientations():
            if orientation.has_pending:
                orientation.forget()
        for factor in self.registry.factors():
            if factor.pending is not None:
                factor.discard()

    def leaves(self, block: KroneckerBlock) -> bool:
        """Whether a block from a checkpoint would now be left to the optimizer."""
        if block.form.columns:
            return False
        return (self._choices.vectors if block.form.source == USES else self._fallback.how) == "optimizer"

    def without_statistics(self, elsewhere: Elsewhere | None = None) -> list[KroneckerBlock]:
        """Blocks that no pass of this window used, on any rank."""
        if all(map(_has_pending, self.registry.orientations())):
            return []
        refused = PER_CASE if self._fallback.refused or self._fallback.failures else ""
        others = set() if elsewhere is None else set(elsewhere.orientations)
        return [
            block
            for block in self.registry
            if block.form.source != refused and not any(o.has_pending or o in others for o in block.orientations)
        ]


def _last(walk: Walk, roots: list[Tensor]) -> list[Tensor]:
    """The outputs that no other of them is computed from: those below have their derivatives too."""
    graph = Graph(walk, {})
    own = dict(zip(walk.roots, graph.vertices, strict=False))  # the outputs' nodes come first
    vertices = {own[root.grad_fn] for root in roots if root.grad_fn is not None}
    found = []
    for root in roots:
        assert root.grad_fn is not None, "roots are attached"
        above = [consumer.node for consumer in graph.consumers[own[root.grad_fn]]]
        seen: set[Vertex] = set()
        while above and not vertices & seen:
            vertex = above.pop()
            if vertex not in seen:
                seen.add(vertex)
                above += [consumer.node for consumer in graph.consumers[vertex]]
        if not vertices & seen:
            found.append(root)
    return found


def _marked(node: Node, tokens: set[object]) -> bool:
    return any(mark in tokens for mark in marks(node))

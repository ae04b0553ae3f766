"""What a KFAC does together with those of other ranks: agree on what came in, hand sums over, gather everything."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from natgrad import checkpoint
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Whole
from natgrad.blocks.registry import Registry
from natgrad.distribute.agreement import CONSTRUCTION
from natgrad.distribute.channel import Channel, OutOfStepError
from natgrad.distribute.packing import by_dtype
from natgrad.distribute.replicas import replicas
from natgrad.distribute.spread import Spread
from natgrad.distribute.strategy import Strategy
from natgrad.distribute.sums import PRESENT, Collecting, View, total_sums
from natgrad.distribute.union import (
    Outline,
    digest,
    factor_names,
    names_in,
    orientation_names,
    outline,
    unite,
)
from natgrad.metrics import LayerMetrics, known_ranges, layer_metrics
from natgrad.options import Now, refuse_unknown
from natgrad.precondition.preconditioner import Preconditioner, Request
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.solver import Side, Solved
from natgrad.window import Elsewhere, Window

P = ParamSpec("P")


def announced(construct: Callable[P, None]) -> Callable[P, None]:
    """Tells the other ranks of an error in the constructor of a KFAC: they would wait for this one. Options that there
    are not are such an error, with the one that was meant.
    """
    known = inspect.signature(construct).parameters.keys()

    @functools.wraps(construct)
    def constructing(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            refuse_unknown("KFAC", options, known)
            construct(*arguments, **options)
        except Exception as error:
            model = arguments[1] if len(arguments) > 1 else options.get("model")
            if not hasattr(arguments[0], "_together") and isinstance(model, nn.Module):
                _tell_of_construction(model, options.get("strategy"), error)
            raise

    return constructing


def _tell_of_construction(model: nn.Module, strategy: Any, error: Exception) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicated = replicas(model)
    if replicated is not None:
        timeout = (strategy if isinstance(strategy, Strategy) else Strategy()).timeout
        device = next(model.parameters()).device
        with contextlib.suppress(Exception):  # this rank's own error is what counts here
            Channel(replicated.process_group, device, timeout=timeout).meet(CONSTRUCTION, {"problem": str(error)})


WAIT = 60.0
"""Seconds for ranks that are asked to come together between steps."""


@dataclass(frozen=True)
class Agreed:
    """What came in on all ranks together. `ignored`: somewhere a batch came by of which nothing counts. `pace`: a
    number of the first rank's. `delivered`: some of it comes from stats workers.
    """

    terms: float
    complete: bool
    ignored: bool
    elsewhere: Elsewhere
    pace: float
    delivered: bool


@dataclass(frozen=True)
class Attendance:
    """A step in which some ranks may have no batches any more: what those know of it who have. `first` is one of them,
    `rates` holds the learning rates, `present` the parameters with a gradient.
    """

    first: int
    everybody: bool
    now: Now
    usable: bool | None
    rates: Mapping[str, float]
    present: Sequence[str]


@dataclass(frozen=True)
class Gathered:
    """Everything that the ranks have in parts, on all of them. `told` are facts of each rank."""

    sums: Mapping[Factor, Tensor]
    whole: Whole | None
    sides: Mapping[Hashable, Side]
    told: Sequence[Any]


class Together:
    """The other ranks, as `KFAC` sees them."""

    def __init__(
        self,
        spread: Spread,
        registry: Registry,
        parameters: Mapping[str, Tensor],
        wrapper: nn.parallel.DistributedDataParallel,
    ) -> None:
        self.spread = spread
        self._wrapper = wrapper
        self._disappointed = False
        self._one_backward = False  # fed the last step that took statistics, on all ranks
        self._registry = registry
        self._parameters = parameters
        self._drawn: tuple[int, Outline, str] | None = None  # of this version of the registry

    @property
    def channel(self) -> Channel:
        """What everything goes through."""
        return self.spread.channel

    def _outline(self) -> tuple[Outline, str]:
        if self._drawn is None or self._drawn[0] != self._registry.version:
            drawn = outline(self._registry)
            self._drawn = (self._registry.version, drawn, digest(drawn))
        return self._drawn[1], self._drawn[2]

    # Statistics

    def agree_on_statistics(self, step: int, window: Window, pace: float, delivered: bool) -> Agreed:
        """Finishes the window and compares notes: which blocks there are, which had statistics anywhere. A rank that
        cannot go on says so, and none does.
        """
        place = f"the statistics of step {step}"
        problem: Exception | None = None
        complete = False
        try:
            complete = window.finish()
        except Exception as error:  # told to all, and raised here
            problem = error
        idle = [n for n, (_, one) in enumerate(orientation_names(self._registry)) if not one.has_pending]
        empty = [n for n, one in enumerate(factor_names(self._registry).values()) if one.pending is None]
        facts = {
            "blocks": self._outline()[1],
            "terms": window.terms,
            "complete": complete,
            "backwards": window.backwards,
            "ignored": window.ignored,
            "idle": idle,
            "empty": empty,
            "pace": pace,
            "delivered": delivered,
            "problem": "" if problem is None else f"{type(problem).__name__}: {problem}",
        }
        told = self.channel.meet(place, facts)
        if problem is not None:
            raise problem
        for rank, one in enumerate(told):
            if one["problem"]:
                raise OutOfStepError(f"rank {rank} cannot go on at {place}: {one['problem']}")
        outlines = self._unite([one["blocks"] for one in told], place)
        used, filled = set(), set()
        for drawn, one in zip(outlines, told, strict=True):
            orientations, factors = names_in(drawn)
            used |= {name for n, name in enumerate(orientations) if n not in set(one["idle"])}
            filled |= {name for n, name in enumerate(factors) if n not in set(one["empty"])}
        self._one_backward = all(one["backwards"] == 1 for one in told)
        elsewhere = Elsewhere(
            [one for name, one in orientation_names(self._registry) if name in used and not one.has_pending],
            [one for name, one in factor_names(self._registry).items() if name in filled and one.pending is None],
        )
        return Agreed(
            sum(one["terms"] for one in told),
            all(one["complete"] for one in told),
            any(one["ignored"] for one in told),
            elsewhere,
            told[0]["pace"],
            any(one["delivered"] for one in told),
        )

    @property
    def expects_no_more(self) -> bool:
        """Whether the backward pass that is ending should be the last before the step: it is the one that DDP averages
        gradients in, and the step before had one on all ranks.
        """
        wrapper = self._wrapper
        # Ranks that may leave early meet at the beginning of every step first.
        once = self._one_backward and not self._disappointed
        return once and wrapper.require_backward_grad_sync and not wrapper._join_config.enable

    def disappoint(self) -> None:
        """What was expected did not come: from now on nothing is."""
        self._disappointed = True

    def _unite(self, digests: Sequence[str], place: str) -> list[Outline]:
        """The outlines of all ranks; where they differ, this one's blocks become those of all."""
        mine, own = self._outline()
        if all(other == own for other in digests):
            return [mine] * len(digests)
        outlines: list[Outline] = self.channel.meet(f"{place}: blocks", mine)
        unite(self._registry, outlines, self._parameters)
        return outlines

    # Ranks without batches

    def attend(
        self,
        step: int,
        now: Now | None = None,
        usable: Tensor | None = None,
        rates: Mapping[str, float] | None = None,
        present: Sequence[str] = (),
    ) -> Attendance:
        """Where ranks may leave early: who is there. A rank that has left says nothing of the step."""
        facts = None if now is None else (now, None if usable is None else bool(usable), rates, present)
        told = self.channel.meet(f"step {step}", facts)
        first = next(rank for rank, one in enumerate(told) if one is not None)
        return Attendance(first, None not in told, *told[first])

    def send_gradients(self, gradients: Mapping[str, Tensor | None], attendance: Attendance) -> None:
        """Brings the averaged gradients to those who had no part in them, in place: they may have to precondition."""
        if attendance.everybody:
            return
        own = [gradient for name in attendance.present if (gradient := gradients[name]) is not None]
        for same in by_dtype(own, lambda gradient: gradient.dtype):
            flat = torch.cat([gradient.flatten() for gradient in same])
            everybody = range(self.channel.size)
            flat = self.channel.broadcast(flat, attendance.first, everybody, "gradients").wait()
            parts = flat.split([gradient.numel() for gradient in same])
            torch._foreach_copy_(same, [part.view(g.shape) for part, g in zip(parts, same, strict=True)])

    # Decompositions

    def assign(self, preconditioner: Preconditioner, interval: int) -> None:
        """Places the work of all blocks."""
        self.spread.assign(
            self._registry, preconditioner.keys, preconditioner.solver, interval, solved=preconditioner.solved
        )

    def collect(
        self,
        blocks: Sequence[KroneckerBlock],
        preconditioner: Preconditioner,
        interval: int,
        step: int,
        refused: int,
        view: View = PRESENT,
    ) -> Collecting:
        """Sends the sums of all ranks to those who decompose them."""
        self.assign(preconditioner, interval)
        return self.spread.collect(blocks, f"the refresh of step {step}", refused, view=view)

    def keep_share(self, preconditioner: Preconditioner, interval: int, shares: Mapping[str, Any] | None) -> None:
        """After loading: of sums and decompositions, which all ranks have whole, this one keeps its own."""
        self.spread.forget()
        self.assign(preconditioner, interval)
        self.spread.load_shares(shares, factor_names(self._registry))
        self.spread.keep_share(self._registry)
        preconditioner.release()

    def refuse_other_state(self, step: int, blocks: Sequence[KroneckerBlock], *, fits: bool) -> None:
        """Ranks that load different checkpoints are told, before anything changes."""
        facts = (step, [block.key for block in blocks], fits)
        told = self.channel.meet("load_state_dict()", facts)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise ValueError(
                    f"the ranks load different checkpoints: rank 0 one of step {told[0][0]} with {len(told[0][1])} "
                    f"blocks, rank {rank} one of step {other[0]} with {len(other[1])}"
                )

    def shares(self) -> dict[str, Any] | None:
        """For a checkpoint: who takes the statistics of what."""
        return self.spread.shares(factor_names(self._registry))

    # Everything

    def gather(
        self,
        what: str,
        preconditioner: Preconditioner,
        interval: int,
        step: int,
        *,
        decompositions: bool,
        wait: float,
        facts: Any,
    ) -> Gathered:
        """Brings everything to all ranks, which must all ask for it. Sums go to their owners first: a run that goes on
        then adds up as one does that starts from there.
        """
        answers = self._come_together(what, step, wait, facts)
        blocks = list(self._registry)
        if not blocks:
            return Gathered({}, None, {}, answers)
        self.assign(preconditioner, interval)
        collecting = self.spread.collect(blocks, what, 0, rounded=False)
        collecting.adopt()
        whole = collecting.finish()
        collecting.settle()
        sides: Mapping[Hashable, Side] = {}
        if decompositions:
            sides = self.spread.gathered_sides(preconditioner.shapes(), preconditioner.sides, preconditioner.solver)
        return Gathered(self.spread.gathered_sums(self._registry.factors()), whole, sides, answers)

    def gather_solved(
        self, request: Request, solved: Solved, solver: str
    ) -> tuple[dict[Hashable, Side], dict[Hashable, list[bool]]]:
        """Decompositions that have not been taken over yet, and which of them failed, on all ranks."""
        sides = self.spread.gathered_from_solvers(request.shapes, solved.sides, solver, request.placed)
        own = {number: solved.failed[key] for number, key in enumerate(request.shapes) if key in request.factors}
        told = self.channel.meet(f"what was asked for at step {request.step}", own)
        keys = list(request.shapes)
        return sides, {keys[number]: flags for each in told for number, flags in each.items()}

    def _come_together(self, what: str, step: int, wait: float, facts: Any = None) -> list[Any]:
        """Between steps: all ranks are here, and have the same blocks. Returns each one's facts."""
        self.channel.roll_call(what, step, wait)
        told = self.channel.meet(f"{what} after {step} steps", {"blocks": self._outline()[1], "facts": facts})
        self._unite([one["blocks"] for one in told], what)
        return [one["facts"] for one in told]

    def whole_blocks(self, what: str, step: int) -> list[KroneckerBlock]:
        """Copies of the blocks with the statistics of all ranks, which must all ask for them."""
        self._come_together(what, step, WAIT)
        if not len(self._registry):
            return []
        sums, whole = total_sums(self.channel, list(self._registry), place=what)
        entries = checkpoint.save_blocks(self._registry, sums, whole)
        factors: dict[str, Factor] = {}
        return [checkpoint.load_block(key, entry, self._parameters, factors) for key, entry in entries.items()]

    # For people

    def layer_metrics(self, preconditioner: Preconditioner, damping: float, step: int) -> list[LayerMetrics]:
        """Of all blocks, each looked at by one rank; all ranks must ask."""
        what, rank, solver = "layers()", self.channel.rank, preconditioner.solver
        if solver == "eigen":
            self._come_together(what, step, WAIT)
            mine = [m for m in known_ranges(preconditioner) if self.spread.leads(m.block)]
        else:  # inverses do not tell: the factors do
            blocks = self.whole_blocks(what, step)
            solved = [(preconditioner.solved[b.key], b) for b in blocks if b.key in preconditioner.solved]
            mine = [
                SolvedBlock(block, member.sides, member.scale, member.solved_at)
                for member, block in solved[rank :: self.channel.size]
            ]
        told = self.channel.meet(f"{what}: what there is to see", layer_metrics(mine, solver, damping, step))
        found = {one.name: one for layers in told for one in layers}
        return [found[block.key] for block in self._registry if block.key in found]

    def counters(self) -> dict[str, int]:
        """Bytes and calls by kind of message, and what they would be called in a table."""
        tallies = self.channel.tallies.items()
        return {f"{kind}_{what}": getattr(one, what) for kind, one in tallies for what in ("bytes", "calls")}

"""The statistics and decompositions behind a KFAC: when they are due, and what happens then."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.blocks.kronecker import KroneckerBlock, Whole
from natgrad.blocks.registry import Registry
from natgrad.capture.watch import Watch
from natgrad.distribute.sums import Collecting, View
from natgrad.errors import Warner
from natgrad.metrics import Metrics
from natgrad.options import Now
from natgrad.overlap.job import Job
from natgrad.overlap.jobs import Jobs
from natgrad.overlap.saved import save_job, share_out
from natgrad.overlap.turns import Turns
from natgrad.parameters import any_nonzero
from natgrad.passes import Pass
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.roles.deliveries import Deliveries
from natgrad.settings import Settings
from natgrad.solve.solver import Side
from natgrad.together import Agreed, Together
from natgrad.window import Elsewhere, Window

PATIENCE = 5
"""How often statistics may be due and not have come from stats workers before ranks take them again."""


@dataclass
class _Early:
    """What was agreed on and sent at the end of a backward pass, for a step whose statistics are these passes."""

    contents: tuple[Pass, ...]
    agreed: Agreed
    collecting: Collecting | None


class Curvature:
    """What is known of the Fisher after `step` steps. `together` are the other ranks, where there are any.

    `follows_damping`: inverses hold their damping, and one that adapts must be in them before it is judged again.
    """

    def __init__(
        self,
        registry: Registry,
        window: Window,
        watch: Watch,
        preconditioner: Preconditioner,
        settings: Settings,
        *,
        together: Together | None,
        metrics: Metrics,
        warner: Warner,
        follows_damping: bool,
        jobs: Jobs | None = None,
        turns: Turns | None = None,
        deliveries: Deliveries | None = None,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.step = 0
        self.factors_at: int | None = None
        self.preconditioner = preconditioner
        self.solved_damping: float | None = None  # λ of the last refresh
        self._refreshed_at: int | None = None
        self._stale = False  # statistics have come in since the last refresh
        self._moved_at: int | None = None  # the step of the last statistics
        self.only_loaded = False  # what is known comes from a checkpoint: no statistics have been taken since
        self._finite: Tensor | None = None  # of factors, in the last step that took statistics; others were refused
        self._solved_version = 0
        self._registry = registry
        self._window = window
        self._watch = watch
        self._settings = settings
        self._together = together
        self._metrics = metrics
        self._warner = warner
        self._follows_damping = follows_damping
        self.jobs = jobs  # decompositions beside training
        self._turns = turns  # whose decomposition is when, where not all are at once
        self.deliveries = deliveries  # of stats workers, on ranks that compute no statistics while these do
        self._parameters = parameters
        self._asked_at = 0  # the step in which deliveries were last looked for
        self._in_vain = 0  # how often in a row none had come, on any rank
        self._at_work = False
        self._early: _Early | None = None
        self._collecting: Collecting | None = None  # sums that were sent early, for the refresh of this step
        if together is not None:
            window.on_backward = weakly(self._backward_is_over)

    @property
    def refresh_interval(self) -> int:
        """Steps from one decomposition to the next, now."""
        return self._settings.at(self.step).refresh_interval

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, statistics and decompositions are in between: a signal handler that asks for them is refused."""
        before, self._at_work = self._at_work, True
        try:
            yield
        finally:
            self._at_work = before

    def refuse_at_work(self, what: str) -> None:
        """What is called in the middle of a step would get half of it."""
        if self._at_work:
            raise RuntimeError(
                f"{what} was called in the middle of a step, by a signal handler? Note the signal, and save after the "
                "step"
            )

    # Statistics

    def arm_if_due(self, interval: int | None = None) -> None:
        """Watches the next forward pass, if it is one to take statistics of."""
        last = self.factors_at
        interval = self._settings.factor_interval.at(self.step) if interval is None else interval
        helped = self.deliveries is not None and self._in_vain < PATIENCE
        if last is None or (self.step - last >= interval and not helped):
            self._watch.arm()

    def awaits_delivery(self) -> bool:
        """Whether statistics are due in this step that stats workers take."""
        if self.deliveries is None or self._watch.armed or self.factors_at is None:
            return False
        return self.step - max(self.factors_at, self._asked_at) >= self._settings.factor_interval.at(self.step)

    def take_statistics(self, gradients: Mapping[str, Tensor | None], now: Now, usable: Tensor | None) -> bool:
        """Moves the running averages by what came in; False where nothing did and nothing was to be expected."""
        window = self._window
        early = self._drop_early()
        delivered = self._receive()
        terms, ignored, complete, elsewhere = window.terms, window.ignored, True, None
        pace = 0.0
        if self._together is not None:
            agreed = self._agree(self._together, delivered) if early is None else early.agreed
            terms, ignored, complete = agreed.terms, agreed.ignored, agreed.complete
            elsewhere, pace, delivered = agreed.elsewhere, agreed.pace, agreed.delivered
        elif self._turns is not None:
            pace = self._turns.told()
        if self.deliveries is not None and self._note_delivery(delivered) and terms == 0:
            window.close()
            return True
        if terms == 0:
            return self._go_without(gradients, ignored)
        if self._together is None:
            complete = window.finish()
        if not delivered:  # what has a gradient here need not have been used there
            self._refuse_missing(gradients, elsewhere)
        finite = window.commit(self.step, now.decay, usable, elsewhere)
        if self._together is not None:
            self._together.spread.next_turn()
        if early is not None and early.collecting is not None:
            early.collecting.adopt()
            self._collecting = early.collecting
        # What a scaler skips is in the order of things, and not counted.
        accepted = finite.sum()
        counts = accepted if usable is None else torch.where(usable.to(finite.device), accepted, len(finite))
        self._metrics.rejected_statistics.add(counts, of=len(finite))
        self._finite = finite
        self._watch.disarm()
        self.factors_at = self.step if complete else None
        self._stale, self._moved_at, self.only_loaded = True, self.step, False
        if self._turns is not None:
            self._turns.moved(self.step, now, self._registry, self.preconditioner, pace)
        return True

    def _receive(self) -> bool:
        """Adds what this rank's stats workers have sent; whether they have."""
        if self.deliveries is None:
            return False
        steps = self.deliveries.receive(self._window, self._parameters)
        if steps:
            self._metrics.delivery_age = self.step - max(steps)
        return bool(steps)

    def _note_delivery(self, delivered: bool) -> bool:
        """Whether statistics were looked for that others take; tells when they have not come for long."""
        assert self.deliveries is not None, "there are stats workers"
        awaited = not self._watch.armed
        if delivered or awaited:
            self._asked_at = self.step
            self._in_vain = 0 if delivered else self._in_vain + 1
        if self._in_vain == PATIENCE and awaited:
            self._warner.tell(
                f"no statistics have come from stats workers since step {self.factors_at}: from step {self.step} on "
                "the ranks that train take them, until others come again"
            )
        return awaited

    def _refuse_missing(self, gradients: Mapping[str, Tensor | None], elsewhere: Elsewhere | None) -> None:
        missing = [
            block.names[0]
            for block in self._window.without_statistics(elsewhere)
            if any_nonzero(gradients[layout.name] for layout in block.layouts)
        ]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)}: a gradient but no statistics in this step. Was it used outside the model's "
                "forward pass? kfac.capture(loss) before loss.backward() sees all of a loss; exclude= leaves a "
                "parameter to the optimizer. With fisher='sampled' or 'exact': does predictive= name every output that "
                "the loss looks at?"
            )

    def _agree(self, together: Together, delivered: bool = False) -> Agreed:
        pace = 0.0 if self._turns is None else self._turns.told()
        return together.agree_on_statistics(self.step, self._window, pace, delivered)

    def _go_without(self, gradients: Mapping[str, Tensor | None], ignored: bool) -> bool:
        """Nothing came in, on any rank: whether the step counts nevertheless."""
        window = self._window
        if not ignored and any_nonzero(gradients.values()):
            raise RuntimeError(
                window.problem
                or "there are gradients but no statistics: K-FAC saw no forward pass of this model followed by its "
                "backward. Call the model itself, not its submodules, after constructing KFAC; or kfac.capture(loss) "
                "before loss.backward()"
            )
        window.close()
        return ignored  # nothing of the batch counts: the next one may

    # The same, as soon as the last statistic is in

    @torch.no_grad()
    def _backward_is_over(self) -> None:
        """Sends sums on their way at the end of a backward pass, while DDP's last gradients still are, where
        decompositions are due in this step and nothing more is expected before it. They are sent as they will be after
        the step's statistics are taken: should it not come, or more come before it, nothing has happened.
        """
        together, window = self._together, self._window
        if together is None or self.deliveries is not None or not self._watch.armed:
            return
        if not together.expects_no_more or not window.is_all:
            return
        now = self._settings.at(self.step)
        if not self._is_due(now):
            return
        with self.at_work():
            self._send_early(together, now)

    def _send_early(self, together: Together, now: Now) -> None:
        window = self._window
        self._drop_early()
        agreed = self._agree(together)
        self._early = _Early(window.contents, agreed, None)
        if not agreed.complete or window.without_statistics(agreed.elsewhere):
            return  # what that means the gradients will tell
        coming, counts = window.preview(self.step, now.decay, agreed.elsewhere)
        refused = sum(int(~flag) for flag in coming.finite.values())
        self.follow_registry()
        self._early.collecting = together.collect(
            list(self._registry),
            self.preconditioner,
            now.refresh_interval,
            self.step,
            refused,
            View(coming.sum, coming.weight, lambda orientation: counts[orientation]),
        )

    def _drop_early(self) -> _Early | None:
        """Gives up what the end of a backward pass has sent, unless it still holds: then returns it."""
        early, self._early = self._early, None
        if early is None or early.contents == self._window.contents:
            return early
        self.settle(early)
        if self._together is not None:
            self._together.disappoint()
        return None

    def settle(self, early: _Early | None = None) -> None:
        """Throws away sums that are on their way since the backward pass: something else comes before the step."""
        early = self._early if early is None else early
        if early is not None and early.collecting is not None:
            early.collecting.settle()
            early.collecting = None

    # Decompositions

    def follow_registry(self) -> None:
        """Forgets the solutions of blocks that are no more."""
        if self._solved_version != self._registry.version:
            self.preconditioner.keep_only(self._registry)
            self._solved_version = self._registry.version

    def _is_due(self, now: Now) -> bool:
        """Whether all blocks are decomposed in this step."""
        if self._take_turns(now) or (self.jobs is not None and self._together is None and self.jobs.rests(self.step)):
            return False
        return self._refreshed_at is None or self.step - self._refreshed_at >= now.refresh_interval

    def _take_turns(self, now: Now) -> bool:
        """Whether layers are decomposed in turns by now: all have been twice, the first time of a single batch, which
        is not to be gone on with longer than without turns. Those that have moved most come early anyway.
        """
        after = self._refreshed_at
        if self._turns is None or after is None:
            return False
        return self._turns.watches_time or after >= now.refresh_interval

    def refresh_if_due(self, now: Now) -> None:
        """Takes over decompositions that were made beside training, and asks for those that are due."""
        self.follow_registry()
        if self.jobs is not None:
            self._note_failed(self.jobs.land(self.step, self.preconditioner, self._registry))
        solved, damping = self.preconditioner.solved, now.total_damping
        inverse = self.preconditioner.solver == "inverse"
        due = self._is_due(now) or (inverse and self._follows_damping and damping != self.solved_damping)
        everything = due and (self._stale or inverse)
        if due:
            self._refreshed_at, self._stale, self.solved_damping = self.step, False, damping
        # A block that has no solution yet gets one as soon as it has statistics; after loading it may have them.
        new = self.factors_at == self.step or bool(self.preconditioner.missing)
        new = new and not self._registry.keys() <= solved.keys()
        self.preconditioner.missing = set()
        turn = self._turn(now)
        if everything or turn or new:
            blocks = [b for b in self._registry if everything or b in turn or (new and b.key not in solved)]
            if blocks:
                self.refresh(blocks, damping)

    def _turn(self, now: Now) -> Collection[KroneckerBlock]:
        """The blocks that are to be decomposed in this step, where they take turns."""
        if self._turns is None or not self._take_turns(now):
            return ()
        turn = self._turns.at(self.step, now, self._registry, self.preconditioner)
        return {block for block in turn if self._has_moved(block, now)}

    def _has_moved(self, block: KroneckerBlock, now: Now) -> bool:
        """Whether there is something new in a block since it was decomposed."""
        member = self.preconditioner.solved.get(block.key)
        if member is None or self._moved_at is None:
            return False  # a new one comes with its statistics
        return self._moved_at > member.solved_at or self.preconditioner.solver == "inverse"

    def refresh(self, blocks: list[KroneckerBlock], damping: float) -> None:
        """Decomposes the factors of these blocks."""
        collecting = self._collected(blocks)
        if collecting is None:
            whole = None
            known = self._known(blocks)
        else:
            whole = collecting.finish()
            known = [block for block in blocks if whole.known(block)]
        if len(known) < len(blocks) and (self._refused() if whole is None else whole.refused) > 0:
            self.factors_at = None  # their first statistics were not finite: try again with the next batch
        solved = self.preconditioner.solved
        later = [] if self.jobs is None else [block for block in known if block.key in solved]
        now = known if not later else [block for block in known if block.key not in solved]
        if now:
            self._refresh_now(now, damping, whole)
        if later and self.jobs is not None:
            self.jobs.begin(self.preconditioner.prepare(later, damping, self.step, whole), self.refresh_interval)
            if self.jobs.at_once:
                self._note_failed(self.jobs.land(self.step, self.preconditioner, self._registry))
        if collecting is not None:
            collecting.settle()
        if now and now[0].straight.row.sum.device.type != "cpu":
            self.warn_of_nan()  # the device has been waited for; in the end of the step it would be once more

    def _refused(self) -> int:
        """How many factors were refused as not finite in the last step that took statistics; asks the device."""
        return 0 if self._finite is None else int((~self._finite).sum())

    def _known(self, blocks: list[KroneckerBlock]) -> list[KroneckerBlock]:
        """Those with statistics; of those that have been decomposed before nobody has to ask the device."""
        new = [block for block in blocks if block.key not in self.preconditioner.solved]
        if not new:
            return blocks
        weights = torch.stack([torch.stack([o.weight for o in b.orientations]).sum() for b in new]).tolist()
        empty = {block for block, weight in zip(new, weights, strict=True) if weight == 0}
        return [block for block in blocks if block not in empty]

    def _refresh_now(self, blocks: list[KroneckerBlock], damping: float, whole: Whole | None) -> None:
        """In the step."""
        watch = self._turns is not None and self._turns.watches_time
        device = blocks[0].straight.row.sum.device
        began = _now(device) if watch else 0.0
        self._note_failed(self.preconditioner.refresh(blocks, damping, self.step, whole))
        if self._turns is not None:
            self._turns.spent(blocks, _now(device) - began if watch else 0.0, self.preconditioner)

    def _note_failed(self, failed: int) -> None:
        self._metrics.failed_decompositions += failed
        if failed:
            self._warner.once(
                "decomposition",
                f"{failed} decompositions failed at step {{step}}, in float64 and with jitter too; "
                "the last good ones stay in use, and where there is none the factors' diagonals",
            )

    def _collected(self, blocks: list[KroneckerBlock]) -> Collecting | None:
        """The sums of all ranks, asked for now or on their way already; None where there is one process."""
        if self._together is None:
            return None
        collecting, self._collecting = self._collecting, None
        if collecting is None:
            collecting = self._together.collect(
                blocks, self.preconditioner, self.refresh_interval, self.step, self._refused()
            )
            collecting.adopt()
        return collecting

    def warn_of_nan(self) -> None:
        """Tells, once, of what was refused."""
        if self._window.scale.known:
            return  # a scaler looks for the largest scale by going too far now and then
        refused, skipped = int(self._metrics.rejected_statistics), int(self._metrics.skipped_steps)
        if refused or skipped:
            self._warner.once(
                "nan",
                f"NaN or inf came by up to step {{step}}: {refused} factor statistics were refused, and the gradients "
                f"of {skipped} steps were set to zero so far; kfac.metrics() keeps count",
            )

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        # What is under way is asked for again by who goes on from here; on several ranks by all, whoever has it.
        jobs = self.jobs
        given_up = jobs is not None and jobs.when_ready and (jobs.full or self._together is not None)
        return {
            "solver": self.preconditioner.solver,
            "damping_rule": self.preconditioner.rule,
            "step": self.step,
            "factors_at": self.factors_at,
            "refreshed_at": None if given_up else self._refreshed_at,
            "solved_damping": self.solved_damping,
            "stale": self._stale or given_up,
            "moved_at": self._moved_at,
            "shares": None if self._together is None else self._together.shares(),
        }

    def under_way(self) -> list[dict[str, Any]]:
        """Decompositions that will be taken over at a certain step, for a checkpoint: it waits for them. All ranks
        together.
        """
        if self.jobs is None or self.jobs.when_ready:
            return []
        saved = []
        for job, solved in self.jobs.finish():
            request = job.request.still(self._registry, self.preconditioner.keys)
            sides: Mapping[Hashable, Side] = solved.sides
            failed: Mapping[Hashable, list[bool]] = solved.failed
            if self._together is not None:
                sides, failed = self._together.gather_solved(request, solved, self.preconditioner.solver)
            saved.append(save_job(request, job.due, sides, failed))
        return saved

    def load(
        self,
        state: Mapping[str, Any],
        blocks: list[KroneckerBlock],
        preconditioner: Preconditioner,
        under_way: list[Job],
    ) -> None:
        """Goes on from a checkpoint, with its blocks, their solutions, and those that are still to be taken over."""
        self.settle()
        self._early = self._collecting = None
        self._registry.replace(blocks)
        self._solved_version = self._registry.version
        self.preconditioner = preconditioner
        self.step, self.factors_at = state["step"], state["factors_at"]
        self._refreshed_at, self._stale = state["refreshed_at"], state["stale"]
        self._moved_at, self.only_loaded = state["moved_at"], True
        self.solved_damping = state["solved_damping"]
        if blocks and self._together is not None:
            self._together.keep_share(preconditioner, self.refresh_interval, state["shares"])
        if self._turns is not None:
            self._turns.loaded(self._moved_at)
        if self.jobs is not None:
            share_out(under_way, preconditioner)
            self.jobs.replace(under_way)


def _now(device: torch.device) -> float:
    """The time, once the device has come to the end of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method as long as its object is there: a window must not keep alive what watches it."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (present := reference()) is not None:
            present()

    return call

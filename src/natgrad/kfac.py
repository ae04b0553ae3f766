"""The K-FAC preconditioner: what a training loop talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from natgrad import checkpoint
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.blocks.registry import Registry
from natgrad.capture.choices import VECTORS
from natgrad.capture.watch import Inputs, Watch, innermost
from natgrad.clock import Clock
from natgrad.curvature import Curvature, weakly
from natgrad.distribute.agreement import refuse_disagreement
from natgrad.distribute.assignment import planned
from natgrad.distribute.channel import Channel
from natgrad.distribute.costs import Costs, known_costs
from natgrad.distribute.joining import Joining
from natgrad.distribute.plan import Plan
from natgrad.distribute.replicas import replicas
from natgrad.distribute.spread import Spread
from natgrad.distribute.strategy import Strategy, checked_strategy
from natgrad.distribute.work import work_of
from natgrad.errors import Warner
from natgrad.link import Link
from natgrad.loss_scale import LossScale
from natgrad.metrics import LayerMetrics, Metrics, known_ranges, layer_metrics
from natgrad.observer import Observer
from natgrad.options import Hyperparameter, Now, Number, Terms, choice, flag, fraction, refuse_class, whole_number
from natgrad.overlap.drift import DriftTurns
from natgrad.overlap.job import Job
from natgrad.overlap.jobs import Jobs
from natgrad.overlap.options import READY, Background, Overlap, Staggered, checked_overlap, unreachable
from natgrad.overlap.places import costs_of_two_cores
from natgrad.overlap.saved import load_jobs
from natgrad.overlap.turns import EvenTurns, Loads, Turns
from natgrad.parameters import make_choices, named_parameters, patterns
from natgrad.precondition.buffers import Buffers, Grafting, checked_grafting
from natgrad.precondition.clip import Clip
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.remaining import FALLBACKS, PER_CASE_ELEMENTS, Fallback
from natgrad.report import NO_STATISTICS, NOT_YET, Report, build_report
from natgrad.roles.helpers import Helpers, refuse_role, take_statistics, with_inverse_workers
from natgrad.roles.role import Role
from natgrad.roles.stats import Desk
from natgrad.settings import Settings
from natgrad.solve.damping import RULES
from natgrad.solve.solver import SOLVERS
from natgrad.statistics.predictive import Predictive, checked_predictive
from natgrad.together import WAIT, Gathered, Together, announced
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.controller import Controller
from natgrad.trust_region.history import History
from natgrad.trust_region.objective import Objective
from natgrad.trust_region.region import TrustRegion, checked_region
from natgrad.update import Update
from natgrad.window import FISHERS, Window, checked_accumulation

# Arguments that need not be the same on all ranks.
_OF_A_RANK = ("self", "model", "optimizer", "grad_scaler", "generator", "loss_terms", "roles")
_DEFAULT_RULE = {"eigen": "joint", "inverse": "pi"}


class KFAC:
    """Preconditions a model's gradients with the Kronecker-factored Fisher, in front of any optimizer.

    Call `step` between ``loss.backward()`` and ``optimizer.step()``, or `attach` once::

        kfac = natgrad.KFAC(model, damping=1e-3)
        kfac.attach(optimizer)

    Every numeric hyper-parameter is a number or a callable of the step.

    Args:
        model: any module; DDP and compiled models too. A DDP model's ranks share K-FAC's work.
        optimizer: where the learning rate of the KL clip is read; `attach` sets it as well.
        lr: the learning rate, where there is no optimizer to read it from.
        factor_update_steps: take statistics every so many steps.
        inv_update_steps: decompose the factors every so many steps.
        damping: λ, added to the Fisher; a `natgrad.AdaptiveDamping` finds it while training.
        damping_rule: ``"joint"`` (eigen only, its default), ``"pi"`` (default of inverse) or ``"plain"``.
        solver: ``"eigen"`` or ``"inverse"`` (Cholesky).
        factor_decay: ξ, the weight of the past in the running averages.
        kl_clip: κ: the step is scaled down so that α² vᵀ∇ stays below it; a `natgrad.TrustRegion` to bound the step
            that the optimizer really takes, or to measure with the exact Fisher; None for no clip.
        l2: the coefficient of ½ l2 |θ|² where *the loss* has such a term: its curvature is added to the Fisher, beside
            the damping. Not the optimizer's weight decay, which K-FAC does not see.
        raw_momentum: μ of a running sum m ← μ m + ∇ of raw gradients, which is preconditioned in place of ∇. 0 leaves
            momentum to the optimizer, which sums preconditioned gradients.
        grafting: ``"sgd"`` or ``"adam"`` (or a `natgrad.Grafting`): K-FAC's direction with the length, layer by layer,
            of that optimizer's update, so that its learning rate carries over.
        fisher: ``"empirical"`` (the training targets), ``"sampled"`` (targets drawn from the model) or ``"exact"``
            (their expectation; one backward per output).
        predictive: what the output stands for: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (unit variance);
            `natgrad.Categorical`, `natgrad.Bernoulli` or `natgrad.Gaussian` with options; a callable from the model's
            output to a `torch.distributions` object; or a dict of these, one per head of a dict of outputs.
        loss_terms: N, for the empirical Fisher: how many terms the loss of a whole step is a mean over, where that is
            not the number of predictions in the model's output: 1 for a summed loss, all elements for `nn.MSELoss`,
            all micro-batches together for an accumulated loss. A callable may return None: count the predictions.
        accumulated_loss: several backward passes feed a step: ``"mean"`` where each loss is divided by their number,
            the number that it is divided by where that is always the same, ``"sum"`` where it is not divided.
        grad_scaler: the `torch.amp.GradScaler` of a loop that calls `step` itself; `attach` takes it too.
        sharing: ``"expand"`` (places and tokens count as uncorrelated rows) or ``"reduce"`` (averaged over each case's
            places first: cheaper); or a dict from name patterns to these.
        batch_axis: for ``"reduce"`` on sequences, the axis of (B, T, ...) that runs over cases, or a dict from name
            patterns to axes; by default the one with the batch's size.
        doubly_factored: linear layers on flattened feature maps to give three factors, as name patterns, or as a dict
            from name patterns to the map's shape where the graph does not show it.
        doubly_factored_above: linear layers with more inputs than this are doubly factored where a feature map is
            found; None for never.
        vectors: norm layers and other vectors: ``"full"`` blocks, ``"diagonal"`` ones, or ``"optimizer"``.
        fallback: parameters whose use is not recognised: gradients ``"per-case"`` through `torch.func` where the model
            allows it, else a diagonal from the ``"batch"`` gradient, or left to the ``"optimizer"``.
        exclude: name patterns (``"head.*"``) of parameters to leave to the optimizer.
        max_factor_size: sides larger than this get a diagonal factor.
        max_vector_size: vectors longer than this get a diagonal block.
        stats_fraction: the part of each batch that statistics are taken from; by a sampled or exact Fisher in a pass of
            its own.
        unfuse_recurrent: run `nn.LSTM`, `nn.GRU` and `nn.RNN` without fused kernels on steps that take statistics.
        cuda_graph: on a GPU, replay the arithmetic of ordinary steps as a CUDA graph: the same bits, one launch.
        compile_preconditioning: compile the arithmetic of every step with `torch.compile`: some seconds once, less work
            for the host in every step.
        generator: draws the targets of the sampled Fisher, and the cases of `stats_fraction`.
        strategy: how several ranks share the work: ``"comm-opt"`` (each factor decomposed by one rank, decompositions
            sent to all), ``"layer-wise"`` (one rank does all of a layer and sends the result in every step),
            ``"hybrid"`` (a team of ranks does), ``"auto"`` (what should take the least time); or a `natgrad.Strategy`.
        grad_worker_fraction: the part of the ranks in a hybrid's team; a half by default.
        overlap: decompositions off the critical path: ``"background"`` (beside training: on CPU cores, a stream of the
            GPU, or by any `concurrent.futures.Executor` given in place of the word) or ``"staggered"`` (in the step, a
            few layers at a time); or a `natgrad.Background` or `natgrad.Staggered`. None: all at once, in the step.
        delay: a whole number k: decompositions asked for at step t are taken over at step t + k, whether they were made
            beside training or, without `overlap`, in the step; ``"ready"``: as soon as they have come.
        max_overhead: with ``"staggered"``, the part of training's time that decompositions may take: layers that have
            moved most go first.
        max_staleness: with ``"background"``, the age in steps at which a decomposition is waited for.
        roles: what `natgrad.roles.take` has returned: stats workers take the statistics, and inverse workers make the
            decompositions in the background, in place of the ranks that train.
    """

    @announced
    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr: Number | None = None,
        factor_update_steps: Number = 10,
        inv_update_steps: Number = 100,
        damping: Number = 1e-3,
        damping_rule: str | None = None,
        solver: str = "eigen",
        factor_decay: Number = 0.95,
        kl_clip: Number | TrustRegion | None = 1e-3,
        l2: Number = 0.0,
        raw_momentum: Number = 0.0,
        grafting: str | Grafting | None = None,
        fisher: str = "empirical",
        predictive: Predictive = "categorical",
        loss_terms: float | Callable[[int], float | None] | None = None,
        accumulated_loss: str | Number | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        sharing: str | Mapping[str, str] = "expand",
        batch_axis: int | Mapping[str, int] | None = None,
        doubly_factored: Iterable[str] | Mapping[str, Sequence[int]] = (),
        doubly_factored_above: int | None = 4096,
        vectors: str = "full",
        fallback: str = "per-case",
        exclude: Iterable[str] = (),
        max_factor_size: int = 16384,
        max_vector_size: int = 256,
        stats_fraction: float = 1.0,
        unfuse_recurrent: bool = True,
        cuda_graph: bool = True,
        compile_preconditioning: bool = False,
        generator: torch.Generator | None = None,
        strategy: str | Strategy = "auto",
        grad_worker_fraction: float | None = None,
        overlap: str | Overlap | Executor | None = None,
        delay: int | str | None = None,
        max_overhead: float | None = None,
        max_staleness: int | None = None,
        roles: Role | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _OF_A_RANK}
        if not isinstance(model, nn.Module):
            raise TypeError(f"KFAC takes the model itself, an nn.Module, got {type(model).__name__}")
        choice("fisher", fisher, FISHERS)
        predictive = checked_predictive(predictive)
        choice("vectors", vectors, VECTORS)
        choice("fallback", fallback, FALLBACKS)
        solver = choice("solver", solver, SOLVERS)
        rule = choice("damping_rule", _DEFAULT_RULE[solver] if damping_rule is None else damping_rule, RULES)
        if (solver, rule) == ("inverse", "joint"):
            raise ValueError("damping_rule='joint' needs solver='eigen'; the inverse solver knows 'pi' and 'plain'")
        region = checked_region(kl_clip)
        terms = None if loss_terms is None else Terms(loss_terms)
        rate = None if lr is None else Hyperparameter("lr", lr, above=0, inclusive=True)
        divisor = checked_accumulation(accumulated_loss)
        # Its own: one object may be given to several.
        adaptive = damping.fresh() if isinstance(damping, AdaptiveDamping) else None
        self._settings = Settings(
            damping=damping if adaptive is None else adaptive,
            factor_decay=factor_decay,
            l2=l2,
            raw_momentum=raw_momentum,
            factor_update_steps=factor_update_steps,
            inv_update_steps=inv_update_steps,
            region=region,
            others=[one for one in (rate, terms, divisor) if isinstance(one, Hyperparameter)],
        )
        graft = checked_grafting(grafting)
        scale = LossScale(grad_scaler)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        whole_number("max_factor_size", max_factor_size)
        whole_number("max_vector_size", max_vector_size)
        flag("unfuse_recurrent", unfuse_recurrent)
        fraction("stats_fraction", stats_fraction)
        if stats_fraction < 1 and isinstance(batch_axis, int) and batch_axis != 0:
            raise ValueError("stats_fraction takes a part of the first axis: it does not work with another batch_axis")

        spreading = checked_strategy(strategy, grad_worker_fraction)
        self._helpers: Helpers | None = None
        self._role = roles
        if roles is not None:
            refuse_role(roles, fisher)
            if roles.trains and roles.stats + roles.inverse:
                self._helpers = Helpers(roles, innermost(model), owner=self)
                if self._helpers.inverse is not None:
                    overlap = with_inverse_workers(overlap, self._helpers.inverse)
        overlapping = checked_overlap(overlap, delay, max_overhead, max_staleness)
        replicated = replicas(model)
        ranks = 1 if replicated is None else replicated.process_group.size()
        if overlapping is not None and adaptive is not None and solver == "inverse":
            raise ValueError(
                "AdaptiveDamping with solver='inverse' inverts all factors whenever λ changes: overlap= and delay= do "
                "not go with it; use solver='eigen'"
            )
        when_ready = isinstance(overlapping, Background) and overlapping.delay == READY
        if when_ready and ranks > 1 and spreading.team_size(ranks) != 1:
            raise ValueError(
                "delay='ready' on several ranks needs one owner for each layer, who alone takes over what it has made: "
                "use strategy='layer-wise', or a number of steps, after which all ranks do"
            )
        if replicated is not None and (adaptive is not None or (region is not None and region.curvature == "exact")):
            raise ValueError(
                "AdaptiveDamping and TrustRegion(curvature='exact') look at one rank's batch, and this model is "
                f"replicated on {ranks} ranks: use a number or a schedule"
            )
        if replicated is not None and solver == "inverse" and region is not None and region.of == "step":
            raise ValueError(
                "TrustRegion(of='step') measures steps with factors, and on several ranks solver='inverse' leaves them "
                "apart: use solver='eigen'"
            )
        self._model = innermost(model)
        self._parameters = named_parameters(model)
        choices = make_choices(self._parameters, sharing, batch_axis, doubly_factored, doubly_factored_above, vectors)
        self._link = Link(self._parameters, optimizer, rate)
        self._registry = Registry(
            self._parameters,
            max_factor_size=max_factor_size,
            max_vector_size=max_vector_size if vectors == "full" else 0,
        )
        self._said = {
            "overlap": overlap,
            "delay": delay,
            "stats_fraction": None if stats_fraction == 1 else stats_fraction,
        }
        self._cuda_graph = flag("cuda_graph", cuda_graph)
        self._compiled = flag("compile_preconditioning", compile_preconditioning)
        self._together: Together | None = None
        self._joining: Joining | None = None
        if replicated is not None:
            device = self._device
            channel = Channel(replicated.process_group, device, timeout=spreading.timeout)
            refuse_disagreement(channel, self._parameters, given)
            spread = Spread(channel, spreading, device)
            self._together = Together(spread, self._registry, self._parameters, replicated)
            self._joining = Joining(replicated, device, weakly(self._shadow))
        self._metrics = Metrics()
        self._history = History()
        self._warner = Warner()
        if (words := unreachable(overlapping, inv_update_steps)) is not None:
            self._warner.once("max_staleness", words)
        self._watch = Watch(model, self, KFAC._observe, unfuse=unfuse_recurrent)
        runner = Fallback(innermost(model), fallback, PER_CASE_ELEMENTS)
        self._window = Window(
            self._registry,
            self._parameters,
            fisher=fisher,
            predictive=predictive,
            generator=generator,
            choices=choices,
            fallback=runner,
            accumulated=divisor,
            scale=scale,
            takes=_everything if self._together is None else self._together.spread.takes,
            fraction=stats_fraction if fisher == "empirical" else 1.0,
            warn=self._warner.once,
        )
        self._observer = Observer(
            innermost(model),
            self._parameters,
            self._window,
            runner,
            self._link,
            exclude=patterns("exclude", exclude, self._parameters),
            fraction=1.0 if fisher == "empirical" else stats_fraction,
            terms=terms,
            warner=self._warner,
            expect_backward=self._watch.expect_backward,
        )
        observer = self._observer  # not through self: a KFAC that nobody holds must go at once
        again = Objective(innermost(model), predictive, lambda: observer.targets, runner.unobserved)
        self._control = Controller(region, adaptive, again)
        self._update = Update(self._parameters, self._registry, self._link, self._control, graft)
        self._observer.on_exchange = self._update.forget
        self._curvature = Curvature(
            self._registry,
            self._window,
            self._watch,
            self._new_preconditioner(solver, rule),
            self._settings,
            together=self._together,
            metrics=self._metrics,
            warner=self._warner,
            follows_damping=adaptive is not None,
            jobs=self._new_jobs(overlapping, solver, spreading),
            turns=self._new_turns(overlapping, spreading),
            deliveries=None if self._helpers is None else self._helpers.deliveries,
            parameters=self._parameters,
        )
        self._watch.arm()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:  # it would have no effect
            raise AttributeError(
                f"{name} is an option of construction: KFAC(model, {name}=...). Numbers that are to change while "
                "training goes on can be callables of the step there, such as natgrad.schedules"
            )
        super().__setattr__(name, value)

    @property
    def _step(self) -> int:
        return self._curvature.step

    @property
    def _preconditioner(self) -> Preconditioner:
        return self._curvature.preconditioner

    def _new_preconditioner(self, solver: str, rule: str) -> Preconditioner:
        others = None if self._together is None else self._together.spread
        return Preconditioner(solver, rule, compiled=self._compiled, cuda_graph=self._cuda_graph, others=others)

    def _new_jobs(self, overlap: Overlap | None, solver: str, strategy: Strategy) -> Jobs | None:
        if not isinstance(overlap, Background):
            return None
        costs = self._costs(strategy)
        return Jobs(
            overlap,
            device=self._device,
            solver=solver,
            several=self._together is not None,
            metrics=self._metrics,
            warner=self._warner,
            costs=cache(lambda: (costs(), costs_of_two_cores(strategy.costs))),
        )

    def _costs(self, strategy: Strategy) -> Callable[[], Costs]:
        """Of the device; where they are to be measured, when they are first asked for."""
        device = self._device
        if self._together is not None:
            return self._together.spread.costs
        return cache(lambda: known_costs(strategy.costs, device))

    def _new_turns(self, overlap: Overlap | None, strategy: Strategy) -> Turns | None:
        if not isinstance(overlap, Staggered):
            return None
        spread = None if self._together is None else self._together.spread
        loads = Loads(self._costs(strategy), dict if spread is None else lambda: spread.assignment.solver_of)
        if overlap.max_overhead is None:
            return EvenTurns(loads)
        total = None if spread is None else lambda flat: spread.channel.total(flat, "factors")
        return DriftTurns(overlap.max_overhead, loads, total)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    # In the training loop

    @property
    def targets(self) -> Any:
        """The targets of the next batch, for predictives that must know which predictions count: `Categorical`."""
        return self._observer.targets

    @targets.setter
    def targets(self, targets: Any) -> None:
        self._observer.targets = targets

    @property
    def objective(self) -> Callable[[], Tensor] | None:
        """A function that computes the present batch's loss anew, ``lambda: loss_of(model(x), y)``: what adaptive
        damping and an exact trust region ask for, before every ``optimizer.step()``. It leaves no trace in the model.
        """
        return self._control.closure

    @objective.setter
    def objective(self, closure: Callable[[], Tensor] | None) -> None:
        if closure is not None and not callable(closure):
            raise TypeError(f"kfac.objective must be a function without arguments, or None, got {closure!r}")
        self._control.closure = closure

    def attach(self, optimizer: torch.optim.Optimizer, *, grad_scaler: torch.amp.GradScaler | None = None) -> KFAC:
        """Preconditions right before every ``optimizer.step()`` from now on; the loop does not change.

        `grad_scaler` is the scaler that steps the optimizer, in loops with float16.
        """
        scale = self._window.scale if grad_scaler is None else LossScale(grad_scaler)
        self._link.attach(optimizer, self._before_optimizer, self._after_optimizer)
        self._window.scale = scale
        self._warn_of_momentum()
        self._curvature.arm_if_due()
        return self

    def _warn_of_momentum(self) -> None:
        """One momentum is meant, not two."""
        momentum = self._link.momentum
        if momentum > 0 and self._settings.momentum.at(self._step) > 0:
            self._warner.once(
                "momentum",
                f"raw_momentum sums gradients before preconditioning, and the optimizer's momentum {momentum:g} sums "
                "them again after it: use one of the two",
            )

    def detach(self) -> None:
        """Undoes `attach` and removes every hook. Harmless at any time; `attach` or `step` starts again."""
        self._link.detach()
        self._window.close()
        self._watch.disarm()
        if self._curvature.jobs is not None:
            self._curvature.jobs.close()

    def capture(self, loss: Tensor, *, outputs: Any = None, terms: float | None = None, targets: Any = None) -> None:
        """Takes statistics from this loss's graph, for loops whose loss does not come from one call of the model.

        Call it before ``loss.backward()``. It replaces what the model's own calls since the last backward would
        have given. `terms` is how many terms the loss is a mean over (default: `loss_terms`, or the predictions
        in `outputs`, or those of one call of the model that is part of it); `outputs` is what a sampled or exact
        Fisher draws targets for, `targets` what says which predictions count (default: `targets` of this object). On
        steps that take no statistics it does nothing.
        """
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise ValueError("capture takes a loss that is attached to its graph, before backward()")
        if not self._watch.armed:
            return
        self._observer.refuse_foreign(loss)
        if outputs is None and self._window.fisher != "empirical":
            raise ValueError(f"fisher={self._window.fisher!r} draws its own targets: pass capture(loss, outputs=...)")
        if outputs is None and terms is None and not self._observer.knows_terms:
            terms = self._window.automatic_terms()
            if terms is None:
                raise ValueError(
                    "how many terms is this loss a mean over? Pass capture(loss, terms=...), or outputs= to count "
                    "predictions, or loss_terms= at construction"
                )
        self._window.forget_automatic()
        if targets is not None:
            self.targets = targets
        # The loss's graph holds every use; a sampled or exact Fisher differentiates the outputs instead.
        self._refuse_nothing(self._observer.tap(loss if outputs is None else outputs, terms=terms, loss=loss))

    def step(self) -> None:
        """Replaces the gradients by damped, clipped natural gradients, after taking in statistics and decomposing
        factors where they are due.
        """
        if self._link.attached:
            raise RuntimeError(
                "this KFAC is attached: optimizer.step() calls it already, and twice would be once too often"
            )
        if not self._gradients_present():
            raise RuntimeError("no parameter has a gradient: call kfac.step() after loss.backward()")
        if not self._watch.armed and not self._preconditioner.solved:
            self._watch.arm()
            raise RuntimeError(
                "this KFAC was detached before it had statistics; it observes again from now on: "
                "call step() after the next backward()"
            )
        self._window.scale.refuse_scaled(self._link.optimizer)
        if self._control.needs_optimizer:
            self._link.follow(self._after_optimizer)
        self._advance()

    def _before_optimizer(self) -> None:
        if self._gradients_present():
            if self._watch.armed:
                self._window.scale.refuse_unknown()
            self._advance()

    @torch.no_grad()
    def _advance(self) -> None:
        now = self._settings.at(self._step)
        self._refuse_lacking_optimizer()
        self._control.check(self._step)
        self._link.read()
        usable = self._window.scale.unscale(self._link.optimizer)
        gradients = self._link.gradients()
        if self._joining is not None and self._joining.enabled:
            self._take_along(now, gradients, usable)
        self._go_on(now, gradients, usable)

    def _go_on(self, now: Now, gradients: Mapping[str, Tensor | None], usable: Tensor | None) -> None:
        """A step, from gradients to natural ones."""
        with self._curvature.at_work():
            self._do_step(now, gradients, usable)

    def _do_step(self, now: Now, gradients: Mapping[str, Tensor | None], usable: Tensor | None) -> None:
        if self._helpers is not None:
            self._helpers.tell(self._warner)
        if self._watch.armed or self._curvature.awaits_delivery():
            with self.clock.part("statistics"):
                came_in = self._curvature.take_statistics(gradients, now, usable)
            if not came_in:
                return
        with self.clock.part("solve"):
            self._curvature.refresh_if_due(now)
        if self._control.needs_optimizer:
            self._control.begin(self._step, now, self._moving())
        with self.clock.part("precondition"):
            clip, finite = self._update.replace(gradients, self._preconditioner, now, step=self._step, usable=usable)
        if finite is not None:
            self._metrics.skipped_steps.add(finite)
            if finite.device.type == "cpu":  # asking is free; on a GPU the next decomposition tells
                self._curvature.warn_of_nan()
        self._metrics.damping = now.damping
        self._curvature.step += 1
        self._warner.step = self._step
        self._metrics.clip = clip
        if not self._control.cuts_steps:
            self._note(clip, now.cap)
        if not self._control.waiting:
            self.targets = None  # the next batch has its own
        self._curvature.arm_if_due(now.next_factor_interval)
        if self._curvature.deliveries is not None:
            self._curvature.deliveries.send_if_due(self._step, now.next_factor_interval)

    # Helpers

    def help(self, batches: Iterable[Any], *, forward: Callable[[nn.Module, Any], Any] | None = None) -> None:
        """On a stats worker (`natgrad.roles`), in place of a training loop: receives parameters, takes statistics of
        its own batches with them, and sends these to the ranks that train, until training is over.

        `batches` can be gone through again and again. `forward` runs the model on one; by default on its first part.
        """
        if self._role is None or self._role.name != "stats":
            raise RuntimeError("help() is for stats workers: KFAC(model, roles=role) where role.name is 'stats'")
        desk = Desk(self._role)
        try:
            take_statistics(desk, self._model, self._window, self._watch.arm, batches, forward)
        finally:
            desk.close()

    # Ranks with fewer batches

    @property
    def joinable(self) -> Any:
        """For ranks with fewer batches than others: ``Join([model, kfac.joinable])`` of
        `torch.distributed.algorithms`, in place of ``model.join()``.
        """
        if self._joining is None:
            raise RuntimeError("this KFAC has one process: there is nobody to join")
        if self._control.needs_optimizer and self._joining is not None:
            raise ValueError(
                "a rank without batches takes no optimizer steps: Join does not go with TrustRegion(of='step')"
            )
        return self._joining

    def _take_along(self, now: Now, gradients: Mapping[str, Tensor | None], usable: Tensor | None) -> None:
        """Tells ranks that have no more batches what they need to do their share of this step."""
        assert self._together is not None, "there are other ranks"
        present = [name for name, gradient in gradients.items() if gradient is not None]
        rate = self._link.rates(self._step)
        rates = {name: float(rate(name)) for name in present}
        attendance = self._together.attend(self._step, now, usable, rates, present)
        self._together.send_gradients(gradients, attendance)

    @torch.no_grad()
    def _shadow(self) -> None:
        """A step of the other ranks, on one that has no batches any more."""
        assert self._together is not None, "there are other ranks"
        attendance = self._together.attend(self._step)
        device = self._device
        usable = None if attendance.usable is None else torch.tensor(attendance.usable, device=device)
        gradients: dict[str, Tensor | None] = dict.fromkeys(self._parameters)
        gradients |= {name: torch.zeros_like(self._parameters[name]) for name in attendance.present}
        self._together.send_gradients(gradients, attendance)
        self._link.take_over(attendance.rates)
        self._go_on(attendance.now, gradients, usable)

    def _refuse_lacking_optimizer(self) -> None:
        region = self._control.region
        if region is not None and region.of == "gradient" and not self._link.has_rate:
            raise ValueError(
                "the KL clip needs the learning rate: pass optimizer= or lr=, attach(optimizer), or switch it off "
                "with kl_clip=None"
            )
        if self._control.needs_optimizer and self._link.optimizer is None:
            raise ValueError(
                "AdaptiveDamping and TrustRegion(of='step') look at what the optimizer does: attach(optimizer), or "
                "pass optimizer="
            )
        if self._control.adapts and self._link.maximises:
            raise ValueError("AdaptiveDamping compares losses that fall: minimise the negative, without maximize=True")

    def _moving(self) -> dict[str, Tensor]:
        """The parameters that the optimizer moves."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if self._link.holds(parameter) and parameter.is_floating_point() and parameter.numel()
        }

    def _after_optimizer(self) -> None:
        if self._control.waiting:
            cap = self._control.cap
            clip = self._control.finish(self._moving(), self._preconditioner.quadratic)
            self.targets = None
            before = self._metrics.clip
            if clip is not None:
                self._note(clip if before is None else replace(clip, factor=clip.factor * before.factor), cap)

    def _note(self, clip: Clip | None, cap: float | None) -> None:
        """Takes down how far the last step went."""
        self._metrics.clip = clip
        if clip is not None:
            self._history.add(self._step - 1, self._metrics.damping, cap, clip)

    # Statistics

    def _observe(self, inputs: Inputs, output: Any) -> None:
        """The model's forward hook, on armed steps."""
        if torch.is_grad_enabled():
            with self.clock.part("statistics"):
                reasons = self._observer.see(inputs, output)
            self._refuse_nothing(reasons)

    def _refuse_nothing(self, reasons: str | None) -> None:
        if reasons is not None:
            self.detach()
            raise ValueError(f"no parameter of this model can be preconditioned ({reasons})")

    def _gradients_present(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters.values())

    # Looking inside

    @property
    def clock(self) -> Clock:
        """Where the time of steps goes: set it to a `natgrad.Clock` of the model's device to find out."""
        return self._window.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        refuse_class("kfac.clock", clock)
        if not isinstance(clock, Clock):
            raise TypeError(f"kfac.clock must be a natgrad.Clock, such as natgrad.Clock(device), got {clock!r}")
        self._window.clock = clock
        if self._together is not None:
            self._together.channel.clock = clock

    @property
    def last_damping(self) -> float | None:
        """λ of the last step; None before the first."""
        return self._metrics.damping

    @property
    def clip(self) -> Clip | None:
        """``predicted_kl`` and the ``factor`` ν of the last step, as tensors that nobody has waited for; `metrics` has
        them as numbers. None before the first step.
        """
        return self._metrics.clip

    @property
    def blocks(self) -> list[KroneckerBlock]:
        """The Fisher blocks found so far; each has `names` and `to_dense()`. On several ranks each has a part of the
        statistics: `gather_blocks` brings them together.
        """
        return list(self._registry)

    @torch.no_grad()
    def gather_blocks(self) -> list[KroneckerBlock]:
        """The blocks with the statistics of all ranks, which must all call it; copies, to look at."""
        if self._together is None:
            return self.blocks
        self._curvature.refuse_at_work("gather_blocks()")
        self._curvature.settle()
        return self._together.whole_blocks("gather_blocks()", self._step)

    @property
    def damping(self) -> float:
        """λ of the next step."""
        return self._settings.at(self._step).damping

    @property
    def steps(self) -> int:
        """How many steps have been preconditioned."""
        return self._step

    def report(self) -> Report:
        """One line a parameter: its block, factor sizes and memory, or why it is left to the optimizer. Prints as a
        table.
        """
        left = {name: self._observer.why_left(name, parameter) for name, parameter in self._parameters.items()}
        unseen = "not used in any pass seen so far" if self._registry or self._window.unrecognised else NOT_YET
        if self._curvature.only_loaded:
            unseen = NO_STATISTICS
        known = self._window.unrecognised | self._window.left
        reasons = {name: why or known.get(name, unseen) for name, why in left.items()}
        attached = "" if self._link.attached else ", not attached to an optimizer"
        sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        return build_report(
            sizes,
            self._registry,
            self._preconditioner,
            reasons,
            f"{_steps(self._step)}{attached}",
            owners={} if self._together is None else self._together.spread.owners(),
        )

    def plan(self, ranks: int | None = None, *, strategy: str | Strategy | None = None) -> Plan:
        """Who decomposes and preconditions what, how long that should take, and what is sent. Prints as a table.

        With `ranks` or `strategy` the plan of another number of ranks or strategy for the blocks of this model, which
        needs no more than one step on one process.
        """
        if len(self._registry) == 0:
            raise RuntimeError("there is nothing to plan yet: run one training step")
        interval = self._curvature.refresh_interval
        known = Strategy() if self._together is None else self._together.spread.strategy
        here = 1 if self._together is None else self._together.channel.size
        if ranks is None and strategy is None and self._together is not None:
            present = self._together.spread.plan(interval)
            if present is not None:
                return present
        wanted = known if strategy is None else checked_strategy(strategy, None)
        count = whole_number("ranks", here if ranks is None else ranks)
        assert count is not None, "there is no None to choose"
        device = self._device
        work, _ = work_of(self._registry, self._preconditioner.keys, self._preconditioner.solver, wanted)
        return planned(work, wanted, ranks=count, device=device, interval=interval)

    def __repr__(self) -> str:
        how = f"solver={self._preconditioner.solver!r}, damping_rule={self._preconditioner.rule!r}"
        more = "".join(f", {name}={value!r}" for name, value in self._said.items() if value is not None)
        state = f"{len(self._registry)} blocks, {_steps(self._step)}"
        return f"<KFAC({how}, fisher={self._window.fisher!r}{more}): {state}; print(kfac.report()) for more>"

    def metrics(self) -> dict[str, float | int | None]:
        """Numbers of the last step; `history` has them of all. Nothing waits for the device until this is called.

        ``predicted_kl`` ½δᵀFδ of the clipped step, as the quadratic model sees it, ``clip_factor`` ν, ``damping`` λ,
        ``eigenvalue_min`` / ``eigenvalue_max`` of the undamped blocks, ``factor_age`` and ``decomposition_age`` in
        steps (the oldest), ``reduction_ratio`` ρ of the last comparison (adaptive damping), and counts:
        ``rejected_statistics`` (not finite), ``failed_decompositions``, ``skipped_steps`` (gradient not finite),
        ``decompositions`` (how many so far), ``background_failures`` (decompositions beside training that failed,
        hung or were wrong, and were made again), ``late_decompositions`` (requests that had to be waited for when due).

        With helpers (`roles`) there are ``stats_workers`` and ``inverse_workers`` (connected to this rank),
        ``deliveries`` (statistics that have come), ``delivery_age`` (how many steps the last one's parameters were
        behind).

        On several ranks these are this rank's, and there are bytes and calls of every kind of message:
        ``factors_bytes``, ``factors_calls`` and so on.
        """
        numbers = self._metrics.snapshot(self._preconditioner, step=self._step, factors_at=self._curvature.factors_at)
        if self._control.adapts:
            numbers["reduction_ratio"] = self._control.ratio
        if self._helpers is not None:
            numbers |= {"delivery_age": self._metrics.delivery_age, **self._helpers.counters()}
        return numbers if self._together is None else {**numbers, **self._together.counters()}

    def layers(self, *, alone: bool = False) -> list[LayerMetrics]:
        """Range of eigenvalues, condition number and age of every decomposed block. Waits for the device, and with
        ``solver="inverse"`` decomposes all factors: for looking now and then.

        Several ranks must all call it; `alone`, one asks nobody, and sees the blocks whose eigenbases it holds.
        """
        damping = self.damping if self.last_damping is None else self.last_damping
        if self._together is None or alone:
            return layer_metrics(known_ranges(self._preconditioner), self._preconditioner.solver, damping, self._step)
        self._curvature.refuse_at_work("layers()")
        self._curvature.settle()
        return self._together.layer_metrics(self._preconditioner, damping, self._step)

    def history(self) -> dict[str, list[float | None]]:
        """``step`` (from 0), ``predicted_kl``, ``clip_factor``, ``kl_cap`` and ``damping`` of every step, the last
        10,000, as lists. Waits for the device once; checkpoints do not hold it.
        """
        return self._history.columns()

    # Checkpoints

    @torch.no_grad()
    def state_dict(self, *, decompositions: bool = True, wait: float = WAIT) -> dict[str, Any]:
        """Everything that continuing bit for bit needs, as plain tensors, numbers and strings under parameter names;
        loads with ``weights_only=True``.

        Without `decompositions` it is about half as large, and loading decomposes the present factors instead.

        Several ranks must all call it in the same step, and all get the whole: it does not depend on how many they are
        or on how they share the work. A rank that does not come within `wait` seconds makes it an error, on all that
        did, and training can go on.
        """
        self._curvature.refuse_at_work("state_dict()")
        self._curvature.follow_registry()
        generator = self._window.generator
        draws = None if generator is None else generator.get_state()
        gathered = Gathered({}, None, self._preconditioner.sides, [(draws, self._metrics.state())])
        if self._together is not None:
            self._curvature.settle()
            gathered = self._together.gather(
                "state_dict()",
                self._preconditioner,
                self._curvature.refresh_interval,
                self._step,
                decompositions=decompositions,
                wait=wait,
                facts=(draws, self._metrics.state()),
            )
        counts = [counted for _, counted in gathered.told]
        # Steps are skipped by all ranks together; the rest happens to each apart.
        summed = {name: sum(one[name] for one in counts) for name in counts[0]}
        member_keys, solved = self._preconditioner.keys, self._preconditioner.solved.values()
        return {
            "version": checkpoint.VERSION,
            **self._curvature.state(),
            "metrics": {**summed, "skipped_steps": counts[0]["skipped_steps"]},
            "generator": None if draws is None else [state for state, _ in gathered.told],
            "schedules": self._settings.state(),
            "buffers": self._update.buffers.state(),
            "blocks": checkpoint.save_blocks(self._registry, gathered.sums, gathered.whole),
            "decompositions": checkpoint.save_solved(solved, member_keys, gathered.sides) if decompositions else None,
            "under_way": self._curvature.under_way() if decompositions else [],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, also before the first forward pass. One that does not fit raises, and
        changes nothing. Several ranks must all load the same one; it may be of another number of ranks.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict takes what state_dict() returned, got {type(state).__name__}")
        blocks = [
            block
            for block in checkpoint.load_blocks(state, self._parameters)
            if not any(map(self._observer.excludes, block.parameters)) and not self._window.leaves(block)
        ]
        rule = self._preconditioner.rule
        preconditioner = self._new_preconditioner(self._preconditioner.solver, rule)
        same = state["solver"] == preconditioner.solver and (
            preconditioner.solver == "eigen" or state["damping_rule"] == preconditioner.rule
        )
        fits = state["decompositions"] is not None and same
        under_way: list[Job] = []
        if fits:
            checkpoint.load_solved(state["decompositions"], blocks, preconditioner)
            under_way = load_jobs(state["under_way"], blocks, preconditioner.solver, rule)
        rank = 0 if self._together is None else self._together.channel.rank
        generator = checkpoint.load_generator(state["generator"], self._window.generator, rank, state["step"])
        buffers = Buffers.load(state["buffers"], self._parameters)
        self._settings.check(state["schedules"])
        if self._together is not None:
            self._together.refuse_other_state(state["step"], blocks, fits=fits)
        self._window.close()
        self._window.unrecognised.clear()
        self._window.left.clear()
        self._watch.disarm()
        self._curvature.load(state, blocks, preconditioner, under_way)
        self._warner.step = self._step
        self._metrics.load(state["metrics"], first=rank == 0)
        self._update.buffers = buffers
        self._settings.load(state["schedules"])
        if generator is not None and self._window.generator is not None:
            self._window.generator.set_state(generator)
        if blocks and not fits:
            self._curvature.refresh(blocks, self._settings.at(self._step).total_damping)
        self._curvature.arm_if_due()

    def __reduce__(self) -> str:
        raise TypeError(
            "a KFAC cannot be copied or pickled: it belongs to one model. Construct one for the copy and carry the "
            "statistics over with state_dict() and load_state_dict()"
        )


_OPTIONS = frozenset(signature(KFAC.__init__).parameters)


def _everything(factor: Factor) -> bool:
    return True


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'} taken"

"""The training loop: steps, evaluations, checkpoints, and telling how it goes."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from natgrad.averaging import PolyakAverage
from natgrad.clock import Clock
from natgrad.data import Data
from natgrad.foreach import all_finite
from natgrad.recipes.objects import build_kfac, build_model, build_optimizer, learning_rate
from natgrad.recipes.schema import Recipe
from natgrad.recipes.values import RecipeError
from natgrad.roles import Role
from natgrad.training.checkpoints import CheckpointError, Checkpoints
from natgrad.training.events import EXCHANGE, PARTS, Evaluated, Listener, Progress
from natgrad.training.looking import Looking
from natgrad.training.ranks import Ranks
from natgrad.training.stop import Stop
from natgrad.training.tally import Reading, Tally

PATIENCE = 10.0
"""Seconds after which people want to hear of a run again, however few steps it has taken."""

_TOP5_FROM = 100  # classes; with fewer, five guesses say little


class DivergedError(RuntimeError):
    """The weights are no numbers any more."""


class Trainer:
    """A recipe's model and data, and where training stands. `step` counts optimizer steps from the beginning.

    Everything random in a step follows from (seed, step, rank), and the order and augmentation of the data from (seed,
    epoch, case): a checkpoint needs no state of random generators, and a run that goes on from one is the same run.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        *,
        ranks: Ranks,
        listener: Listener,
        checkpoints: Checkpoints | None = None,
        roles: Role | None = None,
    ) -> None:
        training = recipe.training
        self.recipe, self.data, self.ranks, self.listener = recipe, data, ranks, listener
        self.checkpoints = checkpoints
        self.steps_per_epoch = data.train.steps(training.batch)
        whole = training.epochs * self.steps_per_epoch
        self.total_steps = whole if training.steps is None else min(whole, training.steps)
        self.classifies = training.loss == "cross-entropy"
        self.top5 = self.classifies and (data.classes or 0) >= _TOP5_FROM

        torch.manual_seed(training.seed)
        context = recipe.data.context if recipe.data.kind == "text" else None
        self.model = build_model(recipe.model, classes=data.classes, context=context).to(ranks.device)
        if training.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._refuse_misfit()
        self.running: nn.Module = self.model  # with its wrappers
        if ranks.count > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.running = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)
            self._settle_packing()
        if training.compile:
            self.running = torch.compile(self.running)  # type: ignore[assignment]
        self.optimizer = build_optimizer(recipe, self.model, ranks=ranks.count, steps_per_epoch=self.steps_per_epoch)
        self.rate = learning_rate(recipe, ranks=ranks.count, steps_per_epoch=self.steps_per_epoch)
        self.clock = Clock(ranks.device)
        self.kfac = None
        if recipe.kfac.enabled:
            self.kfac = build_kfac(recipe, self.running, steps_per_epoch=self.steps_per_epoch, roles=roles)
            self.kfac.attach(self.optimizer)
            self.kfac.clock = self.clock
        self._looking = None if self.kfac is None else Looking(self.kfac)
        self.adapts = recipe.kfac.enabled and recipe.kfac.damping == "adaptive"
        self.average = None
        if training.polyak is not None:
            self.average = PolyakAverage(self.model, decay=training.polyak).attach(self.optimizer)

        self.step = 0
        self.best: Evaluated | None = None
        self.last_checkpoint: Path | None = None
        self.saved_at: int | None = None  # the step of the last checkpoint
        self._evaluated_at = 0
        self._hopeless = 0  # evaluations in a row whose loss was no number
        self._seconds = 0.0  # of training, up to the last pause
        self._since: float | None = None
        self._began = (0, time.perf_counter())
        self._saved_at = self._told_at = time.perf_counter()
        self._tally = Tally(ranks.device, accuracy=self.classifies, sampled=True)
        self._reading: tuple[int, float, float | None, Reading] | None = None

    # The loop

    def train(self, stop: Stop) -> None:
        """Runs until the end, or until somebody asks to stop; evaluates and saves on the way."""
        self._began = (self.step, time.perf_counter())
        if self._is_due() and not self.evaluated and not self.evaluate(stop):
            return
        for _ in self.steps():
            with self.ranks.waiting_for(f"the others after step {self.step}"):
                agreed = stop.agreed(save=self._wants_checkpoint())
            if agreed.stop:
                break
            if self._is_due():
                if not self.evaluate(stop):
                    break
            elif agreed.save:
                self.save()
        self.clock.switch(None)
        self._finish_reading()

    def steps(self) -> Iterator[None]:
        """Takes one step after the other, up to the last, and tells how they go."""
        self.running.train()
        while self.step < self.total_steps:
            for inputs, targets in self._batches():
                self.one_step(inputs, targets)
                self._tell(self.recipe.training.log_every)
                yield
                if self.step >= self.total_steps:
                    break

    @property
    def evaluated(self) -> bool:
        """Whether the present weights have been."""
        return self._evaluated_at == self.step

    def _is_due(self) -> bool:
        """Whether an evaluation is, by the epoch."""
        every = max(1.0, self.recipe.training.evaluate_every * self.steps_per_epoch)
        due = math.floor(self.step / every + 1e-9) > math.floor((self.step - 1) / every + 1e-9)
        return self.step > 0 and (due or self.step == self.total_steps)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rest of the present epoch, with the time that it takes marked as the data's."""
        epoch, start = divmod(self.step, self.steps_per_epoch)
        self.clock.switch("data")
        batches = self.data.train.epoch(epoch, batch=self.recipe.training.batch, start=start)
        for pair in batches:
            self.clock.switch("model")
            yield pair
            self.clock.switch("data")
        self.clock.switch(None)

    def one_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward, backward, optimizer."""
        with self.ranks.waiting_for(f"the others in step {self.step + 1}"):
            self._take_step(inputs, targets)
        self.step += 1
        self.listener.stepped(self.step)

    def _take_step(self, inputs: Tensor, targets: Tensor) -> None:
        if self._since is None:
            self._since = time.perf_counter()
        seed_step(self.recipe.training.seed, self.step, self.ranks)
        rate = self.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        output, loss = self._loss(self.running, inputs, targets)
        loss.backward()
        if self.adapts and self.kfac is not None:
            self.kfac.objective = lambda: self._loss(self.running, inputs, targets)[1]
        self.optimizer.step()
        self._tally.add(loss, output, targets)

    def _loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        training = self.recipe.training
        with autocast(training.precision, self.ranks.device):
            output = model(inputs)
            logits = output if isinstance(output, Tensor) else output[0]  # a GoogLeNet's heads come after
            if self.classifies:
                smoothing = training.label_smoothing if model.training else 0.0  # tests have their labels as they are
                loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)
            else:
                loss = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(targets)
        return logits, loss

    # Telling

    def _tell(self, every: int) -> None:
        if self._reading is not None and self._reading[-1].arrived():
            self._finish_reading()
        waited = time.perf_counter() - self._told_at > PATIENCE
        if self.step % every == 0 or self.step == self.total_steps or waited:
            self._told_at = time.perf_counter()
            self._finish_reading()
            clip = None if self.kfac is None else self.kfac.clip
            numbers = self._tally.sums()
            if clip is not None:
                last = torch.stack([clip.predicted_kl, clip.factor]).to(numbers)
                numbers = torch.cat([numbers, last])
            damping = None if self.kfac is None else self.kfac.last_damping
            self._reading = (self.step, self.optimizer.param_groups[0]["lr"], damping, Reading(numbers))
            if self._reading[-1].arrived():
                self._finish_reading()

    def _finish_reading(self) -> None:
        """Tells what the numbers say that were asked for some steps ago."""
        if self._reading is None:
            return
        step, rate, damping, reading = self._reading
        self._reading = None
        loss, correct, _, predictions, weight, *clip = reading.values()
        seconds, times = self.clock.take()
        steps = max(1, times.get("model", 0))
        shown = PARTS[:2] if self.kfac is None else PARTS if self.ranks.count == 1 else (*PARTS, EXCHANGE)
        parts = {part: seconds.get(part, 0.0) / steps for part in shown}
        each = sum(parts.values())
        began_at, began = self._began
        pace = (time.perf_counter() - began) / max(1, step - began_at)
        mean = loss / max(weight, 1.0)
        self.listener.progress(
            Progress(
                step=step,
                epoch=step / self.steps_per_epoch,
                loss=mean,
                accuracy=correct / predictions if predictions else None,
                lr=rate,
                damping=damping,
                predicted_kl=clip[0] if clip else None,
                clip_factor=clip[1] if clip else None,
                parts=parts,
                step_seconds=each,
                cases_per_second=self.recipe.training.batch * self.ranks.count / each if each else 0.0,
                seconds=self.seconds,
                remaining=pace * (self.total_steps - step),
            )
        )
        if not math.isfinite(mean):
            self.listener.warned(f"the training loss is {mean} at step {step}")
        if self.ranks.first:  # the others' are told at the next evaluation
            self._tell_of(self.data.damaged_seen())

    def _tell_of(self, damaged: list[str]) -> None:
        for text in dict.fromkeys(damaged):
            self.listener.warned(f"skipped {text}")

    @property
    def seconds(self) -> float:
        """Spent on training steps since the beginning of the run, checkpoints and evaluations left out."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Time inside is not training's."""
        self._synchronise()
        self._seconds, self._since = self.seconds, None
        self.clock.switch(None)
        yield

    def _synchronise(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    # Evaluation

    def evaluate(self, stop: Stop) -> bool:
        """Sees all test cases once and saves; False where somebody asked to stop in the middle of it."""
        self._finish_reading()
        with self._paused(), self.ranks.waiting_for(f"the others in the evaluation after step {self.step}"):
            began = time.perf_counter()
            sums = self._sums_of_test(stop)
            if sums is None:
                return False
            self._tell_of(self.ranks.gathered(self.data.damaged_seen()))
            loss, correct, in_five, predictions, weight = self.ranks.sum(sums).tolist()
            accuracy = correct / predictions if predictions else None
            mean = loss / weight if weight else math.nan
            event = Evaluated(
                step=self.step,
                epoch=self.step / self.steps_per_epoch,
                loss=mean,
                accuracy=accuracy,
                top5=in_five / predictions if predictions and self.top5 else None,
                cases=round(weight),
                seconds=time.perf_counter() - began,
                best=_is_better(mean, accuracy, self.best),
                trained=self.seconds,
            )
            self._evaluated_at = self.step
            self.listener.evaluated(event)
            if self._looking is not None:
                looked = self._looking.look(self.step, last=self.step == self.total_steps)
                if looked is not None:
                    self.listener.looked(looked)
            self._refuse_hopeless(mean)
            before, self.best = self.best, event if event.best else self.best
            if not self.save(best=event.best):
                self.best = before  # what is not on disk is lost: a later one may still become the best
        return True

    def _refuse_hopeless(self, loss: float) -> None:
        """K-FAC drops gradients that are no numbers: weights that only give such would stay as they are for ever."""
        self._hopeless = 0 if math.isfinite(loss) else self._hopeless + 1
        if self._hopeless > 1:
            raise DivergedError(
                f"the test loss is {loss} for the second time, after step {self.step}: training cannot go on from "
                f"these weights{self._last('the last checkpoint')}. Try a smaller optimizer.lr or kfac.kl_clip, or a "
                "larger kfac.damping"
            )

    def _last(self, what: str) -> str:
        return "" if self.last_checkpoint is None else f"; {what} is {self.last_checkpoint}"

    def _sums_of_test(self, stop: Stop) -> Tensor | None:
        tally = Tally(self.ranks.device, accuracy=self.classifies, top5=self.top5)
        test, size = self.data.test, self.recipe.training.test_batch
        # As many on every rank, so that all ask equally often whether to stop.
        total = math.ceil(math.ceil(test.cases / self.ranks.count) / size)
        batches = test.once(batch=size)
        applied: AbstractContextManager[Any] = nullcontext() if self.average is None else self.average.applied()
        with applied, torch.no_grad():
            self._share_buffers()
            self.model.eval()
            for done in range(total):
                self.listener.evaluating(done, total)
                if (pair := next(batches, None)) is not None:
                    output, loss = self._loss(self.model, *pair)
                    tally.add(loss, output, pair[1], weight=len(pair[0]))
                if stop.requested():
                    return None
        self.running.train()
        return tally.sums()

    def _share_buffers(self) -> None:
        """Running statistics differ between ranks, each of which has seen other cases: the first rank's are used."""
        if self.ranks.count > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    # Checkpoints

    def _wants_checkpoint(self) -> bool:
        """Whether it is time for one, by the first rank's clock: the others do as it wants."""
        minutes = (time.perf_counter() - self._saved_at) / 60
        return self.checkpoints is not None and self.ranks.first and minutes >= self.recipe.training.checkpoint_every

    def save(self, *, best: bool = False) -> bool:
        """Makes a checkpoint: on all ranks, since each holds a part of K-FAC's state, and the first one writes.

        One that cannot be written is warned about, for the next may succeed; all ranks get to know. Weights that are no
        numbers end the run.
        """
        if self.checkpoints is None:
            return True
        with self._paused(), self.ranks.waiting_for(f"the checkpoint after step {self.step}"):
            self._saved_at = time.perf_counter()
            self._refuse_divergence()
            written = self.ranks.told(self._written(self.checkpoints, best=best))
        if not written:
            return False
        self.last_checkpoint, self.saved_at = Path(written), self.step
        self.listener.saved(self.last_checkpoint, self.step)
        return True

    def _written(self, checkpoints: Checkpoints, *, best: bool) -> str:
        """Where the first rank has written the state that all ranks have put together; nothing where it could not.

        The others are rid of it when this returns, before they wait for the first one.
        """
        state = self.state_dict()
        if not self.ranks.first:
            return ""
        try:
            path = checkpoints.save(state, step=self.step)
            if best:
                checkpoints.mark_best(path)
        except CheckpointError as error:
            self.listener.warned(str(error))
            return ""
        return str(path)

    def _refuse_divergence(self) -> None:
        finite = all_finite([parameter.detach() for parameter in self.model.parameters()])
        if self.ranks.any(finite is not None and not bool(finite)):
            raise DivergedError(
                f"the weights are not finite after step {self.step}: nothing is saved"
                f"{self._last('the last good checkpoint')}. Try a smaller optimizer.lr, or a larger kfac.damping"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs; loads with ``weights_only=True``. All ranks must ask for it together."""
        return {
            "step": self.step,
            "evaluated_at": self._evaluated_at,
            "seconds": self.seconds,
            "best": None if self.best is None else asdict(self.best),
            "ranks": self.ranks.count,
            "steps_per_epoch": self.steps_per_epoch,
            "cases": self.data.train.cases,
            "labels": list(self.data.labels),
            "names": self._names(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kfac": None if self.kfac is None else self.kfac.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of the same recipe."""
        for what, present in (("kfac", self.kfac), ("average", self.average)):
            if (state[what] is None) != (present is None):
                has = "has none" if state[what] is None else "has one"
                raise CheckpointError(f"the recipe and the checkpoint do not fit: the checkpoint {has} of {what!r}")
        for field, mine in self._names().items():
            if (before := state["names"][field]) != mine:
                raise CheckpointError(f"the checkpoint does not fit the recipe: {field} was {before!r} and is {mine!r}")
        if (before := state["steps_per_epoch"]) != self.steps_per_epoch and state["cases"] == self.data.train.cases:
            raise CheckpointError(
                f"the checkpoint does not fit: an epoch had {before} steps and has {self.steps_per_epoch} now. Keep "
                f"the product of training.batch and the number of ranks, which were {state['ranks']}"
            )
        options = self._options()
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.kfac is not None:
                self.kfac.load_state_dict(state["kfac"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not fit the recipe: {error}") from error
        for group, given in zip(self.optimizer.param_groups, options, strict=True):
            group.update(given)  # the recipe's, should they have been changed for the rest of the run
        self.step = self.saved_at = state["step"]
        self._evaluated_at = state["evaluated_at"]
        self._seconds = state["seconds"]
        self.best = None if state["best"] is None else Evaluated(**state["best"])

    def _names(self) -> dict[str, str]:
        return {"model.name": self.recipe.model.name, "optimizer.name": self.recipe.optimizer.name}

    def _options(self) -> list[dict[str, Any]]:
        """What the recipe gives the optimizer, group by group; the learning rate is set in every step."""
        known = set(inspect.signature(type(self.optimizer)).parameters) - {"lr", "params"}
        return [{name: group[name] for name in known if name in group} for group in self.optimizer.param_groups]

    def _refuse_misfit(self) -> None:
        """Shows the network one case in evaluation mode, so that a misfit of model and data is told at once."""
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise RecipeError("the model has no parameters to train")
        self.model.eval()
        try:
            with torch.no_grad():
                output = self.model(self._example())
        except Exception as error:
            raise RecipeError(
                f"the model does not take the data's cases of shape {self.data.shape}: {error}"
            ) from error
        logits = output if isinstance(output, Tensor) else output[0]
        if self.classifies and logits.shape[-1] < (self.data.classes or 0):
            raise RecipeError(
                f"the data has {self.data.classes} classes, and the model only {logits.shape[-1]} outputs"
            )
        if not self.classifies and logits[0].numel() != math.prod(self.data.shape):
            raise RecipeError(
                f"the model gives {logits[0].numel()} outputs for the {math.prod(self.data.shape)} pixels of a case"
            )

    def _settle_packing(self) -> None:
        """Takes DDP through one pass, of which nothing remains.

        After its first it packs the gradients anew, in the order in which they came, and where one lies decides in
        which order those of three and more ranks are added up. So a run that goes on would round otherwise in its first
        step than the one that was not interrupted.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        self.running.train()
        with torch.random.fork_rng(devices), autocast(self.recipe.training.precision, self.ranks.device):
            output = self.running(self._example())
            (output if isinstance(output, Tensor) else output[0]).sum().backward()
        self.running.zero_grad(set_to_none=True)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _example(self) -> Tensor:
        """Two cases as the data has them, all zero."""
        kind = torch.long if self.recipe.data.kind == "text" else torch.float32
        return torch.zeros((2, *self.data.shape), dtype=kind, device=self.ranks.device)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 where the recipe asks for it."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def seed_step(seed: int, step: int, ranks: Ranks) -> None:
    """Makes everything random in a step follow from its number, dropout and sampled targets included."""
    number = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + ranks.rank * 0x94D049BB133111EB) % 2**63
    torch.default_generator.manual_seed(number)
    if ranks.device.type == "cuda":
        torch.cuda.default_generators[ranks.device.index].manual_seed(number)


def _is_better(loss: float, accuracy: float | None, best: Evaluated | None) -> bool:
    if not math.isfinite(loss):
        return False
    if best is None:
        return True
    if accuracy is not None and best.accuracy is not None:
        return (accuracy, -loss) > (best.accuracy, -best.loss)
    return loss < best.loss

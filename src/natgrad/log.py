"""A run of your own training script, kept as ``natgrad train`` keeps its runs: metrics.jsonl and environment.json in a
folder, for ``natgrad report``.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.clock import Clock, NoClock
from natgrad.errors import NatgradWarning
from natgrad.kfac import KFAC
from natgrad.measured import Asked, Mean, Value, is_share, measured, not_a_share, number, read_number
from natgrad.options import flag, whole_number
from natgrad.training import environment
from natgrad.training.events import PARTS
from natgrad.training.looking import Looking, write_looked
from natgrad.training.metrics_file import MetricsFile, read
from natgrad.training.ranks import Ranks

_METRICS, _ENVIRONMENT = "metrics.jsonl", "environment.json"  # as in training.run, which needs more than torch
_PATIENCE = 10.0  # seconds after which a line is written, however few steps there were
_FACTS = ("kind", "step", "time", "not_finite", "name", "seed", "uses_kfac", "folder", "device", "parameters", "ranks")


class Log:
    """Writes down how a training script of your own goes, for ``natgrad report`` to draw beside other runs::

        with natgrad.Log("runs/kfac", name="K-FAC", seed=0, model=model, optimizer=optimizer, kfac=kfac) as log:
            for epoch in range(epochs):
                for x, y in loader:
                    ...
                    optimizer.step()
                    log.train(loss=loss)  # once a step; the tensor is not waited for
                with log.testing():  # off the clock
                    log.test(loss=test_loss, accuracy=right / cases)

    The clock runs from the construction on: construct it right before the loop. Of several ranks only the first writes
    (construct it on all of them, after ``init_process_group``): the losses are its own, and the others' calls do
    nothing. A disk that is full is warned about once, and training goes on.

    Args:
        folder: of this run alone.
        name: what is compared: runs of one name with several seeds are drawn as one. By default the folder's.
        seed: which of them this is.
        model: for the number of its parameters, and the device.
        optimizer: for the learning rate; call `train` before its scheduler steps.
        kfac: for its damping, clip and coverage, and for where the time of a step goes: it is given a `natgrad.Clock`
            until `close`, unless it has one of its own, in which case there are no parts.
        every: steps between lines; a test and the end write one too.
        resume: go on in a folder that holds a run already: `step` is that of your checkpoint. Lines of later steps no
            longer count, and the clock goes on where it stood.
        step: how many steps were taken before.
        about: more facts of the run, numbers and texts: ``{"batch": 128, "data": "digits", "total_steps": 1000}``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        seed: int | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        kfac: KFAC | None = None,
        every: int = 50,
        resume: bool = False,
        step: int | None = None,
        about: Mapping[str, float | str | None] | None = None,
    ) -> None:
        _refuse_types(name=name, seed=seed, model=model, optimizer=optimizer, kfac=kfac)
        if name is not None and not name.strip():
            raise ValueError("name is empty: what is this run to be called? By default it is the folder's name")
        if kfac is None and isinstance(inside := getattr(optimizer, "kfac", None), KFAC):
            kfac = inside  # natgrad.optim's have one
        facts = _checked_facts(about)
        whole_number("every", every)
        whole_number("step", step, at_least=0, none="the beginning")
        if flag("resume", resume) and step is None:
            raise ValueError("resume=True needs step=, how many steps the checkpoint had taken: training goes on there")
        self._kfac, self._optimizer, self._every = kfac, optimizer, every
        self._looking = None if kfac is None else Looking(kfac, alone=True)  # the other ranks' calls do nothing
        self._step = step or 0
        self._stepped_at: int | None = None  # the last step that `train` was called for
        self._seconds = 0.0  # of training, up to the last pause
        self._since: float | None = None  # when the clock was started; None while it stands
        self._tested_since: float | None = None
        self._means: defaultdict[str, Mean] = defaultdict(Mean)
        self._latest: dict[str, Value] = {}
        self._calls = 0
        self._asked: Asked | None = None
        self._warned = self._closed = False
        self._writes = _rank() == 0
        if not self._writes:
            return
        path = Path(folder)
        going_on = _refuse_folder(path, resume=resume)
        if going_on:
            self._seconds = _trained(path / _METRICS, self._step)
        path.mkdir(parents=True, exist_ok=True)
        parameters = _parameters(model, kfac, optimizer)
        self._device = _device(parameters)
        ranks = Ranks(count=_ranks(), device=self._device)
        self._file = MetricsFile(path / _METRICS, resume_from=self._step if going_on else None, warn=_warn)
        try:
            environment.record(path / _ENVIRONMENT, environment.describe(self._device, ranks.count))
        except OSError as error:
            _warn(f"{path / _ENVIRONMENT} cannot be written ({error.strerror or error}); the run goes on without it")
        if not going_on:
            self._file.write(
                "start",
                step=self._step,
                name=path.absolute().name if name is None else name,
                seed=seed,
                uses_kfac=kfac is not None,
                folder=str(path),
                device=ranks.described,
                parameters=sum(one.numel() for one in parameters) if parameters else None,
                ranks=ranks.count,
                **facts,
            )
        self._clock = Clock(self._device)
        self._splits = kfac is not None and isinstance(kfac.clock, NoClock)
        if kfac is not None and self._splits:
            kfac.clock = self._clock
        self._since = time.perf_counter()
        self._told_step, self._told_at = self._step, self._since
        self._clock.switch("model")

    @property
    def step(self) -> int:
        """How many steps the run has taken; what `step` wants to be when it is resumed from a checkpoint of now."""
        return self._step

    # In the training loop

    def train(
        self,
        *,
        loss: Value | None = None,
        accuracy: Value | None = None,
        error: Value | None = None,
        step: int | None = None,
        **more: Value | None,
    ) -> None:
        """Once after every ``optimizer.step()``. Tensors are added up on their device, and read without waiting for it
        when `every` steps have passed.

        The line has the means of `loss` and `accuracy` (from 0 to 1; or `error`, for 1 − accuracy) over the steps since
        the last one, and any other number as it was last. `step` where you count yourself.
        """
        step = self._next_step(step)
        if not self._writes:
            return
        means, latest = measured(loss, accuracy, error, more)
        if self._since is None:
            raise RuntimeError("train() inside of testing(): its time would be nobody's")
        now = time.perf_counter()
        if step == self._step and self._stepped_at is None:  # somebody who counts from 0
            self._told_step = step - 1
        due = step - self._told_step >= self._every or now - self._told_at > _PATIENCE
        if self._asked is not None and (due or self._asked.arrived()):
            self._finish()
        if self._splits:
            self._clock.switch("model")  # of the next step
        self._step = self._stepped_at = step
        for name, value in means.items():
            self._means[name].add(value)
        # Copies: a buffer that is used again may hold something else by the time that it is read.
        self._latest |= {name: one.clone() if isinstance(one, Tensor) else one for name, one in latest.items()}
        self._calls += 1
        if due:
            self._ask()
            if self._asked is not None and self._asked.arrived():
                self._finish()

    def test(
        self,
        *,
        loss: Value | None = None,
        accuracy: Value | None = None,
        error: Value | None = None,
        step: int | None = None,
        **more: Value | None,
    ) -> None:
        """What came out for the test cases, after the steps so far; waits for it. Outside of `testing` it is written as
        well, but what it took to compute counts as training.
        """
        self._refuse_closed()
        if step is not None:
            whole_number("step", step, at_least=0)
            self._refuse_going_back(step, self._step)
        if self._writes:
            means, latest = measured(loss, accuracy, error, more)
            numbers = {name: read_number(value) for name, value in {**means, **latest}.items()}
            if not is_share(numbers.get("accuracy")):
                raise ValueError(not_a_share("accuracy", numbers["accuracy"]))
            with self._paused():
                took = None if self._tested_since is None else time.perf_counter() - self._tested_since
                line = {"loss": None, "accuracy": None, **numbers, "seconds": took, "trained": self._seconds}
                self._file.write("test", step=self._step if step is None else step, **line)
        self._step = self._step if step is None else step

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Time inside is not training's: for tests, and for checkpoints and whatever else a run without a log would not
        do either. Waits for the device.
        """
        self._refuse_closed()
        with self._paused():
            outer, self._tested_since = self._tested_since, self._tested_since or time.perf_counter()
            try:
                yield
            finally:
                self._tested_since = outer

    def close(self) -> None:
        """The run has come to its end. ``with natgrad.Log(...) as log:`` does it too, and says what the end was where
        an exception came out; a run that is never closed counts as unfinished.
        """
        if not self._closed:
            with self._paused():
                self._end("finished")

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._closed:
            return self.close()
        with contextlib.suppress(Exception), self._paused():
            pass  # writes what is left, unless the device is what broke
        self._end(_in_words(error))

    def _end(self, reason: str) -> None:
        self._closed = True
        if self._writes:
            self._file.write("end", step=self._step, reason=reason, seconds=self._elapsed())
        if self._kfac is not None and self._writes and self._splits:
            self._kfac.clock = NoClock()

    # Steps

    def _next_step(self, given: int | None) -> int:
        """The step that `train` is called for; on other ranks than the first it is all that is kept."""
        self._refuse_closed()
        if given is None:
            step = self._step + 1
        else:
            whole_number("step", given, at_least=0)
            self._refuse_going_back(given, self._step + (self._step == self._stepped_at))
            step = given
        if not self._writes:
            self._step = self._stepped_at = step
        return step

    def _refuse_going_back(self, step: int, least: int) -> None:
        if step < least:
            raise ValueError(f"step={step} does not come after step {self._step}: steps count up, over all epochs")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this Log is closed: its run has ended. Construct another, in another folder")

    # The clock

    def _elapsed(self) -> float:
        """Seconds of training since the beginning of the run."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Time inside is not training's; everything about the steps before is written first."""
        if self._since is None:
            yield
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds, self._since = self._elapsed(), None
        try:
            self._finish()
            if self._calls:
                self._ask()
                self._finish()
            self._clock.switch(None)
            self._tell_of_kfac()
            yield
        finally:
            if not self._closed:
                self._since = self._told_at = time.perf_counter()
                self._clock.switch("model", again=True)

    # Telling

    def _ask(self) -> None:
        """Sends for the numbers of a line; begins anew."""
        if not self._splits:  # one mark a line is enough
            self._clock.switch("model")
        numbers: dict[str, Value | None] = dict.fromkeys(("loss", "accuracy", "lr", "damping"))
        if self._optimizer is not None:
            numbers["lr"] = number("lr", self._optimizer.param_groups[0]["lr"])
        if self._kfac is not None:
            numbers["damping"] = self._kfac.last_damping
        clip = None if self._kfac is None else self._kfac.clip
        numbers["predicted_kl"] = None if clip is None else number("predicted_kl", clip.predicted_kl)
        numbers["clip_factor"] = None if clip is None else number("clip_factor", clip.factor)
        numbers |= {name: mean.value() for name, mean in self._means.items()}
        numbers |= self._latest
        steps = max(1, self._step - self._told_step)
        self._asked = Asked.of(numbers, step=self._step, steps=steps, calls=self._calls)
        self._told_step, self._told_at = self._step, time.perf_counter()
        self._means.clear()
        self._latest, self._calls = {}, 0

    def _finish(self) -> None:
        """Writes the line whose numbers were asked for."""
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        numbers = asked.numbers()
        if not is_share(numbers["accuracy"]):
            self._warn_of_percent(numbers["accuracy"], asked.step)
            numbers["accuracy"] = None
        seconds, times = self._clock.take()
        # Where K-FAC marks its parts, as far as the device has got, which may be some steps further than the line.
        calls = max(1, times.get("model", 0)) if self._splits else asked.calls
        passed = calls * asked.steps / asked.calls
        parts = {part: seconds.get(part, 0.0) / passed for part in PARTS if part != "data"}
        self._file.write(
            "train",
            step=asked.step,
            **numbers,
            parts=parts if self._splits else {},
            step_seconds=sum(parts.values()),
            seconds=self._elapsed(),
        )

    def _warn_of_percent(self, accuracy: float | None, step: int) -> None:
        """Too late to refuse it: the device has only now told what it is."""
        if not self._warned:
            self._warned = True
            text = f"{not_a_share('accuracy (or 1 − error)', accuracy)} Such values are left out"
            _warn(text)
            self._file.write("warning", step=step, text=text)

    def _tell_of_kfac(self) -> None:
        """K-FAC's own lines. Called from this one place, off the clock: before every test, and at the end."""
        if self._looking is None or self._kfac is None or self._kfac.steps == 0:
            return
        if (looked := self._looking.look(self._step)) is not None:
            write_looked(self._file, looked)


# What users give


def _checked_facts(about: Mapping[str, float | str | None] | None) -> dict[str, float | str | None]:
    if about is None:
        return {}
    if not isinstance(about, Mapping) or not all(isinstance(name, str) for name in about):
        raise TypeError(f"about must be a dict from names to numbers and texts, got {about!r}")
    if wrong := [name for name in _FACTS if name in about]:
        raise ValueError(f"about may not say {', '.join(wrong)}: Log does")
    for name, fact in about.items():
        if fact is not None and not isinstance(fact, str | int | float):
            raise TypeError(f"about[{name!r}] must be a number or a text, got {type(fact).__name__}")
    return dict(about)


def _refuse_types(**given: Any) -> None:
    wanted = {"name": str, "seed": int, "model": nn.Module, "optimizer": torch.optim.Optimizer, "kfac": KFAC}
    for name, value in given.items():
        if value is not None and (not isinstance(value, wanted[name]) or isinstance(value, bool)):
            hint = f"; pass {name}=optimizer.kfac" if isinstance(getattr(value, "kfac", None), KFAC) else ""
            raise TypeError(f"{name} must be of type {wanted[name].__name__}, got {type(value).__name__}{hint}")


def _refuse_folder(folder: Path, *, resume: bool) -> bool:
    """Whether there is a run to go on with."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: choose another folder for the run")
    held = (folder / _METRICS).exists()
    if held and not resume:
        raise FileExistsError(
            f"{folder} holds a run already: choose another folder, or go on from a checkpoint with resume=True and "
            "step=, how many steps it had taken"
        )
    return held


# What is found out


def _trained(path: Path, step: int) -> float:
    """Seconds that a run had trained for at a step, as far as it has written that down."""
    fields = {"train": "seconds", "test": "trained", "end": "seconds"}
    lines = [line for line in read(path) if line["step"] <= step and line["kind"] in fields]
    return max((line.get(fields[line["kind"]]) or 0.0 for line in lines), default=0.0)


def _parameters(
    model: nn.Module | None, kfac: KFAC | None, optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    if model is not None:
        return list(model.parameters())
    if kfac is not None:
        return list(kfac._parameters.values())
    return [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]


def _device(parameters: list[nn.Parameter]) -> torch.device:
    """Where training happens; where nobody says, on the GPU if there is one in use."""
    if parameters:
        return parameters[0].device
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    # torchrun's say who they are before they have found each other.
    launched = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ.get("RANK", "0")) if launched else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _in_words(error: BaseException) -> str:
    """How a run ended; Ctrl-C as ``natgrad train`` calls it."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _warn(text: str) -> None:
    warnings.warn(f"natgrad: {text}", NatgradWarning, stacklevel=3)

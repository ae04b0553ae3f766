"""What `natgrad train` writes where there is no terminal: a line an event, for files, CI and cluster logs."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from natgrad.cli import formatting as form
from natgrad.training.events import Evaluated, Finished, Listener, Progress, Started


class Plain(Listener):
    """A listener that logs: every event but most of the progress on one line, with the time since the start.

    `every` is how many seconds lie between two lines of progress at least. Lines are flushed one by one, so that
    ``tail -f`` shows them; where they cannot be written, training goes on without them.
    """

    def __init__(self, stream: IO[str], *, every: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._beginning = clock()
        self._next_progress = self._next_saved = -float("inf")
        self._epochs = 0
        self._total = 0

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to put back; there for what `Terminal` needs."""

    def started(self, event: Started) -> None:
        """What runs where."""
        self._beginning = self._clock()
        self._epochs, self._total = event.epochs, event.total_steps
        words = [
            f"{'resume' if event.resumed else 'start'} {event.recipe}",
            f"parameters {form.count(event.parameters)}",
            f"data {event.data}",
            f"batch {form.count(event.batch)}",
            f"device {event.device}",
            f"ranks {event.ranks}",
            f"epochs {event.epochs}",
            f"steps {event.total_steps}",
            *([f"from step {event.step}"] if event.resumed else []),
            f"folder {event.folder}",
        ]
        self._write("  ".join(words))

    def progress(self, event: Progress) -> None:
        """The first one, and then one every so often."""
        now = self._clock()
        if now < self._next_progress:
            return
        self._next_progress = now + self._every
        split = form.shares(form.parts_of(event))
        parts = " ".join(f"{name} {form.share(part)}" for name, part in split.items())
        words = [
            self._where(event.epoch, event.step),
            f"loss {form.steady(event.loss):<6}",
            *([f"acc {form.percent(event.accuracy):>5}"] if event.accuracy is not None else []),
            f"lr {form.number(event.lr)}",
            *([f"damping {form.number(event.damping)}"] if event.damping is not None else []),
            *([f"KL {form.number(event.predicted_kl)}"] if event.predicted_kl is not None else []),
            *([f"clip {form.number(event.clip_factor)}"] if event.clip_factor is not None else []),
            f"{form.span(event.step_seconds)}/step{f' ({parts})' if parts else ''}",
            f"{form.rate(event.cases_per_second)} cases/s",
            f"left {form.duration(event.remaining)}",
        ]
        self._write("  ".join(words))

    def evaluated(self, event: Evaluated) -> None:
        """The test result."""
        words = [
            self._where(event.epoch, event.step),
            f"test loss {form.steady(event.loss)}",
            *([f"test acc {form.percent(event.accuracy)}"] if event.accuracy is not None else []),
            *([f"top-5 {form.percent(event.top5)}"] if event.top5 is not None else []),
            f"{form.count(event.cases)} cases in {form.span(event.seconds)}",
            *(["best"] if event.best else []),
        ]
        self._write("  ".join(words))

    def saved(self, path: Path, step: int) -> None:
        """Where the checkpoint is; one line every so often, like progress."""
        now = self._clock()
        if now >= self._next_saved:
            self._next_saved = now + self._every
            self._write(f"saved step {step}  {path}")

    def warned(self, text: str) -> None:
        """On one line, whatever it was on."""
        self._write(f"warning: {' '.join(text.split())}")

    def finished(self, event: Finished) -> None:
        """How it ended, and how to go on where it was stopped."""
        words = [
            "finished" if event.reason == "finished" else f"stopped by {event.reason}",
            f"step {event.step}/{self._total}",
            f"after {form.duration(event.seconds)}",
            *([f"best {result(event.best)}"] if event.best is not None else []),
            f"folder {event.folder}",
            *([f"checkpoint {event.checkpoint}"] if event.checkpoint is not None else []),
        ]
        self._write("  ".join(words))
        if resumable(event):
            self._write(f"to go on: {resume_command(event)}")

    def _where(self, epoch: float, step: int) -> str:
        """``epoch 3.20/10  step 480/1500``, as wide at the beginning as at the end."""
        epochs, total = str(self._epochs), str(self._total)
        return f"epoch {epoch:{len(epochs) + 3}.2f}/{epochs}  step {step:{len(total)}}/{total}"

    def _write(self, line: str) -> None:
        text = f"[{form.duration(self._clock() - self._beginning)}] {line}\n"
        try:
            self._put(text)
        except UnicodeError:
            # The stream's encoding lacks a character of a name; the rest is worth having.
            with contextlib.suppress(OSError, ValueError):
                self._put(text.encode("ascii", "replace").decode())
        except BrokenPipeError:
            discard(self._stream)
        except (OSError, ValueError):
            pass  # a full disk, a closed file: the next line may do better

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def result(event: Evaluated) -> str:
    """A test result in words; of classifiers the accuracy first."""
    accuracy = [] if event.accuracy is None else [f"test acc {form.percent(event.accuracy)}"]
    top5 = [] if event.top5 is None else [f"top-5 {form.percent(event.top5)}"]
    return ", ".join([*accuracy, *top5, f"test loss {form.steady(event.loss)}", f"at epoch {form.number(event.epoch)}"])


def resumable(event: Finished) -> bool:
    """Whether it was stopped early and left something to go on from."""
    return event.reason != "finished" and event.checkpoint is not None


def resume_command(event: Finished) -> str:
    """What to type to go on, on as many processes; folders with blanks are quoted."""
    command = "natgrad" if event.ranks == 1 else f"torchrun --nproc-per-node {event.ranks} -m natgrad"
    return f"{command} train {shlex.quote(str(event.folder))} --resume"


def discard(stream: IO[str]) -> None:
    """Sends the rest of a stream whose reader has gone nowhere, so that neither its buffer nor others' lines fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)

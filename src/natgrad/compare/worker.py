"""A process that runs one training after the other: what kills it, or spoils its GPU, ends no more than one of them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from natgrad.data import DataError
from natgrad.recipes import Recipe, RecipeError
from natgrad.training import ranks
from natgrad.training.checkpoints import CheckpointError
from natgrad.training.events import Evaluated, Listener, Started
from natgrad.training.metrics_file import MetricsFile
from natgrad.training.ranks import DeviceError, Ranks
from natgrad.training.run import METRICS, RECIPE, arithmetic, made_up, run, warnings_told
from natgrad.training.trainer import DivergedError, Trainer

WARM_UP = 3
"""Steps that each new kind of training takes before it counts, since a first step is no step: libraries load."""

_TOLD = 0.1  # seconds between two messages about steps
_PATIENCE = 10.0  # seconds for an idle process to end by itself
_GRACE = 120.0  # for a run whose comparison is gone to save

DIVERGED, CRASHED, REFUSED = "diverged", "crashed", "refused"
"""How the reasons begin of runs that did not come to their end on their own account."""


class WorkerError(Exception):
    """What keeps every run from beginning: data, device or folder, in words."""


class StoppedError(Exception):
    """Somebody asked to stop, with the signal of this name; everything is saved."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training. `kind` is shared by jobs whose steps are alike, `label` tells people which this is, and `title` of
    what it is a part.
    """

    kind: str
    title: str
    label: str
    folder: Path
    recipe: Recipe
    tuning: bool = False


Tell = Callable[[str, Any], None]
"""Gets what a run says while it goes: "steps" with (done, total), "tested" with an `Evaluated`, "warned" a text."""


class Worker:
    """Runs jobs, one at a time, in a process of its own, which is started when needed and replaced when lost.

    Signals go to it through `interrupt`: it stands apart from the terminal, which would send it all of its own.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._process: Any = None
        self._connection: Connection | None = None
        self._asked = ""  # the signal that somebody wants to stop everything with

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, job: Job, tell: Tell) -> str:
        """Runs a job and returns the reason of its end; raises where none can run, or where somebody asked to stop."""
        if self._asked:
            raise StoppedError(self._asked)
        connection = self._started()
        try:
            connection.send(job)
            while True:
                kind, value = connection.recv()
                if kind == "ended":
                    if self._asked and str(value).startswith(CRASHED) and not (job.folder / RECIPE).exists():
                        # The signal came while the process was importing: no crash of the run, which has not begun.
                        (job.folder / METRICS).unlink(missing_ok=True)
                    return self._ended(str(value))
                if kind == "impossible":
                    raise WorkerError(value)
                tell(kind, value)
        except (EOFError, OSError):
            reason = self._lost()
            if not self._asked:
                record_end(job.folder, reason)
            return self._ended(reason)

    def _ended(self, reason: str) -> str:
        if reason in signal.Signals.__members__ or (self._asked and reason.startswith(CRASHED)):
            raise StoppedError(self._asked or reason)
        if reason.startswith(CRASHED):
            self.close()  # a GPU may be of no use to this process any more
        return reason

    def _lost(self) -> str:
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process.join(_PATIENCE)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"{CRASHED}: the process ended {how}{memory}"

    def interrupt(self, number: int) -> None:
        """Passes a signal on; the run under way saves and ends. A second one does not wait for that."""
        again = bool(self._asked)
        self._asked = signal.Signals(number).name
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if again and hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)  # with its decoding processes
                elif again:
                    self._process.kill()
                else:
                    os.kill(self._process.pid, number)

    def _started(self) -> Connection:
        if self._connection is not None and self._process.is_alive():
            return self._connection
        if self._connection is not None:
            self._lost()
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._device), name="natgrad-runs")
        self._process.start()
        theirs.close()
        return self._connection

    def close(self) -> None:
        """Ends the process; one that does not end by itself is made to."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return
        process.join(_PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()


def record_end(folder: Path, reason: str, **more: str) -> None:
    """Writes into a run's metrics.jsonl how it ended, where it could not do that itself."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        MetricsFile(folder / METRICS).write("end", step=0, reason=reason, **more)


def serve(connection: Connection, device: str | None) -> None:
    """The process: runs what comes until nobody sends any more."""
    if hasattr(os, "setsid"):
        os.setsid()
    asked: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # before a run; in runs natgrad.training.stop listens
        signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
    _end_with_parent()
    warmed: set[str] = set()
    try:
        with ranks.started(device) as these:
            while True:
                job = connection.recv()
                connection.send(_result(job, these, warmed, asked, connection))
                _forget()
    except (DeviceError, DataError) as error:
        connection.send(("impossible", str(error)))
    except (EOFError, OSError):
        return


def _result(job: Job, these: Ranks, warmed: set[str], asked: list[str], connection: Connection) -> tuple[str, str]:
    try:
        if job.kind not in warmed:
            warm_up(job.recipe, these)
            warmed.add(job.kind)
        if asked:
            return ("ended", asked[-1])
        resume = (job.folder / RECIPE).exists()
        if not resume and job.folder.exists():  # only the note of an earlier crash
            (job.folder / METRICS).unlink(missing_ok=True)
        start = partial(run, job.recipe, job.folder, name=job.title, ranks=these, listener=_Relay(connection))
        try:
            done = start(resume=resume)
        except CheckpointError:
            _set_aside(job.folder / "checkpoints")
            done = start(resume=True)  # there is nothing to go on from: it begins anew
        return ("ended", done.reason if done.saved else f"{CRASHED}: its end could not be saved")
    except DivergedError as error:
        return _recorded(job, f"{DIVERGED}: {error}")
    except RecipeError as error:
        return _recorded(job, f"{REFUSED}: {error}")
    except DataError as error:
        return ("impossible", str(error))
    except KeyboardInterrupt:
        return ("ended", "SIGINT")
    except Exception as error:
        return _recorded(job, f"{CRASHED}: {type(error).__name__}: {error}", traceback=traceback.format_exc())


def _set_aside(checkpoints: Path) -> None:
    """What cannot be read now may be a matter of the disk: it is not deleted."""
    aside = checkpoints.with_name("checkpoints-unreadable")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoints.rename(aside)


def _forget() -> None:
    """A model and its K-FAC are in a cycle: they would lie beside the next one until the collector comes by."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _recorded(job: Job, reason: str, **more: str) -> tuple[str, str]:
    record_end(job.folder, reason, **more)
    return ("ended", reason)


def warm_up(recipe: Recipe, these: Ranks) -> None:
    """A few steps on made-up data: loads what a first step loads. That it fails is for the run itself to say."""
    with (
        contextlib.suppress(Exception),
        arithmetic(recipe),
        warnings_told(lambda text: None),
        contextlib.closing(made_up(recipe, these)) as data,
    ):
        trainer = Trainer(recipe, data, ranks=these, listener=Listener())
        for _ in itertools.islice(trainer.steps(), WARM_UP):
            pass


def _end_with_parent() -> None:
    """A run whose comparison was killed saves and ends, as with SIGTERM."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE)
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Relay(Listener):
    """Sends on what a run tells; of its steps only so many a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._total = 0
        self._next = 0.0

    def _send(self, kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the run will be told to end
            self._connection.send((kind, value))

    def started(self, event: Started) -> None:
        """How far it is to go."""
        self._total = event.total_steps
        self._send("steps", (event.step, event.total_steps))

    def stepped(self, step: int) -> None:
        """How far it is."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _TOLD
            self._send("steps", (step, self._total))

    def evaluated(self, event: Evaluated) -> None:
        """What came out."""
        self._send("tested", event)

    def warned(self, text: str) -> None:
        """What went wrong."""
        self._send("warned", text)

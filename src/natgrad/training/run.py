"""A run from beginning to end: its folder, its data, its trainer, and everybody who is told about it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from natgrad import data as data_package
from natgrad.recipes import Recipe, to_toml
from natgrad.recipes.objects import model_default
from natgrad.recipes.values import as_table, flat, parsed
from natgrad.roles import Role
from natgrad.training import environment
from natgrad.training.checkpoints import CheckpointError, Checkpoints
from natgrad.training.checkpoints import load as load_checkpoint
from natgrad.training.events import Evaluated, Finished, Listener, Looked, Progress, Started
from natgrad.training.files import UNFINISHED, remove_leftovers, write_text_atomically
from natgrad.training.looking import write_looked
from natgrad.training.metrics_file import MetricsFile
from natgrad.training.ranks import Ranks
from natgrad.training.stop import Stop
from natgrad.training.tensorboard import TensorBoard
from natgrad.training.trainer import Trainer

RECIPE, METRICS, ENVIRONMENT = "recipe.toml", "metrics.jsonl", "environment.json"
_CHARACTERS = 96  # of a made-up text
_OURS = {RECIPE, METRICS, ENVIRONMENT, "checkpoints", "tensorboard"}


class RunError(Exception):
    """A run that cannot begin or go on, in words for its owner."""


def new_folder(name: str, *, under: Path = Path("runs")) -> Path:
    """A folder that does not exist yet, named after the recipe and the time."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (under / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def run(
    recipe: Recipe,
    folder: Path,
    *,
    name: str,
    ranks: Ranks,
    listener: Listener,
    resume: bool = False,
    roles: Role | None = None,
) -> Finished:
    """Trains a recipe and keeps everything about it in a folder; with `resume`, goes on from its last checkpoint.
    `roles` are those of its helpers, who learn when it is over.
    """
    folder = Path(ranks.told(str(folder)))
    _refuse_folder(folder, resume=resume)
    with ExitStack() as stack:
        if roles is not None:
            stack.callback(roles.close)
        everybody = Everybody([listener] if ranks.first else [])
        stop = stack.enter_context(Stop(ranks, tell=everybody.warned).listening())
        stack.enter_context(arithmetic(recipe))
        stack.enter_context(warnings_told(everybody.warned if ranks.first else partial(_tell_of_rank, ranks.rank)))
        data = data_package.load(recipe.data, **serving(recipe, ranks))
        stack.callback(data.close)
        checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.training.keep)
        trainer = Trainer(recipe, data, ranks=ranks, listener=everybody, checkpoints=checkpoints, roles=roles)
        notes = [*_changes(folder, recipe), *_go_on(trainer, checkpoints)] if resume else []
        if ranks.first:
            _write_facts(folder, recipe, ranks, everybody, resumed=trainer.step > 0)
            ranks.begin(folder)
            stack.callback(everybody.add(TensorBoard, folder / "tensorboard", resume_from=trainer.step or None))
            everybody.add(partial(Recorder, recipe=recipe), folder / METRICS, resume_from=trainer.step or None)
        everybody.started(_beginning(trainer, name=name, folder=folder))
        for text in (*notes, *data.notes):
            everybody.warned(text)
        trainer.train(stop)
        finished = _end(trainer, stop, folder)
        everybody.finished(finished)
        return finished


def serving(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """How a recipe's data is to be served: what `natgrad.data.load` and `synthetic` take beside its options."""
    training = recipe.training
    place = data_package.Place(
        device=ranks.device, rank=ranks.rank, ranks=ranks.count, channels_last=training.channels_last
    )
    return {"seed": training.seed, "place": place, "reconstruct": training.loss == "reconstruction"}


def made_up(recipe: Recipe, ranks: Ranks) -> data_package.Data:
    """Random data of the shapes that a recipe's own has."""
    default = _CHARACTERS if recipe.data.kind == "text" else model_default(recipe.model, "num_classes")
    given = recipe.model.options.get("num_classes", recipe.model.options.get("vocabulary"))
    return data_package.synthetic(recipe.data, **serving(recipe, ranks), classes=given or default or 10)


def _refuse_folder(folder: Path, *, resume: bool) -> None:
    # os.path.exists, since that of Path raises in folders that may not be looked into.
    existing = next(path for path in (folder, *folder.parents, Path("/")) if os.path.exists(path))
    if os.path.exists(folder / RECIPE) and not resume:
        raise RunError(f"{folder} holds a run already: go on with --resume, or choose another --out")
    if not existing.is_dir():
        raise RunError(f"{existing} is a file: choose another --out for the results")
    if existing == folder and os.access(folder, os.R_OK):
        strange = sorted(name for name in os.listdir(folder) if name not in _OURS and not name.startswith(UNFINISHED))
        if strange and not os.path.exists(folder / RECIPE):
            raise RunError(f"{folder} holds something else ({strange[0]}, ...): choose another --out for the results")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunError(f"the results cannot be written: no permission to write in {existing}; choose another --out")


def _changes(folder: Path, recipe: Recipe) -> list[str]:
    """What the recipe of a run that goes on says now, and said before."""
    if not (folder / RECIPE).is_file():
        return []
    try:
        before = flat(parsed((folder / RECIPE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    now = flat(as_table(from_anywhere(recipe)))
    different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    was = [f"{name} was {before.get(name, 'default')} and is {now.get(name, 'default')}" for name in different]
    return [f"the recipe has changed since: {'; '.join(was)}"] if was else []


def _go_on(trainer: Trainer, checkpoints: Checkpoints) -> list[str]:
    """Takes over the latest checkpoint that can be read, the same on all ranks; returns what is worth a word."""
    ranks, loaded, problems = trainer.ranks, None, []
    try:
        if ranks.first:
            loaded = checkpoints.latest(map_location=ranks.device)
        path = ranks.told("" if loaded is None else str(loaded.path))
        if loaded is None and path:
            loaded = load_checkpoint(Path(path), map_location=ranks.device)
    except CheckpointError as error:
        problems = [f"{f'rank {ranks.rank}: ' if ranks.count > 1 else ''}{error}"]
        if ranks.first:
            ranks.told("")
    if problems := ranks.gathered(problems):
        shared = "; all ranks must see the folder of the run" if ranks.count > 1 else ""
        raise CheckpointError("; ".join(problems) + shared)
    if loaded is None:
        return (
            ["there is no checkpoint to go on from: the run begins anew"]
            if (checkpoints.folder.parent / RECIPE).exists()
            else []
        )
    trainer.load_state_dict(loaded.state)
    trainer.last_checkpoint = loaded.path
    notes = [f"{text}; going on from {loaded.path.name} instead" for text in loaded.damaged]
    if (before := loaded.state["ranks"]) != ranks.count:
        notes.append(f"the checkpoint was written by {before} ranks, and now there are {ranks.count}")
    known = (loaded.state["cases"], loaded.state["labels"])
    if known != (trainer.data.train.cases, list(trainer.data.labels)):
        notes.append("the data has changed since the checkpoint: other cases, or other classes")
    if ranks.first and trainer.best is not None and trainer.best.step == loaded.step:
        try:
            checkpoints.mark_best(loaded.path)  # a kill may have come in between
        except CheckpointError as error:
            notes.append(str(error))
    return notes


def _write_facts(folder: Path, recipe: Recipe, ranks: Ranks, everybody: Everybody, *, resumed: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _write_recipe(folder, recipe)
        path = folder / ENVIRONMENT
        before, now = environment.recorded(path), environment.describe(ranks.device, ranks.count)
        environment.record(path, now)
    except OSError as error:
        raise RunError(f"the results cannot be written to {folder}: {error.strerror or error}") from error
    if resumed and before:
        for text in environment.changes(before[-1], now):
            everybody.warned(f"this run may not go on bit for bit: {text}")


def _write_recipe(folder: Path, recipe: Recipe) -> None:
    write_text_atomically(folder / RECIPE, to_toml(from_anywhere(recipe)))


def from_anywhere(recipe: Recipe) -> Recipe:
    """As it can be run again from any folder: with the whole path of its data."""
    if recipe.data.path is None:
        return recipe
    path = str(Path(recipe.data.path).expanduser().absolute())
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=path))


def _beginning(trainer: Trainer, *, name: str, folder: Path) -> Started:
    return Started(
        recipe=name,
        folder=folder,
        device=trainer.ranks.described,
        data=trainer.data.description,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        epochs=trainer.recipe.training.epochs,
        steps_per_epoch=trainer.steps_per_epoch,
        total_steps=trainer.total_steps,
        batch=trainer.recipe.training.batch,
        ranks=trainer.ranks.count,
        step=trainer.step,
    )


def _end(trainer: Trainer, stop: Stop, folder: Path) -> Finished:
    whole = trainer.step >= trainer.total_steps and trainer.evaluated
    saved = trainer.saved_at == trainer.step or trainer.save()
    return Finished(
        step=trainer.step,
        reason=stop.reason if stop.reason and not whole else "finished",
        seconds=trainer.seconds,
        folder=folder,
        checkpoint=trainer.last_checkpoint,
        best=trainer.best,
        saved=saved,
        ranks=trainer.ranks.count,
    )


@contextmanager
def arithmetic(recipe: Recipe) -> Iterator[None]:
    """torch's switches as the recipe wants them; as they were, afterwards."""
    training = recipe.training
    tf32 = training.precision == "tf32"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    algorithms = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])


@contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Python's warnings go where the run's own go, each once."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        text = str(message)
        if text not in told:
            told.add(text)
            tell(text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _tell_of_rank(rank: int, text: str) -> None:
    print(f"rank {rank}: warning: {text}", file=sys.stderr)


class Everybody(Listener):
    """Passes on what a run tells to all who listen."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = list(listeners)

    def add(self, make: Callable[..., Any], path: Path, *, resume_from: int | None) -> Callable[[], None]:
        """One more, which gets the run's warnings' place for its own; returns what closes it."""
        listener = make(path, resume_from=resume_from, warn=self.warned)
        self._listeners.append(listener)
        close: Callable[[], None] = listener.close
        return close

    def started(self, event: Started) -> None:
        """The run begins."""
        for one in self._listeners:
            one.started(event)

    def stepped(self, step: int) -> None:
        """After every step."""
        for one in self._listeners:
            one.stepped(step)

    def progress(self, event: Progress) -> None:
        """Every so many steps."""
        for one in self._listeners:
            one.progress(event)

    def evaluating(self, done: int, total: int) -> None:
        """During an evaluation."""
        for one in self._listeners:
            one.evaluating(done, total)

    def evaluated(self, event: Evaluated) -> None:
        """After an evaluation."""
        for one in self._listeners:
            one.evaluated(event)

    def looked(self, event: Looked) -> None:
        """K-FAC's blocks."""
        for one in self._listeners:
            one.looked(event)

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint is on disk."""
        for one in self._listeners:
            one.saved(path, step)

    def warned(self, text: str) -> None:
        """Something went wrong."""
        for one in self._listeners:
            one.warned(text)

    def finished(self, event: Finished) -> None:
        """Everything is saved."""
        for one in self._listeners:
            one.finished(event)


class Recorder(Listener):
    """Writes what a run tells into its metrics.jsonl."""

    def __init__(self, path: Path, *, recipe: Recipe, resume_from: int | None, warn: Callable[[str], None]) -> None:
        self._folder, self._recipe = path.parent, recipe
        self._file = MetricsFile(path, resume_from=resume_from, warn=warn)
        self._step = resume_from or 0

    def started(self, event: Started) -> None:
        """What the run is."""
        if not event.resumed:
            self._file.write("start", **{**asdict(event), "folder": str(event.folder)})

    def stepped(self, step: int) -> None:
        """Remembers where the run is, for warnings."""
        self._step = step

    def progress(self, event: Progress) -> None:
        """Means over some training steps."""
        self._file.write("train", **asdict(event))

    def evaluated(self, event: Evaluated) -> None:
        """The test cases."""
        self._file.write("test", **asdict(event))

    def looked(self, event: Looked) -> None:
        """K-FAC's blocks, and once what it does with every parameter."""
        write_looked(self._file, event)

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint without its recipe is no run that could be gone on with: somebody may have removed it."""
        if not (self._folder / RECIPE).exists():
            with contextlib.suppress(OSError):
                _write_recipe(self._folder, self._recipe)

    def warned(self, text: str) -> None:
        """What went wrong."""
        self._file.write("warning", step=self._step, text=text)

    def finished(self, event: Finished) -> None:
        """How it ended."""
        self._file.write("end", step=event.step, reason=event.reason, seconds=event.seconds)

    def close(self) -> None:
        """Every line is written already."""

"""A run that is killed, whenever and however often, and resumed is the run that nobody disturbed, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.distributed as dist
import torch.utils.tensorboard  # noqa: F401  (here, so that no forked process has to)

from natgrad import data, recipes
from natgrad.training import checkpoints, files, metrics_file
from natgrad.training.ranks import Ranks
from natgrad.training.run import run

CPU = torch.device("cpu")
OFTEN = "training.checkpoint_every=0.0001"  # minutes: after every step or two
VARIANTS = {
    "plain": ["kfac.inv_update_steps=4", "training.log_every=1"],
    "random": [
        'kfac.fisher="sampled"',
        "kfac.factor_update_steps=2",
        "kfac.inv_update_steps=4",
        "optimizer.momentum=0.5",
        "training.polyak=0.9",
        "training.log_every=2",
    ],
}
PARTS = ("step", "model", "optimizer", "kfac", "average")


class Quiet:
    """A listener that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *event: None


class Killer(Quiet):
    """Ends its process group, without a warning, some time after some steps."""

    def __init__(self, draw: random.Random) -> None:
        self._steps, self._seconds = draw.randrange(4), draw.uniform(0, 0.06)

    def stepped(self, step: int) -> None:
        self._steps -= 1
        if self._steps == 0:
            threading.Timer(self._seconds, os.killpg, (0, signal.SIGKILL)).start()

    def started(self, event: Any) -> None:
        if self._steps == 0:
            threading.Timer(self._seconds, os.killpg, (0, signal.SIGKILL)).start()


def digits(*overrides: str, epochs: int = 2) -> recipes.Recipe:
    return recipes.load("digits", [f"training.epochs={epochs}", "training.batch=125", *overrides])


def train(recipe: recipes.Recipe, folder: Path, *, ranks: Ranks | None = None, listener: Any = None) -> None:
    """Goes on where the last checkpoint is, if there is any."""
    run(
        recipe,
        folder,
        name="test",
        ranks=ranks or Ranks(device=CPU),
        listener=listener or Quiet(),
        resume=(folder / "recipe.toml").exists(),
    )


def same(a: Any, b: Any) -> bool:
    """Bit for bit, in everything."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def last(folder: Path) -> dict[str, Any]:
    """What training has come to, by the newest checkpoint."""
    found = checkpoints.Checkpoints(folder / "checkpoints", keep=1).latest()
    assert found is not None
    assert not found.damaged
    return {part: found.state[part] for part in PARTS}


@contextmanager
def forked(ranks: int, work: Callable[[Ranks], None], store: Path) -> Iterator[list[multiprocessing.Process]]:
    """Processes that run `work`, in a process group of their own. None is left afterwards."""
    context = multiprocessing.get_context("fork")
    first = context.Process(target=_in_group, args=(0, 0, ranks, work, store))
    first.start()
    assert first.pid is not None
    others = [context.Process(target=_in_group, args=(first.pid, rank, ranks, work, store)) for rank in range(1, ranks)]
    for process in others:
        process.start()
    try:
        yield [first, *others]
    finally:
        for process in (first, *others):
            process.kill()
            process.join()


def _in_group(leader: int, rank: int, ranks: int, work: Callable[[Ranks], None], store: Path) -> None:
    os.setpgid(0, leader)
    if ranks == 1:
        work(Ranks(device=CPU))
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    work(Ranks(rank=rank, count=ranks, device=CPU, hosts=dist.new_group(backend="gloo")))
    dist.destroy_process_group()


def to_the_end(recipe: recipes.Recipe, folder: Path, ranks: int) -> None:
    with forked(ranks, lambda these: train(recipe, folder, ranks=these), folder.with_suffix(".store")) as processes:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * ranks


def killed(recipe: recipes.Recipe, folder: Path, ranks: int, draw: random.Random, number: int) -> bool:
    """Begins or goes on, and kills all ranks at a random moment; False where the run ended before that."""
    killer = Killer(draw)
    store = folder.with_suffix(f".store-{number}")
    with forked(ranks, lambda these: train(recipe, folder, ranks=these, listener=killer), store) as processes:
        for process in processes:
            process.join(60)
    codes = {process.exitcode for process in processes}
    assert codes in ({-signal.SIGKILL}, {0}), codes
    return codes != {0}


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in metrics_file.read(folder / "metrics.jsonl") if line["kind"] == kind]


def whole_intervals(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by step, of the intervals that no kill has cut."""
    lines, begin = {}, 0
    for line in metrics_file.read(folder / "metrics.jsonl"):
        if line["kind"] in ("start", "resume"):
            begin = line["step"]
        elif line["kind"] == "train":
            steps = line["step"] - begin
            if steps == digits_log_every(folder):
                lines[line["step"]] = (line["loss"], line["accuracy"])
            begin = line["step"]
    return lines


def digits_log_every(folder: Path) -> int:
    return recipes.load(str(folder)).training.log_every


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 9), (2, 5)])
def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one(
    tmp_path: Path, variant: str, ranks: int, kills: int
) -> None:
    seed = 100 * ranks + len(variant)
    print(f"random.Random({seed})")  # shown where it fails
    draw = random.Random(seed)
    recipe, often = digits(*VARIANTS[variant]), digits(*VARIANTS[variant], OFTEN)
    disturbed, quiet = tmp_path / "disturbed", tmp_path / "quiet"
    for number in range(kills):
        assert killed(often, disturbed, ranks, draw, number), "it came to its end too early: give it more steps"
    to_the_end(often, disturbed, ranks)
    to_the_end(recipe, quiet, ranks)

    assert same(last(disturbed), last(quiet))
    steps = [line["step"] for line in read(disturbed, "train")]
    assert steps == [line["step"] for line in read(quiet, "train")]
    assert len(read(disturbed, "resume")) > 2
    undisturbed = {line["step"]: (line["loss"], line["accuracy"]) for line in read(quiet, "train")}
    whole = whole_intervals(disturbed)
    assert len(whole) > 3
    assert whole.items() <= undisturbed.items()
    tests = [[(line["step"], line["loss"], line["accuracy"]) for line in read(one, "test")] for one in (disturbed, quiet)]
    assert tests[0] == tests[1]
    assert len(read(disturbed, "end")) == 1

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
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import sklearn.datasets  # noqa: F401  (this and TensorBoard, so that no forked process has to)
import torch
import torch.distributed as dist
import torch.utils.tensorboard
from torch import nn

from natgrad import recipes
from natgrad.training import checkpoints, metrics_file
from natgrad.training import ranks as ranks_module
from natgrad.training.ranks import Ranks
from natgrad.training.run import run

CPU = torch.device("cpu")
OFTEN = "training.checkpoint_every=0.0001"  # minutes: after every step or two
ALWAYS = "training.evaluate_every=0.001"  # epochs: evaluates, and makes a checkpoint, after every step
VARIANTS = {
    "plain": ["kfac.inv_update_steps=4", "training.log_every=1"],
    "random": [
        'kfac.fisher="sampled"',
        "kfac.factor_update_steps=2",
        "kfac.inv_update_steps=4",
        "optimizer.momentum=0.5",
        "training.polyak=0.9",
        "training.log_every=2",
        "model.dropout=0.2",
    ],
}
PARTS = ("step", "model", "optimizer", "kfac", "average")


class Quiet:
    """A listener that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *event: None


class Killer(Quiet):
    """Ends its process group without a warning: at a random moment in some step or the saving after it."""

    def __init__(self, draw: random.Random, *, after: int) -> None:
        self._steps, self._part = after + draw.randrange(4), draw.uniform(0, 1.5)
        self._before = time.perf_counter()

    def started(self, event: Any) -> None:
        self._steps += event.step
        self.stepped(event.step)

    def stepped(self, step: int) -> None:
        now = time.perf_counter()
        if step == self._steps:
            threading.Timer(self._part * min(0.1, now - self._before), os.killpg, (0, signal.SIGKILL)).start()
        self._before = now


class Ended(Quiet):
    """Ends its process, without a warning, instead of the nth thing that it does to files."""

    def __init__(self, number: int) -> None:
        self._left = number
        for name in ("replace", "link", "fsync", "unlink", "write"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return instead


def network(*, num_classes: int, channels: int = 1, width: int = 4, dropout: float = 0.0) -> nn.Module:
    """Small, and with everything that has a state of its own or is random."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(9 * width, num_classes),
    )


def digits(*overrides: str) -> recipes.Recipe:
    """Two epochs of 30 steps."""
    small = [f"model.name={__name__}:network", "training.epochs=2", "training.batch=50"]
    return recipes.load("digits", [*small, *overrides])


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
def forked(
    ranks: int, work: Callable[[Ranks], None], store: Path, *, wait: float = 60
) -> Iterator[list[multiprocessing.Process]]:
    """Processes that run `work`, in a process group of their own, and wait for each other so many seconds at most. None
    is left afterwards.
    """
    context = multiprocessing.get_context("fork")
    common = (ranks, work, store, timedelta(seconds=wait))
    first = context.Process(target=_in_group, args=(0, 0, *common))
    first.start()
    assert first.pid is not None
    with suppress(ProcessLookupError):  # it may have ended
        os.setpgid(first.pid, first.pid)  # here too: the others may come before it has done so itself
    others = [context.Process(target=_in_group, args=(first.pid, rank, *common)) for rank in range(1, ranks)]
    for process in others:
        process.start()
    try:
        yield [first, *others]
    finally:
        for process in (first, *others):
            process.kill()
            process.join()


def _in_group(leader: int, rank: int, ranks: int, work: Callable[[Ranks], None], store: Path, wait: timedelta) -> None:
    os.setpgid(0, leader)
    if ranks == 1:
        work(Ranks(device=CPU))
        return
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=wait)
    hosts = dist.new_group(backend="gloo", timeout=wait)
    work(Ranks(rank=rank, count=ranks, device=CPU, hosts=hosts, wait=wait))
    dist.destroy_process_group()


def to_the_end(recipe: recipes.Recipe, folder: Path, ranks: int) -> None:
    with forked(ranks, lambda these: train(recipe, folder, ranks=these), folder.with_suffix(".store")) as processes:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * ranks


def killed(recipe: recipes.Recipe, folder: Path, ranks: int, draw: random.Random, number: int) -> bool:
    """Begins or goes on, and kills all ranks at a random moment; False where the run ended before that."""
    # Several ranks take two steps to agree on the first checkpoint: some must live to see it.
    killer = Killer(draw, after=0 if ranks == 1 else 2)
    store = folder.with_suffix(f".store-{number}")
    with forked(ranks, lambda these: train(recipe, folder, ranks=these, listener=killer), store) as processes:
        for process in processes:
            process.join(60)
    codes = {process.exitcode for process in processes}
    assert codes in ({-signal.SIGKILL}, {0}), codes
    return codes != {0}


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in metrics_file.read(folder / "metrics.jsonl") if line["kind"] == kind]


def measured(folder: Path, kind: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by step."""
    return {line["step"]: (line["loss"], line["accuracy"]) for line in read(folder, kind)}


def whole_intervals(folder: Path, steps: int) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by step, of the intervals of so many steps that no kill has cut."""
    lines, begin = {}, 0
    for line in metrics_file.read(folder / "metrics.jsonl"):
        if line["kind"] == "train" and line["step"] - begin == steps:
            lines[line["step"]] = (line["loss"], line["accuracy"])
        if line["kind"] in ("start", "resume", "train"):
            begin = line["step"]
    return lines


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 12), (2, 6), (3, 4)])
def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one(
    tmp_path: Path, variant: str, ranks: int, kills: int
) -> None:
    seed = 100 * ranks + len(variant)
    print(f"random.Random({seed})")  # shown where it fails
    draw = random.Random(seed)
    # Several ranks bring K-FAC's sums together for a checkpoint, which rounds: both runs must make the same ones.
    recipe, often = (digits(*VARIANTS[variant], *more) for more in (((), (OFTEN,)) if ranks == 1 else ((ALWAYS,),) * 2))
    disturbed, quiet = tmp_path / "disturbed", tmp_path / "quiet"
    for number in range(kills):
        assert killed(often, disturbed, ranks, draw, number), "it came to its end too early: give it more steps"
    to_the_end(often, disturbed, ranks)
    to_the_end(recipe, quiet, ranks)

    assert same(last(disturbed), last(quiet))
    steps = [line["step"] for line in read(disturbed, "train")]
    assert steps == sorted(set(steps)) == list(measured(quiet, "train"))
    whole = whole_intervals(disturbed, recipe.training.log_every)
    assert len(whole) > kills
    assert whole.items() <= measured(quiet, "train").items()
    assert measured(disturbed, "test") == measured(quiet, "test")
    assert len(read(disturbed, "resume")) >= kills // 2
    assert len(read(disturbed, "end")) == 1


def test_a_run_that_is_killed_at_every_thing_it_does_to_files_is_the_undisturbed_one(tmp_path: Path) -> None:
    few = [*VARIANTS["plain"], "training.steps=6", "training.evaluate_every=0.1"]
    recipe, often = digits(*few), digits(*few, OFTEN)
    disturbed, quiet = tmp_path / "disturbed", tmp_path / "quiet"
    for number in range(1, 100):
        ended = partial(_ended, often, disturbed, number)
        with forked(1, ended, tmp_path / "store") as processes:
            processes[0].join(60)
        assert processes[0].exitcode in (0, -signal.SIGKILL)
        if processes[0].exitcode == 0:
            break
    assert number > 15
    train(recipe, quiet)

    assert same(last(disturbed), last(quiet))
    for kind in ("train", "test"):
        assert measured(disturbed, kind) == measured(quiet, kind)


def _ended(recipe: recipes.Recipe, folder: Path, number: int, these: Ranks) -> None:
    train(recipe, folder, ranks=these, listener=Ended(number))


def test_the_best_checkpoint_is_made_up_for_where_a_kill_came_before_it(tmp_path: Path) -> None:
    recipe = digits("training.steps=4", "training.evaluate_every=0.05")

    def work(these: Ranks) -> None:
        checkpoints.Checkpoints.mark_best = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        train(recipe, tmp_path / "run")

    with forked(1, work, tmp_path / "store") as processes:
        processes[0].join(60)
    train(digits("training.steps=2"), tmp_path / "run")  # nothing is left to do
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


IMAGES = [
    "data.size=16",
    "data.resize=20",
    "data.flip=true",
    "data.workers=2",
    f"model.name={__name__}:network",
    "model.channels=3",
    "training.batch=4",
    "training.test_batch=3",
    "training.log_every=1",
    "kfac.factor_update_steps=2",
    "kfac.inv_update_steps=3",
]
TEXT = [
    "data.context=8",
    "model.context=8",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "training.batch=4",
    'training.precision="fp32"',
    "kfac.factor_update_steps=2",
    "kfac.inv_update_steps=3",
    'kfac.fisher="sampled"',
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = random.Random(0)
    for split, count in (("train", 6), ("val", 2)):
        for kind in ("cats", "dogs"):
            folder = tmp_path / "photos" / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                noise = PIL.Image.frombytes("RGB", (4, 3), draw.randbytes(36))
                noise.resize((24, 20)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and so on; " * 10)
    return path


def equal_after_a_stop(tmp_path: Path, name: str, overrides: list[str], *, at: int, steps: int) -> None:
    stopped, quiet = tmp_path / "stopped", tmp_path / "quiet"
    train(recipes.load(name, [*overrides, f"training.steps={at}"]), stopped)
    train(recipes.load(name, [*overrides, f"training.steps={steps}"]), stopped)
    train(recipes.load(name, [*overrides, f"training.steps={steps}"]), quiet)
    assert last(stopped)["step"] == steps
    assert same(last(stopped), last(quiet))


@pytest.mark.parametrize("at", [2, 3])
def test_images_with_crops_flips_and_workers_go_on_bit_for_bit(tmp_path: Path, photos: Path, at: int) -> None:
    equal_after_a_stop(tmp_path, "folder", [f"data.path={photos}", *IMAGES], at=at, steps=7)


@pytest.mark.parametrize("at", [1, 5])
def test_text_with_dropout_goes_on_bit_for_bit(tmp_path: Path, text: Path, at: int) -> None:
    equal_after_a_stop(tmp_path, "text-gpt", [f"data.path={text}", *TEXT], at=at, steps=9)


@pytest.mark.parametrize(
    "overrides",
    [
        ['kfac.damping="adaptive"'],
        ["kfac.raw_momentum=0.9", "kfac.region_of=step", "kfac.kl_clip=1e-3"],
        ["optimizer.name=adam", "optimizer.lr=0.001", "kfac.grafting=adam"],
        ["kfac.enabled=false", "optimizer.momentum=0.9", "training.precision=bf16", "training.channels_last=true"],
    ],
    ids=["adaptive damping", "raw momentum", "grafting", "bf16 without K-FAC"],
)
def test_everything_that_has_a_memory_goes_on_bit_for_bit(tmp_path: Path, overrides: list[str]) -> None:
    small = [f"model.name={__name__}:network", "training.batch=50", "kfac.inv_update_steps=3", *overrides]
    equal_after_a_stop(tmp_path, "digits", small, at=7, steps=12)


# The command itself

COMMAND = ["-m", "natgrad", "train", "digits", "training.epochs=3", 'kfac.fisher="sampled"', "training.polyak=0.9"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]


@contextmanager
def started(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, which is gone afterwards."""
    with open(output, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    children: list[int] = []
    try:
        yield process
        children = descendants(process.pid)
    finally:
        for pid in (process.pid, *(children or descendants(process.pid))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, also in other sessions; torchrun gives each rank its own."""
    try:
        mine = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*mine, *(one for child in mine for one in descendants(child))]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], output: Path) -> Any:
    """What a condition says when it first says something."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if found := condition():
            return found
        assert process.poll() is None, output.read_text()
        time.sleep(0.02)
    raise AssertionError(f"not in 90 s: {output.read_text()}")


def newest(folder: Path) -> int:
    return max((int(path.stem.partition("-")[2]) for path in folder.glob("checkpoints/step-*.pt")), default=0)


def undisturbed(folder: Path, ranks: int, *more: str) -> Path:
    overrides = [word for word in COMMAND if "=" in word]
    to_the_end(recipes.load("digits", [*overrides, *more]), folder, ranks)
    return folder


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*COMMAND, OFTEN, "--out", str(folder), "--resume"]
    with started(*command, output=output) as process:
        wait_for(lambda: newest(folder) >= 3, process, output)
    assert newest(folder) < 45
    with started(*command, output=output) as process:
        assert process.wait(90) == 0, output.read_text()
    assert "from step " in output.read_text()
    assert same(last(folder), last(undisturbed(tmp_path / "quiet", 1)))


def test_the_command_goes_on_under_torchrun_after_one_rank_was_killed_and_after_all_were(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*TORCHRUN, *COMMAND, ALWAYS, "--out", str(folder), "--resume"]
    with started(*command, output=output) as process:
        wait_for(lambda: newest(folder) >= 2, process, output)
        os.kill(descendants(process.pid)[-1], signal.SIGKILL)
        wait_for(lambda: "from step " in output.read_text(), process, output)  # torchrun brought it back
        before = newest(folder)
        wait_for(lambda: newest(folder) > before, process, output)
    assert newest(folder) < 21
    with started(*command, output=output) as process:
        assert process.wait(90) == 0, output.read_text()
    assert output.read_text().count("from step ") == 2
    assert same(last(folder), last(undisturbed(tmp_path / "quiet", 2, ALWAYS)))


def test_ranks_find_each_other_again_when_torchrun_has_restarted_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    agent = {"WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**agent, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, str(value))
    context = multiprocessing.get_context("fork")
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        processes = [context.Process(target=_die_together, args=(rank, attempt)) for rank in range(2)]
        for process in processes:
            process.start()
        end = time.monotonic() + 60
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode not in (None, 7) for process in processes):
                break  # the others would wait for it
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        assert [process.exitcode for process in processes] == [7, 7]


def _die_together(rank: int, attempt: int) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if attempt and rank == 0:
        time.sleep(1)  # the other one looks for this one first
    with ranks_module.started("cpu") as these:
        these.told("")
        os._exit(7)

"""Ctrl-C and SIGTERM: the step is finished, everything saved, all ranks stop together, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import sklearn.datasets  # noqa: F401  (this and TensorBoard, so that no forked process has to)
import torch.utils.tensorboard  # noqa: F401
from tests.training.test_resume import (
    ALWAYS,
    TORCHRUN,
    descendants,
    digits,
    forked,
    last,
    network,
    newest,
    same,
    started,
    to_the_end,
    wait_for,
)
from tests.training.test_resume import train as train_quietly

from natgrad.cli import main
from natgrad.cli.plain import Plain
from natgrad.training import checkpoints, metrics_file, trainer
from natgrad.training.ranks import LostError, Ranks

SMALL = [f"model.name={network.__module__}:network", "training.batch=50", "training.log_every=2"]
OFTEN = "training.checkpoint_every=1e-9"
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def natgrad(*arguments: Any, output: Path, before: Callable[[], None] = lambda: None) -> int:
    """The exit code of the command in a forked process, which leaves none behind; `before` prepares that process."""
    process = multiprocessing.get_context("fork").Process(target=_natgrad, args=(arguments, output, before))
    process.start()
    process.join(60)
    alive = process.is_alive()
    process.kill()
    process.join()
    assert not alive, output.read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode is not None
    return process.exitcode


def _natgrad(arguments: tuple[Any, ...], output: Path, before: Callable[[], None]) -> None:
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, stream, os.fdopen(number, "w", closefd=False))
    warnings.resetwarnings()
    sys.argv = ["natgrad", *map(str, arguments)]
    before()
    main()


def signalled_in_step(number: int, *signals: int, rank: int = 0) -> Callable[[], None]:
    """Makes a rank's process get signals in the middle of a step."""
    usual = trainer.seed_step

    def seed_step(seed: int, step: int, ranks: Any) -> None:
        usual(seed, step, ranks)
        if (step, ranks.rank) == (number, rank):
            for one in signals:
                os.kill(os.getpid(), one)

    def prepare() -> None:
        trainer.seed_step = seed_step

    return prepare


def signalled_in_evaluation(*signals: int) -> Callable[[], None]:
    """Makes the process get signals after some batches of an evaluation."""

    def evaluating(self: Plain, done: int, total: int) -> None:
        assert total == 30
        if done == 3:
            for one in signals:
                os.kill(os.getpid(), one)

    def prepare() -> None:
        Plain.evaluating = evaluating  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_in_a_step_saves_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, number: int, code: int
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    few = [*SMALL, "training.steps=9"]
    prepare = signalled_in_step(4, number)
    assert natgrad("train", "digits", *few, "--out", folder, output=output, before=prepare) == code
    written = output.read_text()
    assert f"stopped by {signal.Signals(number).name}  step 5/9" in written
    assert f"to go on: natgrad train {folder} --resume" in written
    assert "Traceback" not in written
    assert last(folder)["step"] == 5

    assert natgrad("train", folder, "--resume", output=output) == 0
    train_quietly(digits("training.steps=9"), tmp_path / "quiet")
    assert same(last(folder), last(tmp_path / "quiet"))


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_in_an_evaluation_saves_and_the_resumed_run_evaluates_again(
    tmp_path: Path, number: int, code: int
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    few = ["training.steps=9", "training.evaluate_every=0.2", "training.test_batch=10", "training.polyak=0.5"]
    prepare = signalled_in_evaluation(number)
    assert natgrad("train", "digits", *SMALL, *few, "--out", folder, output=output, before=prepare) == code
    assert f"to go on: natgrad train {folder} --resume" in output.read_text()
    assert last(folder)["step"] == 6

    assert natgrad("train", folder, "--resume", output=output) == 0
    train_quietly(digits(*few), tmp_path / "quiet")
    assert same(last(folder), last(tmp_path / "quiet"))
    tests = [
        [(line["step"], line["loss"]) for line in metrics_file.read(one / "metrics.jsonl") if line["kind"] == "test"]
        for one in (folder, tmp_path / "quiet")
    ]
    assert tests[0] == tests[1]


@pytest.mark.parametrize("when", ["in the last step", "in the last evaluation"])
def test_a_run_that_is_stopped_before_its_last_evaluation_is_not_finished(tmp_path: Path, when: str) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    few = ["training.steps=6", "training.test_batch=10"]
    prepare = signalled_in_step(5, signal.SIGINT) if "step" in when else signalled_in_evaluation(signal.SIGINT)
    assert natgrad("train", "digits", *SMALL, *few, "--out", folder, output=output, before=prepare) == 130
    assert "--resume" in output.read_text()
    assert natgrad("train", folder, "--resume", output=output) == 0
    assert "test acc" in output.read_text()


@pytest.mark.parametrize("prepare", [signalled_in_step, signalled_in_evaluation])
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, prepare: Callable[..., Callable[[], None]]) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    few = [
        "training.steps=9",
        "training.evaluate_every=0.2",
        "training.test_batch=10",
        "training.checkpoint_every=1e-9",
    ]
    twice = [signal.SIGINT, signal.SIGINT]
    before = prepare(4, *twice) if prepare is signalled_in_step else prepare(*twice)
    assert natgrad("train", "digits", *SMALL, *few, "--out", folder, output=output, before=before) == 130
    written = output.read_text()
    assert written.endswith("stopped at once: what was not saved is lost\n")
    assert "Traceback" not in written
    assert last(folder)["step"] == (4 if prepare is signalled_in_step else 5)
    assert natgrad("train", folder, "--resume", output=output) == 0
    train_quietly(digits(*few), tmp_path / "quiet")
    assert same(last(folder), last(tmp_path / "quiet"))


def test_processes_that_decode_images_are_gone_after_a_signal_to_all(tmp_path: Path) -> None:
    output, draw = tmp_path / "output", random.Random(0)
    for kind in ("cats", "dogs"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(8):
            noise = PIL.Image.frombytes("RGB", (16, 16), draw.randbytes(768))
            noise.save(tmp_path / "photos" / kind / f"{number}.jpg")
    few = ["data.size=16", "data.resize=16", "data.workers=2", "model.channels=3", "training.batch=4"]
    command = ["train", "folder", *SMALL[:1], *few, f"data.path={tmp_path / 'photos'}", "--out", tmp_path / "run"]

    def before() -> None:
        usual = os.kill
        os.kill = lambda pid, number: os.killpg(0, number) if pid == os.getpid() else usual(pid, number)
        signalled_in_step(4, signal.SIGINT)()  # as a terminal does: to everybody in front of it

    assert natgrad(*command, output=output, before=before) == 130
    assert last(tmp_path / "run")["step"] == 5
    assert "Traceback" not in output.read_text()


def in_a_step(act: Callable[[], None]) -> None:
    """Acts in the middle of the fifth step."""
    usual = trainer.seed_step

    def seed_step(seed: int, step: int, ranks: Any) -> None:
        usual(seed, step, ranks)
        if step == 4:
            act()

    trainer.seed_step = seed_step


def in_an_evaluation(act: Callable[[], None]) -> None:
    """Acts where the fifth evaluation begins."""
    usual, left = trainer.Trainer._share_buffers, [5]

    def share_buffers(self: trainer.Trainer) -> None:
        left[0] -= 1
        if left[0] == 0:
            act()
        usual(self)

    trainer.Trainer._share_buffers = share_buffers  # type: ignore[method-assign]


def in_a_save(act: Callable[[], None]) -> None:
    """Acts where the fifth checkpoint begins."""
    usual, left = trainer.all_finite, [5]

    def all_finite(tensors: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return usual(tensors)

    trainer.all_finite = all_finite


MOMENTS = {"step": in_a_step, "evaluation": in_an_evaluation, "save": in_a_save}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
def test_ranks_stop_together_whichever_is_asked_and_whenever(
    tmp_path: Path, asked: tuple[int, ...], moment: str
) -> None:
    # They evaluate and save after every step: K-FAC's sums are rounded then, and must be so in both runs.
    folder, recipe = tmp_path / "run", digits(ALWAYS)

    def work(these: Ranks) -> None:
        if these.rank in asked:
            MOMENTS[moment](lambda: os.kill(os.getpid(), signal.SIGTERM))
        train_quietly(recipe, folder, ranks=these)

    with forked(2, work, tmp_path / "store") as processes:
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    line = metrics_file.read(folder / "metrics.jsonl")[-1]
    assert (line["kind"], line["reason"]) == ("end", "SIGTERM")
    assert 5 <= line["step"] <= 6  # the others hear of it a step later
    assert last(folder)["step"] == line["step"]

    for one in (folder, tmp_path / "quiet"):
        to_the_end(digits("training.steps=9", ALWAYS), one, 2)
    assert same(last(folder), last(tmp_path / "quiet"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("moment", "waited_for"),
    [
        ("step", "the others in step 5"),
        ("evaluation", "the others in the evaluation after step 5"),
        ("save", "the checkpoint after step 5"),
    ],
)
def test_a_rank_that_is_killed_ends_the_others_which_say_what_they_waited_for(
    tmp_path: Path, moment: str, waited_for: str, rank: int
) -> None:
    told = lost_while_another_is(signal.SIGKILL, tmp_path, moment, rank, wait=60)
    assert told == f"another rank has ended while this one waited for {waited_for}: see what that one says"


@pytest.mark.parametrize(
    ("moment", "waited_for", "rank"), [("step", "the others in step 5", 0), ("save", "the checkpoint after step 5", 1)]
)
def test_a_rank_that_stands_still_is_not_waited_for_for_ever(
    tmp_path: Path, moment: str, waited_for: str, rank: int
) -> None:
    told = lost_while_another_is(signal.SIGSTOP, tmp_path, moment, rank, wait=4)
    assert told.startswith(f"another rank does not answer: this one has waited 4 seconds for {waited_for}. Is that")


def lost_while_another_is(number: signal.Signals, tmp_path: Path, moment: str, rank: int, *, wait: float) -> str:
    """What a rank says when another one got a signal that it cannot catch; it wants to save then, as a SIGTERM of its
    own in the same step makes it.
    """
    recipe, output = digits(ALWAYS), tmp_path / "output"

    def signalled() -> None:
        time.sleep(0.5)  # until the other one has all of this one's answers and waits for the next
        os.kill(os.getpid(), number)

    def work(these: Ranks) -> None:
        if these.rank == rank:
            MOMENTS[moment](signalled)
        else:
            in_a_step(lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            train_quietly(recipe, tmp_path / "run", ranks=these)
        except LostError as error:
            output.write_text(str(error))
            os._exit(9)

    with forked(2, work, tmp_path / "store", wait=wait) as processes:
        processes[1 - rank].join(60)
        assert processes[1 - rank].exitcode == 9
    return output.read_text()


def test_ctrl_c_under_torchrun_saves_and_leaves_no_process_behind(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*TORCHRUN, "-m", "natgrad", "train", "digits", "training.epochs=1000", "training.checkpoint_every=0.001"]
    with started(*command, "--out", str(folder), output=output) as process:
        wait_for(lambda: newest(folder) >= 2, process, output)
        everybody = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does; torchrun gives the ranks groups of their own
        process.wait(60)
        written = output.read_text()
        assert "stopped by SIGINT" in written
        assert f"natgrad train {folder} --resume" in written
        assert checkpoints.load(folder / "checkpoints" / f"step-{newest(folder):08d}.pt").step == newest(folder)
        end = time.monotonic() + 30
        while remaining := [pid for pid in everybody if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < end, remaining
            time.sleep(0.02)

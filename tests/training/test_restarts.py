"""torchrun restarts the ranks when one of them has died: they go on with their run, without being told to."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import kill
from tests.training.test_resume import digits, last, newest, same, to_the_end, train
from tests.training.test_stop import OFTEN, SMALL, in_a_step, natgrad

from natgrad import recipes
from natgrad.training import ranks

RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun's agent gives to the ranks it starts: here one, again and again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**agent, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    yield
    del store


def killed() -> None:
    in_a_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("out", [["--out", "mine"], []])
def test_a_restart_goes_on_with_the_run_that_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "output"
    command = ["train", "digits", *SMALL, "training.steps=9", OFTEN, *out]
    assert natgrad(*command, output=output, before=killed) == -signal.SIGKILL
    folder = tmp_path / "mine" if out else next((tmp_path / "runs").iterdir())
    assert newest(folder) == 4
    monkeypatch.setenv(RESTARTS, "1")
    assert natgrad(*command, output=output) == 0
    assert "from step 4" in output.read_text()
    assert out or [folder] == list((tmp_path / "runs").iterdir())
    train(digits("training.steps=9"), tmp_path / "quiet")
    assert same(last(folder), last(tmp_path / "quiet"))


@pytest.mark.usefixtures("torchrun")
def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = ["train", "digits", *SMALL, "training.steps=9", "--out", folder]
    assert natgrad(*command, output=output, before=killed) == -signal.SIGKILL
    monkeypatch.setenv(RESTARTS, "1")
    assert natgrad(*command, output=output) == 0
    assert "there is no checkpoint to go on from: the run begins anew" in output.read_text()
    train(digits("training.steps=9"), tmp_path / "quiet")
    assert same(last(folder), last(tmp_path / "quiet"))


@pytest.mark.usefixtures("torchrun")
def test_a_second_run_under_one_torchrun_is_a_run_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "output"
    for name in ("one", "two"):
        command = ["train", "digits", *SMALL, "training.steps=3", "--out", tmp_path / name]
        assert natgrad(*command, output=output) == 0
    assert newest(tmp_path / "one") == newest(tmp_path / "two") == 3


@pytest.mark.usefixtures("torchrun")
def test_a_restart_does_not_go_on_with_a_run_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    train(digits("training.steps=3"), folder)
    for restarts in range(2):
        monkeypatch.setenv(RESTARTS, str(restarts))
        assert natgrad("train", "digits", *SMALL, "training.steps=9", "--out", folder, output=output) == 1
    assert output.read_text().count("holds a run already: go on with --resume") == 2
    assert newest(folder) == 3


def test_nothing_is_lost_when_ranks_are_killed_under_torchrun(tmp_path: Path) -> None:
    given = kill.overrides(steps=40, every=2)
    to_the_end(recipes.load("digits", [*given, f"training.batch={kill.BATCH // 2}"]), tmp_path / "quiet", 2)
    soon = random.Random(22)  # shortly after the first checkpoint, and the first rank
    found = kill.disturbed(tmp_path / "run", given, ranks=2, times=1, draw=soon)
    written = (tmp_path / "run.log").read_text()
    assert (found.ranks, found.restarts) == ([0], 1), written
    assert list(kill.differences(kill.outcome(tmp_path / "run"), kill.outcome(tmp_path / "quiet"))) == []
    assert "Traceback" not in written


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    alone = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(ranks.LostError, match="this one has waited 1 seconds for the others to start"),
        ranks.started("cpu", wait=timedelta(seconds=1)),
    ):
        pass


def test_what_differs_is_found() -> None:
    one = {"a": [torch.ones(2), 3], "b": "x"}
    other = {"a": [torch.tensor([1.0, 1.5]), 3], "b": "x"}
    assert list(kill.differences(one, one)) == []
    assert list(kill.differences(one, other)) == ["/a/0 by 3.3e-01 of its largest number"]
    assert list(kill.differences(one, {**one, "b": 1})) == ["/b"]

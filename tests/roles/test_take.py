from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.roles.conftest import lives, wait_for

from natgrad.roles import role, take

SCRIPT = Path(__file__).with_name("script.py")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no role yet."""
    monkeypatch.setattr(role, "_taken", [])
    monkeypatch.setattr(role.atexit, "register", lambda function: None)
    for name in NAMES:
        monkeypatch.setenv(name, "nothing yet")  # so that it is put back
        monkeypatch.delenv(name)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int = 0, world: int = 4, port: str = "9") -> None:
    for name, value in zip(NAMES, (rank, world, rank, world, "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("torchrun", [False, True])
def test_without_helpers_nothing_changes(monkeypatch: pytest.MonkeyPatch, torchrun: bool) -> None:
    if torchrun:
        under_torchrun(monkeypatch, rank=2)
    before = dict(os.environ)
    taken = take()
    assert taken.trains
    assert (taken.index, taken.gradients, taken.stats, taken.inverse) == ((2, 4, 0, 0) if torchrun else (0, 1, 0, 0))
    assert taken.directory.find("inverse", 0) is None
    taken.close()
    assert dict(os.environ) == before
    with pytest.raises(RuntimeError, match=f"is gradient rank {taken.index} already"):
        take()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_numbers_are_whole(value: Any) -> None:
    with pytest.raises(ValueError, match="stats must be a whole number, 0 or more, not"):
        take(stats=value)
    with pytest.raises(ValueError, match="inverse must be a whole number, 0 or more, not"):
        take(inverse=value)


@pytest.mark.usefixtures("fresh")
def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"not under torchrun \(RANK, .*start it by torchrun --nproc-per-node 3"):
        take(stats=1, inverse=1)
    under_torchrun(monkeypatch)
    with pytest.raises(ValueError, match="inverse_threads must be a whole number, 1 or more"):
        take(inverse=1, inverse_threads=0)
    with pytest.raises(ValueError, match=r"--nproc-per-node 4 gives 4 processes: .* Start at least 5, or take fewer"):
        take(stats=2, inverse=2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="before init_process_group"):
        take(stats=1, inverse=1)
    monkeypatch.undo()
    monkeypatch.setattr(role, "_taken", [])
    under_torchrun(monkeypatch, port="a port")
    with pytest.raises(RuntimeError, match="are not numbers: .*a port"):
        take(stats=1, inverse=1)
    assert role._taken == []


@pytest.mark.usefixtures("fresh")
def test_gradient_ranks_see_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, rank=1, world=8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    taken = take(stats=1, inverse=1)
    assert (taken.name, taken.index, taken.gradients, taken.rank, taken.world) == ("gradient", 1, 6, 1, 8)
    assert [os.environ[name] for name in NAMES[:4]] == ["1", "6", "1", "4"]


@pytest.mark.usefixtures("fresh")
def test_the_second_machine_may_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, rank=5, world=8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    take(stats=1, inverse=1)
    assert [os.environ[name] for name in NAMES[:4]] == ["5", "6", "1", "2"]


class Run:
    """The script under torchrun, or with the variables set by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: Any, **variables: Any) -> subprocess.Popen[bytes]:
        variables = {name: str(value) for name, value in variables.items()}
        environment = {name: value for name, value in os.environ.items() if name not in NAMES}
        with open(self.folder / "output", "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**environment, **variables, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def torchrun(self, processes: int, *options: Any, stats: int = 1, inverse: int = 1) -> subprocess.Popen[bytes]:
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, *options)
        return self.start(*command, SCRIPT, self.folder, stats, inverse)

    def facts(self, who: str) -> dict[str, Any]:
        wait_for((self.folder / who).exists, 40)
        found: dict[str, Any] = json.loads((self.folder / who).read_text())
        return found

    def progress(self, words: str, rank: int = 0) -> None:
        """Waits until a gradient rank has told of this."""
        path = self.folder / f"progress {rank}"
        wait_for(lambda: path.exists() and words in path.read_text(), 20)

    def step(self, rank: int = 0) -> int:
        return int((self.folder / f"progress {rank}").read_text().split()[0])

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def finish(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


def test_four_processes_under_torchrun(run: Run) -> None:
    torchrun = run.torchrun(4)
    ranks = [run.facts(f"gradient {rank} 0") for rank in range(2)]
    for rank, facts in enumerate(ranks):
        assert [facts[name] for name in NAMES[:4]] == [str(rank), "2", str(rank), "2"]
        assert facts["total"] == 2
        assert facts["parent"] == torchrun.pid
    worker = run.facts("stats 0 0")
    assert (worker["RANK"], worker["WORLD_SIZE"], worker["LOCAL_RANK"], worker["total"]) == ("0", "1", "2", 1)
    assert worker["parent"] != torchrun.pid
    run.progress("True [\"b'from 0'\"]")
    run.progress("True []", rank=1)

    os.kill(worker["process"], signal.SIGKILL)
    again = run.facts("stats 0 1")
    assert again["parent"] == worker["parent"]
    run.progress("\"b'from 1'\"")
    assert "natgrad: stats worker 0 died (killed by signal 9); started again" in run.output

    supervisors = [int(one) for one in children(torchrun.pid) if int(one) not in [rank["process"] for rank in ranks]]
    supervisors.remove(worker["parent"])
    (inverter,) = (int(one) for one in children(supervisors[0]))
    os.kill(inverter, signal.SIGKILL)
    wait_for(lambda: "natgrad: inverse worker 0 died (killed by signal 9); started again" in run.output)
    step = run.step()
    wait_for(lambda: run.step() > step)  # with or without it
    run.progress("True ")

    run.finish()
    assert torchrun.wait(20) == 0
    assert "Traceback" not in run.output
    assert not any(lives(one) for one in (again["process"], inverter, *supervisors))


@pytest.mark.slow
def test_a_restart_by_torchrun_begins_anew(run: Run) -> None:
    torchrun = run.torchrun(3, "--max-restarts", 1, "--monitor-interval", 0.1)
    first = run.facts("stats 0 0")
    run.progress("True [\"b'from 0'\"]")
    (run.folder / "fail").touch()
    wait_for(lambda: not lives(first["process"]), 20)
    for name in ("fail", "stats 0 0", "progress 0"):
        (run.folder / name).unlink()
    assert run.facts("stats 0 0")["process"] != first["process"]
    run.progress("True [\"b'from 0'\"]")
    run.finish()
    assert torchrun.wait(20) == 0


@pytest.mark.slow
def test_variables_set_by_hand(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    command, common = (SCRIPT, run.folder, 1, 1), {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [run.start(*command, RANK=rank, **common) for rank in (2, 1, 0)]  # the store comes last
    run.progress("True [\"b'from 0'\"]")
    run.finish()
    assert [process.wait(20) for process in processes] == [0, 0, 0]
    assert "Traceback" not in run.output


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.roles.conftest import lives, wait_for

from natgrad.roles import supervise

WHO = "stats worker 0"


class Watched:
    """A supervised process. Its worker writes who it is and then does `work(incarnation)`."""

    def __init__(self, folder: Path, work: Callable[[int], Any], **options: Any) -> None:
        self._folder = folder
        self.process = os.fork()
        if not self.process:
            with open(folder / "said", "wb", buffering=0) as said:
                os.dup2(said.fileno(), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            try:
                incarnation = supervise.supervised(WHO, **options)
                (folder / f"{incarnation}.part").write_text(str(os.getpid()))
                (folder / f"{incarnation}.part").rename(folder / str(incarnation))
                work(incarnation)
                os._exit(0)
            except BaseException:
                os._exit(1)

    def worker(self, incarnation: int) -> int:
        path = self._folder / str(incarnation)
        wait_for(path.exists)
        return int(path.read_text())

    @property
    def said(self) -> str:
        return (self._folder / "said").read_text()

    def end(self, seconds: float = 10) -> int:
        """The exit code, as torchrun sees it."""
        code = wait_for(lambda: os.waitpid(self.process, os.WNOHANG)[1:] if self._ended() else None, seconds)
        return os.waitstatus_to_exitcode(code[0])

    def _ended(self) -> bool:
        return not lives(self.process)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no GPU, which other tests may have used in this process."""
    monkeypatch.setattr(supervise, "_PAUSE", 0.02)
    monkeypatch.setattr(supervise, "_spoilt", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def for_ever(incarnation: int) -> None:
    time.sleep(30)


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lambda incarnation: time.sleep(30 if incarnation < 7 else 0))
    for incarnation in range(7):  # more often than a bug would be tried
        os.kill(watched.worker(incarnation), signal.SIGKILL)
    watched.worker(7)
    assert watched.end() == 0
    assert watched.said.count(f"natgrad: {WHO} died (killed by signal 9); started again\n") == 7


def test_a_worker_that_fails_is_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lambda incarnation: None if incarnation == 2 else os._exit(3))
    assert watched.end() == 0
    assert watched.said == f"natgrad: {WHO} died (exit code 3); started again\n" * 2


def test_a_worker_that_fails_always_is_given_up(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lambda incarnation: os._exit(3))
    assert watched.end() == 3
    assert watched.said.endswith(f"natgrad: {WHO} died (exit code 3) 5 times shortly after its start: given up\n")
    assert not (tmp_path / "5").exists()


def test_one_that_has_worked_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_QUICK", 0.1)
    monkeypatch.setattr(supervise, "_LONGEST_PAUSE", 0.05)

    def work(incarnation: int) -> None:
        if incarnation == 0:
            time.sleep(0.2)
        if incarnation < 8:
            os._exit(3)

    assert Watched(tmp_path, work).end() == 0


def test_nobody_is_started_when_training_is_over(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lambda incarnation: os._exit(3), over=lambda: True)
    assert watched.end() == 0
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_end_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    watched = Watched(tmp_path, for_ever)
    worker = watched.worker(0)
    os.kill(watched.process, number)
    assert watched.end() == -number
    assert not lives(worker)
    assert watched.said == ""


def test_a_worker_that_does_not_listen_is_ended_nevertheless(tmp_path: Path) -> None:
    def deaf(incarnation: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "deaf").touch()
        time.sleep(30)

    watched = Watched(tmp_path, deaf)
    wait_for((tmp_path / "deaf").exists)
    os.kill(watched.process, signal.SIGTERM)
    assert watched.end() == -signal.SIGTERM
    assert not lives(watched.worker(0))


def test_a_worker_ends_with_its_supervisor(tmp_path: Path) -> None:
    watched = Watched(tmp_path, for_ever)
    os.kill(watched.worker(0), signal.SIGKILL)
    worker = watched.worker(1)
    os.kill(watched.process, signal.SIGKILL)
    watched.end()
    wait_for(lambda: not lives(worker), 2)


def test_a_worker_has_the_handlers_that_were_there(tmp_path: Path) -> None:
    def work(incarnation: int) -> None:
        kept = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        kept &= signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os._exit(0 if kept and not signal.pthread_sigmask(signal.SIG_BLOCK, []) else 3)

    assert Watched(tmp_path, work).end() == 0


def test_cuda_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"call natgrad\.roles\.take\(\) first in the script"):
        supervise.supervised(WHO)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match=r"call natgrad\.roles\.take\(\) first in the script"):
        supervise.supervised(WHO)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.backends.cuda.is_built() or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asked", ["pass", "torch.cuda.is_available()", "torch.zeros(1).cuda()"])
def test_a_worker_has_the_gpu_unless_somebody_asked_for_it_before(asked: str) -> None:
    script = f"import torch\n{asked}\nfrom natgrad.roles.supervise import supervised\n"
    script += "supervised('stats worker 0')\nprint(torch.ones(2).cuda().sum().item())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    if asked == "pass":
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    else:
        assert done.returncode == 1
        assert "call natgrad.roles.take() first in the script" in done.stderr

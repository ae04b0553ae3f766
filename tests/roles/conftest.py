"""A store, helpers and their deaths, for tests: forked, since importing torch anew takes longer than most of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from natgrad.roles import Directory, Role


class Hosts:
    """Processes of a test: a store in one of them, so that it can die, and helpers."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._running: list[Any] = []
        answers = self._context.Queue()
        self.store = self.start(_keep_store, answers)
        self.port: int = answers.get(timeout=20)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Any:
        process = self._context.Process(target=_quietly, args=(function, *arguments))
        process.start()
        self._running.append(process)
        return process

    def directory(self, attempt: str = "0") -> Directory:
        return Directory(("127.0.0.1", self.port), attempt=attempt)

    def role(self, name: str = "gradient", index: int = 0, **fields: Any) -> Role:
        return Role(name=name, index=index, directory=self.directory(), **{"stats": 1, "inverse": 1, **fields})

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    before = set(threading.enumerate())
    yield made
    made.end()
    wait_for(lambda: not [one for one in set(threading.enumerate()) - before if one.name.startswith("natgrad")])


def _keep_store(answers: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers.put(store.port)
    time.sleep(60)


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> Any:
    """What the condition gives as soon as that is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return found


def lives(process: int) -> bool:
    """Whether a process of anybody runs; one that is only waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pause(process: int) -> None:
    os.kill(process, signal.SIGSTOP)

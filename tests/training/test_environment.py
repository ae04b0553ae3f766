"""environment.json: what is in it, one entry a start, damaged files, and what may break bit-for-bit resuming."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import natgrad
from natgrad.training import environment


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "natgrad", "two words"])
    return environment.describe("cpu", 2)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_facts_are_those_of_this_process_and_are_json(facts: dict[str, Any]) -> None:
    assert json.loads(json.dumps(facts)) == facts
    assert facts["natgrad"] == natgrad.__version__
    assert facts["torch"] == torch.__version__
    assert (facts["ranks"], facts["threads"]) == (2, torch.get_num_threads())
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["device"]["type"] == "cpu"
    assert facts["device"]["name"] == facts["cpu"]["name"]
    assert facts["cpu"]["usable_cores"] >= 1
    assert facts["cpu"]["memory"] > 2**28
    assert facts["command"] == "python -m natgrad 'two words'"
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SECRET_TOKEN" not in facts["variables"]
    started = datetime.datetime.fromisoformat(facts["started"])
    assert abs((datetime.datetime.now().astimezone() - started).total_seconds()) < 60


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_facts_of_a_gpu() -> None:
    facts = environment.describe("cuda", 1)
    assert facts["device"]["name"] == torch.cuda.get_device_name()
    assert facts["device"]["memory"] > 2**30
    assert facts["cudnn"] is not None


def test_the_commit_is_found_and_changes_to_it_are_marked(tmp_path: Path) -> None:
    assert environment.git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert environment.git_commit(tmp_path) is None  # nothing is committed
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert environment.git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert environment.git_commit(tmp_path) == f"{commit}-dirty"


def test_without_git_or_with_a_slow_one_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_commit(Path.cwd()) is None
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    slow.chmod(0o755)
    assert environment.git_commit(Path.cwd()) is None


def test_each_start_adds_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    assert environment.recorded(path) == []
    environment.record(path, {"torch": "1"})
    environment.record(path, {"torch": "ü"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"runs": [{"torch": "1"}, {"torch": "ü"}]}
    assert environment.recorded(path) == [{"torch": "1"}, {"torch": "ü"}]
    assert os.listdir(tmp_path) == ["environment.json"]


@pytest.mark.parametrize("content", [b"", b'{"runs": [', b"\xff\xff", b"[]", b"{}", b'{"runs": [1]}', b'{"runs": {}}'])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "environment.json"
    path.write_bytes(content)
    assert environment.recorded(path) == []
    environment.record(path, {"torch": "2"})
    assert environment.recorded(path) == [{"torch": "2"}]
    assert (tmp_path / "environment.json.damaged").read_bytes() == content


def test_nothing_has_changed_in_the_same_place(facts: dict[str, Any]) -> None:
    assert environment.changes(facts, {**environment.describe("cpu", 2), "host": "another"}) == []


def test_what_may_break_bit_for_bit_resuming_is_said(facts: dict[str, Any]) -> None:
    now = {**facts, "torch": "9.9", "ranks": 4, "threads": 64, "cuda": "13.0", "device": {"name": "NVIDIA H200"}}
    before = {**facts, "torch": "2.10.0", "threads": 1, "cuda": None, "device": {"name": "a CPU"}}
    assert environment.changes(before, now) == [
        "torch was 2.10.0, now 9.9",
        "CUDA was none, now 13.0",
        "the number of ranks was 2, now 4",
        "the number of threads was 1, now 64",
        "the device was a CPU, now NVIDIA H200",
    ]

"""metrics.jsonl: exact numbers, whole lines, crashes, full disks, and one history after resuming."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from natgrad.training.metrics_file import MetricsFile, read, read_counting


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond `size`: as a full disk, but only for this process."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps(path: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in read(path)]


def test_numbers_come_back_exactly(path: Path) -> None:
    before = time.time()
    assert MetricsFile(path).write("train", step=3, loss=0.1 + 0.2, tiny=5e-324, accuracy=None, text="a\nü", n=2**70)
    (line,) = read(path)
    assert before <= line.pop("time") <= time.time()
    assert line == {
        "kind": "train", "step": 3, "loss": 0.1 + 0.2, "tiny": 5e-324, "accuracy": None, "text": "a\nü", "n": 2**70,
    }  # fmt: skip


def test_scalars_of_torch_and_parts_are_written(path: Path) -> None:
    parts = {"model": torch.tensor(0.5), "data": 0.25}
    MetricsFile(path).write("train", step=1, loss=torch.tensor(0.1, dtype=torch.float64), parts=parts, list=(1, 2))
    (line,) = read(path)
    assert (line["loss"], line["parts"], line["list"]) == (0.1, {"model": 0.5, "data": 0.25}, [1, 2])


def test_what_is_not_finite_is_null_and_named(path: Path) -> None:
    MetricsFile(path).write("train", step=1, loss=math.nan, lr=0.1, kl=math.inf, parts={"a": -math.inf})
    (line,) = [json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines()]
    assert (line["loss"], line["kl"], line["parts"], line["lr"]) == (None, None, {"a": None}, 0.1)
    assert line["not_finite"] == {"loss": "nan", "kl": "inf", "parts.a": "-inf"}


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({"time": 1.0}, "time cannot be measured"),
        ({"loss": torch.ones(2)}, "loss must be a number, a text, None, or a dict or list of them, got Tensor"),
        ({"parts": {"x": object()}}, "parts.x must be a number"),
    ],
)
def test_wrong_values_are_refused(path: Path, measured: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MetricsFile(path).write("train", step=1, **measured)
    assert not path.exists()


def test_a_line_that_a_kill_cut_off_is_skipped_and_counted(path: Path) -> None:
    MetricsFile(path).write("train", step=1)
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st')
    MetricsFile(path).write("train", step=2)
    assert path.read_bytes().count(b"\n") == 3
    assert steps(path) == [("train", 1), ("train", 2)]
    assert read_counting(path)[1] == 1


def test_a_line_that_lacks_only_its_end_counts(path: Path) -> None:
    MetricsFile(path).write("train", step=1)
    path.write_bytes(path.read_bytes()[:-1])
    assert steps(path) == [("train", 1)]
    MetricsFile(path).write("train", step=2)
    assert steps(path) == [("train", 1), ("train", 2)]


def test_foreign_lines_are_skipped_and_counted(path: Path) -> None:
    bad = [
        b"hello",
        b"\xff\xfe\x00",
        bytes(50),
        b"[1, 2]",
        b"{}",
        b'{"kind": "train", "step": "x", "time": 0}',
        b"[" * 9999,
    ]
    path.write_bytes(b"\n".join(bad) + b"\n\n\n")
    MetricsFile(path).write("test", step=1)
    lines, broken = read_counting(path)
    assert ([line["kind"] for line in lines], broken) == (["test"], len(bad))


def test_a_missing_file_is_an_error_of_reading(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(path)


def test_resuming_makes_later_steps_obsolete_and_cuts_nothing_off(path: Path) -> None:
    first = MetricsFile(path)
    first.write("start", step=0)
    for step in (10, 20, 30, 40):
        first.write("train", step=step, loss=1.0)
    first.write("warning", step=35, text="late")
    second = MetricsFile(path, resume_from=20)
    second.write("train", step=30, loss=2.0)
    third = MetricsFile(path, resume_from=25)
    third.write("train", step=30, loss=3.0)
    third.write("end", step=30)
    assert steps(path) == [
        ("start", 0), ("train", 10), ("train", 20), ("resume", 20), ("resume", 25), ("train", 30), ("end", 30),
    ]  # fmt: skip
    assert [line["loss"] for line in read(path) if line["kind"] == "train"] == [1.0, 1.0, 3.0]
    assert len(path.read_text().splitlines()) == 11


def test_a_full_disk_loses_lines_warns_once_and_is_gone_when_there_is_room(path: Path) -> None:
    warnings: list[str] = []
    file = MetricsFile(path, warn=warnings.append)
    assert file.write("train", step=1)
    for room in (0, 10, 0):  # nothing fits, a part of a line, nothing
        with file_size_limit(path.stat().st_size + room):
            assert not file.write("train", step=2)
    assert file.write("train", step=3)
    assert steps(path) == [("train", 1), ("train", 3)]
    assert read_counting(path)[1] == 1
    (text,) = warnings
    assert text == f"{path} cannot be written (File too large): its lines are lost until it can be"


def test_a_folder_that_is_gone_does_not_stop_training(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "gone" / "metrics.jsonl", resume_from=3)
    assert not file.write("train", step=4)
    (tmp_path / "gone").mkdir()
    assert file.write("train", step=5)


def test_lines_of_several_writers_do_not_mix_and_can_be_read_meanwhile(path: Path) -> None:
    path.touch()

    def write(kind: str) -> None:
        file = MetricsFile(path)
        for step in range(200):
            file.write(kind, step=step, text=kind * 300)

    threads = [threading.Thread(target=write, args=(kind,)) for kind in ("train", "test")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        lines, broken = read_counting(path)
        assert broken <= 1  # the last one may be half there
        assert all(line["text"] == line["kind"] * 300 for line in lines)
    lines, broken = read_counting(path)
    assert ([line["step"] for line in lines if line["kind"] == "train"], broken) == (list(range(200)), 0)
    assert len(lines) == 400

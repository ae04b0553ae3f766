"""How many cores there are to use, of a machine and of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from natgrad import cores
from natgrad.cores import available_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """One with 64 cores, and no word of a container."""
    cores._share.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "_NEWER", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "_OLDER", (tmp_path / "quota", tmp_path / "period"))
    yield tmp_path
    cores._share.cache_clear()


def test_those_that_the_process_is_let_run_on() -> None:
    assert available_cores() == 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 64),
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 64),
        ("nonsense\n", 64),
        ("100000 0\n", 64),
    ],
)
def test_a_container_has_a_share(machine: Path, text: str, expected: int) -> None:
    (machine / "cpu.max").write_text(text)
    assert available_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 64), ("800000", 8)])
def test_a_container_of_an_older_system(machine: Path, quota: str, expected: int) -> None:
    (machine / "quota").write_text(quota)
    (machine / "period").write_text("100000")
    assert available_cores() == expected


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1

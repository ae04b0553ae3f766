"""What the system says of its processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from natgrad import processor

TEXT = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC: 9654
flags\t\t: fpu avx512f
power management:

processor\t: 1
vendor_id\t: Other
"""


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    processor.entry.cache_clear()
    monkeypatch.setattr(processor, "_FILE", tmp_path / "cpuinfo")
    yield tmp_path / "cpuinfo"
    processor.entry.cache_clear()


def test_entries_of_the_first_core(file: Path) -> None:
    file.write_text(TEXT, encoding="utf-8")
    assert processor.entry("vendor_id") == "AuthenticAMD"
    assert processor.entry("model name") == "AMD EPYC: 9654"
    assert processor.entry("power management") is None
    assert processor.entry("vendor") is None


def test_systems_without_such_a_file() -> None:
    assert processor.entry("vendor_id") is None

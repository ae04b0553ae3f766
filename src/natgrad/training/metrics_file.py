"""metrics.jsonl: what a run measured, one JSON object a line, readable while it is written and after any crash.

Every line has ``"kind"`` (`KINDS`), ``"step"`` and ``"time"`` (seconds since 1970), and then whatever was measured.
Nothing is ever cut off: a run that goes on from a checkpoint says so in a line, and `read` leaves out what that made
obsolete. JSON has no NaN and no infinity, so they are ``null``, and named: ``"not_finite": {"loss": "nan"}``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("start", "resume", "train", "test", "layers", "coverage", "end", "warning")
"""The kinds that a training run writes; readers should let others pass."""

_OURS = ("kind", "step", "time", "not_finite")


class MetricsFile:
    """Appends lines to a file. What cannot be written (a full disk) is lost, and training goes on.

    `warn` is called with a text at the first failure, and only then. `resume_from` is the step of the checkpoint that
    a run goes on from: what was written of later steps no longer counts.
    """

    def __init__(
        self, path: Path, *, resume_from: int | None = None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(path)
        self._warn = warn
        if resume_from is not None:
            self.write("resume", step=resume_from)

    def write(self, kind: str, *, step: int, **measured: Any) -> bool:
        """Appends a line; False where that failed. Values are numbers, texts, None, and dicts and lists of them."""
        if wrong := [name for name in _OURS if name in measured]:
            raise ValueError(f"{', '.join(wrong)} cannot be measured: every line has its own; choose another name")
        not_finite: dict[str, str] = {}
        line = {"kind": kind, "step": step, "time": time.time()}
        line.update({name: _plain(value, name, not_finite) for name, value in measured.items()})
        if not_finite:
            line["not_finite"] = not_finite
        try:
            _append(self.path, json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            warn, self._warn = self._warn, None  # before it is called: it may well be written here too
            if warn is not None:
                warn(f"{self.path} cannot be written ({error.strerror or error}): its lines are lost until it can be")
            return False
        return True


def read(path: Path) -> list[dict[str, Any]]:
    """One consistent history: without broken lines, and without the steps that a resumed run took again."""
    return read_counting(path)[0]


def read_counting(path: Path) -> tuple[list[dict[str, Any]], int]:
    """`read`, and how many lines were broken: cut off by a crash or a full disk, or not of this format."""
    lines: list[dict[str, Any]] = []
    broken = 0
    for text in Path(path).read_bytes().split(b"\n"):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None:
            broken += 1
            continue
        if line["kind"] in ("start", "resume"):
            lines = [one for one in lines if one["step"] <= line["step"]]
        lines.append(line)
    return lines, broken


def _append(path: Path, line: bytes) -> None:
    """One write, at the end of the file as it is then, so that lines of several writers never mix. (A reader may still
    see the beginning of a line: not every file system makes it wait.) Opened each time: a file that somebody moves, or
    a server that goes and comes back, costs no more than the lines in between.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size:
            os.lseek(descriptor, size - 1, os.SEEK_SET)
            if os.read(descriptor, 1) != b"\n":  # whoever wrote last was stopped in the middle
                line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError("only a part of a line could be written; is the disk full?")
    finally:
        os.close(descriptor)


def _plain(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    """The value as JSON has it; what is not finite becomes None, and is noted by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        not_finite[name] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{name}.{key}", not_finite) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{name}.{index}", not_finite) for index, one in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # scalars of torch and numpy
        return _plain(value.item(), name, not_finite)
    raise TypeError(f"{name} must be a number, a text, None, or a dict or list of them, got {type(value).__name__}")


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    whole = isinstance(line.get("step"), int) and isinstance(line.get("time"), int | float)
    return line if whole else None

"""What command lines of benchmarks have in common: what cannot be is refused in one line, before anything is done."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.workloads import Device
from natgrad.training import ranks


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that counts: at least so many."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"takes a whole number, at least {least}, got {text!r}")
        return number

    return read


def _real(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan  # fits nowhere
        if not fits(number):
            raise argparse.ArgumentTypeError(f"takes {expected}, got {text!r}")
        return number

    return read


# The types of other numbers.
budget = _real("seconds, at least 0", lambda number: number >= 0)
positive = _real("a number above 0", lambda number: 0 < number < math.inf)
not_negative = _real("a number, at least 0", lambda number: 0 <= number < math.inf)
part = _real("a part: above 0, at most 1", lambda number: 0 < number <= 1)
momentum = _real("a number, at least 0 and below 1", lambda number: 0 <= number < 1)


def check_out(option: str, path: Path) -> None:
    """ValueError where a file cannot be written there: a folder by mistake would be made, even at the root."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder, not a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


@contextmanager
def written_by(command: str, path: Path) -> Iterator[None]:
    """Reading a file: ValueError names it, and what was expected, where it is not what this command writes."""
    expected = f"expected JSON as python -m {command} writes it"
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {expected}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON; {expected}") from None
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} has other things in it; {expected}") from None


def device_of(name: str) -> Device:
    """The device that was asked for; ValueError where it is not there, in the words of ``natgrad train``."""
    return Device(str(ranks.device_of(name, 0)))

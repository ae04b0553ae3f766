"""Numbers as words, for people: in the terminal, in log files and in tables.

Everything here takes what a diverged run gives (NaN, infinity, nothing at all) and never raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from natgrad.report import memory
from natgrad.training.events import PARTS, Progress

UNKNOWN = "?"
"""Stands for a number that there isn't one of."""

SLOW_DATA = 0.1
"""Share of a step above which waiting for data is worth saying."""


def duration(seconds: float | None) -> str:
    """``0:01:23``, with days in front where there are any; what is longer than lives is not known."""
    if not _finite(seconds) or not 0 <= seconds < 1e10:
        return UNKNOWN
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days:,}d {clock.zfill(8)}" if days else clock


def span(seconds: float | None) -> str:
    """What a part of a step takes, to three digits: ``12.3 ms``, ``1.23 s``."""
    if not _finite(seconds):
        return UNKNOWN
    if abs(seconds) < 0.9995:
        milliseconds = seconds * 1000
        # Below ten microseconds nobody wants digits, and the width should not jump.
        return f"{milliseconds:.2f} ms" if abs(milliseconds) < 0.995 else f"{steady(milliseconds, 3)} ms"
    return f"{steady(seconds, 3)} s"


def number(value: float | None, digits: int = 3) -> str:
    """As short as it goes: ``0.05``, ``0.001``, ``2.1e-04``."""
    if value is None:
        return UNKNOWN
    if not _finite(value):
        return str(float(value))
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        plain = f"{value:.{max(digits, _whole_digits(value))}g}"
        if abs(value) >= 1e-3 or len(plain) <= len("0.0005"):
            return plain
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"


def steady(value: float | None, digits: int = 4) -> str:
    """Always with as many digits, so that a number that is redrawn does not change its width: ``0.4300``."""
    if value is None:
        return UNKNOWN
    if not _finite(value):
        return str(float(value))
    if value == 0:
        return f"{0:.{digits - 1}f}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 2}e}"
    return f"{value:#.{max(digits, _whole_digits(value))}g}".rstrip(".")


def percent(fraction: float | None) -> str:
    """An accuracy: ``86.1%``."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.1f}%" if _finite(fraction) else str(float(fraction))


def share(fraction: float | None) -> str:
    """A part of a whole, without decimals; what is there but small is ``<1%``."""
    if not _finite(fraction):
        return UNKNOWN
    return "<1%" if 0 < fraction < 0.005 else f"{fraction:.0%}"


def count(value: float | None) -> str:
    """``1,234``."""
    return f"{round(value):,}" if _finite(value) else UNKNOWN


def quantity(value: float | None) -> str:
    """A large count to three digits: ``1.23 k``, ``25.6 M``; small ones in full."""
    if not _finite(value):
        return UNKNOWN
    if abs(value) < 1000:
        return number(value)
    for unit in ("k", "M", "G"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
    return f"{number(value / 1000)} T"


def rate(value: float | None) -> str:
    """Something a second: digits for slow ones, thousands for fast ones."""
    if not _finite(value):
        return UNKNOWN
    return number(value) if abs(value) < 100 else count(value) if abs(value) < 1e5 else quantity(value)


def size(bytes: float | None) -> str:
    """Memory: ``161.8 KiB``."""
    return memory(bytes) if _finite(bytes) else UNKNOWN


def plural(value: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Each part's share of their sum; what is no time (negative, NaN) counts as none."""
    times = {name: time if _finite(time) and time > 0 else 0.0 for name, time in parts.items()}
    whole = sum(times.values())
    return {name: time / whole if whole else 0.0 for name, time in times.items()}


def parts_of(event: Progress) -> dict[str, float]:
    """A step's parts in their usual order, without those of K-FAC where it is off."""
    off = event.damping is None and event.predicted_kl is None
    hidden = {name for name in ("statistics", "solve", "precondition") if off and not event.parts.get(name)}
    names = [*PARTS, *(name for name in event.parts if name not in PARTS)]
    return {name: event.parts[name] for name in names if name in event.parts and name not in hidden}


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _whole_digits(value: float) -> int:
    """Digits before the point."""
    return math.floor(math.log10(abs(value))) + 1

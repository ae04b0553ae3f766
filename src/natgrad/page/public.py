"""What of a comparison may be shown around: no places on somebody's disk, and not the same thing a thousand times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from natgrad.compare.history import Comparison, Contender, Run

WARNINGS = 3
"""Of a run; there may be one for every step."""

_PATH = re.compile(r"""(?<![\w.…])(?:~|/|[A-Za-z]:\\)[^\s'"`,;()<>]*[/\\]([^\s'"`,;()<>/\\]+)""")


def without_paths(text: str) -> str:
    """``/home/somebody/runs/kfac/step-3.pt`` is no more than ``…/step-3.pt``."""
    return _PATH.sub(r"…/\1", text)


def public(comparison: Comparison) -> Comparison:
    """The comparison with its free texts fit to be shown."""
    contenders = tuple(_contender(one) for one in comparison.contenders)
    return replace(comparison, contenders=contenders, notes=tuple(map(without_paths, comparison.notes)))


def _contender(contender: Contender) -> Contender:
    trials = tuple(replace(trial, note=without_paths(trial.note)) for trial in contender.trials)
    runs = tuple(_run(run) for run in contender.runs)
    return replace(contender, runs=runs, trials=trials, note=without_paths(contender.note))


def _run(run: Run) -> Run:
    about = {name: without_paths(one) if isinstance(one, str) else one for name, one in run.about.items()}
    return replace(run, reason=without_paths(run.reason), warnings=few(run.warnings), about=about)


def few(warnings: Sequence[str]) -> tuple[str, ...]:
    """The first of them, those once that differ in numbers only."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for text in warnings:
        kind = re.sub(r"\d+", "#", text)
        first.setdefault(kind, without_paths(" ".join(text.split())))
        times[kind] += 1
    said = [f"{text} (and {times[kind] - 1} like it)" if times[kind] > 1 else text for kind, text in first.items()]
    rest = len(said) - WARNINGS
    return tuple(said if rest <= 0 else [*said[:WARNINGS], f"and {rest} other warnings"])

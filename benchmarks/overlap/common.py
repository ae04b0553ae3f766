"""What both measurements have in common: files, choices, colours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

import natgrad

COLOURS = {"none": "#0072b2", "cpu": "#d55e00", "gpu": "#cc79a7", "staggered": "#009e73", "sgd": "#555555"}
OVERLAPS: dict[str, Any] = {
    "none": None,
    "staggered": "staggered",
    "cpu": natgrad.Background("cpu"),
    "gpu": natgrad.Background("gpu"),
}


def write(path: Path, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """All of it, as JSON, a run on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n    ".join(json.dumps(run) for run in runs)
    text = json.dumps(head, indent=2).removesuffix("\n}")
    path.write_text(f'{text},\n  "runs": [\n    {lines}\n  ]\n}}\n')


def chosen(given: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The names of ``--only``, in the order of `known`."""
    names = list(default) if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--only takes {', '.join(known)}; got {name}")
    return [name for name in known if name in names]


def set_style() -> None:
    """Of both pictures."""
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def every(count: int, what: str) -> str:
    """How often: every update, every 10 updates."""
    return f"every {what}" if count == 1 else f"every {count} {what}s"

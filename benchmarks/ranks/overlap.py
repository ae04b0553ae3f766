"""What of the messages is hidden behind other work: how long they are under way, and how long ranks wait for them.

Beside it the same without overlap: sums sent in the step and not at the end of the backward pass, and every message
waited for as soon as it is sent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.ranks.common import Loop, Outcome, Table, on_ranks
from natgrad.distribute.channel import Message

KINDS = ("factors", "solutions", "gradients")
STEPS, EVERY = 15, 5


class Watched(Message):
    """A message whose waits are added up by kind, and which `at_once` is waited for when it is sent."""

    seconds: dict[str, float]
    at_once: bool

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.at_once:
            self.wait()

    def wait(self) -> Tensor:
        """Waits, on the clock."""
        began = time.perf_counter()
        flat = super().wait()
        self.seconds[self._kind] = self.seconds.get(self._kind, 0.0) + time.perf_counter() - began
        return flat


def watch(strategy: str, at_once: bool) -> dict[str, float]:
    """Runs on every rank: medians in seconds of waiting in a step that has such messages."""
    loop = Loop("resnet20", batch=32, image=32, factor_update_steps=EVERY, inv_update_steps=EVERY, strategy=strategy)
    seen: dict[str, list[float]] = {}
    with patch("natgrad.distribute.channel.Message", Watched):
        Watched.at_once = at_once
        for step in range(STEPS + EVERY):
            Watched.seconds = {}
            if at_once:
                loop.kfac._window.on_backward = None
            loop.step()
            for kind, seconds in Watched.seconds.items():
                if step >= EVERY:
                    seen.setdefault(kind, []).append(seconds)
    return {kind: statistics.median(each) for kind, each in seen.items()}


@dataclass(frozen=True)
class Row:
    """Seconds of waiting, of the rank that waits longest."""

    ranks: int
    strategy: str
    kind: str
    at_once: float
    waited: float


def run_overlap() -> Outcome:
    """ResNet-20 on two and three ranks."""
    rows = []
    for ranks in (2, 3):
        for strategy in ("comm-opt", "layer-wise"):
            plain, overlapped = (on_ranks(watch, ranks, strategy, at_once) for at_once in (True, False))
            for kind in (kind for kind in KINDS if kind in plain[0]):
                longest = (max(answer[kind] for answer in answers) for answers in (plain, overlapped))
                rows.append(Row(ranks, strategy, kind, *longest))
    return Outcome([table(rows)], [asdict(row) for row in rows])


def table(rows: Sequence[Row]) -> Table:
    """Milliseconds, and the share that is hidden."""
    cells = [
        [
            row.strategy,
            str(row.ranks),
            row.kind,
            f"{1e3 * row.at_once:.1f}",
            f"{1e3 * row.waited:.1f}",
            f"{1 - row.waited / row.at_once:.0%}",
        ]
        for row in rows
    ]
    return Table(
        "What overlaps: ms of waiting in a step that has such messages",
        ["strategy", "ranks", "messages", "sent in the step, waited for at once", "as natgrad does", "hidden"],
        cells,
        "ResNet-20, 32 cases a rank, medians, of the rank that waits longest; waiting includes that for a rank that is "
        "still computing.",
    )

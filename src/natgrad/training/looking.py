"""Now and then a look at K-FAC's blocks, and the lines of metrics.jsonl about them."""

from __future__ import annotations

from dataclasses import asdict

from natgrad.kfac import KFAC
from natgrad.training.events import Looked
from natgrad.training.metrics_file import MetricsFile


class Looking:
    """Looks at a KFAC less and less often: with ``solver="inverse"`` that means to decompose its factors.

    Every rank holds a part of what there is to see: all must look. When follows from the steps alone, so they do. One
    that looks `alone` sees its own part.
    """

    def __init__(self, kfac: KFAC, *, alone: bool = False) -> None:
        self._kfac = kfac
        self._alone = alone
        self._last = 0

    def look(self, step: int, *, last: bool = False) -> Looked | None:
        """What there is to see after a step, if it is twice as late as the last time, or the `last` one."""
        if step == 0 or step == self._last or (step < 2 * self._last and not last):
            return None
        coverage = None if self._last else tuple(self._kfac.report())
        self._last = step
        return Looked(step=step, layers=self._kfac.layers(alone=self._alone), coverage=coverage)


def write_looked(file: MetricsFile, event: Looked) -> None:
    """The lines that K-FAC has of its own."""
    file.write("layers", step=event.step, layers=[asdict(layer) for layer in event.layers])
    if event.coverage is not None:
        file.write("coverage", step=event.step, rows=[asdict(line) for line in event.coverage])

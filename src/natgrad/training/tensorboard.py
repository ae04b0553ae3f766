"""TensorBoard's files of a run. They are a convenience: neither their absence nor a full disk stops a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .events import Evaluated, Finished, Listener, Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MISSING = (
    "TensorBoard is not installed, so there will be no curves for it (everything else works); pip install tensorboard"
)


def available() -> bool:
    """Whether TensorBoard can be imported."""
    try:
        import torch.utils.tensorboard  # noqa: F401  (slow, and not a dependency)
    except Exception:  # not installed, or one that does not go with its protobuf or numpy
        return False
    return True


class TensorBoard(Listener):
    """A listener that draws curves. `problem` says why it does nothing (any more), where that is so.

    `warn` gets the same text, once. After a failed write nothing more is written: TensorBoard's own thread has died of
    it, and metrics.jsonl has the numbers.
    """

    def __init__(
        self, folder: Path, *, resume_from: int | None = None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.problem: str | None = None
        self._folder = folder
        self._warn = warn
        self._writer: SummaryWriter | None = None
        if not available():
            self._give_up(MISSING)
            return
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_from is None else resume_from + 1  # curves lose what comes from that step on
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)
        except Exception as error:
            self._give_up(self._not_written(error))

    def progress(self, event: Progress) -> None:
        """Training's curves, K-FAC's, and where the time goes (milliseconds)."""
        self._add(
            event.step,
            {
                "train/loss": event.loss,
                "train/accuracy": event.accuracy,
                "train/lr": event.lr,
                "kfac/damping": event.damping,
                "kfac/predicted_kl": event.predicted_kl,
                "kfac/clip_factor": event.clip_factor,
                **{f"time/{part}": 1000 * seconds for part, seconds in event.parts.items()},
                "time/step": 1000 * event.step_seconds,
                "time/cases_per_second": event.cases_per_second,
            },
        )

    def evaluated(self, event: Evaluated) -> None:
        """The test's curves."""
        self._add(event.step, {"test/loss": event.loss, "test/accuracy": event.accuracy, "test/top5": event.top5})

    def finished(self, event: Finished) -> None:
        """Everything is on disk from here on."""
        self.close()

    def close(self) -> None:
        """Writes what is waiting. May be called twice; what comes later is not drawn."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._give_up(self._not_written(error))

    def _add(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        except Exception as error:  # of the writing thread, which raises what it died of at the next call
            self._give_up(self._not_written(error))

    def _not_written(self, error: Exception) -> str:
        return f"TensorBoard's files in {self._folder} cannot be written ({error}): its curves end here"

    def _give_up(self, problem: str) -> None:
        self._writer = None
        self.problem = problem
        if self._warn is not None:
            self._warn(problem)

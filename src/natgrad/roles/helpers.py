"""The helpers of a gradient rank, as its `KFAC` sees them; and a stats worker's life."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from natgrad.errors import Warner
from natgrad.overlap.options import Background
from natgrad.packets import unpacked
from natgrad.roles.deliveries import Deliveries, pack_statistics
from natgrad.roles.inverse import InverseWorkers
from natgrad.roles.post import Caller, hang_up
from natgrad.roles.role import Role
from natgrad.roles.stats import Desk
from natgrad.window import Window

Forward = Callable[[nn.Module, Any], Any]


class Helpers:
    """Stats and inverse workers. `deliveries` is there on every gradient rank where there are stats workers, `inverse`
    where there are inverse workers. What happens to them is told at the next step. All calls end with their `owner`.
    """

    def __init__(self, role: Role, model: nn.Module, *, owner: object) -> None:
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.deliveries = Deliveries(role, model, on_change=self._news.put) if role.stats else None
        self.inverse = InverseWorkers(role, on_change=self._news.put) if role.inverse else None
        callers: list[Caller] = [] if self.deliveries is None else [*self.deliveries.lines]
        if self.inverse is not None:
            callers.append(self.inverse)
        # Not of these helpers, which know the model: that may know its owner.
        weakref.finalize(owner, hang_up, callers).atexit = False  # calls have an end of their own

    def tell(self, warner: Warner) -> None:
        """Passes on what has happened since."""
        while not self._news.empty():
            warner.tell(f"{self._news.get()} (step {warner.step})")

    def counters(self) -> dict[str, int | None]:
        """For metrics: who is there, and what has come."""
        found: dict[str, int | None] = {}
        if self.deliveries is not None:
            found |= {"stats_workers": self.deliveries.alive, "deliveries": self.deliveries.received}
        if self.inverse is not None:
            found["inverse_workers"] = self.inverse.alive
        return found


def refuse_role(role: Any, fisher: str) -> None:
    """Checks the option `roles`, before anything is started."""
    if not isinstance(role, Role):
        raise TypeError(f"roles must be what natgrad.roles.take() returned, got {role!r}")
    if role.stats and fisher == "empirical":
        raise ValueError(
            "stats workers draw their own targets: with stats workers fisher must be 'sampled' or 'exact', on all ranks"
        )


def with_inverse_workers(overlap: Any, inverse: InverseWorkers) -> Background:
    """The option `overlap` where inverse workers make the decompositions."""
    if overlap is None or overlap == "background":
        overlap = Background()
    if isinstance(overlap, Background) and overlap.where == "auto":
        # Who hangs is lost with the first task: the next ones are not to wait for it as long again.
        inverse.timeout = overlap.timeout
        return replace(overlap, where=inverse)
    raise ValueError(
        "inverse workers make the decompositions in the background: leave overlap= out, or pass natgrad.Background() "
        "with other options than where="
    )


@torch.no_grad()
def take_statistics(
    desk: Desk,
    model: nn.Module,
    window: Window,
    arm: Callable[[], None],
    batches: Iterable[Any],
    forward: Forward | None,
) -> None:
    """A stats worker's life: parameters in, statistics of its own batches out, until training is over."""
    known: int | None = None
    for batch in _endless(batches):
        latest = desk.latest()
        while latest is None and not desk.over:
            latest = desk.latest()
        if desk.over or latest is None:
            return
        step, payload = latest
        if step != known:
            model.load_state_dict(unpacked(payload))
            known = step
        arm()
        with torch.enable_grad():
            _run(model, batch, forward)
        window.count()
        window.finish()
        if window.terms > 0:
            desk.deliver(pack_statistics(window, step))
        window.close()


def _run(model: nn.Module, batch: Any, forward: Forward | None) -> Any:
    """On the inputs of a batch, where it is a pair of inputs and targets."""
    if forward is not None:
        return forward(model, batch)
    return model(batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        some = False
        for batch in batches:
            some = True
            yield batch
        if not some:
            raise ValueError("a stats worker needs batches again and again: these were none, or can be read only once")

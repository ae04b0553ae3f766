"""Decompositions off the critical path: what the user may say."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from natgrad.cores import available_cores
from natgrad.options import choice, fraction, refuse_class, whole_number

PLACES = ("auto", "cpu", "gpu", "step")
OVERLAPS = ("background", "staggered")
READY = "ready"

_LONGEST = 1e9  # seconds
_TORCH_THREADS = 4  # of one worker: more help large matrices little
# Up to this size several factors at a time, of a thread each, keep fewer cores busy (576: 22 ms of one, 14 of two).
_SMALL = 768


@dataclass(frozen=True)
class Background:
    """Decompositions beside training: ``overlap=``, for those who want to say more than ``"background"``.

    Args:
        where: ``"cpu"``: threads of this process, from pinned copies where the model is on a GPU. ``"gpu"``: a thread
            with a stream of its own. ``"step"``: in the step, and yet taken over after `delay`. Or any
            `concurrent.futures.Executor`: a process pool, or the workers of Dask, Ray, MPI on other machines.
            ``"auto"``: cores or a stream, by what the factors' decompositions cost there (`Strategy.costs`: measured
            numbers of such devices, measured here, or given).
        delay: a whole number of steps k: what is asked for at step t is taken over at step t + k, on every rank, and
            waited for if it is late, so that a run repeats bit for bit. ``"ready"``: at the first step after it has
            come; on several ranks only where each layer has one owner. None: ``"ready"`` on one rank, half the interval
            of decompositions on several.
        workers: how many threads ``"cpu"`` has.
        threads: how many threads of LAPACK each of them has.
        timeout: seconds after which what an executor has not sent is made here; after twice as many, in the step.
        max_staleness: steps; a decomposition in use that is as old is replaced, before `delay` is over too, and what
            is to replace it waited for. What has not been asked for cannot be: let it be above ``inv_update_steps``.
    """

    where: str | Executor = "auto"
    _: KW_ONLY
    delay: int | str | None = None
    workers: int | None = None
    threads: int | None = None
    timeout: float = 60.0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        refuse_class("where", self.where)
        if not _is_executor(self.where):
            choice("where", self.where, PLACES)
        whole = isinstance(self.delay, int) and not isinstance(self.delay, bool) and self.delay >= 0
        if not whole and self.delay not in (None, READY):
            raise ValueError(
                f"delay must be a whole number of steps of at least 0, {READY!r}, or None for the default, got "
                f"{self.delay!r}"
            )
        whole_number("workers", self.workers, none="as many as fit")
        whole_number("threads", self.threads, none="as many as fit")
        whole_number("max_staleness", self.max_staleness, none="no bound")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout <= _LONGEST:  # what locks can wait for has an end
            raise ValueError(
                f"timeout must be a number of seconds above 0 and at most {_LONGEST:g}, got {self.timeout!r}"
            )
        if not isinstance(self.where, str) and (self.workers is not None or self.threads is not None):
            raise ValueError("workers and threads are those of this process: an executor has its own")

    def sizes(self, largest: int) -> tuple[int, int]:
        """How many threads of this process, and how many of LAPACK in each, for factors of which this is the `largest`
        size.
        """
        free = free_cores()
        several = 1 if largest <= _SMALL else min(_TORCH_THREADS, free)
        threads = several if self.threads is None else self.threads
        return (max(1, free // threads) if self.workers is None else self.workers), threads


@dataclass(frozen=True)
class Staggered:
    """Decompositions in the step, a few layers at a time, so that no step takes much longer than others.

    Args:
        max_overhead: the part of the time of training that decompositions may take, 0.05 for 5 %. The layers whose
            factors have moved most since they were decomposed go first, as often as that allows; ``inv_update_steps``
            then has no say. None: every layer once every ``inv_update_steps``, spread evenly.
    """

    max_overhead: float | None = None

    def __post_init__(self) -> None:
        if self.max_overhead is not None:
            fraction("max_overhead", self.max_overhead)


Overlap = Background | Staggered


def checked_overlap(overlap: Any, delay: Any, max_overhead: Any, max_staleness: Any) -> Overlap | None:
    """The options `overlap`, `delay`, `max_overhead` and `max_staleness`: words and numbers, or the whole."""
    refuse_class("overlap", overlap)
    if isinstance(overlap, str) and overlap in PLACES:
        raise ValueError(
            f"overlap={overlap!r} is where decompositions are made in the background: natgrad.Background({overlap!r})"
        )
    if isinstance(overlap, str):
        choice("overlap", overlap, OVERLAPS)
    elif overlap is not None and not isinstance(overlap, Background | Staggered) and not _is_executor(overlap):
        raise ValueError(
            f"overlap must be {', '.join(map(repr, OVERLAPS))}, a natgrad.Background or natgrad.Staggered, a "
            f"concurrent.futures.Executor, or None, got {overlap!r}"
        )
    if isinstance(overlap, Staggered) or overlap == "staggered":
        if delay is not None or max_staleness is not None:
            raise ValueError("delay and max_staleness go with overlap='background': 'staggered' solves in the step")
        staggered = overlap if isinstance(overlap, Staggered) else Staggered()
        return staggered if max_overhead is None else replace(staggered, max_overhead=max_overhead)
    if max_overhead is not None:
        raise ValueError("max_overhead goes with overlap='staggered'")
    if overlap is None and delay is None:
        if max_staleness is not None:
            raise ValueError("max_staleness goes with overlap='background'")
        return None
    if isinstance(overlap, Background):
        background = overlap
    else:
        background = Background("step" if overlap is None else "auto" if overlap == "background" else overlap)
    if delay is not None:
        background = replace(background, delay=delay)
    return background if max_staleness is None else replace(background, max_staleness=max_staleness)


def unreachable(overlap: Overlap | None, interval: Any) -> str | None:
    """What is to be said of a `max_staleness` that no decomposition can keep; `interval` is ``inv_update_steps``."""
    bound = overlap.max_staleness if isinstance(overlap, Background) else None
    if bound is None or not isinstance(interval, int) or bound > interval:
        return None
    return (
        f"max_staleness={bound} is not above inv_update_steps={interval}, before which nothing new is asked for: "
        f"decompositions get {interval} steps old all the same, and then each new one is waited for"
    )


def _is_executor(value: Any) -> bool:
    """Also one that follows the interface without inheriting from it."""
    return not isinstance(value, str) and callable(getattr(value, "submit", None))


def free_cores() -> int:
    """Cores of this process's share of the machine that training and data loading do not need: three quarters."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(local) if local.isdigit() else 1
    return max(1, 3 * available_cores() // (4 * max(1, ranks)))

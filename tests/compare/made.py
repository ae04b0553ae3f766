"""Runs and contenders by hand, with curves of a few points."""

from __future__ import annotations

from pathlib import Path

from natgrad.compare.history import Comparison, Contender, Point, Run, Trial


def run(
    errors,
    *,
    name: str = "SGD",
    seed: int = 1,
    seconds_a_step: float = 0.01,
    every: int = 10,
    reason: str = "finished",
    uses_kfac: bool = False,
    parts=None,
    settings=None,
    losses=None,
) -> Run:
    """A run tested every so many steps; errors may be None, for a loss that is no number."""
    points = tuple(
        Point(
            step=every * index,
            seconds=every * index * seconds_a_step,
            loss=error if losses is None else losses[index - 1],
            error=error if losses is None else None,
        )
        for index, error in enumerate(errors if losses is None else losses, start=1)
    )
    steps = every * len(points)
    return Run(
        folder=Path(f"runs/{name}/seed-{seed}"),
        name=name,
        seed=seed,
        uses_kfac=uses_kfac,
        test=points,
        parts=parts or {},
        reason=reason,
        steps=steps,
        seconds=steps * seconds_a_step,
        settings=settings or {},
    )


def contender(
    name: str, *runs: Run, uses_kfac: bool = False, trials: tuple[Trial, ...] = (), settings=None
) -> Contender:
    return Contender(name=name, runs=runs, uses_kfac=uses_kfac, trials=trials, settings=settings or {})


def sgd(*errors, **more) -> Contender:
    return contender("SGD", *(run(one, seed=seed, **more) for seed, one in enumerate(errors, start=1)))


def kfac(*errors, **more) -> Contender:
    runs = (run(one, name="K-FAC", seed=seed, uses_kfac=True, **more) for seed, one in enumerate(errors, start=1))
    return contender("K-FAC", *runs, uses_kfac=True)


def comparison(*contenders: Contender, target: float | None = None) -> Comparison:
    return Comparison(title="made up", contenders=contenders, target=target)

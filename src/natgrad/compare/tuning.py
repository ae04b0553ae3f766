"""The sweep that every contender gets alike: settings spread evenly, and successive halving of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from natgrad.compare.history import Trial
from natgrad.recipes.schema import Recipe

DECADES = {"lr": 3.0, "damping": 2.0}
"""How far a sweep reaches, all in all, around the centre."""

_TIMES = ("over", "every", "at", "warmup")  # of schedules: in epochs


@dataclass(frozen=True)
class Rung:
    """So many settings, the best so far, each trained for so many epochs."""

    settings: int
    epochs: int


@dataclass(frozen=True)
class Outcome:
    """What a trial came to. Lower is better; `score` is None where it diverged or crashed, and `note` says why."""

    score: float | None
    tie_break: float = 0.0
    note: str = ""

    @property
    def rank(self) -> tuple[float, float]:
        """To sort by."""
        return (math.inf if self.score is None else self.score, self.tie_break)


@dataclass(frozen=True)
class Sweep:
    """How a sweep went; `settings` are the chosen ones, None while it is not at its end or where all trials failed."""

    trials: tuple[Trial, ...]
    settings: dict[str, float] | None
    complete: bool


def design(centre: Mapping[str, float], count: int) -> list[dict[str, float]]:
    """So many settings, the first of them the centre: a sequence that fills any number of dimensions evenly, in
    logarithms, and whose beginning does not depend on its length. Rounded to two digits, but for the centre.
    """
    phi = _generalised_golden_ratio(len(centre))
    settings = [dict(centre)]
    for index in range(1, count):
        places = [(0.5 + index / phi ** (axis + 1)) % 1 - 0.5 for axis in range(len(centre))]
        settings.append(
            {
                name: _two_digits(value * 10 ** (place * DECADES[name]))
                for (name, value), place in zip(centre.items(), places, strict=True)
            }
        )
    return settings


def _generalised_golden_ratio(dimensions: int) -> float:
    """The positive solution of x^(d+1) = x + 1."""
    x = 1.5
    for _ in range(64):
        x = (1 + x) ** (1 / (dimensions + 1))
    return x


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def rungs(trials: int, epochs: int) -> list[Rung]:
    """Successive halving: half as many settings, twice as long, up to half of the training with the last two.

    One trial is none: there is nothing to choose from. Rungs that are as long as the next would only repeat it.
    """
    doublings = math.ceil(math.log2(trials)) if trials > 1 else 0
    found: list[Rung] = []
    for level in range(doublings):
        rung = Rung(math.ceil(trials / 2**level), max(1, round(epochs / 2 ** (doublings - level))))
        if not found or rung.epochs > found[-1].epochs:
            found.append(rung)
    return found


def full_runs(ladder: Sequence[Rung], epochs: int) -> float:
    """What a sweep costs, in whole trainings."""
    return sum(rung.settings * rung.epochs for rung in ladder) / epochs


def sweep(
    settings: Sequence[Mapping[str, float]],
    ladder: Sequence[Rung],
    outcome: Callable[[int, int, Mapping[str, float]], Outcome | None],
) -> Sweep:
    """Climbs the ladder. `outcome` gets the trial's number, the rung's number and the settings, and says what came of
    it; None where that is not known (yet), which ends the sweep.
    """
    if not ladder:
        return Sweep((), dict(settings[0]), complete=True)
    results: dict[int, list[tuple[int, float | None]]] = {index: [] for index in range(len(settings))}
    notes: dict[int, str] = {}
    alive = list(range(len(settings)))
    complete = True
    for level, rung in enumerate(ladder):
        scores: dict[int, Outcome] = {}
        for index in alive[: rung.settings]:
            one = outcome(index, level, settings[index])
            if one is None:
                complete = False
                break
            scores[index] = one
            results[index].append((rung.epochs, one.score))
            notes[index] = one.note
        if not complete:
            break
        alive = sorted(scores, key=lambda index: scores[index].rank)
        alive = [index for index in alive if scores[index].score is not None]
    chosen = alive[0] if complete and alive else None
    trials = tuple(
        Trial(
            settings=dict(settings[index]),
            rungs=tuple(found),
            chosen=index == chosen,
            note=notes.get(index, ""),
        )
        for index, found in results.items()
        if found
    )
    return Sweep(trials, None if chosen is None else dict(settings[chosen]), complete)


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe as a whole training of fewer epochs: what is planned in epochs shrinks with it."""
    part = epochs / recipe.training.epochs
    if part == 1:
        return recipe
    training = dataclasses.replace(recipe.training, epochs=epochs)
    if training.steps is not None:
        training = dataclasses.replace(training, steps=max(1, round(training.steps * part)))
    return dataclasses.replace(
        recipe,
        training=training,
        optimizer=_shrunk(recipe.optimizer, part),
        kfac=_shrunk(recipe.kfac, part),
    )


def _shrunk(section: Any, part: float) -> Any:
    changed = {
        field.name: {name: _times(value, part) if name in _TIMES else value for name, value in table.items()}
        for field in dataclasses.fields(section)
        if isinstance(table := getattr(section, field.name), dict) and "schedule" in table
    }
    return dataclasses.replace(section, **changed)


def _times(value: Any, part: float) -> Any:
    return [one * part for one in value] if isinstance(value, list | tuple) else value * part

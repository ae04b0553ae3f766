"""From the folders that somebody names to one comparison: whole comparisons, single runs, or folders full of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from natgrad.compare.comparison import FILE, gather
from natgrad.compare.history import Comparison, Contender, HistoryError, Run, differences, is_run, read
from natgrad.recipes.values import flat


def collect(paths: Sequence[Path]) -> Comparison:
    """Everything in these folders. Runs of one name are seeds of one contender, unless their recipes differ."""
    places = list(dict.fromkeys(place for path in paths for place in _places(path)))
    whole = [(place, gather(place)) for place in places if (place / FILE).is_file()]
    loose = [read(place) for place in places if not (place / FILE).is_file()]
    if len(whole) == 1 and not loose:
        return whole[0][1]
    found = [(place.absolute().name, one) for place, comparison in whole for one in comparison.contenders]
    found += [("", one) for one in _grouped(loose)]
    if not found:
        raise HistoryError("there is nothing to report: name the folders of some runs")
    contenders = _told_apart(found)
    runs = [run for one in contenders for run in one.runs]
    notes = [note for _, comparison in whole for note in comparison.notes]
    targets = {comparison.target for _, comparison in whole}
    if len(targets) > 1:
        notes.append("these comparisons had other targets, or none: --target sets one for all")
    return Comparison(
        title=" and ".join(dict.fromkeys(comparison.title for _, comparison in whole)) or _title(runs),
        contenders=tuple(contenders),
        target=targets.pop() if len(targets) == 1 else None,
        score=whole[0][1].score if whole else "loss",
        tuning=" ".join(dict.fromkeys(comparison.tuning for _, comparison in whole)),
        notes=tuple(dict.fromkeys((*notes, *differences(runs)))),
    )


def _places(path: Path) -> list[Path]:
    """A folder that holds a comparison or a run, or those inside it that do."""
    path = path.resolve()
    if not path.is_dir():
        raise HistoryError(f"{path} is a file: name its folder" if path.exists() else f"there is no folder {path}")
    for inner in ([path], sorted(path.iterdir())):
        if there := [one for one in inner if (one / FILE).is_file() or is_run(one)]:
            return there
    raise HistoryError(f"there is no run in {path}: the folder of a run holds a metrics.jsonl")


def _grouped(runs: Iterable[Run]) -> list[Contender]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.name, repr(sorted(_essential(run.settings).items()))), []).append(run)
    names = [name for name, _ in groups]
    contenders = []
    for (name, _), members in groups.items():
        own = name if names.count(name) == 1 else f"{name} ({members[0].folder.absolute().name})"
        contenders.append(
            Contender(
                name=own,
                runs=tuple(dataclasses.replace(run, name=own) for run in members),
                uses_kfac=any(run.uses_kfac for run in members),
                settings=_chosen(members[0].settings),
            )
        )
    return contenders


def _essential(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what may differ between seeds of one contender."""
    return {name: value for name, value in flat(settings).items() if name not in ("training.seed", "data.path")}


def _chosen(settings: Mapping[str, Any]) -> dict[str, float]:
    fields = flat(settings)
    numbers = {"lr": fields.get("optimizer.lr")}
    if fields.get("kfac.enabled"):
        numbers["damping"] = fields.get("kfac.damping")
    values = {name: one.get("value") if isinstance(one, Mapping) else one for name, one in numbers.items()}
    return {name: float(one) for name, one in values.items() if isinstance(one, int | float)}


def _told_apart(found: Sequence[tuple[str, Contender]]) -> list[Contender]:
    """Contenders of one name get their place's name too, and a number where even that is the same."""
    names = [one.name for _, one in found]
    longer = [f"{one.name} ({place})" if place and names.count(one.name) > 1 else one.name for place, one in found]
    numbers = [longer[: index + 1].count(name) for index, name in enumerate(longer)]
    final = [name if number == 1 else f"{name} {number}" for name, number in zip(longer, numbers, strict=True)]
    return [one if one.name == name else _renamed(one, name) for (_, one), name in zip(found, final, strict=True)]


def _renamed(contender: Contender, name: str) -> Contender:
    runs = tuple(dataclasses.replace(run, name=name) for run in contender.runs)
    return dataclasses.replace(contender, name=name, runs=runs)


def _title(runs: Sequence[Run]) -> str:
    recipes = list(dict.fromkeys(str(run.about["recipe"]) for run in runs if "recipe" in run.about))
    return " and ".join(recipes[:3]) if recipes else "Runs side by side"

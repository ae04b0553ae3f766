"""What would change a verdict: where K-FAC's time goes, and what the sweep left open."""

from __future__ import annotations

from collections.abc import Mapping

from natgrad.compare.arrivals import Row, duration
from natgrad.compare.history import Comparison, Contender, mean_parts

LARGE = 0.2
"""A part of K-FAC's step that is worth a word."""

_INTERVALS = {"factor_update_steps": 10, "inv_update_steps": 100}  # KFAC's defaults


def advise(comparison: Comparison, *, ours: Row | None, theirs: Row | None) -> tuple[str, ...]:
    """Lines to print under the verdict; none where there is nothing to say."""
    lines = []
    if ours is not None:
        contender = next(one for one in comparison.contenders if one.name == ours.name)
        if theirs is not None:
            lines += _break_even(ours, theirs)
        lines += _largest_part(contender)
    for one in comparison.contenders:
        lines += _edges(one)
    return tuple(lines)


def _break_even(ours: Row, theirs: Row) -> list[str]:
    """How fast K-FAC's updates would have to be, where they are fewer and take longer."""
    known = (ours.updates, ours.seconds, theirs.updates, theirs.seconds)
    updates, mine, others, its = (None if one is None else one.mean for one in known)
    if not updates or not mine or not others or not its or mine <= its:
        return []
    present, limit, floor = mine / updates, its / updates, its / others
    if updates > others:
        return [
            f"No saving on {ours.name}'s step would change this: even at the {duration(floor)} of {theirs.name}'s it "
            "would arrive later."
        ]
    if updates == others:
        return []  # at best it would be a tie
    return [
        f"By the clock {ours.name} would be first if its updates up to there took less than {duration(limit)} each: "
        f"they take {duration(present)}, and {theirs.name}'s {duration(floor)}."
    ]


def _largest_part(contender: Contender) -> list[str]:
    """Where K-FAC's own time goes, and what makes it less."""
    parts = mean_parts(contender.runs)
    whole = sum(parts.values())
    own = {name: parts[name] / whole for name in ("statistics", "solve", "precondition") if whole and name in parts}
    name = max(own, key=lambda one: own[one], default=None)
    if name is None or own[name] < LARGE:
        return []
    kfac: Mapping[str, object] = next((run.settings.get("kfac", {}) for run in contender.runs), {})
    ways = {"statistics": _cheaper_statistics, "solve": _cheaper_solve, "precondition": _cheaper_products}[name](kfac)
    takes = {"statistics": "statistics take", "solve": "decompositions take", "precondition": "preconditioning takes"}
    return [f"{takes[name].capitalize()} {100 * own[name]:.0f} % of {contender.name}'s step: try {', or '.join(ways)}."]


def _cheaper_statistics(kfac: Mapping[str, object]) -> list[str]:
    reduce = [] if kfac.get("sharing") == "reduce" else ["kfac-reduce among the --optimizers"]
    return [*reduce, _twice("factor_update_steps", "factor_update_epochs", kfac)]


def _cheaper_solve(kfac: Mapping[str, object]) -> list[str]:
    inverse = [] if kfac.get("solver") == "inverse" else ["kfac-inverse among the --optimizers"]
    return [*inverse, _twice("inv_update_steps", "inv_update_epochs", kfac)]


def _cheaper_products(kfac: Mapping[str, object]) -> list[str]:
    inverse = [] if kfac.get("solver") == "inverse" else ["kfac-inverse among the --optimizers"]
    return [*inverse, "a larger training.batch, for which it costs no more"]


def _twice(steps: str, epochs: str, kfac: Mapping[str, object]) -> str:
    if isinstance(now := kfac.get(epochs), int | float):
        return f"kfac.{epochs}={2 * now:g} (now {now:g})"
    now = kfac.get(steps, _INTERVALS[steps])
    return f"kfac.{steps}={2 * now} (now {now})" if isinstance(now, int) else f"a larger kfac.{steps}"


def _edges(contender: Contender) -> list[str]:
    """A setting that won at the edge of what was tried could be better still beyond it."""
    lines = []
    for name, value in contender.settings.items():
        tried = sorted({trial.settings[name] for trial in contender.trials if name in trial.settings})
        if len(tried) > 2 and value in (tried[0], tried[-1]):
            which = "largest" if value == tried[-1] else "smallest"
            lines.append(
                f"{contender.name}'s {_WORDS.get(name, name)} of {value:g} is the {which} that was tried: a better one "
                "may lie beyond."
            )
    return lines


_WORDS = {"lr": "learning rate"}

"""What would change a verdict: where K-FAC's time goes, what the sweep left open, and what is not to be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from natgrad.compare.arrivals import Race, Row, best_of, duration, measure_of
from natgrad.compare.history import Comparison, Contender, mean_parts

LARGE = 0.2
"""A part of K-FAC's step that is worth a word."""
UNSTEADY = 2.0
"""How much longer the steps of one run may be than those of another before the clock is doubted."""
HARDLY = 0.9
"""A run that ends above this part of what it began with has learned next to nothing."""
DISTURBED = "something else was using this machine, and the times are not to be trusted"
"""Benchmarks say it in the same words."""

_INTERVALS = {"factor_update_steps": 10, "inv_update_steps": 100}  # KFAC's defaults
_WORDS = {"lr": "learning rate"}


def advise(comparison: Comparison, race: Race | None) -> tuple[str, ...]:
    """Lines to print under the verdict; none where there is nothing to say."""
    lines = [line for one in comparison.contenders for line in _unsteady(one)]
    if race is not None:
        ours, theirs = (_contender(comparison, row) for row in (race.ours, race.theirs))
        lines += [*_hardly_learned(theirs, comparison), *_more_seeds(race), *_break_even(race)]
        lines += _largest_part(ours, comparison) if _is_cost(race) else []
        lines += _other_settings(race) if race.by_clock == "second" and not _is_cost(race) else []
    lines += [line for one in comparison.contenders for line in _edges(one)]
    return tuple(lines)


def _contender(comparison: Comparison, row: Row) -> Contender:
    return next(one for one in comparison.contenders if one.name == row.name)


def _unsteady(contender: Contender) -> list[str]:
    """Something else may have used the machine while some of the runs were at it."""
    times = [run.step_seconds for run in contender.runs if run.step_seconds is not None and run.finished]
    if len(times) < 2 or max(times) <= UNSTEADY * min(times):
        return []
    return [
        f"{contender.name}'s step took {duration(min(times))} in one run and {duration(max(times))} in another: "
        f"{DISTURBED}."
    ]


def _hardly_learned(rival: Contender, comparison: Comparison) -> list[str]:
    measure = measure_of(comparison.contenders)
    began = [value for run in rival.runs for point in run.train[:1] if (value := measure.value(point)) is not None]
    bests = [best for run in rival.runs if (best := best_of(run, measure)) is not None]
    if not began or not bests or min(bests) <= HARDLY * max(began):
        return []
    return [
        f"{rival.name} hardly learned at all ({measure.text(min(bests))} at best): to be where it is says little. More "
        "settings (--trials) or a --target of your own would say more."
    ]


def _more_seeds(race: Race) -> list[str]:
    if "tie" not in (race.by_updates, race.by_clock):
        return []
    return [
        f"More seeds may tell what {len(race.ours.arrivals)} could not: --resume --seeds {2 * len(race.ours.arrivals)}."
    ]


def _is_cost(race: Race) -> bool:
    """Whether a faster step would help: not where there are too many of them, or where none of them arrives."""
    ours, theirs = race.ours.updates, race.theirs.updates
    return ours is not None and (theirs is None or ours.mean <= theirs.mean)


def _other_settings(race: Race) -> list[str]:
    return [
        f"It is not the time of its steps that holds {race.ours.name} back, but where they lead: more settings "
        "(--trials), another kfac.kl_clip or another variant may change that."
    ]


def _break_even(race: Race) -> list[str]:
    """How fast K-FAC's updates would have to be, where they are fewer and take longer."""
    ours, theirs = race.ours, race.theirs
    known = (ours.updates, ours.seconds, theirs.updates, theirs.seconds)
    updates, mine, others, its = (None if one is None else one.mean for one in known)
    if not updates or not mine or not others or not its or mine <= its or updates >= others:
        return []
    return [
        f"By the clock {ours.name} would be first if its updates up to there took less than {duration(its / updates)} "
        f"each: they take {duration(mine / updates)}, and {theirs.name}'s {duration(its / others)}."
    ]


def _largest_part(contender: Contender, comparison: Comparison) -> list[str]:
    """Where K-FAC's own time goes, and what makes it less."""
    parts = mean_parts(contender.runs)
    whole = sum(parts.values())
    own = {name: parts[name] / whole for name in ("statistics", "solve", "precondition") if whole and name in parts}
    name = max(own, key=lambda one: own[one], default=None)
    if name is None or own[name] < LARGE:
        return []
    kfac = next(_tables(contender), None)
    tried = [table for one in comparison.contenders if one.uses_kfac for table in _tables(one)]
    ways = _in_a_script(name) if kfac is None else _among_the_optimizers(name, kfac, tried)
    if not ways:
        return []
    takes = {"statistics": "statistics take", "solve": "decompositions take", "precondition": "preconditioning takes"}
    return [f"{takes[name].capitalize()} {100 * own[name]:.0f} % of {contender.name}'s step: try {', or '.join(ways)}."]


def _tables(contender: Contender) -> Iterator[Mapping[str, object]]:
    """The ``[kfac]`` tables of a contender's recipes; runs of scripts have none."""
    return (run.settings["kfac"] for run in contender.runs if "kfac" in run.settings)


def _among_the_optimizers(part: str, kfac: Mapping[str, object], tried: Sequence[Mapping[str, object]]) -> list[str]:
    """As ``natgrad compare --optimizers`` takes them, without what has taken part."""
    field, word = {"statistics": ("sharing", "reduce")}.get(part, ("solver", "inverse"))
    ways = [] if any(one.get(field) == word for one in tried) else [f"kfac-{word}"]
    if part != "precondition":
        field, value = _twice({"statistics": "factor_update", "solve": "inv_update"}[part], kfac)
        if not any(one.get(field) == value for one in tried):
            ways.append(f"kfac+kfac.{field}={value:.12g}")
    if ways:
        ways[-1] += " among the --optimizers"
    return [*ways, "a larger training.batch, for which it costs no more"] if part == "precondition" else ways


def _in_a_script(part: str) -> list[str]:
    """As `natgrad.KFAC` takes them."""
    return {
        "statistics": ['sharing="reduce"', "a larger factor_update_steps"],
        "solve": ['solver="inverse"', "a larger inv_update_steps"],
        "precondition": ['solver="inverse"', "a larger batch, for which it costs no more"],
    }[part]


def _twice(interval: str, kfac: Mapping[str, object]) -> tuple[str, float]:
    """The option that has the interval, and a value twice as long."""
    if isinstance(now := kfac.get(f"{interval}_epochs"), int | float):
        return f"{interval}_epochs", 2 * now
    now = kfac.get(f"{interval}_steps")
    return f"{interval}_steps", 2 * (now if isinstance(now, int) else _INTERVALS[f"{interval}_steps"])


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

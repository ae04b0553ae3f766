"""Ready-made schedules for damping, the KL cap, update intervals, factor decay, or anything that is a number a step.

A `Schedule` is a function of time that prints itself. Time is counted in steps; `Schedule.epochs` counts it in epochs
instead, and `driven` by calls of its own `step`, as `torch.optim.lr_scheduler` does. Schedules multiply::

    from natgrad import schedules

    damping = schedules.steps(1e-3, factor=0.5, at=[40, 80]).epochs(len(loader))  # Pauloski et al. 2020, V-C
    cap = schedules.exponential(0.01, factor=0.96, every=0.5).epochs(len(loader))  # Ba et al. 2017, section 6
    kfac = natgrad.KFAC(model, damping=damping, kl_clip=cap * schedules.warmup(5).epochs(len(loader)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any


class Schedule:
    """A number that depends on time. Call it with the step; multiply it with another one, or with a number."""

    def __init__(self, function: Callable[[float], float], text: str, *parts: Schedule) -> None:
        self._function = function
        self._text = text
        self._parts = parts

    def __call__(self, step: float) -> float:
        """The value at a step."""
        return self._function(step)

    def __repr__(self) -> str:
        return self._text

    def __mul__(self, other: Schedule | float) -> Schedule:
        if isinstance(other, Schedule):
            return Schedule(lambda time: self(time) * other(time), f"{self!r} * {other!r}", self, other)
        factor = _number("a schedule's factor", other)
        return Schedule(lambda time: self(time) * factor, f"{self!r} * {other!r}", self)

    __rmul__ = __mul__

    def epochs(self, steps_per_epoch: int) -> Schedule:
        """The same schedule with its times in epochs."""
        if not isinstance(steps_per_epoch, int) or isinstance(steps_per_epoch, bool) or steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be a whole number of at least 1, got {steps_per_epoch!r}")
        text = f"({self!r})" if " " in self._text.split("(")[0] or " * " in self._text else repr(self)
        return Schedule(lambda step: self(step / steps_per_epoch), f"{text}.epochs({steps_per_epoch})", self)

    def then(self, following: Schedule, at: float) -> Schedule:
        """This schedule up to a time, and from there on another one, which begins anew."""
        _number("at", at)
        return Schedule(
            lambda time: self(time) if time < at else following(time - at),
            f"{self!r}.then({following!r}, at={at!r})",
            self,
            following,
        )

    def whole(self) -> Schedule:
        """Rounded to a whole number of at least 1, for update intervals."""
        return Schedule(lambda time: max(1, round(self(time))), f"{self!r}.whole()", self)

    def _driven(self) -> list[Driven]:
        """The parts that wait for their own `step`, each once."""
        found = [one for part in self._parts for one in part._driven()]
        return list(dict.fromkeys(found))

    def state_dict(self) -> dict[str, list[int]]:
        """Where its driven parts are, for a checkpoint."""
        return {"times": [one.time for one in self._driven()]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Goes on from a checkpoint."""
        parts = self._driven()
        if not parts:
            return  # it depends on the step alone
        if set(state) != {"times"} or len(state["times"]) != len(parts):
            raise ValueError(f"this is not a state of {self!r}")
        for one, time in zip(parts, state["times"], strict=True):
            one.time = time


def constant(value: float) -> Schedule:
    """Always the same."""
    number = _number("value", value)
    return Schedule(lambda time: number, f"constant({value!r})")


def steps(value: float, *, factor: float, at: Iterable[float]) -> Schedule:
    """Multiplied by `factor` at each of some times."""
    if not isinstance(at, Iterable):
        raise TypeError(f"at must be a list of times, such as [40, 80], got {at!r}")
    times = sorted(_number("at", time) for time in at)
    start, times_factor = _number("value", value), _number("factor", factor)
    return Schedule(
        lambda time: start * times_factor ** sum(time >= moment for moment in times),
        f"steps({value!r}, factor={factor!r}, at={[_short(time) for time in times]})",
    )


def exponential(value: float, *, factor: float, every: float = 1) -> Schedule:
    """Multiplied by `factor` every so often, all at once (the first paper's cap: 0.96 every half epoch)."""
    start, rate = _number("value", value), _number("factor", factor)
    interval = _number("every", every, above=0)
    return Schedule(
        lambda time: start * rate ** math.floor(time / interval + 1e-9),
        f"exponential({value!r}, factor={factor!r}, every={every!r})",
    )


def warmup(over: float, *, start: float = 0.1) -> Schedule:
    """A factor that grows from `start` to 1 in a straight line, and stays there: multiply it with another schedule."""
    length, first = _number("over", over, above=0), _number("start", start)
    return Schedule(lambda time: first + (1 - first) * min(1.0, time / length), f"warmup({over!r}, start={start!r})")


def cosine(value: float, *, over: float, end: float) -> Schedule:
    """From `value` down to `end` along half a cosine, and then `end`."""
    start, last, length = _number("value", value), _number("end", end), _number("over", over, above=0)
    return Schedule(
        lambda time: last + (start - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, time / length))),
        f"cosine({value!r}, over={over!r}, end={end!r})",
    )


class Driven(Schedule):
    """A schedule whose time is the number of calls of `step`, as an epoch loop or a learning-rate scheduler makes."""

    def __init__(self, schedule: Schedule) -> None:
        self.time = 0
        super().__init__(lambda _: schedule(self.time), f"driven({schedule!r})", schedule)

    def step(self) -> None:
        """One unit of time has passed: an epoch, or whatever the loop counts."""
        self.time += 1

    def _driven(self) -> list[Driven]:
        return [self, *super()._driven()]


def driven(schedule: Schedule) -> Driven:
    """Makes a schedule wait for its own `step()`, called where the loop calls its learning-rate scheduler's."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"driven takes a schedule, such as constant(1e-3), got {schedule!r}")
    return Driven(schedule)


def _number(name: str, value: Any, *, above: float = -math.inf) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= above:
        bound = f" above {above:g}" if math.isfinite(above) else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}")
    return float(value)


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value

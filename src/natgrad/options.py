"""Hyper-parameters: what is allowed, and numbers that may be functions of the step."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Number = float | Callable[[int], float]


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words, or an error that lists them and guesses which was meant."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def refuse_class(name: str, value: Any) -> None:
    """A class where one of its objects is meant."""
    if isinstance(value, type):
        module = "natgrad." if value.__module__.startswith("natgrad.") else ""
        raise TypeError(f"{name} got the class {value.__name__}: call it, {module}{value.__name__}(...)")


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str], *, otherwise: str = "") -> None:
    """An option that there is not, with the one that was meant, or what to say where none is like it."""
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, sorted(known), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else otherwise
            raise TypeError(f"{owner} has no option {option!r}{hint}")


def whole_number(name: str, value: Any, *, at_least: int = 1, none: str = "") -> int | None:
    """A whole number, or None where `none` says what that means."""
    if value is None and none:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        alternative = f", or None for {none}" if none else ""
        raise ValueError(f"{name} must be a whole number of at least {at_least}{alternative}, got {value!r}")
    return value


def fraction(name: str, value: Any) -> float:
    """A part of a whole: above 0, at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


class Hyperparameter:
    """A number or a callable of the step, checked whenever it is read."""

    def __init__(
        self, name: str, value: Any, *, above: float, below: float = math.inf, inclusive: bool = False
    ) -> None:
        refuse_class(name, value)
        self.name = name
        self.value = value
        self._above, self._below, self._inclusive = above, below, inclusive
        self._fixed: float | None = None  # a plain number is checked once
        if not callable(value):
            checked = self.at(0)
            self._fixed = checked if isinstance(value, int | float) else None

    @property
    def is_fixed(self) -> bool:
        """Whether the value is the same at all steps."""
        return self._fixed is not None

    def at(self, step: int) -> float:
        """The value at a step."""
        return self._checked(self._read(step), step) if self._fixed is None else self._fixed

    def _read(self, step: int) -> Any:
        try:
            return self.value(step) if callable(self.value) else self.value
        except TypeError as error:
            raise TypeError(f"{self.name} must be a number or a callable of the step: {error}") from error

    def _checked(self, value: Any, step: int) -> float:
        try:
            if isinstance(value, str | bool):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.name} must be a number or a callable of the step that returns one, got {value!r}"
            ) from None
        low = number >= self._above if self._inclusive else number > self._above
        if not (low and number < self._below):
            bounds = f"{'at least' if self._inclusive else 'above'} {self._above:g}"
            bounds += f" and below {self._below:g}" if math.isfinite(self._below) else " and finite"
            where = f" at step {step}" if callable(self.value) else ""
            raise ValueError(f"{self.name} must be {bounds}, got {value!r}{where}")
        return number

    def state(self) -> Any:
        """The state of a schedule that has one: driven by the loop, or adaptive."""
        state = self.value.state_dict() if hasattr(self.value, "state_dict") else {}
        return state if any(state.values()) else None

    def check(self, state: Any) -> None:
        """Refuses a checkpoint's state that this schedule cannot go on from, without loading it."""
        if state is None or not hasattr(self.value, "load_state_dict"):
            return
        try:
            copy.deepcopy(self.value).load_state_dict(state)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the checkpoint's state of {self.name} does not fit {self.value!r}: {state}") from None

    def load(self, state: Any) -> None:
        """Goes on from a checkpoint; what it has no state of begins anew, or has none."""
        if state is None and hasattr(self.value, "reset"):
            self.value.reset()
        elif state is not None and hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(state)


@dataclass(frozen=True)
class Now:
    """The numbers of one step. `next_factor_interval` is that of the step after it."""

    cap: float | None
    damping: float
    l2: float
    momentum: float
    decay: float
    refresh_interval: int
    next_factor_interval: int

    @property
    def total_damping(self) -> float:
        """What is added to the Fisher: λ, and the curvature of an L2 term in the loss."""
        return self.damping + self.l2


class Terms(Hyperparameter):
    """How many terms a loss is a mean over; None where the predictions are to be counted."""

    def __init__(self, value: Any) -> None:
        super().__init__("loss_terms", value, above=0)

    def at_step(self, step: int) -> float | None:
        """The number at a step."""
        value = self._read(step)
        return None if value is None and callable(self.value) else self._checked(value, step)


class Interval(Hyperparameter):
    """A whole number of steps."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name, value, above=1, inclusive=True)

    def at(self, step: int) -> int:
        """The interval at a step."""
        number = super().at(step)
        if number != int(number):
            raise ValueError(f"{self.name} must be a whole number of steps, got {number!r}")
        return int(number)

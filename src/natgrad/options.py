"""Hyper-parameters: what is allowed, and numbers that may be functions of the step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

Number = float | Callable[[int], float]


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words, or an error that lists them and guesses which was meant."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


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
        self.name = name
        self.value = value
        self._above, self._below, self._inclusive = above, below, inclusive
        if not callable(value):
            self.at(0)

    def at(self, step: int) -> float:
        """The value at a step."""
        try:
            value = self.value(step) if callable(self.value) else self.value
        except TypeError as error:
            raise TypeError(f"{self.name} must be a number or a callable of the step: {error}") from error
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
        return self.value.state_dict() if hasattr(self.value, "state_dict") else None

    def load(self, state: Any) -> None:
        """Goes on from a checkpoint; a schedule that has no state, or is new, stays as it is."""
        if state is not None and hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(state)


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

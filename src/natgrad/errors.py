"""What natgrad warns with."""

from __future__ import annotations

import warnings


class NatgradWarning(UserWarning):
    """Something went wrong that training survives: a failed decomposition, a NaN batch, an empty one."""


class Warner:
    """Warns once a topic; ``{step}`` in a text stands for the present step."""

    def __init__(self) -> None:
        self.step = 0
        self._given: set[str] = set()

    def once(self, topic: str, text: str) -> None:
        """Warns, unless this topic has been warned about."""
        if topic not in self._given:
            self._given.add(topic)
            # Not format(): the words of an error that came from elsewhere may have braces.
            message = f"natgrad: {text.replace('{step}', str(self.step))} (warned once)"
            warnings.warn(message, NatgradWarning, stacklevel=4)

    def tell(self, text: str) -> None:
        """Warns of something that may happen again, with words that say when it did."""
        warnings.warn(f"natgrad: {text}", NatgradWarning, stacklevel=4)

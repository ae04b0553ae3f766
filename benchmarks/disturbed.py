"""Whether something else was using the machine while it was measured: SGD's own turns tell."""

from __future__ import annotations

from collections.abc import Mapping

from natgrad.compare.advice import DISTURBED

UNSTEADY = 1.25
"""SGD's slowest turn over its fastest, from which on what was measured beside them is doubted."""
MARK = "?"
"""In the place of ✓ and ✗."""


def unsteady(spread: float | None) -> bool:
    """Whether turns that differed by this factor leave a doubt; where it is not known there is none."""
    return spread is not None and spread > UNSTEADY


def sentences(spreads: Mapping[str, float]) -> list[str]:
    """One about all that is doubted, or none. `spreads`: how much SGD's turns differed, by where they did."""
    told = [f"by {spread:.1f} times {where}" for where, spread in spreads.items() if unsteady(spread)]
    if not told:
        return []
    differed = " and ".join(filter(None, (", ".join(told[:-1]), told[-1])))
    return [f"SGD's own turns differed {differed}: {DISTURBED} (marked {MARK})."]

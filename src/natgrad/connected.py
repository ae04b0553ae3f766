"""Things that have something in common."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def connected(keys: Mapping[T, Collection[Hashable]]) -> list[list[T]]:
    """Groups of things that have a key in common with another of their group, in the order of their first."""
    group_of: dict[Hashable, list[T]] = {}
    groups: list[list[T]] = []
    for thing, own in keys.items():
        found: list[list[T]] = []
        for key in own:
            group = group_of.get(key)
            if group is not None and not any(group is other for other in found):
                found.append(group)
        home = found[0] if found else []
        if not found:
            groups.append(home)
        home.append(thing)
        for other in found[1:]:
            home += other
            groups = [group for group in groups if group is not other]
        for member in home:
            group_of |= dict.fromkeys(keys[member], home)
    return groups

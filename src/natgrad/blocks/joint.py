"""Small tensors of many objects as one: to move them all is then one launch, not one for each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor

from natgrad.launches import stream_of
from natgrad.statistics.moving import Sums, numbers

Rows = int | float | Tensor
_own = attrgetter("own")
_PLAIN = {int, float}


class Joined:
    """Something with a small tensor, `own`, that is always written in place."""

    def __init__(self, own: Tensor) -> None:
        self.own = own
        self._together: Joint | None = None  # of the first of several


class Joint:
    """The tensors of several members as `whole`, of which theirs are the `parts`; and what else is the same of these
    members from step to step. It holds no member, and nothing large of one, so that none keeps others alive.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.whole = torch.stack(list(tensors))
        self.parts = list(self.whole.unbind())
        self.sums: Sums | None = None  # of members that are factors
        self._counts: list[Rows] = []
        self._stream = 0
        self._counted: Tensor | None = None

    def counted(self, counts: list[Rows]) -> Tensor:
        """Numbers, one for each element, in the shape of `whole`; some may be tensors, where only the device knows
        them. Others do not go to the device again, as long as they are the same.
        """
        device = self.whole.device
        stream = stream_of(device)  # what went there on one stream is not for another
        plain = _PLAIN.issuperset(map(type, counts))
        if self._counted is not None and plain and stream == self._stream and counts == self._counts:
            return self._counted
        found = numbers([0.0 if isinstance(count, Tensor) else float(count) for count in counts], device)
        for number, count in enumerate(() if plain else counts):
            if isinstance(count, Tensor):
                found[number] += count
        found = found.view(self.whole.shape)
        self._counts, self._stream, self._counted = counts, stream, found if plain else None
        return found


def joint(members: Sequence[Joined]) -> Joint:
    """The tensors of all members as one, of which they are parts from now on: the same object comes again."""
    known = members[0]._together
    if known is None or len(known.parts) != len(members) or not all(map(is_, map(_own, members), known.parts)):
        known = Joint([member.own for member in members])
        for member, part in zip(members, known.parts, strict=True):
            member.own = part
        members[0]._together = known
    return known

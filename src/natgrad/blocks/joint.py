"""Small tensors of many objects as one: to move them all is then one launch, not one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Joined:
    """Something with a small tensor, `own`, that is always written in place."""

    def __init__(self, own: Tensor) -> None:
        self.own = own
        self._together: tuple[Tensor, ...] = ()  # of the first of several: theirs as one, then each


def joint(members: Sequence[Joined]) -> Tensor:
    """The tensors of all members as one, of which they are parts from now on: the same ones come again."""
    whole, *parts = members[0]._together or (None,)
    same = len(parts) == len(members) and all(m.own is part for m, part in zip(members, parts, strict=True))
    if whole is None or not same:
        whole = torch.stack([member.own for member in members])
        parts = list(whole.unbind())
        for member, part in zip(members, parts, strict=True):
            member.own = part
        members[0]._together = (whole, *parts)
    return whole

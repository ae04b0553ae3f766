"""Preconditioned gradients, from the team that has made them to the ranks outside of it, in every step.

Each team's message begins with the squared length of its directions, as bits: every rank adds up the same numbers in
the same order, so that all clip alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from natgrad.distribute.assignment import Assignment
from natgrad.distribute.channel import Channel, Message
from natgrad.distribute.packing import by_dtype, numel

Shape = tuple[tuple[int, ...], torch.dtype]


class Directions:
    """The exchange of one step: `solved` has the shape (stack, rows, columns) and dtype of every block's direction.

    What teams before this rank's own will send is asked for at once, so that it travels while this rank still computes.
    (After its own: messages must be in one order on all ranks.)
    """

    def __init__(
        self,
        channel: Channel,
        assignment: Assignment,
        solved: Mapping[str, Shape],
        device: torch.device,
        *,
        wire: torch.dtype | None,
    ) -> None:
        self._channel, self._assignment = channel, assignment
        self._solved, self._device, self._wire = solved, device, wire
        team_of = assignment.placement.team_of
        names = [layer.name for layer in assignment.work.layers if layer.name in solved]
        self._names = {team: [n for n in names if team_of[n] == team] for team in sorted({team_of[n] for n in names})}
        self._team = assignment.team_of_rank(channel.rank)
        self._under_way: list[tuple[list[str], bool, Tensor, Message | None]] = []
        for team in self._names:
            if team < self._team:
                self._send(team, None, None)

    def complete(self, own: Mapping[str, Tensor], length: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Sends this team's directions and their squared length; returns those of all blocks, and the lengths' sum."""
        for team in self._names:
            if team >= self._team:
                self._send(team, own if team == self._team else None, length)
        found: dict[str, Tensor] = {}
        lengths: list[Tensor] = []
        for names, first, flat, message in self._under_way:
            if message is not None:
                message.wait()
            sizes = [numel(self._solved[name][0]) for name in names]
            head, *parts = flat.split([flat.numel() - sum(sizes), *sizes])
            if first:
                lengths.append(head.view(torch.float64)[0])
            for name, part in zip(names, parts, strict=True):
                shape, dtype = self._solved[name]
                found[name] = part.to(dtype).view(shape)
        return found, torch.stack(lengths).sum()

    def _send(self, team: int, own: Mapping[str, Tensor] | None, length: Tensor | None) -> None:
        sender = self._assignment.sender(team, self._channel.rank)
        audience = self._assignment.audience(team, sender)
        for number, names in enumerate(by_dtype(self._names[team], lambda name: self._solved[name][1])):
            flat = self._flat(names, own, length, first=number == 0)
            alone = len(audience) == 1
            message = None if alone else self._channel.broadcast(flat, sender, audience, "gradients")
            self._under_way.append((names, number == 0, flat, message))

    def _flat(
        self, names: Sequence[str], own: Mapping[str, Tensor] | None, length: Tensor | None, *, first: bool
    ) -> Tensor:
        """A message: filled where this rank has made it, room for it elsewhere."""
        dtype = self._wire or self._solved[names[0]][1]
        if own is None or length is None:
            count = sum(numel(self._solved[name][0]) for name in names) + (8 // dtype.itemsize if first else 0)
            return torch.empty(count, dtype=dtype, device=self._device)
        # The length in front, where eight bytes are sure to be aligned.
        head = [length.double().reshape(1).view(dtype)] if first else []
        return torch.cat([*head, *(own[name].flatten().to(dtype) for name in names)])

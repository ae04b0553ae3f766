"""Sums of factors on their way to who decomposes them.

The sum over all ranks of what each has in its factors is *the* factor, always: statistics stay where they were taken
until a decomposition is due, and are then handed over to the rank that makes it. Both sums and weights are linear, so
that nothing is lost or counted twice, whoever decomposes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation, Whole
from natgrad.distribute.assignment import Assignment
from natgrad.distribute.channel import Channel, Message
from natgrad.distribute.packing import by_dtype, packed, packed_numel, unpacked


@dataclass
class Collecting:
    """Sums on their way: of every factor its owner and weight, and its trace; of orientations rows and terms.
    `to_others` are messages that nobody here reads, `sent` the factors that are in messages.
    """

    rank: int
    known: Mapping[Factor, tuple[int, float]]
    traces: Mapping[Factor, Tensor]
    counts: Mapping[Orientation, tuple[float, float]]
    refused: int
    sent: list[Factor]
    to_me: list[tuple[Message, list[Factor]]]
    to_others: list[Message]

    def adopt(self) -> None:
        """What was sent is no longer here, and what owners will receive is theirs."""
        given = [factor.sum for factor in self.sent if self.known[factor][0] != self.rank]
        if given:
            torch._foreach_zero_(given)
        for factor, (owner, weight) in self.known.items():
            factor.weight.fill_(weight if owner == self.rank else 0.0)
        for orientation, count in self.counts.items():
            orientation.counts.copy_(orientation.counts.new_tensor(count if self.rank == 0 else (0.0, 0.0)))

    def finish(self) -> Whole:
        """Waits for this rank's, adds them to its own, and returns what all ranks have together: means where this rank
        has the sums, and elsewhere what has the same trace.
        """
        for message, same in self.to_me:
            parts = message.wait().split([packed_numel(factor.sum) for factor in same])
            for factor, part in zip(same, parts, strict=True):
                factor.sum.add_(unpacked(part.to(factor.sum.dtype), factor.sum.shape))
        self.to_me = []
        means: dict[Factor, Tensor] = {}
        traces: dict[Factor, Tensor] = {}
        for factor, (owner, weight) in self.known.items():
            size = factor.sum.shape[1]
            trace = self.traces[factor] / weight if weight > 0 else self.traces[factor]
            traces[factor] = trace.to(factor.sum)
            flat = (traces[factor] / size)[:, None].expand(factor.stack, size)
            means[factor] = factor.mean() if owner == self.rank else flat
        return Whole(means, traces, {f: weight for f, (_, weight) in self.known.items()}, self.counts, self.refused)

    def settle(self) -> None:
        """Waits for what others read, or nobody does any more: buffers may go then."""
        for message in [*self.to_others, *(message for message, _ in self.to_me)]:
            message.wait()
        self.to_others, self.to_me = [], []


@dataclass(frozen=True)
class View:
    """Factors and counts as they are, or as they will be."""

    sum: Callable[[Factor], Tensor]
    weight: Callable[[Factor], Tensor]
    counts: Callable[[Orientation], Tensor]


PRESENT = View(lambda factor: factor.sum, lambda factor: factor.weight, lambda orientation: orientation.counts)


def collect(
    channel: Channel,
    assignment: Assignment,
    blocks: Sequence[KroneckerBlock],
    *,
    place: str,
    refused: int,
    wire: torch.dtype | None,
    view: View = PRESENT,
) -> Collecting:
    """Starts to send the sums of the blocks' factors to their owners; nothing changes before `adopt`. The hosts first
    tell each other weights, traces and counts: what nobody else has is not sent.
    """
    factors = list(dict.fromkeys(factor for block in blocks for factor in block.factors()))
    orientations = [orientation for block in blocks for orientation in block.orientations]
    told = channel.meet(place, {"numbers": _numbers(factors, orientations, view), "refused": refused})
    each = torch.stack([one["numbers"] for one in told])
    spans = [factor.stack for factor in factors]
    weights, traces, counts = each.sum(0).split([len(factors), sum(spans), 2 * len(orientations)])
    owners = [assignment.owner_of[factor] for factor in factors]
    known = {f: (owner, w) for f, owner, w in zip(factors, owners, weights.tolist(), strict=True)}
    sent = [f for n, (f, owner) in enumerate(zip(factors, owners, strict=True)) if _others_have(each[:, n], owner)]
    to_me: list[tuple[Message, list[Factor]]] = []
    to_others: list[Message] = []
    for owner in range(channel.size):
        for same in by_dtype([f for f in sent if known[f][0] == owner], lambda factor: factor.sum.dtype):
            dtype = wire or same[0].sum.dtype
            if owner == channel.rank:  # what the owner has does not travel
                count = sum(packed_numel(factor.sum) for factor in same)
                flat = torch.zeros(count, dtype=dtype, device=same[0].sum.device)
                to_me.append((channel.reduce(flat, owner, "factors"), same))
            else:
                flat = torch.cat([packed(view.sum(factor)) for factor in same]).to(dtype)
                to_others.append(channel.reduce(flat, owner, "factors"))
    return Collecting(
        channel.rank,
        known,
        dict(zip(factors, traces.split(spans), strict=True)),
        {o: (float(c[0]), float(c[1])) for o, c in zip(orientations, counts.view(-1, 2), strict=True)},
        sum(one["refused"] for one in told),
        sent,
        to_me,
        to_others,
    )


def gathered_sums(channel: Channel, assignment: Assignment, factors: Sequence[Factor]) -> dict[Factor, Tensor]:
    """The sums of factors that have just been collected, on all ranks. Their owners go on with the same bits: half of a
    matrix travels, and the other half may differ in the last digit.
    """
    result: dict[Factor, Tensor] = {}
    everybody = range(channel.size)
    for owner in everybody:
        own = [factor for factor in factors if assignment.owner_of[factor] == owner]
        for same in by_dtype(own, lambda factor: factor.sum.dtype):
            lengths = [packed_numel(factor.sum) for factor in same]
            mine = owner == channel.rank
            flat = torch.cat([packed(f.sum) for f in same]) if mine else same[0].sum.new_empty(sum(lengths))
            parts = channel.broadcast(flat, owner, everybody, "checkpoints").wait().split(lengths)
            result |= {f: _apart(part, f) for f, part in zip(same, parts, strict=True)}
            if mine:
                torch._foreach_copy_([factor.sum for factor in same], [result[factor] for factor in same])
    return result


def total_sums(channel: Channel, blocks: Sequence[KroneckerBlock], *, place: str) -> tuple[dict[Factor, Tensor], Whole]:
    """The sums of all ranks on all of them, to look at: nobody's own change."""
    factors = list(dict.fromkeys(factor for block in blocks for factor in block.factors()))
    orientations = [orientation for block in blocks for orientation in block.orientations]
    whole = torch.stack(channel.meet(place, _numbers(factors, orientations))).sum(0)
    weights, _, counts = whole.split([len(factors), sum(f.stack for f in factors), 2 * len(orientations)])
    result: dict[Factor, Tensor] = {}
    for same in by_dtype(factors, lambda factor: factor.sum.dtype):
        flat = channel.total(torch.cat([packed(factor.sum) for factor in same]), "checkpoints")
        parts = flat.split([packed_numel(factor.sum) for factor in same])
        result |= {f: _apart(part, f) for f, part in zip(same, parts, strict=True)}
    known = dict(zip(factors, weights.tolist(), strict=True))
    told = {o: (float(c[0]), float(c[1])) for o, c in zip(orientations, counts.view(-1, 2), strict=True)}
    return result, Whole({}, {}, known, told, 0)


def _apart(flat: Tensor, factor: Factor) -> Tensor:
    """A factor out of a message, with memory of its own: what is saved must not drag the message along."""
    found = unpacked(flat, factor.sum.shape)
    return found.clone() if factor.diagonal else found


def _others_have(weights: Tensor, owner: int) -> bool:
    """Whether a rank beside the owner has anything of a factor, from all ranks' weights."""
    return bool((weights > 0).sum() > (weights[owner] > 0))


def _numbers(factors: Sequence[Factor], orientations: Sequence[Orientation], view: View = PRESENT) -> Tensor:
    """Weights and traces of factors and counts of orientations, on the host."""
    return torch.cat(
        [
            torch.stack([view.weight(factor) for factor in factors]),
            *(_traces(view.sum(factor)) for factor in factors),
            *(view.counts(orientation) for orientation in orientations),
        ]
    ).cpu()


def _traces(total: Tensor) -> Tensor:
    diagonal = total if total.dim() == 2 else total.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(-1, dtype=torch.float64)

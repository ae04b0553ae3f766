"""All that K-FAC says to other ranks: meetings of the hosts, and messages between devices, counted.

K-FAC has process groups of its own, used by one thread and in one order, so that its messages never come between
DDP's. Nothing here knows what the numbers mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from natgrad.clock import Clock, NoClock

# What messages are about: the order of the metrics.
KINDS = ("meetings", "factors", "solutions", "gradients", "checkpoints")
_ASK_EVERY = 0.02  # seconds


class OutOfStepError(RuntimeError):
    """Ranks that should have done the same thing did not."""


@dataclass
class Tally:
    """Messages of one kind that this rank took part in: how many, and the bytes of what was handed over, whole."""

    calls: int = 0
    bytes: int = 0

    def add(self, bytes_: int, calls: int = 1) -> None:
        """Counts a message."""
        self.calls += calls
        self.bytes += bytes_


class Channel:
    """This rank among the `size` that train one model. Constructing it is the first meeting: all ranks must."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = group.size()
        self.clock: Clock = NoClock()  # what the time of waiting for others is told to
        self.tallies = {kind: Tally() for kind in KINDS}
        self._members = dist.get_process_group_ranks(group)
        self._timeout = timedelta(seconds=timeout)
        backend: str = dist.get_backend(group)
        if backend not in ("nccl", "gloo"):  # one for each device: take that of the parameters
            backend = "nccl" if device.type == "cuda" else "gloo"
        self._backend = backend
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._made = {tuple(range(self.size))}  # by any rank
        with self._explained("the construction of KFAC"):
            self._align(group.group_name)
            self._hosts = self._new_group(range(self.size), "gloo")
            self._groups[tuple(range(self.size))] = self._new_group(range(self.size), backend)
        self._store = c10d.PrefixStore(f"natgrad/{self._hosts.group_name}", c10d._get_default_store())
        self._rolls: dict[tuple[str, int], int] = {}

    # Hosts

    def meet(self, place: str, facts: Any = None) -> list[Any]:
        """Brings a few facts of every rank to all of them, in the order of ranks. `place` says where in its work a rank
        is: ranks that are at different places are told, by name.
        """
        everybody: list[Any] = [None] * self.size
        with self._explained(place), self.clock.part("exchange"):
            dist.all_gather_object(everybody, (place, facts), group=self._hosts)
        self.tallies["meetings"].add(len(place) + 8 * _count(facts))
        places = [there for there, _ in everybody]
        if len(set(places)) > 1:
            where = "; ".join(f"rank {rank} is at {there}" for rank, there in enumerate(places))
            raise OutOfStepError(f"the ranks are out of step: {where}. Every rank must make the same calls of K-FAC")
        return [told for _, told in everybody]

    def roll_call(self, what: str, when: int, seconds: float) -> None:
        """Waits until all ranks have come to `what`, and refuses, on all of them, when one does not come in time.
        Nothing is broken by that, as it would be by a collective that is given up: training can go on. Ranks that come
        at the same time (`when`, a step) and for the same time then belong together.
        """
        number = self._rolls[what, when] = self._rolls.get((what, when), 0) + 1
        key = f"{what}/{when}/{number}"
        store, state = self._store, f"{key}/state"
        store.set(f"{key}/{self.rank}", "here")
        if store.add(f"{key}/count", 1) == self.size:
            verdict = store.compare_set(state, "", "all")
        else:
            # Asked again and again: a store that waits lets no other thread in.
            until = time.monotonic() + seconds
            while not store.check([state]) and time.monotonic() < until:
                time.sleep(_ASK_EVERY)
            verdict = store.compare_set(state, "", "refused")
        if verdict != b"all":
            missing = [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]
            who = f"rank {', '.join(map(str, missing))} did not come within {seconds:g} s"
            who = who if missing else "another one had given up by then"
            raise OutOfStepError(
                f"{what} needs all {self.size} ranks: {who}. Nothing was changed; call it on every rank, in the same "
                "step"
            )

    @contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        try:
            yield
        except OutOfStepError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise OutOfStepError(
                f"rank {self.rank} of {self.size} lost the others at {place}: one has died, or did not come within "
                f"{self._timeout.total_seconds():g} s ({error})"
            ) from error

    # Devices

    def _new_group(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        members = [self._members[rank] for rank in ranks]
        made = dist.new_group(members, timeout=self._timeout, backend=backend, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), "this rank is a member"
        return made

    def _align(self, name: str) -> None:
        """torch names a group after its ranks and the number of groups that a rank is in, so that ranks that are in
        different numbers of them would look for each other in vain: groups of one make the numbers equal. `name` is
        that of a group that all are in; the numbers travel through the store, which can be given up.
        """
        store = c10d.PrefixStore(f"natgrad/groups of {name}", c10d._get_default_store())
        call = store.add(f"calls of {self.rank}", 1)
        store.set(f"{call}/{self.rank}", str(len(c10d._world.pg_names)))
        keys = [f"{call}/{rank}" for rank in range(self.size)]
        until = time.monotonic() + self._timeout.total_seconds()
        while not store.check(keys):
            if time.monotonic() > until:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise RuntimeError(f"rank {', '.join(map(str, missing))} is missing: every rank must construct a KFAC")
            time.sleep(_ASK_EVERY)
        for _ in range(len(c10d._world.pg_names), max(int(store.get(key)) for key in keys)):
            self._new_group([self.rank], "gloo")

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Makes the groups that messages will go through; all ranks must ask for the same ones. In every round each
        rank makes a group, if only one of itself (see `_align`).
        """
        new = [tuple(one) for one in groups if len(one) > 1 and tuple(one) not in self._made]
        self._made |= set(new)
        with self._explained("making process groups"):
            if new:
                self._align(self._hosts.group_name)
            while new:
                taken: set[int] = set()
                later = []
                for ranks in new:
                    if taken & set(ranks):
                        later.append(ranks)
                        continue
                    taken |= set(ranks)
                    if self.rank in ranks:
                        self._groups[ranks] = self._new_group(ranks, self._backend)
                if self.rank not in taken:
                    # Of the same backend: NCCL with a bound device makes all groups of a round in one split.
                    self._new_group([self.rank], self._backend)
                new = later

    def reduce(self, flat: Tensor, to: int, kind: str) -> Message:
        """Starts to add up a buffer of all ranks into that of one."""
        group = self._groups[tuple(range(self.size))]
        work = dist.reduce(flat, dst=self._members[to], group=group, async_op=True)
        return self._sent(work, flat, kind)

    def broadcast(self, flat: Tensor, source: int, ranks: Sequence[int], kind: str) -> Message:
        """Starts to bring one rank's buffer to `ranks`."""
        work = dist.broadcast(flat, src=self._members[source], group=self._groups[tuple(ranks)], async_op=True)
        return self._sent(work, flat, kind)

    def total(self, number: Tensor, kind: str) -> Tensor:
        """The sum over all ranks, in place; the same bits everywhere."""
        work = dist.all_reduce(number, group=self._groups[tuple(range(self.size))], async_op=True)
        return self._sent(work, number, kind).wait()

    def _sent(self, work: Any, flat: Tensor, kind: str) -> Message:
        self.tallies[kind].add(flat.numel() * flat.element_size())
        return Message(self, work, flat, kind)


class Message:
    """One that is under way."""

    def __init__(self, channel: Channel, work: Any, flat: Tensor, kind: str) -> None:
        self._channel, self._work, self._flat, self._kind = channel, work, flat, kind

    def wait(self) -> Tensor:
        """The buffer, once it may be read; on a GPU the device waits, not the host."""
        with self._channel._explained(f"a message of {self._kind}"), self._channel.clock.part("exchange"):
            self._work.wait()
        return self._flat


def _count(facts: Any) -> int:
    """How many numbers or words; texts count by their letters."""
    if isinstance(facts, dict):
        return sum(map(_count, facts.values()))
    if isinstance(facts, list | tuple):
        return sum(map(_count, facts))
    if isinstance(facts, Tensor):
        return facts.numel()
    return len(facts) // 8 if isinstance(facts, str | bytes) else 1

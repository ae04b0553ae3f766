"""The processes of a run: one, or those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

WAIT = timedelta(minutes=10)
"""Longest wait for another rank; a rank that has died ends the run instead of stopping it for ever."""

_BEGUN = "natgrad: the folder of the run"
_ENDED = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "nccl")
_SILENT = ("timed out waiting", "timed out after", "wait timeout after", "application timeout caused pair closure")


class DeviceError(ValueError):
    """A device that is not there."""


class LostError(Exception):
    """Another rank has ended, or does not answer."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others. `hosts` is a group that talks between CPUs, whatever the device; `wait` is how
    long it and the other groups wait for a rank. `lasting`, which the first one has, outlives restarts by torchrun.
    """

    rank: int = 0
    count: int = 1
    device: torch.device
    hosts: dist.ProcessGroup | None = None
    wait: timedelta = WAIT
    lasting: Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    @property
    def described(self) -> str:
        """The device, for people."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'' if threads == 1 else 's'}"

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the device."""
        if self.count > 1:
            dist.all_reduce(numbers)
        return numbers

    def gathered(self, texts: list[str]) -> list[str]:
        """The texts of all ranks, on all of them."""
        if self.count == 1:
            return texts
        boxes: list[list[str]] = [[] for _ in range(self.count)]
        dist.all_gather_object(boxes, texts, group=self.hosts)
        return [text for box in boxes for text in box]

    def told(self, text: str) -> str:
        """The first rank's text, on all of them."""
        if self.count == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0, group=self.hosts)
        return box[0]

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        if self.count == 1:
            return mine
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.hosts)
        return bool(flag)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Says what this rank was waiting for inside, where another one has ended or does not answer."""
        with nullcontext() if self.count == 1 else _lost_told(what, self.wait):
            yield

    def begun(self) -> Path | None:
        """The folder of the run that these ranks had begun before torchrun restarted them."""
        kept = ""
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if restarted and self.lasting is not None and self.lasting.check([_BEGUN]):
            kept = self.lasting.get(_BEGUN).decode()
        text = self.told(kept)
        return Path(text) if text else None

    def begin(self, folder: Path) -> None:
        """Remembers the folder for `begun`: from here on a restart goes on with it."""
        if self.lasting is not None:
            self.lasting.set(_BEGUN, str(folder.absolute()))


@contextmanager
def started(device: str | None = None, *, wait: timedelta = WAIT) -> Iterator[Ranks]:
    """Joins the other ranks where torchrun has started several; leaves them at the end."""
    try:
        count, local = (int(os.environ.get(*one)) for one in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    except ValueError as error:
        raise DeviceError(f"torchrun's environment variables are not numbers: {error}") from None
    chosen = device_of(device, local)
    if count == 1:
        yield Ranks(device=chosen, lasting=_lasting_store(wait))
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    try:
        with _lost_told("the others to start", wait):
            dist.init_process_group(backend, timeout=wait, **_store_of_attempt(wait))
    except ValueError as error:
        raise DeviceError(f"the ranks cannot find each other: {error}. Start them with torchrun") from error
    try:
        with _lost_told("the others", wait):
            hosts = dist.new_group(backend="gloo", timeout=wait)
            rank = dist.get_rank()
            lasting = None if rank else _lasting_store(wait)
            yield Ranks(rank=rank, count=count, device=chosen, hosts=hosts, wait=wait, lasting=lasting)
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost_told(what: str, wait: timedelta) -> Iterator[None]:
    """torch has but one error for everything: whether it is another rank's end or silence is in its words."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        if any(words in said for words in _ENDED):
            raise LostError(
                f"another rank has ended while this one waited for {what}: see what that one says"
            ) from error
        if any(words in said for words in _SILENT):
            raise LostError(
                f"another rank does not answer: this one has waited {wait.total_seconds():g} seconds for {what}. "
                "Is that one stopped, or its machine out of reach?"
            ) from error
        raise


def _lasting_store(wait: timedelta) -> Store | None:
    """torchrun's own, which is there as long as torchrun is, however often it restarts the ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)


def _store_of_attempt(wait: timedelta) -> dict[str, Any]:
    """After torchrun has restarted the ranks, its store still has the addresses of the attempt before, and they would
    wait for each other in vain (pytorch/pytorch#135712): on one machine a prefix tells the attempts apart.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":  # machines may count differently
        return {}
    store, rank, count = next(rendezvous("env://", timeout=wait))
    return {"store": PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": count}


def device_of(given: str | None, local: int, *, shared: bool = False) -> torch.device:
    """The device that was asked for, or the local rank's own; helpers may have one together with others."""
    name = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"--device {name!r} is not a device: use cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise DeviceError(f"--device {name!r}: natgrad trains on cpu or cuda")
    if not torch.cuda.is_available():
        raise DeviceError(f"--device {name!r}: this machine, or this build of torch, has no CUDA device")
    if shared:
        local %= torch.cuda.device_count()
    index = local if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)

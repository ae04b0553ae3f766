"""The processes of a run: one, or those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

WAIT = timedelta(minutes=10)
"""Longest wait for another rank; a rank that has died ends the run instead of stopping it for ever."""


class DeviceError(ValueError):
    """A device that is not there."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others. `hosts` is a group that talks between CPUs, whatever the device."""

    rank: int = 0
    count: int = 1
    device: torch.device
    hosts: dist.ProcessGroup | None = None

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


@contextmanager
def started(device: str | None = None) -> Iterator[Ranks]:
    """Joins the other ranks where torchrun has started several; leaves them at the end."""
    try:
        count, local = (int(os.environ.get(*one)) for one in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    except ValueError as error:
        raise DeviceError(f"torchrun's environment variables are not numbers: {error}") from None
    chosen = _device(device, local)
    if count == 1:
        yield Ranks(device=chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=WAIT, **_store_of_attempt())
    except ValueError as error:
        raise DeviceError(f"the ranks cannot find each other: {error}. Start them with torchrun") from error
    try:
        hosts = dist.new_group(backend="gloo", timeout=WAIT)
        yield Ranks(rank=dist.get_rank(), count=count, device=chosen, hosts=hosts)
    finally:
        dist.destroy_process_group()


def _store_of_attempt() -> dict[str, Any]:
    """After torchrun has restarted the ranks, its store still has the addresses of the attempt before, and they would
    wait for each other in vain (pytorch/pytorch#135712): on one machine a prefix tells the attempts apart.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":  # machines may count differently
        return {}
    store, rank, count = next(rendezvous("env://", timeout=WAIT))
    return {"store": PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": count}


def _device(given: str | None, local: int) -> torch.device:
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
    index = local if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)

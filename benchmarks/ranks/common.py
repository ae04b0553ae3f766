"""Tables, models and ranks that the measurements have in common."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import natgrad
from natgrad.models import build

MIB = 2**20


@dataclass(frozen=True)
class Table:
    """For people, in markdown, with what must be known to read it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [list(self.header), ["---", *["---:"] * (len(self.header) - 1)], *map(list, self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (f"### {self.title}", self.note, text) if part)


@dataclass(frozen=True)
class Outcome:
    """Of one measurement: tables, and the numbers behind them."""

    tables: list[Table]
    records: list[dict[str, Any]]


class Loop:
    """A model with K-FAC on made-up images, on one rank or, inside a process group, on all of its ranks.

    Norm layers are left to the optimizer, as in the papers: only linear and convolution layers count.
    """

    def __init__(self, name: str, *, batch: int, image: int, **options: Any) -> None:
        torch.manual_seed(0)
        model = build(name)
        self._model: nn.Module = model
        if dist.is_initialized():
            self._model = nn.parallel.DistributedDataParallel(model)
            torch.manual_seed(1 + dist.get_rank())
        else:
            options.pop("strategy", None)
        self._x = torch.randn(batch, 3, image, image)
        self._y = torch.randint(0, 10, (batch,))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.kfac = natgrad.KFAC(self._model, optimizer=self._optimizer, vectors="optimizer", **options)

    def backward(self) -> None:
        """A step up to the gradients, with which K-FAC knows its blocks."""
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(self._x), self._y).backward()

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.kfac.step()
        self._optimizer.step()


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on each of some ranks on this machine, with one thread each, that talk
    through Gloo. Fresh processes: forked ones inherit locks of threads that they do not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, folder, function, arguments), nprocs=ranks)
        return [pickle.loads(Path(folder, f"rank-{rank}").read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
        )
    try:
        answer = function(*arguments)
        if ranks > 1:
            dist.barrier()  # who is done must not leave while others still talk
    finally:
        if ranks > 1:
            dist.destroy_process_group()
    Path(folder, f"rank-{rank}").write_bytes(pickle.dumps(answer))

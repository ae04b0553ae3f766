"""A small network with a use of every kind, and loops over shards of its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC

CASES, LENGTH, WORDS, STEPS = 12, 5, 7, 6


class Mixed(nn.Module):
    """Shared inputs (q, k), a stack (a grouped convolution), a vector (layer norm), and a weight used in both
    orientations (the tied head).
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6)
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 6, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        attention = (self.query(x) @ self.key(x).mT).softmax(-1)
        x = x + self.mix((attention @ x).mT).mT
        return self.out(torch.tanh(self.norm(x))) @ self.words.weight.T


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(WORDS, (CASES, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Loop:
    """A training loop on this rank's shard of every batch; with one rank, on all of it."""

    def __init__(
        self, rank: int, ranks: int, *, model: nn.Module | None = None, device: str = "cpu", **options: Any
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.model = (Mixed() if model is None else model).to(device)
        self.wrapped: nn.Module = self.model
        if ranks > 1:
            # DDP rearranges its buckets after the first step, and three ranks then add up in another order: not with
            # this option, which makes a run that goes on the same run bit for bit.
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"factor_update_steps": 1, "inv_update_steps": 2, "damping": 1e-2, **options}
        if ranks == 1:  # what is meant for several
            options.pop("strategy", None)
        self.kfac = KFAC(self.wrapped, **options)
        self.kfac.attach(self.optimizer)

    def shard(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.ranks)[self.rank].to(self.device)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.wrapped(self.shard(x)), self.shard(y)).backward()
        self.optimizer.step()

    def run(self, steps: int = STEPS, *, skip: int = 0) -> Loop:
        for number, (x, y) in enumerate(batches(steps)):
            if number >= skip:
                torch.manual_seed(100 * number + self.rank)  # the sampled Fisher
                self.step(x, y)
        return self

    def taken(self) -> int:
        """How many factors have statistics that wait for the step."""
        return sum(factor.pending is not None for factor in self.kfac._registry.factors())

    @property
    def weights(self) -> dict[str, Any]:
        return {name: parameter.detach().cpu().numpy().copy() for name, parameter in self.model.named_parameters()}


def trained(rank: int, ranks: int, device: str, cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Weights after a run of each case, and the messages of factors that a backward pass had sent by its end."""
    found = []
    for options in cases:
        loop = Loop(rank, ranks, device=device, **options).run()
        state = loop.kfac.state_dict()
        again = Loop(rank, ranks, device=device, **options)
        again.model.load_state_dict(loop.model.state_dict())
        again.kfac.load_state_dict(state)
        loop.run(STEPS + 2, skip=STEPS)
        again.run(STEPS + 2, skip=STEPS)
        close(again.weights, loop.weights)
        found.append((loop.weights, loop.kfac.metrics()["decompositions"]))
    return found


def empty_at_first(rank: int, ranks: int, device: str) -> dict[str, Any]:
    """The last rank has no cases in its first step."""
    loop = Loop(rank, ranks, device=device, factor_update_steps=1, inv_update_steps=1)
    for number, (x, y) in enumerate(batches(3)):
        x, y = loop.shard(x), loop.shard(y)
        loop.optimizer.zero_grad()
        if number == 0 and rank == ranks - 1:
            loop.wrapped(x[:0]).sum().backward()
        else:
            loss_of(loop.wrapped(x), y).backward()
        loop.optimizer.step()
    return loop.weights


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        torch.testing.assert_close(torch.tensor(one), torch.tensor(theirs[name]), rtol=tolerance, atol=tolerance)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, one in ours.items():
        assert (one == theirs[name]).all(), name


@contextlib.contextmanager
def problem_of() -> Iterator[list[str]]:
    """The text of the error inside."""
    texts: list[str] = []
    try:
        yield texts
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")

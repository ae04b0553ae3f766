"""Loops in which not every backward pass is followed by a step, and layers that come, go and change: several ranks do
what one does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from distribute.mixed import close, same
from natgrad import KFAC
from ranks import run_on_ranks

quiet = pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")


def network(seed: int, inputs: int = 4, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


class Trained:
    """A model with SGD and K-FAC on this rank's shards of made-up cases."""

    def __init__(self, model: nn.Module, rank: int, ranks: int, **options: Any) -> None:
        self.model, self._rank, self._ranks = model, rank, ranks
        self.wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"factor_update_steps": 1, "inv_update_steps": 2, "damping": 0.1, **options}
        self.kfac = KFAC(self.wrapped, **options).attach(self.optimizer)
        self._draw = torch.Generator().manual_seed(5)

    def shard(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._ranks)[self._rank]

    def cases(self, inputs: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, inputs, generator=self._draw, dtype=torch.float64)
        return self.shard(x), self.shard(torch.randint(classes, (8,), generator=self._draw))

    def backward(self, scale: float = 1.0) -> None:
        x, y = self.cases()
        (functional.cross_entropy(self.wrapped(x), y) * scale).backward()

    @property
    def weights(self) -> dict[str, Any]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}


def adversaries(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    """The generator's loss goes through the discriminator too, whose statistics it is not."""
    judge = Trained(network(1, 4, 2), rank, ranks, strategy=strategy, inv_update_steps=1)
    maker = network(2, 4, 4)
    wrapped = nn.parallel.DistributedDataParallel(maker) if ranks > 1 else maker
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    for _ in range(5):
        x, y = judge.cases(classes=2)
        judge.optimizer.zero_grad()
        functional.cross_entropy(judge.wrapped(x), y).backward()
        judge.optimizer.step()
        z, _ = judge.cases()
        optimizer.zero_grad()
        functional.cross_entropy(judge.wrapped(wrapped(z)), torch.ones(len(z), dtype=torch.long)).backward()
        optimizer.step()
    return judge.weights


def skipping(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    one = Trained(network(1), rank, ranks, strategy=strategy)
    for number in range(9):
        one.optimizer.zero_grad()
        one.backward()
        if number not in (4, 6):
            one.optimizer.step()
    return one.weights


def accumulating(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    """Begins after some steps of one backward pass, and does not say so to DDP."""
    one = Trained(network(1), rank, ranks, strategy=strategy, accumulated_loss="mean")
    for number in range(7):
        micro = 1 if number < 4 else 3
        one.optimizer.zero_grad()
        for _ in range(micro):
            one.backward(1 / micro)
        one.optimizer.step()
    return one.weights


class Forgetful(nn.Module):
    """A norm layer used twice, and a layer that is no longer used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.once, self.norm, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.calls = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(torch.tanh(self.first(self.norm(x))))
        return self.out(x + self.once(x) if self.calls <= 2 else x)


def forgetting(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    one = Trained(Forgetful(), rank, ranks, strategy=strategy)
    for number in range(9):
        one.optimizer.zero_grad()
        one.backward()
        if number != 4:
            one.optimizer.step()
    return one.weights


class Pair(nn.Module):
    """Two layers of one input, of which the second comes later: apart, and together when their biases are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)
        self.calls = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.query(x) * (self.key(x) if self.calls > 2 else 1.0)


def pairing(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    model = Pair()
    one = Trained(model, rank, ranks, strategy=strategy)
    for number in range(8):
        if number == 5:
            model.query.bias.requires_grad_(False)
            model.key.bias.requires_grad_(False)
        one.optimizer.zero_grad()
        one.backward()
        one.optimizer.step()
    return one.weights


class Tied(nn.Module):
    """An embedding that becomes the head as well, with a first batch of no use: its block is diagonal, then dense."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.calls = 0
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        z = self.words(words)
        if self.calls <= 2:
            return self.head(z)
        return self.head(z) + z @ self.words.weight.T * (float("inf") if self.calls == 3 else 1.0)


def tying(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    one = Trained(Tied(), rank, ranks, strategy=strategy, factor_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(8):
        x, y = (one.shard(torch.randint(7, (8,), generator=draw)) for _ in range(2))
        one.optimizer.zero_grad()
        functional.cross_entropy(one.wrapped(x), y).backward()
        one.optimizer.step()
    one.kfac.state_dict()
    return one.weights


@quiet
@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
@pytest.mark.parametrize("loop", [adversaries, skipping, accumulating, forgetting, pairing, tying])
def test_several_ranks_do_what_one_does(tmp_path, loop, strategy):
    alone = loop(0, 1, strategy)
    answers = run_on_ranks(loop, tmp_path, 2, strategy)
    for weights in answers:
        same(weights, answers[0])
        close(weights, alone)


def groups_in_between(rank: int, ranks: int) -> dict[str, Any]:
    """Others make process groups too, after KFAC was constructed, and not all ranks are in them."""
    one = Trained(network(1), rank, ranks, strategy="hybrid")
    dist.new_group([0])
    dist.new_group([1, 2])
    for _ in range(4):
        one.optimizer.zero_grad()
        one.backward()
        one.optimizer.step()
    return one.weights


def test_process_groups_of_others_are_no_trouble(tmp_path):
    answers = run_on_ranks(groups_in_between, tmp_path, 3)
    for weights in answers:
        same(weights, answers[0])


def saved_sizes(rank: int, ranks: int) -> list[tuple[int, int]]:
    one = Trained(Tied(), rank, ranks, factor_decay=0.0)
    one.optimizer.zero_grad()
    functional.cross_entropy(one.wrapped(torch.tensor([1, 2])), torch.tensor([3, 4])).backward()
    one.optimizer.step()
    blocks = one.kfac.state_dict()["blocks"].values()
    sums = [side["sum"] for block in blocks for one_ in block["orientations"] for side in one_["sides"]]
    return [(total.untyped_storage().nbytes(), total.numel() * total.element_size()) for total in sums]


def test_what_is_saved_does_not_drag_messages_along(tmp_path):
    for sizes in run_on_ranks(saved_sizes, tmp_path, 2):
        assert all(stored == needed for stored, needed in sizes)


def sharing(rank: int, ranks: int, folder: Any, *, again: bool) -> dict[str, Any]:
    from natgrad import Strategy

    one = Trained(network(1), rank, ranks, strategy=Strategy(share_statistics=True))
    for number in range(10):
        if number == 5 and again:
            state = torch.load(folder / "state.pt", weights_only=True)
            one.model.load_state_dict(state["model"])
            one.kfac.load_state_dict(state["kfac"])
        one.optimizer.zero_grad()
        one.backward()
        if number >= 5 or not again:
            one.optimizer.step()
        if number == 4 and not again:
            state = {"model": one.model.state_dict(), "kfac": one.kfac.state_dict()}
            if rank == 0:
                torch.save(state, folder / "state.pt")
    return one.weights


def run_again(rank: int, ranks: int, folder: Any) -> dict[str, Any]:
    return sharing(rank, ranks, folder, again=True)


def run_first(rank: int, ranks: int, folder: Any) -> dict[str, Any]:
    return sharing(rank, ranks, folder, again=False)


@quiet
def test_shared_statistics_go_on_from_a_checkpoint_bit_for_bit(tmp_path):
    (tmp_path / "again").mkdir()
    first = run_on_ranks(run_first, tmp_path, 2, tmp_path)
    for weights in run_on_ranks(run_again, tmp_path / "again", 2, tmp_path):
        same(weights, first[0])

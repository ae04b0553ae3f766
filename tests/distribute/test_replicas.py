"""Ranks on shards of a batch precondition like one rank on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from natgrad import KFAC, Categorical, NatgradWarning
from ranks import run_on_ranks

CASES, STEPS = 12, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    ).double()


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, CASES, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (STEPS, CASES), generator=generator)


def train(rank: int, ranks: int, options: dict) -> tuple[list[torch.Tensor], float]:
    """The weights after some steps on this rank's share of every batch; in one process, on all of it."""
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(wrapped, factor_update_steps=2, inv_update_steps=2, kl_clip=None, damping=1e-2, **options)
    kfac.attach(optimizer)
    torch.manual_seed(rank)  # the sampled Fisher
    for x, y in zip(*batches(), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()], kfac.damping


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{"fisher": "empirical"}, {"fisher": "exact"}, {"solver": "inverse"}])
def test_ranks_on_shards_equal_one_rank_on_the_whole_batch(tmp_path, ranks, options):
    whole, _ = train(0, 1, options)
    for shards, _ in run_on_ranks(train, tmp_path, ranks, options):
        for shard, one in zip(shards, whole, strict=True):
            torch.testing.assert_close(torch.tensor(shard), torch.tensor(one), rtol=1e-10, atol=1e-12)


def test_a_sampled_fisher_is_the_same_on_all_ranks_and_repeats(tmp_path):
    (tmp_path / "again").mkdir()
    first = run_on_ranks(train, tmp_path, 2, {"fisher": "sampled"})
    second = run_on_ranks(train, tmp_path / "again", 2, {"fisher": "sampled"})
    for other in (first[1], *second):
        assert all((a == b).all() for a, b in zip(first[0][0], other[0], strict=True))


def nan_on_one_rank(rank: int, ranks: int) -> tuple[list[torch.Tensor], dict]:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(wrapped, factor_update_steps=1, inv_update_steps=1).attach(optimizer)
    for step, (x, y) in enumerate(zip(*batches(), strict=True)):
        share = x.chunk(ranks)[rank]
        if step == 2 and rank == 1:
            share = share * float("nan")
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(share), y.chunk(ranks)[rank]).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()], kfac.metrics()


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
def test_a_nan_batch_of_one_rank_is_dropped_by_all(tmp_path):
    (first, counts), (second, others) = run_on_ranks(nan_on_one_rank, tmp_path, 2)
    assert counts["skipped_steps"] == others["skipped_steps"] == 1
    assert counts["rejected_statistics"] == others["rejected_statistics"] > 0
    for one, other in zip(first, second, strict=True):
        assert (one == other).all()
        assert (one == one).all()


class Wandering(nn.Module):
    """Another layer on every rank, as no replica should have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def wander(rank: int, ranks: int) -> str:
    wrapped = nn.parallel.DistributedDataParallel(Wandering(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    KFAC(wrapped).attach(optimizer)
    wrapped(torch.randn(5, 4), rank).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_use_different_layers_are_told(tmp_path):
    for rank, message in enumerate(run_on_ranks(wander, tmp_path, 2)):
        assert f"rank {rank} has those of layers.{rank}.weight" in message


def unwrapped(rank: int, ranks: int) -> str:
    with pytest.warns(NatgradWarning) as caught:
        KFAC(network())
    return str(caught[0].message)


def test_a_model_outside_of_ddp_is_warned_about(tmp_path):
    for message in run_on_ranks(unwrapped, tmp_path, 2):
        assert "give KFAC the wrapped one" in message


def ignored_on_one_rank(rank: int, ranks: int) -> tuple[list[torch.Tensor], dict]:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(wrapped, factor_update_steps=1, inv_update_steps=1, predictive=Categorical(ignore_index=-100))
    kfac.attach(optimizer)
    for step, (x, y) in enumerate(zip(*batches(), strict=True)):
        if step == 2:
            y[CASES // 2 :] = -100
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        kfac.targets = y
        optimizer.zero_grad()
        # A mean over what counts on all ranks, of which DDP takes the mean again.
        total = CASES // 2 if step == 2 else CASES
        (functional.cross_entropy(wrapped(x), y, reduction="sum") * ranks / total).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()], kfac.metrics()


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
def test_a_rank_whose_targets_are_all_ignored_takes_part_with_nothing(tmp_path):
    (first, _), (second, _) = run_on_ranks(ignored_on_one_rank, tmp_path, 2)
    for one, other in zip(first, second, strict=True):
        assert (one == other).all()
        assert (one == one).all()

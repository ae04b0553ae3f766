"""Ranks that share one GPU, through gloo: streams, dtypes and devices; NCCL wants a GPU a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distribute.mixed import STEPS, Loop, close, empty_at_first, same, trained
from natgrad import Costs, Strategy
from natgrad.distribute.costs import measure
from ranks import run_on_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CASES: list[dict[str, Any]] = [
    {"strategy": "comm-opt"},
    {"strategy": "layer-wise", "solver": "inverse"},
    {"strategy": "hybrid", "fisher": "exact"},
    {"strategy": Strategy(name="layer-wise", placement="round-robin"), "kl_clip": 1e-4},
]


def test_ranks_on_a_gpu_equal_one(tmp_path):
    answers = run_on_ranks(trained, tmp_path, 2, "cuda", CASES, seconds=240)
    for number, options in enumerate(CASES):
        loop = Loop(0, 1, device="cuda", **options).run(STEPS + 2)
        for answer in answers:
            close(answer[number][0], loop.weights, tolerance=1e-9)
            same(answer[number][0], answers[0][number][0])
        assert sum(answer[number][1] for answer in answers) == loop.kfac.metrics()["decompositions"]


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
def test_a_rank_may_begin_with_an_empty_batch(tmp_path):
    first, second = run_on_ranks(empty_at_first, tmp_path, 2, "cuda", seconds=120)
    same(first, second)


def test_nccl_carries_every_kind_of_message(tmp_path):
    """One rank alone: that the calls are ones that NCCL takes."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    run_on_ranks(_over_nccl, tmp_path, 1, seconds=120)


def _over_nccl(rank: int, ranks: int) -> None:
    from natgrad.distribute.channel import Channel

    torch.cuda.set_device(0)
    group = dist.new_group([0], backend="nccl")
    channel = Channel(group, torch.device("cuda", 0), timeout=60)
    assert channel.meet("here", {"one": 1}) == [{"one": 1}]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.ones(5, dtype=dtype, device="cuda")
        assert channel.reduce(flat, 0, "factors").wait().sum() == 5
        assert channel.broadcast(flat, 0, [0], "solutions").wait().sum() == 5
        assert channel.total(flat, "gradients").sum() == 5
    assert channel.tallies["factors"].bytes == 5 * (4 + 8 + 2)


def test_costs_of_this_gpu_are_measured():
    costs = measure(torch.device("cuda"))
    assert isinstance(costs, Costs)
    sizes = [size for size, _ in costs.eigen]
    assert sizes == sorted(sizes)
    assert costs.solve("eigen", 512) > costs.solve("inverse", 512) > 0

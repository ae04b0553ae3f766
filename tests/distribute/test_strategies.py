"""W ranks on shards of a batch are one rank on the whole of it, whoever does the work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from distribute.mixed import Loop, close, same
from natgrad import KFAC, Strategy
from ranks import run_on_ranks

STRATEGIES: dict[str, Any] = {
    "comm-opt": "comm-opt",
    "layer-wise": "layer-wise",
    "hybrid": "hybrid",
    "auto": "auto",
    "round-robin": Strategy(name="comm-opt", placement="round-robin"),
    "layer-wise, round-robin": Strategy(name="layer-wise", placement="round-robin"),
    "hybrid, third": Strategy(name="hybrid", grad_worker_fraction=0.3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "empirical": {"kl_clip": None},
    "clipped": {"kl_clip": 1e-4},
    "exact": {"fisher": "exact"},
    "inverse": {"solver": "inverse"},
    "plain": {"solver": "inverse", "damping_rule": "plain"},
    "pi": {"damping_rule": "pi", "raw_momentum": 0.5},
    "grafted": {"grafting": "adam"},
    "reduced": {"sharing": "reduce", "batch_axis": 0, "factor_update_steps": 2, "inv_update_steps": 3},
    "diagonal": {"max_factor_size": 5, "vectors": "diagonal"},
}


def train_all(rank: int, ranks: int) -> dict[tuple[str, str], tuple[dict[str, Any], int]]:
    found = {}
    for (strategy, how), (name, options) in itertools.product(STRATEGIES.items(), OPTIONS.items()):
        loop = Loop(rank, ranks, strategy=how, **options).run()
        found[strategy, name] = (loop.weights, loop.kfac.metrics()["decompositions"])
    return found


@pytest.fixture(scope="module")
def whole() -> dict[str, tuple[dict[str, Any], int]]:
    loops = {name: Loop(0, 1, **options).run() for name, options in OPTIONS.items()}
    return {name: (loop.weights, loop.kfac.metrics()["decompositions"]) for name, loop in loops.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_strategy_equals_one_rank_and_no_work_is_done_twice(tmp_path, ranks, whole):
    answers = run_on_ranks(train_all, tmp_path, ranks, seconds=240)
    for strategy, name in answers[0]:
        weights, count = whole[name]
        for mine, _ in (answer[strategy, name] for answer in answers):
            close(mine, weights)
            same(mine, answers[0][strategy, name][0])
        # Every factor is decomposed by one rank: together as often as one rank does it alone.
        counts = [answer[strategy, name][1] for answer in answers]
        assert sum(counts) == count
        assert max(counts) < count


def one_of_one(rank: int, ranks: int) -> dict[str, Any]:
    loop = Loop(rank, ranks)
    loop.wrapped = torch.nn.parallel.DistributedDataParallel(loop.model)
    loop.kfac.detach()
    loop.kfac = KFAC(loop.wrapped, factor_update_steps=1, inv_update_steps=2, damping=1e-2, strategy="layer-wise")
    loop.kfac.attach(loop.optimizer)
    assert "one rank" in str(loop.run().kfac.plan())
    return loop.weights


def test_one_rank_under_torchrun_is_one_process(tmp_path):
    (weights,) = run_on_ranks(one_of_one, tmp_path, 1)
    same(weights, Loop(0, 1).run().weights)

"""What goes wrong on one rank is told to all, or survived by all together."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional

from distribute.mixed import CASES, LENGTH, Loop, Mixed, batches, close, loss_of, problem_of, same
from natgrad import KFAC, Categorical, NatgradWarning, Strategy, TrustRegion
from ranks import run_on_ranks

quiet = pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")


# At construction


def disagreeing(rank: int, ranks: int) -> dict[str, str]:
    found = {}
    with problem_of() as found["damping"]:
        Loop(rank, ranks, damping=1e-2 if rank == 0 else 1e-3)
    with problem_of() as found["exclude"]:
        Loop(rank, ranks, exclude=["norm.*"][:rank])
    version, torch.__version__ = torch.__version__, torch.__version__ if rank == 0 else "9.9"
    with problem_of() as found["torch"]:
        Loop(rank, ranks)
    torch.__version__ = version
    with problem_of() as found["callables"]:
        Loop(rank, ranks, damping=lambda step: 1e-2)
    return {name: texts[0] if texts else "" for name, texts in found.items()}


def test_ranks_that_disagree_are_told_by_name(tmp_path):
    first, second = run_on_ranks(disagreeing, tmp_path, 2)
    assert first == second
    assert "disagree on the option damping: on rank 0 it is 0.01, on rank 1 it is 0.001" in first["damping"]
    assert "disagree on the option exclude: on rank 0 it is [], on rank 1 it is ['norm.*']" in first["exclude"]
    assert f"disagree on torch: on rank 0 it is {torch.__version__}, on rank 1 it is 9.9" in first["torch"]
    assert first["callables"] == ""


def wrong_on_one(rank: int, ranks: int) -> tuple[str, float]:
    began = time.monotonic()
    with problem_of() as texts:
        Loop(rank, ranks, damping=-1.0 if rank == 1 else 1e-2)
    return texts[0], time.monotonic() - began


def test_a_wrong_argument_on_one_rank_is_told_to_all_at_once(tmp_path):
    (first, seconds), (second, _) = run_on_ranks(wrong_on_one, tmp_path, 2)
    assert "rank 1 could not construct its KFAC: damping must be above 0 and finite, got -1.0" in first
    assert second == "ValueError: damping must be above 0 and finite, got -1.0"
    assert seconds < 20


def frozen_on_one(rank: int, ranks: int) -> str:
    model = Mixed()
    wrapped = nn.parallel.DistributedDataParallel(model)
    model.norm.bias.requires_grad_(rank == 0)
    with problem_of() as texts:
        KFAC(wrapped)
    return texts[0]


def test_a_parameter_that_is_frozen_on_one_rank_is_told(tmp_path):
    for text in run_on_ranks(frozen_on_one, tmp_path, 2):
        assert "disagree on the model's parameter norm.bias" in text
        assert "frozen" in text


def saving_inside(rank: int, ranks: int) -> list[str]:
    """As a signal handler would that does not wait for the end of the step."""
    loop = Loop(rank, ranks).run(2)
    usual = loop.kfac._curvature.refresh
    texts: list[str] = []

    def refresh(*arguments: Any) -> None:
        with problem_of() as found:
            loop.kfac.state_dict()
        texts.extend(found)
        usual(*arguments)

    loop.kfac._curvature.refresh = refresh
    loop.run(3, skip=2)
    loop.kfac.state_dict()
    return texts


def test_a_state_in_the_middle_of_a_step_is_refused(tmp_path):
    for texts in run_on_ranks(saving_inside, tmp_path, 2):
        assert "in the middle of a step" in texts[0]


def one_without_kfac(rank: int, ranks: int) -> str:
    wrapped = nn.parallel.DistributedDataParallel(Mixed())
    if rank == 1:
        time.sleep(2)
        return ""
    with problem_of() as texts:
        KFAC(wrapped, strategy=Strategy(timeout=0.5))
    return texts[0]


def test_a_rank_that_constructs_no_kfac_is_not_waited_for_for_ever(tmp_path):
    text, _ = run_on_ranks(one_without_kfac, tmp_path, 2)
    assert "lost the others at the construction of KFAC" in text


def unwrapped(rank: int, ranks: int) -> str:
    with pytest.warns(NatgradWarning) as caught:
        KFAC(Mixed())
    return str(caught[0].message)


def test_a_model_outside_of_ddp_is_warned_about(tmp_path):
    for message in run_on_ranks(unwrapped, tmp_path, 2):
        assert "give KFAC the wrapped one" in message


# Layers that only some ranks use


class Branches(nn.Module):
    """Each case goes through the layer of its kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(4, 5) for _ in range(3)])
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 5)
        for number, layer in enumerate(self.layers):
            chosen = (kinds == number).nonzero()[:, 0]
            if len(chosen):
                hidden = hidden.index_copy(0, chosen, layer(x[chosen]))
        return self.head(torch.tanh(hidden))


# Which layer each half of the batch uses: alike, apart, one that nobody has seen before, one that rests.
KINDS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (0, 2), (0, 1)]


def branch(rank: int, ranks: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    model = Branches()
    loop = Loop(rank, ranks, model=model, **options)
    generator = torch.Generator().manual_seed(5)
    for halves in KINDS:
        x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (8,), generator=generator)
        kinds = torch.tensor(halves).repeat_interleave(4)
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.wrapped(loop.shard(x), loop.shard(kinds)), loop.shard(y)).backward()
        loop.optimizer.step()
    return loop.weights, [block.key for block in loop.kfac.blocks]


@quiet
@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
@pytest.mark.parametrize("options", [{}, {"fisher": "exact"}, {"solver": "inverse", "inv_update_steps": 1}])
def test_layers_that_only_one_rank_uses_are_shared_by_all(tmp_path, strategy, options):
    weights, blocks = branch(0, 1, options)
    for mine, found in run_on_ranks(branch, tmp_path, 2, {**options, "strategy": strategy}):
        close(mine, weights)
        assert found == blocks


# Batches that are of no use


def nan_on_one(rank: int, ranks: int) -> tuple[Any, dict[str, Any], list[float]]:
    loop = Loop(rank, ranks, model=Numbers(), factor_decay=0.5, inv_update_steps=1)
    for step in range(4):
        x, y = numbers(step)
        x = loop.shard(x) * (float("nan") if step == 2 and rank == 1 else 1.0)
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.wrapped(x), loop.shard(y)).backward()
        loop.optimizer.step()
    rows = [float(factor.weight) for block in loop.kfac.gather_blocks() for factor in block.factors()]
    return loop.weights, loop.kfac.metrics(), rows


class Numbers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.double()


def numbers(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (8,), generator=generator)


@quiet
def test_a_nan_batch_of_one_rank_costs_its_statistics_and_the_step(tmp_path):
    (first, counts, rows), (second, others, _) = run_on_ranks(nan_on_one, tmp_path, 2)
    same(first, second)
    assert all(torch.isfinite(torch.tensor(one)).all() for one in first.values())
    assert counts["skipped_steps"] == others["skipped_steps"] == 1
    assert (counts["rejected_statistics"], others["rejected_statistics"]) == (0, 4)
    # Rows of four steps with decay ½, of which the third has those of one rank alone. What the other one had from
    # before then did not fade there.
    assert set(rows) == {8 / 8 + 8 / 4 + 4 / 2 + 8, 8 / 4 + 8 / 2 + 4 / 2 + 8}


def empty_on_one(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    loop = Loop(rank, ranks, strategy=strategy, fisher="exact", factor_update_steps=1, inv_update_steps=1)
    for number, (x, y) in enumerate(batches(4)):
        empty = number in (1, 2)
        if ranks == 1:
            x, y = (x.chunk(2)[0], y.chunk(2)[0]) if empty else (x, y)
            scale = 0.5 if empty else 1.0  # DDP takes the mean with a rank that has none
        else:
            x, y = loop.shard(x), loop.shard(y)
            x, y = (x[:0], y[:0]) if empty and rank == 1 else (x, y)
            scale = 1.0
        loop.optimizer.zero_grad()
        output = loop.wrapped(x)
        (loss_of(output, y) * scale if len(x) else output.sum()).backward()
        loop.optimizer.step()
    return loop.weights


@quiet
@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_a_rank_with_an_empty_batch_takes_part_with_nothing(tmp_path, strategy):
    alone = empty_on_one(0, 1, strategy)
    for weights in run_on_ranks(empty_on_one, tmp_path, 2, strategy):
        close(weights, alone)


def ignored_on_one(rank: int, ranks: int) -> dict[str, Any]:
    ignoring = Categorical(ignore_index=-100)
    loop = Loop(rank, ranks, predictive=ignoring, fisher="sampled", factor_update_steps=1, inv_update_steps=1)
    for number, (x, y) in enumerate(batches(4)):
        torch.manual_seed(number)
        if number == 2:
            y = y.clone()  # x is a view of the same words
            y[CASES // 2 :] = -100
        x, y = loop.shard(x), loop.shard(y)
        loop.kfac.targets = y
        loop.optimizer.zero_grad()
        output = loop.wrapped(x)
        total = functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
        (total * ranks / (CASES * LENGTH)).backward()
        loop.optimizer.step()
    return loop.weights


@quiet
def test_a_rank_whose_targets_are_all_ignored_takes_part_with_nothing(tmp_path):
    first, second = run_on_ranks(ignored_on_one, tmp_path, 2)
    same(first, second)
    assert all(torch.isfinite(torch.tensor(one)).all() for one in first.values())


def nothing_anywhere(rank: int, ranks: int) -> list[str]:
    loop = Loop(rank, ranks).run(1)
    with problem_of() as texts:
        for x, y in batches(1):
            loop.optimizer.zero_grad()
            loss_of(loop.model(loop.shard(x)).detach() + loop.model.out.weight.sum(), loop.shard(y)).backward()
            loop.optimizer.step()
    return texts


def test_gradients_without_statistics_are_an_error_on_all_ranks(tmp_path):
    for texts in run_on_ranks(nothing_anywhere, tmp_path, 2):
        assert "gradient" in texts[0]
        assert "no statistics" in texts[0]


# Fewer batches


def uneven(rank: int, ranks: int, strategy: str) -> tuple[int, dict[str, Any]]:
    """Rank 1 has two batches more; on one process, the same batches by hand."""
    options = {"strategy": strategy, "fisher": "exact", "raw_momentum": 0.5, "damping": lambda step: 0.01 / (step + 1)}
    loop = Loop(rank, ranks, **options)
    if ranks == 1:
        for number, (x, y) in enumerate(batches(6)):
            loop.step(x, y) if number < 4 else loop.step(x.chunk(2)[1], y.chunk(2)[1])
        return loop.kfac.steps, loop.weights
    with Join([loop.wrapped, loop.kfac.joinable], divide_by_initial_world_size=False):
        for x, y in batches(4 + 2 * rank):
            loop.step(x, y)
    return loop.kfac.steps, loop.weights


@quiet
@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_a_rank_with_fewer_batches_joins_and_does_its_share(tmp_path, strategy):
    steps, weights = uneven(0, 1, strategy)
    for count, mine in run_on_ranks(uneven, tmp_path, 2, strategy):
        assert count == steps == 6
        close(mine, weights)


def joined_without_kfac(rank: int, ranks: int) -> list[str]:
    loop = Loop(rank, ranks)
    with problem_of() as texts, loop.wrapped.join():
        loop.run(2)
    with problem_of() as more, Join([loop.kfac.joinable, loop.wrapped]):
        loop.run(2)
    with problem_of() as third:
        Loop(rank, ranks, kl_clip=TrustRegion(1e-3, of="step")).kfac.joinable  # noqa: B018
    return [*texts, *more, *third]


def test_a_join_that_does_not_know_of_kfac_is_refused(tmp_path):
    for texts in run_on_ranks(joined_without_kfac, tmp_path, 2):
        assert "Join([model, kfac.joinable]) in place of model.join()" in texts[0]
        assert "the model comes first" in texts[1]
        assert "takes no optimizer steps" in texts[2]
    with pytest.raises(RuntimeError, match="one process"):
        Loop(0, 1).kfac.joinable  # noqa: B018


# Decompositions that fail


def failing(rank: int, ranks: int, strategy: str, solver: str) -> tuple[dict[str, Any], dict[str, Any]]:
    loop = Loop(rank, ranks, strategy=strategy, solver=solver, inv_update_steps=1)
    loop.run(2)
    kept = {"eigh": torch.linalg.eigh, "cholesky_ex": torch.linalg.cholesky_ex}

    def fail(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    if rank == 1:
        torch.linalg.eigh = torch.linalg.cholesky_ex = fail
    try:
        loop.run(4, skip=2)
    finally:
        torch.linalg.eigh, torch.linalg.cholesky_ex = kept["eigh"], kept["cholesky_ex"]
    loop.run(skip=4)
    return loop.weights, loop.kfac.metrics()


@quiet
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_a_rank_whose_decompositions_fail_keeps_the_last_for_all(tmp_path, strategy, solver):
    (first, counts), (second, others) = run_on_ranks(failing, tmp_path, 2, strategy, solver)
    same(first, second)
    assert counts["failed_decompositions"] == 0 < others["failed_decompositions"]
    assert all(torch.isfinite(torch.tensor(one)).all() for one in first.values())


# Ranks that are lost


def breaks(rank: int, ranks: int) -> str:
    loop = Loop(rank, ranks).run(2)

    def finish() -> bool:
        raise MemoryError("no room on this rank")

    if rank == 1:
        loop.kfac._window.finish = finish
    with problem_of() as texts:
        loop.run(3, skip=2)
    return texts[0]


def test_a_rank_that_cannot_go_on_says_so_to_all(tmp_path):
    first, second = run_on_ranks(breaks, tmp_path, 2)
    assert "rank 1 cannot go on at the statistics of step 2: MemoryError: no room on this rank" in first
    assert second == "MemoryError: no room on this rank"


def out_of_step(rank: int, ranks: int) -> str:
    loop = Loop(rank, ranks).run(2)
    with problem_of() as texts:
        if rank == 0:
            loop.kfac._together.channel.meet("another place")
        else:
            loop.run(3, skip=2)
    return texts[0]


def test_ranks_that_are_out_of_step_are_told_where_the_others_are(tmp_path):
    for text in run_on_ranks(out_of_step, tmp_path, 2):
        assert "rank 0 is at another place; rank 1 is at the statistics of step 2" in text


def late(rank: int, ranks: int) -> tuple[str, float]:
    loop = Loop(rank, ranks, strategy=Strategy(timeout=1.0)).run(2)
    began = time.monotonic()
    with problem_of() as texts:
        if rank == 1:
            time.sleep(3)
        else:
            loop.kfac._together.channel.meet("the statistics of step 2")
    return "".join(texts), time.monotonic() - began


def test_a_rank_that_stands_still_is_given_up_after_the_timeout(tmp_path):
    (text, seconds), _ = run_on_ranks(late, tmp_path, 2)
    assert "lost the others at the statistics of step 2: one has died, or did not come within 1 s" in text
    assert seconds < 3


def dies(rank: int, ranks: int, during: str) -> str:
    loop = Loop(rank, ranks, strategy="layer-wise")
    loop.run(2)
    if rank == 1:
        if during == "step":
            loop.kfac._preconditioner.refresh = lambda *_: os._exit(1)
        else:
            os._exit(1)
    with problem_of() as texts:
        loop.run(skip=2)
    return texts[0]


@pytest.mark.parametrize("during", ["backward", "step"])
def test_a_rank_that_dies_ends_the_others_soon(tmp_path, during):
    # The rank that has died says nothing: the other's answer is what counts.
    answers = run_on_ranks(partial(dies, during=during), tmp_path, 2, dying=1)
    if during == "step":
        assert "rank 0 of 2 lost the others" in answers[0]
    assert answers[0]

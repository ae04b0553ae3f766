"""What is sent, when, and to whom; and what may be left out."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from distribute.mixed import Loop, Mixed, batches, close, loss_of, same
from natgrad import KFAC, Costs, Strategy, TrustRegion
from natgrad.distribute.traffic import messages
from ranks import run_on_ranks

KINDS = ("factors", "solutions", "gradients")


def counted(
    rank: int, ranks: int, strategy: str, options: dict[str, Any]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For steps with and without a refresh: what the counters say, and what the formula says."""
    options = dict(options)
    strategy = Strategy(name=strategy, wire=options.pop("wire", None))
    loop = Loop(rank, ranks, strategy=strategy, factor_update_steps=1, inv_update_steps=2, **options).run(2)
    found = []
    before = loop.kfac.metrics()
    for number in (2, 3):
        loop.run(number + 1, skip=number)
        after = loop.kfac.metrics()
        measured = {
            f"{kind}_{what}": after[f"{kind}_{what}"] - before[f"{kind}_{what}"]
            for kind in KINDS
            for what in ("bytes", "calls")
        }
        before = after
        assignment = loop.kfac._together.spread.assignment
        expected = dict.fromkeys(measured, 0)
        for message in messages(assignment.work, assignment.placement):
            if rank in message.ranks and (number == 2 or message.kind == "gradients"):
                expected[f"{message.kind}_calls"] += 1
                # Every direction travels with eight bytes that say how long it is.
                expected[f"{message.kind}_bytes"] += message.bytes + (8 if message.kind == "gradients" else 0)
        found.append((measured, expected))
    return found


@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"solver": "inverse"}, {"wire": torch.bfloat16}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_counters_are_what_the_formula_says(tmp_path, ranks, strategy, options):
    for answer in run_on_ranks(counted, tmp_path, ranks, strategy, options):
        for measured, expected in answer:
            assert measured == expected
    (refresh, _), (ordinary, _) = answer
    assert refresh["factors_calls"] == ranks  # one message to each rank, whatever the number of factors
    assert ordinary["factors_bytes"] == ordinary["solutions_bytes"] == 0
    assert (ordinary["gradients_bytes"] == 0) == (strategy == "comm-opt")


def meetings(rank: int, ranks: int) -> list[int]:
    loop = Loop(rank, ranks, factor_update_steps=3, inv_update_steps=6, strategy="comm-opt")
    counts = []
    for number in range(9):
        loop.run(number + 1, skip=number)
        counts.append(loop.kfac.metrics()["meetings_calls"])
    return [after - before for before, after in pairwise(counts)]


def test_ordinary_steps_of_comm_opt_say_nothing(tmp_path):
    for counts in run_on_ranks(meetings, tmp_path, 2):
        assert counts == [0, 0, 1, 0, 0, 2, 0, 0]  # statistics: one meeting; a decomposition: one more


def early(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Messages of factors after each backward pass, and after each step."""
    loop = Loop(rank, ranks, factor_update_steps=1, inv_update_steps=2)
    found = []
    for x, y in batches(5):
        loop.optimizer.zero_grad()
        loss_of(loop.wrapped(loop.shard(x)), loop.shard(y)).backward()
        after_backward = loop.kfac.metrics()["factors_calls"]
        loop.optimizer.step()
        found.append((after_backward, loop.kfac.metrics()["factors_calls"]))
    return found


def test_sums_are_on_their_way_when_the_backward_pass_ends(tmp_path):
    for counts in run_on_ranks(early, tmp_path, 2):
        # The first step has to show that one backward pass feeds it.
        assert counts == [(0, 2), (2, 2), (4, 4), (4, 4), (6, 6)]


def several_backwards(rank: int, ranks: int, how: str) -> tuple[dict[str, Any], int]:
    """Accumulated gradients, two losses, and batches that are thrown away, at any time."""
    loop = Loop(rank, ranks, accumulated_loss="mean", factor_update_steps=1, inv_update_steps=2)
    for number, (x, y) in enumerate(batches(6)):
        x, y = loop.shard(x), loop.shard(y)
        loop.optimizer.zero_grad()
        if how == "accumulated" and number > 0:
            if ranks > 1:
                with loop.wrapped.no_sync():
                    (loss_of(loop.wrapped(x[::2]), y[::2]) / 2).backward()
            else:
                (loss_of(loop.wrapped(x[::2]), y[::2]) / 2).backward()
            (loss_of(loop.wrapped(x[1::2]), y[1::2]) / 2).backward()
        else:
            loss_of(loop.wrapped(x), y).backward()
        loop.optimizer.step()
    return loop.weights, loop.kfac.metrics()["factors_calls"] if ranks > 1 else 0


def test_gradient_accumulation_starts_nothing_early(tmp_path):
    weights, _ = several_backwards(0, 1, "accumulated")
    for mine, calls in run_on_ranks(several_backwards, tmp_path, 2, "accumulated"):
        close(mine, weights)
        assert calls == 6


def thrown_away(rank: int, ranks: int) -> dict[str, Any]:
    loop = Loop(rank, ranks, factor_update_steps=1, inv_update_steps=2)
    for number, (x, y) in enumerate(batches(7)):
        loop.optimizer.zero_grad()
        loss_of(loop.wrapped(loop.shard(x)), loop.shard(y)).backward()
        if number not in (2, 3, 5):
            loop.optimizer.step()
    return loop.weights


def test_batches_that_are_thrown_away_leave_no_rank_waiting(tmp_path):
    first, second = run_on_ranks(thrown_away, tmp_path, 2)
    same(first, second)
    assert all(torch.isfinite(torch.tensor(one)).all() for one in first.values())


# Options


def shared_statistics(rank: int, ranks: int, options: dict[str, Any], *, alike: bool) -> tuple[Any, list[int]]:
    """Every rank on the same batch, or each on its own; how many factors had statistics in every step."""
    how = Strategy(share_statistics=True)
    loop = Loop(rank, ranks, strategy=how, factor_update_steps=1, inv_update_steps=2, **options)
    taken = []
    for x, y in batches():
        loop.optimizer.zero_grad()
        x, y = (x, y) if alike else (loop.shard(x), loop.shard(y))
        loss_of(loop.wrapped(x), y).backward()
        taken.append(loop.taken())
        loop.optimizer.step()
    return loop.weights, taken


@pytest.mark.parametrize("options", [{}, {"fisher": "exact", "solver": "inverse"}])
def test_shared_statistics_of_equal_batches_are_those_of_one(tmp_path, options):
    """Each factor comes from one rank: where all have the same cases, that is no approximation. (Without a past: the
    first statistics, before anything is shared out, are of all ranks, and so weigh more.)
    """
    (tmp_path / "apart").mkdir()
    options = {**options, "factor_decay": 0.0}
    weights = Loop(0, 1, factor_update_steps=1, inv_update_steps=2, **options).run().weights
    answers = run_on_ranks(partial(shared_statistics, options=options, alike=True), tmp_path, 3)
    for mine, taken in answers:
        close(mine, weights)
        assert taken[0] == 13
        assert all(0 < count < 13 for count in taken[1:])
    apart = run_on_ranks(partial(shared_statistics, options=options, alike=False), tmp_path / "apart", 3)
    same(apart[0][0], apart[1][0])


def takes(rank: int, ranks: int) -> list[list[bool]]:
    loop = Loop(rank, ranks, strategy=Strategy(share_statistics=True), factor_update_steps=1, inv_update_steps=2)
    found = []
    for number in range(5):
        loop.run(number + 1, skip=number)
        spread = loop.kfac._together.spread
        found.append([spread.takes(factor) for factor in loop.kfac._registry.factors()])
    return found


def test_every_factor_has_statistics_of_one_rank_and_of_all_in_turn(tmp_path):
    answers = run_on_ranks(takes, tmp_path, 3)
    for step in range(1, 5):
        assert [sum(one) for one in zip(*(answer[step] for answer in answers), strict=True)] == [1] * 13
    for answer in answers:
        assert [sum(one) for one in zip(*answer[1:4], strict=True)] == [1] * 13


def inverses_in_bf16(rank: int, ranks: int) -> dict[str, Any]:
    """Factors with far fewer rows than columns, and next to no damping."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(300, 3))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = Strategy(name="comm-opt", wire=torch.bfloat16)
    kfac = KFAC(wrapped, solver="inverse", damping=1e-10, strategy=how).attach(optimizer)
    functional.cross_entropy(wrapped(torch.randn(4, 300)), torch.randint(3, (4,))).backward()
    optimizer.step()
    return kfac.metrics()


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
def test_rounding_makes_no_inverse_fail(tmp_path):
    """Sums that are rounded may have eigenvalues below zero, which no Cholesky factorisation takes."""
    for counts in run_on_ranks(inverses_in_bf16, tmp_path, 2):
        assert counts["failed_decompositions"] == 0


def in_bf16(rank: int, ranks: int, strategy: str, wire: Any) -> tuple[Any, dict[str, Any]]:
    how = Strategy(name=strategy, wire=wire)
    loop = Loop(rank, ranks, strategy=how, model=Mixed().float(), damping=0.1).run()
    return loop.weights, loop.kfac.metrics()


@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_half_the_bytes_change_little_and_the_same_on_all_ranks(tmp_path, strategy):
    (tmp_path / "whole").mkdir()
    (whole, counts), _ = run_on_ranks(in_bf16, tmp_path / "whole", 2, strategy, None)
    (first, halved), (second, _) = run_on_ranks(in_bf16, tmp_path, 2, strategy, torch.bfloat16)
    same(first, second)
    close(first, whole, tolerance=2e-2)
    assert any((first[name] != whole[name]).any() for name in first)
    assert halved["factors_bytes"] * 2 == counts["factors_bytes"]
    assert halved["solutions_bytes"] == counts["solutions_bytes"]  # eigenvectors stay whole
    if strategy == "layer-wise":
        assert halved["gradients_bytes"] < 0.6 * counts["gradients_bytes"]


def trusted(rank: int, ranks: int, strategy: str) -> dict[str, Any]:
    return Loop(rank, ranks, strategy=strategy, kl_clip=TrustRegion(1e-4, of="step")).run().weights


@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_the_step_taken_is_measured_with_all_blocks(tmp_path, strategy):
    weights = trusted(0, 1, strategy)
    for mine in run_on_ranks(trusted, tmp_path, 2, strategy):
        close(mine, weights)


# Looking inside


def looking(rank: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    loop = Loop(rank, ranks, inv_update_steps=1, **options).run(3)
    layers = [(one.name, one.eigenvalue_max, one.condition, one.age) for one in loop.kfac.layers()]
    dense = {block.key: block.to_dense().numpy() for block in loop.kfac.gather_blocks()}
    rows = [float(factor.weight) for factor in loop.kfac._registry.factors()]
    loop.kfac.layers()
    assert rows == [float(factor.weight) for factor in loop.kfac._registry.factors()]  # looking changes nothing
    alone = [one.name for one in loop.kfac.layers(alone=True)]
    assert set(alone) <= {name for name, *_ in layers}
    owners = {line.parameter: line.owner for line in loop.kfac.report()}
    return {"layers": layers, "dense": dense, "owners": owners, "plan": str(loop.kfac.plan())}


@pytest.mark.parametrize(
    "options", [{"strategy": "comm-opt"}, {"strategy": "layer-wise"}, {"strategy": "layer-wise", "solver": "inverse"}]
)
def test_all_ranks_together_see_what_one_sees(tmp_path, options):
    alone = looking(0, 1, options)
    for answer in run_on_ranks(looking, tmp_path, 2, options):
        for (name, high, condition, age), (other, *numbers) in zip(answer["layers"], alone["layers"], strict=True):
            assert (name, age) == (other, numbers[-1])
            assert [high, condition] == pytest.approx(numbers[:2])
        for key, block in answer["dense"].items():
            torch.testing.assert_close(torch.tensor(block), torch.tensor(alone["dense"][key]))
        assert set("".join(answer["owners"].values())) <= set("01+")
        assert answer["owners"]["out.weight"]
        assert f"{options['strategy']}: 2 ranks" in answer["plan"]
    assert not any(alone["owners"].values())
    assert "one rank" in alone["plan"].lower() or "1 rank" in alone["plan"]


def test_one_process_plans_for_many():
    loop = Loop(0, 1).run(1)
    assert "16 ranks" in str(loop.kfac.plan(ranks=16, strategy="comm-opt"))
    assert loop.kfac.plan(ranks=4, strategy="layer-wise").placement.team_size == 1
    with pytest.raises(RuntimeError, match="nothing to plan yet"):
        Loop(0, 1).kfac.plan(ranks=4)
    with pytest.raises(ValueError, match="ranks must be a whole number"):
        loop.kfac.plan(ranks=0)
    with pytest.raises(ValueError, match="strategy must be one of"):
        loop.kfac.plan(ranks=2, strategy="layerwise")


def measured(rank: int, ranks: int) -> tuple[Any, Any]:
    loop = Loop(rank, ranks, strategy=Strategy(costs="measured")).run(3)
    costs = loop.kfac._together.spread.costs()
    assert isinstance(costs, Costs)
    return costs, loop.weights


def test_measured_costs_are_the_same_on_all_ranks(tmp_path):
    (first, weights), (second, _) = run_on_ranks(measured, tmp_path, 2)
    assert first == second
    close(weights, Loop(0, 1).run(3).weights)


# Groups


def part_of_the_world(rank: int, ranks: int) -> dict[str, Any]:
    """Ranks 0 and 2 train one model, rank 1 another, after groups that only some of them are in."""
    for members in ([0, 1], [1, 2], [0, 2]):
        dist.new_group(members)
    pair = dist.new_group([0, 2], use_local_synchronization=False)
    alone = dist.new_group([1])
    model = Mixed()
    mine = alone if rank == 1 else pair
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(wrapped, factor_update_steps=1, inv_update_steps=2, damping=1e-2, strategy="layer-wise").attach(optimizer)
    for x, y in batches():
        if rank != 1:
            x, y = x.chunk(2)[rank // 2], y.chunk(2)[rank // 2]
        optimizer.zero_grad()
        loss_of(wrapped(x), y).backward()
        optimizer.step()
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def test_ranks_may_be_a_part_of_the_world(tmp_path):
    first, second, third = run_on_ranks(part_of_the_world, tmp_path, 3)
    same(first, third)
    close(first, second)


def two_networks(rank: int, ranks: int) -> list[Any]:
    loops = [Loop(rank, ranks, strategy=strategy) for strategy in ("layer-wise", "comm-opt")]
    for x, y in batches():
        for loop in loops:
            loop.step(x, y)
    return [loop.weights for loop in loops]


def test_two_networks_train_beside_each_other(tmp_path):
    weights = Loop(0, 1).run().weights
    for first, second in run_on_ranks(two_networks, tmp_path, 2):
        close(first, weights)
        close(second, weights)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"strategy": "comm_opt"}, "did you mean 'comm-opt'"),
        ({"strategy": "auto", "grad_worker_fraction": 0.5}, "goes with strategy='hybrid'"),
        ({"strategy": "hybrid", "grad_worker_fraction": 0}, "above 0 and at most 1"),
        ({"strategy": Strategy(name="hybrid"), "grad_worker_fraction": 0.5}, "to the Strategy"),
    ],
)
def test_wrong_strategies_are_told(arguments, text):
    with pytest.raises(ValueError, match=text):
        KFAC(Mixed(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"placement": "random"}, "placement must be one of"),
        ({"costs": "guessed"}, "costs must be natgrad.Costs"),
        ({"memory": 0}, "memory must be a whole number"),
        ({"wire": torch.float16}, "wire must be torch.bfloat16"),
        ({"timeout": 0}, "timeout must be a number of seconds"),
    ],
)
def test_wrong_details_of_a_strategy_are_told(arguments, text):
    with pytest.raises(ValueError, match=text):
        Strategy(**arguments)

"""Balance: by hand where small, properties where drawn, and ResNets on 16 to 64 ranks, as in the second paper."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.works import CUBES, H200, HAND, RESNETS, dense, layered, layouts, machines, of, resnet, singles, works
from natgrad.distribute.balance import METHODS, choose, place
from natgrad.distribute.costs import Costs, default_costs
from natgrad.distribute.placement import Layer, Placement, Work, make_teams
from natgrad.distribute.traffic import held_bytes, step_seconds


def objective(work: Work, placement: Placement, costs: Costs, interval: int) -> float:
    """Seconds from one refresh to the next without messages."""
    products = [0.0] * len(placement.teams)
    for layer in work.layers:
        products[placement.team_of[layer.name]] += costs.products(work.solver, layer.shape, layer.diagonal)
    return placement.slowest + interval * max(products)


def test_longest_first_by_hand() -> None:
    """27, 8, 27, 8, 8, 1 seconds on two ranks: 27 + 8 + 8 and 27 + 8 + 1. In turn they would make 62 and 17."""
    placement = place(singles(3, 2, 3, 2, 2, 1), ranks=2, team_size=2, costs=CUBES, interval=1)
    assert sorted(placement.solve_seconds) == [36.0, 43.0]
    assert placement.slowest == 43.0
    assert placement.mean == 39.5
    assert placement.bound is None
    assert placement.strategy == "comm-opt"


def test_round_robin_by_hand() -> None:
    work = layered([("x", 1, 3), ("y", 2, 4), ("z", 1, 2)])
    common = place(work, ranks=3, team_size=3, costs=CUBES, interval=1, method="round-robin")
    assert list(common.owner_of.values()) == [0, 1, 2, 0, 1, 2]
    assert common.solve_seconds == (27.0 + 8, 1.0 + 8, 64.0 + 1)
    layer_wise = place(work, ranks=2, team_size=1, costs=CUBES, interval=1, method="round-robin")
    assert layer_wise.team_of == {"x": 0, "y": 1, "z": 0}
    assert list(layer_wise.owner_of.values()) == [0, 0, 1, 1, 0, 0]
    assert layer_wise.strategy == "layer-wise"


def test_swaps_find_what_longest_first_misses() -> None:
    """Of 5, 5, 4, 4, 3, 3, 3 on three ranks longest first makes 11 (5 + 3 + 3); 9 (5 + 4, 5 + 4, 3 + 3 + 3) is best."""
    costs = replace(CUBES, eigen=tuple((n, float(n)) for n in range(1, 6)))
    placement = place(singles(5, 5, 4, 4, 3, 3, 3), ranks=3, team_size=3, costs=costs, interval=1)
    assert placement.solve_seconds == (9.0, 9.0, 9.0)


def test_a_piece_that_dominates_is_alone_on_its_rank_and_is_the_bound() -> None:
    work = singles(2, 2, 9, 2, 2, 1, 1)
    placement = place(work, ranks=3, team_size=3, costs=CUBES, interval=1)
    owner = placement.owner_of["c"]
    assert [name for name, rank in placement.owner_of.items() if rank == owner] == ["c"]
    assert sorted(placement.solve_seconds) == [17.0, 17.0, 729.0]
    assert placement.bound == "c"


def test_a_and_g_go_to_different_ranks_where_that_balances_better() -> None:
    placement = place(layered([("x", 5, 5)]), ranks=2, team_size=2, costs=CUBES, interval=1)
    assert placement.owner_of["x A"] != placement.owner_of["x G"]


def test_small_factors_are_not_free() -> None:
    """On a GPU launches take their time, whatever the size. By n³ alone 64 factors of 16 would be as one of 64."""
    costs = default_costs(torch.device("cuda"))
    placement = place(singles(*[16] * 64, 64), ranks=2, team_size=2, costs=costs, interval=1)
    together = [name for name, rank in placement.owner_of.items() if rank == placement.owner_of[chr(ord("a") + 64)]]
    assert len(together) > 20


def test_products_count_where_teams_do_different_ones() -> None:
    """Two layers with little to decompose and much to multiply are kept apart from each other."""
    layers = tuple(Layer(n, (1, r, 1), (False, True), (n,)) for n, r in (("a", 9), ("b", 9), ("c", 1), ("d", 1)))
    work = Work(layers, tuple(dense(layer.name, 2) for layer in layers), "eigen")
    placement = place(work, ranks=2, team_size=1, costs=replace(CUBES, flops=1.0), interval=10)
    assert placement.team_of["a"] != placement.team_of["b"]


@pytest.mark.parametrize("ranks", [16, 32, 64])
@pytest.mark.parametrize("name", RESNETS)
def test_resnets_are_balanced_or_bound_by_one_factor(name: str, ranks: int) -> None:
    """The second paper's tables V and VI, where round-robin leaves the slowest worker far behind."""
    work = resnet(RESNETS[name])
    balanced = place(work, ranks=ranks, team_size=ranks, costs=H200, interval=100)
    turns = place(work, ranks=ranks, team_size=ranks, costs=H200, interval=100, method="round-robin")
    largest = max(work.seconds(piece, H200) for piece in work.pieces)
    assert largest == 0.128
    assert balanced.slowest <= max(1.1 * balanced.mean, largest)
    assert balanced.mean == pytest.approx(turns.mean)
    assert turns.slowest > 1.1 * balanced.slowest
    assert (balanced.bound is not None) == (balanced.slowest == largest)


@pytest.mark.parametrize("ranks", [16, 32, 64])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_teams_of_a_resnet_are_within_reach_of_the_bound(ranks: int, size: int, solver: str) -> None:
    """No placement is below the largest factor and layer, nor below the mean."""
    work = resnet(RESNETS["101"], solver)
    placement = place(work, ranks=ranks, team_size=size, costs=H200, interval=100)
    layers = [100 * H200.products(solver, layer.shape, layer.diagonal) for layer in work.layers]
    alone = max(work.seconds(piece, H200) for piece in work.pieces) + max(layers)
    mean = placement.mean + sum(layers) / len(placement.teams)
    assert objective(work, placement, H200, 100) <= 1.2 * max(alone, mean)


# --- properties -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(works(), layouts, st.sampled_from(METHODS), machines)
def test_every_piece_has_one_owner_in_the_team_of_each_of_its_layers(
    work: Work, layout: tuple[int, int], method: str, costs: Costs
) -> None:
    ranks, size = layout
    placement = place(work, ranks=ranks, team_size=size, costs=costs, interval=10, method=method)
    assert list(placement.owner_of) == [piece.name for piece in work.pieces]
    assert list(placement.team_of) == [layer.name for layer in work.layers]
    for layer in work.layers:
        for name in layer.pieces:
            assert placement.owner_of[name] in placement.teams[placement.team_of[layer.name]]
    total = sum(work.seconds(piece, costs) for piece in work.pieces)
    assert sum(placement.solve_seconds) == pytest.approx(total)
    assert placement == place(work, ranks=ranks, team_size=size, costs=costs, interval=10, method=method)


@settings(deadline=None)
@given(works(), layouts, machines, st.integers(1, 100))
def test_balanced_is_never_slower_than_round_robin(
    work: Work, layout: tuple[int, int], costs: Costs, interval: int
) -> None:
    ranks, size = layout
    first, second = (
        place(work, ranks=ranks, team_size=size, costs=costs, interval=interval, method=method) for method in METHODS
    )
    assert objective(work, first, costs, interval) <= objective(work, second, costs, interval)
    if len(first.teams) == 1:
        assert first.slowest <= second.slowest


@settings(deadline=None)
@given(works(), layouts, machines)
def test_greedy_keeps_its_promise(work: Work, layout: tuple[int, int], costs: Costs) -> None:
    """Graham's bound: whoever ends last got its last piece while no rank had less."""
    ranks, _ = layout
    placement = place(work, ranks=ranks, team_size=ranks, costs=costs, interval=1)
    longest = max(work.seconds(piece, costs) for piece in work.pieces)
    assert placement.slowest <= (placement.mean + longest * (1 - 1 / ranks)) * (1 + 1e-9)


@settings(deadline=None)
@given(works(), layouts, st.sampled_from(METHODS), st.data())
def test_fixed_layers_stay(work: Work, layout: tuple[int, int], method: str, data: st.DataObject) -> None:
    ranks, size = layout
    teams = len(make_teams(ranks, size))
    before = place(work, ranks=ranks, team_size=size, costs=CUBES, interval=10, method=method)
    # Layers that share pieces are moved together, by a rotation of all teams.
    turn = data.draw(st.integers(0, teams - 1))
    names = data.draw(st.sets(st.sampled_from([layer.name for layer in work.layers])))
    fixed = {name: (before.team_of[name] + turn) % teams for name in sorted(names)}
    after = place(work, ranks=ranks, team_size=size, costs=CUBES, interval=10, method=method, fixed=fixed)
    assert {name: after.team_of[name] for name in fixed} == fixed


def test_teams_stay_when_more_is_placed() -> None:
    """16 ranks in threes are 5 teams, one of 4; teams of 4 would be 4."""
    before = of(singles(3, 3), 16, 3)
    assert (before.team_size, max(map(len, before.teams)), len(before.teams)) == (3, 4, 5)
    after = of(singles(3, 3, 2), 16, before.team_size, fixed=before.team_of)
    assert after.teams == before.teams
    assert {name: after.team_of[name] for name in "ab"} == before.team_of


def test_new_layers_are_placed_around_fixed_ones() -> None:
    placement = place(singles(4, 4, 3, 3), ranks=2, team_size=1, costs=CUBES, interval=1, fixed={"a": 1, "b": 1})
    assert placement.team_of == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_the_same_in_another_process() -> None:
    """Every rank computes it for itself: nothing may hang on the order of a set or on addresses."""
    code = (
        "from distribute.works import *\n"
        "p = place(resnet(RESNETS['50']), ranks=7, team_size=3, costs=H200, interval=10)\n"
        "print(sorted(p.owner_of.items()), p.solve_seconds)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = place(resnet(RESNETS["50"]), ranks=7, team_size=3, costs=H200, interval=10)
    assert told == f"{sorted(here.owner_of.items())} {here.solve_seconds}\n"


def test_choose_takes_the_fastest() -> None:
    work = resnet(RESNETS["50"])
    found = choose(work, ranks=8, costs=H200, interval=100)
    seconds = [
        step_seconds(work, place(work, ranks=8, team_size=size, costs=H200, interval=100), H200, 100)
        for size in (1, 2, 4, 8)
    ]
    assert step_seconds(work, found, H200, 100) == min(seconds)


def test_choose_goes_by_what_is_dear() -> None:
    """Slow links between steps want everything at home; slow products want them shared out."""
    work = resnet(RESNETS["50"])
    assert choose(work, ranks=8, costs=replace(H200, latency=1.0), interval=1000).strategy == "comm-opt"
    assert choose(work, ranks=8, costs=replace(H200, flops=1e9), interval=10).strategy == "layer-wise"


@pytest.mark.parametrize(("mebibytes", "teams"), [(None, 1), (600, 1), (400, 2), (200, 4), (100, 8), (1, 8)])
def test_choose_respects_memory(mebibytes: int | None, teams: int) -> None:
    """587 MiB of decompositions in all, 94 on the fullest of eight ranks; where none fits, teams of one need least."""
    work = resnet(RESNETS["50"])
    costs = replace(H200, latency=1.0)  # the larger the team, the better
    memory = None if mebibytes is None else mebibytes * 2**20
    found = choose(work, ranks=8, costs=costs, interval=1000, memory=memory)
    assert len(found.teams) == teams
    if memory is not None and mebibytes != 1:
        assert max(held_bytes(work, found)) <= memory


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_choose_on_any_number_of_ranks(ranks: int) -> None:
    assert choose(HAND, ranks=ranks, costs=H200, interval=10, method="round-robin").ranks == ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1"),
        ({"team_size": 0}, "team_size must be a whole number of at least 1"),
        ({"team_size": 3}, "team_size must be at most the number of ranks, 2, got 3"),
        ({"interval": 0}, "interval must be a whole number of at least 1"),
        ({"method": "balance"}, "method must be one of 'balanced', 'round-robin'.*did you mean 'balanced'"),
        ({"fixed": {"z": 0}}, "fixed names 'z', which is not among the layers"),
        ({"fixed": {"x": 2}}, "fixed puts 'x' into team 2, and there are teams 0 to 1"),
    ],
)
def test_place_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(HAND, **{"ranks": 2, "team_size": 1, "costs": CUBES, "interval": 1, **options})


def test_layers_that_share_pieces_cannot_be_fixed_apart() -> None:
    layers = tuple(Layer(name, (1, 3, 3), (False, True), ("A",)) for name in "qk")
    with pytest.raises(ValueError, match="share pieces into different teams: {'q': 0, 'k': 1}"):
        of(Work(layers, (dense("A", 3),), "eigen"), 2, 1, fixed={"q": 0, "k": 1})

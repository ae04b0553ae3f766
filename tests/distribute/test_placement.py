"""Placements: by hand where small, properties where drawn, and ResNets on 16 to 64 ranks, as in the second paper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.distribute.costs import Costs, default_costs
from natgrad.distribute.placement import (
    METHODS,
    Layer,
    Message,
    Piece,
    Placement,
    Sent,
    Traffic,
    Work,
    choose,
    held_bytes,
    make_teams,
    messages,
    place,
    plan,
    step_seconds,
    traffic,
)

H200 = default_costs(torch.device("cuda"))
# A factor of size n takes n³ seconds, its inverse a tenth; products are free, nearly.
CUBES = Costs("cubes", ((1, 1.0),), ((1, 0.1),), flops=1e12, bandwidth=100.0, latency=3.0)
RESNETS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


def dense(name: str, *sizes: int) -> Piece:
    matrices = tuple((1, size, False) for size in sizes)
    return Piece(name, matrices, matrices)


def layered(shapes: Sequence[tuple[str, int, int]], solver: str = "eigen") -> Work:
    """Layers (name, rows, columns) with an A and a G each."""
    layers = tuple(Layer(n, (1, r, c), (False, False), (f"{n} A", f"{n} G")) for n, r, c in shapes)
    pieces = tuple(piece for n, r, c in shapes for piece in (dense(f"{n} A", c), dense(f"{n} G", r)))
    return Work(layers, pieces, solver)


def singles(*sizes: int) -> Work:
    """Layers a, b, ... of one piece each."""
    names = [chr(ord("a") + number) for number in range(len(sizes))]
    return Work(
        tuple(Layer(name, (1, 1, size), (True, False), (name,)) for name, size in zip(names, sizes, strict=True)),
        tuple(dense(name, size) for name, size in zip(names, sizes, strict=True)),
        "eigen",
    )


def resnet(blocks: Sequence[int], solver: str = "eigen") -> Work:
    """The factors of an ImageNet ResNet with bottlenecks: A of cin·k², G of cout, and the head's 2049 and 1000."""
    convolutions = [("conv1", 3, 64, 7)]
    channels = 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            name = f"layer{stage}.{block}"
            convolutions += [
                (f"{name}.conv1", channels, width, 1),
                (f"{name}.conv2", width, width, 3),
                (f"{name}.conv3", width, 4 * width, 1),
            ]
            if block == 0:
                convolutions.append((f"{name}.downsample.0", channels, 4 * width, 1))
            channels = 4 * width
    return layered([*((name, out, cin * k * k) for name, cin, out, k in convolutions), ("fc", 1000, 2049)], solver)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Layers of one to three pieces, some of them shared, some diagonal or stacked."""
    matrices = st.tuples(st.integers(1, 3), st.integers(1, 40), st.booleans())
    some = st.lists(matrices, min_size=1, max_size=2).map(tuple)
    pieces = [Piece(f"p{n}", draw(some), draw(some)) for n in range(draw(st.integers(1, 12)))]
    layers = []
    unused = [piece.name for piece in pieces]
    while unused:
        own = unused[: draw(st.integers(1, 3))]
        unused = unused[len(own) :]
        shared = draw(st.lists(st.sampled_from([piece.name for piece in pieces]), max_size=1))
        names = tuple(dict.fromkeys([*own, *shared]))
        shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)))
        layers.append(Layer(f"l{len(layers)}", shape, draw(st.tuples(st.booleans(), st.booleans())), names))
    return Work(
        tuple(layers), tuple(pieces), draw(st.sampled_from(["eigen", "inverse"])), draw(st.sampled_from([4, 8]))
    )


layouts = st.integers(1, 9).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, ranks)))
# Of products that cost nothing, about as much as decompositions, and everything.
machines = st.sampled_from([CUBES, replace(CUBES, flops=1e3), replace(CUBES, flops=1e-3), H200])


def objective(work: Work, placement: Placement, costs: Costs, interval: int) -> float:
    """Seconds from one refresh to the next without messages."""
    products = [0.0] * len(placement.teams)
    for layer in work.layers:
        products[placement.team_of[layer.name]] += costs.products(work.solver, layer.shape, layer.diagonal)
    return placement.slowest + interval * max(products)


# --- teams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "size", "teams"),
    [
        (1, 1, ((0,),)),
        (4, 4, ((0, 1, 2, 3),)),
        (4, 1, ((0,), (1,), (2,), (3,))),
        (4, 2, ((0, 2), (1, 3))),
        (5, 2, ((0, 2, 4), (1, 3))),
        (3, 2, ((0, 2), (1,))),
        (8, 3, ((0, 3, 6), (1, 4, 7), (2, 5))),
    ],
)
def test_teams(ranks: int, size: int, teams: tuple[tuple[int, ...], ...]) -> None:
    assert make_teams(ranks, size) == teams


@given(layouts)
def test_teams_part_the_ranks_evenly(layout: tuple[int, int]) -> None:
    ranks, size = layout
    teams = make_teams(ranks, size)
    assert sorted(rank for team in teams for rank in team) == list(range(ranks))
    sizes = {len(team) for team in teams}
    assert max(sizes) - min(sizes) <= 1
    if size in (1, ranks):
        assert sizes == {size}


@given(layouts)
def test_every_outsider_has_one_sender_in_each_other_team(layout: tuple[int, int]) -> None:
    ranks, size = layout
    placement = place(singles(1), ranks=ranks, team_size=size, costs=CUBES, interval=1)
    for number, team in enumerate(placement.teams):
        served = [rank for member in range(len(team)) for rank in placement.receivers(number, member)]
        assert sorted(served) == sorted(set(range(ranks)) - set(team))


def test_with_equal_teams_those_of_one_number_send_to_each_other() -> None:
    placement = place(singles(1), ranks=6, team_size=2, costs=CUBES, interval=1)
    assert placement.teams == ((0, 3), (1, 4), (2, 5))
    assert [placement.receivers(team, 0) for team in range(3)] == [(1, 2), (0, 2), (0, 1)]
    assert [placement.receivers(team, 1) for team in range(3)] == [(4, 5), (3, 5), (3, 4)]


def test_with_unequal_teams_members_serve_in_turn() -> None:
    placement = place(singles(1), ranks=5, team_size=2, costs=CUBES, interval=1)
    assert placement.teams == ((0, 2, 4), (1, 3))
    assert [placement.receivers(0, member) for member in range(3)] == [(1,), (3,), ()]
    assert [placement.receivers(1, member) for member in range(2)] == [(0, 4), (2,)]


# --- balance ----------------------------------------------------------------------------------------------------------


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
    assert largest == 0.125
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
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_placement import *\n"
        "p = place(resnet(RESNETS['50']), ranks=7, team_size=3, costs=H200, interval=10)\n"
        "print(sorted(p.owner_of.items()), p.solve_seconds)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, __file__.rpartition("/")[0]],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = place(resnet(RESNETS["50"]), ranks=7, team_size=3, costs=H200, interval=10)
    assert told == f"{sorted(here.owner_of.items())} {here.solve_seconds}\n"


def test_placement_needs_no_process_group() -> None:
    """Pure: neither module mentions torch.distributed."""
    for name in ("costs", "placement"):
        source = sys.modules[f"natgrad.distribute.{name}"].__file__
        assert source is not None
        with open(source, encoding="utf-8") as file:
            assert "torch.distributed" not in file.read()


# --- messages, memory, model ------------------------------------------------------------------------------------------

HAND = Work(
    layers=(
        Layer("x", (1, 2, 3), (False, False), ("x A", "x G")),
        Layer("y", (2, 4, 5), (False, True), ("y",)),
    ),
    pieces=(
        dense("x A", 3),
        dense("x G", 2),
        Piece("y", ((2, 4, False), (1, 5, True)), ((2, 4, False), (1, 5, True), (1, 1, True))),
    ),
    solver="eigen",
    element_size=8,
)
TRIANGLES = {"x A": 6, "x G": 3, "y": 2 * 10 + 5 + 1}
EIGEN = {"x A": 12, "x G": 6, "y": 2 * 20 + 5}


def of(work: Work, ranks: int, size: int, **options: Any) -> Placement:
    return place(work, ranks=ranks, team_size=size, costs=CUBES, interval=10, **options)


def test_traffic_of_one_team_by_hand() -> None:
    placement = of(HAND, 2, 2)
    assert placement.owner_of == {"x A": 1, "x G": 1, "y": 0}
    assert messages(HAND, placement) == (
        Message("factors", 0, (0, 1), 8 * 26),
        Message("factors", 1, (0, 1), 8 * 9),
        Message("solutions", 0, (0, 1), 8 * 45),
        Message("solutions", 1, (0, 1), 8 * 18),
    )
    assert traffic(HAND, placement) == Traffic(Sent(8 * 35, 2), Sent(8 * 63, 2), Sent(0, 0))
    inverse = replace(HAND, solver="inverse")
    assert traffic(inverse, placement).solutions == Sent(8 * (6 + 3 + 20 + 5), 2)


def test_traffic_of_teams_of_one_by_hand() -> None:
    placement = of(HAND, 2, 1)
    assert placement.team_of == {"x": 1, "y": 0}
    assert traffic(HAND, placement) == Traffic(Sent(8 * 35, 2), Sent(0, 0), Sent(8 * (6 + 40), 2))


def test_traffic_of_unequal_teams_by_hand() -> None:
    """Five ranks, ((0, 2, 4), (1, 3)): member 2 of the first team has nobody to send to."""
    placement = of(HAND, 5, 2, fixed={"x": 0, "y": 1})
    assert placement.owner_of == {"x A": 0, "x G": 2, "y": 1}
    assert messages(HAND, placement) == (
        Message("factors", 0, (0, 1, 2, 3, 4), 8 * 6),
        Message("factors", 1, (0, 1, 2, 3, 4), 8 * 26),
        Message("factors", 2, (0, 1, 2, 3, 4), 8 * 3),
        Message("solutions", 0, (0, 2, 4), 8 * 12),
        Message("solutions", 2, (0, 2, 4), 8 * 6),
        Message("solutions", 1, (1, 3), 8 * 45),
        Message("gradients", 0, (0, 1), 8 * 6),
        Message("gradients", 2, (2, 3), 8 * 6),
        Message("gradients", 1, (0, 1, 4), 8 * 40),
        Message("gradients", 3, (2, 3), 8 * 40),
    )


def test_one_rank_sends_nothing() -> None:
    assert traffic(HAND, of(HAND, 1, 1)) == Traffic(Sent(), Sent(), Sent())


def test_teams_without_layers_send_nothing() -> None:
    placement = of(singles(3), 3, 1)
    assert traffic(singles(3), placement) == Traffic(Sent(4 * 6, 1), Sent(), Sent(4 * 3, 1))


@settings(deadline=None)
@given(works(), layouts)
def test_traffic_by_the_formulas(work: Work, layout: tuple[int, int]) -> None:
    placement = of(work, *layout)
    ranks = layout[0]
    owners = set(placement.owner_of.values())
    told = traffic(work, placement)
    triangles = sum(k * (n if d else n * (n + 1) // 2) for piece in work.pieces for k, n, d in piece.sums)
    assert told.factors == (Sent(work.element_size * triangles, len(owners)) if ranks > 1 else Sent())
    shared = {rank for team in placement.teams if len(team) > 1 for rank in team}
    solved = sum(
        k * (n if d else n * n + n if work.solver == "eigen" else n * (n + 1) // 2)
        for piece in work.pieces
        if placement.owner_of[piece.name] in shared
        for k, n, d in piece.solves
    )
    assert told.solutions == Sent(work.element_size * solved, len(owners & shared))
    bytes_ = calls = 0
    for number, team in enumerate(placement.teams):
        elements = sum(layer.elements for layer in work.layers if placement.team_of[layer.name] == number)
        senders = sum(bool(placement.receivers(number, member)) for member in range(len(team)))
        bytes_ += work.element_size * elements * senders
        calls += senders if elements else 0
    assert told.gradients == Sent(bytes_, calls)
    # What a rank gets, and what its team makes, is every layer's gradient, once.
    everything = work.element_size * sum(layer.elements for layer in work.layers)
    steps = [message for message in messages(work, placement) if message.kind == "gradients"]
    for number, team in enumerate(placement.teams):
        made = sum(layer.elements for layer in work.layers if placement.team_of[layer.name] == number)
        for rank in team:
            got = sum(message.bytes for message in steps if rank in message.ranks and rank != message.root)
            assert got + work.element_size * made == everything


def test_held_bytes_by_hand() -> None:
    assert held_bytes(HAND, of(HAND, 2, 2)) == (8 * 63, 8 * 63)
    assert held_bytes(HAND, of(HAND, 2, 1)) == (8 * 45, 8 * 18)
    inverse = replace(HAND, solver="inverse")
    assert held_bytes(inverse, of(inverse, 1, 1)) == (8 * (9 + 4 + 32 + 5),)


def test_what_layers_share_is_held_once() -> None:
    layers = tuple(Layer(name, (1, 3, 3), (False, True), ("A",)) for name in "qkv")
    work = Work(layers, (dense("A", 3),), "eigen")
    placement = of(work, 2, 1)
    assert set(placement.team_of.values()) == {0}
    assert held_bytes(work, placement) == (4 * 12, 0)


def test_step_seconds_by_hand() -> None:
    """Five ranks as above, 100 bytes and 1/3 of a message a second: who takes part in most messages counts."""
    placement = of(HAND, 5, 2, fixed={"x": 0, "y": 1})
    factors = 8 * 35 / 100 + 3 * 3
    solves = 2 * 64.0  # y, on rank 1
    solutions = max(8 * 18 / 100 + 2 * 3, 8 * 45 / 100 + 3)
    gradients = 8 * 46 / 100 + 2 * 3
    costs = replace(CUBES, flops=10.0)
    products = max(4 * 2 * 3 * (2 + 3), 4 * 2 * 4 * 5 * 4) / 10
    expected = (factors + solves + solutions) / 10 + products + gradients
    assert step_seconds(HAND, placement, costs, 10) == pytest.approx(expected, rel=1e-6)


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


# --- errors -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (HAND.layers[0], *HAND.layers)}, "layers must be named once each, got 'x' again"),
        ({"pieces": (*HAND.pieces, dense("y", 1))}, "pieces must be named once each, got 'y' again"),
        ({"pieces": HAND.pieces[1:]}, "layer 'x' needs 'x A', which is not among the pieces"),
        ({"pieces": (*HAND.pieces, dense("z", 1))}, "no layer needs the piece 'z'"),
        ({"layers": (*HAND.layers, Layer("z", (1, 1, 1), (True, True), ()))}, "layer 'z' needs at least one piece"),
        ({"layers": (replace(HAND.layers[0], pieces=("x A",) * 2),)}, "pieces of 'x' must be named once each"),
        ({"solver": "lu"}, "solver must be one of"),
        ({"element_size": 0}, "element_size must be a whole number"),
    ],
)
def test_work_checks_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HAND, **changes)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_for_people() -> None:
    work = resnet(RESNETS["50"])
    placement = place(work, ranks=16, team_size=16, costs=H200, interval=100)
    told = plan(work, placement, H200, 100, "comm-opt", "chosen by the cost model")
    lines = str(told).splitlines()
    assert lines[0] == "comm-opt (chosen by the cost model): 16 ranks, 1 team of 16, balanced"
    assert lines[1].split("  ")[0] == "rank"
    assert len(lines) == 2 + 16 + 5
    assert lines[2].split() == ["0", "1", "125.0", "ms", "156%", "587.2", "MiB"]
    assert lines[18] == "refresh: 125.0 ms on the slowest rank, 80.1 ms on average (1.56 ×)"
    assert lines[19] == (
        "bound: layer4.0.conv2 A (4608², 125.0 ms) takes as long as its rank: more ranks do not help a refresh. "
        "solver='inverse' would take 12.0 ms."
    )
    assert lines[20] == (
        "sent by all ranks at a refresh: factors 293.6 MiB in 16 messages, decompositions 587.2 MiB in 16 messages"
    )
    assert lines[21] == "sent by all ranks at every step: gradients nothing"
    assert lines[22].startswith(f"modelled: {1000 * told.seconds:.1f} ms added to an average step")
    assert told.placement is placement
    assert told.traffic == traffic(work, placement)
    assert told.seconds == step_seconds(work, placement, H200, 100)
    assert told.bound == "layer4.0.conv2 A"


def test_a_plan_of_many_ranks_shows_the_slowest_and_the_fastest() -> None:
    work = resnet(RESNETS["50"])
    placement = place(work, ranks=64, team_size=64, costs=H200, interval=100)
    lines = str(plan(work, placement, H200, 100)).splitlines()
    shown = [line.split()[0] for line in lines[2:11]]
    order = sorted(range(64), key=lambda rank: (-placement.solve_seconds[rank], rank))
    assert shown == [*map(str, order[:4]), "...", *map(str, order[-4:])]
    assert lines[11].startswith("refresh:")


def test_a_plan_without_a_bound_names_none() -> None:
    work = resnet(RESNETS["152"])
    told = plan(work, place(work, ranks=5, team_size=2, costs=H200, interval=100), H200, 100, "hybrid")
    assert told.bound is None
    assert "bound" not in str(told)
    assert str(told).startswith("hybrid: 5 ranks, 2 teams of 2 or 3, balanced")


def test_a_plan_says_that_a_layer_on_its_own_is_the_bound() -> None:
    work = resnet(RESNETS["50"])
    told = plan(work, place(work, ranks=64, team_size=1, costs=H200, interval=100), H200, 100)
    assert "bound: layer4.0.conv2 is all that its rank does; a team of two or more could share it." in str(told)


def test_no_advice_where_inverses_are_used_already() -> None:
    work = resnet(RESNETS["50"], "inverse")
    told = plan(work, place(work, ranks=64, team_size=64, costs=H200, interval=100), H200, 100)
    assert told.bound == "layer4.0.conv2 A"
    assert "solver='inverse'" not in str(told)


def test_sizes_of_pieces_that_cannot_be_parted() -> None:
    told = str(plan(HAND, of(HAND, 3, 3), CUBES, 10))
    assert "bound: y (2 × 4² + 5 diagonal, 128000.0 ms)" in told


def test_the_owners_of_a_layer() -> None:
    told = plan(HAND, of(HAND, 5, 2, fixed={"x": 0, "y": 1}), CUBES, 10)
    assert told.owner("x") == "0+2"
    assert told.owner("y") == "1"
    with pytest.raises(KeyError):
        told.owner("z")


def test_the_plan_of_one_rank_is_one_line() -> None:
    told = plan(HAND, of(HAND, 1, 1), H200, 10, "comm-opt")
    assert str(told).startswith("one rank does it all: 3 pieces, ")
    assert "\n" not in str(told)


@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_nothing_to_do(ranks: int) -> None:
    work = Work((), (), "eigen")
    for size in (1, ranks):
        placement = of(work, ranks, size)
        assert placement.slowest == placement.mean == 0
        assert placement.bound is None
        assert traffic(work, placement) == Traffic(Sent(), Sent(), Sent())
        assert str(plan(work, placement, H200, 10))
    assert choose(work, ranks=ranks, costs=H200, interval=1, memory=0).ranks == ranks

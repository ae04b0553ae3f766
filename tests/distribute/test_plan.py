"""What people read."""

from __future__ import annotations

import pytest

from distribute.works import CUBES, H200, HAND, RESNETS, of, resnet
from natgrad.distribute.balance import choose, place
from natgrad.distribute.placement import Work
from natgrad.distribute.plan import plan
from natgrad.distribute.traffic import Sent, Traffic, step_seconds, traffic


def test_a_plan_for_people() -> None:
    work = resnet(RESNETS["50"])
    placement = place(work, ranks=16, team_size=16, costs=H200, interval=100)
    told = plan(work, placement, H200, 100, "comm-opt", "chosen by the cost model")
    lines = str(told).splitlines()
    assert lines[0] == "comm-opt (chosen by the cost model): 16 ranks, 1 team of 16, balanced"
    assert lines[1].split("  ")[0] == "rank"
    assert len(lines) == 2 + 16 + 5
    assert lines[2].split() == ["0", "1", "128.0", "ms", f"{placement.slowest / placement.mean:.0%}", "587.2", "MiB"]
    mean = f"{1000 * placement.mean:.1f} ms on average ({placement.slowest / placement.mean:.2f} ×)"
    assert lines[18] == f"refresh: 128.0 ms on the slowest rank, {mean}"
    assert lines[19] == (
        "bound: layer4.0.conv2 A (4608², 128.0 ms) takes as long as its rank: more ranks do not help a refresh. "
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

"""Teams, and work that checks itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from distribute.works import CUBES, HAND, dense, layouts, singles
from natgrad.distribute.balance import place
from natgrad.distribute.placement import Layer, make_teams


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


@settings(deadline=None)
@given(layouts)
def test_teams_part_the_ranks_evenly(layout: tuple[int, int]) -> None:
    ranks, size = layout
    teams = make_teams(ranks, size)
    assert sorted(rank for team in teams for rank in team) == list(range(ranks))
    sizes = {len(team) for team in teams}
    assert max(sizes) - min(sizes) <= 1
    if size in (1, ranks):
        assert sizes == {size}


@settings(deadline=None)
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


def test_placement_needs_no_process_group() -> None:
    """Pure: no module mentions torch.distributed."""
    for name in ("balance", "bins", "costs", "placement", "plan", "traffic"):
        source = sys.modules[f"natgrad.distribute.{name}"].__file__
        assert source is not None
        with open(source, encoding="utf-8") as file:
            assert "torch.distributed" not in file.read()

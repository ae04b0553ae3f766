"""What is sent and held, by hand and by the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from distribute.works import CUBES, HAND, dense, layouts, of, singles, works
from natgrad.distribute.placement import Layer, Work
from natgrad.distribute.traffic import Message, Sent, Traffic, held_bytes, messages, step_seconds, traffic


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

"""The cost model: interpolation, what is free, what is refused, and one model out of several."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.distribute import costs as module
from natgrad.distribute.costs import Costs, default_costs, measure, slowest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def made(**changes: Any) -> Costs:
    fields: dict[str, Any] = {
        "device": "a machine",
        "eigen": ((10, 1.0), (40, 4.0)),
        "inverse": ((10, 0.5),),
        "flops": 100.0,
        "bandwidth": 10.0,
        "latency": 2.0,
    }
    return Costs(**{**fields, **changes})


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(10, 1.0), (40, 4.0), (20, 2.0), (5, 1 / 8), (80, 32.0)],  # linear in between: log to log of 1..4 over 10..40
)
def test_solve_interpolates_and_goes_on_by_the_cube(size: int, seconds: float) -> None:
    assert made().solve("eigen", size) == pytest.approx(seconds, rel=1e-12)


def test_a_measured_size_costs_exactly_what_was_measured() -> None:
    costs = default_costs(CUDA)
    assert [costs.solve("eigen", size) for size, _ in costs.eigen] == [seconds for _, seconds in costs.eigen]


def test_a_table_of_one_size_goes_by_the_cube_alone() -> None:
    assert made().solve("inverse", 20) == pytest.approx(4.0)
    assert made().solve("inverse", 5) == pytest.approx(0.0625)


def test_a_stack_runs_one_after_the_other() -> None:
    assert made().solve("eigen", 10, stack=3) == 3.0


def test_a_diagonal_costs_next_to_nothing() -> None:
    costs = default_costs(CUDA)
    assert 0 < costs.solve("eigen", 4608, diagonal=True) < 1e-6 * costs.solve("eigen", 4608)


def test_messages() -> None:
    assert made().message(50) == 7.0
    assert made().message(50, calls=3) == 11.0


@pytest.mark.parametrize(
    ("solver", "diagonal", "operations"),
    [
        ("eigen", (False, False), 4 * 2 * 3 * 5 * (3 + 5)),
        ("inverse", (False, False), 2 * 2 * 3 * 5 * (3 + 5)),
        ("eigen", (True, False), 4 * 2 * 3 * 5 * 5),
        ("eigen", (False, True), 4 * 2 * 3 * 5 * 3),
        ("inverse", (True, True), 0),
        ("eigen", (False,), 4 * 2 * 3 * 5 * 3),
    ],
)
def test_products(solver: str, diagonal: tuple[bool, ...], operations: float) -> None:
    """(rows × n) times (n × n) is 2·rows·n² operations: four such products with eigenvectors, two with inverses."""
    assert made().products(solver, (2, 3, 5), diagonal) == pytest.approx(operations / 100)


def test_several_column_sides_count_as_equally_large() -> None:
    assert made().products("inverse", (1, 3, 16), (False, False, False)) == pytest.approx(
        2 * 3 * 16 * (3 + 4 + 4) / 100
    )


@pytest.mark.parametrize(
    "call", [lambda c: c.solve("eigne", 3), lambda c: c.products("eigne", (1, 2, 3), (False,) * 2)]
)
def test_an_unknown_solver(call: Any) -> None:
    with pytest.raises(ValueError, match="solver must be one of 'eigen', 'inverse'.*did you mean 'eigen'"):
        call(made())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"flops": 0}, ValueError, "Costs.flops must be a number above 0, got 0"),
        ({"bandwidth": math.inf}, ValueError, "Costs.bandwidth must be a number above 0, got inf"),
        ({"latency": math.nan}, ValueError, "Costs.latency must be a number above 0, got nan"),
        ({"latency": "1"}, ValueError, "Costs.latency must be a number above 0, got '1'"),
        ({"eigen": ()}, ValueError, "Costs.eigen must have at least one pair"),
        ({"inverse": 3.0}, TypeError, "Costs.inverse must be pairs"),
        ({"inverse": (3.0,)}, TypeError, "Costs.inverse must be pairs"),
        ({"eigen": ((4, 1.0), (4, 2.0))}, ValueError, "Costs.eigen must have whole sizes that increase.*4 after 4"),
        ({"eigen": ((0, 1.0),)}, ValueError, "0 after 0"),
        ({"eigen": ((4.5, 1.0),)}, ValueError, "whole sizes"),
        ({"eigen": ((4, -1.0),)}, ValueError, "Costs.eigen at size 4 must be a number above 0, got -1.0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**changes)


def test_costs_survive_json() -> None:
    costs = default_costs(CPU)
    again = Costs(**json.loads(json.dumps(dataclasses.asdict(costs))))
    assert again == costs
    assert hash(again) == hash(costs)


@pytest.mark.parametrize("device", [CPU, CUDA, torch.device("meta")])
def test_defaults(device: torch.device) -> None:
    costs = default_costs(device)
    assert costs.device == ("NVIDIA H200" if device.type == "cuda" else "CPU")
    for size in (1, 64, 300, 1000, 10_000):
        assert costs.solve("inverse", size) < costs.solve("eigen", size)
        assert costs.solve("eigen", size) < costs.solve("eigen", size + 1)
    assert 5e-3 < default_costs(CUDA).solve("eigen", 400) < 6e-3  # padded, in `natgrad.solve.linalg`


def test_measure_keeps_the_link_and_the_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    costs = measure(CPU, seconds=0.02)
    default = default_costs(CPU)
    assert torch.equal(before, torch.get_rng_state())
    assert (costs.bandwidth, costs.latency, costs.device) == (default.bandwidth, default.latency, "CPU, measured")
    sizes = [size for size, _ in costs.eigen]
    assert sizes == [size for size, _ in costs.inverse]
    assert sizes[0] == 16


@pytest.mark.parametrize(
    ("seconds", "sizes"), [(1e-9, [16]), (0.05, [16, 64]), (0.5, [16, 64, 128]), (1e9, module._SIZES)]
)
def test_measure_stops_before_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: list[int]
) -> None:
    """With a clock that moves by 3·n³ / 10⁸ at each size: 0.0001, 0.0079, 0.0629, 0.503 s, ..."""
    now = 0.0

    def once(size: int, device: torch.device) -> tuple[float, float, float]:
        nonlocal now
        now += 3 * size**3 / 1e8
        return size**3 / 1e8, size**3 / 2e8, size**3 / 4e8

    monkeypatch.setattr(module, "_once", once)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    costs = measure(CPU, seconds=seconds)
    assert [size for size, _ in costs.eigen] == list(sizes)
    assert now - 3 * 16**3 / 1e8 <= max(seconds, 3 * 16**3 / 1e8)
    assert costs.flops == pytest.approx(8e8)
    assert costs.solve("eigen", 10_000) == pytest.approx(10_000**3 / 1e8)


def test_measure_needs_time() -> None:
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        measure(CPU, seconds=0)


def test_slowest_by_hand() -> None:
    first = made(eigen=((10, 1.0), (20, 5.0), (40, 9.0)))
    second = made(device="another", eigen=((10, 2.0), (20, 4.0)), flops=90.0, bandwidth=20.0, latency=3.0)
    assert slowest([first, second]) == made(
        device="a machine / another", eigen=((10, 2.0), (20, 5.0)), flops=90.0, bandwidth=10.0, latency=3.0
    )
    assert slowest([first, first]) == first


def test_slowest_of_nothing_in_common() -> None:
    with pytest.raises(ValueError, match="eigen have no size in common"):
        slowest([made(), made(eigen=((7, 1.0),))])
    with pytest.raises(ValueError, match="at least one rank"):
        slowest([])


numbers = st.floats(1e-6, 1e6)
tables = st.dictionaries(st.integers(2, 99), numbers, max_size=4).map(lambda t: tuple(sorted({1: 1.0, **t}.items())))
some_costs = st.builds(Costs, st.just("x"), tables, tables, numbers, numbers, numbers)


@settings(deadline=None)
@given(st.lists(some_costs, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_slowest_is_no_faster_than_any_and_the_order_does_not_matter(many: list[Costs], random: Any) -> None:
    merged = slowest(many)
    for costs in many:
        assert merged.message(1e3) >= costs.message(1e3)
        assert merged.products("eigen", (1, 2, 3), (False, False)) >= costs.products("eigen", (1, 2, 3), (False, False))
        for size, seconds in merged.eigen:
            assert seconds >= dict(costs.eigen)[size]
    mixed = list(many)
    random.shuffle(mixed)
    assert slowest(mixed) == merged

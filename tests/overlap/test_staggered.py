"""Layers that take turns: all of them, evenly, or those first that have moved most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from distribute.mixed import Loop, Mixed, close, same
from natgrad.overlap.drift import DriftTurns
from overlap.executors import digest, fingerprint
from ranks import run_on_ranks

OPTIONS: dict[str, Any] = {"overlap": "staggered", "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 32
Timetable = list[set[str]]


def timetable(loop: Loop, steps: int = STEPS) -> Timetable:
    """The blocks that are decomposed in each step from here on."""
    found = []
    for step in range(loop.kfac.steps, loop.kfac.steps + steps):
        loop.run(step + 1, skip=step)
        found.append({key for key, one in loop.kfac._preconditioner.solved.items() if one.solved_at == step})
    return found


class Replay:
    """Turns that others have taken."""

    def __init__(self, table: Timetable, *, watches_time: bool) -> None:
        self._table, self.watches_time = table, watches_time

    def at(self, step: int, now: Any, registry: Iterable[Any], preconditioner: Any) -> list[Any]:
        return [block for block in registry if block.key in self._table[step]]

    def moved(self, *_: Any) -> None:
        pass

    def told(self) -> float:
        return 0.0

    def spent(self, *_: Any) -> None:
        pass

    def loaded(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_every_layer_is_decomposed_once_an_interval(solver):
    loop = Loop(0, 1, **OPTIONS, solver=solver)
    table = timetable(loop)
    keys = {block.key for block in loop.kfac.blocks}
    assert table[0] == table[8] == keys  # at first all
    for begin in range(16, STEPS, 8):
        interval = table[begin : begin + 8]
        assert sorted(key for step in interval for key in step) == sorted(keys)
        assert sum(bool(step) for step in interval) > 1  # spread
    # Steps that take statistics are long already.
    assert all(not step for step in (table[4], *table[12::4]))


def test_statistics_in_every_step_leave_no_step_free_of_both():
    loop = Loop(0, 1, overlap="staggered", factor_update_steps=1, inv_update_steps=4)
    table = timetable(loop, 12)
    keys = sorted(block.key for block in loop.kfac.blocks)
    assert sorted(key for step in table[8:12] for key in step) == keys
    assert sum(map(bool, table[8:12])) > 1


def test_an_interval_of_one_is_no_staggering():
    options = {"factor_update_steps": 1, "inv_update_steps": 1}
    staggered, plain = (Loop(0, 1, overlap=overlap, **options).run() for overlap in ("staggered", None))
    same(staggered.weights, plain.weights)


def test_layers_that_share_a_factor_go_together():
    loop = Loop(0, 1, **OPTIONS)
    for step in timetable(loop):
        assert ("query.weight" in step) == ("key.weight" in step)
    (first, second) = (one for one in loop.kfac.blocks if one.key in ("query.weight", "key.weight"))
    assert first.straight.column is second.straight.column


class Growing(Mixed):
    """A layer more, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6).double()
        self.grown = False

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.grown:
            return super().forward(tokens)
        x = self.norm(self.words(tokens))
        return self.out(torch.tanh(self.extra(x))) @ self.words.weight.T


@pytest.mark.parametrize("overhead", [None, 0.5])
def test_new_layers_are_decomposed_at_once(overhead):
    options = {**OPTIONS, "factor_update_steps": 2}
    loop = Loop(0, 1, model=Growing(), **options, max_overhead=overhead)
    timetable(loop, 10)
    loop.model.grown = True
    table = timetable(loop, 22)
    assert "extra.weight" in table[0]
    if overhead is None:  # and from then on in turn; what is not used any more has nothing new
        used = {"extra.weight", "norm.weight", "out.weight"}
        for begin in (14,):
            turns = [key for step in table[begin : begin + 8] for key in step if key in used]
            assert sorted(turns) == sorted(used)


def on_ranks(rank: int, ranks: int, options: dict[str, Any]) -> tuple[dict[str, Any], Timetable]:
    loop = Loop(rank, ranks, **options)
    table = timetable(loop)
    return loop.weights, table


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "comm-opt"},
        {"strategy": "layer-wise", "solver": "inverse"},
        {"strategy": "comm-opt", "max_overhead": 0.2},
        {"strategy": "layer-wise", "max_overhead": 0.5, "solver": "inverse"},
    ],
)
def test_ranks_take_the_same_turns_and_are_one_process_that_takes_them(tmp_path, options):
    """Whose turn it is depends on who decomposes what, and on the clock: one process repeats it."""
    options = {**OPTIONS, "factor_update_steps": 2, **options}
    (weights, table), (others, their_table) = run_on_ranks(on_ranks, tmp_path, 2, options)
    same(weights, others)
    assert table == their_table
    assert sum(map(len, table[1:])) > 0
    alone = Loop(0, 1, **options)
    alone.kfac._curvature._turns = Replay(table, watches_time="max_overhead" in options)
    assert timetable(alone) == table
    close(alone.weights, weights)


@pytest.mark.parametrize("options", [{}, {"solver": "inverse"}, {"factor_update_steps": 3}])
def test_a_run_that_goes_on_takes_the_same_turns(options):
    """Saved between statistics, in the middle of an interval."""
    options = {**OPTIONS, **options}
    loop = Loop(0, 1, **options).run(10)
    again = Loop(0, 1, **options)
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(loop.kfac.state_dict())
    assert timetable(again, 16) == timetable(loop, 16)
    assert fingerprint(again) == fingerprint(loop)


# Within a budget


class Towers(nn.Module):
    """Two layers that have nothing to do with each other: one's cases are the first half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2)
        return torch.cat([self.first(one), self.second(two)])


class TowerLoop:
    """Weights stay where they are; the cases of one layer grow from step to step."""

    def __init__(self, moving: str, **options: Any) -> None:
        self.model = Towers()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        options = {"factor_update_steps": 2, "kl_clip": None, "overlap": "staggered", **options}
        self.kfac = natgrad.KFAC(self.model, **options)
        self.kfac.attach(self.optimizer)
        self._moving = moving
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
        self._y = torch.randint(3, (12,), generator=generator)

    @property
    def turns(self) -> DriftTurns:
        turns = self.kfac._curvature._turns
        assert isinstance(turns, DriftTurns)
        return turns

    def step(self) -> set[str]:
        step = self.kfac.steps
        x = self._x.clone()
        x[("first", "second").index(self._moving)] *= 1 + step
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(x.flatten(0, 1)), self._y).backward()
        self.optimizer.step()
        return {key for key, one in self.kfac._preconditioner.solved.items() if one.solved_at == step}


@pytest.mark.parametrize("moving", ["first", "second"])
def test_the_layer_that_has_moved_most_goes_first(hand, moving):
    loop = TowerLoop(moving, max_overhead=0.5)
    loop.step()
    blocks = loop.kfac.blocks
    seconds = {max(loop.turns._loads.seconds([block], loop.kfac._preconditioner).values()) for block in blocks}
    (cost,) = seconds  # both take the same
    table = []
    for _ in range(20):
        hand.move(cost)  # statistics come every second step: time for one of the two
        table.append(loop.step())
    chosen = [key for step in table for key in step]
    assert len(chosen) > 5
    assert set(chosen) == {f"{moving}.weight"}


def test_time_for_decompositions_stays_within_the_budget(hand):
    loop = Loop(0, 1, **{**OPTIONS, "factor_update_steps": 2}, max_overhead=0.1)
    turns = loop.kfac._curvature._turns
    cost = 1e-4
    granted = []
    for step in range(60):
        hand.move(cost if step < 40 else 0.0)
        loop.run(step + 1, skip=step)
        granted.append(turns._granted)
        # The clock stands still while decomposing: none of it counts.
        assert turns._granted <= 0.1 * cost * min(step, 40) + 1e-12
    assert granted[39] > 0.05 * cost * 40
    assert granted[-1] == granted[41]  # nothing is left: nothing is decomposed
    assert timetable(loop, 6) == [set()] * 6


def test_what_decompositions_really_take_is_taken_into_account(hand, monkeypatch):
    """A machine that is a hundred times as slow as the costs have it gets a hundredth of the turns."""

    def turns_of(slowness: float) -> int:
        loop = Loop(0, 1, **{**OPTIONS, "factor_update_steps": 2}, max_overhead=0.1)
        turns, refresh = loop.kfac._curvature._turns, loop.kfac._preconditioner.refresh

        def slow(blocks: Any, *arguments: Any) -> int:
            hand.move(slowness * max(turns._loads.seconds(list(blocks), loop.kfac._preconditioner).values()))
            return refresh(blocks, *arguments)

        monkeypatch.setattr(loop.kfac._preconditioner, "refresh", slow)
        count = 0
        for step in range(120):
            hand.move(3e-4)
            loop.run(step + 1, skip=step)
            count += sum(one.solved_at == step for one in loop.kfac._preconditioner.solved.values()) if step else 0
        return count

    fast, slow = turns_of(1.0), turns_of(100.0)
    assert fast > 20 * slow > 0


def test_layers_that_stand_still_are_not_decomposed(hand):
    loop = TowerLoop("first", max_overhead=1.0)
    x = loop._x.clone()
    for _ in range(10):
        hand.move(1.0)
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(x.flatten(0, 1)), loop._y).backward()
        loop.optimizer.step()
    drifts = loop.turns._drifts([[block] for block in loop.kfac.blocks], loop.kfac._preconditioner)
    assert max(drifts) < 1e-12


def test_a_run_that_goes_on_still_decomposes(hand):
    loop = Loop(0, 1, **OPTIONS, max_overhead=0.5)
    for step in range(10):
        hand.move(1.0)
        loop.run(step + 1, skip=step)
    again = Loop(0, 1, **OPTIONS, max_overhead=0.5)
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(loop.kfac.state_dict())
    table = []
    for _ in range(16):
        hand.move(1.0)
        table += timetable(again, 1)
    seen = [key for step in table for key in step]
    assert set(seen) == {block.key for block in again.kfac.blocks}
    assert len(seen) > len(set(seen))
    # In place of all that one has, too.
    loop.kfac.load_state_dict(again.kfac.state_dict())
    table = []
    for _ in range(16):
        hand.move(1.0)
        table += timetable(loop, 1)
    assert {key for step in table for key in step} == {block.key for block in again.kfac.blocks}


def drifting(rank: int, ranks: int, strategy: str) -> str:
    options = {"factor_update_steps": 1, "overlap": "staggered", "strategy": strategy}
    loop = Loop(rank, ranks, model=Growing(), max_overhead=0.3, **options).run(20)
    loop.model.grown = True
    loop.run(40, skip=20)
    state = loop.kfac.state_dict()
    again = Loop(rank, ranks, model=Growing(), max_overhead=0.3, **options)
    again.model.load_state_dict(loop.model.state_dict())
    again.model.grown = True
    again.kfac.load_state_dict(state)
    again.run(60, skip=40)
    assert again.kfac.metrics()["decompositions"] > 0
    return digest(again.model.state_dict())


@pytest.mark.parametrize("strategy", ["comm-opt", "layer-wise"])
def test_replicas_stay_the_same_whatever_the_clocks_say(tmp_path, strategy):
    first, second = run_on_ranks(drifting, tmp_path, 2, strategy)
    assert first == second

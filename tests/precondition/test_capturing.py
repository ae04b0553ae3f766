"""When a graph is made, where, and when it is let go of: without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from natgrad import KFAC
from natgrad.precondition import preconditioner, replay
from natgrad.precondition.preconditioner import Preconditioner

STACKS: Any = [SimpleNamespace(names=["a", "b"])]


class Captured:
    """Stands in for a graph."""

    made = 0

    def __init__(self, work: Any, *_: Any) -> None:
        Captured.made += 1
        self.work = work
        self.replays = 0

    def replay(self, *_: Any) -> str:
        self.replays += 1
        return "replayed"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Captured]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "_Captured", Captured)
    monkeypatch.setattr(Captured, "made", 0)
    return Captured


def run(own: replay.Replay, *works: str) -> list[Any]:
    """A step for each work: a letter says which parameter has a gradient."""
    replace: Any = None
    steps = [{name: torch.zeros(1) if work == name else None for name in "ab"} for work in works]
    return [own.run(replace, STACKS, gradients, 0.1, None, [0.1], None, None) for gradients in steps]


def test_the_second_step_in_a_row_is_captured(graphs: type[Captured]) -> None:
    assert run(replay.Replay(), *"aaab") == [None, "replayed", "replayed", None]
    assert graphs.made == 1


def test_work_that_keeps_changing_is_no_longer_captured(graphs: type[Captured]) -> None:
    own = replay.Replay()
    run(own, *"aabb" * 100)
    assert graphs.made == replay._WASTED
    assert run(own, *"aaaa") == [None] * 4


def test_graphs_that_were_worth_it_are_made_again_for_ever(graphs: type[Captured]) -> None:
    own = replay.Replay()
    for _ in range(3 * replay._WASTED):
        run(own, *"bb", *"a" * 20)
    assert graphs.made == 6 * replay._WASTED


def test_a_graph_is_of_the_gradients_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    def step(*_: Any) -> Any:
        assert current == [torch.device("cuda:1")]
        return "replayed"

    monkeypatch.setattr(torch.cuda, "device", device)
    own = Preconditioner("eigen", "joint")
    own._replay = SimpleNamespace(run=step)  # type: ignore[assignment]
    stacks: Any = [SimpleNamespace(device=torch.device("cuda:1"), names=[])]
    monkeypatch.setattr(preconditioner, "fused", lambda *_: None)
    assert own._replayed(stacks, {}, 0.1, None, [0.1], None, None) == "replayed"


def test_nothing_waits_for_garbage_collection() -> None:
    model = nn.Linear(3, 2)
    kfac = KFAC(model, lr=0.1)
    functional.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    kfac.step()
    gc.collect()
    gc.disable()
    try:
        before = weakref.ref(kfac._preconditioner)
        kfac.load_state_dict(kfac.state_dict())
        assert before() is None
    finally:
        gc.enable()


def test_kernels_are_not_prepared_for_ever_new_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(preconditioner, "fused", lambda *_: made.append(1))
    own = Preconditioner("eigen", "joint")
    for _ in range(100):
        own._fused(STACKS, {"a": torch.zeros(3), "b": None})
    assert len(made) == 1
    for size in range(200):
        own._fused(STACKS, {"a": torch.zeros(4 + size), "b": None})
    assert len(made) < 50


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(enabled: bool) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with replay.uncollected():
            garbage = weakref.ref(Cycle())
            assert [[] for _ in range(10**5)]  # more than a collection waits for
            assert garbage() is not None
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was_enabled else gc.disable()

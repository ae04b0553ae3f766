"""Copies in the host's memory that decompositions are made of; without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.overlap import options, places
from natgrad.overlap.job import Job
from natgrad.overlap.options import Background
from natgrad.overlap.places import InStep, _copied_together
from natgrad.overlap.tasks import Task, pack, solve_packed, unpack
from natgrad.precondition.preconditioner import Request


def test_a_diagonal_factor_does_not_keep_the_memory_of_all() -> None:
    whole = torch.ones(1000)
    factors: dict[Any, Tensor] = {"diagonal": whole[:4].view(1, 4), "dense": torch.eye(3)[None]}
    request = Request(0, factors, {}, {}, {}, None)
    job = Job.begin(request, None, InStep(Background()), "eigen", 10.0)
    kept = request.factors["diagonal"]
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    assert torch.equal(kept, whole[:4].view(1, 4))
    assert set(job.result(lambda error: None).sides) == {"diagonal", "dense"}


@pytest.mark.parametrize("looked_at", [False, True])
def test_solutions_leave_the_host_when_they_are_taken_over(monkeypatch: pytest.MonkeyPatch, looked_at: bool) -> None:
    """Not when a checkpoint looks at them: its stream may be another, and a GPU has better uses for its memory."""
    home = torch.device("meta")
    on_cores = places.Threads(Background(workers=1, threads=1))

    def bring(tasks: Sequence[Task]) -> list[Task]:
        return [Task(task.solver, task.keys, task.factors, home) for task in tasks]

    monkeypatch.setattr(on_cores, "bring", bring)
    request = Request(0, {"a": torch.eye(3)[None], "b": torch.eye(4)[None]}, {}, {}, {}, None)
    job = Job.begin(request, None, on_cores, "eigen", 60.0)
    if looked_at:
        solved = job.result(lambda error: None, stays=True)
        assert {side.device for side in solved.sides.values()} == {torch.device("cpu")}
        assert job.result(lambda error: None) is solved
    else:
        assert {side.device for side in job.result(lambda error: None).sides.values()} == {home}
    on_cores.close()


def test_what_lies_together_is_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(places, "_pinned_copy", copy)
    whole = torch.arange(100.0)
    parts = [whole[20:36].view(1, 4, 4), whole[40:49].view(1, 3, 3)]
    for one, other in zip(_copied_together(parts), parts, strict=True):
        assert torch.equal(one, other)
    assert [tensor.shape for tensor in made] == [(29,)]
    made.clear()
    far = [whole[:4].view(1, 2, 2), whole[90:94].view(1, 2, 2)]  # most of what is between is not theirs
    turned = [whole[:9].view(1, 3, 3).mT, whole[9:18].view(1, 3, 3)]
    for some in (far, turned):
        for one, other in zip(_copied_together(some), some, strict=True):
            assert torch.equal(one, other)
    assert len(made) == 4
    monkeypatch.setattr(places, "_TOGETHER", 28)
    made.clear()
    _copied_together(parts)
    assert [tensor.shape for tensor in made] == [(1, 4, 4), (1, 3, 3)]


def test_what_lies_together_is_sent_without_what_is_between() -> None:
    whole = torch.zeros(100_000)
    parts = tuple(whole[start : start + 9].view(1, 3, 3) for start in (0, 90_000))
    task = Task("eigen", ("a", "b"), parts)
    assert len(pack(task)) < 10_000
    assert len(unpack(solve_packed(pack(task)))) == 2


def test_who_solves_at_home_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    home, waited = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(Task, "device", torch.device("cpu"))
    Task("eigen", ("a",), (torch.eye(3)[None],), home).solve_at_home()
    assert waited == [home]
    Task("eigen", ("a",), (torch.eye(3)[None],)).solve_at_home()
    assert waited == [home]


def test_a_request_gets_threads_by_its_largest_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "free_cores", lambda: 8)
    on_cores = places.Threads(Background())
    small, large = (Task("eigen", ("a",), (torch.empty(1, size, size),)) for size in (64, 1024))
    first = on_cores._pool_for([small] * 100)
    assert on_cores._pool_for([small] * 100) is first
    second = on_cores._pool_for([small, large])
    assert second is not first
    assert (first._workers, second._workers) == (8, 2)
    assert on_cores._pool_for([small] * 9)._workers == 3  # a thread has four pieces to do
    assert places.Threads(Background(workers=6))._pool_for([small])._workers == 6
    on_cores.close()

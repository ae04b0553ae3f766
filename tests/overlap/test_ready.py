"""Taken over as soon as they have come, and not before."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import natgrad
from distribute.mixed import Loop, problem_of
from natgrad.overlap.job import Job
from overlap.executors import Held, digest, fingerprint, until
from ranks import run_on_ranks


def solved_at(loop: Loop) -> set[int]:
    return {member.solved_at for member in loop.kfac._preconditioner.solved.values()}


def one_step(loop: Loop) -> None:
    steps = loop.kfac.steps
    loop.run(steps + 1, skip=steps)


def let_go(loop: Loop, held: Held) -> None:
    """Everything that was asked for comes back."""
    (job,) = loop.kfac._curvature.jobs
    until(lambda: len(held.waiting) > 0)
    held.release()
    until(lambda: job.ready)


def test_the_last_one_stays_in_use_until_the_next_has_come():
    held = Held()
    loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=3)
    ages = []
    for _ in range(8):  # asked for at 3; nothing else before that has come
        one_step(loop)
        ages.append(loop.kfac.metrics()["decomposition_age"])
        assert solved_at(loop) == {0}
    assert ages == list(range(8))
    assert held.asked == 1
    let_go(loop, held)
    assert solved_at(loop) == {0}  # nothing happens between steps
    one_step(loop)
    assert solved_at(loop) == {3}
    assert loop.kfac.metrics()["decomposition_age"] == 5
    assert len(loop.kfac._curvature.jobs) == 0  # due for long, but one step does not do both
    one_step(loop)
    until(lambda: held.asked == 2)
    assert next(iter(loop.kfac._curvature.jobs)).request.step == 9
    held.release()


def test_what_is_taken_over_is_used():
    """The run is that of `delay` up to the step before, and another one from then on."""
    held = Held()
    loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=3)
    reference = Loop(0, 1, delay=4, inv_update_steps=3)
    stale = Loop(0, 1, delay=50, inv_update_steps=3)
    for step in range(8):
        if step == 7:
            let_go(loop, held)
        for each in (loop, reference, stale):
            one_step(each)
        now, then, never = (digest(each.model.state_dict()) for each in (loop, reference, stale))
        assert now == then
        assert (now == never) == (step < 7)


def test_without_an_executor_the_default_on_one_process_is_ready():
    loop = Loop(0, 1, overlap="background", inv_update_steps=2)
    assert loop.kfac._curvature.jobs.when_ready
    for _ in range(12):
        one_step(loop)
        for job in loop.kfac._curvature.jobs:
            until(lambda job=job: job.ready)
    assert solved_at(loop) == {10}


def test_in_the_step_ready_is_the_next_step():
    first = Loop(0, 1, delay="ready", inv_update_steps=2).run(8)
    second = Loop(0, 1, delay=1, inv_update_steps=2).run(8)
    assert digest(first.model.state_dict()) == digest(second.model.state_dict())


@pytest.mark.parametrize("bound", [4, 6])
def test_one_that_has_become_too_old_is_waited_for(bound):
    held = Held()
    waited = []
    result = Job.result

    def waiting(job: Job, *arguments: Any, **options: Any) -> Any:
        waited.append(loop.kfac.steps)
        until(lambda: len(held.waiting) > 0)
        held.release()
        return result(job, *arguments, **options)

    with mock.patch.object(Job, "result", waiting):
        loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=3, max_staleness=bound)
        ages = []
        for _ in range(14):
            one_step(loop)
            ages.append(loop.kfac.metrics()["decomposition_age"])
    assert max(ages) == bound - 1
    assert waited[0] == bound
    assert loop.kfac.metrics()["late_decompositions"] == len(waited)


@pytest.mark.filterwarnings("ignore:.*is not above inv_update_steps")
def test_a_bound_below_the_interval_waits_in_the_step_after_the_request():
    held = Held()
    result = Job.result

    def waiting(job: Job, *arguments: Any, **options: Any) -> Any:
        until(lambda: len(held.waiting) > 0)
        held.release()
        return result(job, *arguments, **options)

    with mock.patch.object(Job, "result", waiting):
        loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=4, max_staleness=2).run(5)
        assert solved_at(loop) == {0}
        one_step(loop)
        assert solved_at(loop) == {4}


def at_different_times(rank: int, ranks: int) -> tuple[list[str], list[Any]]:
    """Each rank's executor is let go at another step."""
    held = Held()
    loop = Loop(rank, ranks, overlap=held, delay="ready", strategy="layer-wise", inv_update_steps=2)
    weights, own = [], []
    for step in range(10):
        if step == (4, 7)[rank]:
            let_go(loop, held)
        one_step(loop)
        weights.append(digest(loop.model.state_dict()))
        own.append({m.solved_at for m in loop.kfac._preconditioner.solved.values() if m.sides})
    return weights, own


def test_owners_take_over_at_their_own_times_and_replicas_stay_the_same(tmp_path):
    (first, own), (second, other) = run_on_ranks(at_different_times, tmp_path, 2)
    assert first == second
    assert own == [{0}] * 4 + [{2}] * 6
    assert other == [{0}] * 7 + [{2}] * 3


def ready_on_ranks(rank: int, ranks: int) -> tuple[str, bool]:
    loop = Loop(rank, ranks, overlap="background", delay="ready", strategy="layer-wise", max_staleness=4).run(30)
    return digest(loop.model.state_dict()), loop.kfac.metrics()["decomposition_age"] < 6


def test_threads_and_owners(tmp_path):
    answers = run_on_ranks(ready_on_ranks, tmp_path, 2)
    assert answers[0] == answers[1]
    assert answers[0][1]


def refused(rank: int, ranks: int) -> list[str]:
    found = []
    for strategy in ("comm-opt", "auto", natgrad.Strategy(name="hybrid", grad_worker_fraction=1.0)):
        with problem_of() as texts:
            Loop(rank, ranks, overlap="background", delay="ready", strategy=strategy)
        found.append("".join(texts))
    return found


def test_on_several_ranks_each_layer_needs_one_owner(tmp_path):
    for texts in run_on_ranks(refused, tmp_path, 2):
        for text in texts:
            assert text.startswith("ValueError: delay='ready' on several ranks needs one owner for each layer")
            assert "strategy='layer-wise'" in text


def test_loading_asks_again():
    """What was under way is nobody's."""
    held = Held()
    loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=3).run(5)
    state = loop.kfac.state_dict()
    assert state["under_way"] == []
    again = Loop(0, 1, overlap=(other := Held()), delay="ready", inv_update_steps=3)
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(state)
    one_step(again)
    until(lambda: other.asked == 1)
    let_go(again, other)
    one_step(again)
    assert solved_at(again) == {5}
    # The one that was saved goes on as it would have.
    let_go(loop, held)
    one_step(loop)
    assert solved_at(loop) == {3}


def saved_on_ranks(rank: int, ranks: int) -> tuple[str, list[str], set[int]]:
    """One rank's has come when the state is saved, the other's has not: and yet the states are one."""
    held = Held()
    loop = Loop(rank, ranks, overlap=held, delay="ready", strategy="layer-wise", inv_update_steps=3).run(5)
    if rank == 0:
        let_go(loop, held)
        loop.run(6, skip=5)
    else:
        one_step(loop)
    state = loop.kfac.state_dict()
    again = Loop(
        rank, ranks, overlap=natgrad.Background("cpu"), delay="ready", strategy="layer-wise", inv_update_steps=3
    )
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(state)
    weights = []
    for _ in range(8):
        one_step(again)
        for job in again.kfac._curvature.jobs:
            until(lambda job=job: job.ready)
        weights.append(digest(again.model.state_dict()))
    facts = {name: state[name] for name in ("refreshed_at", "stale", "step", "factors_at")}
    return digest(facts), weights, solved_at(again)


def test_every_ranks_state_is_the_same_whoever_has_taken_over(tmp_path):
    (facts, weights, times), (others, replica, _) = run_on_ranks(saved_on_ranks, tmp_path, 2)
    assert facts == others
    assert weights == replica
    assert times == {12}


def test_a_run_without_requests_is_the_run_without_overlap():
    held = Held()
    loop = Loop(0, 1, overlap=held, delay="ready", inv_update_steps=100).run(5)
    assert held.asked == 0
    assert fingerprint(loop) == fingerprint(Loop(0, 1, inv_update_steps=100).run(5))
    assert torch.get_num_threads() == 1

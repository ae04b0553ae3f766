"""A delay of k steps is the same run, bit for bit, wherever and however fast decompositions are made."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import natgrad
from distribute.mixed import Loop
from natgrad.overlap import piles
from natgrad.overlap.places import Threads
from overlap.executors import Erratic, ErraticThreads, fingerprint
from ranks import run_on_ranks

STEPS = 8


def runs(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case with solves in the step, in threads of natgrad's, and in two executors of the test's."""
    found = []
    for number, options in enumerate(cases):
        here = Loop(rank, ranks, **options).run(STEPS)
        assert here.kfac.metrics()["late_decompositions"] == 0
        prints = {"step": fingerprint(here)}
        with Erratic(100 * number + rank).told() as erratic, ErraticThreads(100 * number + rank) as threads:
            places = {
                "bytes": erratic,
                "memory": natgrad.Background(threads),
                "cpu": natgrad.Background("cpu", workers=2, threads=1),
            }
            counts = {}
            for name, place in places.items():
                loop = Loop(rank, ranks, **options, overlap=place).run(STEPS)
                prints[name] = fingerprint(loop)
                counts[name] = loop.kfac.metrics()
            workers = {*erratic.threads, *threads.threads}
        assert threading.main_thread() not in workers
        found.append({"prints": prints, "counts": counts, "workers": len(workers)})
    return found


def compared(answers: list[list[dict[str, Any]]]) -> None:
    for number, first in enumerate(answers[0]):
        for answer in answers:
            assert set(answer[number]["prints"].values()) == {first["prints"]["step"]}
            assert all(counts["background_failures"] == 0 for counts in answer[number]["counts"].values())
        # Somebody has dense factors to decompose, was late with them, and was waited for.
        assert sum(answer[number]["workers"] for answer in answers) > 0
        assert sum(answer[number]["counts"]["bytes"]["late_decompositions"] for answer in answers) > 0


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_threads_of_training_do_not_show(solver):
    """LAPACK's last bits depend on how many threads it has, and training may have others than who solves beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = []
        for overlap in (None, natgrad.Background("cpu", threads=1)):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = natgrad.Background("step", threads=1) if overlap is None else overlap
            options = {"factor_update_steps": 1, "inv_update_steps": 4, "solver": solver, "overlap": step, "delay": 2}
            natgrad.KFAC(model, **options).attach(optimizer)
            for number in range(12):
                x = torch.randn(32, 300, generator=torch.Generator().manual_seed(number))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), torch.arange(32) % 10).backward()
                optimizer.step()
            results.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(map(torch.equal, *results))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("delay", [1, 3])
def test_solves_elsewhere_are_solves_in_the_step_bit_for_bit(solver, delay):
    compared([runs(0, 1, [{"solver": solver, "delay": delay}])])


TWO = [
    {"strategy": "comm-opt", "delay": 1},
    {"strategy": "comm-opt", "delay": 3, "solver": "inverse"},
    {"strategy": "layer-wise", "delay": 2},
    {"strategy": "layer-wise", "delay": 1, "solver": "inverse"},
]
FOUR = [{"strategy": "hybrid", "delay": 1}, {"strategy": "hybrid", "delay": 2, "solver": "inverse"}]


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_solves_elsewhere_are_solves_in_the_step_on_several_ranks(tmp_path, ranks, cases):
    compared(run_on_ranks(runs, tmp_path, ranks, cases, seconds=120))


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_delay_of_none_is_no_overlap(solver):
    plain = fingerprint(Loop(0, 1, solver=solver).run(STEPS))
    with Erratic().told() as erratic:
        for overlap in (None, erratic, natgrad.Background("cpu")):
            assert fingerprint(Loop(0, 1, solver=solver, overlap=overlap, delay=0).run(STEPS)) == plain


def test_a_delay_changes_the_run():
    prints = {fingerprint(Loop(0, 1, delay=delay).run(STEPS))[0] for delay in (0, 1, 2, 3)}
    assert len(prints) == 4


def no_delay(rank: int, ranks: int) -> list[Any]:
    loops = [Loop(rank, ranks, strategy="hybrid", **options) for options in ({}, {"delay": 0, "overlap": "background"})]
    return [fingerprint(loop.run(STEPS)) for loop in loops]


def test_a_delay_of_none_is_no_overlap_on_ranks(tmp_path):
    answers = run_on_ranks(no_delay, tmp_path, 2)
    assert len({one for answer in answers for one in answer}) == 1


def test_several_requests_may_be_under_way():
    """One is asked for every second step, and taken over after five."""
    seen = []
    with Erratic().told() as erratic:
        loop = Loop(0, 1, overlap=erratic, delay=5)
        reference = Loop(0, 1, delay=5)
        for steps in range(12):
            loop.run(steps + 1, skip=steps)
            reference.run(steps + 1, skip=steps)
            seen.append(len(loop.kfac._curvature.jobs))
        assert max(seen) == 3
        assert fingerprint(loop) == fingerprint(reference)


def test_what_is_taken_over_is_what_was_asked_for_so_many_steps_ago():
    loop = Loop(0, 1, delay=3, inv_update_steps=5)
    solved_at = []
    for steps in range(12):
        loop.run(steps + 1, skip=steps)
        solved_at.append({member.solved_at for member in loop.kfac._preconditioner.solved.values()})
    # Asked for at 0 (nothing is known yet: at once), 5 and 10.
    assert solved_at == [{0}] * 8 + [{5}] * 4


def bounded(rank: int, ranks: int) -> list[Any]:
    """Of a delay that would make decompositions older than they may get: weights, and the ages of all steps."""
    options = {"delay": 8, "inv_update_steps": 3, "max_staleness": 5}
    found: list[Any] = []
    for overlap in (None, "background"):
        loop = Loop(rank, ranks, overlap=natgrad.Background("step") if overlap is None else overlap, **options)
        ages = []
        for steps in range(14):
            loop.run(steps + 1, skip=steps)
            ages.append(loop.kfac.metrics()["decomposition_age"])
        found += [fingerprint(loop), ages]
    return found


def test_a_delay_keeps_to_the_bound_of_staleness():
    here, ages, beside, others = bounded(0, 1)
    assert max(ages) == 4
    assert (here, ages) == (beside, others)


def test_a_delay_keeps_to_the_bound_of_staleness_on_ranks(tmp_path):
    for here, ages, beside, others in (answers := run_on_ranks(bounded, tmp_path, 2)):
        assert max(ages) == 4
        assert (here, ages) == (beside, others)
    assert answers[0] == answers[1]


def test_a_process_pool_gives_the_same_bits():
    options = {"delay": 2, "inv_update_steps": 3}
    plain = fingerprint(Loop(0, 1, **options).run())
    with ProcessPoolExecutor(1, mp_context=get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)) as p:
        loop = Loop(0, 1, overlap=p, **options).run()
        assert fingerprint(loop) == plain
    assert loop.kfac.metrics()["background_failures"] == 0


def test_solves_are_made_in_threads_of_natgrads(monkeypatch):
    names = set()
    real = piles.Piles.solve

    def watched(self):
        names.add(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(piles.Piles, "solve", watched)
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), delay=1).run()
    assert names == {"natgrad-solve-0"}
    assert isinstance(loop.kfac._curvature.jobs._place, Threads)


def test_default_delay_on_several_ranks_is_half_the_interval(tmp_path):
    for ages in run_on_ranks(ages_of, tmp_path, 2):
        assert ages == [{0}] * 6 + [{4}] * 4 + [{8}] * 2


def ages_of(rank: int, ranks: int) -> list[set[int]]:
    loop = Loop(rank, ranks, overlap="background", strategy="comm-opt", inv_update_steps=4)
    found = []
    for steps in range(12):
        loop.run(steps + 1, skip=steps)
        found.append({member.solved_at for member in loop.kfac._preconditioner.solved.values()})
    return found


def one_late(rank: int, ranks: int) -> str:
    """Only one rank's executor is slow, and only that one's waits: the others wait in the exchange."""
    with Erratic(rank).told() as erratic:
        overlap = erratic if rank == 1 else natgrad.Background("cpu")
        try:
            return fingerprint(Loop(rank, ranks, overlap=overlap, delay=1, strategy="comm-opt").run(STEPS))
        except ValueError as error:
            return str(error)


def test_ranks_that_are_given_different_places_are_told(tmp_path):
    for text in run_on_ranks(one_late, tmp_path, 2):
        assert "the ranks disagree on the option overlap" in text

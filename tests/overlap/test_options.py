"""What may be said about overlap, and what is answered to the rest."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import natgrad
from distribute.mixed import Loop, Mixed
from natgrad import Background, Costs, Staggered
from natgrad.distribute.agreement import described
from natgrad.overlap.options import checked_overlap, free_cores
from natgrad.overlap.places import Cheaper, Elsewhere, InStep, Stream, Threads, choose, costs_of_two_cores, place_of
from natgrad.overlap.tasks import Task
from ranks import run_on_ranks


def test_words_and_objects_mean_the_same():
    assert checked_overlap(None, None, None, None) is None
    assert checked_overlap("background", None, None, None) == Background()
    assert checked_overlap("background", 3, None, 7) == Background(delay=3, max_staleness=7)
    assert checked_overlap(Background("cpu", delay=1), 2, None, None) == Background("cpu", delay=2)
    assert checked_overlap(None, 2, None, None) == Background("step", delay=2)
    assert checked_overlap("staggered", None, None, None) == Staggered()
    assert checked_overlap("staggered", None, 0.1, None) == checked_overlap(Staggered(), None, 0.1, None)
    assert checked_overlap(Staggered(0.1), None, None, None) == Staggered(0.1)
    with ThreadPoolExecutor(1) as pool:
        assert checked_overlap(pool, "ready", None, None) == Background(pool, delay="ready")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("backgruond", None, None, None), "did you mean 'background'"),
        (("stagger", None, None, None), "did you mean 'staggered'"),
        (("cpu", None, None, None), r"overlap='cpu' is where .* natgrad.Background\('cpu'\)"),
        (
            ("background", -1, None, None),
            "delay must be a whole number of steps of at least 0, 'ready', or None for the default, got -1",
        ),
        (("background", True, None, None), "delay must be a whole number"),
        (("background", 1.5, None, None), "delay must be a whole number"),
        (("background", "redy", None, None), "delay must be a whole number of steps of at least 0, 'ready', or None"),
        (("background", None, 0.1, None), "max_overhead goes with overlap='staggered'"),
        ((None, None, 0.1, None), "max_overhead goes with overlap='staggered'"),
        ((None, None, None, 3), "max_staleness goes with overlap='background'"),
        (("background", None, None, 0), "max_staleness must be a whole number of at least 1"),
        (("staggered", 1, None, None), "delay and max_staleness go with overlap='background'"),
        (("staggered", None, None, 4), "delay and max_staleness go with overlap='background'"),
        ((Staggered(), "ready", None, None), "delay and max_staleness go with overlap='background'"),
        (("staggered", None, 0, None), "max_overhead must be above 0 and at most 1, got 0"),
        (("staggered", None, 1.5, None), "max_overhead must be above 0"),
        ((3, None, None, None), "overlap must be 'background', 'staggered', a natgrad.Background"),
        ((True, None, None, None), "overlap must be 'background', 'staggered', a natgrad.Background"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        checked_overlap(*given)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e10, True, "long"])
def test_a_timeout_is_a_time(timeout):
    with pytest.raises(ValueError, match="timeout must be a number of seconds"):
        Background(timeout=timeout)


def test_details_that_cannot_be_meant_are_refused():
    with pytest.raises(TypeError, match=r"where got the class ThreadPoolExecutor: call it, ThreadPoolExecutor\(...\)"):
        Background(ThreadPoolExecutor)
    for one, called in (
        (Staggered, "natgrad.Staggered"),
        (Background, "natgrad.Background"),
        (ThreadPoolExecutor, "ThreadPoolExecutor"),
    ):
        with pytest.raises(TypeError, match=rf"^overlap got the class {one.__name__}: call it, {called}\(...\)"):
            checked_overlap(one, None, None, None)
    with pytest.raises(ValueError, match="where must be one of 'auto', 'cpu', 'gpu', 'step', got 'gpus' .did you mean"):
        Background("gpus")
    for name in ("workers", "threads"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
            Background(**{name: 0})
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="an executor has its own"):
            Background(pool, **{name: 2})
    with pytest.raises(ValueError, match="where='gpu' needs a model on a GPU: this one is on cpu"):
        natgrad.KFAC(nn.Linear(2, 2), overlap=Background("gpu"), lr=0.1)


def test_a_kfac_refuses_what_does_not_go_together():
    for options in ({"overlap": "background"}, {"delay": 2}, {"overlap": "staggered"}):
        with pytest.raises(ValueError, match="overlap= and delay= do not go with it; use solver='eigen'"):
            natgrad.KFAC(nn.Linear(2, 2), damping=natgrad.AdaptiveDamping(1e-2), solver="inverse", **options)
    with pytest.raises(ValueError, match="did you mean 'background'"):
        natgrad.KFAC(nn.Linear(2, 2), overlap="bakground")


def nothing_asked() -> tuple[Costs, Costs]:
    raise AssertionError("there is nothing to choose")


def test_places_are_what_they_are_called():
    def place(where, device="cpu"):
        return place_of(Background(where), torch.device(device), print, nothing_asked)

    assert isinstance(place("step"), InStep)
    assert isinstance(place("cpu"), Threads)
    assert isinstance(place("auto"), Threads)
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(place(pool), Elsewhere)
    assert Loop(0, 1, overlap="background").kfac._curvature.jobs.where == "cpu"
    assert [place(where, "cuda").name for where in ("auto", "cpu", "gpu")] == ["auto", "cpu", "gpu"]


def test_a_request_without_dense_factors_is_for_cores():
    place = place_of(Background(), torch.device("cuda"), print, lambda: (Costs.of("cuda"), Costs.of("cpu")))
    assert list(place.bring([])) == []
    assert place.name == "cpu"


def resnet50(solver: str) -> list[Task]:
    """Its largest factors, where most of the time goes."""
    sizes = [4608] * 3 + [2304] * 6 + [2048] * 5 + [1152] * 4 + [1024] * 12 + [512] * 20 + [256] * 30
    # Memory that nobody has asked for: none is taken.
    return [Task(solver, (number,), (torch.empty(1, n, n, device="meta"),)) for number, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("solver", "cores", "where"),
    [("eigen", 12, "cpu"), ("eigen", 3, "cpu"), ("eigen", 1, "gpu"), ("inverse", 12, "cpu"), ("inverse", 2, "gpu")],
)
def test_what_should_cost_training_the_least(solver, cores, where):
    """As measured on an H200: cores hide what they have the time for."""
    assert choose(resnet50(solver), cores, Costs.of("cuda"), Costs.of("cpu")) == where


def test_small_factors_are_for_cores_however_few():
    small = [Task(solver, ("a",), (torch.empty(4, 64, 64),)) for solver in ("eigen", "inverse")]
    assert choose(small, 1, Costs.of("cuda"), Costs.of("cpu")) == "cpu"


def test_costs_decide_and_not_names():
    tasks = resnet50("eigen")
    slow = replace(Costs.of("cpu"), eigen=((1, 1.0), (4608, 100.0)))
    assert choose(tasks, 64, Costs.of("cuda"), slow) == "gpu"
    assert choose(tasks, 1, slow, Costs.of("cpu")) == "cpu"


def test_each_request_goes_where_it_should():
    def one(size: int) -> list[Task]:
        return [Task("eigen", ("a",), (torch.eye(size)[None],))]

    place = Cheaper(
        Threads(Background(workers=1, threads=1)),
        Stream(),
        lambda tasks: "cpu" if tasks[0].factors[0].shape[-1] < 5 else "gpu",
    )
    for size, where in ((3, "cpu"), (8, "gpu"), (4, "cpu")):
        (future,) = place.begin(place.bring(one(size)))
        (solution,) = future.result(10)
        assert solution.side.matrix.shape == (1, size, size)
        assert place.name == where
    place.close()


def test_costs_are_measured_where_that_is_asked_for(monkeypatch):
    threads = []

    def measured(device: torch.device) -> Costs:
        threads.append((threading.current_thread(), torch.get_num_threads()))
        return replace(Costs.of(device), device="measured")

    monkeypatch.setattr("natgrad.overlap.places.measure", measured)
    assert costs_of_two_cores(None) == costs_of_two_cores(Costs.of("cuda")) == Costs.of("cpu")
    assert threads == []
    before = torch.get_num_threads()
    assert costs_of_two_cores("measured").device == "measured"
    assert threads[0][0] is not threading.main_thread()
    assert threads[0][1] == 2
    assert torch.get_num_threads() == before


def test_turns_of_one_process_go_by_the_strategys_costs():
    costs = replace(Costs.of("cpu"), eigen=((1, 1e-3), (6, 1e-3), (7, 1.0)))
    given = natgrad.KFAC(Mixed(), overlap="staggered", strategy=natgrad.Strategy(costs=costs))
    assert given._curvature._turns._loads._costs() is costs
    assert natgrad.KFAC(Mixed(), overlap="staggered")._curvature._turns._loads._costs() == Costs.of("cpu")


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr("natgrad.overlap.options.available_cores", lambda: 32)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_cores() == 24
    assert Background().sizes(largest=2048) == (6, 4)
    assert Background().sizes(largest=576) == (24, 1)  # many at a time
    assert Background(workers=2, threads=3).sizes(largest=2048) == (2, 3)
    assert Background(workers=2, threads=3).sizes(largest=16) == (2, 3)
    assert Background(threads=1).sizes(largest=2048) == (24, 1)
    for ranks, free in (("4", 6), ("100", 1), ("0", 24), ("many", 24)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert free_cores() == free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert Background().sizes(largest=2048) == (1, 1)


def test_objects_with_an_executor_are_compared_by_what_they_say():
    """Ranks have executors of their own, at other addresses."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert described(Background(one, delay=2)) == described(Background(other, delay=2))
        assert described(Background(one, delay=2)) != described(Background(other, delay=3))
        assert described(one) == described(other) == "ThreadPoolExecutor"


def disagreeing(rank: int, ranks: int) -> str:
    with ThreadPoolExecutor(1) as pool:
        try:
            Loop(rank, ranks, overlap=Background(pool, delay=rank + 1))
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_with_different_delays_are_told(tmp_path):
    for text in run_on_ranks(disagreeing, tmp_path, 2):
        assert "the ranks disagree on the option overlap" in text
        assert "delay=1" in text
        assert "delay=2" in text

"""What may be said about overlap, and what is answered to the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import natgrad
from distribute.mixed import Loop
from natgrad import Background, Staggered
from natgrad.distribute.agreement import described
from natgrad.overlap.options import checked_overlap, free_cores
from natgrad.overlap.places import Elsewhere, InStep, Threads, choose, place_of
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
        (("cpu", None, None, None), "overlap must be one of 'background', 'staggered', got 'cpu'"),
        (("background", -1, None, None), "delay must be a whole number of at least 0, or None for the default, got -1"),
        (("background", True, None, None), "delay must be a whole number"),
        (("background", 1.5, None, None), "delay must be a whole number"),
        (("background", "redy", None, None), "delay must be one of 'ready', got 'redy' .did you mean 'ready'"),
        (("background", None, 0.1, None), "max_overhead goes with overlap='staggered'"),
        ((None, None, 0.1, None), "max_overhead goes with overlap='staggered'"),
        ((None, None, None, 3), "max_staleness goes with overlap='background'"),
        (("background", None, None, 0), "max_staleness must be a whole number of at least 1"),
        (("staggered", 1, None, None), "delay and max_staleness go with overlap='background'"),
        (("staggered", None, None, 4), "delay and max_staleness go with overlap='background'"),
        ((Staggered(), "ready", None, None), "delay and max_staleness go with overlap='background'"),
        (("staggered", None, 0, None), "max_overhead must be above 0 and at most 1, got 0"),
        (("staggered", None, 1.5, None), "max_overhead must be above 0"),
        ((3, None, None, None), "where must be one of"),
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
    with pytest.raises(TypeError, match=r"got the class Staggered: call it"):
        checked_overlap(Staggered, None, None, None)
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


def test_places_are_what_they_are_called():
    cpu = torch.device("cpu")

    def place(where):
        return place_of(Background(where), cpu, "eigen", print)

    assert isinstance(place("step"), InStep)
    assert isinstance(place("cpu"), Threads)
    assert isinstance(place("auto"), Threads)
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(place(pool), Elsewhere)
    assert Loop(0, 1, overlap="background").kfac._curvature.jobs.where == "cpu"


@pytest.mark.parametrize(
    ("solver", "device", "cores", "where"),
    [
        ("eigen", "cpu", 1, "cpu"),
        ("inverse", "cpu", 64, "cpu"),
        ("inverse", "cuda", 64, "gpu"),
        ("eigen", "cuda", 64, "cpu"),
        ("eigen", "cuda", 3, "cpu"),
        ("eigen", "cuda", 2, "gpu"),
    ],
)
def test_what_should_cost_training_the_least(solver, device, cores, where):
    assert choose(solver, torch.device(device), cores) == where


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_cores() == 24
    assert Background().sizes() == (6, 4)
    assert Background(workers=2, threads=3).sizes() == (2, 3)
    assert Background(threads=1).sizes() == (24, 1)
    for ranks, free in (("4", 6), ("100", 1), ("0", 24), ("many", 24)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert free_cores() == free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert Background().sizes() == (1, 1)


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

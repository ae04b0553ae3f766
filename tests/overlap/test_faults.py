"""What goes wrong beside training costs time there, and never training's result."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import natgrad
from distribute.mixed import Loop
from natgrad.overlap import places
from natgrad.overlap.tasks import Solution, solve_packed, solve_tensors, unpack
from natgrad.solve.solver import Side
from overlap.executors import Answering, digest, fingerprint, until
from ranks import run_on_ranks

OPTIONS: dict[str, Any] = {"delay": 1, "inv_update_steps": 2}
STEPS = 8  # requests at 2, 4 and 6, of one piece each: 0 is decomposed in the step
PIECES = 3


def unhurt(place: Any, *, failures: int | None = PIECES, **options: Any) -> Loop:
    """A run with faults is the run without, tells once, and counts."""
    options = {**OPTIONS, **options}
    expected = fingerprint(Loop(0, 1, **options).run(STEPS))
    if not isinstance(place, natgrad.Background):
        place = natgrad.Background(place, timeout=10)  # where a test fails it does so soon
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop = Loop(0, 1, overlap=place, **options).run(STEPS)
        found = fingerprint(loop)
    assert found == expected
    ours = [str(one.message) for one in told if issubclass(one.category, natgrad.NatgradWarning)]
    assert len(ours) == 1, ours
    assert "in the background did not come" in ours[0]
    counted = loop.kfac.metrics()["background_failures"]
    assert counted == failures if failures is not None else counted > 0
    return loop


def error(text: str) -> Any:
    def fail(*_: Any) -> Any:
        raise RuntimeError(text)

    return fail


def leave(*_: Any) -> Any:
    raise SystemExit(3)


def lacking(fn: Any, payload: bytes) -> Any:
    return unpack(fn(payload))[:-1]


def other_shapes(fn: Any, payload: bytes) -> Any:
    return [Solution(Side(one.side.matrix[:, 1:, 1:], one.side.values), one.failed) for one in unpack(fn(payload))]


def other_dtype(fn: Any, payload: bytes) -> Any:
    return [Solution(Side(one.side.matrix.float(), one.side.values), one.failed) for one in unpack(fn(payload))]


def nan(fn: Any, payload: bytes) -> Any:
    found = unpack(fn(payload))
    found[-1].side.matrix[0, 0, 0] = torch.nan
    return found


def turned(fn: Any, payload: bytes) -> Any:
    """Orthogonal, with the right eigenvalues, and yet of another matrix."""
    found = unpack(fn(payload))
    for one in found:
        one.side.matrix.copy_(torch.linalg.qr(torch.randn_like(one.side.matrix))[0])
    return found


def failed_and_nan(fn: Any, payload: bytes) -> Any:
    return [
        Solution(Side(one.side.matrix * torch.nan, one.side.values), [True] * len(one.failed))
        for one in unpack(fn(payload))
    ]


def without_flags(fn: Any, payload: bytes) -> Any:
    return [Solution(one.side, []) for one in unpack(fn(payload))]


WRONG = {
    "raises": error("no"),
    "raises with braces": error("a {dict} of {} and {0!r} and {"),
    "leaves": leave,
    "none": lambda *_: None,
    "a number": lambda *_: 1,
    "no torch file": lambda *_: b"not what torch saves",
    "half a file": lambda fn, payload: fn(payload)[:100],
    "the question": lambda fn, payload: payload,
    "too few": lacking,
    "shapes": other_shapes,
    "dtype": other_dtype,
    "nan": nan,
    "turned": turned,
    "not finite, and failed": failed_and_nan,
    "without flags": without_flags,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_made_again(wrong):
    unhurt(Answering(wrong))


@pytest.mark.parametrize("wrong", [lambda *_: [], lambda *_: b"", lambda f, p: [one.side for one in unpack(f(p))]])
def test_a_wrong_answer_is_made_again_with_inverses_too(wrong):
    unhurt(Answering(wrong), solver="inverse")


def test_a_wrong_inverse_is_made_again():
    def doubled(fn: Any, payload: bytes) -> Any:
        return [Solution(Side(2 * one.side.matrix, None), one.failed) for one in unpack(fn(payload))]

    unhurt(Answering(doubled), solver="inverse")


def test_an_error_that_comes_once_in_a_while_is_counted_as_often():
    count = iter(range(100))

    def sometimes(fn: Any, *arguments: Any) -> Any:
        if next(count) % 2:
            raise OSError("the network is away")
        return fn(*arguments)

    unhurt(Answering(sometimes), failures=1)


def test_an_executor_that_cannot_be_asked_is_done_without():
    class Busy(Answering):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise ConnectionError("nobody there")

    unhurt(Busy(None))


def test_an_executor_that_was_shut_down_is_done_without():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    unhurt(pool)


def test_an_executor_that_cancels_is_done_without():
    class Cancels(Answering):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            return future

    unhurt(Cancels(None))


class Forgetful(Answering):
    """Takes everything and answers nothing."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


def test_an_executor_that_hangs_is_given_up_after_the_timeout():
    unhurt(natgrad.Background(Forgetful(None), timeout=0.05))


def test_an_executor_that_hangs_is_asked_ever_more_rarely():
    """Or each request would make training wait until its timeout."""
    asked, back = [], threading.Event()
    answering = Answering(lambda fn, *arguments: fn(*arguments))

    class Counting(Answering):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            asked.append(fn)
            return answering.submit(fn, *args) if back.is_set() else Future()

    place = natgrad.Background(Counting(None), timeout=0.5)  # an answer may have to wait for a core
    loop = Loop(0, 1, overlap=place, delay=1, inv_update_steps=1)
    with pytest.warns(natgrad.NatgradWarning, match="did not come"):
        loop.run(20)
    assert len(asked) == 4  # of 19 requests: the first, third, sixth and eleventh
    assert loop.kfac.metrics()["background_failures"] == 18  # the last is not due yet
    back.set()
    loop.run(60, skip=20)
    until(lambda: len(asked) == 4 + 40)  # the twentieth is answered


def die(payload: bytes) -> bytes:
    os._exit(1)


class Deadly(ProcessPoolExecutor):
    """Its first worker dies at the second question."""

    asked = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        return super().submit(die if self.asked == 2 else fn, *args)


def test_a_process_pool_whose_worker_dies_is_done_without_from_then_on():
    with Deadly(1, mp_context=get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        unhurt(pool, failures=PIECES - 1)
        assert pool.asked == PIECES


def test_own_threads_that_raise_are_made_up_for_in_the_step(monkeypatch):
    monkeypatch.setattr(places, "_on_the_host", error("out of memory"))
    unhurt(natgrad.Background("cpu"))


@pytest.mark.parametrize("where", ["cpu", Answering(lambda fn, *arguments: fn(*arguments))])
def test_a_thread_that_cannot_be_started_is_done_without_until_one_can(monkeypatch, where):
    start, tries = threading.Thread.start, []

    def at_its_limit(thread: threading.Thread) -> None:
        if thread.name.startswith("natgrad"):
            tries.append(thread)
            if len(tries) == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", at_its_limit)
    unhurt(natgrad.Background(where, timeout=10), failures=1)
    assert len(tries) > 1


def test_an_own_thread_that_hangs_is_given_up_and_others_take_over(monkeypatch):
    never, threads = threading.Event(), []

    def hangs_at_first(piles: Any, ready: Any) -> Any:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            never.wait(20)
        return piles.solve()

    monkeypatch.setattr(places, "_on_the_host", hangs_at_first)
    # Longer than a thread that does not hang may have to wait for a core.
    unhurt(natgrad.Background("cpu", workers=1, timeout=0.5), failures=1)
    assert len(threads) == PIECES
    assert threads[0].is_alive()
    assert threads[0] not in threads[1:]
    never.set()
    threads[0].join(10)
    assert not threads[0].is_alive()  # its pool was closed


def test_a_hanging_own_thread_holds_up_what_queues_behind_it_for_no_longer(monkeypatch):
    """Several are under way: all behind the one that hangs are made in the step."""
    never = threading.Event()
    began = []

    def hangs_at_first(piles: Any, ready: Any) -> Any:
        began.append(piles)
        if len(began) == 1:
            never.wait(20)
        return piles.solve()

    monkeypatch.setattr(places, "_on_the_host", hangs_at_first)
    unhurt(natgrad.Background("cpu", workers=1, timeout=0.05), failures=None, delay=5, inv_update_steps=1)
    never.set()


def test_a_hanging_executor_with_several_under_way_is_survived():
    unhurt(natgrad.Background(Forgetful(None), timeout=0.02), failures=None, delay=3, inv_update_steps=1)


def test_a_broken_piece_beside_good_ones_is_made_alone(monkeypatch):
    """Pieces of one request: one is wrong, and one is made again."""
    monkeypatch.setattr("natgrad.overlap.tasks.SMALL_PIECE", 60)
    count = iter(range(1000))

    def one_of_many(fn: Any, payload: bytes) -> Any:
        if next(count) == 1:
            raise OSError("lost")
        return fn(payload)

    unhurt(Answering(one_of_many), failures=1)


def test_an_executor_that_only_looks_like_one_is_one():
    class Lookalike:
        def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(fn(*args))
            return future

    expected = fingerprint(Loop(0, 1, **OPTIONS).run(STEPS))
    loop = Loop(0, 1, overlap=Lookalike(), **OPTIONS).run(STEPS)
    assert fingerprint(loop) == expected
    assert loop.kfac.metrics()["background_failures"] == 0


def on_one_rank(rank: int, ranks: int, solver: str) -> tuple[Any, Any, int]:
    """Only the last one's executor fails."""
    options = {**OPTIONS, "strategy": "comm-opt", "solver": solver}
    expected = fingerprint(Loop(rank, ranks, **options).run(STEPS))
    place = Answering(error("no") if rank == ranks - 1 else lambda fn, *arguments: fn(*arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        loop = Loop(rank, ranks, overlap=place, **options).run(STEPS)
        return fingerprint(loop), expected, loop.kfac.metrics()["background_failures"]


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_one_ranks_faults_are_nobodys_result(tmp_path, solver):
    answers = run_on_ranks(on_one_rank, tmp_path, 2, solver)
    assert len({one for found, expected, _ in answers for one in (found, expected)}) == 1
    assert [count for _, _, count in answers] == [0, PIECES]


def test_failures_are_carried_on_by_checkpoints():
    with pytest.warns(natgrad.NatgradWarning):
        loop = Loop(0, 1, overlap=Answering(error("no")), **OPTIONS).run(STEPS)
    again = Loop(0, 1, **OPTIONS)
    again.kfac.load_state_dict(loop.kfac.state_dict())
    assert again.kfac.metrics()["background_failures"] == PIECES


def test_what_goes_over_the_wire_comes_back_as_it_was():
    factor = torch.randn(2, 4, 4, dtype=torch.float64)
    factor = factor @ factor.mT
    task = places.Task("eigen", ("a",), (factor,))
    (there,) = unpack(solve_packed(places.pack(task)))
    (here,) = solve_tensors("eigen", [factor])
    assert digest([there.side.matrix, there.side.values, there.failed]) == digest(
        [here.side.matrix, here.side.values, here.failed]
    )

"""A checkpoint does not know how many ranks wrote it, or how they shared the work."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import natgrad
from distribute.mixed import STEPS, Loop, batches, close, loss_of, problem_of, same
from ranks import run_on_ranks

HALF = 3
# Statistics and momentum are in the middle of things when the state is saved.
OPTIONS: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 2, "raw_momentum": 0.5, "kl_clip": 1e-3}


def save(rank: int, ranks: int, folder: Path, strategy: str, options: dict[str, Any]) -> None:
    """Half of a run, saved in both ways; the weights beside it."""
    loop = Loop(rank, ranks, strategy=strategy, **options).run(HALF)
    state = {"model": loop.model.state_dict(), "kfac": loop.kfac.state_dict()}
    if ranks > 1:
        dcp.save(state, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(state, folder / "state.pt")
    loop.run(skip=HALF)
    if rank == 0:
        torch.save(loop.weights, folder / "end.pt")


def go_on(rank: int, ranks: int, folder: Path, strategy: str, options: dict[str, Any], way: str = "file") -> Any:
    loop = Loop(rank, ranks, strategy=strategy, **options)
    state = torch.load(folder / "state.pt", weights_only=True)
    loop.model.load_state_dict(state["model"])
    loop.kfac.load_state_dict(state["kfac"] if way == "file" else natgrad.read_dcp(folder / "dcp"))
    return loop.run(skip=HALF).weights


def save_all(rank: int, ranks: int, folder: Path, cases: list[Any]) -> None:
    for number, (strategy, options) in enumerate(cases):
        (folder / f"{number}").mkdir(exist_ok=True)
        save(rank, ranks, folder / f"{number}", strategy, options)


def go_on_all(rank: int, ranks: int, folder: Path, cases: list[Any]) -> list[Any]:
    return [go_on(rank, ranks, folder / f"{number}", *case) for number, case in enumerate(cases)]


CASES = [("comm-opt", OPTIONS), ("layer-wise", OPTIONS), ("hybrid", {**OPTIONS, "solver": "inverse"})]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_goes_on_on_any_number_of_ranks_and_under_any_strategy(tmp_path, ranks):
    for name in ("saved", "same", "other"):
        (tmp_path / name).mkdir()
    saved = tmp_path / "saved"
    run_on_ranks(save_all, saved, ranks, saved, CASES)
    ends = [torch.load(saved / f"{number}" / "end.pt", weights_only=False) for number in range(len(CASES))]
    # One rank that never stopped.
    for end, (_, options) in zip(ends, CASES, strict=True):
        close(end, Loop(0, 1, **options).run().weights)
    # The same ranks go on bit for bit, from one file and from torch.distributed.checkpoint.
    ways = [(*case, way) for case, way in zip(CASES, ("file", "dcp", "dcp"), strict=True)]
    for answer in run_on_ranks(go_on_all, tmp_path / "same", ranks, saved, ways):
        for end, weights in zip(ends, answer, strict=True):
            same(weights, end)
    # Other numbers of ranks, other strategies.
    turned = [(strategy, options) for (_, options), (strategy, _) in zip(CASES, CASES[1:] + CASES[:1], strict=True)]
    for answer in run_on_ranks(go_on_all, tmp_path / "other", 5 - ranks, saved, turned):
        for end, weights in zip(ends, answer, strict=True):
            close(weights, end)
    for number, (_, options) in enumerate(CASES):
        close(go_on(0, 1, saved / f"{number}", "auto", options), ends[number])


def saved_by_one(rank: int, ranks: int, folder: Path) -> Any:
    return go_on(rank, ranks, folder, "layer-wise", OPTIONS)


def test_what_one_rank_saved_several_go_on_with(tmp_path):
    save(0, 1, tmp_path, "auto", OPTIONS)
    end = torch.load(tmp_path / "end.pt", weights_only=False)
    for weights in run_on_ranks(saved_by_one, tmp_path, 2, tmp_path):
        close(weights, end)


def keys_of(rank: int, ranks: int, strategy: str) -> Any:
    state = Loop(rank, ranks, strategy=strategy).run(2).kfac.state_dict()
    return _shapes(state)


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(one) for name, one in value.items() if name not in ("generator", "metrics")}
    if isinstance(value, list):
        return [_shapes(one) for one in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def test_no_key_depends_on_ranks_or_strategy(tmp_path):
    alone = _shapes(Loop(0, 1).run(2).kfac.state_dict())
    for strategy in ("comm-opt", "layer-wise"):
        (tmp_path / strategy).mkdir()
        for state in run_on_ranks(keys_of, tmp_path / strategy, 2, strategy):
            assert state == alone


def without_decompositions(rank: int, ranks: int) -> Any:
    loop = Loop(rank, ranks, strategy="layer-wise", factor_update_steps=1, inv_update_steps=1).run(HALF)
    state = loop.kfac.state_dict(decompositions=False)
    assert state["decompositions"] is None
    again = Loop(rank, ranks, strategy="comm-opt", factor_update_steps=1, inv_update_steps=1)
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(state)
    return loop.run(skip=HALF).weights, again.run(skip=HALF).weights


def test_a_state_without_decompositions_is_decomposed_by_all_together(tmp_path):
    for went_on, loaded in run_on_ranks(without_decompositions, tmp_path, 2):
        close(loaded, went_on)


def between_backward_and_step(rank: int, ranks: int) -> tuple[Any, Any]:
    """Sums are on their way then: a state that is saved there has them all the same."""
    loop = Loop(rank, ranks, factor_update_steps=1, inv_update_steps=1, strategy="layer-wise").run(2)
    for number, (x, y) in enumerate(batches(4)):
        if number >= 2:
            loop.optimizer.zero_grad()
            loss_of(loop.wrapped(loop.shard(x)), loop.shard(y)).backward()
            loop.kfac.state_dict()
            loop.kfac.gather_blocks()
            loop.optimizer.step()
    return loop.weights, [float(f.weight) for block in loop.kfac.gather_blocks() for f in block.factors()]


def test_a_state_that_is_saved_before_the_step_loses_nothing(tmp_path):
    loop = Loop(0, 1, factor_update_steps=1, inv_update_steps=1).run(4)
    for weights, rows in run_on_ranks(between_backward_and_step, tmp_path, 2):
        close(weights, loop.weights)
        assert rows == pytest.approx([float(f.weight) for block in loop.kfac.blocks for f in block.factors()])


def one_does_not_come(rank: int, ranks: int) -> tuple[list[str], int, Any]:
    loop = Loop(rank, ranks, strategy="comm-opt").run(HALF)
    texts: list[str] = []
    if rank == 0:
        with problem_of() as texts:
            loop.kfac.state_dict(wait=0.3)
    else:
        time.sleep(0.6)
        with problem_of() as texts:  # that save was given up: told at once
            loop.kfac.state_dict(wait=30)
    if rank == 0:
        with problem_of() as more:  # alone again
            loop.kfac.state_dict(wait=0.3)
        texts += more
    loop.run(skip=HALF)  # nothing is broken: training goes on, and a later save works
    state = loop.kfac.state_dict()
    return texts, state["step"], loop.weights


def test_saving_without_all_ranks_is_refused_and_training_goes_on(tmp_path):
    (first, step, weights), (second, other, others) = run_on_ranks(one_does_not_come, tmp_path, 2)
    assert "state_dict() needs all 2 ranks: rank 1 did not come within 0.3 s" in first[0]
    assert "state_dict() needs all 2 ranks: another one had given up by then" in second[0]
    assert "rank 1 did not come" in first[1]
    assert step == other == STEPS
    same(weights, others)
    close(weights, Loop(0, 1).run().weights)


def saving_on_sigterm(rank: int, ranks: int, folder: Path, signalled: list[int]) -> tuple[int, list[str], bool]:
    """As scripts do it: a handler that only notes the signal, and a save between steps."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    loop = Loop(rank, ranks, strategy="layer-wise").run(2)
    texts: list[str] = []
    if rank in signalled:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    if asked:
        with problem_of() as texts:
            state = loop.kfac.state_dict(wait=0.5)
            if rank == 0:
                torch.save(state, folder / "kfac.pt")
    loop.run(4, skip=2)
    return loop.kfac.steps, texts, bool(asked)


def test_saving_on_sigterm_works_when_all_ranks_get_it(tmp_path):
    answers = run_on_ranks(saving_on_sigterm, tmp_path, 2, tmp_path, [0, 1])
    assert answers == [(4, [], True)] * 2
    assert torch.load(tmp_path / "kfac.pt", weights_only=True)["step"] == 2


def test_saving_on_sigterm_is_refused_when_one_does_not(tmp_path):
    (steps, texts, _), (others, silence, asked) = run_on_ranks(saving_on_sigterm, tmp_path, 2, tmp_path, [0])
    assert steps == others == 4
    assert "rank 1 did not come within 0.5 s" in texts[0]
    assert (silence, asked) == ([], False)
    assert not (tmp_path / "kfac.pt").exists()


def different_states(rank: int, ranks: int) -> list[str]:
    loop = Loop(rank, ranks)
    states = [loop.kfac.state_dict(), loop.run(2).kfac.state_dict()]
    with problem_of() as texts:
        loop.kfac.load_state_dict(states[rank])
    return texts


def test_ranks_that_load_different_states_are_told(tmp_path):
    for texts in run_on_ranks(different_states, tmp_path, 2):
        assert (
            "the ranks load different checkpoints: rank 0 one of step 0 with 0 blocks, rank 1 one of step 2" in texts[0]
        )


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint of torch.distributed.checkpoint"):
        natgrad.read_dcp(tmp_path)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(KeyError, match="has no 'kfac'; it has model"):
        natgrad.read_dcp(tmp_path / "other")


def draws(rank: int, ranks: int, folder: Path, *, again: bool) -> Any:
    loop = Loop(rank, ranks, fisher="sampled", generator=torch.Generator().manual_seed(rank))
    if again:
        state = torch.load(folder / "state.pt", weights_only=True)
        loop.model.load_state_dict(state["model"])
        loop.kfac.load_state_dict(state["kfac"])
    else:
        loop.run(HALF)
        state = {"model": loop.model.state_dict(), "kfac": loop.kfac.state_dict()}
        if rank == 0:
            torch.save(state, folder / "state.pt")
    return loop.run(skip=HALF).weights


def test_every_rank_goes_on_with_its_own_generator_and_new_ones_draw_anew(tmp_path):
    for name in ("same", "more"):
        (tmp_path / name).mkdir()
    first, second = run_on_ranks(partial(draws, again=False), tmp_path, 2, tmp_path)
    same(first, second)
    for weights in run_on_ranks(partial(draws, again=True), tmp_path / "same", 2, tmp_path):
        same(weights, first)
    more = run_on_ranks(partial(draws, again=True), tmp_path / "more", 3, tmp_path)
    for weights in more:
        same(weights, more[0])


MIDDLE: dict[str, Any] = {"factor_update_steps": 4, "inv_update_steps": 4, "kl_clip": 1e-3}
DAMAGED = [("comm-opt", MIDDLE), ("layer-wise", MIDDLE), ("hybrid", {**MIDDLE, "solver": "inverse"})]


def go_on_damaged(rank: int, ranks: int, folder: Path) -> list[Any]:
    with pytest.warns(natgrad.NatgradWarning, match="the checkpoint's decompositions of .* hold NaN or inf"):
        return go_on_all(rank, ranks, folder, DAMAGED)


def test_decompositions_that_are_not_finite_are_made_again_by_all_ranks(tmp_path):
    for number, (_, options) in enumerate(DAMAGED):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        loop = Loop(0, 1, **options).run(HALF)
        state = {"model": loop.model.state_dict(), "kfac": loop.kfac.state_dict()}
        for entry in list(state["kfac"]["decompositions"].values())[::2]:
            entry["scale"] = entry["scale"] * float("nan")
        torch.save(state, folder / "state.pt")
    ends = go_on_damaged(0, 1, tmp_path)
    for answer in run_on_ranks(go_on_damaged, tmp_path, 2, tmp_path):
        for weights, end in zip(answer, ends, strict=True):
            close(weights, end)

"""What all ranks must do in the same step: K-FAC's state and layers are put together from the parts that each holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.training.test_resume import CPU, OFTEN, Quiet, digits, last, newest

from natgrad import data
from natgrad.kfac import KFAC
from natgrad.training import stop as stop_module
from natgrad.training import trainer as trainer_module
from natgrad.training.checkpoints import CheckpointError, Checkpoints
from natgrad.training.events import Finished
from natgrad.training.ranks import Ranks
from natgrad.training.run import run
from natgrad.training.stop import Agreed, Stop
from natgrad.training.trainer import DivergedError, Trainer
from ranks import run_on_ranks


class Collective:
    """Makes KFAC ask all other ranks before it gives its state or layers, and notes when it did."""

    def __init__(self, ranks: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._ranks, self._step = ranks, 0
        usual = trainer_module.seed_step

        def seed_step(seed: int, step: int, these: Any) -> None:
            self._step = step + 1
            usual(seed, step, these)

        trainer_module.seed_step = seed_step
        for name in ("state_dict", "layers"):
            setattr(KFAC, name, self._noted(name, getattr(KFAC, name)))

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*given: Any, **options: Any) -> Any:
            boxes: list[Any] = [None] * self._ranks
            dist.all_gather_object(boxes, (name, self._step))
            assert boxes == [boxes[0]] * self._ranks
            self.calls.append(boxes[0])
            return function(*given, **options)

        return instead


def trained(rank: int, ranks: int, folder: Path, recipe: Any) -> tuple[list[tuple[str, int]], Finished]:
    these, collective = Ranks(rank=rank, count=ranks, device=CPU, hosts=dist.new_group()), Collective(ranks)
    return collective.calls, run(recipe, folder, name="x", ranks=these, listener=Quiet(), resume=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_ask_kfac_for_its_state_and_layers_together(tmp_path: Path, ranks: int) -> None:
    few = ["training.steps=12", "training.evaluate_every=0.2", "training.batch=30", OFTEN]
    answers = run_on_ranks(trained, tmp_path, ranks, tmp_path / "run", digits(*few))
    calls, finished = answers[0]
    assert all(others == calls for others, _ in answers)
    evaluations = [step for name, step in calls if name == "layers"]
    saves = [step for name, step in calls if name == "state_dict"]
    assert 12 in evaluations
    assert set(evaluations) < set(saves)  # the others were made by the clock
    assert saves == sorted(set(saves))
    assert all(other.checkpoint == finished.checkpoint and other.saved for _, other in answers)
    assert last(tmp_path / "run")["step"] == newest(tmp_path / "run") == 12


def with_a_full_disk(rank: int, ranks: int, folder: Path, recipe: Any, fails: int) -> Any:
    usual, left = Checkpoints.save, [fails]

    def save(self: Checkpoints, state: Any, *, step: int) -> Path:
        assert rank == 0
        left[0] -= 1
        if left[0] >= 0:
            raise CheckpointError("the disk is full")
        return usual(self, state, step=step)

    Checkpoints.save = save  # type: ignore[method-assign]
    return trained(rank, ranks, folder, recipe)


@pytest.mark.parametrize(("fails", "saved"), [(1, True), (2, False)])
def test_a_checkpoint_that_the_first_rank_cannot_write_is_made_again_by_all(
    tmp_path: Path, fails: int, saved: bool
) -> None:
    answers = run_on_ranks(with_a_full_disk, tmp_path, 2, tmp_path / "run", digits("training.steps=3"), fails)
    for calls, finished in answers:
        assert [step for name, step in calls if name == "state_dict"] == [3, 3]
        assert finished.saved is saved
        assert finished.checkpoint == (tmp_path / "run/checkpoints/step-00000003.pt" if saved else None)


def diverged(rank: int, ranks: int, folder: Path) -> tuple[str, list[bool]]:
    recipe, these = digits("training.steps=4"), Ranks(rank=rank, count=ranks, device=CPU, hosts=dist.new_group())
    cases = data.load(recipe.data, seed=0, place=data.Place(device=CPU, rank=rank, ranks=ranks))
    keeps = Checkpoints(folder, keep=1)
    one = Trainer(recipe, cases, ranks=these, listener=Quiet(), checkpoints=keeps)  # type: ignore[arg-type]
    one.train(Stop(these))
    if rank == 1:
        with torch.no_grad():
            next(one.model.parameters()).fill_(torch.nan)
    try:
        one.save()
    except DivergedError as error:
        return str(error), [bool(one.saved_at)]
    return "", []


def test_weights_that_are_no_numbers_on_one_rank_are_told_by_all(tmp_path: Path) -> None:
    for text, _ in run_on_ranks(diverged, tmp_path, 2, tmp_path / "checkpoints"):
        assert text.startswith(
            "the weights are not finite after step 4: nothing is saved; the last good checkpoint is "
        )
        assert "step-00000004.pt" in text


def agreed(rank: int, ranks: int, wishes: list[list[bool]], signals: list[list[int]]) -> list[Agreed]:
    """What is agreed on, time after time, where each rank has its own wishes and signals."""
    stop, found = Stop(Ranks(rank=rank, count=ranks, device=CPU, hosts=dist.new_group())), []
    with stop.listening():
        for save, number in zip(wishes[rank], signals[rank], strict=True):
            if number:
                os.kill(os.getpid(), number)
            found.append(stop.agreed(save=save))
    return found


def test_what_one_rank_wants_all_do_when_they_ask_next(tmp_path: Path) -> None:
    no, save, both = (Agreed(stop=stop, save=save) for stop, save in ((False, False), (False, True), (True, True)))
    wishes = [[True, True, True, False, True, False], [False] * 6]
    signals = [[0] * 6, [0, 0, 0, 0, 15, 0]]
    found = run_on_ranks(agreed, tmp_path, 2, wishes, signals)
    assert found[0] == found[1]
    # The second wish was on its way when the first was granted, and is not granted once more.
    assert found[0] == [no, save, no, save, no, both]


def test_alone_a_wish_is_granted_at_once() -> None:
    stop = Stop(Ranks(device=CPU))
    assert stop.agreed(save=True) == (False, True)
    assert stop.agreed() == (False, False)
    stop._catch(15, None)
    assert stop.agreed(save=True) == (True, True)
    assert stop.reason == "SIGTERM"
    assert set(stop_module.SIGNALS) == {2, 15}

"""What goes on from a checkpoint must be the same run, on all ranks, or say that it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from natgrad import data, recipes, training
from natgrad.training import run as run_module
from natgrad.training import trainer as trainer_module
from natgrad.training.checkpoints import CheckpointError, Checkpoints, load
from natgrad.training.events import Listener
from natgrad.training.ranks import Ranks
from natgrad.training.run import run
from natgrad.training.stop import Stop
from natgrad.training.trainer import DivergedError, Trainer
from ranks import run_on_ranks

CPU = torch.device("cpu")
SHORT = ("training.epochs=2", "training.log_every=5")


class Kept(Listener):
    def __init__(self) -> None:
        self.warnings, self.evaluations, self.told = [], [], []

    def warned(self, text):
        self.warnings.append(text)

    def evaluated(self, event):
        self.evaluations.append(event)

    def progress(self, event):
        self.told.append(event)


def train(folder: Path, *overrides: str, ranks: Ranks | None = None, resume: bool = False):
    listener = Kept()
    recipe = recipes.load("digits", [*SHORT, *overrides])
    finished = run(recipe, folder, name="x", ranks=ranks or Ranks(device=CPU), listener=listener, resume=resume)
    return finished, listener


def trainer(*overrides: str) -> Trainer:
    recipe = recipes.load("digits", [*SHORT, *overrides])
    cases = data.load(recipe.data, seed=0, place=data.Place(device=CPU))
    return Trainer(recipe, cases, ranks=Ranks(device=CPU), listener=Kept())


def test_another_batch_would_be_other_epochs(tmp_path):
    train(tmp_path / "run", "training.steps=5")
    with pytest.raises(CheckpointError, match=r"an epoch had 15 steps and has 30 now. Keep the product of"):
        train(tmp_path / "run", "training.batch=50", resume=True)


def on_another_number(rank: int, ranks: int, folder: Path, batch: int) -> str:
    import torch.distributed as dist

    these = Ranks(rank=rank, count=ranks, device=CPU, hosts=dist.group.WORLD)
    try:
        _, kept = train(folder, f"training.batch={batch}", ranks=these, resume=True)
    except CheckpointError as error:
        return str(error)
    return " ".join(kept.warnings)


def test_ranks_may_change_where_the_batch_of_all_stays(tmp_path):
    train(tmp_path / "run", "training.steps=5")
    refused = run_on_ranks(on_another_number, tmp_path, 2, tmp_path / "run", 100)
    assert all("an epoch had 15 steps and has 7 now" in text for text in refused)
    (tmp_path / "again").mkdir()
    told, silent = run_on_ranks(on_another_number, tmp_path / "again", 2, tmp_path / "run", 50)
    assert "written by 1 ranks, and now there are 2" in told
    assert silent == ""


def unreadable_on_one(rank: int, ranks: int, folder: Path) -> str:
    if rank == 1:
        run_module.load_checkpoint = _fail
    return on_another_number(rank, ranks, folder, 50)


def _fail(*_, **__):
    raise CheckpointError("no such file")


def test_a_rank_that_cannot_read_the_checkpoint_stops_all(tmp_path):
    train(tmp_path / "run", "training.steps=5")
    for text in run_on_ranks(unreadable_on_one, tmp_path, 2, tmp_path / "run"):
        assert text == "rank 1: no such file; all ranks must see the folder of the run"


def test_a_best_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    save = Checkpoints.save

    def failing(self, state, *, step):
        if step == 30:
            raise CheckpointError("the disk is full")
        return save(self, state, step=step)

    monkeypatch.setattr(Checkpoints, "save", failing)
    finished, kept = train(tmp_path / "run")
    assert [event.best for event in kept.evaluations] == [True, True]
    assert finished.best.step == load(tmp_path / "run/checkpoints/best.pt").step == 15
    assert not finished.saved
    assert finished.checkpoint.name == "step-00000015.pt"


def test_a_best_file_that_cannot_be_made_is_worth_a_word_only(tmp_path, monkeypatch):
    train(tmp_path / "run", "training.steps=15")

    def failing(self, path):
        raise CheckpointError("no links here")

    monkeypatch.setattr(Checkpoints, "mark_best", failing)
    _, kept = train(tmp_path / "run", "training.steps=16", resume=True)
    assert "no links here" in kept.warnings


class Own(torch.optim.SGD):
    """With an option that its groups do not hold."""

    def __init__(self, params, lr, momentum=0.0, lookahead=3):
        super().__init__(params, lr=lr, momentum=momentum)


def test_options_of_ones_own_optimizer(monkeypatch):
    monkeypatch.setattr(torch.optim, "Own", Own, raising=False)
    name = "optimizer.name=torch.optim:Own"
    first = trainer(name, "optimizer.lookahead=5", "optimizer.momentum=0.9")
    second = trainer(name, "optimizer.lookahead=5")
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["momentum"] == 0.0  # taken out of the recipe


def test_the_weights_of_a_checkpoint_are_those_that_were_evaluated(tmp_path):
    for polyak in ("default", "0.9"):
        finished, kept = train(tmp_path / polyak, f"training.polyak={polyak}")
        model = trainer().model.eval()
        model.load_state_dict(training.weights(finished.checkpoint))
        cases = trainer().data.test
        inputs, targets = next(cases.once(batch=1000))
        accuracy = (model(inputs).argmax(1) == targets).double().mean()
        assert kept.evaluations[-1].accuracy == pytest.approx(float(accuracy), abs=1e-12)


def test_classes_are_in_the_checkpoint_and_changed_data_is_told(tmp_path):
    finished, _ = train(tmp_path / "run", "training.steps=5")
    path = finished.checkpoint
    state = load(path).state
    assert state["labels"] == [str(digit) for digit in range(10)]
    Checkpoints(path.parent, keep=1).save({**state, "cases": 1400, "steps_per_epoch": 14}, step=5)
    _, kept = train(tmp_path / "run", "training.steps=6", resume=True)
    assert "the data has changed since the checkpoint: other cases, or other classes" in kept.warnings


def test_the_damping_that_is_told_is_that_of_the_step():
    one = trainer("kfac.damping={schedule='steps', value=0.01, factor=0.5, at=[1]}", "training.steps=20")
    one.train(Stop(one.ranks))
    assert {event.step: event.damping for event in one.listener.told} == {5: 0.01, 10: 0.01, 15: 0.01, 20: 0.005}


def test_test_losses_have_no_smoothing():
    one = trainer("training.label_smoothing=0.2", "training.steps=15")
    one.train(Stop(one.ranks))
    inputs, targets = next(one.data.test.once(batch=1000))
    with torch.no_grad():
        loss = functional.cross_entropy(one.model.eval()(inputs), targets)
    assert one.listener.evaluations[-1].loss == pytest.approx(float(loss), rel=1e-6)


def test_what_the_recipe_says_now_and_said_before_is_told(tmp_path):
    train(tmp_path / "run", "training.steps=5")
    _, kept = train(tmp_path / "run", "training.steps=5", "kfac.damping=0.01", resume=True)
    assert kept.warnings == ["the recipe has changed since: kfac.damping was default and is 0.01"]
    _, kept = train(tmp_path / "run", "training.steps=5", "kfac.damping=0.01", resume=True)
    assert kept.warnings == []


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(tmp_path):
    finished, _ = train(tmp_path / "run", "training.steps=5")
    finished.checkpoint.unlink()
    (tmp_path / "run/checkpoints/best.pt").unlink()
    _, kept = train(tmp_path / "run", "training.steps=5", resume=True)
    assert kept.warnings == ["there is no checkpoint to go on from: the run begins anew"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "cat").mkdir()
    for resume in (False, True):
        with pytest.raises(run_module.RunError, match=r"holds something else \(cat, ...\): choose another --out"):
            train(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["cat"]


def test_slow_steps_are_told_before_their_turn(monkeypatch):
    monkeypatch.setattr(trainer_module, "PATIENCE", 0.0)
    one = trainer("training.steps=3", "training.log_every=100")
    one.train(Stop(one.ranks))
    assert [event.step for event in one.listener.told] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
def test_weights_that_give_no_numbers_end_the_run(tmp_path):
    with pytest.raises(
        DivergedError, match=r"the test loss is (nan|inf) for the second time, after step 30.*step-000000"
    ):
        train(tmp_path / "run", "kfac.kl_clip=none", "optimizer.lr=1e8", "training.epochs=20")

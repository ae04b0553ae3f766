"""The training loop against computations by hand: evaluation, means, learning rates, when to evaluate, what to keep."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import data, recipes
from natgrad.data import digits
from natgrad.training.checkpoints import Checkpoints, load
from natgrad.training.events import Evaluated, Progress
from natgrad.training.ranks import Ranks
from natgrad.training.stop import Stop
from natgrad.training.trainer import Trainer, seed_step
from ranks import run_on_ranks

CPU = torch.device("cpu")
SMALL = [f"model.name={__name__}:network", "training.log_every=1", "kfac.inv_update_steps=5"]


class Remembers:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Progress] = []
        self.tests: list[Evaluated] = []
        self.warnings: list[str] = []

    def progress(self, event: Progress) -> None:
        self.told.append(event)

    def evaluated(self, event: Evaluated) -> None:
        self.tests.append(event)

    def warned(self, text: str) -> None:
        self.warnings.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *event: None


def network(*, num_classes: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(36, num_classes),
    )


def autoencoder(*, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))


def prepared(
    *overrides: str, recipe: recipes.Recipe | None = None, ranks: Ranks | None = None, folder: Path | None = None
) -> Trainer:
    """A trainer of digits, 15 steps an epoch; its listener remembers."""
    recipe, ranks = recipe or recipes.load("digits", [*SMALL, *overrides]), ranks or Ranks(device=CPU)
    training = recipe.training
    place = data.Place(device=CPU, rank=ranks.rank, ranks=ranks.count, channels_last=training.channels_last)
    cases = data.load(recipe.data, seed=training.seed, place=place, reconstruct=training.loss == "reconstruction")
    kept = None if folder is None else Checkpoints(folder, keep=training.keep)
    return Trainer(recipe, cases, ranks=ranks, listener=Remembers(), checkpoints=kept)


def trained(*overrides: str, folder: Path | None = None) -> Trainer:
    trainer = prepared(*overrides, folder=folder)
    trainer.train(Stop(trainer.ranks))
    return trainer


def evaluated_by_hand(model: nn.Module) -> tuple[float, float]:
    """Loss and accuracy of all test cases at once, from scikit-learn's own arrays."""
    images, labels = digits.read()
    with torch.no_grad():
        logits, targets = model.eval()(images[1500:] / 16).double(), labels[1500:]
    return float(functional.cross_entropy(logits, targets)), float((logits.argmax(1) == targets).double().mean())


# Evaluation


@pytest.mark.parametrize("batch", [1000, 100, 297])
def test_an_evaluation_is_a_mean_over_all_test_cases(batch: int) -> None:
    trainer = trained("training.steps=5", f"training.test_batch={batch}")
    event = trainer.listener.tests[-1]
    loss, accuracy = evaluated_by_hand(trainer.model)
    assert math.isclose(event.loss, loss, rel_tol=1e-6)
    assert event.accuracy == accuracy
    assert (event.step, event.cases, event.top5) == (5, 297, None)
    assert event.epoch == 5 / 15


def _on_a_rank(rank: int, ranks: int, recipe: recipes.Recipe) -> tuple[Evaluated, list[float], tuple[float, float]]:
    these = Ranks(rank=rank, count=ranks, device=CPU, hosts=torch.distributed.new_group(backend="gloo"))
    trainer = prepared(recipe=recipe, ranks=these)
    rates: list[float] = []
    trainer.listener.stepped = lambda step: rates.append(trainer.optimizer.param_groups[0]["lr"])
    trainer.train(Stop(these))
    return trainer.listener.tests[-1], rates, evaluated_by_hand(trainer.model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_an_evaluation_and_all_know_its_result(tmp_path: Path, ranks: int) -> None:
    # 297 cases on two ranks, 20 at a time: seven batches and one of 9 or 8.
    recipe = recipes.load("digits", [*SMALL, "training.steps=3", "training.test_batch=20"])
    answers = run_on_ranks(_on_a_rank, tmp_path, ranks, recipe)
    for event, _, (loss, accuracy) in answers:
        assert math.isclose(event.loss, loss, rel_tol=1e-6)
        assert event.accuracy == accuracy
        assert event.cases == 297


def test_the_learning_rate_may_be_multiplied_by_the_number_of_ranks(tmp_path: Path) -> None:
    rate = ['optimizer.lr={schedule="cosine", value=0.3, over=2}', "optimizer.lr_times_ranks=true"]
    recipe = recipes.load("digits", [*SMALL, "training.steps=3", *rate])
    for _, found, _ in run_on_ranks(_on_a_rank, tmp_path, 2, recipe):
        assert found == pytest.approx([0.3 * (1 + math.cos(math.pi * step / 14)) for step in range(3)])


def test_polyak_averages_are_evaluated_and_the_weights_are_back_afterwards() -> None:
    trainer = prepared("training.steps=6", "training.polyak=0.5", "training.test_batch=100")
    seen: list[Tensor] = []
    weights: list[Tensor] = []
    trainer.listener.evaluating = lambda done, total: seen.append(trainer.model[0].weight.detach().clone())
    trainer.listener.stepped = lambda step: weights.append(trainer.model[0].weight.detach().clone())
    trainer.train(Stop(trainer.ranks))
    mean = weights[0]
    for weight in weights[1:]:
        mean = 0.5 * mean + 0.5 * weight
    assert len(seen) == 3
    for weight in seen:
        torch.testing.assert_close(weight, mean)
    assert torch.equal(trainer.model[0].weight, weights[-1])
    assert trainer.model.training
    event = trainer.listener.tests[-1]
    loss, accuracy = evaluated_by_hand(trainer.average.model)
    assert math.isclose(event.loss, loss, rel_tol=1e-6)
    assert event.accuracy == accuracy


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (1, [15, 30, 45]),
        (1 / 3, [5, 10, 15, 20, 25, 30, 35, 40, 45]),
        (2, [30, 45]),
        (0.001, list(range(1, 46))),
        (9, [45]),
        pytest.param(
            0.5,
            [8, 15, 23, 30, 38, 45],
        ),
    ],
)
def test_evaluations_come_every_so_many_epochs_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, every: float, steps: list[int]
) -> None:
    monkeypatch.setattr(Trainer, "_sums_of_test", lambda *_: torch.ones(5, dtype=torch.float64))
    trainer = trained("training.epochs=3", f"training.evaluate_every={every}", "kfac.enabled=false")
    assert [event.step for event in trainer.listener.tests] == steps


def test_the_best_evaluation_and_the_last_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = iter([50, 90, 90, 70, 90])
    losses = iter([1.0, 3.0, 2.0, 0.5, 2.0])

    def sums(self: Trainer, stop: Stop) -> Tensor:
        return torch.tensor([next(losses) * 100, next(correct), 0, 100, 100], dtype=torch.float64)

    monkeypatch.setattr(Trainer, "_sums_of_test", sums)
    few = ["training.steps=10", f"training.evaluate_every={2 / 15}", "training.keep=2", "kfac.enabled=false"]
    trainer = trained(*few, folder=tmp_path)
    assert [event.best for event in trainer.listener.tests] == [True, True, True, False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "step-00000008.pt", "step-00000010.pt"]
    assert load(tmp_path / "best.pt").step == 6
    assert trainer.best == trainer.listener.tests[2]


def test_without_accuracy_the_smallest_loss_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, math.nan, 1.0, 2.0])
    monkeypatch.setattr(
        Trainer, "_sums_of_test", lambda *_: torch.tensor([next(losses), 0, 0, 0, 1], dtype=torch.float64)
    )
    few = ["training.loss=reconstruction", f"model.name={__name__}:autoencoder", "kfac.enabled=false"]
    trainer = trained(*few, "training.steps=4", "training.evaluate_every=0.01", folder=tmp_path)
    assert [event.best for event in trainer.listener.tests] == [True, False, True, False]
    assert load(tmp_path / "best.pt").step == 3


# Training


def test_progress_tells_means_over_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int]] = []
    usual = Trainer._loss

    def loss(self: Trainer, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output, value = usual(self, model, inputs, targets)
        if torch.is_grad_enabled():
            seen.append((float(value.detach()), int((output.argmax(1) == targets).sum())))
        return output, value

    monkeypatch.setattr(Trainer, "_loss", loss)
    trainer = trained("training.steps=18", "training.log_every=4")
    assert [event.step for event in trainer.listener.told] == [4, 8, 12, 16, 18]
    for event in trainer.listener.told:
        steps = seen[4 * ((event.step - 1) // 4) : event.step]
        assert math.isclose(event.loss, sum(loss for loss, _ in steps) / len(steps), rel_tol=1e-12)
        assert event.accuracy == sum(correct for _, correct in steps) / (100 * len(steps))
        assert event.epoch == event.step / 15


def test_the_time_of_a_step_is_a_mean_over_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = prepared("training.epochs=2", "training.log_every=5")
    take = trainer.clock.take
    monkeypatch.setattr(trainer.clock, "take", lambda: ({"model": 10.0}, take()[1]))
    trainer.train(Stop(trainer.ranks))
    assert [event.step_seconds for event in trainer.listener.told] == [2.0] * 6


def test_learning_rates_follow_their_schedule_in_epochs() -> None:
    rate = 'optimizer.lr={schedule="steps", value=0.2, factor=0.5, at=[1], warmup=0.4, warmup_start=0.5}'
    trainer = trained("training.epochs=2", "kfac.enabled=false", rate)
    rates = [event.lr for event in trainer.listener.told]
    assert rates[:6] == pytest.approx([0.1 + 0.1 * step / 6 for step in range(6)])
    assert rates[6:] == pytest.approx([0.2] * 9 + [0.1] * 15)


@pytest.mark.parametrize(("steps", "taken"), [(7, 7), (20, 20), (100, 30)])
def test_steps_are_limited_wherever_that_is(steps: int, taken: int) -> None:
    trainer = trained("training.epochs=2", f"training.steps={steps}", "kfac.enabled=false")
    assert trainer.step == trainer.total_steps == trainer.listener.tests[-1].step == taken


def first_batch(trainer: Trainer) -> tuple[Tensor, Tensor]:
    return next(iter(trainer.data.train.epoch(0, batch=100)))


def test_label_smoothing_is_that_of_torch() -> None:
    inputs, targets = first_batch(trainer := prepared("training.label_smoothing=0.2"))
    trainer.model.train()
    loss = functional.cross_entropy(trainer.model(inputs), targets, label_smoothing=0.2)
    told = trained("training.label_smoothing=0.2", "training.steps=1").listener.told[0]
    assert math.isclose(told.loss, float(loss.detach()), rel_tol=1e-6)


def test_a_reconstruction_is_of_bernoulli_pixels_summed_over_a_case() -> None:
    few = ["training.loss=reconstruction", f"model.name={__name__}:autoencoder", "training.test_batch=100"]
    inputs, _ = first_batch(trainer := prepared(*few))
    chance = torch.sigmoid(trainer.model(inputs)).double()
    pixels = inputs.flatten(1).double()
    loss = -(pixels * chance.log() + (1 - pixels) * (1 - chance).log()).sum(1).mean()
    after = trained(*few, "training.steps=1")
    assert math.isclose(after.listener.told[0].loss, float(loss.detach()), rel_tol=1e-6)
    assert after.listener.told[0].accuracy is None

    images, _ = digits.read()
    pixels = images[1500:].flatten(1) / 16
    with torch.no_grad():
        loss = functional.binary_cross_entropy_with_logits(after.model(pixels), pixels, reduction="sum") / 297
    assert math.isclose(after.listener.tests[0].loss, float(loss), rel_tol=1e-6)
    assert after.listener.tests[0].accuracy is None


def test_adaptive_damping_moves() -> None:
    trainer = trained("kfac.damping=adaptive", "training.steps=12")
    assert len({event.damping for event in trainer.listener.told}) > 1
    assert trainer.listener.told[-1].loss < trainer.listener.told[0].loss


def test_what_is_random_in_a_step_follows_from_seed_step_and_rank() -> None:
    def draw(seed: int, step: int, rank: int) -> list[float]:
        seed_step(seed, step, Ranks(rank=rank, count=3, device=CPU))
        return torch.rand(4).tolist()

    places = [(seed, step, rank) for seed in (0, 1, 7) for step in (0, 1, 2, 10**6) for rank in range(3)]
    drawn = {place: draw(*place) for place in places}
    torch.rand(5)
    assert {place: draw(*place) for place in places} == drawn
    assert len({number for numbers in drawn.values() for number in numbers}) == 4 * len(places)


@pytest.mark.parametrize("option", ["training.seed=0", "training.seed=1"])
def test_a_run_with_dropout_and_sampled_targets_repeats_and_follows_the_seed(option: str) -> None:
    few = ["model.dropout=0.5", "kfac.fisher=sampled", "training.steps=6"]
    first = trained(*few)
    torch.rand(3)
    again = trained(*few, option)
    same = all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert same == (option == "training.seed=0")


# Arithmetic


def test_a_compiled_model_trains_as_the_bare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # What surrounds the model is at stake here; to generate code for it would take longer than all of these tests.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled, bare = (trained("training.steps=4", f"training.compile={flag}") for flag in ("true", "false"))
    assert compiled.running is not compiled.model
    assert compiled.state_dict()["model"].keys() == bare.state_dict()["model"].keys()
    assert [event.loss for event in compiled.listener.told] == [event.loss for event in bare.listener.told]


def test_bf16_computes_in_it_and_keeps_the_weights_in_fp32() -> None:
    trainer = prepared("training.precision=bf16", "training.steps=12")
    kinds: set[torch.dtype] = set()
    trainer.model.register_forward_hook(lambda model, inputs, output: kinds.add(output.dtype))
    trainer.train(Stop(trainer.ranks))
    assert kinds == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert trainer.listener.told[-1].loss < 0.7 * trainer.listener.told[0].loss
    assert not trainer.listener.warnings


def test_channels_last_is_another_order_of_the_same_numbers() -> None:
    usual, last = (trained("training.steps=4", f"training.channels_last={flag}") for flag in ("false", "true"))
    weight, inputs = last.model[0].weight, first_batch(last)[0]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(usual.listener.told, last.listener.told, strict=True):
        assert math.isclose(a.loss, b.loss, rel_tol=1e-3)

"""Every recipe that comes with natgrad trains on tiny files in the real formats, and has its paper's numbers."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
import torch

from natgrad import data, models, recipes
from natgrad.recipes.objects import kfac_arguments, learning_rate
from natgrad.training.events import Evaluated, Listener, Progress
from natgrad.training.ranks import Ranks
from natgrad.training.stop import Stop
from natgrad.training.trainer import Trainer
from tiny_data import write_cifar10_binary, write_cifar10_python, write_classes, write_imagenet, write_text

IMAGENET = 1_281_167
EVERYWHERE = ("training.batch=4", "training.steps=2", "training.precision=fp32", "kfac.max_factor_size=64")
SMALLER = {
    "digits": (),
    "cifar10": (),
    "images": ("data.size=32", "data.resize=36", "data.workers=0"),
    "text": ("data.context=16", "model.context=16", "model.layers=2", "model.width=36"),
}
SMALLER_STILL = {
    "imagenet-alexnet": ("data.size=64", "data.resize=72", 'kfac.exclude=["classifier.[14].*"]'),
    "imagenet-resnet101": ('kfac.exclude=["layer3.*"]',),
    "imagenet-resnet152": ('kfac.exclude=["layer3.*"]',),
}
"""AlexNet's poolings want larger images; what is excluded are its two layers of 55 million weights, and the stage that
makes ResNets deeper than 50 layers.
"""


class Heard(Listener):
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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    root = tmp_path_factory.mktemp("data")
    return {
        "digits": None,
        "cifar10": write_cifar10_binary(root / "binary"),
        "images": write_imagenet(root / "imagenet"),
        "text": write_text(root / "text.txt"),
    }


def small(name: str, path: Path | None, *more: str) -> recipes.Recipe:
    kind = recipes.load(name).data.kind
    where = () if path is None else (f"data.path={path}",)
    return recipes.load(name, [*EVERYWHERE, *SMALLER[kind], *SMALLER_STILL.get(name, ()), *where, *more])


def trained(recipe: recipes.Recipe) -> tuple[Trainer, Heard]:
    ranks, heard = Ranks(device=torch.device("cpu")), Heard()
    cases = data.load(
        recipe.data,
        seed=0,
        place=data.Place(device=ranks.device),
        reconstruct=recipe.training.loss == "reconstruction",
    )
    with contextlib.closing(cases):
        trainer = Trainer(recipe, cases, ranks=ranks, listener=heard)
        trainer.train(Stop(ranks))
    return trainer, heard


@pytest.mark.parametrize("name", recipes.names())
def test_two_steps_and_an_evaluation_of_every_recipe(name: str, files: dict[str, Path | None]) -> None:
    trainer, heard = trained(small(name, files[recipes.load(name).data.kind]))
    assert trainer.step == 2
    assert math.isfinite(heard.told[-1].loss)
    assert heard.told[-1].predicted_kl is not None
    assert heard.told[-1].predicted_kl > 0
    assert [event.step for event in heard.tests] == [2]
    assert heard.tests[0].cases == trainer.data.test.cases
    assert math.isfinite(heard.tests[0].loss)
    assert not heard.warnings


def test_cifar10_as_its_python_version_and_a_folder_of_classes_train_too(tmp_path: Path) -> None:
    python, classes = write_cifar10_python(tmp_path / "python"), write_classes(tmp_path / "classes")
    for name, path in (("cifar10-convnet", python), ("folder", classes)):
        trainer, heard = trained(small(name, path))
        assert trainer.step == 2
        assert heard.tests[0].cases == trainer.data.test.cases > 0


@pytest.mark.parametrize("name", recipes.names())
def test_what_is_written_beside_the_results_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name)
    path = tmp_path / "recipe.toml"
    path.write_text(recipes.to_toml(recipe), encoding="utf-8")
    assert recipes.load(str(path)) == recipes.load(str(tmp_path)) == recipe


def test_a_written_recipe_is_written_the_same_again(tmp_path: Path) -> None:
    text = recipes.to_toml(recipes.load("digits"))
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    assert recipes.to_toml(recipes.load(str(tmp_path))) == text


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_says_what_it_is_in_a_line(name: str) -> None:
    assert 20 < len(recipes.load(name).summary) < 80


def test_the_simplest_recipe_comes_first() -> None:
    assert recipes.names()[:2] == ["digits", "digits-autoencoder"]


# The papers' numbers


def rate_by_epoch(recipe: recipes.Recipe, epochs: list[float], *, ranks: int, steps: int) -> list[float]:
    rate = learning_rate(recipe, ranks=ranks, steps_per_epoch=steps)
    return [rate(round(epoch * steps)) for epoch in epochs]


def test_cifar10_resnet32_has_the_numbers_of_pauloski_et_al() -> None:
    recipe = recipes.load("cifar10-resnet32")
    assert (recipe.model.name, recipe.training.batch, recipe.training.epochs) == ("resnet32", 128, 100)
    assert recipe.optimizer.options["momentum"] == 0.9
    for ranks in (1, 2, 4, 8):
        found = rate_by_epoch(recipe, [0, 5, 34, 35, 75, 90, 99], ranks=ranks, steps=50_000 // (128 * ranks))
        assert found == pytest.approx([ranks * one for one in (0.01, 0.1, 0.1, 0.01, 1e-3, 1e-4, 1e-4)])
    arguments = kfac_arguments(recipe, 390)
    assert (arguments["factor_update_steps"], arguments["inv_update_steps"]) == (1, 10)
    assert (arguments["kl_clip"], arguments["factor_decay"], arguments["solver"]) == (1e-3, 0.95, "eigen")


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_imagenet_resnets_have_the_numbers_of_pauloski_et_al(depth: int) -> None:
    recipe = recipes.load(f"imagenet-resnet{depth}")
    assert (recipe.model.name, recipe.training.batch, recipe.training.epochs) == (f"resnet{depth}", 32, 55)
    assert recipe.training.label_smoothing == 0.1
    assert recipe.optimizer.options["momentum"] == 0.9
    for ranks in (16, 64, 256):
        found = rate_by_epoch(recipe, [0, 5, 25, 35, 40, 45, 50], ranks=ranks, steps=IMAGENET // (32 * ranks))
        assert found == pytest.approx([0.0125 * ranks * one for one in (0.1, 1, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)])
    arguments = kfac_arguments(recipe, 2502)
    assert (arguments["kl_clip"], arguments["factor_decay"], arguments["solver"]) == (1e-3, 0.95, "eigen")


@pytest.mark.parametrize(("ranks", "interval"), [(16, 2000), (32, 1000), (64, 500), (128, 250), (256, 125)])
def test_imagenet_resnets_decompose_as_often_an_epoch_on_any_number_of_ranks(ranks: int, interval: int) -> None:
    recipe = recipes.load("imagenet-resnet50")
    arguments = kfac_arguments(recipe, IMAGENET // (recipe.training.batch * ranks))
    assert arguments["inv_update_steps"] == pytest.approx(interval, rel=2e-3)
    assert arguments["factor_update_steps"] == pytest.approx(interval / 10, abs=0.5)


@pytest.mark.parametrize("name", ["imagenet-googlenet", "imagenet-googlenet-bn", "imagenet-alexnet"])
def test_ba_et_als_networks_have_a_kl_bound_that_decays_every_half_epoch(name: str) -> None:
    recipe, steps = recipes.load(name), 1000
    arguments = kfac_arguments(recipe, steps)
    region = arguments["kl_clip"]
    assert region.of == "step"
    for half_epochs in (0, 1, 2, 10, 40):
        cap = 0.01 * 0.96**half_epochs
        assert [region.cap.at(half_epochs * steps // 2 + within) for within in (0, 499)] == pytest.approx([cap, cap])
    assert (arguments["damping"], arguments["damping_rule"], arguments["sharing"]) == (1e-3, "pi", "reduce")
    assert recipe.training.polyak is not None
    assert (recipe.data.resize, recipe.data.size, recipe.data.square, recipe.data.crop, recipe.data.flip) == (
        256,
        224,
        True,
        "random",
        False,
    )


def test_googlenet_is_trained_without_and_with_chunked_batch_norm() -> None:
    without, chunked = recipes.load("imagenet-googlenet").model, recipes.load("imagenet-googlenet-bn").model
    assert (without.name, without.norm) == ("googlenet", "default")
    assert (chunked.name, chunked.norm, chunked.norm_chunk) == ("googlenet", "chunked", 32)


def test_alexnets_first_linear_layer_has_three_factors() -> None:
    recipe = recipes.load("imagenet-alexnet")
    with torch.device("meta"):
        layer = models.build(recipe.model.name).classifier[1]
    assert layer.in_features == 9216 > kfac_arguments(recipe, 1)["doubly_factored_above"]

"""From a recipe to network, optimizer, schedules and K-FAC: what they become, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from natgrad import recipes, schedules
from natgrad.models import ChunkedBatchNorm2d
from natgrad.recipes import Recipe, RecipeError
from natgrad.recipes.objects import build_kfac, build_model, build_optimizer, kfac_arguments, learning_rate, schedule
from natgrad.recipes.values import SECTIONS
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.region import TrustRegion


def digits(*overrides: str) -> Recipe:
    return recipes.load("digits", overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        digits(*overrides)
    return str(refused.value)


# Networks


def test_the_number_of_classes_comes_from_the_data_unless_the_recipe_says_it() -> None:
    assert build_model(digits().model, classes=7)[-1].out_features == 7
    assert build_model(digits("model.num_classes=12").model, classes=7)[-1].out_features == 12
    assert build_model(digits().model)[-1].out_features == 10


def test_a_text_models_vocabulary_comes_from_the_data() -> None:
    recipe = recipes.load("text-gpt", ["model.layers=1", "model.width=12"])
    assert build_model(recipe.model, classes=33).head.out_features == 33


@pytest.mark.parametrize(
    ("norm", "kind"), [("default", nn.BatchNorm2d), ("batch", nn.BatchNorm2d), ("chunked", ChunkedBatchNorm2d)]
)
def test_the_norm_is_chosen_by_name(norm: str, kind: type[nn.Module]) -> None:
    chunk = ["model.norm_chunk=8"] if norm == "chunked" else []
    model = build_model(digits("model.name=resnet20", f"model.norm={norm}", *chunk).model)
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert {type(module) for module in norms} == {kind}
    assert all(module.chunk == 8 for module in norms if isinstance(module, ChunkedBatchNorm2d))


def test_without_a_norm() -> None:
    model = build_model(digits("model.name=resnet20", "model.norm=none").model)
    assert not any("Norm" in type(module).__name__ for module in model.modules())


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.name=digits_convnets"], "is no network (did you mean 'digits_convnet'?); there are alexnet,"),
        (["model.name=qqqq"], "model.name='qqqq' is no network; there are alexnet,"),
        (["model.num_clases=3"], "no option 'num_clases' (did you mean 'num_classes'?); it takes num_classes"),
        (["model.qqq=3"], "model: digits_convnet has no option 'qqq'; it takes num_classes"),
        (["model.options={a=1}"], "model: digits_convnet has no option 'options'; it takes num_classes"),
        (["model.norm=batch"], "model.norm: digits_convnet has no choice of normalisation"),
        (["model.name=gpt", "model.norm=batch"], "model.norm: gpt has no choice of normalisation"),
        (["model.name=gpt", "model.heads=5"], "width must be a multiple of heads, got width=768 and heads=5"),
        (["model.name=gpt", "model.dropout=3"], "dropout probability has to be between 0 and 1, but got 3"),
        (["model.name=autoencoder", "model.activation=relu"], "activation must be one of 'sigmoid', 'tanh', got"),
        (["model.name=autoencoder", "model.sizes=[64]"], "sizes must be two positive numbers or more"),
    ],
)
def test_networks_that_cannot_be(overrides: list[str], text: str) -> None:
    assert text in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_classes=-1"],
        ["model.name=gpt", "model.heads=0"],
        ["model.name=gpt", "model.vocabulary=-5"],
        ["model.name=vit", "model.patch=0"],
    ],
)
def test_impossible_numbers_of_a_network(overrides: list[str]) -> None:
    assert refusal(*overrides).startswith("model: ")


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        (["model.num_classes=ten"], "num_classes"),  # empty(): argument 'size' (position 1) must be tuple of ints
        (["model.name=gpt", "model.layers=six"], "layers"),  # 'str' object cannot be interpreted as an integer
        (["model.name=autoencoder", "model.sizes=64"], "sizes"),  # object of type 'int' has no len()
    ],
)
def test_a_wrong_type_of_a_networks_option_names_it(overrides: list[str], option: str) -> None:
    assert option in refusal(*overrides)


def test_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network.py").write_text(
        "from torch import nn\n"
        "def make(num_classes, width=8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))\n"
        "nothing = lambda num_classes: None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        model = build_model(digits("model.name=my_network:make", "model.width=5").model, classes=10)
        assert (model[1].out_features, model[2].out_features) == (5, 10)
        with pytest.raises(RecipeError, match="gave a NoneType, not an nn.Module"):
            build_model(digits("model.name=my_network:nothing").model, classes=10)
        with pytest.raises(RecipeError, match="model: .*unexpected keyword argument 'depth'"):
            build_model(digits("model.name=my_network:make", "model.depth=5").model, classes=10)
    finally:
        sys.modules.pop("my_network", None)


def test_a_class_of_torch_is_a_network() -> None:
    assert isinstance(build_model(digits("model.name=torch.nn:Identity").model, classes=10), nn.Identity)


BAD_PATHS = [
    ("no.module:x", "cannot be imported: No module named 'no'"),
    ("torch.nn:Idontity", "cannot be imported: module 'torch.nn' has no attribute 'Idontity'"),
    ("torch.nn:", "cannot be imported: "),
    (":", "cannot be imported: "),
    ("this is:x", "cannot be imported: No module named 'this is'"),
]


@pytest.mark.parametrize(("path", "text"), BAD_PATHS)
def test_what_cannot_be_imported(path: str, text: str) -> None:
    assert refusal(f"optimizer.name={path}").startswith(f"optimizer.name={path!r} {text}")
    with pytest.raises(RecipeError) as refused:
        build_model(dataclasses.replace(digits().model, name=path))
    assert str(refused.value).startswith(f"model.name={path!r} {text}")


@pytest.mark.parametrize("path", [path for path, _ in BAD_PATHS])
def test_a_network_that_cannot_be_imported_is_told_at_once(path: str) -> None:
    assert "cannot be imported" in refusal(f"model.name={path}")


def test_relative_imports() -> None:
    assert "cannot be imported" in refusal("optimizer.name=..here:x")


@pytest.mark.parametrize("text", ["def", "raise RuntimeError('no licence')"])
def test_a_file_that_fails_on_import(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert "my_broken" in refusal("optimizer.name=my_broken:Adam")


# Optimizers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("torch.optim:NAdam", torch.optim.NAdam),
    ],
)
def test_optimizers_by_name_get_their_options_and_the_first_learning_rate(name: str, kind: type) -> None:
    recipe = digits(f"optimizer.name={name}", "optimizer.weight_decay=0.25", "optimizer.lr=0.5")
    optimizer = build_optimizer(recipe, nn.Linear(2, 2), ranks=1, steps_per_epoch=10)
    assert type(optimizer) is kind
    assert (optimizer.defaults["weight_decay"], optimizer.defaults["lr"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["optimizer.name=sdg"], "optimizer.name='sdg' is no optimizer (did you mean 'sgd'?); there are sgd, adam,"),
        (["optimizer.name=torch"], 'there are sgd, adam, adamw, muon, or "package.module:Class" for your own'),
        (["optimizer.name=math:sqrt"], "optimizer 'math:sqrt': "),
        (["optimizer.name=builtins:dict"], "optimizer.name='builtins:dict' gave a dict, not an optimizer"),
        (["optimizer.momentun=0.9"], "unexpected keyword argument 'momentun' (did you mean 'momentum'?)"),
        (["optimizer.betas=[0.9, 0.99]"], "optimizer 'sgd': SGD.__init__() got an unexpected keyword argument 'betas'"),
        (["optimizer.momentum=-1"], "optimizer 'sgd': Invalid momentum value: -1"),
        (["optimizer.nesterov=true"], "optimizer 'sgd': Nesterov momentum requires a momentum and zero dampening"),
        (["optimizer.name=adam", "optimizer.betas=[0.9, 2]"], "optimizer 'adam': Invalid beta parameter at index 1: 2"),
    ],
)
def test_optimizers_that_cannot_be(overrides: list[str], text: str) -> None:
    assert text in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.name=adam", "optimizer.betas=[0.9]"],
        ["optimizer.name=adamw", "optimizer.fused=true", "optimizer.foreach=true"],
    ],
)
def test_impossible_options_of_an_optimizer(overrides: list[str]) -> None:
    assert refusal(*overrides).startswith("optimizer 'adam")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_take_a_step_of_this_kind(name: str) -> None:
    assert name in refusal(f"optimizer.name=torch.optim:{name}")


def test_a_learning_rate_may_grow_with_the_ranks() -> None:
    recipe = digits("optimizer.lr=0.1", "optimizer.lr_times_ranks=true")
    assert learning_rate(recipe, ranks=4, steps_per_epoch=10)(0) == pytest.approx(0.4)
    assert learning_rate(digits("optimizer.lr=0.1"), ranks=4, steps_per_epoch=10)(0) == 0.1


# Schedules


@pytest.mark.parametrize(
    ("table", "by_epoch"),
    [
        ({"schedule": "constant", "value": 2}, {0: 2, 9: 2}),
        ({"schedule": "steps", "value": 1, "factor": 0.5, "at": [2, 4]}, {0: 1, 1.9: 1, 2: 0.5, 4: 0.25}),
        ({"schedule": "exponential", "value": 1, "factor": 0.5}, {0: 1, 0.9: 1, 1: 0.5, 3: 0.125}),
        ({"schedule": "exponential", "value": 1, "factor": 0.5, "every": 0.5}, {0.4: 1, 0.5: 0.5, 1: 0.25}),
        ({"schedule": "cosine", "value": 1}, {0: 1, 10: 0.5, 20: 0}),
        ({"schedule": "cosine", "value": 1, "over": 4, "end": 0.5}, {0: 1, 2: 0.75, 4: 0.5, 9: 0.5}),
        ({"schedule": "constant", "value": 2, "warmup": 2}, {0: 0.2, 1: 1.1, 2: 2, 5: 2}),
        ({"schedule": "constant", "value": 2, "warmup": 2, "warmup_start": 0.5}, {0: 1, 2: 2}),
    ],
)
def test_schedules_count_in_epochs(table: dict[str, Any], by_epoch: dict[float, float]) -> None:
    found = schedule("kfac.damping", table, digits("training.epochs=20"), 10)
    assert {epoch: found(round(10 * epoch)) for epoch in by_epoch} == pytest.approx(by_epoch)


def test_a_number_is_a_constant_schedule() -> None:
    assert repr(schedule("optimizer.lr", 0.5, digits(), 10)) == repr(schedules.constant(0.5))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("{value=1}", ".schedule must be one of 'constant', 'steps', 'exponential', 'cosine', got None"),
        (
            "{schedule='step', value=1}",
            ".schedule must be one of 'constant', 'steps', 'exponential', 'cosine', got 'step'",
        ),
        ("{schedule='steps'}", ": a 'steps' schedule needs 'value'"),
        ("{schedule='steps', value=1, at=[1]}", ": a 'steps' schedule needs 'factor'"),
        ("{schedule='cosine', value=1, until=3}", ": a 'cosine' schedule has no 'until'"),
        ("{schedule='cosine', value=1, ends=3}", ": a 'cosine' schedule has no 'ends' (did you mean 'end'?)"),
        ("{schedule='steps', value=1, factor=0.1, at=5}", ": at must be a list of times, such as [40, 80], got 5"),
        ("{schedule='steps', value=1, factor=0.1, at=['a']}", ": at must be a finite number, got 'a'"),
        ("{schedule='constant', value='x'}", ": value must be a finite number, got 'x'"),
        ("{schedule='constant', value=nan}", ": value must be a finite number, got nan"),
        ("{schedule='constant', value=true}", ": value must be a finite number, got True"),
        ("{schedule='exponential', value=1, factor=2, every=0}", ": every must be a finite number above 0, got 0"),
        ("{schedule='cosine', value=1, over=0}", ": over must be a finite number above 0, got 0"),
    ],
)
@pytest.mark.parametrize("field", ["optimizer.lr", "kfac.damping"])
def test_schedules_that_cannot_be(field: str, table: str, text: str) -> None:
    assert field + text in refusal(f"{field}={table}")


def test_kfacs_schedules_are_named_once() -> None:
    assert refusal("kfac.damping={schedule='steps'}").startswith("kfac.damping")


@pytest.mark.parametrize("field", ["optimizer.lr", "kfac.damping"])
@pytest.mark.parametrize("kind", ["['steps']", "{a=1}"])
def test_a_kind_of_schedule_is_a_word(field: str, kind: str) -> None:
    assert "must be one of 'constant'" in refusal(f"{field}={{schedule={kind}, value=1}}")


def test_an_unknown_kind_of_schedule_is_told_the_nearest_one() -> None:
    assert "(did you mean 'cosine'?)" in refusal("optimizer.lr={schedule='cosin', value=1}")


def test_a_start_of_no_warmup() -> None:
    assert "warmup" in refusal("optimizer.lr={schedule='constant', value=1, warmup_start=0.5}")


def test_a_warmup_that_cannot_be_is_named() -> None:
    assert "warmup: " in refusal("kfac.damping={schedule='constant',value=1,warmup=0}")


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("kfac.damping", "{schedule='constant', value=-1}"),
        ("kfac.damping", "{schedule='constant', value=1, warmup=1, warmup_start=0}"),
        ("kfac.damping", "{schedule='cosine', value=1, over=5}"),
        ("kfac.kl_clip", "{schedule='cosine', value=1, over=5}"),
        ("kfac.kl_clip", "{schedule='constant', value=0}"),
        ("kfac.factor_decay", "{schedule='constant', value=2}"),
        ("kfac.raw_momentum", "{schedule='exponential', value=0.5, factor=2}"),
        ("kfac.l2", "{schedule='constant', value=-1}"),
        ("optimizer.lr", "{schedule='cosine', value=0.1, end=-1}"),
        ("optimizer.lr", "{schedule='exponential', value=1, factor=1e300, every=0.001}"),
    ],
)
def test_a_schedule_stays_within_the_fields_bounds(field: str, table: str) -> None:
    assert refusal(f"{field}={table}").startswith(field)


def test_a_learning_rate_may_end_at_nothing() -> None:
    assert learning_rate(digits("optimizer.lr={schedule='cosine', value=0.1}"), ranks=1, steps_per_epoch=1)(20) == 0


# K-FAC


def test_what_the_recipe_does_not_say_is_left_to_kfac() -> None:
    assert kfac_arguments(digits("kfac={}"), 10) == {"predictive": "categorical"}


def test_intervals_in_epochs_are_at_least_a_step() -> None:
    recipe = digits("kfac.inv_update_steps=default", "kfac.inv_update_epochs=0.5", "kfac.factor_update_epochs=1e-9")
    arguments = kfac_arguments(recipe, 30)
    assert (arguments["inv_update_steps"], arguments["factor_update_steps"]) == (15, 1)


def test_words_become_kfacs_objects() -> None:
    arguments = kfac_arguments(digits("kfac.damping=adaptive", "kfac.kl_clip=none"), 10)
    assert isinstance(arguments["damping"], AdaptiveDamping)
    assert arguments["kl_clip"] is None
    region = kfac_arguments(digits("kfac.kl_clip=0.5", "kfac.region_of=step"), 10)["kl_clip"]
    assert isinstance(region, TrustRegion)
    assert (region.of, region.cap.at(0)) == ("step", 0.5)


def test_pixels_are_bernoulli_variables_to_kfac() -> None:
    assert kfac_arguments(recipes.load("digits-autoencoder"), 10)["predictive"] == "bernoulli"


def test_patterns_reach_kfac() -> None:
    recipe = digits('kfac.exclude=["0.*"]', "kfac.sharing={'2.*' = 'reduce'}")
    assert build_kfac(recipe, build_model(recipe.model), steps_per_epoch=10)
    wrong = digits('kfac.exclude=["nothing*"]')
    with pytest.raises(RecipeError, match=r"kfac: exclude='nothing\*' matches no parameter"):
        build_kfac(wrong, build_model(wrong.model), steps_per_epoch=10)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["kfac.solver=inverse", "kfac.damping_rule=joint"], "kfac: damping_rule='joint' needs solver='eigen'"),
        (["kfac.region_of=step"], "kfac.region_of needs kfac.kl_clip, the bound"),
        (["kfac.region_of=step", "kfac.kl_clip=none"], "kfac.region_of needs kfac.kl_clip, the bound"),
    ],
)
def test_what_kfac_refuses(overrides: list[str], text: str) -> None:
    assert refusal(*overrides).startswith(text)


@pytest.mark.parametrize("what", ["factor_update", "inv_update"])
def test_an_interval_is_in_steps_or_in_epochs(what: str) -> None:
    text = f"kfac.{what}_steps and kfac.{what}_epochs say the same thing twice: give one of them"
    assert refusal(f"kfac.{what}_steps=3", f"kfac.{what}_epochs=0.5") == text


@pytest.mark.parametrize("value", ["{'*' = 'both'}", "{'*' = 1}"])
def test_the_words_of_a_sharing_table(value: str) -> None:
    assert "sharing" in refusal(f"kfac.sharing={value}")


def test_what_kfac_would_refuse_is_no_matter_where_it_is_off() -> None:
    assert not digits("kfac.enabled=false", "kfac.stats_fraction=0.5").kfac.enabled


# Parts that do not go together


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.path=x"], "data.path has no effect on digits, which takes flip, pad"),
        (["data.workers=3"], "data.workers has no effect on digits"),
        (["data.kind=cifar10", "data.path=x", "data.crop=centre"], "data.crop has no effect on cifar10"),
        (["data.kind=images", "data.path=x", "data.pad=4"], "data.pad has no effect on images"),
        (["data.kind=text", "data.path=x", "data.flip=true"], "data.flip has no effect on text"),
        (["model.name=resnet20", "model.norm_chunk=8"], 'model.norm_chunk goes with model.norm="chunked"'),
        (["model.name=googlenet", "model.auxiliary=true"], "has no loss for auxiliary heads"),
        (["data.kind=cifar10"], "data.path is missing: where is the folder?"),
        (["data.kind=images", "data.path="], "data.path is missing: where is the folder?"),
        (["data.kind=text"], "data.path is missing: where is the file?"),
        (
            ["data.kind=images", "data.path=x", "data.crop=random", "data.resize=100"],
            "data.resize=100 is smaller than data.size=224, which is cut out of it",
        ),
        (
            ["data.kind=text", "data.path=x", "training.loss=reconstruction"],
            'training.loss="reconstruction" is for images',
        ),
        (
            ["training.loss=reconstruction", "training.label_smoothing=0.1"],
            'training.label_smoothing goes with training.loss="cross-entropy"',
        ),
    ],
)
def test_parts_that_do_not_go_together(overrides: list[str], text: str) -> None:
    assert text in refusal(*overrides)


def test_one_crop_of_a_smaller_resize_is_no_matter_where_nothing_is_cut_out() -> None:
    assert digits("data.kind=images", "data.path=x", "data.crop=random-resized", "data.resize=100").data.resize == 100


# Anything


FIELDS = [
    f"{section}.{field.name}"
    for section in SECTIONS
    for field in dataclasses.fields(typing.get_type_hints(Recipe)[section])
    if field.name != "compile_preconditioning"
]
FIELDS += ["optimizer.momentum", "optimizer.weight_decay", "model.num_classes", "model.heads", "model.width"]
ODD = ["0", "-1", "0.5", "3", "1e300", str(10**30), "nan", "true", "''", "x", "[]", "[0.5]", "{}", "default", "none"]
TIMES = ["value", "factor", "at", "every", "over", "end", "warmup", "warmup_start"]
SCHEDULES = st.tuples(
    st.sampled_from(["'constant'", "'steps'", "'exponential'", "'cosine'", "'x'", "[]", "1"]),
    st.dictionaries(st.sampled_from(TIMES), st.sampled_from(["0", "-1", "0.5", "[1, 2]", "'a'", "1e300", "{}"])),
).map(lambda one: f"{{schedule = {one[0]}{''.join(f', {name} = {value}' for name, value in one[1].items())}}}")
ANYTHING = st.one_of(
    st.tuples(st.sampled_from(FIELDS), st.sampled_from(ODD)),
    st.tuples(st.sampled_from(["optimizer.lr", "kfac.damping", "kfac.kl_clip", "kfac.factor_decay"]), SCHEDULES),
    st.tuples(st.just("model.name"), st.sampled_from(["gpt", "vit", "autoencoder", "resnet20", "torch.nn:Linear"])),
    st.tuples(st.just("optimizer.name"), st.sampled_from(["adam", "adamw", "torch.optim:Rprop", "math:pi"])),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ANYTHING, min_size=1, max_size=3))
def test_anything_is_a_recipe_or_refused_in_words(changes: list[tuple[str, str]]) -> None:
    try:
        recipe = digits(*(f"{field}={value}" for field, value in changes))
    except RecipeError:
        return
    rate = learning_rate(recipe, ranks=2, steps_per_epoch=10)
    assert all(math.isfinite(rate(step)) for step in range(0, 200, 7))

"""From TOML and overrides to a checked recipe: what is taken, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad import recipes
from natgrad.recipes import Recipe, RecipeError
from natgrad.recipes.values import SECTIONS, as_table, build, overridden, tomllib

DIGITS = as_table(recipes.load("digits"))


def digits(*overrides: str) -> Recipe:
    return build(overridden(DIGITS, overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        digits(*overrides)
    return str(refused.value)


# Overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("kfac.damping=0.01", 0.01),
        ("kfac.damping = 1e-2", 0.01),
        ("kfac.damping=adaptive", "adaptive"),
        ('kfac.damping="adaptive"', "adaptive"),
        ("kfac.damping=2", 2.0),
        ("kfac.kl_clip=none", "none"),
        ("kfac.enabled=false", False),
        ("kfac.enabled=False", False),
        ("data.flip=True", True),
        ("training.batch=64", 64),
        ("training.batch=64.0", 64),
        ("training.batch=1_000", 1000),
        ("data.path=my data/x=y", "my data/x=y"),
        ('kfac.exclude=["fc.*", "conv1"]', ["fc.*", "conv1"]),
        ("kfac.sharing={'conv*' = 'reduce'}", {"conv*": "reduce"}),
        ("optimizer.lr={schedule='constant', value=0.1}", {"schedule": "constant", "value": 0.1}),
    ],
)
def test_an_override_is_toml_or_a_word(override: str, value: Any) -> None:
    section, field = override.partition("=")[0].strip().split(".")
    found = getattr(getattr(digits(override), section), field)
    assert found == value
    assert type(found) is type(value)


def test_a_field_without_a_name_in_the_schema_is_an_option_of_the_network_or_optimizer() -> None:
    recipe = digits("optimizer.momentum=0.9", "optimizer.betas=[0.9, 0.99]", "model.num_classes=12")
    assert recipe.optimizer.options == {"momentum": 0.9, "betas": [0.9, 0.99]}
    assert recipe.model.options == {"num_classes": 12}


def test_one_value_of_a_schedule_can_be_changed() -> None:
    before, after = recipes.load("cifar10-resnet32"), recipes.load("cifar10-resnet32", ["optimizer.lr.value=0.05"])
    assert after.optimizer.lr == {**before.optimizer.lr, "value": 0.05}


def test_a_schedule_can_be_replaced_by_a_number_and_a_number_by_a_schedule() -> None:
    assert recipes.load("cifar10-resnet32", ["optimizer.lr=0.05"]).optimizer.lr == 0.05
    recipe = digits("kfac.damping.schedule=constant", "kfac.damping.value=0.1")
    assert recipe.kfac.damping == {"schedule": "constant", "value": 0.1}


def test_default_takes_a_field_out() -> None:
    recipe = digits("kfac.inv_update_steps=default", "training.batch=default", "kfac.damping=default")
    assert (recipe.kfac.inv_update_steps, recipe.training.batch, recipe.kfac.damping) == (None, 128, None)


def test_default_takes_an_option_of_the_optimizer_or_of_a_schedule_out() -> None:
    recipe = recipes.load("cifar10-resnet32", ["optimizer.momentum=default", "optimizer.lr.warmup=default"])
    assert "momentum" not in recipe.optimizer.options
    assert "warmup" not in recipe.optimizer.lr


def test_the_last_override_of_a_field_counts() -> None:
    assert digits("training.batch=3", "training.batch=4").training.batch == 4


def test_a_whole_section_can_be_replaced() -> None:
    assert digits("kfac={damping=0.1}").kfac == Recipe.kfac.__class__(damping=0.1)


def test_overrides_leave_the_table_as_it_is() -> None:
    table = {"kfac": {"damping": {"schedule": "constant", "value": 1.0}}}
    overridden(table, ["kfac.damping.value=2", "kfac.solver=eigen"])
    assert table == {"kfac": {"damping": {"schedule": "constant", "value": 1.0}}}


@pytest.mark.parametrize("override", ["digits", "kfac.enabled", "=3", ".=3", "kfac.=3", "kfac..damping=3", ""])
def test_what_is_no_override_is_told_how_to_write_one(override: str) -> None:
    assert refusal(override) == (f"{override!r} is not an override: write part.field=value, such as kfac.damping=0.003")


@pytest.mark.parametrize("override", ["kfac=false", "training=[]", "optimizer=sgd", "data=default"])
def test_a_section_is_not_a_value(override: str) -> None:
    section = override.partition("=")[0]
    assert refusal(override) == f"{override!r}: {section} is a table; write {section}.field=value"


def test_a_number_has_no_parts() -> None:
    text = "'optimizer.lr.value=0.1': optimizer.lr is 0.3 in this recipe, which has no parts; set optimizer.lr=..."
    assert refusal("optimizer.lr.value=0.1") == text


def test_an_override_is_one_value() -> None:
    refusal("kfac.damping=0.1\nsolver='inverse'")


@pytest.mark.parametrize("name", ["2024", "true", "1e5"])
def test_a_text_may_look_like_a_number(name: str) -> None:
    assert digits(f"data.path={name}").data.path == name


# Names


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("kfac.dampnig=1", "[kfac] has no field 'dampnig' (did you mean 'damping'?); there are enabled, damping,"),
        ("training.batchsize=1", "[training] has no field 'batchsize' (did you mean 'batch'?); there are epochs,"),
        ("data.pth=x", "[data] has no field 'pth' (did you mean 'path'?); there are kind, path,"),
        ("trianing.batch=1", "a recipe has no field 'trianing' (did you mean 'training'?); there are summary, data,"),
        ("base=digits", "a recipe has no field 'base'; there are summary, data,"),
        ("training.qqq=1", "[training] has no field 'qqq'; there are epochs,"),
        ("training.flip=true", "[training] has no field 'flip' (did you mean data.flip?); there are epochs,"),
        ("data.lr=0.1", "[data] has no field 'lr' (did you mean optimizer.lr?); there are kind,"),
        ("kfac.polyak=0.9", "[kfac] has no field 'polyak' (did you mean training.polyak?); there are enabled,"),
        ("lr=0.1", "a recipe has no field 'lr' (did you mean optimizer.lr?); there are summary,"),
        ("training.damping=0.1", "[training] has no field 'damping' (did you mean kfac.damping?); there are epochs,"),
    ],
)
def test_unknown_names_are_told_the_nearest_one(override: str, start: str) -> None:
    assert refusal(override).startswith(start)


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("data.batch=3", "training.batch"),  # 'path'
        ("training.path=x", "data.path"),  # 'batch'
        ("kfac.lr=3", "optimizer.lr"),  # 'solver'
        ("kfac.seed=3", "training.seed"),  # 'enabled'
        ("training.enabled=false", "kfac.enabled"),  # 'seed'
        ("damping=0.1", "kfac.damping"),  # 'training'
    ],
)
def test_a_field_of_another_section_is_told_which(override: str, right: str) -> None:
    assert f"(did you mean {right}?)" in refusal(override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.kind=digit", "got 'digit' (did you mean 'digits'?)"),
        ("kfac.solver=eign", "kfac.solver must be one of 'eigen', 'inverse', got 'eign' (did you mean 'eigen'?)"),
        ("kfac.kl_clip=None", "must be a number or a table or 'none', got 'None' (did you mean 'none'?)"),
        ("kfac.damping=adaptative", "or 'adaptive', got 'adaptative' (did you mean 'adaptive'?)"),
        ("training.precision=fp16", "must be one of 'fp32', 'tf32', 'bf16', got 'fp16'"),
    ],
)
def test_unknown_words_are_told_the_nearest_one(override: str, text: str) -> None:
    assert text in refusal(override)


# Types and bounds


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.batch=2.5", "training.batch must be a whole number, got 2.5"),
        ('training.batch="2"', "training.batch must be a whole number, got '2'"),
        ("training.batch=true", "training.batch must be a whole number, got True"),
        ("training.batch=[1]", "training.batch must be a whole number, got [1]"),
        ("training.batch=nan", "training.batch must be a whole number, got nan"),
        ("training.batch=1e999", "training.batch must be a whole number, got inf"),
        ("kfac.factor_update_steps={value=3}", "kfac.factor_update_steps must be a whole number, got {'value': 3}"),
        ("training.label_smoothing=some", "training.label_smoothing must be a number, got 'some'"),
        ("training.label_smoothing=false", "training.label_smoothing must be a number, got False"),
        ("data.flip=1", "data.flip must be true or false, got 1"),
        ("data.flip=yes", "data.flip must be true or false, got 'yes'"),
        ("kfac.compile_preconditioning=off", "kfac.compile_preconditioning must be true or false, got 'off'"),
        ("summary=[]", "summary must be text in quotes, got []"),
        ("model.name={}", "model.name must be text in quotes, got {}"),
        ("data.kind=3", "data.kind must be one of 'digits', 'cifar10', 'images', 'text', got 3"),
        ("kfac.exclude=fc", "kfac.exclude must be a list of texts, got 'fc'"),
        ("kfac.exclude=[1]", "kfac.exclude must be a list of texts, got [1]"),
        ("kfac.sharing=[]", "kfac.sharing must be a table or one of 'expand', 'reduce', got []"),
        ("optimizer.lr=fast", "optimizer.lr must be a number or a table, got 'fast'"),
        ("optimizer.lr=[0.1]", "optimizer.lr must be a number or a table, got [0.1]"),
        ("optimizer.lr=true", "optimizer.lr must be a number or a table, got True"),
        ("kfac.damping=1979-05-27", "kfac.damping must be a number or a table or 'adaptive', got datetime.date"),
        ("kfac.damping=", "kfac.damping must be a number or a table or 'adaptive', got ''"),
        ("kfac.damping=[1", "kfac.damping must be a number or a table or 'adaptive', got '[1'"),
    ],
)
def test_wrong_types(override: str, text: str) -> None:
    assert refusal(override).startswith(text)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.batch=0", "training.batch must be at least 1, got 0"),
        ("training.batch=-3", "training.batch must be at least 1, got -3"),
        ("training.steps=0", "training.steps must be at least 1, got 0"),
        ("training.label_smoothing=1", "training.label_smoothing must be at least 0 and below 1, got 1.0"),
        ("training.evaluate_every=0", "training.evaluate_every must be above 0, got 0.0"),
        ("training.polyak=1.5", "training.polyak must be at least 0 and below 1, got 1.5"),
        ("data.smallest_crop=1.01", "data.smallest_crop must be above 0 and at most 1, got 1.01"),
        ("data.size=7", "data.size must be at least 8, got 7"),
        ("model.norm_chunk=0", "model.norm_chunk must be at least 1, got 0"),
        ("optimizer.lr=0", "optimizer.lr must be above 0, got 0.0"),
        ("optimizer.lr=nan", "optimizer.lr must be a finite number, got nan"),
        ("kfac.damping=inf", "kfac.damping must be a finite number, got inf"),
        ("kfac.damping=-1", "kfac.damping must be above 0, got -1.0"),
        ("kfac.factor_decay=1", "kfac.factor_decay must be at least 0 and below 1, got 1.0"),
        ("kfac.stats_fraction=2", "kfac.stats_fraction must be above 0 and at most 1, got 2.0"),
    ],
)
def test_out_of_bounds(override: str, text: str) -> None:
    assert refusal(override) == text


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "override", [f"kfac.damping={HUGE}", f"training.batch={HUGE}", f"training.batch=1{'0' * 5000}"]
)
def test_numbers_of_hundreds_of_digits(override: str) -> None:
    try:
        digits(override)
    except RecipeError:
        return


def test_a_thousand_brackets() -> None:
    refusal("kfac.damping=" + "[" * 3000)


def test_a_seed_that_torch_cannot_take() -> None:
    assert "training.seed" in refusal("training.seed=99999999999999999999999999")


# What must be there


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.kind=default", "data.kind is missing: which reader"),
        ("model.name=default", "model.name is missing: which network"),
        ("optimizer.lr=default", "optimizer.lr is missing: learning rate, a number or a schedule"),
        ("optimizer={}", "optimizer.lr is missing: learning rate, a number or a schedule"),
    ],
)
def test_required_fields(override: str, text: str) -> None:
    assert refusal(override) == text


@pytest.mark.parametrize("section", ["data", "model", "training", "optimizer"])
def test_required_sections(section: str) -> None:
    with pytest.raises(RecipeError, match=f"{section} is missing"):
        build({name: table for name, table in DIGITS.items() if name != section})


def test_only_kfac_can_be_left_out() -> None:
    assert build({name: table for name, table in DIGITS.items() if name != "kfac"}).kfac.enabled


@pytest.mark.parametrize("value", [3, [], [{"damping": 1}], "x"])
def test_sections_are_tables(value: Any) -> None:
    with pytest.raises(RecipeError, match="kfac must be a table, got"):
        build({**DIGITS, "kfac": value})


# Files


def load_text(folder: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return recipes.load(str(path), overrides)


def test_a_file_of_ones_own_changes_a_base(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, 'base = "cifar10-resnet32"\n[kfac]\ndamping = 0.01\n[training]\nbatch = 32')
    base = recipes.load("cifar10-resnet32")
    assert recipe.kfac == dataclasses.replace(base.kfac, damping=0.01)
    assert recipe.training == dataclasses.replace(base.training, batch=32)
    assert (recipe.data, recipe.model, recipe.optimizer) == (base.data, base.model, base.optimizer)


def test_a_schedule_on_top_of_a_base_replaces_all_of_the_bases(tmp_path: Path) -> None:
    text = 'base = "cifar10-resnet32"\n[optimizer]\nlr = { schedule = "cosine", value = 0.2 }'
    assert load_text(tmp_path, text).optimizer.lr == {"schedule": "cosine", "value": 0.2}
    assert load_text(tmp_path, 'base = "cifar10-resnet32"\n[optimizer]\nlr = 0.2').optimizer.lr == 0.2


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, 'base = "imagenet-resnet101"\n[model]\nname = "resnet34"')
    assert recipe.training == recipes.load("imagenet-resnet50").training
    assert recipe.model.name == "resnet34"


def test_overrides_come_after_the_file(tmp_path: Path) -> None:
    assert load_text(tmp_path, 'base = "digits"\n[training]\nbatch = 32', "training.batch=16").training.batch == 16


@pytest.mark.parametrize(
    ("base", "got"),
    [
        ('"digit"', "got 'digit' (did you mean 'digits'?)"),
        ('"./other.toml"', "got './other.toml'"),
        ('["digits"]', "got ['digits']"),
        ("3", "got 3"),
        ("{ x = 1 }", "got {'x': 1}"),
    ],
)
def test_only_natgrads_recipes_are_bases_so_that_no_circle_is_possible(tmp_path: Path, base: str, got: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_text(tmp_path, f"base = {base}")
    assert f"{tmp_path / 'mine.toml'}: base must be a recipe that comes with natgrad, {got}" in str(refused.value)


@pytest.mark.parametrize("content", ["[data\nkind = 1", "a = ", "a = 1\na = 2", b"\x00\xff", "é = 1".encode("latin1")])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(RecipeError, match="mine.toml is not valid TOML: ") as refused:
        load_text(tmp_path, content)
    assert str(tmp_path) in str(refused.value)


def test_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    assert load_text(tmp_path, 'base = "digits"\r\n[kfac]\r\ndamping = 0.5\r\n').kfac.damping == 0.5


def test_the_byte_order_mark_of_windows_editors_is_passed_over(tmp_path: Path) -> None:
    load_text(tmp_path, '\ufeffbase = "digits"\n')


def test_an_empty_file_lacks_its_data(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="data is missing"):
        load_text(tmp_path, "")


def test_a_file_that_is_not_there_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    for name in ("mine.toml", "folder.toml"):
        with pytest.raises(RecipeError, match=f"there is no file {tmp_path / name}"):
            recipes.load(name)


def test_an_unknown_recipe_is_told_the_nearest_one() -> None:
    with pytest.raises(
        RecipeError, match=r"no recipe 'cifar10-resnet' \(did you mean 'cifar10-resnet32'\?\); `natgrad"
    ):
        recipes.load("cifar10-resnet")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".toml", "a\0b.toml"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(RecipeError):
        recipes.load(name)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_survives_its_table(name: str) -> None:
    recipe = recipes.load(name)
    assert build(tomllib.loads(recipes.to_toml(recipe))) == build(as_table(recipe)) == recipe


# Anything


FIELDS = [
    (section, field.name)
    for section in SECTIONS
    for field in dataclasses.fields(typing.get_type_hints(Recipe)[section])
] + [("optimizer", "momentum"), ("optimizer", "lr.value"), ("kfac", "damping.schedule"), ("model", "num_classes")]
VALUES = st.one_of(
    st.sampled_from(["default", "none", "adaptive", "true", "nan", "-inf", "0", "-1", "1e308", "[]", "{}", '""', "'"]),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(repr),
    st.text(max_size=5),
    st.lists(st.sampled_from(["1", "'a'", "[2]", "{}"]), max_size=3).map(lambda ones: f"[{', '.join(ones)}]"),
    st.tuples(
        st.sampled_from(["constant", "steps", "exponential", "cosine", "x"]),
        st.dictionaries(
            st.sampled_from(["value", "factor", "at", "every", "over", "end", "warmup", "warmup_start"]),
            st.sampled_from(["0", "-1", "0.5", "[1, 2]", "'a'", "nan", "1e308", "{}"]),
        ),
    ).map(lambda one: f"{{schedule = '{one[0]}'{''.join(f', {name} = {value}' for name, value in one[1].items())}}}"),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3))
def test_any_value_of_any_field_is_taken_or_refused_in_words(changes: list[tuple[tuple[str, str], str]]) -> None:
    overrides = [f"{section}.{field}={value}" for (section, field), value in changes]
    try:
        recipe = digits(*overrides)
    except RecipeError:
        return
    assert "nan" in repr(recipe) or build(tomllib.loads(recipes.to_toml(recipe))) == recipe
    assert all(math.isfinite(one) for one in vars(recipe.training).values() if isinstance(one, float))


def test_another_optimizer_or_network_does_not_inherit_options() -> None:
    recipe = recipes.load("cifar10-resnet32", ["optimizer.name=adam", "optimizer.weight_decay=0.1"])
    assert recipe.optimizer.options == {"weight_decay": 0.1}
    assert recipes.load("text-gpt", ["model.name=vit"]).model.options == {}
    assert recipes.load("text-gpt", ["model.name=gpt"]).model.options["layers"] == 6

"""The command line: what it lists, trains, writes and refuses, and that mistakes are told without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import natgrad
from natgrad import recipes
from natgrad.cli.app import app
from tiny_data import write_cifar10_binary

SHORT = ("training.steps=3", "training.log_every=1")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def natgrad_says(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def error(*arguments: str, code: int) -> str:
    result = natgrad_says(*arguments, code=code)
    assert result.stderr.startswith("error: ")
    assert "error:" not in result.stdout
    return result.stderr.removeprefix("error: ").strip()


def lines(folder: str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "natgrad", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


# Help


def test_the_version() -> None:
    assert natgrad_says("--version").stdout == f"natgrad {natgrad.__version__}\n"


@pytest.mark.parametrize("arguments", [["-h"], ["--help"]])
def test_help_names_the_commands(arguments: list[str]) -> None:
    text = natgrad_says(*arguments).stdout
    assert all(command in text for command in ("train", "recipes", "inspect"))


def test_help_of_train_names_its_options() -> None:
    text = natgrad_says("train", "-h").stdout
    assert all(option in text for option in ("--out", "--resume", "--device", "--bf16", "--channels-last", "torchrun"))


def test_without_a_command_there_is_help() -> None:
    assert "Usage" in natgrad_says(code=2).output


def test_unknown_commands_and_options_are_refused() -> None:
    assert "No such command 'trian'" in natgrad_says("trian", code=2).output
    assert "No such option" in natgrad_says("train", "--fast", code=2).output


# Recipes


def test_all_recipes_are_listed_with_a_line_each() -> None:
    text = natgrad_says("recipes").stdout
    for name in recipes.names():
        assert f"{name} " in text
        assert recipes.load(name).summary in text


def test_a_recipe_is_shown_as_it_is_written() -> None:
    shown = natgrad_says("recipes", "cifar10-resnet32").stdout
    assert shown == recipes.source("cifar10-resnet32").read_text(encoding="utf-8")


def test_an_unknown_recipe_is_told_the_nearest_one() -> None:
    assert "there is no recipe 'digit' (did you mean 'digits'?)" in error("recipes", "digit", code=2)
    assert "there is no recipe 'digit' (did you mean 'digits'?)" in error("train", "digit", code=2)


# Training


def test_a_run_leaves_everything_about_it_in_its_folder() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    folder = Path("run")
    assert recipes.load("run") == recipes.load("digits", SHORT)
    kinds = [line["kind"] for line in lines("run")]
    assert kinds == ["start", "train", "train", "train", "test", "layers", "coverage", "end"]
    assert json.loads((folder / "environment.json").read_text())
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-00000003.pt", "best.pt"}
    assert torch.load(folder / "checkpoints" / "best.pt", weights_only=True)["step"] == 3
    assert any((folder / "tensorboard").iterdir())


def test_the_written_recipe_runs_again_to_the_same_numbers() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "first")
    natgrad_says("train", "first/recipe.toml", "--out", "second")
    first, second = ([line["loss"] for line in lines(folder) if "loss" in line] for folder in ("first", "second"))
    assert first == second
    assert recipes.load("first") == recipes.load("second")


def test_results_go_into_a_new_folder_under_runs() -> None:
    for _ in range(2):
        natgrad_says("train", "digits", *SHORT)
    assert len(list(Path("runs").glob("digits-*"))) == 2


def test_without_a_recipe_it_is_digits() -> None:
    natgrad_says("train", "kfac.damping=0.01", *SHORT, "--out", "run")
    assert recipes.load("run") == recipes.load("digits", ["kfac.damping=0.01", *SHORT])


def test_flags_reach_the_recipe() -> None:
    natgrad_says("train", "digits", *SHORT, "--bf16", "--channels-last", "--out", "run")
    training = recipes.load("run").training
    assert (training.precision, training.channels_last, training.compile) == ("bf16", True, False)


def test_kfac_can_be_off() -> None:
    natgrad_says("train", "digits", *SHORT, "kfac.enabled=false", "--out", "run")
    assert lines("run")[1]["damping"] is None


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path / "cifar")
    Path("mine.toml").write_text(
        'base = "cifar10-convnet"\n[data]\npath = "cifar"\n[training]\nbatch = 8\nsteps = 2\n[model]\nname = "resnet20"'
    )
    natgrad_says("train", "mine.toml", "kfac.max_factor_size=64")
    (folder,) = Path("runs").glob("mine-*")
    warnings = [line["text"] for line in lines(str(folder)) if line["kind"] == "warning"]
    assert len(warnings) == 6
    assert all("8 records, where CIFAR-10 has 10,000" in text for text in warnings)


# Going on


def test_a_folder_with_a_run_is_refused_without_resume() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    before = Path("run/metrics.jsonl").read_text()
    assert error("train", "digits", "--out", "run", code=1) == (
        "run holds a run already: go on with --resume, or choose another --out"
    )
    assert error("train", "run", code=1) == (
        "run holds a run: go on with --resume, or run its recipe again with --out FOLDER"
    )
    assert Path("run/metrics.jsonl").read_text() == before


def test_a_finished_run_stays_finished() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    natgrad_says("train", "run", "--resume")
    assert [line["step"] for line in lines("run") if line["kind"] == "train"] == [1, 2, 3]
    assert len(list(Path("run/checkpoints").iterdir())) == 2


def test_a_finished_run_goes_on_when_it_gets_more_steps() -> None:
    natgrad_says("train", "digits", "training.steps=5", "training.log_every=1", "--out", "whole")
    natgrad_says("train", "digits", *SHORT, "--out", "parts")
    natgrad_says("train", "parts", "training.steps=5", "--resume")
    whole, parts = (
        [(line["step"], line["loss"]) for line in lines(folder) if line["kind"] == "train"]
        for folder in ("whole", "parts")
    )
    assert whole == parts
    assert recipes.load("parts").training.steps == 5


def test_resume_begins_where_there_is_nothing_yet() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run", "--resume")
    natgrad_says("train", "digits", *SHORT, "--out", "run", "--resume")
    assert [line["step"] for line in lines("run") if line["kind"] == "train"] == [1, 2, 3]


def test_the_same_command_with_resume_goes_on() -> None:
    command = ("train", "digits", *SHORT, "model.num_classes=12", "--out", "run")
    natgrad_says(*command)
    natgrad_says(*command, "--resume")


def test_resume_of_another_recipe_is_refused() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    assert "run holds a run of another recipe" in error(
        "train", "digits-autoencoder", "--out", "run", "--resume", code=1
    )


def test_resume_needs_a_folder() -> None:
    text = "--resume needs the folder of a run: natgrad train FOLDER --resume, or --out FOLDER"
    assert error("train", "digits", "--resume", code=1) == text


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    assert "the checkpoint has one of 'kfac'" in error("train", "run", "kfac.enabled=false", "--resume", code=1)
    assert "does not fit the recipe" in error("train", "run", "model.num_classes=12", "--resume", code=1)


def test_a_recipe_of_the_present_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    natgrad_says("train", "digits", *SHORT, "--out", "run")
    monkeypatch.chdir(tmp_path / "run")
    natgrad_says("train", "recipe.toml")
    assert next(Path("runs").iterdir()).name.startswith("run-")


def test_a_recipe_comes_before_a_folder_of_the_same_name() -> None:
    natgrad_says("train", "digits", *SHORT, "kfac.damping=0.5", "--out", "digits")
    natgrad_says("train", "digits", *SHORT, "--out", "again")
    assert recipes.load("again").kfac.damping is None


# Refusals


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["digits", "kfac.dampnig=1"], "[kfac] has no field 'dampnig' (did you mean 'damping'?)"),
        (["digits", "kfac.damping=-1"], "kfac.damping must be above 0, got -1.0"),
        (["digits", "kfac.damping=[red]"], "got '[red]'"),
        (["digits", "fast"], "'fast' is not an override"),
        (["digits", "model.name=digits_convnets"], "did you mean 'digits_convnet'?"),
        (["digits", "optimizer.momentum=-1"], "Invalid momentum value: -1"),
        (["digits", 'kfac.exclude=["nothing*"]'], "exclude='nothing*' matches no parameter of this model"),
        (["digits", "model.name=no.module:x"], "model.name='no.module:x' cannot be imported"),
        (["nothing.toml"], "there is no file"),
        (["broken.toml"], "broken.toml is not valid TOML"),
        (["kfac.dampnig=1"], "[kfac] has no field 'dampnig'"),
    ],
)
def test_mistakes_in_a_recipe_end_with_2_and_write_nothing(arguments: list[str], text: str) -> None:
    Path("broken.toml").write_text("[data")
    assert text in error("train", *arguments, code=2)
    assert [path.name for path in Path().iterdir()] == ["broken.toml"]


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("cifar10-resnet32", "get the python or the binary version from https://www.cs.toronto.edu/~kriz/cifar.html"),
        ("imagenet-resnet50", "put train/<class>/*.jpg and val/<class>/*.jpg into it"),
        ("text-gpt", "put a UTF-8 file there, or name another: data.path=..."),
    ],
)
def test_missing_data_ends_with_1_and_says_what_to_get_and_where_to_put_it(
    recipe: str, text: str, tmp_path: Path
) -> None:
    told = error("train", recipe, code=1)
    assert text in told
    assert str(tmp_path / "data") in told
    assert not list(tmp_path.iterdir())


def test_a_batch_larger_than_the_data() -> None:
    text = "there are 1,500 cases, and one step takes 2,000: choose training.batch=1500 or less"
    assert error("train", "digits", "training.batch=2000", code=1) == text


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("file", "file is a file: choose another --out for the results"),
        pytest.param(
            "file/run",
            "file is a file: choose another --out for the results",
        ),
    ],
)
def test_results_need_a_folder(out: str, text: str) -> None:
    Path("file").touch()
    assert text in error("train", "digits", "--out", out, code=1)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("gpu", "--device 'gpu' is not a device: use cpu, cuda or cuda:1"),
        ("meta", "--device 'meta': natgrad trains on cpu or cuda"),
        pytest.param(
            "cuda",
            "--device 'cuda': this machine, or this build of torch, has no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_devices_that_are_not_there(device: str, text: str) -> None:
    assert error("train", "digits", "--device", device, code=1) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["model.name=resnet20"], "the model does not take the data's cases of shape (1, 8, 8)"),
        (["model.num_classes=3"], "the data has 10 classes, and the model only 3 outputs"),
        (["training.loss=reconstruction"], "the model gives 10 outputs for the 64 pixels of a case"),
        (["model.name=torch.nn:Identity"], "the model"),
    ],
)
def test_a_network_that_does_not_fit_the_data(arguments: list[str], text: str) -> None:
    result = natgrad_says("train", "digits", *arguments, code=2)
    assert text in result.stderr


def test_weights_that_are_no_numbers_end_the_run_with_advice() -> None:
    told = error("train", "digits", *SHORT, "kfac.enabled=false", "optimizer.lr=1e38", "--out", "run", code=1)
    assert "the weights are not finite after step 3: nothing is saved" in told
    assert "smaller optimizer.lr" in told


# As a command


def test_python_m_natgrad_trains_and_writes_plain_lines_to_a_pipe() -> None:
    done = python("train", "digits", *SHORT, "--out", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 3/3" in done.stdout
    assert "finished" in done.stdout
    assert "\x1b" not in done.stdout


def test_python_m_natgrad_refuses_in_one_line() -> None:
    done = python("train", "digits", "kfac.damping=-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: kfac.damping must be above 0, got -1.0\n"

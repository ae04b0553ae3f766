from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from natgrad.cli.app import app
from natgrad.compare.comparison import FILE

SHORT = ("training.epochs=2", "training.batch=500", "training.test_batch=297")
TINY = (*SHORT, "--trials", "2", "--seeds", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """One comparison from the command line, what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("cli") / "out"
    result = CliRunner().invoke(
        app, ["compare", "digits", *TINY, "--optimizers", "sgd,kfac", "--out", str(folder)], env={"COLUMNS": "150"}
    )
    assert result.exit_code == 0, result.output
    return folder, result.output


def says(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_a_comparison_ends_with_the_verdict_the_table_and_the_page(compared):
    folder, output = compared
    assert "contenders  SGD, K-FAC" in output
    assert "tuning      2 settings each: 2 for 1 epoch" in output
    assert re.search(r"\d+/8  K-FAC: seed 2: test error", output)
    words = re.sub(r"\s+", " ", output)
    assert re.search(r"(K-FAC|No verdict).*test error.*updates", words)
    assert "updates to target" in output
    assert str(folder / "report.html") in words.replace(" ", "") or str(folder / "report.html") in output
    page = (folder / "report.html").read_text()
    assert page.startswith("<!")
    assert "K-FAC" in page


def test_the_page_is_made_again_and_from_other_folders(compared, tmp_path):
    folder, _ = compared
    (folder / "report.html").unlink()
    assert "test error" in says("report", str(folder))
    assert (folder / "report.html").is_file()
    page = tmp_path / "mine.html"
    assert "SGD" in says("report", str(folder / "sgd"), str(folder / "kfac"), "--out", str(page), "--target", "50%")
    assert re.search(r"Target: test error of 50\s% or less, as given", page.read_text())


def test_a_comparison_goes_on_with_another_seed_and_keeps_its_target(compared, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(compared[0], folder)
    output = says("compare", str(folder), "--resume", "--seeds", "3", "--target", "60%", "--device", "cpu")
    assert "SGD: seed 3" in output
    assert "Target: test error of 60 % or less, as given" in output
    assert json.loads((folder / FILE).read_text())["seeds"] == 3
    assert "60 %" in says("report", str(folder))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "digits", "--optimizers", "sgd,kfca"], "did you mean 'kfac'"),
        (["compare", "digitz"], "did you mean 'digits'"),
        (["compare", "digits", "kfac.dampin=1"], "did you mean 'damping'"),
        (["compare", "digits", "--target", "5"], "between 0 and 1"),
        (["compare", "digits", "--target", "soon"], "a target is a number such as 5%"),
        (["compare", "digits-autoencoder", "--target", "5%"], "which has no percent"),
        (["compare", "digits", "--optimizers", "muon"], "Muon is for the matrices"),
        (["compare", "nowhere", "--resume"], "there is no comparison in nowhere"),
        (["report", "nowhere"], "there is no folder"),
        (["compare", "digits", "--trials", "0"], "trials"),
        (["compare", "digits", "--device", "gpu"], "is not a device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code in (1, 2)
    assert words in re.sub(r"[\s│]+", " ", result.output)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_comparison_is_not_begun_again_nor_given_another_recipe(compared):
    folder = str(compared[0])
    assert "go on with --resume" in says("compare", folder, code=1)
    assert "holds a comparison already" in says("compare", "digits", "--out", folder, code=1)
    assert "goes on with its own recipe" in says("compare", folder, "training.epochs=3", "--resume", code=1)


def test_a_page_goes_into_a_folder_that_is_named_for_it(compared, tmp_path):
    (tmp_path / "folder").mkdir()
    says("report", str(compared[0]), "--out", str(tmp_path / "folder"))
    assert (tmp_path / "folder" / "report.html").is_file()
    says("report", str(compared[0]), "--out", str(tmp_path / "new" / "folder" / "page.html"))
    assert (tmp_path / "new" / "folder" / "page.html").is_file()


def test_folders_full_of_comparisons_are_reported_and_the_same_one_twice_is_one(compared, tmp_path):
    shutil.copytree(compared[0], tmp_path / "all" / "one")
    shutil.copytree(compared[0], tmp_path / "all" / "two")
    output = says("report", str(tmp_path / "all"), "--out", str(tmp_path / "page.html"))
    assert "SGD (one)" in output
    assert "K-FAC (two)" in output
    twice = says("report", str(compared[0]), str(compared[0]), "--out", str(tmp_path / "page.html"))
    assert "SGD (" not in twice


def test_another_recipe_is_not_gone_on_with_in_this_folder(compared):
    assert "holds a comparison of digits" in says(
        "compare", "digits-autoencoder", "--resume", "--out", str(compared[0]), code=1
    )


def test_where_nothing_came_to_its_end_the_command_fails(tmp_path):
    output = says(
        "compare", "digits", *TINY, "--optimizers", "compare.misbehaving:Explodes", "--out", str(tmp_path / "o"), code=1
    )
    assert "No verdict: no run came to its end with a number" in output


def test_data_that_is_missing_is_told_and_nothing_else(tmp_path):
    words = says("compare", "cifar10-convnet", f"data.path={tmp_path / 'no'}", "--out", str(tmp_path / "o"), code=1)
    assert "error: " in words
    assert "No verdict" not in words


def test_torchrun_is_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave out torchrun" in says("compare", "digits", "--out", str(tmp_path / "out"), code=1)


def test_a_page_that_cannot_be_made_takes_nothing_else_with_it(compared, monkeypatch, tmp_path):
    from natgrad import page

    def fails(*arguments):
        raise page.PageError("the page needs plotly")

    monkeypatch.setattr(page, "write", fails)
    output = says("report", str(compared[0]), "--out", str(tmp_path / "page.html"), code=1)
    assert "the page could not be written: the page needs plotly" in output
    assert "updates to target" in output


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_ctrl_c_stops_with_a_page_and_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "natgrad", "compare", "digits", *TINY, "--out", "out", "--optimizers", "sgd,kfac"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 90
    while not list(Path(tmp_path).glob("out/sgd/*-seed-*/metrics.jsonl")):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "to go on: natgrad compare out --resume" in output
    assert (tmp_path / "out" / "report.html").is_file()

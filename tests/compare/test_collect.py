from __future__ import annotations

import json
from pathlib import Path

import pytest

from natgrad.compare.collect import collect
from natgrad.compare.history import HistoryError, read
from natgrad.training.metrics_file import MetricsFile

RECIPE = '[training]\nseed = {seed}\n[optimizer]\nname = "{optimizer}"\nlr = {lr}\n[kfac]\nenabled = {kfac}\n'


def write(
    folder: Path, *, seed=1, optimizer="sgd", lr=0.1, kfac="false", name=None, end="finished", data="digits"
) -> Path:
    """A run of three steps, tested twice."""
    folder.mkdir(parents=True)
    if name is None:
        (folder / "recipe.toml").write_text(RECIPE.format(seed=seed, optimizer=optimizer, lr=lr, kfac=kfac))
    file = MetricsFile(folder / "metrics.jsonl")
    file.write("start", step=0, data=data, total_steps=3, **({} if name is None else {"name": name, "seed": seed}))
    file.write("train", step=1, loss=2.0, accuracy=0.5, seconds=1.0, parts={"model": 0.4, "data": 0.1})
    file.write("train", step=3, loss=1.0, accuracy=0.75, seconds=2.0, parts={"model": 0.1, "solve": 0.2})
    file.write("test", step=2, loss=1.5, accuracy=0.625, seconds=0.1, trained=1.5)
    file.write("test", step=3, loss=float("nan"), accuracy=0.75, seconds=0.1)
    if end:
        file.write("end", step=3, reason=end, seconds=2.5)
    return folder


def test_a_run_is_read_with_its_curves_times_and_end(tmp_path):
    run = read(write(tmp_path / "one"))
    assert (run.name, run.seed, run.uses_kfac) == ("SGD", 1, False)
    assert [(point.step, point.seconds, point.loss, point.error) for point in run.train] == [
        (1, 1.0, 2.0, 0.5),
        (3, 2.0, 1.0, 0.25),
    ]
    # What is no number is none; a test that does not say when it was takes the training line's time.
    assert [(point.step, point.seconds, point.loss, point.error) for point in run.test] == [
        (2, 1.5, 1.5, 0.375),
        (3, 2.0, None, 0.25),
    ]
    assert run.parts == pytest.approx({"model": (0.4 + 2 * 0.1) / 3, "data": 0.1 / 3, "solve": 2 * 0.2 / 3})
    assert (run.reason, run.steps, run.seconds, run.planned_steps) == ("finished", 3, 2.5, 3)


def test_a_run_without_an_end_is_unfinished_and_broken_lines_are_told(tmp_path):
    folder = write(tmp_path / "one", end="")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = read(folder)
    assert not run.finished
    assert run.reason == "unfinished"
    assert "cannot be read: 1" in run.warnings[0]


def test_runs_of_one_recipe_are_seeds_of_one_contender_and_others_stand_apart(tmp_path):
    for seed in (1, 2):
        write(tmp_path / "runs" / f"sgd-{seed}", seed=seed)
        write(tmp_path / "runs" / f"kfac-{seed}", seed=seed, kfac="true")
    write(tmp_path / "runs" / "hotter", lr=1.0)
    found = collect([tmp_path / "runs"])
    assert {one.name: len(one.runs) for one in found.contenders} == {"K-FAC": 2, "SGD (hotter)": 1, "SGD (sgd-1)": 2}
    assert [one.name for one in found.contenders if one.uses_kfac] == ["K-FAC"]
    assert all(run.name == one.name for one in found.contenders for run in one.runs)


def test_runs_of_ones_own_scripts_are_called_what_they_call_themselves(tmp_path):
    for seed in (1, 2):
        write(tmp_path / f"mine-{seed}", name="Shampoo", seed=seed)
    found = collect([tmp_path / "mine-1", tmp_path / "mine-2"])
    assert [(one.name, [run.seed for run in one.runs]) for one in found.contenders] == [("Shampoo", [1, 2])]


def test_runs_on_other_data_are_compared_with_a_note(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two", data="something else", kfac="true")
    found = collect([tmp_path / "one", tmp_path / "two"])
    assert found.notes == ("these runs are not alike: their data differs (digits, something else)",)


def test_folders_without_a_run_are_told_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("\n{}\n")
    for path, says in (
        (tmp_path / "missing", "there is no folder"),
        (tmp_path / "empty", "there is no run in .*empty"),
        (tmp_path / "broken", "holds no line of a run"),
    ):
        with pytest.raises(HistoryError, match=says):
            collect([path])
    with pytest.raises(HistoryError, match="nothing to report"):
        collect([])


def test_lines_of_other_shapes_do_not_end_a_report(tmp_path):
    folder = write(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        for line in (
            {"kind": "train", "step": 4, "time": 1.0, "loss": "much", "parts": 3, "seconds": None},
            {"kind": "layers", "step": 4, "time": 1.0, "layers": [{"name": "0", "condition": None, "age": None}]},
            {"kind": "layers", "step": 4, "time": 1.0},
            {"kind": "theirs", "step": 4, "time": 1.0},
        ):
            file.write(json.dumps(line) + "\n")
    run = read(folder)
    assert run.train[-1].loss is None
    assert [layer.name for layer in run.layers] == ["0"]

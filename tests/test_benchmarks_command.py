"""What command lines of benchmarks refuse, in one line and before anything is done; and the files that they leave."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import cifar10, fast_paths, host, step_cost, table
from benchmarks.approximations.__main__ import main as approximations
from benchmarks.overlap.__main__ import main as overlap

ROOT = Path(__file__).parents[1]
overlap_times, overlap_cifar10 = (lambda words, name=name: overlap([name, *words]) for name in ("times", "cifar10"))
EARLIER = ROOT / "docs/step-cost.json"


def refused(main, words, capsys) -> str:
    """What it says beneath its usage, on one line, where it measures nothing."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    told = printed.err.splitlines()[-1]
    assert ": error: " in told
    return told


MAINS = {
    "table": (table.main, []),
    "table, lines": (table.main, ["--lines", "nothing"]),
    "step_cost": (step_cost.main, []),
    "host": (host.main, []),
    "fast_paths": (fast_paths.main, ["--data", "."]),
    "cifar10": (cifar10.main, ["--data", "."]),
    "overlap times": (overlap, ["times"]),
    "overlap cifar10": (overlap, ["cifar10", "--data", "."]),
    "approximations": (approximations, ["sharing"]),
}


DEVICES = {"tpu": "not a device", "cuda": "no CUDA device", "meta": "cpu or cuda"}


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize("device", DEVICES)
def test_devices_that_are_not_there(name, device, capsys, monkeypatch):
    main, words = MAINS[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = refused(main, [*words, "--device", device], capsys)
    assert f"--device '{device}'" in told
    assert DEVICES[device] in told


@pytest.mark.parametrize("main", [host.main, step_cost.main])
def test_tf32_needs_a_gpu(main, capsys):
    assert "tf32 needs a GPU" in refused(main, ["--device", "cpu", "--model", "tiny", "--precision", "tf32"], capsys)


@pytest.mark.parametrize(
    ("main", "option", "words"),
    [
        (table.main, "--budget", ["-1", "nan", "soon"]),
        (table.main, "--steps", ["0", "-3", "1.5", "many"]),
        (table.main, "--sgd-steps", ["0"]),
        (table.main, "--repeats", ["0"]),
        (table.main, "--profile-steps", ["0"]),
        (step_cost.main, "--budget", ["-1"]),
        (step_cost.main, "--rounds", ["0"]),
        (step_cost.main, "--steps", ["0"]),
        (step_cost.main, "--loop", ["-1"]),
        (host.main, "--size", ["0"]),
        (host.main, "--busy", ["-1"]),
        (host.main, "--fraction", ["0", "1.5", "nan"]),
        (fast_paths.main, "--seeds", ["0"]),
        (fast_paths.main, "--limit", ["-5"]),
        (fast_paths.main, "--damping", ["0", "inf"]),
        (fast_paths.main, "--momentum", ["1"]),
        (fast_paths.main, "--weight-decay", ["-1e-4"]),
    ],
)
def test_numbers_that_cannot_be(main, option, words, capsys):
    for word in words:
        told = refused(main, [f"{option}={word}"], capsys)
        assert option in told
        assert told.endswith(f"got '{word}'")


def test_a_budget_of_nothing_is_not_the_usual_one(monkeypatch):
    settings = []
    monkeypatch.setattr(table.Run, "loops", lambda self, some, ways, solvers, given: settings.append(given))
    monkeypatch.setattr(table, "report", lambda found: None)
    for words in (["--budget", "0"], []):
        assert table.main(["--device", "cpu", "--lines", "9a", *words]) == 0
    assert [one.budget for one in settings] == [0.0, 900.0]
    assert step_cost.parsed(["--device", "cpu", "--budget", "0"])[2].budget == 0.0


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (table.main, ["--out"]),
        (table.main, ["--merge", EARLIER, "--out"]),
        (table.main, ["--plot-only", EARLIER, "--out"]),
        (table.main, ["--plot-profile", EARLIER, "--out"]),
        (step_cost.main, ["--table", "--out"]),
        (step_cost.main, ["--json"]),
        (fast_paths.main, ["--data", ".", "--out"]),
    ],
)
def test_a_file_in_a_folder_that_is_not_there(main, words, tmp_path, capsys):
    folder = tmp_path / "missing"
    assert refused(main, [*words, folder / "one.json"], capsys).endswith(f"there is no folder {folder}")
    assert not folder.exists()
    assert refused(main, [*words, tmp_path], capsys).endswith(f"{tmp_path} is a folder, not a file")


@pytest.mark.parametrize(
    ("main", "option", "command"),
    [
        (table.main, "--plot-only", "benchmarks.table"),
        (table.main, "--merge", "benchmarks.table"),
        (table.main, "--plot-profile", "benchmarks.table"),
        (fast_paths.main, "--plot-only", "benchmarks.fast_paths"),
        (cifar10.main, "--plot-only", "benchmarks.cifar10"),
        (overlap_times, "--plot-only", "benchmarks.overlap times"),
        (overlap_cifar10, "--plot-only", "benchmarks.overlap cifar10"),
    ],
)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# natgrad", "is not JSON"),
        ("[]", "has other things in it"),
        ('{"records": [{"kind": "loop"}]}', "has other things in it"),
        ('{"runs": [{"variant": "sgd", "seed": 0}]}', "has other things in it"),
        (None, "No such file"),
    ],
)
def test_files_of_something_else_are_named(main, option, command, text, why, tmp_path, capsys):
    path = tmp_path / "one.json"
    if text is not None:
        path.write_text(text)
    told = refused(main, [option, path], capsys)
    assert f"{path}" in told
    assert why in told
    assert f"expected JSON as python -m {command} writes it" in told


def test_files_of_other_benchmarks_are_named(capsys):
    for main, other in (
        (fast_paths.main, "step-cost"),
        (fast_paths.main, "overlap-cifar10"),
        (fast_paths.main, "cifar10"),
        (table.main, "fast-paths"),
        (table.main, "digits"),
        (cifar10.main, "fast-paths"),
        (cifar10.main, "overlap-cifar10"),
        (overlap_times, "overlap-cifar10"),
        (overlap_cifar10, "overlap-times"),
        (overlap_cifar10, "cifar10"),
    ):
        path = EARLIER.with_name(f"{other}.json")
        assert f"{path} has other things in it" in refused(main, ["--plot-only", path], capsys)
    assert refused(table.main, ["--plot-only", EARLIER.parent], capsys).count(str(EARLIER.parent)) == 1


def test_what_is_written_by_default_is_not_offered_to_git():
    if shutil.which("git") is None or subprocess.run(["git", "rev-parse"], cwd=ROOT, check=False).returncode:
        pytest.skip("no clone, or git does not trust it")
    for name, ignored in {
        "step-cost.json": True,
        "step-cost.png": True,
        "profile.png": True,
        "docs/step-cost.json": False,
        "docs/step-cost.png": False,
        "docs/profile.png": False,
    }.items():
        found = subprocess.run(["git", "check-ignore", "--quiet", "--no-index", name], cwd=ROOT, check=False)
        assert found.returncode == (0 if ignored else 1), name

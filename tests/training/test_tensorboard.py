"""TensorBoard's files: every curve with its numbers, resuming, absence, and a disk that fills up."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from natgrad.training import tensorboard
from natgrad.training.events import Evaluated, Finished, Listener, Progress, Started
from natgrad.training.tensorboard import TensorBoard


def progress(step: int, **values: Any) -> Progress:
    numbers: dict[str, Any] = {
        "epoch": 0.5, "loss": 0.25, "accuracy": 0.5, "lr": 0.125, "damping": 0.0625, "predicted_kl": 2.0,
        "clip_factor": 1.0, "parts": {"data": 0.5, "model": 0.25}, "step_seconds": 0.75, "cases_per_second": 64.0,
        "seconds": 1.0, "remaining": 1.0,
    }  # fmt: skip
    return Progress(step=step, **{**numbers, **values})


def evaluated(step: int, **values: Any) -> Evaluated:
    numbers: dict[str, Any] = {
        "epoch": 0.5, "loss": 1.5, "accuracy": 0.75, "top5": 0.875, "cases": 10, "seconds": 1.0, "best": True,
    }  # fmt: skip
    return Evaluated(step=step, **{**numbers, **values})


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_curve_has_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board: Listener = TensorBoard(tmp_path / "tensorboard")
    start: dict[str, Any] = dict.fromkeys(
        ("parameters", "epochs", "steps_per_epoch", "total_steps", "batch", "ranks"), 1
    )
    board.started(Started(recipe="r", folder=tmp_path, device="cpu", data="d", **start))
    board.stepped(1)
    board.progress(progress(50))
    board.evaluating(1, 2)
    board.evaluated(evaluated(60))
    board.saved(tmp_path, 60)
    board.warned("text")
    board.finished(Finished(step=60, reason="finished", seconds=1, folder=tmp_path, checkpoint=None, best=None))
    board.progress(progress(70))  # after the end: not drawn, and no harm
    assert curves(tmp_path / "tensorboard") == {
        "train/loss": [(50, 0.25)],
        "train/accuracy": [(50, 0.5)],
        "train/lr": [(50, 0.125)],
        "kfac/damping": [(50, 0.0625)],
        "kfac/predicted_kl": [(50, 2.0)],
        "kfac/clip_factor": [(50, 1.0)],
        "time/data": [(50, 500.0)],
        "time/model": [(50, 250.0)],
        "time/step": [(50, 750.0)],
        "time/cases_per_second": [(50, 64.0)],
        "test/loss": [(60, 1.5)],
        "test/accuracy": [(60, 0.75)],
        "test/top5": [(60, 0.875)],
    }


def test_what_is_none_has_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path)
    nothing = dict.fromkeys(("accuracy", "damping", "predicted_kl", "clip_factor"))
    board.progress(progress(1, parts={}, loss=float("nan"), **nothing))
    board.evaluated(evaluated(1, accuracy=None, top5=None))
    board.close()
    board.close()
    assert board.problem is None
    assert set(curves(tmp_path)) == {"train/loss", "train/lr", "time/step", "time/cases_per_second", "test/loss"}


def test_resuming_hides_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    for step in (10, 20, 30, 40):
        first.progress(progress(step))
    first.close()
    second = TensorBoard(tmp_path, resume_from=20)
    for step in (30, 40):
        second.progress(progress(step, loss=8.0))
    second.close()
    assert curves(tmp_path)["train/loss"] == [(10, 0.25), (20, 0.25), (30, 8.0), (40, 8.0)]


def test_without_tensorboard_one_text_says_so_and_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    warnings: list[str] = []
    assert not tensorboard.available()
    board = TensorBoard(tmp_path / "tensorboard", warn=warnings.append)
    board.progress(progress(1))
    board.evaluated(evaluated(1))
    board.close()
    assert board.problem == tensorboard.MISSING
    assert warnings == [tensorboard.MISSING]
    assert not (tmp_path / "tensorboard").exists()


def test_importing_natgrads_training_does_not_import_tensorboard() -> None:
    modules = ("checkpoints", "metrics_file", "environment", "tensorboard")
    script = f"""
import sys, importlib
for name in {modules}: importlib.import_module("natgrad.training." + name)
assert "tensorboard" not in sys.modules and "torch.utils.tensorboard" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    board = TensorBoard(tmp_path / "file" / "tensorboard", warn=warnings.append)
    board.progress(progress(1))
    board.close()
    (text,) = warnings
    assert "file/tensorboard cannot be written" in text
    assert "Not a directory" in text


FULL = """
import json, resource, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tensorboard import evaluated, progress
from natgrad.training.tensorboard import TensorBoard

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.RLIM_INFINITY
result = []
for limit, ending in ((1, "steps"), (3000, "steps"), (3000, "close")):
    folder = Path(sys.argv[1]) / f"{limit}-{ending}"
    warnings = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    board = TensorBoard(folder, warn=warnings.append)
    for step in range(100 if ending == "steps" else 30):
        board.progress(progress(step))
        board.evaluated(evaluated(step))
        if ending == "steps" and board._writer is not None and step % 10 == 9:
            board._writer.file_writer.event_writer._async_writer._worker._next_flush_time = 0  # as if 10 s had passed
            time.sleep(0.01)
    board.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    result.append(warnings)
print(json.dumps(result))
"""


def test_a_disk_that_fills_up_ends_the_curves_and_not_the_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for texts in json.loads(done.stdout.splitlines()[-1]):
        (text,) = texts
        assert "cannot be written ([Errno 27] File too large): its curves end here" in text

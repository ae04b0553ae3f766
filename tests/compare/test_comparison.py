from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from natgrad import recipes
from natgrad.compare.comparison import (
    FILE,
    ComparisonError,
    Plan,
    Watcher,
    begin,
    compare,
    gather,
    load_plan,
    outcome_of,
    save_plan,
)
from natgrad.compare.tuning import design
from natgrad.compare.verdict import judge
from natgrad.compare.worker import Job, StoppedError, Worker, WorkerError, record_end
from natgrad.training.metrics_file import read

SHORT = ["training.epochs=2", "training.batch=300", "training.log_every=1", "training.test_batch=297"]
TESTS = Path(__file__).parent.parent


def plan(*specs: str, trials: int = 1, seeds: int = 2, overrides: tuple[str, ...] = ()) -> Plan:
    recipe = recipes.load("digits", [*SHORT, *overrides])
    return Plan(title="digits", recipe=recipe, specs=specs, trials=trials, seeds=seeds)


class Heard(Watcher):
    def __init__(self) -> None:
        self.begun_jobs: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    def job_begun(self, job: Job) -> None:
        self.begun_jobs.append(job.label)

    def job_ended(self, job: Job, reason: str, score: float | None) -> None:
        self.ended.append((job.label, reason))

    def warned(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def worker():
    with Worker("cpu") as one:
        yield one


def curves(folder: Path) -> dict[str, list]:
    """Everything that does not depend on the clock."""
    comparison = gather(folder)
    return {
        f"{one.name} {run.seed}": [(point.step, point.loss, point.error) for point in run.test]
        for one in comparison.contenders
        for run in one.runs
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, worker):
    """A comparison that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "comparison"
    asked = plan("sgd", "kfac", trials=3)
    begin(asked, folder)
    heard = Heard()
    compare(asked, folder, worker, heard)
    return folder, heard


def test_every_contender_has_its_sweep_and_then_all_take_turns(whole):
    folder, heard = whole
    labels = [label for label, _ in heard.ended]
    assert all(reason == "finished" for _, reason in heard.ended)
    assert labels[:3] == ["SGD: lr 0.05, 1 epoch", "SGD: lr 0.0036, 1 epoch", "SGD: lr 0.26, 1 epoch"]
    assert labels[-4:] == ["SGD: seed 1", "K-FAC: seed 1", "SGD: seed 2", "K-FAC: seed 2"]
    comparison = gather(folder)
    assert [len(one.trials) for one in comparison.contenders] == [3, 3]
    assert [len(one.runs) for one in comparison.contenders] == [2, 2]
    assert not comparison.notes
    assert not heard.warnings


def test_seed_by_seed_all_begin_with_the_same_weights_and_see_the_same_data(whole):
    comparison = gather(whole[0])
    sgd, kfac = ([run.train[0] for run in one.runs] for one in comparison.contenders)
    assert [point.step for point in (*sgd, *kfac)] == [1] * 4
    assert [point.loss for point in sgd] == [point.loss for point in kfac]  # before any update
    assert sgd[0].loss != sgd[1].loss


def test_the_chosen_settings_are_those_of_the_final_runs_and_all_have_had_the_same_budget(whole):
    comparison = gather(whole[0])
    for one in comparison.contenders:
        chosen = next(trial for trial in one.trials if trial.chosen)
        assert chosen.settings == one.settings
        assert all(run.settings["optimizer"]["lr"] == one.settings["lr"] for run in one.runs)
        assert sum(epochs for trial in one.trials for epochs, _ in trial.rungs) == 3
    assert "3 settings of the learning rate, with K-FAC together with the damping" in comparison.tuning


def test_kfac_tells_of_its_layers_and_coverage_and_trials_leave_no_checkpoints(whole):
    comparison = gather(whole[0])
    run = comparison.contenders[1].runs[0]
    assert {layer.name for layer in run.layers} == {"0.weight", "2.weight", "6.weight"}
    assert all(layer.condition is not None and layer.condition >= 1 for layer in run.layers)
    assert all(layer.age is not None and layer.age >= 0 for layer in run.layers)
    assert next(iter(run.coverage))["parameter"] == "0.weight"
    assert run.readings[0].predicted_kl is not None
    assert set(run.parts) == {"data", "model", "statistics", "solve", "precondition"}
    assert list(whole[0].glob("*/*-seed-*/checkpoints/*.pt"))
    assert not list(whole[0].glob("*/tuning/*/*/checkpoints"))


def test_what_has_come_to_its_end_is_not_run_again(whole, worker):
    heard = Heard()
    compare(load_plan(whole[0]), whole[0], worker, heard)
    assert heard.begun_jobs == []
    assert len(heard.ended) == len(whole[1].ended)


def test_a_comparison_goes_on_with_more_seeds_and_contenders(whole, worker, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(whole[0], folder)
    more = dataclasses.replace(load_plan(folder), seeds=3, specs=("sgd", "kfac", "adamw"))
    save_plan(more, folder)
    heard = Heard()
    compare(load_plan(folder), folder, worker, heard)
    assert {label for label in heard.begun_jobs if not label.startswith("AdamW")} == {"SGD: seed 3", "K-FAC: seed 3"}
    after = curves(folder)
    assert len(after) == 9
    assert {name: after[name] for name in curves(whole[0])} == curves(whole[0])


def test_a_sweep_that_chooses_anew_is_followed_by_new_runs_of_what_it_chose(whole, worker, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(whole[0], folder)
    before = gather(folder).contenders[0].settings
    # As if the winner's trial were lost, and another setting won.
    for trial in gather(folder).contenders[0].trials:
        if trial.chosen:
            index = design({"lr": 0.05}, 3).index(trial.settings) + 1
            record_end(folder / "sgd" / "tuning" / "epochs-1" / f"{index:02d}", "diverged: as it were")
    compare(load_plan(folder), folder, worker, Heard())
    after = gather(folder).contenders[0]
    assert after.settings != before
    assert all(run.settings["optimizer"]["lr"] == pytest.approx(after.settings["lr"]) for run in after.runs)


def test_two_comparisons_do_not_work_in_one_folder(whole, worker):
    import fcntl

    descriptor = os.open(whole[0], os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ComparisonError, match="another process is at work"):
            compare(load_plan(whole[0]), whole[0], worker, Watcher())
    finally:
        os.close(descriptor)


def test_a_sweep_that_is_not_at_its_end_is_not_called_a_failed_one(whole, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "sgd" / "tuning" / "epochs-1" / "03")
    record_end(folder / "sgd" / "tuning" / "epochs-1" / "01", "diverged: as it were")
    assert gather(folder).contenders[0].note == "its sweep is not at its end"


def test_a_run_whose_folder_is_taken_ends_itself_only(whole, worker, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(whole[0], folder)
    taken = next(folder.glob("sgd/*-seed-1"))
    shutil.rmtree(taken)
    taken.mkdir()
    (taken / "precious").touch()
    heard = Heard()
    compare(load_plan(folder), folder, worker, heard)
    assert "holds something else" in dict(heard.ended)["SGD: seed 1"]
    assert dict(heard.ended)["K-FAC: seed 2"] == "finished"


def test_a_run_whose_checkpoints_cannot_be_read_begins_anew_and_they_are_kept(whole, worker, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(whole[0], folder)
    run = next(folder.glob("sgd/*-seed-1"))
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"no checkpoint")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(line for line in lines if '"end"' not in line) + "\n")
    compare(load_plan(folder), folder, worker, Heard())
    assert curves(folder) == curves(whole[0])
    assert list((run / "checkpoints-unreadable").iterdir())


def test_progress_counts_the_runs_that_there_are(whole):
    assert load_plan(whole[0]).jobs == len(whole[1].ended)
    fixed = plan("sgd+optimizer.lr=0.1", "sgd", trials=3, seeds=2)
    assert fixed.jobs == 2 + 3 + 2
    assert "What a contender's own name sets was not tuned." in fixed.said()
    assert "own name" not in load_plan(whole[0]).said()


def test_contenders_that_differ_in_more_than_their_optimizer_are_compared_with_a_note(tmp_path, worker):
    asked = plan("sgd", "sgd+training.batch=500", seeds=1)
    begin(asked, tmp_path / "comparison")
    compare(asked, tmp_path / "comparison", worker, Heard())
    assert "these runs are not alike: their batch differs (300, 500)" in gather(tmp_path / "comparison").notes


def test_a_process_that_hangs_is_ended_by_the_second_signal(tmp_path):
    asked = plan("compare.misbehaving:Hangs", seeds=1)
    begin(asked, tmp_path / "comparison")
    with Worker("cpu") as one:

        class Impatient(Heard):
            def job_begun(self, job):
                for delay in (6.0, 7.0):
                    threading.Timer(delay, one.interrupt, [signal.SIGINT]).start()

        with pytest.raises(StoppedError, match="SIGINT"):
            compare(asked, tmp_path / "comparison", one, Impatient())


def test_one_that_raises_and_one_that_is_killed_end_no_other_and_say_why(tmp_path, worker, monkeypatch):
    mended = tmp_path / "mended"
    monkeypatch.setenv("NATGRAD_TEST_MENDED", str(mended))
    asked = plan("compare.misbehaving:Raises", "compare.misbehaving:Kills", "sgd", seeds=1)
    folder = tmp_path / "comparison"
    begin(asked, folder)
    heard = Heard()
    with Worker("cpu") as fresh:  # which has the variable
        compare(asked, folder, fresh, heard)
    reasons = dict(heard.ended)
    assert reasons["Raises: seed 1"] == "crashed: RuntimeError: the fifth step is too much"
    assert reasons["Kills: seed 1"] == "crashed: the process ended by SIGKILL, perhaps for want of memory"
    assert reasons["SGD: seed 1"] == "finished"
    end = read(folder / "compare.misbehaving-Raises" / "lr-0.001-seed-1" / "metrics.jsonl")[-1]
    assert "the fifth step is too much" in end["traceback"]

    comparison = gather(folder)
    verdict = judge(comparison)
    assert [row.note for row in verdict.rows] == ["1 of 1 crashed", "1 of 1 crashed", ""]
    assert verdict.target is not None  # what SGD reached
    assert comparison.notes[0].startswith("1 of 3 runs came to their end")

    mended.touch()
    heard = Heard()
    with Worker("cpu") as fresh:
        compare(load_plan(folder), folder, fresh, heard)
    assert heard.begun_jobs == ["Raises: seed 1", "Kills: seed 1"]  # crashes are tried again
    assert dict(heard.ended)["Raises: seed 1"] == "finished"


def test_settings_that_diverge_lose_and_contenders_that_only_diverge_are_left_out(tmp_path, worker):
    asked = plan("sgd", "compare.misbehaving:Explodes", trials=2, seeds=1)
    folder = tmp_path / "comparison"
    begin(asked, folder)
    heard = Heard()
    compare(asked, folder, worker, heard)
    good, bad = gather(folder).contenders
    assert len(good.runs) == 1
    assert bad.runs == ()
    assert all(trial.rungs == ((1, None),) and trial.note.startswith("diverged") for trial in bad.trials)
    assert bad.note.startswith("no setting could be trained (diverged")
    assert heard.warnings[0].startswith("Explodes is left out: no setting could be trained")
    # Diverging is an answer: it is not asked again.
    heard = Heard()
    compare(asked, folder, worker, heard)
    assert heard.begun_jobs == []


def test_a_contender_that_cannot_be_built_is_refused_once_and_the_others_run(tmp_path, worker):
    # That a model has too few outputs is seen when it meets the data.
    asked = plan("sgd+model.name=compare.test_comparison:two_outputs", "sgd", trials=2, seeds=1)
    folder = tmp_path / "comparison"
    begin(asked, folder)
    heard = Heard()
    compare(asked, folder, worker, heard)
    refused = [label for label in heard.begun_jobs if "two_outputs" in label]
    assert len(refused) == 1
    assert gather(folder).contenders[0].note.startswith("no setting could be trained (refused: the data has 10 classes")
    assert len(gather(folder).contenders[1].runs) == 1


def two_outputs(**options):
    import torch

    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))


def test_missing_data_ends_a_comparison_in_words(tmp_path, worker):
    recipe = recipes.load("cifar10-convnet", [f"data.path={tmp_path / 'nothing'}"])
    asked = Plan(title="cifar10", recipe=recipe, specs=("sgd",), trials=1, seeds=1)
    begin(asked, tmp_path / "comparison")
    with pytest.raises(WorkerError, match="nothing"):
        compare(asked, tmp_path / "comparison", worker, Watcher())


def test_a_device_that_is_not_there_ends_a_comparison_in_words(tmp_path):
    asked = plan("sgd", seeds=1)
    begin(asked, tmp_path / "comparison")
    with Worker("tpu") as one, pytest.raises(WorkerError, match="tpu"):
        compare(asked, tmp_path / "comparison", one, Watcher())


def test_an_interrupt_saves_the_run_under_way_and_the_comparison_goes_on_from_there(whole, tmp_path, worker):
    folder = tmp_path / "comparison"
    asked = load_plan(whole[0])
    begin(asked, folder)

    class Interrupts(Heard):
        def job_told(self, job, kind, value):
            if job.label == "K-FAC: seed 1" and kind == "steps" and value[0] >= 1:
                one.interrupt(signal.SIGTERM)

    with Worker("cpu") as one, pytest.raises(StoppedError, match="SIGTERM"):
        compare(asked, folder, one, Interrupts())
    assert all(outcome_of(one) is None for one in folder.glob("kfac/*-seed-1"))
    assert len(gather(folder).notes) == 1
    compare(load_plan(folder), folder, worker, Heard())
    assert curves(folder) == curves(whole[0])


def test_a_signal_in_the_middle_of_imports_is_no_crash(tmp_path, monkeypatch):
    """Python swallows it there, and half a library fails later."""
    worker = Worker("cpu")
    job = Job(kind="a", title="a", label="a", folder=tmp_path / "run", recipe=plan("sgd").recipe)

    class Answers:
        def send(self, job):
            worker._asked = "SIGINT"

        def recv(self):
            record_end(job.folder, "crashed: ImportError: half a library")
            return "ended", "crashed: ImportError: half a library"

    monkeypatch.setattr(worker, "_started", Answers)
    with pytest.raises(StoppedError, match="SIGINT"):
        worker.run(job, lambda kind, value: None)
    assert not (job.folder / "metrics.jsonl").exists()


def test_an_interrupt_at_any_moment_is_not_forgotten(tmp_path):
    """Also while the process starts, loads or warms up, when no run listens yet."""
    asked = plan("sgd", seeds=2)
    for number, delay in enumerate((0.0, 1.5, 3.0)):
        folder = tmp_path / str(number)
        begin(asked, folder)
        signals = []
        with Worker("cpu") as one:
            timer = threading.Timer(delay, one.interrupt, [signal.SIGINT])
            timer.start()
            try:
                compare(asked, folder, one, Watcher())
            except StoppedError as stopped:
                signals.append(str(stopped))
            timer.cancel()
        runs = gather(folder).contenders[0].runs
        assert signals == ["SIGINT"] or len([run for run in runs if run.finished]) == 2  # it may come too late
        assert not [run for run in runs if run.reason.startswith("crashed")]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_a_comparison_that_was_killed_goes_on_to_the_same_numbers_and_leaves_no_process_behind(whole, tmp_path):
    folder = tmp_path / "comparison"
    begin(load_plan(whole[0]), folder)
    command = [sys.executable, "-m", "natgrad", "compare", str(folder), "--resume", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    wait_for(lambda: list(folder.glob("kfac/tuning/*/*/metrics.jsonl")))
    process.kill()
    process.wait()
    wait_for(lambda: not runs_in(folder))
    before = len(list(folder.glob("*/**/metrics.jsonl")))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert before < len(list(folder.glob("*/**/metrics.jsonl")))
    assert curves(folder) == curves(whole[0])
    assert "test error" in done.stdout
    assert (folder / "report.html").is_file()


def wait_for(condition, *, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def runs_in(folder: Path) -> list[str]:
    """Processes of comparisons there: by what they were started with, or stand in."""
    return [one.name for one in Path("/proc").glob("[0-9]*") if one.name != str(os.getpid()) and _is_in(one, folder)]


def _is_in(process: Path, folder: Path) -> bool:
    try:
        return str(folder) in (process / "cmdline").read_text() or os.readlink(process / "cwd") == str(folder.parent)
    except OSError:
        return False


def test_folders_that_hold_something_are_left_alone(tmp_path, whole):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    for folder, says in (
        (whole[0], "holds a comparison already"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "full", "holds something else"),
        (tmp_path / "file" / "below", "cannot be written"),
    ):
        with pytest.raises(ComparisonError, match=says):
            begin(plan("sgd"), folder)


def test_plans_that_cannot_be_read_are_told_in_words(tmp_path):
    with pytest.raises(ComparisonError, match="there is no comparison in"):
        load_plan(tmp_path)
    begin(plan("sgd"), tmp_path / "one")
    path = tmp_path / "one" / FILE
    good = json.loads(path.read_text())
    for damaged, says in (
        ("{", "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({**good, "version": 99}), "version 99"),
        (json.dumps({name: value for name, value in good.items() if name != "seeds"}), "seeds"),
        (json.dumps({**good, "recipe": 3}), "is damaged|must be a table"),
    ):
        path.write_text(damaged)
        with pytest.raises((ComparisonError, recipes.RecipeError), match=says):
            load_plan(tmp_path / "one")

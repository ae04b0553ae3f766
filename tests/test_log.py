"""A user's own script writes the run that `natgrad train` would: exact numbers, an honest clock, no waiting."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import natgrad
from natgrad.clock import Clock, NoClock
from natgrad.training import environment
from natgrad.training.metrics_file import read
from ranks import run_on_ranks

SHARED = {"kind", "step", "time", "loss", "accuracy", "lr", "damping", "predicted_kl", "clip_factor"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read(folder / "metrics.jsonl") if not kinds or line["kind"] in kinds]


def steps(folder: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in lines(folder)]


def with_kfac(*, device: str = "cpu", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, natgrad.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    return model, optimizer, natgrad.KFAC(model, factor_update_steps=2, **options).attach(optimizer)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    place = next(model.parameters()).device
    optimizer.zero_grad()
    loss = functional.cross_entropy(
        model(torch.linspace(-1, 1, 30, device=place).reshape(6, 5)), torch.arange(6, device=place) % 3
    )
    loss.backward()
    optimizer.step()
    return loss


# Lines


def test_a_run_begins_with_what_it_is(folder):
    model = nn.Linear(3, 2)
    natgrad.Log(folder, name="SGD", seed=7, model=model, about={"batch": 128, "data": "digits"}).close()
    first = lines(folder)[0]
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {
        "kind": "start", "step": 0, "name": "SGD", "seed": 7, "uses_kfac": False, "folder": str(folder),
        "device": "CPU, 1 thread", "parameters": 8, "ranks": 1, "batch": 128, "data": "digits",
    }  # fmt: skip
    (facts,) = environment.recorded(folder / "environment.json")
    assert facts["natgrad"] == natgrad.__version__


def test_what_is_not_said_is_the_folders_name_and_nothing(folder):
    natgrad.Log(folder).close()
    first = lines(folder)[0]
    assert (first["name"], first["seed"], first["parameters"]) == ("one", None, None)


def test_a_training_line_has_the_means_since_the_last_one(folder):
    log = natgrad.Log(folder, every=2)
    for number in range(1, 6):
        log.train(loss=torch.tensor(number / 4, requires_grad=True), accuracy=1 / number, norm=number, epoch=0)
    log.close()
    assert [(line["step"], line["loss"], line["accuracy"], line["norm"]) for line in lines(folder, "train")] == [
        (2, 0.375, 0.75, 2),
        (4, 0.875, (1 / 3 + 1 / 4) / 2, 4),
        (5, 1.25, 0.2, 5),
    ]
    assert steps(folder) == [("start", 0), ("train", 2), ("train", 4), ("train", 5), ("end", 5)]


def test_a_line_has_the_fields_of_the_trainers(folder):
    with natgrad.Log(folder, every=1) as log:
        log.train(loss=1.0)
    (line,) = lines(folder, "train")
    assert line.keys() == SHARED | {"parts", "step_seconds", "seconds"}
    assert line["parts"] == {}


def test_numbers_may_be_floats_and_tensors_in_turn_and_missing_now_and_then(folder):
    log = natgrad.Log(folder, every=4)
    log.train(loss=1)
    log.train(loss=torch.tensor([3.0], dtype=torch.bfloat16), accuracy=None)
    log.train(accuracy=torch.tensor(0.5, dtype=torch.float64))
    log.train(loss=torch.tensor(5))
    (line,) = lines(folder, "train")
    assert (line["loss"], line["accuracy"]) == (3.0, 0.5)


def test_an_error_is_stored_as_accuracy(folder):
    log = natgrad.Log(folder, every=1)
    log.train(error=0.25)
    log.test(error=torch.tensor(0.125))
    assert [line["accuracy"] for line in lines(folder, "train", "test")] == [0.75, 0.875]


def test_what_is_no_number_is_recorded_as_such(folder):
    log = natgrad.Log(folder, every=1)
    log.train(loss=math.nan, accuracy=math.nan)
    log.test(loss=torch.tensor(math.inf))
    train, test = lines(folder, "train", "test")
    assert train["loss"] is None
    assert train["not_finite"] == {"loss": "nan", "accuracy": "nan"}
    assert test["not_finite"] == {"loss": "inf"}


def test_the_learning_rate_is_the_optimizers_unless_somebody_says_another(folder):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    log = natgrad.Log(folder, every=1, optimizer=optimizer)
    log.train(loss=1.0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    log.train(loss=1.0)
    log.train(loss=1.0, lr=0.125)
    assert [line["lr"] for line in lines(folder, "train")] == [0.5, 0.25, 0.125]
    assert lines(folder)[0]["parameters"] == 6


def test_the_last_steps_are_written_at_a_test_and_at_the_end(folder):
    with natgrad.Log(folder, every=10) as log:
        for _ in range(3):
            log.train(loss=1.0)
        with log.testing():
            log.test(loss=2.0)
        log.train(loss=4.0)
    assert steps(folder) == [("start", 0), ("train", 3), ("test", 3), ("train", 4), ("end", 4)]
    assert [line["loss"] for line in lines(folder, "train")] == [1.0, 4.0]


def test_tensors_of_a_device_are_read_when_a_line_is_due(folder, monkeypatch):
    monkeypatch.setattr(natgrad.measured, "number", lambda name, value: value)  # as if the CPU were one to wait for
    log = natgrad.Log(folder, every=2)
    buffer = torch.zeros(())
    for number in (1.0, 3.0):
        log.train(loss=buffer.fill_(number), error=buffer / 4, norm=buffer)
    log.train(loss=torch.tensor(1.0), accuracy=torch.tensor(93.5))
    with pytest.warns(natgrad.NatgradWarning, match=r"accuracy \(or 1 − error\) .* 0 to 1, got 93.5; is it in percent"):
        log.train(loss=torch.tensor(1.0), accuracy=torch.tensor(93.5))
    for _ in range(2):
        log.train(loss=torch.tensor(1.0), accuracy=torch.tensor(93.5))
    first, *later = lines(folder, "train")
    assert (first["loss"], first["accuracy"], first["norm"]) == (2.0, 0.5, 3.0)
    assert [line["accuracy"] for line in later] == [None, None]
    (warning,) = lines(folder, "warning")
    assert warning["step"] == 4


# The clock


def test_tests_are_off_the_clock(folder, hand):
    log = natgrad.Log(folder, every=2)
    for _ in range(2):
        hand.move(1)
        log.train(loss=1.0)
    hand.move(0.5)
    with log.testing():
        hand.move(64)
        with log.testing():
            hand.move(64)
        log.test(loss=2.0, cases=10)
        hand.move(64)
    for _ in range(2):
        hand.move(2)
        log.train(loss=1.0)
    log.close()
    hand.move(64)
    first, second = lines(folder, "train")
    assert (first["seconds"], first["step_seconds"]) == (2, 1)
    assert (second["seconds"], second["step_seconds"]) == (6.5, 2.25)
    (test,) = lines(folder, "test")
    assert (test["trained"], test["seconds"], test["cases"]) == (2.5, 128, 10)
    assert lines(folder, "end")[0]["seconds"] == 6.5


def test_a_step_is_as_long_with_tests_as_without(folder, hand):
    log = natgrad.Log(folder, every=100)
    for _ in range(3):
        hand.move(2)
        log.train(loss=1.0)
    with log.testing():
        hand.move(64)
    for _ in range(2):
        hand.move(4)
        log.train(loss=1.0)
    log.close()
    assert [(line["step"], line["step_seconds"]) for line in lines(folder, "train")] == [(3, 2), (5, 4)]


def test_a_test_outside_of_testing_is_on_the_clock(folder, hand):
    log = natgrad.Log(folder)
    hand.move(1)
    log.train(loss=1.0)
    hand.move(2)
    log.test(loss=1.0)
    (test,) = lines(folder, "test")
    assert (test["trained"], test["seconds"]) == (3, None)
    hand.move(4)
    log.close()
    assert lines(folder, "end")[0]["seconds"] == 7


def test_whoever_waits_for_long_steps_hears_of_them(folder, hand):
    log = natgrad.Log(folder, every=1000)
    for _ in range(5):
        hand.move(4)
        log.train(loss=1.0)
    assert steps(folder) == [("start", 0), ("train", 3)]


def test_a_test_that_fails_leaves_the_clock_running(folder, hand):
    log = natgrad.Log(folder, every=1)
    with pytest.raises(ZeroDivisionError), log.testing():  # noqa: PT012
        hand.move(8)
        raise ZeroDivisionError
    hand.move(1)
    log.train(loss=1.0)
    assert lines(folder, "train")[0]["seconds"] == 1


# Steps


def test_steps_may_be_counted_by_the_script(folder, hand):
    log = natgrad.Log(folder, every=10)
    for step in (5, 10, 20):
        hand.move(5 if step < 20 else 10)
        log.train(loss=step, step=step)
    log.test(loss=1.0, step=20)
    assert steps(folder) == [("start", 0), ("train", 10), ("train", 20), ("test", 20)]
    assert [line["step_seconds"] for line in lines(folder, "train")] == [1, 1]
    assert log.step == 20


def test_steps_may_be_counted_from_zero(folder, hand):
    log = natgrad.Log(folder, every=2)
    for step in range(4):
        hand.move(1)
        log.train(loss=step, step=step)
    assert [(line["step"], line["loss"], line["step_seconds"]) for line in lines(folder, "train")] == [
        (1, 0.5, 1),
        (3, 2.5, 1),
    ]


def test_steps_do_not_go_back(folder):
    log = natgrad.Log(folder, every=1)
    log.train(loss=1.0, step=3)
    for told in (log.train, log.test):
        with pytest.raises(ValueError, match="step=2 does not come after step 3"):
            told(loss=1.0, step=2)
    with pytest.raises(ValueError, match="step=3 does not come after step 3"):
        log.train(loss=1.0, step=3)
    log.train(loss=1.0)
    assert steps(folder) == [("start", 0), ("train", 3), ("train", 4)]


# K-FAC


def test_a_line_has_what_kfac_says_of_the_step(folder):
    model, optimizer, kfac = with_kfac(damping=0.5)
    log = natgrad.Log(folder, every=1, kfac=kfac)
    loss = one_step(model, optimizer)
    log.train(loss=loss)
    (line,) = lines(folder, "train")
    numbers = kfac.metrics()
    assert line["loss"] == loss.item()
    assert line["damping"] == 0.5
    assert line["predicted_kl"] == numbers["predicted_kl"]
    assert line["clip_factor"] == numbers["clip_factor"]
    assert line["lr"] is None
    first = lines(folder)[0]
    assert (first["uses_kfac"], first["parameters"]) == (True, 39)


def test_the_time_of_a_step_is_split_and_adds_up(folder, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)) / 2**20)
    model, optimizer, kfac = with_kfac()
    log = natgrad.Log(folder, every=1, kfac=kfac)
    for _ in range(4):
        log.train(loss=one_step(model, optimizer))
    told = lines(folder, "train")
    for number, line in enumerate(told):
        assert line["parts"].keys() == {"model", "statistics", "solve", "precondition"}
        assert (line["parts"]["statistics"] > 0) == (number % 2 == 0)
        assert min(line["parts"][part] for part in ("model", "solve", "precondition")) > 0
        assert line["step_seconds"] == sum(line["parts"].values())


def test_kfac_has_a_clock_for_as_long_as_the_log_is_open(folder):
    _, _, kfac = with_kfac()
    log = natgrad.Log(folder, kfac=kfac)
    assert type(kfac.clock) is Clock
    log.close()
    assert isinstance(kfac.clock, NoClock)


def test_a_clock_that_kfac_has_already_stays_the_scripts_own(folder):
    model, optimizer, kfac = with_kfac()
    mine = kfac.clock = Clock()
    with natgrad.Log(folder, every=1, kfac=kfac) as log:
        log.train(loss=one_step(model, optimizer))
    assert kfac.clock is mine
    assert mine.take()[1]["precondition"] == 1
    assert lines(folder, "train")[0]["parts"] == {}
    assert lines(folder, "train")[0]["step_seconds"] > 0


def test_what_kfac_covers_is_told_once(folder):
    model, optimizer, kfac = with_kfac()
    with natgrad.Log(folder, kfac=kfac) as log:
        log.test(loss=1.0)  # nothing is known yet
        for _ in range(2):
            log.train(loss=one_step(model, optimizer))
            log.test(loss=1.0)
    (line,) = lines(folder, "coverage")
    assert line["step"] == 1
    assert [(row["parameter"], row["block"], row["elements"]) for row in line["rows"]] == [
        ("0.weight", "linear", 20), ("0.bias", "with 0.weight", 4),
        ("2.weight", "linear", 12), ("2.bias", "with 2.weight", 3),
    ]  # fmt: skip


def test_the_kfac_inside_an_optimizer_is_found(folder):
    model = nn.Linear(2, 2)
    optimizer = natgrad.optim.KFACSGD(model, lr=0.1)
    natgrad.Log(folder, optimizer=optimizer).close()
    assert lines(folder)[0]["uses_kfac"]


def test_a_log_changes_no_bit_of_training(folder):
    results = []
    for logged in (False, True):
        model, optimizer, kfac = with_kfac(fisher="sampled")
        log = natgrad.Log(folder, every=1, model=model, optimizer=optimizer, kfac=kfac) if logged else None
        for _ in range(5):
            loss = one_step(model, optimizer)
            if log is not None:
                log.train(loss=loss)
                with log.testing():
                    log.test(loss=loss)
        results.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# The end


def test_an_exception_is_the_end_and_comes_out(folder):
    with pytest.raises(ValueError, match="too deep"), natgrad.Log(folder, every=100) as log:  # noqa: PT012
        log.train(loss=1.0)
        raise ValueError("too deep\nand more")
    assert steps(folder) == [("start", 0), ("train", 1), ("end", 1)]
    assert lines(folder, "end")[0]["reason"] == "ValueError: too deep"


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt(), "SIGINT"), (MemoryError(), "MemoryError")])
def test_the_end_is_told_in_words(folder, error, reason):
    with pytest.raises(type(error)), natgrad.Log(folder):
        raise error
    assert lines(folder, "end")[0]["reason"] == reason


def test_a_broken_device_does_not_hide_what_broke_it(folder, monkeypatch):
    def broken(self):
        raise RuntimeError("no device")

    with pytest.raises(ValueError, match="first"), natgrad.Log(folder) as log:  # noqa: PT012
        log.train(loss=1.0)
        monkeypatch.setattr(natgrad.measured.Mean, "value", broken)
        raise ValueError("first")
    assert steps(folder) == [("start", 0), ("end", 1)]


def test_after_the_end_there_is_nothing_to_tell(folder):
    with natgrad.Log(folder) as log:
        log.close()
        log.close()
    for told in (log.train, log.test):
        with pytest.raises(RuntimeError, match="closed"):
            told(loss=1.0)
    with pytest.raises(RuntimeError, match="closed"), log.testing():
        pass
    assert steps(folder) == [("start", 0), ("end", 0)]
    assert lines(folder, "end")[0]["reason"] == "finished"


def test_a_run_without_an_end_is_readable(folder):
    natgrad.Log(folder, every=1).train(loss=1.0)
    assert steps(folder) == [("start", 0), ("train", 1)]


# Going on


def test_a_run_goes_on_after_its_checkpoint(folder, hand):
    log = natgrad.Log(folder, every=2, name="first")
    for _ in range(6):
        hand.move(1)
        log.train(loss=1.0)
    hand.move(1000)
    again = natgrad.Log(folder, every=2, resume=True, step=4)
    for _ in range(2):
        hand.move(2)
        again.train(loss=2.0)
    again.close()
    assert steps(folder) == [("start", 0), ("train", 2), ("train", 4), ("resume", 4), ("train", 6), ("end", 6)]
    last = lines(folder, "train")[-1]
    assert (last["loss"], last["seconds"], last["step_seconds"]) == (2, 8, 2)
    assert len(environment.recorded(folder / "environment.json")) == 2


def test_a_folder_without_a_run_can_be_resumed_into(folder):
    natgrad.Log(folder, resume=True, step=4).train(loss=1.0)
    assert steps(folder) == [("start", 4)]


def test_a_run_is_not_overwritten(folder):
    natgrad.Log(folder, every=1).train(loss=1.0)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="holds a run already.*resume=True"):
        natgrad.Log(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert len(environment.recorded(folder / "environment.json")) == 1


def test_going_on_needs_to_know_from_where(folder):
    with pytest.raises(ValueError, match="resume=True needs step="):
        natgrad.Log(folder, resume=True)
    assert not folder.exists()


# Wrong use


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, TypeError, "nothing to write"),
        ({"loss": None}, TypeError, "nothing to write"),
        ({"loss": "0.5"}, TypeError, "loss must be a number or a tensor with one, got str"),
        ({"loss": True}, TypeError, "loss must be a number"),
        ({"loss": torch.zeros(3)}, TypeError, r"loss must be one number, got a tensor of shape \(3,\)"),
        ({"loss": torch.zeros((), dtype=torch.complex64)}, TypeError, "loss must be one number"),
        ({"loss": 1.0, "norm": [1.0]}, TypeError, "norm must be a number"),
        ({"loss": 1.0, "accuracy": 93.5}, ValueError, "accuracy must be from 0 to 1, got 93.5; is it in percent?"),
        ({"loss": 1.0, "accuracy": torch.tensor(93.5)}, ValueError, "in percent"),
        ({"loss": 1.0, "accuracy": -0.5}, ValueError, "from 0 to 1"),
        ({"loss": 1.0, "error": 6.5}, ValueError, "error must be from 0 to 1, got 6.5"),
        ({"loss": 1.0, "accuracy": 0.5, "error": 0.5}, TypeError, "both given"),
        ({"loss": 1.0, "seconds": 3}, ValueError, "seconds cannot be measured"),
        ({"loss": 1.0, "step": 1.5}, ValueError, "step must be a whole number"),
        ({"loss": 1.0, "step": -1}, ValueError, "step must be a whole number"),
    ],
)
def test_a_wrong_number_is_refused_and_changes_nothing(folder, given, error, text):
    log = natgrad.Log(folder, every=1)
    for told in (log.train, log.test):
        with pytest.raises(error, match=text):
            told(**given)
    assert log.step == 0
    log.train(loss=1.0)
    assert steps(folder) == [("start", 0), ("train", 1)]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be a whole number of at least 1"),
        ({"name": 3}, TypeError, "name must be of type str"),
        ({"seed": "0"}, TypeError, "seed must be of type int"),
        ({"model": "resnet"}, TypeError, "model must be of type Module"),
        ({"kfac": nn.Linear(2, 2)}, TypeError, "kfac must be of type KFAC, got Linear"),
        ({"step": -1}, ValueError, "step must be"),
        ({"resume": 3}, TypeError, "resume must be True or False"),
        ({"about": {"name": "x"}}, ValueError, "about may not say name"),
        ({"about": {"net": nn.Linear(2, 2)}}, TypeError, r"about\['net'\] must be a number or a text"),
        ({"about": "digits"}, TypeError, "about must be a dict"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(folder, given, error, text):
    with pytest.raises(error, match=text):
        natgrad.Log(folder, **given)
    assert not folder.exists()


def test_an_optimizer_with_kfac_inside_is_not_the_kfac(folder):
    optimizer = natgrad.optim.KFACSGD(nn.Linear(2, 2), lr=0.1)
    with pytest.raises(TypeError, match="got KFACSGD; pass kfac=optimizer.kfac"):
        natgrad.Log(folder, kfac=optimizer)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(NotADirectoryError, match="notes is a file"):
        natgrad.Log(tmp_path / "notes")


def test_training_is_not_testing(folder):
    log = natgrad.Log(folder, every=1)
    with log.testing(), pytest.raises(RuntimeError, match="inside of testing"):
        log.train(loss=1.0)
    log.train(loss=1.0)
    assert steps(folder) == [("start", 0), ("train", 1)]


def test_a_folder_that_goes_away_does_not_end_training(folder):
    with natgrad.Log(folder, every=1) as log:
        shutil.rmtree(folder)
        with pytest.warns(natgrad.NatgradWarning, match=r"metrics.jsonl cannot be written"):
            log.train(loss=1.0)
        log.train(loss=1.0)
        folder.mkdir()
        log.train(loss=3.0)
    assert steps(folder) == [("train", 3), ("end", 3)]


def test_an_environment_that_cannot_be_written_does_not_end_training(folder, monkeypatch):
    def full(path, facts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(environment, "record", full)
    with pytest.warns(natgrad.NatgradWarning, match="environment.json cannot be written"):
        natgrad.Log(folder).close()
    assert steps(folder) == [("start", 0), ("end", 0)]


# Ranks


def log_on_rank(rank: int, ranks: int, folder: Path) -> int:
    with natgrad.Log(folder, every=2) as log:
        for _ in range(2):
            log.train(loss=float(rank))
        with log.testing():
            log.test(loss=float(rank))
    return log.step


def test_only_the_first_rank_writes(tmp_path, folder):
    assert run_on_ranks(log_on_rank, tmp_path, 2, folder) == [2, 2]
    assert steps(folder) == [("start", 0), ("train", 2), ("test", 2), ("end", 2)]
    assert lines(folder)[0]["ranks"] == 2
    assert {line["loss"] for line in lines(folder, "train", "test")} == {0.0}


def test_a_rank_of_torchrun_knows_itself_before_the_others(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("RANK", "1")
    natgrad.Log(folder).close()
    assert not folder.exists()


# On a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.cuda
@gpu
def test_steps_do_not_wait_for_the_device(folder):
    model, optimizer, kfac = with_kfac(device="cuda", inv_update_steps=1000)
    log = natgrad.Log(folder, every=3, model=model, optimizer=optimizer, kfac=kfac)
    losses = [one_step(model, optimizer)]  # decomposes
    log.train(loss=losses[0], error=losses[0] / 100, norm=losses[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            losses.append(one_step(model, optimizer))
            log.train(loss=losses[-1], error=losses[-1] / 100, norm=losses[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    log.close()
    values = torch.stack(losses).double().tolist()
    told = lines(folder, "train")
    assert [line["step"] for line in told] == [3, 6, 8]
    assert [line["loss"] for line in told] == pytest.approx(
        [sum(values[a:b]) / (b - a) for a, b in ((0, 3), (3, 6), (6, 8))]
    )
    assert [line["accuracy"] for line in told] == pytest.approx([1 - line["loss"] / 100 for line in told])
    assert [line["norm"] for line in told] == [values[2], values[5], values[7]]
    assert all(line["step_seconds"] == sum(line["parts"].values()) > 0 for line in told)
    assert told[-1]["predicted_kl"] == kfac.metrics()["predicted_kl"]


@pytest.mark.cuda
@gpu
def test_a_buffer_that_is_used_again_is_read_in_time(folder):
    buffer = torch.zeros((), device="cuda")
    log = natgrad.Log(folder, every=2)
    for number in (1.0, 3.0):
        buffer.fill_(number)
        log.train(loss=buffer, norm=buffer)
    buffer.fill_(100)
    log.close()
    (line,) = lines(folder, "train")
    assert (line["loss"], line["norm"]) == (2.0, 3.0)


@pytest.mark.cuda
@gpu
def test_percent_on_a_device_is_told_when_it_is_read(folder):
    with pytest.warns(natgrad.NatgradWarning, match="got 93.5; is it in percent"), natgrad.Log(folder, every=1) as log:
        log.train(loss=1.0, accuracy=torch.tensor(93.5, device="cuda"))
    assert lines(folder, "train")[0]["accuracy"] is None
    assert "percent" in lines(folder, "warning")[0]["text"]


@pytest.mark.cuda
@gpu
def test_the_clock_counts_what_the_device_does(folder):
    x = torch.randn(4096, 4096, device="cuda")
    y = x @ x
    torch.cuda.synchronize()
    log = natgrad.Log(folder, every=100)
    began = time.perf_counter()
    for _ in range(20):
        for _ in range(10):
            torch.mm(x, x, out=y)
        log.train(loss=y[0, 0])
    with log.testing():
        took = time.perf_counter() - began
        for _ in range(100):
            torch.mm(x, x, out=y)
        torch.cuda.synchronize()
    log.close()
    (line,) = lines(folder, "train")
    assert lines(folder, "end")[0]["seconds"] == pytest.approx(took, rel=0.1, abs=0.005)
    assert 20 * line["step_seconds"] == pytest.approx(took, rel=0.1, abs=0.005)

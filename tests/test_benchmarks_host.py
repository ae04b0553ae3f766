"""Phases of a step on the host: all of it on a tiny model. Nothing about time."""

from __future__ import annotations

import pytest
import torch
from benchmarks import host
from benchmarks.host import PHASES, loops, main, phases
from benchmarks.workloads import Configuration, Device, Trainer, Workload


def test_every_phase_of_a_step_has_its_time():
    work = Workload(Configuration(model="tiny", batch=4, precision="fp32"), Device("cpu"))
    plain, preconditioned = Trainer(work), Trainer(work, kfac={})
    for trainer, kfac in ((plain, False), (preconditioned, True)):
        found = phases(trainer, work)
        assert len(found) == len(PHASES)
        assert all(ms > 0 for number, ms in enumerate(found) if number != 2)
        assert (found[2] > 0) is kfac


def test_busy_cores_are_beside_two_more_loops():
    options = {"solver": "eigen", "factor": 1, "inverse": 10, "fraction": 0.5}
    assert [loop.busy for loop in loops(**options, busy=3)[-2:]] == [3, 3]
    assert not any(loop.busy for loop in loops(**options, busy=0))


def test_it_prints_a_line_for_each_loop(capsys, monkeypatch):
    monkeypatch.setattr(host.time, "sleep", lambda seconds: None)
    assert main(["--model", "tiny", "--batch", "4", "--steps", "3", "--busy", "1", "--fraction", "1"]) == 0
    # The rows stand once, below their head, and what they say below them.
    _, table, told = ([*text.splitlines()] for text in capsys.readouterr().out.split("\n\n"))
    names = [loop.name for loop in loops(solver="eigen", factor=1, inverse=10, fraction=1, busy=1)]
    assert table[0].split() == " ".join(host.HEADER).split()
    assert len(table) == len(names) + 1
    for name, row in zip(names, table[1:], strict=True):
        assert row.startswith(name + " "), name
    assert len({len(row) for row in table}) == 1
    assert told[:2] == [*host.EXPLAINED]
    for word in ("SGD", "worst on the host", "age"):
        assert any(f"{word}: " in text for text in told)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    "given", [["--steps", "0"], ["--busy", "-1"], ["--model", "huge"], ["--model", "tiny-gpt", "--size", "16"]]
)
def test_what_cannot_be_measured_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        main(given)
    assert "usage" in capsys.readouterr().err

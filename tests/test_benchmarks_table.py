"""The table of step costs: its arithmetic, and all of it on tiny models. Nothing about time."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import contenders, laps, lines, loops, pictures, profiles, records, step_cost, table
from benchmarks.contenders import Contender
from benchmarks.lines import Line, chosen_lines
from benchmarks.loops import LoopSettings, Measured, Repeat
from benchmarks.timing import Intervals
from benchmarks.workloads import Configuration, Device, Trainer, Workload, kept_by_graphs

import natgrad

CPU = Device("cpu")
TINY = Configuration(model="tiny", batch=4, precision="fp32")
OFTEN = Intervals(factor=1, inverse=2)


def line(number: str, **options) -> Line:
    given = {"configuration": TINY, "intervals": OFTEN, "device": "cpu", "peer": {"eigen": 3.0, "inverse": 2.0}}
    options = {**given, "target": {"eigen": 1.5, "inverse": 1.2}, **options}
    return Line(number=number, name=f"tiny{number}", label=f"Tiny, {number}", **options)


@pytest.fixture
def few(monkeypatch):
    """Lines of tiny models, in the place of all."""
    gpt = Configuration(model="tiny-gpt", batch=3, precision="bf16")
    some = (line("1"), line("1c", compiled=True, peer={}), line("2", plus="reduce"), line("3", configuration=gpt))
    monkeypatch.setattr(lines, "LINES", some)
    monkeypatch.setattr(torch, "compile", lambda model: model)  # it would take seconds
    return some


def repeat(**changes) -> Repeat:
    values = {
        "mean_ms": 3.0,
        "sgd_ms": 2.0,
        "sgd_fastest_ms": 1.9,
        "sgd_slowest_ms": 2.1,
        "compiled_ms": 1.0,
        "cpu_ratio": None,
        "ms": [2.0, 2.0, 8.0],
        "mean_age": 5.0,
        "largest_age": 9,
        "peak_bytes": 150,
        "sgd_peak_bytes": 100,
        "state_bytes": 40,
        "counters": {},
    }
    return Repeat(**{**values, **changes})


def test_a_language_model_is_a_workload_too():
    work = Workload(Configuration(model="tiny-gpt", batch=3, precision="bf16", size=5, classes=7), CPU)
    model = work.model()
    assert model.head.out_features == 7
    assert str(work.configuration) == "tiny-gpt batch 3 of 5 tokens bf16"
    loss = work.loss(model)
    assert loss.item() == pytest.approx(torch.tensor(7.0).log().item(), rel=0.1)
    work.draw_targets()
    assert work.loss(model).item() != loss.item()
    trainer = Trainer(work, kfac={"solver": "inverse"})
    trainer.step()
    assert trainer.kfac.report()["blocks.0.mlp.0.weight"].covered
    trainer.kfac.detach()


def test_options_of_ways_add_up(monkeypatch):
    for name, options in {
        "fast": {"a": 1},
        "fast/cpu": {"b": 2},
        "fast/inverse": {"a": 3},
        "fast/cuda": {"c": 4},
    }.items():
        monkeypatch.setitem(contenders.WAYS, name, options)
    assert contenders.way_options("fast", "eigen", CPU) == {"solver": "eigen", "a": 1, "b": 2}
    assert contenders.way_options("fast+reduce", "inverse", CPU) == {
        "solver": "inverse",
        "a": 3,
        "b": 2,
        "sharing": "reduce",
    }
    assert contenders.chosen_ways("fast,plain+compile", compiled=True) == ["fast+compile", "plain+compile"]
    with pytest.raises(ValueError, match="quick"):
        contenders.chosen_ways("quick", compiled=False)


def test_loops_are_whole_periods():
    rare, often = Intervals(factor=10, inverse=100), Intervals(factor=1, inverse=10)
    assert Contender(solver="eigen", way="background", intervals=rare).length(301) == 400
    assert Contender(solver="eigen", way="plain", intervals=Intervals(factor=1, inverse=12)).length(20) == 24
    assert [Contender(solver="eigen", way="plain", intervals=each).warm_up for each in (rare, often)] == [20, 20]


def test_loops_that_take_more_steps_than_were_asked_for_say_so(few, tmp_path, capsys):
    rare, often = (
        Contender(solver="eigen", way="plain", intervals=Intervals(factor=1, inverse=each)) for each in (100, 10)
    )
    assert loops.raised([rare, often], 300, 0.1) == []
    (told,) = loops.raised([rare, often, rare], 20, 0.1)
    assert told.startswith("(100 steps of each loop at 1/100, not 20: whole intervals")
    assert "about 17 s or more" in told  # 150 steps, and 20 to warm up
    options = ["--ways", "plain", "--sgd-steps", "1", "--repeats", "1", "--device", "cpu"]
    assert table.main(["--lines", "2", "--steps", "1", *options, "--out", str(tmp_path / "one.json")]) == 0
    assert "(2 steps of each loop at 1/2, not 1: " in capsys.readouterr().out
    assert "raised to whole intervals" in " ".join(table.arguments().format_help().split())


@pytest.mark.parametrize("way", ["plain", "staggered", "background"])
def test_sgd_has_its_turns_in_between_but_not_while_something_is_decomposed_beside(monkeypatch, way):
    """Here it is for two steps of four that begin with a request."""
    monkeypatch.setitem(loops.STRETCH, "cpu", 5)
    beside = {"overlap": natgrad.Background("cpu"), "delay": 2}
    monkeypatch.setitem(contenders.WAYS, "background", beside)
    lengths, run = [], loops._Loop.run

    def watched(self, trainer, *, least, most):
        lengths.append(run(self, trainer, least=least, most=most))
        assert least <= lengths[-1] <= most
        assert lengths[-1] == most or not laps.decomposes(trainer.kfac)
        return lengths[-1]

    monkeypatch.setattr(loops._Loop, "run", watched)
    turns, turn = [], loops.Baseline.turn

    def counted(self, steps=None):
        turns.append(steps)
        return turn(self, steps)

    monkeypatch.setattr(loops.Baseline, "turn", counted)
    contender = Contender(solver="eigen", way=way, intervals=Intervals(factor=1, inverse=4))
    found = loops.measure_loops(Workload(TINY, CPU), [contender], LoopSettings(steps=20, sgd_steps=2, repeats=1))[0]
    assert found.error is None
    assert sum(lengths) == len(found.repeats[0].ms) == 20
    # The first to know its peak, the second and the last around the loop.
    assert len(turns) == 3 + len(lengths) - 1
    if way == "background":
        assert any(length > 5 for length in lengths)
    else:
        assert lengths == [5, 5, 5, 5]


def test_the_warm_up_has_two_decompositions_in_it():
    work = Workload(TINY, CPU)
    contender = Contender(solver="eigen", way="plain", intervals=Intervals(factor=2, inverse=30))
    found = loops.measure_loops(work, [contender], LoopSettings(steps=30, sgd_steps=2, repeats=1))[0]
    assert len(found.repeats[0].ms) == 30
    # Of the four factors: the first at 0, the second at 10, the third 30 steps later.
    assert found.repeats[0].counters["decompositions"] == 3 * 4
    assert found.repeats[0].largest_age == 29
    assert found.error is None


@pytest.mark.parametrize("way", ["plain", "background"])
def test_the_warm_up_ends_when_the_second_decomposition_is_in_use(way):
    contender = Contender(solver="eigen", way=way, intervals=Intervals(factor=2, inverse=1000))
    work = Workload(TINY, CPU)
    trainer = contender.trainer(work)
    loops._warm_up(contender, trainer, work)
    assert trainer.kfac.metrics()["decompositions"] == 2 * 4
    trainer.kfac.detach()


def test_turns_before_and_after_a_loop_are_long(monkeypatch):
    turns = []
    measured = loops.mean_step

    def watched(trainer, work, steps):
        turns.append(steps)
        return measured(trainer, work, steps)

    monkeypatch.setattr(loops, "mean_step", watched)
    for seconds, expected in ((0.0, 2), (1e3, 15)):  # as many as asked for, or half the loop's
        monkeypatch.setitem(loops.LONG_TURN, "cpu", seconds)
        turns.clear()
        loops.Baseline(Workload(TINY, CPU), LoopSettings(steps=30, sgd_steps=2))
        assert turns == [2, expected]


def test_a_summary_by_hand():
    one = Measured(contender=Contender(solver="eigen", way="plain", intervals=OFTEN))
    assert one.summary() == {}
    one.repeats = [repeat(), repeat(mean_ms=4.0), repeat(mean_ms=10.0, peak_bytes=140)]
    found = one.summary()
    assert (found["ratio"], found["compiled_ratio"], found["worst_to_median"]) == (2.0, 4.0, 4.0)
    assert found["sgd_spread"] == pytest.approx(2.1 / 1.9)
    assert (found["peak_ratio"], found["memory_beyond"]) == (1.5, pytest.approx(0.1))
    one.repeats = [repeat(peak_bytes=None, sgd_peak_bytes=None, compiled_ms=None)]
    assert not {"peak_ratio", "memory_beyond", "compiled_ratio"} & set(one.summary())
    assert loops.rows([one])[1][1:4] == ["3.00", "2.00", "1.500"]


def test_what_a_graph_frees_is_still_its_own():
    everybodys = {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10}
    graphs = {"segment_pool_id": (0, 1), "total_size": 50, "allocated_size": 20}
    assert kept_by_graphs([everybodys, graphs, graphs]) == 60


def test_lines_are_those_of_the_device():
    assert [one.number for one in chosen_lines(None, "cpu")] == ["9a", "9b", "9c"]
    assert [one.number for one in chosen_lines("5,gpt,1", "cuda")] == ["5", "5c", "6", "1"]
    with pytest.raises(ValueError, match=r"9a .* got '1', which needs --device cuda"):
        chosen_lines("1", "cpu")
    with pytest.raises(ValueError, match="got '9', which needs --device cpu"):
        chosen_lines("9", "cuda")
    with pytest.raises(ValueError, match="got '8', which comes with the others"):
        chosen_lines("8", "cuda")
    with pytest.raises(ValueError, match="got ''$"):
        chosen_lines("", "cuda")
    for one in lines.LINES:
        assert one.peer.keys() | one.target.keys() <= {"eigen", "inverse"}


def test_the_table_of_tiny_models(few, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(loops.STRETCH, "cpu", 2)
    out = tmp_path / "one.json"
    options = ["--steps", "4", "--sgd-steps", "2", "--repeats", "2", "--device", "cpu"]
    assert table.main(["--lines", "1,2", "--ways", "plain", *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Worst step over median step, Tiny, 1" in printed
    found = records.read(out)
    assert [(one["solver"], one["way"]) for one in found] == [
        ("eigen", "plain"),
        ("inverse", "plain"),
        ("eigen", "plain+reduce"),
        ("inverse", "plain+reduce"),
    ]
    assert all(len(one["repeats"]) == len(one["ratios"]) == 2 for one in found)
    assert all("compiled_ratio" in one["summary"] for one in found)  # line 1 is 1c too
    # Another run, of another line, and one of the same measurements again: the later one wins.
    other, whole = tmp_path / "two.json", tmp_path / "whole.json"
    options = [*options, "--solver", "eigen"]
    assert table.main(["--lines", "3,1", "--ways", "plain,background", *options, "--out", str(other)]) == 0
    assert table.main(["--merge", str(out), str(other), "--out", str(whole)]) == 0
    together = records.read(whole)
    assert len(together) == 7
    assert next(one for one in together if one["way"] == "plain") == records.read(other)[2]
    whole.with_suffix(".png").unlink()
    assert table.main(["--plot-only", str(whole)]) == 0
    assert whole.with_suffix(".png").stat().st_size > 1000
    assert "Tiny, 3" in capsys.readouterr().out


def test_a_run_that_is_stopped_leaves_what_it_has(few, tmp_path, monkeypatch):
    once = loops.measure_once

    def stopping(contender, *rest):
        if contender.solver == "inverse":
            raise KeyboardInterrupt
        return once(contender, *rest)

    monkeypatch.setattr(loops, "measure_once", stopping)
    out = tmp_path / "part.json"
    with pytest.raises(KeyboardInterrupt):
        table.main(["--lines", "1", "--steps", "2", "--sgd-steps", "1", "--device", "cpu", "--out", str(out)])
    assert [one["solver"] for one in records.read(out)] == ["eigen"]


def test_what_fails_does_not_hide_the_rest(few, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(contenders.WAYS, "fast/inverse", {"damping": -1.0})
    out = tmp_path / "part.json"
    options = ["--steps", "2", "--sgd-steps", "1", "--repeats", "1", "--device", "cpu", "--out", str(out)]
    assert table.main(["--lines", "1", *options]) == 1
    assert [one["error"] is None for one in records.read(out)] == [True, False]
    assert "failed" in capsys.readouterr().out


def test_marks_of_targets_reached(few):
    record = {"summary": {"ratio": 1.3, "compiled_ratio": 2.0}, "error": None}
    assert table._reached(few[0], "eigen", record) == "1.300 ✓"
    assert table._reached(few[0], "inverse", record) == "1.300 ✗"
    assert table._reached(few[1], "eigen", record) == "2.000 ✗"
    assert table._reached(few[0], "eigen", None) == "-"


def test_marks_of_one_run_are_said_to_be(few):
    def record(repeats: int, way: str) -> records.Record:
        what = {"kind": "loop", "device_type": "cpu", "solver": "eigen", "way": way, "factor": 1, "inverse": 2}
        configuration = {"model": "tiny", "batch": 4, "precision": "fp32", "size": None, "classes": None}
        return {**what, **configuration, "summary": {"ratio": 1.3}, "error": None, "repeats": [{}] * repeats}

    assert table.doubts([record(2, "plain")]) == table.doubts([record(0, "plain")]) == []
    (told,) = table.doubts([record(1, "plain"), record(3, "plain+reduce")])
    assert told.startswith("One run of each on lines 1, 1c: ")
    assert "--repeats" in told
    (told,) = table.doubts([record(1, "plain"), record(1, "plain+reduce")])
    assert "lines 1, 1c, 2" in told


def test_a_way_that_one_line_adds_may_be_asked_for_on_another(monkeypatch):
    """Line 2 adds "reduce", to the work of line 1; line 3 "quarter", to other work."""
    other = Configuration(model="tiny", batch=5, precision="fp32")
    some = [line("1"), line("2", plus="reduce"), line("3", plus="quarter", configuration=other)]
    monkeypatch.setattr(lines, "LINES", some)
    work, more = Workload(TINY, CPU), Workload(other, CPU)

    def record(workload: Workload, way: str) -> records.Record:
        contender = Contender(solver="eigen", way=way, intervals=OFTEN)
        return records.loop_record(workload, Measured(contender=contender, repeats=[repeat()]))

    ways = ["fast", "fast+quarter", "fast+reduce", "fast+quarter+reduce"]
    found = [*(record(work, way) for way in ways), record(more, "fast+quarter"), record(more, "fast")]
    assert [records.ways_of(one, found) for one in some] == [ways[:2], ways[2:], ["fast+quarter"]]
    assert [row[::2][:2] for row in table.table_rows(found)[1:]] == [
        ["1", "fast"],
        ["1", "fast+quarter"],
        ["2", "fast+reduce"],
        ["2", "fast+quarter+reduce"],
        ["3", "fast+quarter"],
    ]


def test_numbers_of_memory_and_worst_steps_are_in_the_order_of_the_columns(few):
    def record(solver: str, beyond: float) -> records.Record:
        what = {"kind": "loop", "device_type": "cpu", "solver": solver, "way": "plain", "factor": 1, "inverse": 2}
        configuration = {"model": "tiny", "batch": 4, "precision": "fp32", "size": None, "classes": None}
        return {**what, **configuration, "summary": {"memory_beyond": beyond, "worst_to_median": 10 * beyond}}

    worst, memory = table.sentences([record("inverse", 0.25), record("eigen", 0.5)])
    assert "eigen 5.00, inverse 2.50" in worst
    assert "1: +50.0% / +25.0%" in memory
    worst, memory = table.sentences([record("inverse", 0.25)])
    assert "plain: inverse 2.50" in worst
    assert "1: - / +25.0%" in memory


def test_a_picture_never_takes_the_place_of_the_numbers(few, tmp_path, capsys):
    numbers = tmp_path / "one.json"
    records.write(numbers, [])
    for given in ([], ["--merge", str(numbers)]):
        with pytest.raises(SystemExit):
            table.main([*given, "--device", "cpu", "--out", str(tmp_path / "one.png")])
        assert "is for JSON: the picture goes beside it as .png" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_what_has_no_loops_is_not_drawn(tmp_path, capsys):
    empty = tmp_path / "empty.json"
    records.write(empty, [])
    with pytest.raises(SystemExit):
        table.main(["--plot-only", str(empty)])
    assert "has no loops to draw; profiles are for --plot-profile" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        table.main(["--plot-only", str(empty), "--merge", str(empty)])
    assert "not allowed with" in capsys.readouterr().err


def test_parts_of_a_step(few, tmp_path, capsys):
    files = [tmp_path / f"{name}.json" for name in ("before", "after")]
    for path in files:
        assert table.main(["--profile", "--profile-steps", "4", "--device", "cpu", "--out", str(path)]) == 0
    found = records.read(files[0])
    assert [one["solver"] for one in found] == [None, "eigen", "inverse"]
    assert set(found[0]["parts"]) == {"forward", "backward", "optimizer"}
    assert set(found[1]["parts"]) == set(profiles.PARTS)
    assert "precondition" in capsys.readouterr().out
    out = tmp_path / "parts.png"
    assert table.main(["--plot-profile", *map(str, files), "--out", str(out)]) == 0
    assert out.stat().st_size > 1000
    with pytest.raises(ValueError, match="no profile"):
        pictures.draw_profiles({"none": []}, out=out)


def test_step_costs_with_loops(tmp_path, capsys):
    out = tmp_path / "costs.jsonl"
    options = ["--batch", "4", "--rounds", "1", "--steps", "1", "--device", "cpu", "--json", str(out)]
    loop = ["--loop", "100", "--ways", "plain,background", "--solver", "inverse"]
    assert step_cost.main(["--model", "tiny", *options, *loop]) == 0
    printed = capsys.readouterr().out
    assert "inverse, background, 1/10" in printed
    assert all(text in printed.splitlines() for text in step_cost.EXPLAINED)
    assert "10/100 and 1/10: the mean step" in printed
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert [one["benchmark"] for one in found] == ["step_cost"] * 2 + ["loop"] * 4


def test_the_table_is_an_option_of_step_cost(few, tmp_path):
    out = tmp_path / "whole.json"
    options = ["--steps", "2", "--sgd-steps", "1", "--repeats", "1", "--device", "cpu", "--out", str(out)]
    assert step_cost.main(["--table", "--lines", "1", "--solver", "eigen", *options]) == 0
    assert len(records.read(out)) == 1

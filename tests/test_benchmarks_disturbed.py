"""Runs that something else disturbed are told from others: by SGD's turns, in tables, pictures and JSON."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import disturbed, host, lines, loops, pictures, records, table
from benchmarks.loops import LoopSettings, Mean
from benchmarks.timing import Intervals
from benchmarks.workloads import Configuration, Device, Workload
from matplotlib.figure import Figure

from natgrad.compare.advice import DISTURBED

TINY = Configuration(model="tiny", batch=4, precision="fp32")
DOCUMENTED = Path(__file__).parents[1] / "docs/step-cost.json"


def measured(spread: float | None, *, solver: str = "eigen", inverse: int = 2) -> records.Record:
    summary = {"ratio": 1.3} if spread is None else {"ratio": 1.3, "sgd_spread": spread}
    where = {"kind": "loop", "device_type": "cpu", "device": "cpu", "model": "tiny", "batch": 4, "precision": "fp32"}
    what = {"size": None, "classes": None, "way": "plain", "solver": solver, "factor": 1, "inverse": inverse}
    rest = {"worst_to_median": 1.0, "mean_age": 1.0, "largest_age": 1}
    return {**where, **what, "torch": "2", "summary": {**summary, **rest}, "repeats": [{}], "error": None}


@pytest.fixture
def two(monkeypatch):
    """Lines that differ in their intervals."""
    some = tuple(
        lines.Line(
            number=number,
            name=number,
            label="Tiny",
            device="cpu",
            configuration=TINY,
            intervals=Intervals(factor=1, inverse=inverse),
            target={"eigen": 1.5},
        )
        for number, inverse in (("1", 2), ("2", 3))
    )
    monkeypatch.setattr(lines, "LINES", some)
    return some


def test_one_sentence_about_all_that_is_doubted():
    assert disturbed.sentences({}) == disturbed.sentences({"on line 1": 1.2}) == []
    (told,) = disturbed.sentences({"on line 1": 1.94, "on line 2": 1.1, "on line 3": 1.5, "on line 4": 27.0})
    assert told.startswith(
        "SGD's own turns differed by 1.9 times on line 1, by 1.5 times on line 3 and by 27.0 times on "
    )
    assert DISTURBED in told  # as `natgrad compare` says it
    assert not disturbed.unsteady(None)


def test_each_repeat_keeps_the_range_of_sgds_turns(monkeypatch):
    monkeypatch.setitem(loops.STRETCH, "cpu", 2)
    seconds = cycle([0.002, 0.001, 0.004])
    monkeypatch.setattr(loops.Baseline, "turn", lambda self, steps=None: Mean(next(seconds), 0.001))
    contender = loops.Contender(solver="eigen", way="plain", intervals=Intervals(factor=1, inverse=2))
    work = Workload(TINY, Device("cpu"))
    (found,) = loops.measure_loops(work, [contender], LoopSettings(steps=6, sgd_steps=1, repeats=1))
    (repeat,) = found.repeats
    assert (repeat.sgd_fastest_ms, repeat.sgd_slowest_ms) == pytest.approx((1.0, 4.0))
    assert found.summary()["sgd_spread"] == pytest.approx(4.0)
    row = loops.rows([found])[1]
    assert row[-1] == "1.00-4.00"
    assert row[3].endswith(" ?")
    assert records.loop_record(work, found)["repeats"][0]["sgd_slowest_ms"] == pytest.approx(4.0)


def test_disturbed_cells_have_no_mark_of_the_target(two, capsys):
    found = [measured(1.1), measured(1.9, inverse=3), measured(1.0, solver="inverse", inverse=3)]
    first, second = table.table_rows(found)[1:]
    assert [row[5:7] for row in (first, second)] == [["1.300 ✓", "-"], ["1.300 ?", "1.300"]]
    table.report(found)
    printed = capsys.readouterr().out
    assert "SGD's own turns differed by 1.9 times on line 2: something else was using this machine" in printed


@pytest.mark.parametrize(("spread", "text"), [(1.1, "1.30"), (1.9, "1.30 ?")])
def test_pictures_doubt_too(two, tmp_path, monkeypatch, spread, text):
    texts, save = [], Figure.savefig

    def watched(figure, *args, **options):
        texts.extend(label.get_text() for label in figure.axes[0].texts)
        texts.extend(label.get_text() for label in figure.legends[0].get_texts())
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", watched)
    pictures.draw_table([measured(spread)], out=tmp_path / "picture.png")
    assert text in texts
    assert any("unsteady" in one for one in texts) is (spread > disturbed.UNSTEADY)
    assert "target" in texts


def test_what_was_written_before_is_read_without_a_doubt(tmp_path):
    """Before turns of SGD were compared."""
    earlier = tmp_path / "earlier.json"
    found = records.read(DOCUMENTED)
    for record in found:
        del record["summary"]["sgd_spread"]
        for repeat in record["repeats"]:
            del repeat["sgd_fastest_ms"], repeat["sgd_slowest_ms"]
    records.write(earlier, found)
    found = records.read(earlier)
    rows = table.table_rows(found)
    assert len(rows) > 1
    assert not any(disturbed.MARK in cell for row in rows for cell in row)
    assert not any(DISTURBED in text for text in table.doubts(found))


def test_loops_on_the_host_are_doubted_too():
    some = {"name": "in the step", "mean": 3.0, "phases": [1.0] * 4, "worst": 2.0, "age": None}
    quiet, loud = (host.Found(**some, turns=turns) for turns in ((2.0, 2.0), (2.0, 1.0)))
    assert [one.cells()[3] for one in (quiet, loud)] == ["1.50", "2.00 ?"]
    assert loud.spread == 2.0

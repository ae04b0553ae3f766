"""The page without a browser: what figures and tables hold, that nothing breaks it, and that it asks for nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import natgrad.page
from natgrad.compare.arrivals import Arrival, Measure, Row
from natgrad.compare.history import Comparison, Contender, Layer, Point, Reading, Run, Trial
from natgrad.compare.verdict import Verdict, judge
from natgrad.page import drawing, families, figures, inside, markup, series, sweeps, tables, words
from natgrad.page.public import few, without_paths
from page import made_up

pytest.importorskip("plotly", reason="the page needs plotly")


def run(
    *test: tuple[int, float, float | None], train: tuple[tuple[int, float, float | None], ...] = (), **more: Any
) -> Run:
    """Of (step, seconds, loss); finished, unless told."""
    known = {"folder": Path("runs/one"), "name": "one", "reason": "finished", **more}
    return Run(test=points(*test), train=points(*train), **known)


def points(*made: tuple[int, float, float | None]) -> tuple[Point, ...]:
    return tuple(Point(step=step, seconds=seconds, loss=loss) for step, seconds, loss in made)


def of(*contenders: Contender) -> Comparison:
    return Comparison(title="A title", contenders=contenders)


def verdict(**more: Any) -> Verdict:
    known = {"sentence": "It pays.", "advice": (), "measure": Measure(what="loss"), "target": None, "target_says": ""}
    return Verdict(**{**known, "rows": (), **more})


def lines(figure: drawing.Figure, axis: str) -> list[dict[str, Any]]:
    """The mean curves of a panel: neither bands nor what only answers to the pointer."""
    return [
        trace
        for trace in figure.data
        if trace.get("xaxis") == axis and "fill" not in trace and trace.get("opacity") != 0
    ]


class Reader(HTMLParser):
    """What a browser would find: elements with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (0.012345, "0.0123"), (9.995, "9.99"), (99.96, "100"), (123.4, "123"),
        (12345.6, "12\u2009346"), (-0.5, "−0.500"), (1.234e-7, "1.23\u2009×\u200910⁻⁷"),
        (2e9, "2.00\u2009×\u200910⁹"), (None, "–"), (float("nan"), "–"), (float("inf"), "–"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert words.number(value) == text


def test_settings_are_written_as_they_were_set():
    assert [words.setting(value) for value in (0.1, 3e-5, 0.003, 5)] == ["0.1", "3e-05", "0.003", "5"]


def test_what_is_not_all_is_never_100_percent():
    assert words.percent(1) == "100\u2009%"
    assert words.percent(0.99999) == "99.9\u2009%"


def test_long_names_keep_both_ends():
    assert words.shortened("short", 9) == "short"
    assert words.shortened("layer1.0.conv1", 9) == "laye…onv1"


# Curves


def test_seeds_are_averaged_step_by_step():
    curve = series.by_step([[(1, 4.0), (2, 2.0)], [(1, 6.0), (2, 1.0)], [(1, 5.0), (2, 3.0)]])
    assert curve is not None
    assert (curve.x, curve.mean, curve.low, curve.high) == ((1, 2), (5, 2), (4, 1), (6, 3))
    assert curve.seeds == 3


def test_steps_that_only_one_seed_has_are_left_out():
    curve = series.by_step([[(1, 4.0), (2, 2.0), (3, 1.0)], [(1, 6.0), (3, 3.0)]])
    assert curve is not None
    assert (curve.x, curve.mean) == ((1, 3), (5, 2))


def test_seeds_without_common_steps_are_interpolated():
    curve = series.by_step([[(1, 1.0), (3, 3.0), (5, 5.0)], [(2, 4.0), (4, 8.0), (6, 12.0)]])
    assert curve is not None
    assert (curve.x, curve.mean) == ((2, 3, 4, 5), (3, 4.5, 6, 7.5))


def test_the_clock_is_interpolated_and_ends_with_the_shortest_run():
    curve = series.between([[(0.0, 10.0), (10.0, 0.0)], [(2.0, 8.0), (4.0, 4.0), (8.0, 0.0)]])
    assert curve is not None
    assert curve.x == (2, 4, 8)
    assert curve.low == (8, 4, 0)
    assert curve.high == (8, 6, 2)
    assert curve.mean == (8, 5, 1)


def test_one_evaluation_a_run_is_one_point():
    curve = series.between([[(9.0, 1.0)], [(11.0, 3.0)]])
    assert curve is not None
    assert (curve.x, curve.mean, curve.low, curve.high) == ((10,), (2,), (1,), (3,))


def test_what_is_no_number_interrupts_the_curve():
    curve = series.by_step([[(1, 1.0), (2, None), (3, 3.0)], [(1, 3.0), (2, 2.0), (3, float("nan"))]])
    assert curve is not None
    assert curve.mean == (2, None, None)


def test_next_to_what_is_no_number_nothing_is_interpolated():
    line = [(0.0, 0.0), (2.0, None), (4.0, 4.0), (6.0, 8.0)]
    assert [series.at(line, x) for x in (-1, 0, 1, 2, 3, 4, 5, 6, 7)] == [None, 0, None, None, None, 4, 6, 8, None]


def test_long_curves_are_thinned_and_keep_both_ends():
    thin = series.thinned(list(range(1001)), 11)
    assert thin == list(range(0, 1001, 100))


def test_the_band_goes_there_and_back_in_pieces():
    curve = series.Curve(x=(1, 2, 3, 4), mean=(1, 1, None, 1), low=(0, 0, None, 0), high=(2, 3, None, 4), seeds=2)
    assert families.band(curve) == ([1, 2, 2, 1, None, 4, 4], [2, 3, 0, 0, None, 4, 0])


def test_panels_hold_the_mean_of_the_seeds():
    one = Contender(name="SGD", runs=(run((10, 1.0, 4.0), (20, 2.0, 2.0)), run((10, 1.0, 2.0), (20, 3.0, 1.0))))
    figure = figures.curves(of(one), verdict())
    assert figure is not None
    (updates,) = lines(figure, "x")
    assert (updates["x"], updates["y"]) == ([10, 20], [3, 1.5])
    (seconds,) = lines(figure, "x2")
    assert (seconds["x"], seconds["y"]) == ([1, 2.5], [3, 1.5])  # every step at its mean time
    assert set(figure.layout) >= {"xaxis", "xaxis2", "yaxis", "yaxis2"}
    assert "xaxis3" not in figure.layout  # no error: only the two of the loss


def test_error_is_in_percent_and_has_the_target():
    test = (Point(step=1, seconds=1.0, loss=1.0, error=0.5), Point(step=2, seconds=2.0, loss=0.9, error=0.2))
    one = Contender(name="SGD", runs=(Run(folder=Path("a"), name="a", test=test, reason="finished"),))
    figure = figures.curves(of(one), verdict(measure=Measure(what="error"), target=0.25))
    assert figure is not None
    assert lines(figure, "x3")[0]["y"] == [50, 20]
    assert [(shape["yref"], shape["y0"]) for shape in figure.layout["shapes"]] == [("y3", 25), ("y4", 25)]


def test_errors_of_tests_alone_are_in_the_picture():
    test = tuple(Point(step=step, seconds=float(step), loss=1.0, error=error) for step, error in ((1, 0.24), (2, 0.07)))
    train = (Point(step=1, seconds=1.0, loss=2.0), Point(step=2, seconds=2.0, loss=1.0))  # a loss, and no error
    one = Contender(name="SGD", runs=(Run(folder=Path("a"), name="a", test=test, train=train, reason="finished"),))
    figure = figures.curves(of(one), verdict(measure=Measure(what="error"), target=0.07))
    assert figure is not None
    low, high = figure.layout["yaxis3"]["range"]
    assert low < 7 < 24 < high


def test_seeds_of_different_speed_are_one_line_against_the_clock():
    fast, slow = (run(*((step, speed * step, 1 / step) for step in range(1, 9))) for speed in (1.0, 20.0))
    figure = figures.curves(of(Contender(name="SGD", runs=(fast, slow))), verdict())
    assert figure is not None
    (line,) = lines(figure, "x2")
    assert line["x"] == [10.5 * step for step in range(1, 9)]
    assert not [trace for trace in figure.data if trace.get("marker", {}).get("symbol") == "x-thin"]


def test_one_seed_has_no_band_and_train_is_dashed():
    one = Contender(name="SGD", runs=(run((1, 1.0, 2.0), (2, 2.0, 1.0), train=((1, 1.0, 3.0), (2, 2.0, 2.0))),))
    figure = figures.curves(of(one), verdict())
    assert figure is not None
    assert not [trace for trace in figure.data if "fill" in trace]
    assert [bool(trace["line"].get("dash")) for trace in lines(figure, "x")] == [True, False]


def test_a_run_that_did_not_finish_is_drawn_apart():
    runs = (run((1, 1.0, 2.0), (2, 2.0, 1.0)), run((1, 1.0, 8.0), (2, 2.0, None), reason="SIGTERM"))
    figure = figures.curves(of(Contender(name="SGD", runs=runs)), verdict())
    assert figure is not None
    mean, thin, cross = lines(figure, "x")
    assert mean["y"] == [2, 1]
    assert thin["y"] == [8, None]
    assert (cross["x"], cross["y"], cross["marker"]["symbol"]) == ([1], [8], "x-thin")
    assert "did not finish" in figure.caption


def test_a_long_run_that_broke_off_is_thinned_and_keeps_its_end():
    line = [(float(step), None if step < 1000 else 1.0) for step in range(1, 1001)]
    family = families.family_of([([(1.0, 1.0)], True), (line, False)])
    (thin,) = family.loose
    assert thin[-1] == (1000, 1)
    assert len(thin) <= 400


@pytest.mark.parametrize(
    ("losses", "kind"), [((2.0, 0.1), "log"), ((2.0, 0.5), None), ((2.0, -0.1), None), ((2.0, 0.0), None)]
)
def test_the_scale_is_logarithmic_where_loss_spans_a_decade(losses, kind):
    made = run(*((step, float(step), loss) for step, loss in enumerate(losses, start=1)))
    figure = figures.curves(of(Contender(name="SGD", runs=(made,))), verdict())
    assert figure is not None
    assert figure.layout["yaxis"].get("type") == kind


def test_a_run_that_explodes_does_not_flatten_the_others():
    calm = Contender(name="calm", runs=(run((1, 1.0, 2.0), (2, 2.0, 1.0)),))
    wild = Contender(name="wild", runs=(run((1, 1.0, 2.0), (2, 2.0, 1e9)),))
    figure = figures.curves(of(calm, wild), verdict())
    assert figure is not None
    assert figure.layout["yaxis"]["range"][1] == pytest.approx(6, rel=0.05)


def test_the_pointer_finds_all_contenders_at_the_same_places():
    a = Contender(name="a", runs=(run((10, 1.0, 4.0), (30, 3.0, 2.0)),))
    b = Contender(name="b", runs=(run((10, 1.0, 8.0), (20, 2.0, 6.0), train=((10, 1.0, 9.0), (20, 2.0, 7.0))),))
    figure = figures.curves(of(a, b), verdict())
    assert figure is not None
    answers = {trace["name"]: trace for trace in figure.data if trace.get("opacity") == 0 and trace["xaxis"] == "x"}
    assert answers["a"]["x"] == [10, 20, 30]
    assert answers["a"]["text"] == ["test 4.00", "test 3.00", "test 2.00"]
    assert answers["b"]["text"] == ["test 8.00   train 9.00", "test 6.00   train 7.00"]


def test_colours_and_symbols_are_the_same_everywhere_and_kfac_has_the_first():
    made = made_up.comparison(names=[*"abcdef", "K-FAC", "K-FAC two"])
    looks = drawing.looks(made)
    assert len({look.colour for look in looks}) == len({look.symbol for look in looks}) == 8
    assert [look.colour for look in looks[-2:]] == ["@c0", "@c1"]


def test_long_training_is_counted_in_minutes_and_hours():
    assert [figures.time_unit(seconds)[0] for seconds in (60, 3000, 50_000)] == ["seconds", "minutes", "hours"]


# The other figures


def test_parts_of_a_step_are_means_in_milliseconds():
    runs = (run(parts={"model": 0.010, "odd": 0.001}), run(parts={"model": 0.020, "data": 0.004}), run())
    figure = figures.step_time(of(Contender(name="SGD", runs=runs), Contender(name="none", runs=(run(),))))
    assert figure is not None
    assert {bar["name"]: bar["x"] for bar in figure.data} == {"data": [2], "model": [15], "odd": [0.5]}
    assert [bar["name"] for bar in figure.data] == ["data", "model", "odd"]


def test_diverged_trials_stand_at_the_top_and_the_chosen_has_a_ring():
    trials = (
        Trial(settings={"lr": 0.1}, rungs=((1, 0.5), (2, 0.4)), chosen=True),
        Trial(settings={"lr": 1.0}, rungs=((1, None),)),
    )
    figure = sweeps.sweep(of(Contender(name="SGD", runs=(), trials=trials)))
    assert figure is not None
    marks = {trace["marker"]["symbol"]: trace for trace in figure.data if "marker" in trace}
    assert (marks["circle-open"]["x"], marks["circle-open"]["y"]) == ([0.1], [0.4])
    (cross,) = marks["x-thin"]["y"]
    assert 0.5 < cross < figure.layout["yaxis"]["range"][1]
    assert "diverged" in marks["x-thin"]["text"][0]


def test_more_damping_is_a_larger_mark():
    trials = tuple(Trial(settings={"lr": 0.1, "damping": d}, rungs=((1, 0.5),)) for d in (1e-4, 1e-3, 1e-2))
    figure = sweeps.sweep(of(Contender(name="K-FAC", runs=(), trials=trials, uses_kfac=True)))
    assert figure is not None
    assert [trace["marker"]["size"] for trace in figure.data if "marker" in trace] == [[8, 12, 16]]


def test_only_what_varies_is_shown_of_kfac():
    said = tuple(Reading(step=step, seconds=step, predicted_kl=10.0**-step, damping=0.1) for step in (1, 2, 3))
    figure = inside.readings(of(Contender(name="K-FAC", runs=(run(readings=said),))))
    assert figure is not None
    assert figure.layout["yaxis"]["type"] == "log"
    assert "yaxis2" not in figure.layout


def test_layers_have_logarithms_of_conditions_and_ages():
    said = tuple(
        Layer(step=step, name=name, condition=None if step == 2 and name == "b" else 100.0 * step, age=age)
        for step, name, age in ((1, "a", 0), (1, "b", 5), (2, "a", 4), (2, "b", None))
    )
    figure = inside.layers(Contender(name="K-FAC", runs=(run(layers=said),)))
    assert figure is not None
    heat, ranges, means = figure.data
    assert heat["z"] == [[2, pytest.approx(2.30103)], [2, None]]
    assert ranges["x"] == [0, 4, None, 0, 5, None]
    assert means["x"] == [2, 5]


def test_a_hundred_layers_are_still_legible():
    figure = inside.layers(made_up.contender("K-FAC", layers=100))
    assert figure is not None
    assert len(figure.layout["yaxis"]["tickvals"]) <= 42
    assert figure.height < 1100


# Tables


def row(name: str, *, updates: float | None, seconds: float | None, arrived: int = 2) -> Row:
    step, second = updates or 2, seconds or 2.0
    there = [Arrival(step=step - 1, seconds=second - 1), Arrival(step=step + 1, seconds=second + 1)]
    return Row(
        name=name,
        uses_kfac=False,
        arrivals=(*there[:arrived], *[None] * (2 - arrived)),
        bests=(0.05, 0.05),
    )


def test_winners_of_each_column_are_named():
    rows = (
        row("a", updates=100, seconds=20),
        row("b", updates=50, seconds=30),
        row("c", updates=None, seconds=None, arrived=0),
    )
    close = (row("a", updates=100, seconds=20), row("b", updates=101, seconds=20))
    assert not any(cell.mark for line in tables.times(verdict(rows=close)).rows for cell in line)  # they overlap
    table = tables.times(verdict(rows=rows, measure=Measure()))
    assert [[cell.mark for cell in line[2:4]] for line in table.rows] == [["", "fastest"], ["fewest", ""], ["", ""]]
    assert [(line[2].text, line[2].more) for line in table.rows] == [
        ("100", "99 to 101"),
        ("50", "49 to 51"),
        ("–", ""),
    ]
    assert [line[4].text for line in table.rows] == ["5.00\u2009%"] * 3
    assert not any(line[4].mark for line in table.rows)  # all the same


def test_seeds_that_arrived_are_counted():
    rows = (row("a", updates=None, seconds=None, arrived=1), row("b", updates=1, seconds=2))
    assert [line[1].text for line in tables.times(verdict(rows=rows)).rows] == ["1 of 2", "2 of 2"]


def test_coverage_is_shown_once_for_contenders_alike():
    line = {"parameter": "0.weight", "block": "linear", "factors": "A 3²", "bytes": 2048, "reason": "", "elements": 30}
    left = {"parameter": "1.weight", "block": "", "factors": "", "bytes": 0, "reason": "has no block", "elements": 10}
    same = [Contender(name=name, runs=(run(coverage=(line, left)),)) for name in ("K-FAC", "K-FAC two")]
    other = Contender(name="K-FAC three", runs=(run(coverage=(line,)),))
    first, second = tables.coverages(of(*same, other, Contender(name="SGD", runs=(run(),))))
    assert first.caption == "K-FAC, K-FAC two: 1 of 2 parameters, 75\u2009% of the weights; 2.0 KiB of factors"
    assert first.rows[1][1].more == "has no block"
    assert second.caption.startswith("K-FAC three: 1 of 1 parameter, 100\u2009%")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("finished", "finished"),
        ("SIGINT", "stopped early (SIGINT)"),
        ("unfinished", "no end: killed, or still training"),
        ("diverged: the loss is no number", "diverged: the loss is no number"),
    ],
)
def test_ends_of_runs_are_in_words(reason, said):
    assert tables.ending(run(reason=reason)) == said


def test_warnings_are_few_and_those_that_differ_in_numbers_are_one():
    nan = [f"the training loss is nan at step {step}" for step in range(20_000)]
    assert few(["c", *nan]) == ("c", "the training loss is nan at step 0 (and 19999 like it)")
    assert few(["a  b", "b", "c", "d", "e"]) == ("a b", "b", "c", "and 2 other warnings")
    assert few([]) == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the last is /home/alice/runs/x/step-3.pt. Try", "the last is …/step-3.pt. Try"),
        ("No such file: '/home/alice/secret/token.txt'", "No such file: '…/token.txt'"),
        (r"skipped C:\Users\alice\cat.jpg", "skipped …/cat.jpg"),
        ("~/private/cat.jpg cannot be read", "…/cat.jpg cannot be read"),
        ("12 of 30 steps/s, 3/4 done", "12 of 30 steps/s, 3/4 done"),
        ("kfac-reduce, 5 % / 3", "kfac-reduce, 5 % / 3"),
    ],
)
def test_places_on_disk_are_not_for_everybody(text, shown):
    assert without_paths(text) == shown


def test_a_page_does_not_tell_where_somebody_keeps_things():
    made = made_up.comparison()
    secret = "/home/alice/secret-client"
    told = f"crashed: no file {secret}/data/x.bin, see {secret}/log.txt"
    contenders = [
        replace(
            one,
            note=told,
            trials=tuple(replace(trial, note=told) for trial in one.trials),
            runs=tuple(
                replace(
                    run,
                    folder=Path(f"{secret}/{index}/{run.seed}"),
                    reason=told,
                    warnings=(told,),
                    about={**run.about, "folder": secret, "data": f"images in {secret}/images"},
                    environment={**run.environment, "folder": secret, "command": told, "host": "alices-laptop"},
                )
                for run in one.runs
            ),
        )
        for index, one in enumerate(made.contenders)
    ]
    made = replace(made, contenders=tuple(contenders), notes=(told,))
    html = natgrad.page.render(made, judge(made))
    assert "alice" not in html
    assert "secret" not in html
    assert "…/x.bin" in html


def test_folders_that_have_nothing_in_common_are_called_by_their_last_part():
    runs = [run(folder=Path("/home/alice/secret-client/kfac")), run(folder=Path("/data/runs/sgd"))]
    assert list(tables.short_folders(runs).values()) == ["kfac", "sgd"]


def test_folders_lose_what_they_have_in_common():
    runs = [run(folder=Path(f"/home/me/compare/{name}/seed-{seed}")) for name in ("sgd", "kfac") for seed in (0, 1)]
    assert list(tables.short_folders(runs).values()) == ["sgd/seed-0", "sgd/seed-1", "kfac/seed-0", "kfac/seed-1"]
    alone = run(folder=Path("/home/me/run"))
    assert tables.short_folders([alone]) == {id(alone): "run"}


# The page


@pytest.fixture(scope="module")
def page() -> str:
    made = made_up.comparison()
    return natgrad.page.render(made, judge(made))


def test_everything_is_there_in_order(page):
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Training curves", "Time to the target", "Time of a step", "The sweep", "Inside K-FAC", "Coverage", "Runs",
        "Versions and machine",
    ]  # fmt: skip
    assert list(embedded(page)) == ["curves", "step-time", "sweep", "inside-kfac", "layers"]


def test_the_sentence_comes_before_everything_else(page):
    made = made_up.comparison()
    said = " ".join(judge(made).sentence.split())
    text = Reader(page).text.replace("\u00a0", " ")
    assert said in text
    assert text.index(said) < text.index("Training curves")


def test_nothing_is_fetched(page):
    for tag, attributes in Reader(page).elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not any("url(" in one or "@import" in one for one in style)
    assert "default-src 'none'" in page


def test_the_library_is_packed_and_whole(page):
    from plotly.offline import get_plotlyjs

    (packed,) = re.findall(r'id="library">(.*?)</script>', page, re.DOTALL)
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert len(page) < 3_000_000


def test_nothing_tells_who_made_it(page):
    for secret in ("secret-host", "secret-folder", "secret-variable", "secret-command", "/home/somebody"):
        assert secret not in page


def test_tables_and_figures_have_names(page):
    elements = Reader(page).elements
    assert all(attributes.get("aria-label") for _, attributes in elements if attributes.get("role") == "img")
    assert page.count("<table>") == page.count("<caption")
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in elements if tag == "th")


NASTY = '</script><script>alert(1)</script> "x" \' & <img src=x onerror=alert(1)> \u2028 %{x} $x$ <b>'


def test_texts_of_runs_cannot_become_markup():
    bad = run(
        (1, 1.0, 2.0),
        (2, 2.0, 1.0),
        folder=Path("a") / NASTY.replace("/", "_"),
        reason=NASTY,
        warnings=(NASTY,),
        parts={NASTY: 0.1},
        coverage=({"parameter": NASTY, "reason": NASTY},),
        layers=(Layer(step=1, name=NASTY, condition=10.0, age=1),),
        about={"data": NASTY},
        environment={"torch": NASTY, "device": {"name": NASTY}},
    )
    trials = (Trial(settings={NASTY: 0.1}, rungs=((1, 0.5),), note=NASTY),)
    one = Contender(name=NASTY, runs=(bad,), trials=trials, settings={NASTY: 0.1}, note=NASTY, uses_kfac=True)
    made = Comparison(title=NASTY, contenders=(one,), tuning=NASTY, notes=(NASTY,))
    page = natgrad.page.render(made, verdict(sentence=NASTY, advice=(NASTY,), target_says=NASTY))
    elements = Reader(page).elements
    assert "img" not in {tag for tag, _ in elements}
    assert len([tag for tag, _ in elements if tag == "script"]) == 3
    assert "alert(1)</script>" not in page
    assert not any(attribute.startswith("on") for _, attributes in elements for attribute in attributes)
    assert NASTY[:20].replace("<", "&lt;").replace(">", "&gt;") in embedded(page)["curves"]["title"]


def test_json_cannot_leave_its_element():
    value = {"a": "</script><!-- \u2028\u2029 & é"}
    text = markup.embedded(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


DEGENERATE = {
    "nothing at all": of(),
    "a contender without runs": of(Contender(name="SGD", runs=(), note="was not started")),
    "a run without points": of(Contender(name="SGD", runs=(run(reason="SIGTERM"),))),
    "one point": of(Contender(name="SGD", runs=(run((1, 1.0, 2.0)),))),
    "one point a seed, far apart": of(Contender(name="SGD", runs=(run((1, 1.0, 2.0)), run((9, 9.0, 2.0))))),
    "runs that do not overlap": of(
        Contender(name="SGD", runs=(run((1, 1.0, 2.0), (2, 2.0, 2.0)), run((8, 8.0, 1.0), (9, 9.0, 2.0))))
    ),
    "only training": of(Contender(name="mine", runs=(run(train=((1, 1.0, 2.0), (2, 2.0, 1.0))),))),
    "no numbers": of(Contender(name="SGD", runs=(run((1, 1.0, None), (2, 2.0, None)),))),
    "infinite": of(Contender(name="SGD", runs=(run((1, 1.0, float("inf")), (2, 2.0, float("nan")), seconds=1.0),))),
    "no clock": of(Contender(name="SGD", runs=(run((1, 0.0, 2.0), (2, 0.0, 1.0)),))),
    "zero loss": of(Contender(name="SGD", runs=(run((1, 1.0, 0.0), (2, 2.0, 0.0)),))),
    "negative loss": of(Contender(name="SGD", runs=(run((1, 1.0, 3.0), (2, 2.0, -30.0)),))),
    "trials without settings": of(Contender(name="SGD", runs=(), trials=(Trial(settings={}, rungs=()),))),
    "trials that all diverged": of(
        Contender(name="SGD", runs=(), trials=(Trial(settings={"lr": 0.0}, rungs=((1, None),), chosen=True),))
    ),
    "layers without numbers": of(
        Contender(name="K-FAC", runs=(run(layers=(Layer(step=1, name="a", condition=None, age=None),)),))
    ),
    "no KL": of(Contender(name="K-FAC", runs=(run(readings=(Reading(step=1, seconds=1.0),)),))),
    "a KL of zero": of(
        Contender(name="K-FAC", runs=(run(readings=(Reading(step=1, seconds=1.0, predicted_kl=0.0),)),))
    ),
    "coverage without fields": of(Contender(name="K-FAC", runs=(run(coverage=({},)),))),
    "empty names": of(Contender(name="", runs=(run((1, 1.0, 2.0)),)), Contender(name="", runs=())),
    "eight contenders": made_up.comparison(names=[*"abcdefg", "K-FAC"], seeds=1, layers=3),
    "nine of K-FAC": made_up.comparison(names=["K-FAC"] * 9, seeds=1, layers=2),
}


@pytest.mark.parametrize("made", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("target", [None, 0.5])
def test_odd_comparisons_have_a_page(made, target):
    page = natgrad.page.render(made, replace(judge(made), target=target))
    assert embedded(page) is not None
    for tag in ("section", "figure", "table", "details", "div"):
        assert page.count(f"<{tag}") - page.count(f"</{tag}>") == 0, tag


def test_it_is_written_whole(tmp_path):
    made = of(Contender(name="SGD", runs=(run((1, 1.0, 2.0)),)))
    natgrad.page.write(tmp_path / "page.html", made, verdict())
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == natgrad.page.render(made, verdict())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_without_plotly_it_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    natgrad.page._library.cache_clear()
    monkeypatch.setattr(natgrad.page, "import_module", missing)
    with pytest.raises(natgrad.page.PageError, match=r'pip install "natgrad\[cli\]"'):
        natgrad.page.render(of(), verdict())


def test_importing_it_does_not_import_plotly():
    import subprocess
    import sys

    code = "import sys, natgrad.page; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

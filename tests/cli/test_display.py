"""What a run shows: numbers in words, bars, the live panel, the plain lines; and that none of it stops training."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import sys
import timeit
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import natgrad
from natgrad.cli import formatting as form
from natgrad.cli.display import Terminal, choose
from natgrad.cli.drawing import PART_COLOURS, History, parts_bar, progress_bar, report_table, sparkline
from natgrad.cli.plain import Plain
from natgrad.report import Line, Report
from natgrad.training.events import Evaluated, Finished, Progress, Started

STARTED = Started(
    recipe="cifar10-resnet20",
    folder=Path("runs/cifar10-resnet20"),
    device="NVIDIA H200",
    data="CIFAR-10: 50,000 training cases",
    parameters=272474,
    epochs=10,
    steps_per_epoch=150,
    total_steps=1500,
    batch=128,
    ranks=1,
)
PROGRESS = Progress(
    step=480,
    epoch=3.2,
    loss=0.4312,
    accuracy=0.861,
    lr=0.05,
    damping=0.001,
    predicted_kl=2.1e-4,
    clip_factor=0.83,
    parts={"data": 0.25e-3, "model": 7.5e-3, "statistics": 2.46e-3, "solve": 1.1e-3, "precondition": 0.99e-3},
    step_seconds=12.3e-3,
    cases_per_second=1234,
    seconds=83,
    remaining=190,
)
EVALUATED = Evaluated(step=600, epoch=4.0, loss=0.3121, accuracy=0.901, top5=None, cases=10000, seconds=1.5, best=True)
FINISHED = Finished(
    step=1500,
    reason="finished",
    seconds=320,
    folder=STARTED.folder,
    checkpoint=STARTED.folder / "step-1500.pt",
    best=EVALUATED,
)
SGD = replace(
    PROGRESS, damping=None, predicted_kl=None, clip_factor=None, parts={"data": 1e-3, "model": 9e-3, "solve": 0.0}
)
ODD = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, -1e308, 5e-324]


def terminal_console(width: int = 80, height: int = 40, **options) -> Console:
    environment = {"TERM": "xterm-256color", **options.pop("environment", {})}
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        _environ=environment,
        legacy_windows=False,
        **options,
    )


def shown(display: Terminal, width: int = 80, height: int = 40) -> str:
    """The live region as plain text."""
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False)
    console.print(display.panel(width, height))
    return console.file.getvalue()


def written(console: Console) -> str:
    """All that was sent to the terminal, without its colours and cursor moves."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (form.duration, 83.9, "0:01:23"),
        (form.duration, 0, "0:00:00"),
        (form.duration, 36000, "10:00:00"),
        (form.duration, 2 * 86400 + 3723, "2d 01:02:03"),
        (form.duration, -1, "?"),
        (form.duration, math.nan, "?"),
        (form.duration, None, "?"),
        (form.span, 0.0123, "12.3 ms"),
        (form.span, 0.00046, "0.46 ms"),
        (form.span, 0.99949, "999 ms"),
        (form.span, 1.234, "1.23 s"),
        (form.span, 0, "0.00 ms"),
        (form.number, 0.05, "0.05"),
        (form.number, 0.001, "0.001"),
        (form.number, 0.0005, "0.0005"),
        (form.number, 0.00021, "2.1e-04"),
        (form.number, 1e-5, "1e-05"),
        (form.number, 1, "1"),
        (form.number, 12345.6, "12346"),
        (form.number, 1e9, "1e+09"),
        (form.number, math.nan, "nan"),
        (form.number, None, "?"),
        (form.steady, 0.43, "0.4300"),
        (form.steady, 12.3, "12.30"),
        (form.steady, 1234.0, "1234"),
        (form.steady, 12345.0, "12345"),
        (form.steady, 4.312e-5, "4.31e-05"),
        (form.steady, 0, "0.000"),
        (form.steady, -math.inf, "-inf"),
        (form.percent, 0.861, "86.1%"),
        (form.percent, math.nan, "nan"),
        (form.share, 0.614, "61%"),
        (form.share, 0.001, "<1%"),
        (form.share, 0.0, "0%"),
        (form.count, 1234567, "1,234,567"),
        (form.quantity, 999, "999"),
        (form.quantity, 1230, "1.23 k"),
        (form.quantity, 999_900, "1 M"),
        (form.quantity, 25.6e6, "25.6 M"),
        (form.rate, 1.234, "1.23"),
        (form.rate, 1234, "1,234"),
        (form.rate, 123456, "123 k"),
        (form.size, 165683, "161.8 KiB"),
        (form.size, 12, "12 B"),
    ],
)
def test_numbers_in_words(function, value, text) -> None:
    assert function(value) == text


def test_numbers_in_words_never_raise_and_stay_short() -> None:
    functions = [form.duration, form.span, form.number, form.steady, form.share, form.quantity, form.rate, form.size]
    for function, value in itertools.product(functions, [*ODD, None]):
        assert len(function(value)) < 20 or function in (form.share, form.size)


def test_shares_sum_to_one_and_bad_times_count_as_none() -> None:
    assert form.shares({"data": 1, "model": 3}) == {"data": 0.25, "model": 0.75}
    assert form.shares({"data": math.nan, "model": 3, "solve": -1}) == {"data": 0, "model": 1, "solve": 0}
    assert form.shares({"data": 0.0}) == {"data": 0.0}
    assert form.shares({}) == {}


@pytest.mark.parametrize("width", [1, 3, 5, 20, 76, 116])
def test_the_parts_bar_is_as_wide_as_asked(width) -> None:
    assert parts_bar(PROGRESS.parts, width).cell_len == width
    different = set(parts_bar(PROGRESS.parts, width, shaded=True).plain)
    assert len(different) == 5 or width < 5


def test_small_parts_have_a_cell_and_none_at_all_have_none() -> None:
    bar = parts_bar({"data": 0.006, "model": 0.994, "solve": 0.0}, 50, shaded=True).plain
    assert [len(list(run)) for _, run in itertools.groupby(bar)] == [1, 49]
    assert parts_bar({"data": 0.0}, 50).plain == ""
    assert parts_bar(dict.fromkeys(["a", "b"], math.nan), 50).plain == ""


def test_progress_bars_can_be_read_without_colours() -> None:
    assert progress_bar(0.5, 10).plain == "━━━━━─────"
    assert progress_bar(0.45, 10).plain == "━━━━╸─────"
    assert progress_bar(7, 4).plain == "━━━━"
    assert progress_bar(math.nan, 4).plain == progress_bar(-1, 4).plain == "────"


def test_sparklines_are_logarithmic_and_fill_their_width() -> None:
    assert sparkline([1, 10, 100], 3) == sparkline([0, 50, 100], 3) == ["▁▄█"]
    assert sparkline([2, 2, 2], 3) == ["▄▄▄"]
    assert sparkline([1, 2, 4], 3, height=2) == ["  █", "▁██"]
    assert [len(line) for line in sparkline(range(1, 1000), 40, height=2)] == [40, 40]
    assert sparkline([], 10) == sparkline([math.nan], 10) == sparkline([1.0], 0) == [""]
    assert len(sparkline(ODD, 10)[0]) == 10


def test_history_keeps_a_long_run_in_little_memory() -> None:
    history = History(limit=64)
    for value in range(10_000):
        history.add(float(value))
    history.add(math.nan)
    values = history.values()
    assert 32 <= len(values) <= 65
    assert list(values) == sorted(values)
    assert values[0] < 300
    assert values[-1] > 9_700


def test_colour_blind_people_tell_the_parts_apart() -> None:
    # Machado, Oliveira & Fernandes 2009, complete loss of one kind of cone; distances in Lab, where 2 is just visible.
    views = {
        "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    }
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]  # of white, all are 1

    def product(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    def lab(colour, view):
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        seen = [min(1.0, max(0.0, value)) for value in product(view, linear)]
        x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in product(to_xyz, seen))
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    for view in views.values():
        for one, other in itertools.combinations(PART_COLOURS.values(), 2):
            assert math.dist(lab(one, view), lab(other, view)) > 25


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_everything_and_fits(width) -> None:
    display = Terminal(terminal_console(width))
    with display:
        display.started(STARTED)
        display.progress(replace(PROGRESS, loss=2.3))
        display.progress(PROGRESS)
        display.stepped(600)
        display.saved(Path("x.pt"), 450)
        text = shown(display, width)
    lines = text.strip().splitlines()
    assert {len(line) for line in lines} == {width}
    assert "epoch 4.0/10" in text
    assert "40%  600/1,500 steps" in text
    assert "0:02:47 left" in text  # 190 s at step 480, less the 120 steps since
    for word in ("0.4312", "86.1%", "0.05", "0.001", "2.1e-04", "0.83", "1,234", "12.3 ms", "saved at step 450"):
        assert word in text
    for name in PROGRESS.parts:
        assert f"■ {name}" in text
    assert "7.50 ms 61%" in text
    assert "waiting for data" not in text
    assert "2.30" in text
    assert "0.431" in text


def test_the_panel_without_kfac_and_without_accuracy_leaves_them_out() -> None:
    display = Terminal(terminal_console())
    with display:
        display.started(STARTED)
        display.progress(replace(SGD, accuracy=None))
        text = shown(display)
    for word in ("damping", "KL", "clip", "statistics", "solve", "precondition", "accuracy", "?"):
        assert word not in text
    assert "■ model" in text


def test_waiting_for_data_is_said() -> None:
    display = Terminal(terminal_console())
    with display:
        display.started(STARTED)
        display.progress(replace(PROGRESS, parts={"data": 3e-3, "model": 9e-3}))
        assert "25% waiting for data" in shown(display)


@pytest.mark.parametrize("options", [{"no_color": True}, {"color_system": None}, {"color_system": "standard"}])
def test_parts_are_told_apart_without_colours(options) -> None:
    display = Terminal(terminal_console(**options))
    with display:
        display.started(STARTED)
        display.progress(PROGRESS)
        marks = re.findall(r"(\S) (?:data|model|statistics|solve|precondition)\b", shown(display))
    assert len(marks) == len(set(marks)) == 5


def test_the_panel_shows_an_evaluation_while_it_runs() -> None:
    display = Terminal(terminal_console())
    with display:
        display.started(STARTED)
        display.progress(PROGRESS)
        display.evaluating(3, 10)
        assert re.search(r"testing ━.*30%  3/10", shown(display))
        display.evaluated(EVALUATED)
        assert "testing" not in shown(display)


@pytest.mark.parametrize("width", [1, 10, 20, 40, 59, 60, 79, 200])
@pytest.mark.parametrize("height", [1, 6, 24])
def test_the_panel_fits_any_terminal(width, height) -> None:
    console = terminal_console(width, height)
    display = Terminal(console)
    with display:
        display.started(STARTED)
        display.evaluated(EVALUATED)
        display.progress(PROGRESS)
        display.progress(PROGRESS)
        display.evaluating(0, 0)
        text = shown(display, width, height)
        display.warned("of something")
    assert max(len(line) for line in text.splitlines()) <= width
    assert len(text.splitlines()) <= max(4, height)


def test_odd_numbers_are_shown_not_thrown() -> None:
    log = io.StringIO()
    for value in ODD:
        odd = replace(
            PROGRESS,
            **dict.fromkeys(["epoch", "loss", "accuracy", "lr", "damping", "predicted_kl", "clip_factor"], value),
            parts=dict.fromkeys(PROGRESS.parts, value),
            step_seconds=value,
            cases_per_second=value,
            seconds=value,
            remaining=value,
        )
        result = replace(EVALUATED, epoch=value, loss=value, accuracy=value, top5=value, seconds=value)
        with Terminal(terminal_console()) as display, Plain(log, every=0) as plain:
            for listener in (display, plain):
                listener.started(replace(STARTED, total_steps=0, steps_per_epoch=0, epochs=0))
                listener.progress(odd)
                listener.progress(replace(odd, parts={}))
                listener.progress(odd)
                listener.evaluated(result)
                listener.finished(replace(FINISHED, seconds=value, best=result, checkpoint=None))
            assert "step time" in shown(display)
    assert "loss nan" in log.getvalue()


def test_evaluations_are_a_table_above_the_panel() -> None:
    console = terminal_console()
    with Terminal(console) as display:
        display.started(STARTED)
        display.progress(PROGRESS)
        display.evaluated(replace(EVALUATED, step=150, epoch=1.0, top5=0.99))
        display.evaluated(replace(EVALUATED, step=1500, epoch=10.0, best=False, top5=0.98))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", written(console))]
    rows = [line for line in lines if re.match(r" +(epoch|10?) .*(test|90)", line)]
    assert [" ".join(row.split()) for row in rows] == [
        "epoch step train loss train acc test loss test acc top-5 time",
        "1 150 0.4312 86.1% 0.3121 90.1% 99.0% 0:00:00 best",
        "10 1,500 0.4312 86.1% 0.3121 90.1% 98.0% 0:00:00",
    ]
    assert rows[0].index("test acc") + len("test acc") == rows[1].index("90.1%") + len("90.1%")


def test_narrow_tables_keep_what_matters() -> None:
    console = terminal_console(40)
    with Terminal(console) as display:
        display.started(STARTED)
        display.progress(PROGRESS)
        display.evaluated(EVALUATED)
    assert re.search(r"epoch +test loss +test acc", written(console))


def test_the_head_and_the_summary_say_what_ran_where() -> None:
    console = terminal_console()
    with Terminal(console) as display:
        display.started(replace(STARTED, ranks=4, step=300))
        display.warned("layer [0] was odd")
        display.finished(FINISHED)
    text = written(console)
    for words in (
        "cifar10-resnet20",
        "272 k parameters",
        "CIFAR-10: 50,000",
        "NVIDIA H200, 4 ranks",
        "from step 300",
        "warning: layer [0] was odd",
        "after 1,500 steps, 0:05:20",
        "test acc 90.1%, test loss 0.3121, at epoch 4",
        "runs/cifar10-resnet20/step-1500.pt",
    ):
        assert words in text
    assert "--resume" not in text


@pytest.mark.parametrize("make", [lambda console: Terminal(console), lambda console: Plain(console.file)])
def test_an_interrupted_run_says_how_to_go_on(make) -> None:
    console = terminal_console(40)  # the command is never broken in two
    stopped = replace(FINISHED, step=480, reason="SIGINT", folder=Path("runs/a long name of a folder with blanks"))
    with make(console) as display:
        display.started(STARTED)
        display.finished(stopped)
    assert "natgrad train 'runs/a long name of a folder with blanks' --resume\n" in written(console)
    console = terminal_console()
    with make(console) as display:
        display.started(STARTED)
        display.finished(replace(stopped, checkpoint=None))
    assert "--resume" not in written(console)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_put_back_whatever_happens(error) -> None:
    console = terminal_console()
    before = sys.stdout, sys.stderr

    def fail() -> None:
        with Terminal(console) as display:
            display.started(STARTED)
            raise error("of the training")

    with pytest.raises(error, match="of the training"):
        fail()
    assert (sys.stdout, sys.stderr) == before
    hidden, back = console.file.getvalue().rfind("\x1b[?25l"), console.file.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < back
    assert not console._live_stack


def test_a_second_interrupt_while_stopping_still_shows_the_cursor(monkeypatch) -> None:
    console = terminal_console()

    def interrupted(self) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with Terminal(console) as display:
            display.started(STARTED)
            live = display._live
            live._refresh_thread.stop()
            monkeypatch.setattr(type(live), "refresh", interrupted)

    before = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt):
        run()
    assert (sys.stdout, sys.stderr) == before
    assert console.file.getvalue().endswith("\x1b[?25h")


def test_a_terminal_that_goes_away_does_not_stop_training() -> None:
    class Gone(io.StringIO):
        broken = None

        def write(self, text):
            if self.broken is not None:
                raise self.broken
            return super().write(text)

    for broken in (OSError(5, "Input/output error"), BrokenPipeError(), ValueError("I/O operation on closed file")):
        stream = Gone()
        console = Console(file=stream, force_terminal=True, width=80, height=30, legacy_windows=False)
        console.on_broken_pipe = lambda: sys.exit(1)  # as rich's, but for giving away pytest's stdout
        with Terminal(console) as display:
            display.started(STARTED)
            stream.broken = broken
            display.progress(PROGRESS)
            display.evaluated(EVALUATED)
            display.warned("of something")
            display.finished(FINISHED)


def test_stepped_costs_next_to_nothing() -> None:
    with Terminal(terminal_console()) as display:
        display.started(STARTED)
        best = min(timeit.repeat(lambda: display.stepped(3), number=1000, repeat=5)) / 1000
    assert best < 5e-6


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_plain_lines_can_be_read_and_searched() -> None:
    stream, clock = io.StringIO(), Clock()
    with Plain(stream, clock=clock) as plain:
        plain.started(STARTED)
        clock.now = 83
        plain.progress(PROGRESS)
        plain.evaluating(1, 2)
        plain.evaluated(EVALUATED)
        plain.saved(Path("runs/x/step-600.pt"), 600)
        plain.warned("two\nlines")
        plain.finished(FINISHED)
    assert lines_of(stream) == [
        "[0:00:00] start cifar10-resnet20  parameters 272,474  data CIFAR-10: 50,000 training cases  batch 128"
        "  device NVIDIA H200  ranks 1  epochs 10  steps 1500  folder runs/cifar10-resnet20",
        "[0:01:23] epoch  3.20/10  step  480/1500  loss 0.4312  acc 86.1%  lr 0.05  damping 0.001  KL 2.1e-04"
        "  clip 0.83  12.3 ms/step (data 2% model 61% statistics 20% solve 9% precondition 8%)  1,234 cases/s"
        "  left 0:03:10",
        "[0:01:23] epoch  4.00/10  step  600/1500  test loss 0.3121  test acc 90.1%  10,000 cases in 1.50 s  best",
        "[0:01:23] saved step 600  runs/x/step-600.pt",
        "[0:01:23] warning: two lines",
        "[0:01:23] finished  step 1500/1500  after 0:05:20  best test acc 90.1%, test loss 0.3121, at epoch 4"
        "  folder runs/cifar10-resnet20  checkpoint runs/cifar10-resnet20/step-1500.pt",
    ]


def test_plain_progress_comes_at_most_every_so_often() -> None:
    stream, clock = io.StringIO(), Clock()
    plain = Plain(stream, every=10, clock=clock)
    plain.started(STARTED)
    for second in range(0, 25):
        clock.now = second
        plain.progress(replace(PROGRESS, step=second))
    steps = [int(re.search(r"step +(\d+)/", line).group(1)) for line in lines_of(stream)[1:]]
    assert steps == [0, 10, 20]


def test_plain_lines_without_kfac() -> None:
    stream = io.StringIO()
    plain = Plain(stream)
    plain.started(replace(STARTED, step=300))
    plain.progress(replace(SGD, accuracy=None))
    resumed, line = lines_of(stream)
    assert "resume cifar10-resnet20" in resumed
    assert "from step 300" in resumed
    assert "(data 10% model 90%)" in line
    for word in ("damping", "KL", "clip", "acc"):
        assert word not in line


def test_a_reader_that_goes_away_does_not_stop_training() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        plain = Plain(stream)
        plain.started(STARTED)  # SIGPIPE is ignored by Python: this is a BrokenPipeError
        plain.warned("of something")
        stream.write("others may write too")
    plain.warned("after it is closed")


def test_plain_lines_in_a_poor_encoding() -> None:
    raw = io.BytesIO()
    plain = Plain(io.TextIOWrapper(raw, encoding="ascii"))
    plain.started(replace(STARTED, data="3×32×32"))
    assert b"data 3?32?32" in raw.getvalue()


def test_choose_draws_only_where_that_works() -> None:
    assert isinstance(choose(terminal_console()), Terminal)
    assert isinstance(choose(terminal_console(environment={"TERM": "dumb"})), Plain)
    assert isinstance(choose(Console(file=io.StringIO())), Plain)
    poor = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=poor, force_terminal=True, _environ={"TERM": "xterm"})
    assert isinstance(choose(console), Plain)
    with Terminal(console) as display:  # asked for all the same
        display.started(STARTED)
        display.finished(FINISHED)


def test_the_report_is_a_table_with_reasons_and_notes() -> None:
    report = Report(
        (
            Line("0.weight", "linear", "A 65² · G 128²", 165683, elements=8192),
            Line("scale", "", "", 0, "it is used in an unknown way", 10),
            Line("conv[0].weight", "convolution", "A 9² · G 8²", 100, elements=72, note="its places are averaged"),
            *(Line(f"layer{i}.weight", "linear", "A 2² · G 2²", 32, elements=4) for i in range(50)),
        ),
        "3 steps taken",
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(report_table(report))
    text = console.file.getvalue()
    assert re.search(r"0\.weight +linear +A 65² · G 128² +161\.8 KiB", text)
    assert re.search(r"scale +left to the optimizer +it is used in an unknown way", text)
    assert "conv[0].weight: its places are averaged" in text
    assert "52 of 53 parameters" in text
    assert "layer49.weight" in text
    coloured = terminal_console(100)
    coloured.print(report_table(report))
    assert re.search(r"\x1b\[2mscale", coloured.file.getvalue())


def test_the_report_of_a_model_before_its_first_step() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(report_table(natgrad.KFAC(torch.nn.Linear(3, 2)).report()))
    assert "run one training step" in console.file.getvalue()

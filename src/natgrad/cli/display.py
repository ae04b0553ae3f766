"""What `natgrad train` shows in a terminal: a live panel, and above it what is worth scrolling back to.

`Terminal` draws; where there is no terminal, `natgrad.cli.plain.Plain` writes lines. `choose` knows which::

    with choose(console) as display:
        train(recipe, listeners=[display])
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from natgrad.cli import formatting as form
from natgrad.cli.drawing import (
    ACCENT,
    Cell,
    History,
    cell,
    part_mark,
    parts_bar,
    parts_legend,
    progress_bar,
    report_table,
    sparkline,
    strip,
)
from natgrad.cli.plain import Plain, result, resumable, resume_command
from natgrad.training.events import Evaluated, Finished, Listener, Progress, Started

__all__ = ["Terminal", "choose", "part_mark", "parts_bar", "parts_legend", "report_table"]

REDRAWS = 5
"""Redraws a second."""

WIDEST = 120
"""Columns that the panel uses at most: numbers far apart are hard to read together."""


def choose(console: Console) -> Terminal | Plain:
    """The live panel where it can be drawn, else plain lines on the console's stream."""
    drawable = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    if drawable:
        return Terminal(console)
    return Plain(console.file)


class Terminal(Listener):
    """A listener that draws a live panel at the bottom of a terminal.

    Events replace what is remembered; a thread of rich's redraws from that, so that training never waits for the
    terminal, and `stepped` is one assignment. A terminal that goes away takes the display with it, not the training.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._beginning = clock()
        self._start: Started | None = None
        self._step = 0
        self._latest: Progress | None = None
        self._testing: tuple[int, int] | None = None
        self._saved: int | None = None
        self._losses = History()
        self._columns: list[_Column] | None = None
        self._live: _Live | None = None
        stream = console.file
        if console.options.ascii_only and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # else the first block character ends the training

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Stops drawing and shows the cursor. After an error the panel stays: it tells how far the run came."""
        self._stop(keep=kind is not None)

    def started(self, event: Started) -> None:
        """Prints what runs where, and begins to draw."""
        self._start, self._step = event, event.step
        self._beginning = self._clock()
        self._print(_head(event))
        live = _Live(_Panel(self), console=self._console, refresh_per_second=REDRAWS, transient=True)
        live.vertical_overflow = "crop"
        self._live = live  # before it starts: an interrupt in between must find it
        with self._guarded():
            live.start(refresh=True)

    def stepped(self, step: int) -> None:
        """Moves the bar at the next redraw."""
        self._step = step

    def progress(self, event: Progress) -> None:
        """The numbers of the next redraw."""
        self._testing = None
        self._losses.add(event.loss)
        self._latest = event
        self._step = max(self._step, event.step)

    def evaluating(self, done: int, total: int) -> None:
        """The bar shows the evaluation until it is over."""
        self._testing = (done, total)

    def evaluated(self, event: Evaluated) -> None:
        """A row of the table above the panel."""
        self._testing = None
        if self._columns is None:
            self._columns = _columns(event, self._latest, self._console.width)
            self._print(Text(""))
            self._print(_row([(column.title, "dim") for column in self._columns], self._columns))
        elapsed = self._clock() - self._beginning
        cells = [(column.text(event, self._latest, elapsed), column.style(event)) for column in self._columns]
        self._print(_row(cells, self._columns))

    def saved(self, path: Path, step: int) -> None:
        """Said in the panel's edge."""
        self._saved = step

    def warned(self, text: str) -> None:
        """Printed above the panel."""
        self._print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")))

    def finished(self, event: Finished) -> None:
        """Takes the panel away and says how it ended."""
        self._stop(keep=False)
        self._print(_summary(event, self._start))
        if resumable(event):
            self._print(Text.assemble(("to go on    ", "dim"), (resume_command(event), "bold")), soft_wrap=True)

    def panel(self, width: int, height: int) -> RenderableType:
        """What the live region shows now, for a terminal of this size."""
        start, latest = self._start, self._latest
        if start is None:
            return Text("")
        width = min(width, WIDEST)
        boxed = width >= 60
        inner = width - 4 if boxed else width
        epoch = self._step / max(1, start.steps_per_epoch)
        air = [Text("")] if height >= 30 else []
        lines: list[Text] = [self._bar(start, latest, inner)]
        if latest is not None:
            sections = [
                strip(_numbers(latest), inner),
                _timing(latest, inner, shaded=_few_colours(self._console)),
                _curve(self._losses.values(), inner),
            ]
            for section in sections:
                # What does not fit in a low window is left out from the end.
                if section and len(lines) + len(air) + len(section) + 4 <= height:
                    lines += [*air, *section]
        title = f"epoch {epoch:.1f}/{start.epochs}"
        if not boxed:
            return Group(Text(title, "bold", no_wrap=True, overflow="ellipsis"), *lines)
        panel = Panel(
            Group(*lines),
            box=ROUNDED,
            width=width,
            border_style="dim",
            padding=(0, 1),
            title=Text.assemble((start.recipe, "not dim"), (f" · {title}", "bold not dim")),
            title_align="left",
            subtitle=None if self._saved is None else Text(f"saved at step {form.count(self._saved)}"),
            subtitle_align="right",
        )
        return Group(*air, panel)

    def _bar(self, start: Started, latest: Progress | None, width: int) -> Text:
        """How far it is, of the run or of the evaluation that is under way."""
        testing = self._testing
        if testing is not None:
            done, total = testing
            label, words = "testing ", f" {form.share(done / max(1, total)):>4}  {done}/{total}"
        else:
            done, total = self._step, start.total_steps
            label, words = "", f" {form.share(done / max(1, total)):>4}  {form.count(done)}/{form.count(total)} steps"
        times = f"  {form.duration(self._clock() - self._beginning)}"
        left = "" if latest is None else f"  {form.duration(self._remaining(start, latest))} left"
        # On narrow terminals the times give way to the bar.
        for tail in (words + times + left, words + left, words):
            cells = width - len(label) - len(tail)
            if cells >= 10:
                break
        line = Text(no_wrap=True, overflow="ellipsis").append(label, "bold")
        line.append_text(progress_bar(done / max(1, total), max(3, cells)))
        return line.append(tail)

    def _remaining(self, start: Started, latest: Progress) -> float:
        """The latest estimate, less the steps taken since."""
        then = start.total_steps - latest.step
        return latest.remaining * max(0, start.total_steps - self._step) / then if then > 0 else 0.0

    def _print(self, renderable: RenderableType, *, soft_wrap: bool = False) -> None:
        with self._guarded():
            self._console.print(renderable, soft_wrap=soft_wrap, highlight=False)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Goes on in silence where the terminal is gone; rich would leave the program at a broken pipe."""
        try:
            yield
        except (OSError, ValueError, SystemExit):
            self._console.quiet = True

    def _stop(self, *, keep: bool) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        live.transient = not keep
        try:
            with self._guarded():
                live.stop()
        finally:
            # Also when a second Ctrl-C came in the middle of stopping.
            with self._guarded():
                self._console.show_cursor(True)


class _Live(Live):
    """Live whose thread outlives a terminal that cannot be written to."""

    def refresh(self) -> None:
        try:
            super().refresh()
        except (OSError, ValueError, SystemExit):
            self.console.quiet = True


class _Panel:
    """Asks for the panel anew at each redraw."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            panel = self._terminal.panel(options.max_width, console.height)
        except Exception as error:  # in rich's thread, where it would end the drawing with a traceback
            panel = Text(f"this cannot be shown: {error!r}", no_wrap=True, overflow="ellipsis")
        yield panel


def _few_colours(console: Console) -> bool:
    """Whether two parts might get the same colour: with eight or sixteen they do."""
    return console.no_color or console.color_system in (None, "standard")


def _head(start: Started) -> Text:
    """What runs where, one line each."""
    place = start.device if start.ranks == 1 else f"{start.device}, {form.plural(start.ranks, 'rank')}"
    length = f"{form.plural(start.epochs, 'epoch')}, {form.plural(start.total_steps, 'step')}"
    entries = [
        ("recipe", start.recipe, "bold"),
        ("model", f"{form.quantity(start.parameters)} parameters", ""),
        ("data", start.data, ""),
        ("device", place, ""),
        ("training", f"{length} of {form.plural(start.batch, 'case')}", ""),
        *([("goes on", f"from step {form.count(start.step)}", "")] if start.resumed else []),
        ("folder", str(start.folder), ""),
    ]
    return _listed(entries)


def _summary(event: Finished, start: Started | None) -> Text:
    """How it ended, one line each."""
    well = event.reason == "finished"
    of = "" if start is None or well else f" of {form.count(start.total_steps)}"
    how = f"after {form.count(event.step)}{of} steps, {form.duration(event.seconds)}"
    entries = [
        ("finished", how, "bold") if well else ("stopped", f"by {event.reason} {how}", "bold yellow"),
        *([("best", result(event.best), "")] if event.best is not None else []),
        ("folder", str(event.folder), ""),
        ("checkpoint", "none was saved" if event.checkpoint is None else str(event.checkpoint), ""),
        *([("", "the last steps could not be saved", "yellow")] if event.checkpoint and not event.saved else []),
    ]
    return _listed(entries)


def _listed(entries: list[tuple[str, str, str]]) -> Text:
    """Dim labels with their values, and a line free above."""
    lines = [Text.assemble((f"{label:<12}", "dim"), (value, style)) for label, value, style in entries]
    return Text("\n").join([Text(""), *lines])


def _numbers(event: Progress) -> list[Cell]:
    """Where training stands."""
    diverged = form.steady(event.loss) in ("nan", "inf", "-inf")
    cells = [cell("loss", form.steady(event.loss), style="bold red" if diverged else "bold", width=7)]
    if event.accuracy is not None:
        cells.append(cell("accuracy", form.percent(event.accuracy), style="bold"))
    cells.append(cell("learning rate", form.number(event.lr)))
    if event.damping is not None:
        cells.append(cell("damping", form.number(event.damping), width=8))
    if event.predicted_kl is not None:
        cells.append(cell("predicted KL", form.number(event.predicted_kl)))
    if event.clip_factor is not None:
        cells.append(cell("clip", form.number(event.clip_factor), width=5))
    return [*cells, cell("cases/s", form.rate(event.cases_per_second))]


def _timing(event: Progress, width: int, *, shaded: bool) -> list[Text]:
    """Where a step's time goes."""
    parts = form.parts_of(event)
    if not parts:
        return []
    title = Text.assemble(("step time  ", "dim"), (form.span(event.step_seconds), "bold"), no_wrap=True)
    waiting = form.shares(parts).get("data", 0.0)
    if waiting > form.SLOW_DATA:
        title.append(f"  {form.share(waiting)} waiting for data", "bold yellow")
    title.overflow = "ellipsis"
    return [title, parts_bar(parts, width, shaded=shaded), *parts_legend(parts, width, shaded=shaded)]


def _curve(losses: tuple[float, ...], width: int) -> list[Text]:
    """The training loss so far, its highest and lowest value beside it."""
    if len(losses) < 2:
        return []
    label = "training loss  " if width >= 60 else ""
    bounds = [form.steady(max(losses), 3), form.steady(min(losses), 3)]
    room = max(map(len, bounds)) + 2
    lines = sparkline(losses, max(1, width - len(label) - room), height=2)
    return [
        Text.assemble((start.ljust(len(label)), "dim"), (line, ACCENT), (f"  {bound}", "dim"), no_wrap=True)
        for start, line, bound in zip((label, ""), lines, bounds, strict=True)
    ]


class _Column:
    """One of the table of evaluations; those with a high `rank` are left out first where the terminal is narrow."""

    def __init__(
        self, title: str, width: int, rank: int, text: Callable[[Evaluated, Progress | None, float], str]
    ) -> None:
        self.title, self.width, self.rank, self.text = title, width, rank, text

    def style(self, event: Evaluated) -> str:
        """Bold where it is a test result, or says so, that is the best so far."""
        return "bold" if event.best and (not self.title or self.title.startswith("test")) else ""


def _columns(event: Evaluated, latest: Progress | None, width: int) -> list[_Column]:
    """Those that there are numbers for and that fit."""
    columns = [
        _Column("epoch", 6, 0, lambda e, p, t: form.number(e.epoch, 4)),
        _Column("step", 9, 4, lambda e, p, t: form.count(e.step)),
        _Column("train loss", 12, 3, lambda e, p, t: form.steady(p.loss) if p is not None else ""),
        _Column("train acc", 11, 5, lambda e, p, t: form.percent(p.accuracy) if p is not None else ""),
        _Column("test loss", 11, 1, lambda e, p, t: form.steady(e.loss)),
        _Column("test acc", 10, 0, lambda e, p, t: form.percent(e.accuracy)),
        _Column("top-5", 7, 6, lambda e, p, t: form.percent(e.top5)),
        _Column("time", 9, 2, lambda e, p, t: form.duration(t)),
        _Column("", 5, 0, lambda e, p, t: "best" if e.best else ""),
    ]
    missing = {
        *(["test acc"] if event.accuracy is None else []),
        *(["top-5"] if event.top5 is None else []),
        *(["train loss"] if latest is None else []),
        *(["train acc"] if latest is None or latest.accuracy is None else []),
    }
    columns = [column for column in columns if column.title not in missing]
    while sum(column.width for column in columns) > width and len(columns) > 1:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _row(cells: list[tuple[str, str]], columns: list[_Column]) -> Text:
    """Right-aligned under each other."""
    row = Text(no_wrap=True, overflow="ellipsis")
    for (text, style), column in zip(cells, columns, strict=True):
        row.append(text.rjust(column.width), style)
    return row

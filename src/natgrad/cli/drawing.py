"""Bars, curves and tables made of characters, for the terminal. Colour is never alone: words or order say it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group
from rich.table import Table
from rich.text import Text

from natgrad.cli import formatting as form
from natgrad.report import UNKNOWN, Report

ACCENT = "#2f8fc7"
"""A blue that is readable on black and on white."""

PART_COLOURS = {
    "data": "#e69f00",
    "model": "#999999",
    "statistics": "#3b4cc0",
    "solve": "#56b4e9",
    "precondition": "#8a5a2b",
}
"""Told apart on black and on white and by the colour-blind, most of all neighbours. The model's own time is grey."""

_FURTHER_COLOUR = "#009e73"
_SHADES = "▒█▓░▞"
_LEVELS = " ▁▂▃▄▅▆▇█"


def part_mark(name: str, index: int, *, shaded: bool = False) -> tuple[str, str]:
    """Character and style of a part, the same in the bar and in its legend."""
    if shaded:
        return _SHADES[index % len(_SHADES)], ""
    return "█", PART_COLOURS.get(name, _FURTHER_COLOUR)


def parts_bar(parts: Mapping[str, float], width: int, *, shaded: bool = False) -> Text:
    """A stacked bar of `width` cells, in the parts' order. Parts of half a per cent and more get a cell at least.

    `shaded` fills with different characters instead of colours, for terminals without.
    """
    bar = Text(no_wrap=True)
    for index, (name, cells) in enumerate(_cells(form.shares(parts), width).items()):
        character, style = part_mark(name, index, shaded=shaded)
        bar.append(character * cells, style)
    return bar


def _cells(split: Mapping[str, float], width: int) -> dict[str, int]:
    """Whole cells that sum up to `width`: the visible ones get one each, the rest goes by largest remainder."""
    visible = [name for name, part in split.items() if part >= 0.005]
    if width <= 0 or not visible:
        return dict.fromkeys(split, 0)
    least = 1 if len(visible) <= width else 0
    spare = width - least * len(visible)
    # What each should have beyond its first cell; parts below one cell have theirs already.
    wanted = {name: max(0.0, split[name] * width - least) for name in visible}
    scale = spare / (sum(wanted.values()) or 1.0)
    cells = {name: least + math.floor(wanted[name] * scale) if name in wanted else 0 for name in split}
    by_remainder = sorted(visible, key=lambda name: math.floor(wanted[name] * scale) - wanted[name] * scale)
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def progress_bar(fraction: float, width: int) -> Text:
    """A line that is thick up to `fraction`, so that it can be read without colours."""
    done = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 0.0
    halves = math.floor(done * 2 * max(0, width))
    full, half = divmod(halves, 2)
    bar = Text(no_wrap=True).append("━" * full + "╸" * half, ACCENT)
    return bar.append("─" * (max(0, width) - full - half), "dim")


def sparkline(values: Sequence[float], width: int, *, height: int = 1) -> list[str]:
    """A curve of blocks over `height` lines, with logarithmic levels where all values are positive.

    It is always `width` columns long: long series are averaged, short ones stretched. What is not finite is left out.
    """
    points = _resampled([value for value in values if math.isfinite(value)], width)
    if not points:
        return [""] * height
    if min(points) > 0:
        points = [math.log(value) for value in points]
    else:
        largest = max(map(abs, points)) or 1.0
        points = [value / largest for value in points]  # so that no difference overflows
    low, spread = min(points), max(points) - min(points)
    top = height * 8
    # The lowest value is still one eighth high; a flat curve runs through the middle.
    levels = [round(1 + (top - 1) * (value - low) / spread) if spread > 0 else top // 2 for value in points]
    return ["".join(_LEVELS[min(8, max(0, level - 8 * line))] for level in levels) for line in reversed(range(height))]


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """`width` values: each the mean of its stretch, or between its neighbours where there are too few."""
    if width < 1 or not values:
        return []
    if len(values) > width:
        edges = [len(values) * column // width for column in range(width + 1)]
        return [_mean(values[first:last]) for first, last in pairwise(edges)]
    points = []
    for column in range(width):
        place = (len(values) - 1) * column / max(1, width - 1)
        before, part = int(place), place % 1
        after = min(before + 1, len(values) - 1)
        points.append(values[before] * (1 - part) + values[after] * part)
    return points


class History:
    """A long series in little memory: beyond `limit` values neighbours are averaged, again and again."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._stretch = 1
        self._pending: list[float] = []
        self._values: tuple[float, ...] = ()

    def add(self, value: float | None) -> None:
        """One more; what is not finite leaves no mark."""
        if value is None or not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) < self._stretch:
            return
        values = (*self._values, _mean(self._pending))
        self._pending = []
        if len(values) >= self._limit:
            values = tuple(_mean(values[i : i + 2]) for i in range(0, len(values), 2))
            self._stretch *= 2
        self._values = values  # in one go: the drawing thread reads it

    def values(self) -> tuple[float, ...]:
        """The series so far, the latest last."""
        return (*self._values, _mean(self._pending)) if self._pending else self._values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)  # divided first: sums of huge ones overflow


@dataclass(frozen=True)
class Cell:
    """A value under its label. `width` is what it may grow to, so that columns stay where they are."""

    label: Text
    value: Text
    width: int


def cell(label: str, value: str, *, style: str = "", width: int = 0) -> Cell:
    """A dim label over a value."""
    return Cell(Text(label, "dim"), Text(value, style), max(width, len(label), len(value)))


def strip(cells: Sequence[Cell], width: int, *, widest_gap: int = 6) -> list[Text]:
    """Cells side by side, spread over `width`; in as many pairs of lines as it takes where that is narrow."""
    rows: list[list[Cell]] = [[]]
    for one in cells:
        if rows[-1] and sum(other.width + 2 for other in rows[-1]) + one.width > width:
            rows.append([])
        rows[-1].append(one)
    gap = 2
    if len(rows) == 1 and len(cells) > 1:
        gap = (width - sum(one.width for one in cells)) // (len(cells) - 1)
        gap = max(2, min(widest_gap, gap))
    lines = []
    for row in rows:
        for part in ("label", "value"):
            line = Text(no_wrap=True, overflow="ellipsis")
            for one in row:
                text: Text = getattr(one, part).copy()
                text.pad_right(one.width - text.cell_len + gap)
                line.append_text(text)
            line.rstrip()
            lines.append(line)
    return lines


def parts_legend(parts: Mapping[str, float], width: int, *, shaded: bool = False) -> list[Text]:
    """Every part of `parts_bar` with its name, time and share, beneath each other where `width` is small."""
    split = form.shares(parts)
    entries = []
    for index, name in enumerate(parts):
        character, style = part_mark(name, index, shaded=shaded)
        mark = "■" if character == "█" and not shaded else character
        slow = name == "data" and split[name] > form.SLOW_DATA
        label = Text.assemble((mark, style), " ", (name, "bold yellow" if slow else ""))
        value = Text(f"{form.span(parts[name])} {form.share(split[name])}", "bold yellow" if slow else "dim")
        entries.append(Cell(label, value, max(label.cell_len, 12)))
    if sum(entry.width + 2 for entry in entries) - 2 <= width:
        return strip(entries, width, widest_gap=10)
    names = max((entry.label.cell_len for entry in entries), default=0)
    lines = []
    for entry in entries:
        line = entry.label.copy()
        line.no_wrap, line.overflow = True, "ellipsis"
        line.pad_right(names - line.cell_len + 2)
        lines.append(line.append_text(entry.value))
    return lines


def report_table(report: Report) -> Group:
    """``kfac.report()`` as a table; what is left to the optimizer is dim and has its reason."""
    # What stands under the table in print stands under it here.
    under = str(report).splitlines()[1 + len(report) :]
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("parameter", overflow="fold")
    table.add_column("block", overflow="fold")
    table.add_column("factors", overflow="fold")
    table.add_column("memory", justify="right", no_wrap=True)
    for line in report:
        if line.covered:
            table.add_row(Text(line.parameter), Text(line.block), Text(line.factors), form.size(line.bytes))
        elif line.reason in UNKNOWN:
            table.add_row(Text(line.parameter), Text(line.reason), style="dim")
        else:
            table.add_row(Text(line.parameter), Text("left to the optimizer"), Text(line.reason), style="dim")
    return Group(table, "", *(Text(line) for line in under))

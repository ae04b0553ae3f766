"""The parts of the page as HTML. Every text goes through `escaped`, whoever wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from natgrad.compare.history import Comparison
from natgrad.page.drawing import Figure, Look
from natgrad.page.tables import Cell, Table
from natgrad.page.words import together

SHORT = 14
"""Tables of more rows are folded."""

_SHAPES = {
    "circle": '<circle cx="15" cy="7" r="4"/>',
    "diamond": '<path d="M15 2l4.5 5-4.5 5-4.5-5z"/>',
    "triangle-up": '<path d="M15 2l5 9h-10z"/>',
    "star": '<path d="M15 1.5l1.6 3.8 4 .3-3 2.6.9 4-3.5-2.1-3.5 2.1.9-4-3-2.6 4-.3z"/>',
    "triangle-down": '<path d="M15 12l5-9h-10z"/>',
    "cross": '<path d="M13.2 2.5h3.6v2.7h2.7v3.6h-2.7v2.7h-3.6v-2.7h-2.7v-3.6h2.7z"/>',
    "hexagon": '<path d="M15 2.5l4 2.2v4.6l-4 2.2-4-2.2v-4.6z"/>',
    "square": '<rect x="11.2" y="3.2" width="7.6" height="7.6"/>',
}


def escaped(text: str) -> str:
    """Nothing in it is markup any more, also inside of quotes."""
    return escape(text)


def section(name: str, title: str, *parts: str) -> str:
    """One with a heading; nothing where it has no parts."""
    inside = "\n".join(part for part in parts if part)
    return f'<section id="{name}">\n<h2>{escaped(title)}</h2>\n{inside}\n</section>' if inside else ""


def sentence(text: str) -> str:
    """The verdict: what comes before its first colon is set large, the numbers under it."""
    lead, colon, rest = together(text).partition(": ")
    if not colon or len(lead) > 120:
        lead, rest = together(text), ""
    return f'<p class="sentence"><strong>{escaped(lead + colon.strip() * bool(rest))}</strong> {escaped(rest)}</p>'


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph, or nothing."""
    named = f' class="{kind}"' if kind else ""
    return f"<p{named}>{escaped(together(text))}</p>" if text else ""


def listed(texts: Sequence[str], kind: str) -> str:
    """A list, or nothing. What is to be typed does not break at its hyphens."""
    lines = [escaped(together(text)) for text in texts]
    items = [re.sub(r"--[a-z]+|kfac[-+][\w.=+-]*\w", r'<span class="whole">\g<0></span>', line) for line in lines]
    return f'<ul class="{kind}">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if texts else ""


def figure(one: Figure | None, *, legend: str = "") -> str:
    """The frame that the page's script draws it into, with its buttons."""
    if one is None:
        return ""
    title = escaped(one.title)
    buttons = "".join(
        f'<button type="button" data-save="{kind.lower()}" aria-label="Save “{title}” as {kind}">{kind}</button>'
        for kind in ("PNG", "SVG")
    )
    caption = f"<figcaption>{escaped(one.caption)}</figcaption>" if one.caption else ""
    return (
        f'<figure id="figure-{one.name}" style="--height:{one.height}px;--narrow:{one.narrow_height}px">\n'
        f'<div class="over">{legend}<div class="save">{buttons}</div></div>\n'
        f'<div class="plot" role="img" aria-label="{escaped(one.says)}"></div>\n{caption}\n</figure>'
    )


def contenders_legend(looks: Sequence[Look], comparison: Comparison, *, with_readings: bool = False) -> str:
    """Buttons that show and hide contenders, in all figures of the page at once."""
    shown = [
        (look, one)
        for look, one in zip(looks, comparison.contenders, strict=True)
        if any(run.readings if with_readings else run.train or run.test for run in one.runs)
    ]
    items = [
        f'<li><button type="button" aria-pressed="true" data-contender="{look.group}">'
        f'<svg viewBox="0 0 30 14" width="30" height="14" aria-hidden="true" style="color:var(--{look.colour[1:]})">'
        f'<path d="M0 7h30" stroke="currentColor" stroke-width="2.25"/>'
        f'<g fill="currentColor">{_SHAPES[look.symbol]}</g>'
        f"</svg><span>{escaped(contender.name)}</span></button></li>"
        for look, contender in shown
    ]
    return f'<ul class="legend" aria-label="Contenders; press to hide or show">{"".join(items)}</ul>'


def parts_legend(names: Sequence[str]) -> str:
    """Which colour is which part of a step."""
    items = [
        f'<li><i style="background:var(--p{index % 8})"></i>{escaped(name)}</li>' for index, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def table(one: Table | None, *, kind: str = "", caption: bool = True) -> str:
    """In a box of its own, so that a wide one scrolls there."""
    if one is None:
        return ""
    name = escaped(one.caption)
    head = f"<caption{'' if caption else ' class=unseen'}><span>{name}</span></caption>"
    if any(one.columns):
        titles = "".join(
            f"<th scope=col{_right(one, index)}>{escaped(text)}</th>" if text else "<td></td>"
            for index, text in enumerate(one.columns)
        )
        head += f"<thead><tr>{titles}</tr></thead>"
    body = "\n".join(f"<tr>{''.join(_cell(one, i, cell) for i, cell in enumerate(row))}</tr>" for row in one.rows)
    return (
        f'<div class="wide{" " + kind if kind else ""}" role="region" aria-label="{name}" tabindex="0">'
        f"<table>{head}<tbody>\n{body}\n</tbody></table></div>"
    )


def folded(one: Table, *, kind: str = "", closed: bool = False) -> str:
    """A table under its caption, open where it is short."""
    state = " open" if len(one.rows) <= SHORT and not closed else ""
    return f"<details{state}><summary>{escaped(one.caption)}</summary>{table(one, kind=kind, caption=False)}</details>"


def embedded(value: Any) -> str:
    """JSON for a script element: nothing in it can end the element, open a comment, or break a line."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _cell(one: Table, index: int, cell: Cell) -> str:
    tag, scope = ("th", " scope=row") if index == 0 else ("td", "")
    text = escaped(cell.text)
    if cell.mark:
        mark, strong = f"<em>{escaped(cell.mark)}</em>", f"<strong>{text}</strong>"
        text = f"{mark} {strong}" if index in one.numbers else f"{strong} {mark}"  # digits stay under digits
    if cell.more:
        text += f" <small>{escaped(cell.more)}</small>"
    return f"<{tag}{scope}{_right(one, index)}>{text}</{tag}>"


def _right(one: Table, index: int) -> str:
    return " class=number" if index in one.numbers else ""

"""The page of a comparison: one HTML file with everything in it, that asks nothing of any other machine."""

from __future__ import annotations

import base64
import gzip
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from string import Template

from natgrad.compare.history import Comparison, mean_parts
from natgrad.compare.verdict import Verdict
from natgrad.page import figures, inside, markup, sweeps, tables
from natgrad.page.drawing import Figure, looks
from natgrad.page.public import public
from natgrad.page.words import in_figure
from natgrad.training.files import write_text_atomically

__all__ = ["PageError", "render", "write"]


class PageError(Exception):
    """The page cannot be made, in words for whoever wanted it."""


def write(path: Path, comparison: Comparison, verdict: Verdict) -> None:
    """Puts the page at `path`, all of it or nothing."""
    write_text_atomically(path, render(comparison, verdict))


def render(comparison: Comparison, verdict: Verdict) -> str:
    """The whole page."""
    library = _library()
    comparison = _with_percent(public(comparison))
    curves = figures.curves(comparison, verdict)
    step_time = figures.step_time(comparison)
    sweep = sweeps.sweep(comparison)
    readings = inside.readings(comparison)
    kfac = [one for one in comparison.contenders if any(run.layers for run in one.runs)]
    layers = [inside.layers(one, index=index) for index, one in enumerate(kfac)]
    drawn = [one for one in (curves, step_time, sweep, readings, *layers) if one is not None]
    sections = {
        "curves": ("Training curves", _curves(comparison, curves)),
        "times": ("Time to the target", _times(verdict)),
        "step-time": ("Time of a step", _step_time(comparison, step_time)),
        "sweep": ("The sweep", _sweep(comparison, sweep)),
        "inside": ("Inside K-FAC", _inside(comparison, readings, layers)),
        "coverage": ("Coverage", _coverage(comparison)),
        "runs": ("Runs", _runs(comparison)),
        "machine": ("Versions and machine", _machine(comparison)),
    }
    there = {name: (title, parts) for name, (title, parts) in sections.items() if any(parts)}
    return _template("template.html").substitute(
        title=markup.escaped(comparison.title),
        sentence=markup.sentence(verdict.sentence),
        advice=markup.listed(verdict.advice, "advice"),
        tuning=markup.paragraph(comparison.tuning, "tuning"),
        notes=markup.listed(comparison.notes, "notes"),
        contents=" ".join(f'<a href="#{name}">{markup.escaped(title)}</a>' for name, (title, _) in there.items()),
        sections="\n".join(markup.section(name, title, *parts) for name, (title, parts) in there.items()),
        style=_text("style.css"),
        script=_text("page.js"),
        figures=markup.embedded({one.name: _for_script(one) for one in drawn}),
        library=library,
    )


def _with_percent(comparison: Comparison) -> Comparison:
    """Errors of the sweep are shown as those of the curves are."""
    if comparison.score != "error":
        return comparison
    contenders = [
        replace(one, trials=tuple(replace(trial, rungs=_times_100(trial.rungs)) for trial in one.trials))
        for one in comparison.contenders
    ]
    return replace(comparison, contenders=tuple(contenders))


def _times_100(rungs: tuple[tuple[int, float | None], ...]) -> tuple[tuple[int, float | None], ...]:
    return tuple((epochs, None if score is None else 100 * score) for epochs, score in rungs)


def _curves(comparison: Comparison, curves: Figure | None) -> list[str]:
    if curves is None:
        return [markup.paragraph("No run has measured anything.")]
    return [markup.figure(curves, legend=markup.contenders_legend(looks(comparison), comparison))]


def _times(verdict: Verdict) -> list[str]:
    if not verdict.rows:
        return []
    return [markup.paragraph(verdict.target_says), markup.table(tables.times(verdict), kind="times")]


def _step_time(comparison: Comparison, step_time: Figure | None) -> list[str]:
    if step_time is None:
        return []
    names = figures.part_names(mean_parts(one.runs) for one in comparison.contenders)
    ours = [name for name in names if name in figures.PART_SAYS]
    says = "; ".join(f"{name}: {figures.PART_SAYS[name]}" for name in ours)
    return [
        markup.paragraph(f"Means over all steps and runs. {says[:1].upper()}{says[1:]}." if says else ""),
        markup.figure(step_time, legend=markup.parts_legend(names)),
    ]


def _sweep(comparison: Comparison, sweep: Figure | None) -> list[str]:
    if sweep is None:
        return []
    everyone = [tables.trials(one) for one in comparison.contenders if one.trials]
    return [
        markup.figure(sweep),
        *(markup.folded(one, closed=True) for one in everyone),
    ]


def _inside(comparison: Comparison, readings: Figure | None, layers: list[Figure | None]) -> list[str]:
    legend = markup.contenders_legend(looks(comparison), comparison, with_readings=True)
    return [
        markup.figure(readings, legend=legend),
        *(
            f"<h3>{markup.escaped(one.title)}</h3>{markup.paragraph(inside.LAYERS_SAY)}{markup.figure(one)}"
            for one in layers
            if one is not None
        ),
    ]


def _coverage(comparison: Comparison) -> list[str]:
    return [markup.folded(one) for one in tables.coverages(comparison)]


def _runs(comparison: Comparison) -> list[str]:
    if not comparison.contenders:
        return []
    settings = tables.chosen(comparison)
    return [markup.table(tables.runs(comparison), kind="runs"), markup.table(settings)]


def _machine(comparison: Comparison) -> list[str]:
    found = (tables.about(comparison), tables.machine(comparison))
    there = [markup.table(one, kind="facts") for one in found if one is not None]
    return [f'<div class="beside">{"".join(there)}</div>'] if there else []


def _for_script(one: Figure) -> dict[str, object]:
    return {
        "title": in_figure(one.title),
        "data": one.data,
        "layout": one.layout,
        "narrow": one.narrow,
        "height": one.height,
        "narrowHeight": one.narrow_height,
    }


@cache
def _library() -> str:
    """Plotly's script, packed: it is most of the page, and unpacked three times as long."""
    try:
        script: str = import_module("plotly.offline").get_plotlyjs()
    except ImportError as error:
        raise PageError('the page needs plotly: pip install "natgrad[cli]"') from error
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _template(name: str) -> Template:
    return Template(_text(name))


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")

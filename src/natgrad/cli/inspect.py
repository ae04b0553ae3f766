"""``natgrad inspect``: what K-FAC does with a recipe's model, and what that costs in memory and in time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from natgrad import data as data_package
from natgrad.cli import formatting as form
from natgrad.cli.drawing import parts_bar, parts_legend, report_table
from natgrad.data import Data, MissingData
from natgrad.recipes import Recipe, RecipeError
from natgrad.recipes.objects import kfac_arguments
from natgrad.training.events import PARTS, Listener
from natgrad.training.ranks import Ranks
from natgrad.training.run import arithmetic, made_up, serving, warnings_told
from natgrad.training.trainer import Trainer

STEPS, SECONDS = 13, 60.0
"""Steps that are measured, and how long at most; every kind of step is seen at least once."""
_STATISTICS, _SOLVE = 3, 6  # while measuring, every so many steps


def inspect_recipe(recipe: Recipe, *, name: str, ranks: Ranks, console: Console) -> None:
    """Trains a few steps and prints the coverage, the memory and the time of each part."""
    if not recipe.kfac.enabled:
        raise RecipeError("kfac.enabled is false in this recipe: there is nothing to inspect")
    notes: list[str] = []
    with arithmetic(recipe), warnings_told(notes.append), contextlib.ExitStack() as stack:
        data, missing = _data(recipe, ranks)
        stack.callback(data.close)
        if missing:  # before minutes of measuring
            console.print(Text(f"with made-up data: {missing}", style="yellow"), soft_wrap=True)
        # Often enough to see everything in a few steps; the table below has the recipe's own intervals.
        often = dataclasses.replace(
            recipe.kfac,
            factor_update_steps=_STATISTICS,
            inv_update_steps=_SOLVE,
            factor_update_epochs=None,
            inv_update_epochs=None,
        )
        trainer = Trainer(
            dataclasses.replace(recipe, kfac=often), data, ranks=ranks, listener=Listener(), checkpoints=None
        )
        steps = _measured(trainer, console)
    assert trainer.kfac is not None
    console.print(_head(recipe, name, trainer))
    for note in notes:
        console.print(Text(f"warning: {note}", style="yellow"), soft_wrap=True)
    console.print()
    console.print(report_table(trainer.kfac.report()))
    console.print()
    console.print(_memory(trainer))
    console.print()
    _print_costs(recipe, trainer, _costs(steps), console)


def _data(recipe: Recipe, ranks: Ranks) -> tuple[Data, str]:
    """The recipe's data, or made-up data of its shape and why."""
    try:
        return data_package.load(recipe.data, **serving(recipe, ranks)), ""
    except MissingData as error:
        return made_up(recipe, ranks), str(error)


def _measured(trainer: Trainer, console: Console) -> list[dict[str, float]]:
    """Seconds by part of one training step after the other; the first, which warms up, is left out."""
    batches = _without_end(trainer)
    began = time.perf_counter()
    steps: list[dict[str, float]] = []
    columns = (TextColumn("measuring steps"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=STEPS)
        trainer.running.train()
        for number in range(STEPS):
            trainer.clock.switch("data")
            inputs, targets = next(batches)
            trainer.clock.switch("model")
            trainer.one_step(inputs, targets)
            trainer.clock.switch(None)
            if trainer.ranks.device.type == "cuda":
                torch.cuda.synchronize(trainer.ranks.device)
            steps.append(trainer.clock.take()[0])
            progress.advance(task)
            if number > _SOLVE and time.perf_counter() - began > SECONDS:
                break
    return steps[1:]


def _without_end(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        yield from trainer.data.train.epoch(epoch, batch=trainer.recipe.training.batch)


def _costs(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each part, each time that it is done."""

    def median(part: str, which: list[dict[str, float]]) -> float:
        return statistics.median(step.get(part, 0.0) for step in which) if which else 0.0

    # The first step was taken after step 0: from there, every third takes statistics and every sixth decomposes.
    kinds = {
        "statistics": [step for number, step in enumerate(steps, start=1) if number % _STATISTICS == 0],
        "solve": [step for number, step in enumerate(steps, start=1) if number % _SOLVE == 0],
    }
    return {part: median(part, kinds.get(part, steps)) for part in PARTS}


def _head(recipe: Recipe, name: str, trainer: Trainer) -> Text:
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    text = Text.assemble((name, "bold"), f"  {recipe.summary}\n" if recipe.summary else "\n")
    text.append(f"{recipe.model.name}, {parameters:,} parameters; {trainer.data.description}; batch ")
    text.append(f"{recipe.training.batch}; {recipe.training.precision}; {trainer.ranks.described}")
    return text


def _memory(trainer: Trainer) -> Table:
    """Bytes that stay from step to step."""
    assert trainer.kfac is not None
    table = _table("memory", "")
    parameters = list(trainer.model.parameters())
    state = [t for one in trainer.optimizer.state.values() for t in one.values() if isinstance(t, Tensor)]
    rows = {
        "weights": _bytes(parameters),
        "gradients": _bytes(parameters),
        "optimizer": _bytes(state),
        "K-FAC's factors and decompositions": trainer.kfac.report().bytes,
    }
    for name, count in rows.items():
        table.add_row(name, form.size(count))
    if trainer.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.ranks.device)
        table.add_row("peak on the device, everything", form.size(peak))
    return table


def _bytes(tensors: list[nn.Parameter] | list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _print_costs(recipe: Recipe, trainer: Trainer, costs: Mapping[str, float], console: Console) -> None:
    options = kfac_arguments(recipe, trainer.steps_per_epoch)
    every = {
        "statistics": int(options.get("factor_update_steps", 10)),
        "solve": int(options.get("inv_update_steps", 100)),
    }
    parts = {part: costs[part] / every.get(part, 1) for part in PARTS}
    table = _table("time of a step, measured", "each time", "every", "a step")
    for part in PARTS:
        often = every.get(part, 1)
        table.add_row(part, form.span(costs[part]), form.plural(often, "step"), form.span(parts[part]))
    total, plain = sum(parts.values()), parts["data"] + parts["model"]
    table.add_section()
    table.add_row("together", "", "", form.span(total), style="bold")
    console.print(table)
    console.print()
    width = min(console.width, 100)
    console.print(parts_bar(parts, width))
    for line in parts_legend(parts, width):
        console.print(line)
    console.print()
    console.print(Text(f"{total / plain:.2f} times a step without K-FAC ({form.span(plain)})", style="bold"))


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table

"""What ``natgrad`` takes on the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.table import Table

import natgrad
from natgrad import recipes
from natgrad.cli.display import choose
from natgrad.compare.comparison import ComparisonError
from natgrad.compare.history import HistoryError
from natgrad.compare.worker import WorkerError
from natgrad.data import DataError
from natgrad.recipes import RecipeError
from natgrad.roles import Role, take
from natgrad.training import helping, ranks
from natgrad.training.checkpoints import CheckpointError
from natgrad.training.ranks import DeviceError, LostError
from natgrad.training.run import RunError, new_folder, run
from natgrad.training.trainer import DivergedError

assert tomli_w  # imported here so that its absence is told at once

app = typer.Typer(
    help="Train neural networks with K-FAC, the Kronecker-factored natural gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TOLD = (
    CheckpointError,
    ComparisonError,
    DataError,
    DeviceError,
    DivergedError,
    HistoryError,
    LostError,
    RunError,
    WorkerError,
)

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe's name, a TOML file, or the folder of a run.", metavar="RECIPE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Any field of the recipe, such as kfac.damping=0.003.", metavar="[FIELD=VALUE]..."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: the GPU where there is one.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="The model in bfloat16, under autocast.")]
Compile = Annotated[bool, typer.Option("--compile", help="The model compiled.")]
Target = Annotated[
    str | None, typer.Option(help="Error (5%) or loss to reach; default: what the best without K-FAC reaches.")
]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Images and convolutions channels-last.")]


@app.command()
def train(
    recipe: RecipeArgument = "digits",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/RECIPE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    device: Device = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    channels_last: ChannelsLast = False,
    stats_workers: Annotated[
        int, typer.Option(help="Processes that take the statistics in place of those that train.", min=0)
    ] = 0,
    inverse_workers: Annotated[
        int, typer.Option(help="Processes that decompose the factors beside training.", min=0)
    ] = 0,
) -> None:
    """Train a recipe: one process here, or under torchrun on as many as it starts.

    Ctrl-C saves and stops; go on with `natgrad train FOLDER --resume`. Several GPUs:
    `torchrun --nproc-per-node 4 -m natgrad train RECIPE`. Helpers are started with it, or are the last of torchrun's
    processes.
    """
    console = Console(highlight=False)
    with errors_told():
        name, changes = _given(recipe, overrides, bf16=bf16, compile=compile, channels_last=channels_last)
        folder, resume = _folder(name, out, resume=resume)
        if resume and (folder / "recipe.toml").is_file():
            _refuse_another_recipe(name, changes, folder)
            name = str(folder / "recipe.toml")
        plan = recipes.load(name, changes)
        label = recipes.label(name)
        role = None
        if stats_workers + inverse_workers > 0:
            plan = helping.with_helpers(plan, stats=stats_workers, inverse=inverse_workers)
            helping.start_under_torchrun(1 + stats_workers + inverse_workers)
            role = _role(stats_workers, inverse_workers)
            if not role.trains:
                helping.take_statistics(plan, role, device)
                return
        with ranks.started(device) as these, choose(console if these.first else Console(quiet=True)) as display:
            if (begun := these.begun()) is not None:  # torchrun has restarted the ranks
                folder, resume = begun, True
            finished = run(plan, folder, name=label, ranks=these, listener=display, resume=resume, roles=role)
    if not finished.saved:
        raise typer.Exit(1)
    if finished.reason != "finished":
        raise typer.Exit(128 + signal.Signals[finished.reason])


def _role(stats: int, inverse: int) -> Role:
    try:
        return take(stats=stats, inverse=inverse)
    except (RuntimeError, ValueError) as error:
        raise RunError(str(error)) from error


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe's file.", metavar="[RECIPE]")] = None,
) -> None:
    """List the recipes that come with natgrad, or show one."""
    console = Console(highlight=False)
    with errors_told():
        if name is not None:
            typer.echo(recipes.source(name).read_text(encoding="utf-8"), nl=False)
            return
        table = Table("recipe", "what it trains", box=None, pad_edge=False, header_style="bold")
        for one in recipes.names():
            table.add_row(one, recipes.summary(one))
        console.print(table)
        console.print(
            "\n[dim]natgrad recipes RECIPE shows its file; natgrad train RECIPE kfac.damping=0.003 changes it[/dim]"
        )


@app.command()
def inspect(
    recipe: RecipeArgument = "digits",
    overrides: Overrides = None,
    device: Device = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    channels_last: ChannelsLast = False,
) -> None:
    """Show what K-FAC does with a recipe's model, what it takes in memory, and what it costs on this machine."""
    from natgrad.cli.inspect import inspect_recipe

    console = Console(highlight=False)
    with errors_told():
        name, changes = _given(recipe, overrides, bf16=bf16, compile=compile, channels_last=channels_last)
        plan = recipes.load(name, changes)
        with ranks.started(device) as these:
            shown = console if these.first else Console(quiet=True)
            inspect_recipe(plan, name=recipes.label(name), ranks=these, console=shown)


@app.command()
def compare(
    recipe: RecipeArgument = "digits",
    overrides: Overrides = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            help="Contenders: sgd, adam, adamw, muon, package.module:Class, and kfac with variants such as "
            "kfac-sampled-reduce or kfac-inverse-adamw; +part.field=value changes one. Default: sgd,adamw,kfac.",
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Settings that each is tuned over (8); 1: none.", min=1)] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each with the settings that were chosen (5).", min=1)
    ] = None,
    target: Target = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/compare-RECIPE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in a folder.")] = False,
    device: Device = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    channels_last: ChannelsLast = False,
) -> None:
    """Does K-FAC pay for this model? Tune some optimizers alike, race them, and make a page of it.

    Ctrl-C stops and saves; go on with `natgrad compare FOLDER --resume`, also with more --seeds or --optimizers.
    """
    from natgrad.cli import compare as comparing
    from natgrad.compare.comparison import gather

    console = Console(highlight=False)
    with errors_told():
        name, changes = _given(recipe, overrides, bf16=bf16, compile=compile, channels_last=channels_last)
        plan, folder = comparing.planned(
            name,
            changes,
            specs=optimizers,
            trials=trials,
            seeds=seeds,
            target=target,
            out=out,
            resume=resume,
            device=device,
        )
        page = folder / comparing.PAGE
        try:
            stopped = comparing.run_comparison(plan, folder, device=device, console=console)
        except WorkerError:
            if any(one.runs for one in gather(folder).contenders):  # what there is is worth a page
                comparing.report(gather(folder), out=page, console=console)
            raise
        found = gather(folder)
        written = comparing.report(found, out=page, console=console)
        if stopped:
            console.print(f"stopped by {stopped}; to go on: natgrad compare {folder} --resume", soft_wrap=True)
            raise typer.Exit(128 + signal.Signals[stopped])
    if not written or not any(run.finished for one in found.contenders for run in one.runs):
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of comparisons or runs, or folders full of them.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the one folder, or here.")] = None,
    target: Target = None,
) -> None:
    """Make the page of a comparison again, or one of any runs, also those of your own scripts (natgrad.Log)."""
    from natgrad.cli import compare as comparing
    from natgrad.compare.collect import collect

    console = Console(highlight=False)
    with errors_told():
        path = out or (runs[0] / comparing.PAGE if len(runs) == 1 else Path(comparing.PAGE))
        if not comparing.report(collect(runs), target=target, out=path, console=console):
            raise typer.Exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"natgrad {natgrad.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Train neural networks with K-FAC, the Kronecker-factored natural gradient."""


@contextmanager
def errors_told() -> Iterator[None]:
    """Mistakes of the user, and things that are missing, are told in words, without a traceback."""
    try:
        yield
    except RecipeError as error:
        _tell(error)
        raise typer.Exit(2) from None
    except _TOLD as error:
        _tell(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped at once: what was not saved is lost")
        raise typer.Exit(130) from None


def _tell(error: Exception) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    rank = f"rank {os.environ.get('RANK', '?')}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    console.print(f"{rank}[bold red]error:[/bold red]", end=" ")
    console.print(str(error), markup=False)


def _given(
    recipe: str, overrides: list[str] | None, *, bf16: bool, compile: bool, channels_last: bool
) -> tuple[str, list[str]]:
    """The recipe and its overrides; where the first word is an override, the recipe is the default one."""
    changes = list(overrides or [])
    if "=" in recipe and not Path(recipe).exists():
        recipe, changes = "digits", [recipe, *changes]
    flags = {
        "training.precision=bf16": bf16,
        "training.compile=true": compile,
        "training.channels_last=true": channels_last,
    }
    return recipe, [*changes, *(override for override, wanted in flags.items() if wanted)]


def _folder(recipe: str, out: Path | None, *, resume: bool) -> tuple[Path, bool]:
    if out is not None:
        return out, resume
    path = Path(recipe).parent if Path(recipe).name == "recipe.toml" else Path(recipe)
    ours = recipe in recipes.names()
    is_run = not ours and (path / "recipe.toml").is_file()
    if resume and is_run:
        return path, True
    if resume and ours:
        raise RunError("--resume needs the folder of a run: natgrad train FOLDER --resume, or --out FOLDER")
    if resume:
        raise RunError(f"there is no run in {recipe}: the folder of a run holds a recipe.toml")
    if is_run and path == Path(recipe):
        raise RunError(f"{recipe} holds a run: go on with --resume, or run its recipe again with --out FOLDER")
    return new_folder(recipes.label(recipe)), False


def _refuse_another_recipe(name: str, changes: list[str], folder: Path) -> None:
    """A run goes on with its own recipe; naming another one is a mistake that would be found out late."""
    if recipes.source(name).resolve() == (folder / "recipe.toml").resolve():
        return
    mine, given = recipes.load(str(folder / "recipe.toml")), recipes.load(name, changes)
    if (mine.model, mine.data.kind) != (given.model, given.data.kind):
        raise RunError(f"{folder} holds a run of another recipe ({mine.summary}): choose another --out")

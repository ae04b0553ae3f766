"""Runs with helpers, by the command."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import natgrad
from natgrad.recipes import Recipe, load
from natgrad.recipes.values import RecipeError
from natgrad.training.helping import with_helpers
from natgrad.training.metrics_file import read


def with_kfac(**options: object) -> Recipe:
    recipe = load("digits")
    return dataclasses.replace(
        recipe, kfac=dataclasses.replace(recipe.kfac, **{"enabled": True, "fisher": None, **options})
    )


def test_stats_workers_sample_targets() -> None:
    assert with_helpers(with_kfac(), stats=1, inverse=0).kfac.fisher == "sampled"
    assert with_helpers(with_kfac(fisher="exact"), stats=1, inverse=0).kfac.fisher == "exact"
    plain = with_kfac(overlap="background")
    assert with_helpers(plain, stats=0, inverse=2) is plain


@pytest.mark.parametrize(
    ("options", "helpers", "words"),
    [
        ({"enabled": False}, (0, 1), "kfac.enabled is false"),
        ({"overlap": "staggered"}, (0, 1), "decompose in the background"),
        ({"fisher": "empirical"}, (1, 0), "must be sampled or exact"),
    ],
)
def test_what_helpers_cannot_do_is_told(options: dict[str, object], helpers: tuple[int, int], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        with_helpers(with_kfac(**options), stats=helpers[0], inverse=helpers[1])


@pytest.mark.slow
def test_the_whole_of_figure_1_by_one_command(tmp_path: Path) -> None:
    """One process that trains, a stats worker and an inverse worker; all end with the training."""
    given = ["training.epochs=12", "training.log_every=5", "kfac.factor_update_steps=2", "kfac.inv_update_steps=4"]
    helpers = ["--stats-workers", "1", "--inverse-workers", "1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(natgrad.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "natgrad", "train", "digits", *given, *helpers, "--out", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert lines[-1]["kind"] == "end"
    assert next(line for line in reversed(lines) if line["kind"] == "test")["accuracy"] > 0.95

"""Runs with helpers: processes beside those that train, and what a stats worker does of a recipe."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from natgrad import data as data_package
from natgrad.kfac import KFAC
from natgrad.recipes.objects import build_kfac, build_model
from natgrad.recipes.schema import Recipe
from natgrad.recipes.values import RecipeError
from natgrad.roles import Role
from natgrad.training.ranks import Ranks, device_of
from natgrad.training.run import arithmetic, serving
from natgrad.training.trainer import autocast

_SEEDS = 1_000_003  # from one stats worker to the next: their batches are their own


def start_under_torchrun(processes: int) -> None:
    """Becomes a torchrun of this command with so many processes, unless it is under one already."""
    if "RANK" in os.environ:
        return
    # Threads of several processes that share a machine would get into each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*torchrun, "-m", "natgrad", *sys.argv[1:]])


def with_helpers(recipe: Recipe, *, stats: int, inverse: int) -> Recipe:
    """The recipe as it is run where others take statistics or decompose: targets are sampled."""
    if not recipe.kfac.enabled:
        raise RecipeError("--stats-workers and --inverse-workers help K-FAC, and kfac.enabled is false")
    if inverse and recipe.kfac.overlap not in (None, "background"):
        raise RecipeError("--inverse-workers decompose in the background: kfac.overlap does not go with them")
    if not stats or recipe.kfac.fisher in ("sampled", "exact"):
        return recipe
    if recipe.kfac.fisher == "empirical":
        raise RecipeError("--stats-workers draw targets of their own: kfac.fisher must be sampled or exact")
    return dataclasses.replace(recipe, kfac=dataclasses.replace(recipe.kfac, fisher="sampled"))


def take_statistics(recipe: Recipe, role: Role, device: str | None) -> None:
    """What a stats worker does: statistics of a recipe's model on batches in an order of its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = Ranks(device=device_of(device, local, shared=True))
    training = recipe.training
    seed = (training.seed + _SEEDS * (role.index + 1) + role.incarnation) % 1_000_000_000
    with arithmetic(recipe):
        own = dataclasses.replace(recipe, training=dataclasses.replace(training, seed=seed))
        data = data_package.load(recipe.data, **serving(own, ranks))
        torch.manual_seed(seed)
        context = recipe.data.context if recipe.data.kind == "text" else None
        model = build_model(recipe.model, classes=data.classes, context=context).to(ranks.device)
        if training.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        kfac: KFAC = build_kfac(recipe, model, steps_per_epoch=data.train.steps(training.batch), roles=role)

        def forward(network: torch.nn.Module, batch: Any) -> Any:
            with autocast(training.precision, ranks.device):
                return network(batch[0])

        try:
            kfac.help(_Batches(data, training.batch), forward=forward)
        finally:
            data.close()


class _Batches:
    """One epoch after the other, each in another order."""

    def __init__(self, data: data_package.Data, batch: int) -> None:
        self._data, self._batch, self._epoch = data, batch, -1

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return iter(self._data.train.epoch(self._epoch, batch=self._batch, start=0))

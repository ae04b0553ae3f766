"""From a recipe to the objects that it names: network, optimizer, schedules, K-FAC.

Each is checked by who knows best: options of K-FAC by constructing one on a tiny layer, those of a network on the meta
device, those of an optimizer on one weight.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from natgrad import models, schedules
from natgrad.distribute.strategy import Strategy
from natgrad.errors import NatgradWarning
from natgrad.kfac import KFAC
from natgrad.models import ChunkedBatchNorm2d
from natgrad.recipes.muon import Muon
from natgrad.recipes.schema import KFACOptions, ModelOptions, OptimizerOptions, Recipe
from natgrad.recipes.values import RecipeError, bounded, nearest
from natgrad.roles import Role
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.region import TrustRegion

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": Muon}
NORMS: dict[str, Callable[[int], Any] | None] = {"none": None, "batch": nn.BatchNorm2d}
_SCHEDULES: dict[str, tuple[Callable[..., schedules.Schedule], tuple[str, ...], tuple[str, ...]]] = {
    "constant": (schedules.constant, ("value",), ()),
    "steps": (schedules.steps, ("value", "factor", "at"), ()),
    "exponential": (schedules.exponential, ("value", "factor"), ("every",)),
    "cosine": (schedules.cosine, ("value",), ("over", "end")),
}
_IMAGES = ("path", "flip", "size", "resize", "square", "crop", "smallest_crop", "workers", "augment_on")
_READ = {
    "digits": ("flip", "pad"),
    "cifar10": ("path", "flip", "pad", "augment_on"),
    "images": _IMAGES,
    "text": ("path", "context", "test_part"),
}
"""The fields of ``[data]`` that mean something to each kind."""
_WARMUP = ("warmup", "warmup_start")
_LOOKS = 400  # at a schedule, over all epochs


def check(recipe: Recipe) -> None:
    """Refuses what cannot be run, before anything is loaded or written."""
    _check_parts(recipe)
    _check_schedules(recipe)
    if ":" in recipe.model.name:
        imported(recipe.model.name, "model.name")
    else:
        with torch.device("meta"):
            build_model(recipe.model)
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(recipe, layer, ranks=1, steps_per_epoch=1)
    _check_step(recipe.optimizer.name, optimizer, layer)
    if recipe.kfac.enabled:
        # Patterns are looked up in the real model.
        general = dataclasses.replace(recipe.kfac, exclude=None, doubly_factored=None, sharing=None)
        with warnings.catch_warnings():  # the real one warns
            warnings.simplefilter("ignore", NatgradWarning)
            build_kfac(dataclasses.replace(recipe, kfac=general), layer, steps_per_epoch=1).attach(optimizer).detach()


def _check_parts(recipe: Recipe) -> None:
    data, training, kfac = recipe.data, recipe.training, recipe.kfac
    for field in dataclasses.fields(data):
        changed = getattr(data, field.name) != field.default
        if changed and field.name not in ("kind", "damaged", *_READ[data.kind]):
            raise RecipeError(
                f"data.{field.name} has no effect on {data.kind}, which takes {', '.join(_READ[data.kind])}"
            )
    if recipe.model.norm_chunk != 32 and recipe.model.norm != "chunked":
        raise RecipeError('model.norm_chunk goes with model.norm="chunked"')
    if recipe.model.options.get("auxiliary"):
        raise RecipeError("model.auxiliary: natgrad train has no loss for auxiliary heads")
    if data.kind != "digits" and not data.path:
        raise RecipeError(f"data.path is missing: where is the {'file' if data.kind == 'text' else 'folder'}?")
    if data.crop == "random" and data.kind == "images" and data.resize < data.size:
        raise RecipeError(f"data.resize={data.resize} is smaller than data.size={data.size}, which is cut out of it")
    if data.kind == "text" and training.loss == "reconstruction":
        raise RecipeError('training.loss="reconstruction" is for images')
    if training.label_smoothing and training.loss != "cross-entropy":
        raise RecipeError('training.label_smoothing goes with training.loss="cross-entropy"')
    for what in ("factor_update", "inv_update"):
        if getattr(kfac, f"{what}_steps") is not None and getattr(kfac, f"{what}_epochs") is not None:
            raise RecipeError(f"kfac.{what}_steps and kfac.{what}_epochs say the same thing twice: give one of them")
    if kfac.region_of is not None and (kfac.kl_clip is None or kfac.kl_clip == "none"):
        raise RecipeError("kfac.region_of needs kfac.kl_clip, the bound")


def _check_step(name: str, optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    """Some optimizers want a closure, or sparse gradients: they find that out in their first step."""
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(f"optimizer {name!r} cannot take an ordinary step: {error}") from error
    optimizer.zero_grad(set_to_none=True)


def _check_schedules(recipe: Recipe) -> None:
    """Numbers that change stay within the bounds of their fields to the end of training."""
    for section in ("optimizer", "kfac"):
        options = getattr(recipe, section)
        for field in dataclasses.fields(options):
            path, value = f"{section}.{field.name}", getattr(options, field.name)
            if isinstance(value, dict) and field.name not in ("options", "sharing"):
                # A learning rate may well end at nothing.
                bounds = {"at_least": 0} if path == "optimizer.lr" else field.metadata
                _check_schedule(path, schedule(path, value, recipe, 1), recipe.training.epochs, bounds)
    if isinstance(recipe.kfac.sharing, dict):
        for pattern, word in recipe.kfac.sharing.items():
            if word not in ("expand", "reduce"):
                raise RecipeError(f"kfac.sharing: {pattern!r} must be 'expand' or 'reduce', got {word!r}")


def _check_schedule(path: str, value: schedules.Schedule, epochs: int, bounds: Mapping[str, Any]) -> None:
    for place in range(_LOOKS + 1):
        epoch = place * epochs / _LOOKS
        try:
            bounded(value(epoch), path, bounds, where=f" at epoch {epoch:g}")
        except OverflowError:
            raise RecipeError(f"{path} is too large a number at epoch {epoch:g}") from None


def imported(path: str, what: str) -> Any:
    """What ``package.module:name`` points to."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the file does
        hint = " (modules are looked for in the folder that natgrad is started in, too)"
        missing = hint if isinstance(error, ModuleNotFoundError) else ""
        raise RecipeError(f"{what}={path!r} cannot be imported: {error}{missing}") from error


def build_model(options: ModelOptions, *, classes: int | None = None, context: int | None = None) -> nn.Module:
    """The network; `classes` and `context` go to its options of that meaning, unless the recipe says something else."""
    given = dict(options.options)
    own = ":" in options.name
    if not own and options.name not in models.names():
        raise RecipeError(
            f"model.name={options.name!r} is no network{nearest(options.name, models.names())}; there are "
            f'{", ".join(models.names())}, or "package.module:function" for your own'
        )
    builder = imported(options.name, "model.name") if own else partial(models.build, options.name)
    accepted = _parameters(builder if own else models.builder(options.name))
    if options.norm == "chunked":
        given["norm"] = partial(ChunkedBatchNorm2d, chunk=options.norm_chunk)
    elif options.norm != "default":
        given["norm"] = NORMS[options.norm]
    if "norm" in given and accepted is not None and "norm" not in accepted:
        raise RecipeError(f"model.norm: {options.name} has no choice of normalisation")
    from_data = {"num_classes": classes, "classes": classes, "vocabulary": classes, "context": context}
    for name, value in from_data.items():
        if value is not None and accepted is not None and name in accepted:
            given.setdefault(name, value)
    try:
        model = builder(**given)
    except Exception as error:  # torch's own, or a file's of the user
        call = ", ".join(f"{name}={value!r}" for name, value in given.items() if name != "norm")
        known = own or accepted is None or accepted.issuperset(given)
        raise RecipeError(f"model: {f'{options.name}({call}) cannot be made: ' if known else ''}{error}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model.name={options.name!r} gave a {type(model).__name__}, not an nn.Module")
    return model


def model_default(options: ModelOptions, parameter: str) -> int | None:
    """The default of one of a network's own options, such as the number of classes."""
    if ":" in options.name:
        return None
    known = inspect.signature(models.builder(options.name)).parameters
    default = known[parameter].default if parameter in known else None
    return default if isinstance(default, int) else None


def _parameters(builder: Callable[..., Any]) -> set[str] | None:
    try:
        return set(inspect.signature(builder).parameters)
    except (TypeError, ValueError):
        return None


def build_optimizer(recipe: Recipe, model: nn.Module, *, ranks: int, steps_per_epoch: int) -> torch.optim.Optimizer:
    """The optimizer, with the learning rate of the first step."""
    options = recipe.optimizer
    rate = learning_rate(recipe, ranks=ranks, steps_per_epoch=steps_per_epoch)
    kind = optimizer_class(options)
    try:
        optimizer = kind(model if kind is Muon else model.parameters(), lr=rate(0), **options.options)
    except Exception as error:
        unknown = [name for name in options.options if (known := _parameters(kind)) and name not in known]
        hint = "".join(nearest(name, _parameters(kind) or ()) for name in unknown)
        raise RecipeError(f"optimizer {options.name!r}: {error}{hint}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(f"optimizer.name={options.name!r} gave a {type(optimizer).__name__}, not an optimizer")
    return optimizer


def optimizer_class(options: OptimizerOptions) -> Any:
    """The class that a name stands for."""
    if ":" in options.name:
        return imported(options.name, "optimizer.name")
    if options.name not in OPTIMIZERS:
        raise RecipeError(
            f"optimizer.name={options.name!r} is no optimizer{nearest(options.name, OPTIMIZERS)}; there are "
            f'{", ".join(OPTIMIZERS)}, or "package.module:Class" for your own'
        )
    return OPTIMIZERS[options.name]


def learning_rate(recipe: Recipe, *, ranks: int, steps_per_epoch: int) -> schedules.Schedule:
    """The learning rate as a function of the step."""
    rate = schedule("optimizer.lr", recipe.optimizer.lr, recipe, steps_per_epoch)
    return rate * ranks if recipe.optimizer.lr_times_ranks else rate


def schedule(path: str, value: Any, recipe: Recipe, steps_per_epoch: int) -> schedules.Schedule:
    """A number, or a table whose times are in epochs, as a function of the step."""
    if not isinstance(value, dict):
        return schedules.constant(value)
    kind = value.get("schedule")
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        known = ", ".join(map(repr, _SCHEDULES))
        raise RecipeError(f"{path}.schedule must be one of {known}, got {kind!r}{nearest(str(kind), _SCHEDULES)}")
    make, required, optional = _SCHEDULES[kind]
    allowed = ("schedule", *required, *optional, *_WARMUP)
    for name in value:
        if name not in allowed:
            raise RecipeError(f"{path}: a {kind!r} schedule has no {name!r}{nearest(name, allowed)}")
    for name in required:
        if name not in value:
            raise RecipeError(f"{path}: a {kind!r} schedule needs {name!r}")
    given = {name: one for name, one in value.items() if name in (*required, *optional) and name != "value"}
    if kind == "cosine":
        given = {"over": recipe.training.epochs, "end": 0.0, **given}
    try:
        result = make(value["value"], **given)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{path}: {error}") from error
    return (result * _warmup(path, value)).epochs(steps_per_epoch)


def _warmup(path: str, value: Mapping[str, Any]) -> schedules.Schedule:
    if "warmup" not in value:
        if "warmup_start" in value:
            raise RecipeError(f"{path}: warmup_start goes with warmup, the number of epochs")
        return schedules.constant(1.0)
    try:
        return schedules.warmup(value["warmup"], start=value.get("warmup_start", 0.1))
    except (TypeError, ValueError):
        raise RecipeError(
            f"{path}.warmup: {value['warmup']!r} epochs from {value.get('warmup_start', 0.1)!r} times the value cannot "
            "be: give a number of epochs above 0, and a number"
        ) from None


_STRATEGY = ("strategy", "grad_worker_fraction", "share_statistics", "wire")


def build_kfac(recipe: Recipe, model: nn.Module, *, steps_per_epoch: int, roles: Role | None = None) -> KFAC:
    """K-FAC on a model."""
    try:
        return KFAC(model, **kfac_arguments(recipe, steps_per_epoch), roles=roles)
    except RecipeError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"kfac: {error}") from error


def kfac_arguments(recipe: Recipe, steps_per_epoch: int) -> dict[str, Any]:
    """The options of `KFAC` that a recipe gives."""
    options = recipe.kfac
    skipped = ("enabled", "region_of", "factor_update_epochs", "inv_update_epochs", *_STRATEGY)
    given: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(KFACOptions)
        if field.name not in skipped and getattr(options, field.name) is not None
    }
    for name, value in given.items():
        if isinstance(value, dict) and name != "sharing":
            given[name] = schedule(f"kfac.{name}", value, recipe, steps_per_epoch)
    for what in ("factor_update", "inv_update"):
        if (epochs := getattr(options, f"{what}_epochs")) is not None:
            given[f"{what}_steps"] = max(1, round(epochs * steps_per_epoch))
    if options.damping == "adaptive":
        given["damping"] = AdaptiveDamping()
    if options.kl_clip == "none":
        given["kl_clip"] = None
    elif options.region_of is not None:
        given["kl_clip"] = TrustRegion(given["kl_clip"], of=options.region_of)
    if any(getattr(options, name) is not None for name in _STRATEGY):
        given["strategy"] = Strategy(
            name=options.strategy or "auto",
            grad_worker_fraction=options.grad_worker_fraction,
            share_statistics=bool(options.share_statistics),
            wire=torch.bfloat16 if options.wire == "bf16" else None,
        )
    given["predictive"] = "bernoulli" if recipe.training.loss == "reconstruction" else "categorical"
    return given

"""What ``--optimizers`` may name, and how each becomes a recipe.

``sgd``, ``adam``, ``adamw``, ``muon``, ``package.module:Class``, and ``kfac`` with any of its variants after hyphens:
``kfac-sampled-reduce``, ``kfac-inverse-adamw``. ``+part.field=value`` changes any field of the recipe for one of them:
``kfac+kfac.factor_update_steps=20``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from natgrad.compare.history import label
from natgrad.kfac import KFAC
from natgrad.recipes import Recipe, check
from natgrad.recipes.muon import split
from natgrad.recipes.objects import OPTIMIZERS, build_model, optimizer_class
from natgrad.recipes.schema import OptimizerOptions
from natgrad.recipes.values import RecipeError, as_table, build, nearest, overridden

VARIANTS = {
    "empirical": "kfac.fisher",
    "sampled": "kfac.fisher",
    "exact": "kfac.fisher",
    "expand": "kfac.sharing",
    "reduce": "kfac.sharing",
    "eigen": "kfac.solver",
    "inverse": "kfac.solver",
    "sgd": "optimizer.name",
    "adam": "optimizer.name",
    "adamw": "optimizer.name",
}
"""The words that may follow ``kfac-``, and what each of them sets."""

RATES = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "muon": 1e-3}
"""Learning rates to search around where the recipe's own was chosen for another optimizer, or for K-FAC."""

SHARED = ("data", "training.epochs", "training.steps", "training.seed", "training.loss")
"""What all contenders have in common: else nothing could be compared."""

_RATE = 1e-3  # of classes that have no default
_PLUS = re.compile(r"\+(?=[A-Za-z_])")  # not that of 1e+3
_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not those in lists and tables


def named(texts: Iterable[str]) -> list[str]:
    """The names in ``sgd,adamw,kfac``, which may be given in several texts."""
    return [name.strip() for text in texts for name in _COMMA.split(text) if name.strip()]


@dataclass(frozen=True)
class Entry:
    """A contender before anything has run. `name` is for people, `slug` for folders, `spec` what was asked for; the
    fields that it names itself are `fixed`.
    """

    spec: str
    name: str
    slug: str
    recipe: Recipe
    fixed: frozenset[str] = frozenset()

    @property
    def uses_kfac(self) -> bool:
        """Whether K-FAC stands in front of its optimizer."""
        return self.recipe.kfac.enabled

    def centre(self) -> dict[str, float]:
        """The settings that a sweep searches around: the learning rate, and K-FAC's damping unless it adapts; without
        those that are fixed.
        """
        settings = {}
        if "optimizer.lr" not in self.fixed:
            settings["lr"] = first_value(self.recipe.optimizer.lr)
        damping = self.recipe.kfac.damping
        if self.uses_kfac and damping != "adaptive" and "kfac.damping" not in self.fixed:
            settings["damping"] = first_value(_default_damping() if damping is None else damping)
        return settings

    def with_settings(self, settings: Mapping[str, float]) -> Recipe:
        """The recipe with these in place of the centre; schedules keep their shape."""
        table = as_table(self.recipe)
        centre = self.centre()
        if "lr" in settings:
            table["optimizer"]["lr"] = scaled(self.recipe.optimizer.lr, settings["lr"] / centre["lr"])
        if "damping" in settings:
            now = table["kfac"].get("damping", _default_damping())
            table["kfac"]["damping"] = scaled(now, settings["damping"] / centre["damping"])
        return build(table)


def entries(recipe: Recipe, specs: Iterable[str]) -> list[Entry]:
    """The contenders that were asked for, in order; everything about them is checked."""
    found: list[Entry] = []
    for spec in specs:
        entry = _entry(recipe, spec.strip(), taken={one.slug for one in found})
        twin = next((one for one in found if one.recipe == entry.recipe), None)
        if twin is not None:
            raise RecipeError(f"{twin.spec!r} and {entry.spec!r} are the same for this recipe: leave one of them out")
        found.append(entry)
    if not found:
        raise RecipeError("there is nothing to compare: name some optimizers, such as sgd,adamw,kfac")
    return found


def _entry(recipe: Recipe, spec: str, *, taken: set[str]) -> Entry:
    base, *changes = _PLUS.split(spec)
    overrides = _overrides(recipe, base)
    for change in changes:
        field = change.partition("=")[0].strip()
        if field.startswith(tuple(f"{one}." for one in SHARED)) or field in SHARED:
            raise RecipeError(f"{spec}: {field} is the same for all: change it for the whole comparison")
    try:
        made = build(overridden(as_table(recipe), [*overrides, *changes]))
        check(made)
        _refuse_muon_without_matrices(made)
    except RecipeError as error:
        raise RecipeError(f"{spec}: {error}") from error
    slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", spec).strip("-.")[:80]
    while slug in taken:
        slug += "-again"
    fields = frozenset(change.partition("=")[0].strip() for change in changes)
    return Entry(spec, _name(base, changes, recipe), slug, made, fields)


def _overrides(recipe: Recipe, base: str) -> list[str]:
    """What turns a recipe into one of the contender's."""
    if base == "kfac" or base.startswith("kfac-"):
        return _of_kfac(recipe, base.split("-")[1:])
    if base not in OPTIMIZERS and ":" not in base:
        known = [*OPTIMIZERS, "kfac", *(f"kfac-{word}" for word in VARIANTS)]
        raise RecipeError(
            f"there is no optimizer {base!r}{nearest(base, known)}: there are {', '.join(OPTIMIZERS)}, "
            f'"package.module:Class", and kfac with any of {", ".join(f"-{word}" for word in VARIANTS)}'
        )
    # A recipe for K-FAC may do without momentum because K-FAC does; plain SGD should not.
    without = base == "sgd" and recipe.kfac.enabled and "momentum" not in recipe.optimizer.options
    momentum = ["optimizer.momentum=0.9"] if without else []
    return ["kfac.enabled=false", *_optimizer(recipe, base, with_kfac=False), *momentum]


def _of_kfac(recipe: Recipe, words: list[str]) -> list[str]:
    overrides = ["kfac.enabled=true"]
    chosen: dict[str, str] = {}
    for word in words:
        if word not in VARIANTS:
            raise RecipeError(f"kfac-{word}: there is no such variant{nearest(word, VARIANTS)}: {', '.join(VARIANTS)}")
        if (field := VARIANTS[word]) in chosen:
            raise RecipeError(f"kfac-{'-'.join(words)}: {chosen[field]} and {word} exclude each other")
        chosen[field] = word
        if field != "optimizer.name":
            overrides.append(f"{field}={word}")
            continue
        overrides += _optimizer(recipe, word, with_kfac=True)
        if word != "sgd" and word != recipe.optimizer.name and recipe.kfac.kl_clip != "none":
            # Adam rescales what it gets: only a bound on the step that it really takes means something.
            overrides += ["kfac.region_of=step", *(["kfac.kl_clip=1e-3"] if recipe.kfac.kl_clip is None else [])]
    return overrides


def _optimizer(recipe: Recipe, name: str, *, with_kfac: bool) -> list[str]:
    """The recipe's own as it is, or another one, or the same without the K-FAC that its learning rate was chosen for:
    then with a learning rate of its own and the recipe's schedule.
    """
    if name == recipe.optimizer.name and recipe.kfac.enabled == with_kfac:
        return []
    factor = default_rate(name) / first_value(recipe.optimizer.lr)
    return [f"optimizer.name={name}", f"optimizer.lr={_toml(scaled(recipe.optimizer.lr, factor))}"]


def default_rate(name: str) -> float:
    """A learning rate to begin with: natgrad's for names, the class's own for import paths."""
    if name in RATES:
        return RATES[name]
    kind = optimizer_class(OptimizerOptions(name=name, lr=_RATE))
    try:
        default = inspect.signature(kind).parameters["lr"].default
    except (KeyError, TypeError, ValueError):
        return _RATE
    return float(default) if isinstance(default, int | float) and default > 0 else _RATE


def _refuse_muon_without_matrices(recipe: Recipe) -> None:
    if recipe.optimizer.name != "muon" or ":" in recipe.model.name:
        return
    with torch.device("meta"):
        matrices, _ = split(build_model(recipe.model))
    if not matrices:
        raise RecipeError(
            f"torch's Muon is for the matrices of linear layers but the last, and {recipe.model.name} has none"
        )


def _name(base: str, changes: list[str], recipe: Recipe) -> str:
    """``K-FAC (reduce, damping=0.01)``."""
    words: list[str] = []
    name = label(base, uses_kfac=False)
    if base == "kfac" or base.startswith("kfac-"):
        words = base.split("-")[1:]
        optimizer = next((word for word in words if VARIANTS[word] == "optimizer.name"), recipe.optimizer.name)
        name = label(optimizer, uses_kfac=True)
        words = [word for word in words if VARIANTS[word] != "optimizer.name"]
    fields = [re.sub(r"^(kfac|optimizer|training|model)\.", "", change.strip()) for change in changes]
    more = ", ".join([*words, *fields])
    return f"{name} ({more})" if more else name


def first_value(value: Any) -> float:
    """A number, or what a schedule begins with."""
    return float(value["value"] if isinstance(value, Mapping) else value)


def scaled(value: Any, factor: float) -> Any:
    """A number times a factor; of a schedule, what it begins and ends with."""
    if isinstance(value, Mapping):
        return {name: one * factor if name in ("value", "end") else one for name, one in value.items()}
    return value * factor


def _default_damping() -> float:
    return float(inspect.signature(KFAC).parameters["damping"].default)


def _toml(value: Any) -> str:
    """A number or a schedule's table on one line, as overrides are written."""
    if not isinstance(value, Mapping):
        return repr(value)
    return "{ " + ", ".join(f"{name} = {_inline(one)}" for name, one in value.items()) + " }"


def _inline(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

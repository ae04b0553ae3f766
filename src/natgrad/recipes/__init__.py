"""Recipes: whole training runs as readable TOML. `names` lists those that come with natgrad, `load` reads one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from natgrad.recipes.objects import check
from natgrad.recipes.schema import Recipe
from natgrad.recipes.values import RecipeError, as_table, build, nearest, overridden, parsed

__all__ = ["Recipe", "RecipeError", "check", "label", "load", "names", "source", "summary", "to_toml"]

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The recipes that come with natgrad, the simplest first."""
    order = ("digits", "digits-autoencoder", "cifar10", "imagenette", "text", "folder", "imagenet")
    found = [path.stem for path in _FOLDER.glob("*.toml")]
    return sorted(found, key=lambda name: (next(i for i, start in enumerate(order) if name.startswith(start)), name))


def source(name: str) -> Path:
    """The file of a recipe: one of natgrad's by its name, any TOML file, or the recipe of a run's folder."""
    if name in names():
        return _FOLDER / f"{name}.toml"
    path = Path(name)
    try:
        if path.is_dir() and (path / "recipe.toml").is_file():
            return path / "recipe.toml"
        if path.suffix == ".toml" and path.is_file():
            return path
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name!r} cannot be a file: {error}") from error
    if path.suffix == ".toml":
        raise RecipeError(f"there is no file {path.absolute()}")
    raise RecipeError(
        f"there is no recipe {name!r}{nearest(name, names())}; `natgrad recipes` lists them. A file of your own ends "
        "in .toml, and the folder of a run holds a recipe.toml"
    )


def label(name: str) -> str:
    """A recipe's name for people: that of its file, or of the run's folder that it lies in."""
    path = Path(name).absolute()
    if name in names() or not path.is_dir():
        return path.parent.name if path.name == "recipe.toml" else path.stem
    return path.name


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe with overrides such as ``kfac.damping=0.003``; everything is checked."""
    recipe = build(overridden(_read(source(name)), overrides))
    check(recipe)
    return recipe


def summary(name: str) -> str:
    """What one of natgrad's recipes is, in a line."""
    return str(_read(source(name)).get("summary", ""))


def to_toml(recipe: Recipe) -> str:
    """The recipe with everything spelled out, to be run again as it is."""
    import tomli_w

    return tomli_w.dumps(as_table(recipe))


def _read(path: Path) -> dict[str, Any]:
    """A file's table, on top of that of the recipe that it names as its ``base``."""
    try:
        table = parsed(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    base = table.pop("base", None)
    if base is None:
        return table
    if base not in names():
        hint = nearest(str(base), names())
        raise RecipeError(f"{path}: base must be a recipe that comes with natgrad, got {base!r}{hint}")
    return _merged(_read(_FOLDER / f"{base}.toml"), table)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Fields of `above` replace those of `below`; sections are merged, schedules replaced whole."""
    result = dict(below)
    for name, value in above.items():
        inner = result.get(name)
        sections = isinstance(value, dict) and isinstance(inner, dict) and "schedule" not in value
        result[name] = _merged(inner, value) if sections and isinstance(inner, dict) else value
    return result

"""From TOML to a checked recipe: types, bounds, unknown names, overrides."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from natgrad.recipes.schema import Recipe

Section = TypeVar("Section")


class RecipeError(ValueError):
    """A recipe that cannot be run, in words for its author."""


def build(table: Mapping[str, Any]) -> Recipe:
    """The recipe that a parsed TOML file says; everything in it is checked."""
    return _section(Recipe, table, "")


def parsed(text: str) -> dict[str, Any]:
    """A TOML file's table; raises ValueError."""
    return tomllib.loads(text)


def as_table(section: Any) -> dict[str, Any]:
    """What `build` makes the same recipe of: everything spelled out but options that are left to their defaults."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.metadata.get("rest"):
            table.update(value)
        elif dataclasses.is_dataclass(value):
            table[field.name] = as_table(value)
        elif value is not None:
            table[field.name] = value
    return table


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """``{"kfac": {"damping": 1}}`` as ``{"kfac.damping": 1}``; schedules stay whole."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        inner = value if name in SECTIONS and isinstance(value, Mapping) else None
        result |= {name: value} if inner is None else {f"{name}.{field}": one for field, one in inner.items()}
    return result


def overridden(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table with ``part.field=value`` put in; the value is TOML, or else a word. ``default`` takes a field out."""
    result: dict[str, Any] = _copied(table)
    overrides = list(overrides)
    _forget_options(result, overrides)
    for override in overrides:
        path, equals, text = override.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise RecipeError(f"{override!r} is not an override: write part.field=value, such as kfac.damping=0.003")
        _put(result, names, _value(text.strip(), words=_is_text(names)), override)
    return result


def _forget_options(table: dict[str, Any], overrides: Iterable[str]) -> None:
    """The options of a network or an optimizer that another one takes the place of mean nothing to that."""
    for section in ("model", "optimizer"):
        inner = table.get(section)
        for override in overrides:
            path, _, text = override.partition("=")
            if (
                path.strip() == f"{section}.name"
                and isinstance(inner, dict)
                and text.strip(" '\"") != inner.get("name")
            ):
                known = typing.get_type_hints(typing.get_type_hints(Recipe)[section])
                table[section] = {name: value for name, value in inner.items() if name in known}


def _put(table: dict[str, Any], names: list[str], value: Any, override: str) -> None:
    if len(names) == 1 and names[0] in SECTIONS and not isinstance(value, dict):
        raise RecipeError(f"{override!r}: {names[0]} is a table; write {names[0]}.field=value")
    for depth, name in enumerate(names[:-1], start=1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            whole = ".".join(names[:depth])
            raise RecipeError(f"{override!r}: {whole} is {inner!r} in this recipe, which has no parts; set {whole}=...")
        table = inner
    if value == "default":
        table.pop(names[-1], None)
    else:
        table[names[-1]] = value


def _is_text(names: list[str]) -> bool:
    """Whether a field is a text and nothing else: then what is written is meant, also where it looks like a number."""
    kind: Any = Recipe
    for name in names:
        kind = (
            typing.get_type_hints(kind).get(name) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None
        )
    return set(typing.get_args(kind) or (kind,)) in ({str}, {str, type(None)})


def _value(text: str, *, words: bool) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)
    if set(table) != {"value"}:
        raise RecipeError(f"{text!r} is more than one value")
    return text if words and isinstance(table["value"], bool | int | float) else table["value"]


def _copied(value: Any) -> Any:
    return {name: _copied(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


SECTIONS = tuple(name for name, hint in typing.get_type_hints(Recipe).items() if dataclasses.is_dataclass(hint))


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)``, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _section(kind: type[Section], table: Any, path: str) -> Section:
    if not isinstance(table, Mapping):
        raise RecipeError(f"{path} must be a table, got {table!r}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    rest = next((name for name, field in fields.items() if field.metadata.get("rest")), None)
    unknown = {name: value for name, value in table.items() if name not in fields or name == rest}
    if unknown and rest is None:
        name = next(iter(unknown))
        where = f"[{path}] has" if path else "a recipe has"
        raise RecipeError(f"{where} no field {name!r}{_suggestion(name, fields, path)}; there are {', '.join(fields)}")
    values: dict[str, Any] = {} if rest is None else {rest: dict(unknown)}
    for name, field in fields.items():
        if name == rest:
            continue
        full = f"{path}.{name}" if path else name
        if name in table:
            hint = hints[name]
            values[name] = (
                _section(hint, table[name], full)
                if isinstance(hint, type) and dataclasses.is_dataclass(hint)
                else _checked(hint, table[name], full, field.metadata)
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecipeError(f"{full} is missing" + (f": {why}" if (why := field.metadata.get("help")) else ""))
    return kind(**values)


def _suggestion(name: str, fields: Iterable[str], path: str) -> str:
    """The part that has a field of just this name, or the nearest name here."""
    for section, hint in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(hint) and section != path and name in {f.name for f in dataclasses.fields(hint)}:
            return f" (did you mean {section}.{name}?)"
    return nearest(name, fields)


def _checked(hint: Any, value: Any, path: str, bounds: Mapping[str, Any]) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    plain = [kind for kind in kinds if typing.get_origin(kind) is not Literal]
    if isinstance(value, str) and value in words:
        return value
    for kind in plain:
        if kind is bool and isinstance(value, bool):
            return value
        if kind in (int, float) and _is_number(value, kind):
            try:
                return bounded(kind(value), path, bounds)
            except OverflowError:
                raise RecipeError(f"{path} is too large a number") from None
        if kind is str and isinstance(value, str):
            return value
        if typing.get_origin(kind) is list and isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        if typing.get_origin(kind) is dict and isinstance(value, Mapping):
            return dict(value)
    hint_text = nearest(value, words) if isinstance(value, str) else ""
    raise RecipeError(f"{path} must be {_expected(plain, words)}, got {value!r}{hint_text}")


def _is_number(value: Any, kind: type) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and (kind is float or value.is_integer()))


_BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
}


def bounded(value: float, path: str, bounds: Mapping[str, Any], *, where: str = "") -> float:
    """The number, if it is finite and within a field's bounds; `where` says when it has this value."""
    if not math.isfinite(value):
        raise RecipeError(f"{path} must be a finite number, got {value!r}{where}")
    wanted = [(name, bounds[name]) for name in _BOUNDS if name in bounds]
    if not all(_BOUNDS[name](value, bound) for name, bound in wanted):
        text = " and ".join(f"{name.replace('_', ' ')} {bound:,}" for name, bound in wanted)
        raise RecipeError(f"{path} must be {text}, got {value!r}{where}")
    return value


def _expected(plain: Iterable[Any], words: list[str]) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
    kinds = [names[kind] for kind in plain if kind in names]
    kinds += ["a list of texts" for kind in plain if typing.get_origin(kind) is list]
    kinds += ["a table" for kind in plain if typing.get_origin(kind) is dict]
    return " or ".join([*kinds, *([f"one of {', '.join(map(repr, words))}"] if len(words) > 1 else map(repr, words))])

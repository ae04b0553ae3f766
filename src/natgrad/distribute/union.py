"""Blocks that some ranks have seen and others have not, brought together: the same on all ranks afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from natgrad import checkpoint
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation
from natgrad.blocks.registry import Registry
from natgrad.capture.form import Form

Outline = dict[str, Any]  # what a checkpoint says of blocks, without their tensors


def outline(registry: Registry) -> Outline:
    """The blocks without their statistics; of every factor where it stands first."""
    homes = {factor: name for name, factor in factor_names(registry).items()}
    return {
        block.key: {
            **_described(block),
            "orientations": [
                {"sides": [{"diagonal": factor.diagonal, "home": homes[factor]} for factor in orientation.sides]}
                for orientation in block.orientations
            ],
        }
        for block in registry
    }


def _described(block: KroneckerBlock) -> dict[str, Any]:
    entry = checkpoint.describe_block(block)
    return {**entry, "form": {**entry["form"], "note": ""}}  # what a rank has to say of it may differ


def digest(drawn: Outline) -> str:
    """Equal for equal blocks."""
    return hashlib.blake2b(repr(drawn).encode(), digest_size=8).hexdigest()


def orientation_names(registry: Registry) -> Iterator[tuple[str, Orientation]]:
    """Every orientation, with a name that is the same on all ranks."""
    for block in registry:
        for number, orientation in enumerate(block.orientations):
            yield f"{block.key}/{number}", orientation


def factor_names(registry: Registry) -> dict[str, Factor]:
    """Every factor, with a name that is the same on all ranks: the first place where it stands."""
    found: dict[Factor, str] = {}
    for name, orientation in orientation_names(registry):
        for side, factor in enumerate(orientation.sides):
            found.setdefault(factor, f"{name}/{side}")
    return {name: factor for factor, name in found.items()}


def names_in(drawn: Outline) -> tuple[list[str], list[str]]:
    """The names of the orientations and factors in an outline, in the order of those of its registry."""
    orientations = [f"{key}/{number}" for key, entry in drawn.items() for number in range(len(entry["orientations"]))]
    sides = [side["home"] for entry in drawn.values() for one in entry["orientations"] for side in one["sides"]]
    return orientations, list(dict.fromkeys(sides))


def unite(registry: Registry, outlines: Sequence[Outline], parameters: Mapping[str, Tensor]) -> None:
    """Gives the registry the blocks that any rank has; a factor is shared where all ranks that have it share it."""
    united: Outline = {}
    for drawn in outlines:
        for key, entry in drawn.items():
            if key not in united or len(entry["orientations"]) > len(united[key]["orientations"]):
                united[key] = entry
            _refuse_conflict(key, united[key], entry)
    homes = _common_homes(outlines)
    present = {block.key: block for block in registry}
    order = {name: place for place, name in enumerate(parameters)}
    keys = sorted(united, key=lambda key: (order[united[key]["weight"]["name"]], key))
    result: list[KroneckerBlock] = []
    placed: dict[str, Factor] = {}
    for key in keys:
        fresh = checkpoint.load_block(key, united[key], parameters, {}, bare=True)
        block = present.get(key, fresh)
        if block.swapped is None:
            block.swapped = fresh.swapped
        for number, orientation in enumerate(block.orientations):
            for side, factor in enumerate(orientation.sides):
                name = f"{key}/{number}/{side}"
                home = homes[name]
                if home in placed:
                    orientation.sides[side] = placed[home]
                else:
                    taken = any(factor is other for other in placed.values())
                    placed[name] = orientation.sides[side] = factor.copy() if taken else factor
        result.append(block)
    registry.replace(result)


def _refuse_conflict(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for what in ("weight", "bias", "kind"):
        if one[what] != other[what]:
            raise RuntimeError(
                f"the ranks use {key} in different ways ({what}: {one[what]} and {other[what]}): every rank must run "
                "the same model"
            )
    if not Form.from_state(one["form"]).fits(Form.from_state(other["form"])):
        raise RuntimeError(f"the ranks factor {key} in different ways: {one['form']} and {other['form']}")


def _common_homes(outlines: Sequence[Outline]) -> dict[str, str]:
    """Where each factor stands first; its own place where ranks do not agree."""
    found: dict[str, set[str]] = {}
    for drawn in outlines:
        for key, entry in drawn.items():
            for number, stored in enumerate(entry["orientations"]):
                for side, part in enumerate(stored["sides"]):
                    name = f"{key}/{number}/{side}"
                    found.setdefault(name, set()).add(part["home"])
    return {name: next(iter(homes)) if len(homes) == 1 else name for name, homes in found.items()}

"""Blocks and decompositions as plain tensors, numbers and strings, keyed by parameter name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock, Orientation, Whole
from natgrad.blocks.registry import Registry
from natgrad.capture.form import Form
from natgrad.capture.layout import Layout
from natgrad.precondition.preconditioner import Keys, Preconditioner
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.solver import Side
from natgrad.statistics.gram import accumulation_dtype

VERSION = 5
_KEYS = (
    "solver",
    "damping_rule",
    "step",
    "factors_at",
    "refreshed_at",
    "solved_damping",
    "stale",
    "moved_at",
    "shares",
    "metrics",
    "generator",
    "schedules",
    "buffers",
    "blocks",
    "decompositions",
    "under_way",
)


def save_blocks(registry: Registry, sums: Mapping[Factor, Tensor], whole: Whole | None) -> dict[str, Any]:
    """Layouts, factors and counts. A factor that blocks share is stored with the first and named by the others.

    `sums` holds the factors' sums where they are not this process's own; `whole` the weights and counts.
    """
    homes: dict[Factor, str] = {}
    return {block.key: _save_block(block, homes, sums, whole) for block in registry}


def _save_block(
    block: KroneckerBlock, homes: dict[Factor, str], sums: Mapping[Factor, Tensor], whole: Whole | None
) -> dict[str, Any]:
    orientations: list[dict[str, Any]] = []
    for number, orientation in enumerate(block.orientations):
        sides: list[Any] = []
        for side, factor in enumerate(orientation.sides):
            if factor in homes:
                sides.append(homes[factor])
                continue
            homes[factor] = f"{block.key}/{number}/{side}"
            total = sums[factor] if factor in sums else factor.sum.clone()
            weight = factor.weight.clone() if whole is None else torch.full_like(factor.weight, whole.weights[factor])
            sides.append({"sum": total, "weight": weight, "diagonal": factor.diagonal})
        counts = orientation.counts
        stored = counts.clone() if whole is None else counts.new_tensor(whole.counts[orientation])
        orientations.append({"counts": stored, "sides": sides})
    return {**describe_block(block), "orientations": orientations}


def describe_block(block: KroneckerBlock) -> dict[str, Any]:
    """What a block is, without its statistics."""
    return {
        "kind": block.kind,
        "form": block.form.to_state(),
        "weight": block.weight.to_state(),
        "bias": None if block.bias is None else block.bias.to_state(),
    }


def load_blocks(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[KroneckerBlock]:
    """New blocks from a checkpoint, checked against the model's parameters."""
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"this is not a natgrad checkpoint of version {VERSION} (version: {version!r}): "
            "pass what kfac.state_dict() returned, not the whole checkpoint"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(map(repr, missing))}")
    factors: dict[str, Factor] = {}
    return [load_block(key, entry, parameters, factors) for key, entry in state["blocks"].items()]


def load_block(
    key: str, entry: Mapping[str, Any], parameters: Mapping[str, Tensor], factors: dict[str, Factor]
) -> KroneckerBlock:
    """One block, checked against the model's parameters; without statistics where the entry has none. `factors` are
    those loaded so far, by their home.
    """
    weight = Layout.from_state(entry["weight"])
    bias = None if entry["bias"] is None else Layout.from_state(entry["bias"])
    for layout in (weight, bias):
        if layout is None:
            continue
        parameter = parameters.get(layout.name)
        if parameter is None:
            raise ValueError(f"the checkpoint has a block for {layout.name}, which the model does not have")
        if tuple(parameter.shape) != layout.parameter_shape:
            raise ValueError(
                f"{layout.name} has shape {tuple(parameter.shape)}, in the checkpoint {layout.parameter_shape}"
            )
    like = parameters[weight.name]
    form = Form.from_state(entry["form"])
    stack, rows, _ = weight.shape
    sizes = [rows, *form.columns]
    if bias is not None:
        sizes[1] += 1
    orientations = []
    for number, stored in enumerate(entry["orientations"]):
        # The second orientation is that of the transpose: its row side belongs to the block's columns.
        own = sizes[::-1] if number else sizes
        sides = [
            _load_factor(f"{key}/{number}/{side}", part, (stack, size), like, factors)
            for side, (part, size) in enumerate(zip(stored["sides"], own, strict=True))
        ]
        orientation = Orientation(sides)
        if "counts" in stored:
            orientation.counts.copy_(stored["counts"])
        orientations.append(orientation)
    swapped = orientations[1] if len(orientations) > 1 else None
    return KroneckerBlock(weight, bias, kind=entry["kind"], form=form, straight=orientations[0], swapped=swapped)


def _load_factor(home: str, stored: Any, shape: tuple[int, int], like: Tensor, factors: dict[str, Factor]) -> Factor:
    if isinstance(stored, str):
        return factors[stored]
    stack, size = shape
    if "sum" not in stored:
        dtype = accumulation_dtype(like.dtype)
        return Factor(stack, size, diagonal=stored["diagonal"], dtype=dtype, device=like.device)
    total: Tensor = stored["sum"]
    expected = (stack, size) if stored["diagonal"] else (stack, size, size)
    if tuple(total.shape) != expected:
        raise ValueError(
            f"the factor {home} has shape {tuple(total.shape)} in the checkpoint, the model needs {expected}"
        )
    factor = Factor(stack, size, diagonal=stored["diagonal"], dtype=total.dtype, device=like.device)
    factor.sum.copy_(total)
    factor.weight.copy_(stored["weight"])
    factors[home] = factor
    return factor


def save_solved(solved: Iterable[SolvedBlock], keys: Keys, sides: Mapping[Hashable, Side]) -> dict[str, Any]:
    """Solved sides, each once, and which block has which. `sides` holds those of all blocks."""
    homes: dict[Hashable, str] = {}
    result: dict[str, Any] = {}
    for member in solved:
        key = member.block.key
        stored: list[Any] = []
        for number, name in enumerate(keys(member.block)):
            if name in homes:
                stored.append(homes[name])
            else:
                homes[name] = f"{key}/{number}"
                stored.append({field: _cloned(getattr(sides[name], field)) for field in ("matrix", "values")})
        result[key] = {"scale": member.scale.clone(), "solved_at": member.solved_at, "sides": stored}
    return result


def load_solved(state: Mapping[str, Any], blocks: list[KroneckerBlock], preconditioner: Preconditioner) -> None:
    """Gives a fresh preconditioner the solutions of a checkpoint."""
    by_key = {block.key: block for block in blocks}
    sides: dict[str, Side] = {}
    for key, entry in state.items():
        for number, stored in enumerate(entry["sides"]):
            if not isinstance(stored, str):
                sides[f"{key}/{number}"] = Side(*(_cloned(stored[field]) for field in ("matrix", "values")))
        block = by_key.get(key)
        if block is None:
            continue  # excluded here
        device = block.straight.row.sum.device
        own = [
            sides[stored if isinstance(stored, str) else f"{key}/{number}"]
            for number, stored in enumerate(entry["sides"])
        ]
        sizes = [factor.sum.shape[1] for factor in block.straight.sides]
        for side, size in zip(own, sizes, strict=True):
            side.matrix, side.values = (None if p is None else p.to(device) for p in (side.matrix, side.values))
            if any(p is not None and p.shape[-1] != size for p in (side.matrix, side.values)):
                raise ValueError(f"the decomposition of {key} does not have the size of its factors ({size})")
        preconditioner.adopt(block, own, entry["scale"].to(device), entry["solved_at"])


def load_generator(
    states: Sequence[Tensor] | None, generator: torch.Generator | None, rank: int, step: int
) -> Tensor | None:
    """The state that a generator goes on from, checked, without setting it: that of this rank, where there were as
    many. A rank that was not there before starts a sequence of its own.
    """
    if states is None:
        return None
    if generator is None:
        raise ValueError(
            "the checkpoint holds the state of a generator: construct KFAC with generator= to go on from it"
        )
    trial = torch.Generator(generator.device)
    try:
        trial.set_state(states[min(rank, len(states) - 1)].cpu())
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the checkpoint's generator state does not fit: {error}") from None
    if rank >= len(states):
        trial.manual_seed((trial.initial_seed() * 1_000_003 + 7919 * rank + step) % 2**63)
    return trial.get_state()


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()

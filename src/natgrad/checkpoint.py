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
from natgrad.errors import Warner
from natgrad.precondition.preconditioner import Keys, Preconditioner
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.solver import Side
from natgrad.statistics.gram import accumulation_dtype
from natgrad.stored import not_finite, refuse_not_finite, stored_tensor

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
    blocks = [load_block(key, entry, parameters, factors) for key, entry in state["blocks"].items()]
    _refuse_bad_statistics(blocks, factors)
    return blocks


def _refuse_bad_statistics(blocks: Iterable[KroneckerBlock], factors: Mapping[str, Factor]) -> None:
    """Running averages that are not finite stay so for ever."""
    tensors = {f"the factor {home}": factor.sum for home, factor in factors.items()}
    tensors |= {f"'weight' of the factor {home}": factor.weight for home, factor in factors.items()}
    for block in blocks:
        tensors |= {f"'counts' of {block.key}/{n}": one.counts for n, one in enumerate(block.orientations)}
    refuse_not_finite(tensors)


def load_block(
    key: str,
    entry: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    factors: dict[str, Factor],
    *,
    bare: bool = False,
) -> KroneckerBlock:
    """One block, checked against the model's parameters; without statistics where it is `bare`. `factors` are those
    loaded so far, by their home.
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
            _load_factor(f"{key}/{number}/{side}", part, (stack, size), like, factors, bare=bare)
            for side, (part, size) in enumerate(zip(stored["sides"], own, strict=True))
        ]
        orientation = Orientation(sides)
        if not bare:
            orientation.counts.copy_(stored_tensor(f"'counts' of {key}/{number}", stored.get("counts"), (2,)))
        orientations.append(orientation)
    swapped = orientations[1] if len(orientations) > 1 else None
    return KroneckerBlock(weight, bias, kind=entry["kind"], form=form, straight=orientations[0], swapped=swapped)


def _load_factor(
    home: str, stored: Any, shape: tuple[int, int], like: Tensor, factors: dict[str, Factor], *, bare: bool
) -> Factor:
    if isinstance(stored, str):
        if stored not in factors:
            raise ValueError(f"the factor {home} is {stored} in the checkpoint, which does not have that one")
        return factors[stored]
    stack, size = shape
    if bare:
        dtype = accumulation_dtype(like.dtype)
        return Factor(stack, size, diagonal=stored["diagonal"], dtype=dtype, device=like.device)
    # In the checkpoint's precision, whatever the model's: nothing is lost of what has been added up so far.
    expected = (stack, size) if stored["diagonal"] else (stack, size, size)
    total = stored_tensor(f"the factor {home}", stored.get("sum"), expected)
    weight = stored_tensor(f"'weight' of the factor {home}", stored.get("weight"), ())
    factor = Factor(stack, size, diagonal=stored["diagonal"], dtype=total.dtype, device=like.device)
    factor.sum.copy_(total)
    factor.weight.copy_(weight)
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
    """Gives a fresh preconditioner the solutions of a checkpoint, in the precision of the factors. What is not finite
    is left out, with a warning: factors are there to make it again from.
    """
    by_key = {block.key: block for block in blocks}
    stored = {
        f"{key}/{number}": part
        for key, entry in state.items()
        for number, part in enumerate(entry["sides"])
        if not isinstance(part, str)
    }
    loaded: dict[tuple[str, Factor], Side] = {}
    solved: dict[str, SolvedBlock] = {}
    for key, entry in state.items():
        block = by_key.get(key)
        if block is None:
            continue  # excluded here
        sides = []
        for number, (part, factor) in enumerate(zip(entry["sides"], block.straight.sides, strict=True)):
            home = part if isinstance(part, str) else f"{key}/{number}"
            if (home, factor) not in loaded:
                loaded[home, factor] = _load_side(home, stored.get(home), block, number, preconditioner.solver)
            sides.append(loaded[home, factor])
        scale = stored_tensor(f"'scale' of the decomposition of {key}", entry.get("scale"), (block.shape[0],))
        solved[key] = SolvedBlock(block, tuple(sides), scale.to(block.straight.row.sum), entry["solved_at"])
    bad = _not_finite(solved)
    for key, member in solved.items():
        if key not in bad:
            preconditioner.adopt(member.block, member.sides, member.scale, member.solved_at)
    preconditioner.missing = by_key.keys() - solved.keys() | bad


def _load_side(home: str, stored: Any, block: KroneckerBlock, number: int, solver: str) -> Side:
    """The solution of a side. Those of a block that is used in both orientations, of which one is diagonal, may be
    diagonal or not.
    """
    what = f"the decomposition {home}"
    if not isinstance(stored, Mapping):
        raise ValueError(f"{what} is missing from the checkpoint: load the state as kfac.state_dict() made it")
    factors = [block.straight.sides[number]]
    if block.swapped is not None:
        factors.append(block.swapped.sides[1 - number])
    stack, size = factors[0].sum.shape[:2]

    def part(field: str, shape: tuple[int, ...]) -> Tensor:
        return stored_tensor(f"{field!r} of {what}", stored.get(field), shape).to(block.straight.row.sum, copy=True)

    diagonal = stored.get("matrix") is None and any(factor.diagonal for factor in factors)
    matrix = None if diagonal else part("matrix", (stack, size, size))
    return Side(matrix, part("values", (stack, size)) if diagonal or solver == "eigen" else None)


def _not_finite(solved: Mapping[str, SolvedBlock]) -> set[str]:
    """The blocks whose solutions hold NaN or inf: with them gradients would be zero until the next decomposition."""
    tensors: dict[tuple[str, int], Tensor] = {}
    for key, member in solved.items():
        parts = [part for side in member.sides for part in (side.matrix, side.values) if part is not None]
        tensors |= {(key, number): part for number, part in enumerate([member.scale, *parts])}
    bad = list(dict.fromkeys(key for key, _ in not_finite(tensors)))
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        Warner().tell(
            f"the checkpoint's decompositions of {', '.join(bad[:3])}{more} hold NaN or inf: they are left out, and "
            "made again from the factors"
        )
    return set(bad)


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

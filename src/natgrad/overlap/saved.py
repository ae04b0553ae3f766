"""Decompositions under way, for checkpoints: finished, and still to be taken over at their step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from natgrad import checkpoint
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.overlap.job import Job, finished
from natgrad.precondition.preconditioner import Preconditioner, Request
from natgrad.precondition.stack import SolvedBlock
from natgrad.solve.solver import Side, Solved


def save_job(
    request: Request, due: int | None, sides: Mapping[Hashable, Side], failed: Mapping[Hashable, list[bool]]
) -> dict[str, Any]:
    """What is left of a job whose result is there; `sides` are those of all ranks."""
    solved = [SolvedBlock(block, (), scale, request.step) for block, scale in request.scales.items()]
    return {
        "step": request.step,
        "due": due,
        "blocks": checkpoint.save_solved(solved, request.keys.__getitem__, sides),
        "failed": {block.key: [failed[key] for key in keys] for block, keys in request.keys.items()},
    }


def load_jobs(
    states: Sequence[Mapping[str, Any]], blocks: Sequence[KroneckerBlock], solver: str, rule: str
) -> list[Job]:
    """Jobs as one process would have them; `share_out` makes them those of a rank."""
    jobs = []
    for state in states:
        known = Preconditioner(solver, rule)
        checkpoint.load_solved(state["blocks"], list(blocks), known)
        members = list(known.solved.values())
        keys = {member.block: known.keys(member.block) for member in members}
        shapes = {key: _like(side) for key, side in known.sides.items()}
        scales = {member.block: member.scale for member in members}
        request = Request(state["step"], dict(shapes), keys, scales, shapes, None)
        failed: dict[Hashable, list[bool]] = {}
        for block, own in keys.items():
            failed |= zip(own, state["failed"][block.key], strict=True)
        jobs.append(finished(request, state["due"], Solved(dict(known.sides), failed)))
    return jobs


def share_out(jobs: Iterable[Job], preconditioner: Preconditioner) -> None:
    """Leaves each rank its own share, as ranks are placed now."""
    others = preconditioner.others
    if others is None:
        return
    for job in jobs:
        request = job.request
        request.placed = others.placed
        request.factors = {key: like for key, like in request.factors.items() if others.solves(key)}


def _like(side: Side) -> Tensor:
    part = side.values if side.matrix is None else side.matrix
    assert part is not None, "a side has a matrix or values"
    return part

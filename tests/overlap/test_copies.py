"""Copies in the host's memory that decompositions are made of; without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.overlap.job import Job
from natgrad.overlap.places import InStep, _pinned_parts
from natgrad.overlap.tasks import Task, solve_tensors
from natgrad.precondition.preconditioner import Request


def test_a_diagonal_factor_does_not_keep_the_memory_of_all() -> None:
    whole = torch.ones(1000)
    factors: dict[Any, Tensor] = {"diagonal": whole[:4].view(1, 4), "dense": torch.eye(3)[None]}
    request = Request(0, factors, {}, {}, {}, None)
    job = Job.begin(request, None, InStep(1), "eigen", 10.0)
    kept = request.factors["diagonal"]
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    assert torch.equal(kept, whole[:4].view(1, 4))
    assert set(job.result(lambda error: None).sides) == {"diagonal", "dense"}


def test_an_inverse_is_turned_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    factor = torch.randn(2, 5, 5)
    (solution,) = solve_tensors("inverse", [factor @ factor.mT + torch.eye(5)])
    matrix, values = _pinned_parts(solution.side)
    assert matrix is not None
    assert matrix.is_contiguous()
    assert torch.equal(matrix, solution.side.matrix)  # type: ignore[arg-type]
    assert values is None


def test_who_solves_at_home_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    home, waited = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(Task, "device", torch.device("cpu"))
    Task("eigen", ("a",), (torch.eye(3)[None],), home).solve_at_home()
    assert waited == [home]
    Task("eigen", ("a",), (torch.eye(3)[None],)).solve_at_home()
    assert waited == [home]

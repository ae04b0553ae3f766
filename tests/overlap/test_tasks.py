"""Pieces of work, and what is accepted as their result."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.overlap.tasks import (
    GarbageError,
    Solution,
    Task,
    check,
    cut,
    pack,
    solve_packed,
    unpack,
)
from natgrad.solve.solver import Side

SIZES = [1, 2, 3, 7, 32, 100, 200]
CONDITIONS = {torch.float64: [1.0, 1e6, 1e12], torch.float32: [1.0, 1e4, 1e7]}


def matrix(size: int, condition: float, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Symmetric, with eigenvalues from 1 down to 1/condition times the scale."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    dense = (basis * values) @ basis.mT * scale
    return ((dense + dense.mT) / 2).to(dtype)[None]


def solved(task: Task) -> list[Solution]:
    return unpack(solve_packed(pack(task)))


def task_of(solver: str, *factors: torch.Tensor) -> Task:
    return Task(solver, tuple(range(len(factors))), factors)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_decompositions_are_accepted_however_badly_conditioned(solver, dtype):
    for size, condition, seed in itertools.product(SIZES, CONDITIONS[dtype], range(3)):
        for scale in (1e-12, 1.0, 1e8):
            task = task_of(solver, matrix(size, condition, dtype, seed, scale))
            check(task, solved(task))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_decompositions_of_few_rows_are_accepted(dtype):
    """Factors of fewer rows than columns are singular."""
    for size, rows in ((4, 1), (50, 3), (200, 10), (300, 299)):
        x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows), dtype=dtype)
        factor = (x.mT @ x / rows)[None]
        task = task_of("eigen", factor)
        check(task, solved(task))
        for damping in (1e-1, 1e-4, 1e-7):
            damped = factor + damping * torch.eye(size, dtype=dtype)
            task = task_of("inverse", damped)
            check(task, solved(task))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_what_was_repaired_is_accepted(solver, dtype):
    """Singular: a Cholesky factorisation needs something on the diagonal."""
    for size in (2, 20, 100):
        x = torch.randn(1, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
        task = task_of(solver, (x.mT @ x)[None])
        found = solved(task)
        assert found[0].failed == [False]
        check(task, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_is_accepted(dtype):
    task = task_of("eigen", torch.zeros(2, 5, 5, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype))
    check(task, solved(task))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e15])
def test_large_and_small_numbers_are_accepted(dtype, scale):
    for size in (1, 30):
        task = task_of("eigen", matrix(size, 10, dtype, scale=scale))
        check(task, solved(task))


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_what_failed_of_a_stack_does_not_speak_against_the_rest(solver):
    stack = torch.cat([matrix(4, 10, torch.float64, seed) for seed in range(3)])
    stack[1, 2, 2] = torch.nan
    task = task_of(solver, stack)
    found = solved(task)
    assert found[0].failed == [False, True, False]
    check(task, found)
    found[0].side.matrix[2] = 0.5
    with pytest.raises(GarbageError, match="is wrong"):
        check(task, found)
    everything = task_of(solver, torch.full((2, 3, 3), torch.inf))
    check(everything, solved(everything))


def replaced(one: Solution, **parts: object) -> Solution:
    side = Side(parts.get("matrix", one.side.matrix), parts.get("values", one.side.values))
    return Solution(side, parts.get("failed", one.failed))


@pytest.mark.parametrize("size", [5, 64, 200, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_basis_is_refused(size, dtype):
    """Orthogonal, with the right eigenvalues, of another matrix."""
    for condition, seed in itertools.product((1e2, 1e6), range(3)):
        task = task_of("eigen", matrix(size, condition, dtype, seed))
        (right,) = solved(task)
        other = solved(task_of("eigen", matrix(size, condition, dtype, seed + 10)))[0]
        for wrong in (
            replaced(right, matrix=other.side.matrix),
            replaced(right, matrix=right.side.matrix.mT.contiguous()),
            replaced(right, matrix=right.side.matrix.flip(-1)),
            replaced(right, values=right.side.values.flip(-1)),
            replaced(right, values=right.side.values * 0),
            replaced(right, matrix=right.side.matrix * 0),
            replaced(right, values=right.side.values * 2),
            replaced(right, matrix=torch.eye(size, dtype=dtype)[None].clone()),
        ):
            with pytest.raises(GarbageError, match="is wrong"):
                check(task, [wrong])


@pytest.mark.parametrize("size", [1, 2, 5, 64, 200, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_inverse_is_refused(size, dtype):
    for condition, seed in itertools.product((1e1, 1e4), range(3)):
        task = task_of("inverse", matrix(size, condition, dtype, seed))
        (right,) = solved(task)
        made = torch.randn(1, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        for wrong in (right.side.matrix * 2, right.side.matrix * 0, made, made * 1e6, -right.side.matrix):
            with pytest.raises(GarbageError, match="is wrong"):
                check(task, [replaced(right, matrix=wrong)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(value):
    task = task_of("eigen", matrix(6, 10, torch.float64))
    for part in ("matrix", "values"):
        (right,) = solved(task)
        getattr(right.side, part).view(-1)[3] = value
        with pytest.raises(GarbageError):
            check(task, [right])


def test_another_form_is_refused():
    task = task_of("eigen", matrix(4, 10, torch.float64))
    (right,) = solved(task)
    for wrong in (
        replaced(right, matrix=None),
        replaced(right, values=None),
        replaced(right, matrix=right.side.matrix[0]),
        replaced(right, matrix=right.side.matrix.float()),
        replaced(right, values=right.side.values[:, :2]),
        replaced(right, values=[1.0] * 4),
        replaced(right, matrix="Q"),
    ):
        with pytest.raises(GarbageError, match="has another form"):
            check(task, [wrong])
    for flags in ([], [False, False], [0], ["no"]):
        with pytest.raises(GarbageError, match="does not say which"):
            check(task, [replaced(right, failed=flags)])
    for several in ([], [right, right]):
        with pytest.raises(GarbageError, match="came back for 1 factors"):
            check(task, several)
    inverse = task_of("inverse", matrix(4, 10, torch.float64))
    with pytest.raises(GarbageError, match="has another form"):
        check(inverse, [right])  # an eigenbasis


@pytest.mark.parametrize("payload", [b"", b"nonsense", pack(task_of("eigen", torch.eye(2)[None]))])
def test_bytes_that_are_no_answer_are_refused(payload):
    with pytest.raises(GarbageError, match="cannot be read"):
        unpack(payload)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=12))
def test_pieces_hold_every_factor_once_and_are_not_too_large(sizes):
    factors = {number: torch.zeros(stack, size, size) for number, (stack, size) in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("natgrad.overlap.tasks.SMALL_PIECE", 100)
        pieces = cut(factors, "eigen", 100)
    assert sorted(key for piece in pieces for key in piece.keys) == sorted(factors)
    for piece in pieces:
        assert [factors[key] for key in piece.keys] == list(piece.factors)
        assert sum(factor.numel() for factor in piece.factors) <= max(100, piece.factors[0].numel())
        assert piece.solver == "eigen"
    largest = [piece.factors[0].numel() for piece in pieces]
    assert largest == sorted(largest, reverse=True)


def test_a_large_factor_is_a_piece_of_its_own():
    factors = {"small": torch.zeros(1, 4, 4), "large": torch.zeros(1, 600, 600), "other": torch.zeros(2, 4, 4)}
    assert [piece.keys for piece in cut(factors, "eigen")] == [("large",), ("other", "small")]


@pytest.mark.parametrize(("count", "piece", "pieces"), [(320, 100, 32), (320, 10**6, 16), (64, 10**6, 8), (8, 200, 1)])
def test_pieces_are_as_large_as_asked_for_where_enough_are_left(monkeypatch, count, piece, pieces):
    """Of factors of ten elements, of which eight are a small piece."""
    monkeypatch.setattr("natgrad.overlap.tasks.SMALL_PIECE", 80)
    factors = {number: torch.zeros(10, 1, 1) for number in range(count)}
    assert len(cut(factors, "eigen", piece)) == pieces

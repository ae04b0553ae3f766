from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.solve.linalg import symmetric_eigen, symmetric_inverse


def spd(count: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(count, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (root @ root.mT / size + 0.1 * torch.eye(size)).to(dtype)


def test_eigen_rebuilds_its_matrices() -> None:
    stack = spd(3, 6)
    result = symmetric_eigen(stack)
    rebuilt = result.vectors @ result.values.diag_embed() @ result.vectors.mT
    torch.testing.assert_close(rebuilt, stack, rtol=1e-10, atol=1e-10)
    assert result.failed == [False] * 3


def test_eigenvalues_slightly_below_zero_become_zero() -> None:
    a = torch.randn(1, 5, 2)
    assert (symmetric_eigen(a @ a.mT).values >= 0).all()


def test_inverse() -> None:
    stack = spd(3, 6)
    result = symmetric_inverse(stack)
    torch.testing.assert_close(result.matrices, torch.linalg.inv(stack), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 4])
def test_a_non_finite_member_fails_alone(size: int) -> None:
    stack = spd(3, size)
    stack[1] = torch.nan
    for result in (symmetric_eigen(stack), symmetric_inverse(stack)):
        assert result.failed == [False, True, False]
    torch.testing.assert_close(symmetric_inverse(stack).matrices[2], torch.linalg.inv(stack[2]))


def test_a_singular_matrix_is_inverted_with_jitter() -> None:
    a = torch.randn(1, 5, 2, dtype=torch.float64)
    result = symmetric_inverse(a @ a.mT - 1e-12 * torch.eye(5))
    assert result.failed == [False]
    assert torch.isfinite(result.matrices).all()


def test_the_ladder_float64_then_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = spd(2, 4, torch.float32)
    real, attempts = torch.linalg.eigh, []

    def flaky(matrix: Tensor) -> Any:
        attempts.append((matrix.dtype, matrix.shape[0]))
        if len(attempts) in (1, 2):  # the stack in float32, then the first matrix in float64
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", flaky)
    result = symmetric_eigen(stack)
    assert attempts == [(torch.float32, 2), (torch.float64, 1), (torch.float64, 1), (torch.float64, 1)]
    assert result.failed == [False, False]
    rebuilt = result.vectors @ result.values.diag_embed() @ result.vectors.mT
    torch.testing.assert_close(rebuilt, stack, rtol=1e-4, atol=1e-4)


def test_non_finite_results_without_an_error_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, real = spd(2, 4, torch.float32), torch.linalg.eigh

    def poisoned(matrix: Tensor) -> Any:
        values, vectors = real(matrix)
        if matrix.dtype == torch.float32:
            vectors[0, 0, 0] = torch.nan
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", poisoned)
    result = symmetric_eigen(stack)
    assert torch.isfinite(result.vectors).all()
    assert result.failed == [False, False]


def test_running_out_of_memory_is_not_a_failed_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(matrix: Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.linalg, "eigh", full)
    with pytest.raises(torch.OutOfMemoryError):
        symmetric_eigen(spd(1, 3))

"""Eigendecompositions and inverses that never end a run.

Each function takes a stack of symmetric matrices and climbs a ladder for the ones that fail: as they are, in
float64, in float64 with a little added to the diagonal.
What still fails is reported, so that the caller can keep what it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

JITTER = 1e-6  # relative to the largest diagonal entry
# cuSOLVER takes 13 ms for n = 512 and 5 ms for 513, where another routine begins; it pays from about 300 on (an H200).
_PAD_ABOVE, _PADDED = 288, 513
# From here on cuSOLVER takes longer for a stack than for its matrices one by one: half as long for 2304² (an H200).
_ALONE = 512


@dataclass(frozen=True)
class Eigen:
    """Eigenvalues (K, n), never negative, eigenvectors (K, n, n), and which of the stack could not be decomposed."""

    values: Tensor
    vectors: Tensor
    failed: list[bool]


@dataclass(frozen=True)
class Inverse:
    """Inverses (K, n, n), and which of the stack could not be inverted."""

    matrices: Tensor
    failed: list[bool]


def symmetric_eigen(stack: Tensor, *, threads: int = 1) -> Eigen:
    """Eigendecomposition of a stack (K, n, n); on a GPU by so many `threads`."""
    beside = threads > 1 and stack.is_cuda and stack.shape[0] > 1
    function = partial(_eigh_beside, min(threads, stack.shape[0])) if beside else _eigh
    (values, vectors), failed = _climb(function, stack)
    return Eigen(values.clamp_(min=0), vectors, failed)


def symmetric_inverse(stack: Tensor) -> Inverse:
    """Inverse of a stack (K, n, n) of positive definite matrices, by Cholesky."""
    (matrices,), failed = _climb(_cholesky_inverse, stack)
    return Inverse(matrices, failed)


Results = tuple[Tensor, ...]


def _eigh(stack: Tensor) -> Results:
    size = stack.shape[-1]
    padded = _PADDED if stack.is_cuda and _PAD_ABOVE < size < _PADDED else size
    if padded > size:
        # The bound on F's eigenvalues on the new diagonal keeps them first in the order, and their vectors apart.
        norm = torch.linalg.vector_norm(stack, dim=(-2, -1))
        bound = torch.where(norm > 0, 2 * norm, 1.0)
        wide = stack.new_zeros(stack.shape[0], padded, padded)
        wide[:, :size, :size] = stack
        wide.diagonal(dim1=-2, dim2=-1)[:, size:] = bound[:, None]
        stack = wide
    values, vectors = torch.linalg.eigh(stack)
    return values[:, :size].contiguous(), vectors[:, :size, :size].contiguous()


def _eigh_beside(threads: int, stack: Tensor) -> Results:
    """One thread and stream for each part of a stack: a single eigendecomposition leaves most of a GPU idle, and keeps
    its host thread waiting.
    """
    now = torch.cuda.current_stream(stack.device)
    lanes = [_stream(number, stack.device) for number in range(threads)]
    values, vectors = torch.empty_like(stack[..., 0]), torch.empty_like(stack)

    def decompose(number: int) -> None:
        own = lanes[number]
        own.wait_stream(now)
        with torch.cuda.stream(own), torch.no_grad():
            for index in range(number, stack.shape[0], threads):
                one_values, one_vectors = _eigh(stack[index : index + 1])
                values[index], vectors[index] = one_values[0], one_vectors[0]
        own.synchronize()  # nothing outlives this: all of it can be freed

    with ThreadPoolExecutor(threads, thread_name_prefix="natgrad-eigh") as pool:
        for done in [pool.submit(decompose, number) for number in range(threads)]:
            done.result()
    return values, vectors


@cache
def _stream(number: int, device: torch.device) -> torch.cuda.Stream:
    """The same one every time: memory that was freed is used again in the stream that it was made in, and nowhere
    else.
    """
    return torch.cuda.Stream(device)


def _cholesky_inverse(stack: Tensor) -> Results:
    if stack.is_cuda and stack.shape[0] > 1 and stack.shape[-1] >= _ALONE:
        return (torch.cat([_cholesky_inverse(one)[0] for one in stack.split(1)]),)
    lower, info = torch.linalg.cholesky_ex(stack)
    inverse = torch.cholesky_inverse(lower)
    # cholesky_ex does not raise: a failure becomes NaN and is seen with the other non-finite results.
    return (torch.where(info[:, None, None] == 0, inverse, torch.nan),)


def _climb(function: Callable[[Tensor], Results], stack: Tensor) -> tuple[Results, list[bool]]:
    results = _attempt(function, stack)
    if results is not None:
        if _all_finite(results):
            return results, [False] * stack.shape[0]
        good = _finite(results)
    else:
        good = [False] * stack.shape[0]
        results = tuple(torch.zeros_like(part) for part in _template(function, stack))
    failed = [False] * len(good)
    for index, fine in enumerate(good):
        if fine:
            continue
        repaired = _repair(function, stack[index : index + 1])
        failed[index] = repaired is None
        if repaired is not None:
            for part, new in zip(results, repaired, strict=True):
                part[index] = new[0]
    return results, failed


def _repair(function: Callable[[Tensor], Results], matrix: Tensor) -> Results | None:
    """The same matrix alone, in float64, then with jitter."""
    if not bool(torch.isfinite(matrix).all()):
        return None
    wide = matrix.double()
    wide = (wide + wide.mT) / 2
    largest = wide.diagonal(dim1=-2, dim2=-1).abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny)
    identity = torch.eye(matrix.shape[-1], dtype=wide.dtype, device=wide.device)
    for jitter in (0.0, JITTER):
        results = _attempt(function, wide + jitter * largest * identity)
        if results is not None and all(_finite(results)):
            return tuple(part.to(matrix.dtype) for part in results)
    return None


def _attempt(function: Callable[[Tensor], Results], stack: Tensor) -> Results | None:
    try:
        return function(stack)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, and what cuSOLVER reports in its own words
        return None


def _template(function: Callable[[Tensor], Results], stack: Tensor) -> Results:
    matrices = torch.empty_like(stack)
    return (matrices,) if function is _cholesky_inverse else (torch.empty_like(stack[..., 0]), matrices)


def _all_finite(results: Results) -> bool:
    """In a few operations, where each of them is."""
    sums = [part.sum() for part in results]
    return math.isfinite(sum(sums[1:], start=sums[0]).item())


def _finite(results: Results) -> list[bool]:
    """Which of a stack are."""
    flags = [torch.isfinite(part).flatten(1).all(1) for part in results]
    good: list[bool] = torch.stack(flags).all(0).tolist()
    return good

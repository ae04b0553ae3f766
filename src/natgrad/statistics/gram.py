"""Second moments of rows, in a precision that keeps their small eigenvalues."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Factors of half-precision rows are kept in float32, of float64 rows in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def second_moment(rows: Tensor, *, homogeneous: bool = False, diagonal: bool = False) -> Tensor:
    """Sum over rows of a aᵀ: (stack, R, n) → (stack, n, n), or its diagonal (stack, n).

    With `homogeneous` a 1 is appended to every row (the bias's coordinate), without copying the rows.
    """
    dtype = accumulation_dtype(rows.dtype)
    if diagonal:
        squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()
        if not homogeneous:
            return squares
        return torch.cat([squares, squares.new_full((squares.shape[0], 1), rows.shape[1])], dim=1)
    moment = _product(rows, dtype)
    return bordered(moment, rows.sum(dim=1, dtype=dtype), rows.shape[1]) if homogeneous else moment


def bordered(moment: Tensor, total: Tensor, count: int) -> Tensor:
    """The second moment of `count` rows with a 1 appended to each: (stack, n, n), and `total`, their sum, (stack, n)
    → (stack, n + 1, n + 1).
    """
    stack, size = total.shape
    result = moment.new_empty(stack, size + 1, size + 1)
    result[:, :size, :size] = moment
    result[:, size, :size] = total
    result[:, :size, size] = total
    result[:, size, size] = count
    return result


def _product(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:
        return rows.mT @ rows
    if rows.is_cuda:
        # Half-precision operands, float32 sums and result: no float32 copy of the rows.
        return torch.bmm(rows.mT, rows, out_dtype=dtype)
    wide = rows.to(dtype)
    return wide.mT @ wide

"""Second moments of rows, in a precision that keeps their small eigenvalues."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# The first convolution of a network for images has some hundred thousand rows of 147 columns: two tiles of a product.
_PIECES, _FEW_COLUMNS, _MANY_ROWS = 64, 256, 2**17
# Rows that a GPU copies in less time than it takes to launch what a copy saves.
_FEW_ELEMENTS = 2**20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Factors of half-precision rows are kept in float32, of float64 rows in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def second_moment(rows: Tensor, *, homogeneous: bool = False, diagonal: bool = False) -> Tensor:
    """Sum over rows of a aᵀ: (stack, R, n) → (stack, n, n), or its diagonal (stack, n).

    With `homogeneous` a 1 is appended to every row (the bias's coordinate), without copying many rows.
    """
    dtype = accumulation_dtype(rows.dtype)
    if diagonal:
        squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()
        if not homogeneous:
            return squares
        return torch.cat([squares, squares.new_full((squares.shape[0], 1), rows.shape[1])], dim=1)
    if homogeneous and rows.is_cuda and rows.numel() <= _FEW_ELEMENTS:
        return _product(functional.pad(rows, (0, 1), value=1.0), dtype)
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


def _pieces(rows: int, columns: int) -> int:
    """Into how many parts, which a GPU does side by side, a product of many rows and few columns is cut."""
    return _PIECES if columns <= _FEW_COLUMNS and rows % _PIECES == 0 and rows >= _MANY_ROWS else 1


def _product(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.is_cuda and rows.shape[0] == 1 and (pieces := _pieces(*rows.shape[1:])) > 1:
        return _product(rows[0].unflatten(0, (pieces, -1)), dtype).sum(0, keepdim=True)
    if rows.dtype == dtype:
        return rows.mT @ rows
    if rows.is_cuda:
        # Half-precision operands, float32 sums and result: no float32 copy of the rows.
        return torch.bmm(rows.mT, rows, out_dtype=dtype)
    wide = rows.to(dtype)
    return wide.mT @ wide

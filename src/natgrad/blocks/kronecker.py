"""The Kronecker-factored Fisher block of one weight and its bias: scale · (input factor) ⊗ (output factor).

MATH: with R rows in a loss that is a mean over N terms, block = s · A ⊗ G with A and G the *means* over rows and s
= R / N. One formula serves dense layers
(s = 1), convolutions (s = places), sequences with one label (s = length) and token losses (s = 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor, Rows, add_counts
from natgrad.capture.layout import Layout, positions


@dataclass(frozen=True)
class Estimate:
    """The current estimate of a stack of blocks: scale · column ⊗ row, with diagonal sides as vectors."""

    row: Tensor
    column: Tensor
    scale: Tensor

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """(row, column)."""
        return self.row, self.column


class Orientation:
    """The factors of all uses of a weight in one orientation (W, or Wᵀ)."""

    def __init__(self, row: Factor, column: Factor) -> None:
        self.row = row
        self.column = column
        # Rows and loss terms with the factors' own decay: their ratio is s.
        self.counts = torch.zeros(2, dtype=torch.float64, device=row.sum.device)
        self._pending_rows: Rows = 0
        self.has_pending = False

    def add_rows(self, rows: Rows) -> None:
        """Counts the rows of a use. The factors cannot tell: another block may have filled a shared one."""
        self._pending_rows = self._pending_rows + rows
        self.has_pending = True

    def discard(self) -> None:
        """Forgets what came in since the last commit."""
        self._forget()
        self.row.discard()
        self.column.discard()

    def _forget(self) -> None:
        self._pending_rows = 0
        self.has_pending = False

    def known(self) -> bool:
        """Whether both factors have seen rows; asks the device."""
        return bool(self.row.weight * self.column.weight > 0)

    def estimate(self) -> Estimate:
        """Means and scale."""
        scale = (self.counts[0] / self.counts[1]).to(self.row.sum.dtype)
        return Estimate(self.row.mean(), self.column.mean(), scale.expand(self.row.stack))


def commit_counts(orientations: Sequence[Orientation], decay: float, terms: float) -> None:
    """Moves the running averages of the scales; the factors, which orientations may share, move apart."""
    if not orientations:
        return
    torch._foreach_mul_([orientation.counts for orientation in orientations], decay)
    add_counts([orientation.counts[0] for orientation in orientations], [o._pending_rows for o in orientations])
    add_counts([orientation.counts[1] for orientation in orientations], [terms] * len(orientations))
    for orientation in orientations:
        orientation._forget()


class KroneckerBlock:
    """One weight, or one slice of it, with its bias. Gradients are stacks of (rows × columns) matrices; the bias is
    the last column.

    `straight` belongs to uses in the block's own orientation, `swapped` to uses of the transpose (a tied head or
    autoencoder), whose input side is this block's row side.
    """

    def __init__(
        self, weight: Layout, bias: Layout | None, *, kind: str, straight: Orientation, swapped: Orientation | None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.kind = kind
        self.straight = straight
        self.swapped = swapped

    @property
    def key(self) -> str:
        """What names the block in a checkpoint: the covered part of the weight."""
        return self.weight.label

    @property
    def layouts(self) -> list[Layout]:
        """Weight, then bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters covered, with a slice where only a part is."""
        return tuple(layout.label for layout in self.layouts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(stack, rows, columns) of the gradient matrix, bias included."""
        stack, rows, columns = self.weight.shape
        return stack, rows, columns + (self.bias is not None)

    @property
    def orientations(self) -> list[Orientation]:
        """The orientations in which the weight has been used."""
        return [self.straight] if self.swapped is None else [self.straight, self.swapped]

    def factors(self) -> Iterator[Factor]:
        """All factors of the block; blocks may share them."""
        for orientation in self.orientations:
            yield orientation.row
            yield orientation.column

    def estimate(self) -> Estimate:
        """The undamped block, as factors and scale."""
        if self.swapped is None:
            return self.straight.estimate()
        estimates = []
        if self.straight.known():
            estimates.append(self.straight.estimate())
        if self.swapped.known():
            swapped = self.swapped.estimate()
            estimates.append(Estimate(swapped.column, swapped.row, swapped.scale))
        return combine_orientations(estimates)

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """The undamped Fisher block, ordered as the parameters in `names`, flattened as PyTorch stores them and
        concatenated.
        """
        if not any(orientation.known() for orientation in self.orientations):
            raise RuntimeError(
                f"the block of {', '.join(self.names)} has no statistics yet: "
                "run a forward and backward pass and kfac.step() first"
            )
        estimate = self.estimate()
        row, column = (side if side.dim() == 3 else side.diag_embed() for side in estimate.sides)
        stack = [s * torch.kron(r, c) for s, r, c in zip(estimate.scale, row, column, strict=True)]
        dense: Tensor = torch.block_diag(*stack)
        order = positions(self.layouts).to(dense.device)
        return dense[order][:, order]


def combine_orientations(estimates: Sequence[Estimate]) -> Estimate:
    """One Kronecker product for uses of W and of Wᵀ.

    The uses' factors have different units on each side, so each is first normalised to trace 1 and then averaged
    with its block's trace as weight; the result has
    the summed trace.
    """
    rows, columns, traces = [], [], []
    for estimate in estimates:
        row_trace, column_trace = _trace(estimate.row), _trace(estimate.column)
        traces.append(estimate.scale * row_trace * column_trace)
        rows.append(_normalised(estimate.row, row_trace))
        columns.append(_normalised(estimate.column, column_trace))
    total = torch.stack(traces).sum(0)
    shares = [torch.where(total > 0, trace / total, 1.0 / len(traces)) for trace in traces]
    return Estimate(_weighted_sum(rows, shares), _weighted_sum(columns, shares), total)


def _trace(side: Tensor) -> Tensor:
    return side.sum(-1) if side.dim() == 2 else side.diagonal(dim1=-2, dim2=-1).sum(-1)


def _normalised(side: Tensor, trace: Tensor) -> Tensor:
    safe = torch.where(trace > 0, trace, 1.0)
    return side / safe.reshape(-1, *[1] * (side.dim() - 1))


def _weighted_sum(sides: list[Tensor], shares: list[Tensor]) -> Tensor:
    dense = any(side.dim() == 3 for side in sides)
    total = None
    for side, share in zip(sides, shares, strict=True):
        wide = side.diag_embed() if dense and side.dim() == 2 else side
        part = wide * share.reshape(-1, *[1] * (wide.dim() - 1))
        total = part if total is None else total + part
    assert total is not None, "there is at least one orientation"
    return total

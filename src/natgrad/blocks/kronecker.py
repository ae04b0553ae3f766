"""The Kronecker-factored Fisher block of one parameter: scale · row factor ⊗ column factors.

MATH: with R rows in a loss that is a mean over N terms, block = s · A ⊗ G with A and G the *means* over rows and s
= R / N. One formula serves dense layers (s = 1), convolutions (s = places), sequences with one label (s = length)
and token losses (s = 1). The row side G is always there; the column side is one factor A, two where the input is a
feature map (Ba et al. 2017, section 4), or none where the parameter is a vector, whose block is then a full Fisher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.joint import Joined, Rows, joint
from natgrad.capture.form import Form
from natgrad.capture.layout import Layout, positions

S = TypeVar("S")


@dataclass(frozen=True)
class Estimate:
    """The current estimate of a stack of blocks: scale · ⊗ sides, the row side first; diagonal sides are vectors."""

    sides: tuple[Tensor, ...]
    scale: Tensor
    summed_traces: tuple[Tensor, ...] | None = None  # of the sides, where all ranks must have the same bits

    @property
    def traces(self) -> tuple[Tensor, ...]:
        """Of every side, (stack,)."""
        return tuple(map(_trace, self.sides)) if self.summed_traces is None else self.summed_traces

    @property
    def row(self) -> Tensor:
        """The output side, G."""
        return self.sides[0]

    @property
    def column(self) -> Tensor:
        """The input side, A, where it is one factor."""
        (column,) = self.sides[1:]
        return column

    def times(self, matrices: Tensor) -> Tensor:
        """The blocks times (stack, rows, columns)."""
        product = over_columns(
            _acting(self.sides[0], matrices.mT).mT, self.sides[1:], [side.shape[-1] for side in self.sides[1:]], _acting
        )
        return product * self.scale[:, None, None]


@dataclass(frozen=True)
class Whole:
    """What several ranks have together, each of which has a part: every factor's mean (or, where its sum is elsewhere,
    a diagonal with the same trace), its trace and weight, and the orientations' rows and terms. `refused` counts
    statistics that were not finite.
    """

    means: Mapping[Factor, Tensor]
    traces: Mapping[Factor, Tensor]
    weights: Mapping[Factor, float]
    counts: Mapping[Orientation, tuple[float, float]]
    refused: int

    def known(self, block: KroneckerBlock) -> bool:
        """Whether every factor of an orientation has seen rows."""
        return any(orientation.known(self) for orientation in block.orientations)


class Orientation(Joined):
    """The factors of all uses of a weight in one orientation (W, or Wᵀ): the row side's, then the column sides'."""

    def __init__(self, sides: Sequence[Factor]) -> None:
        self.sides = list(sides)
        super().__init__(torch.zeros(2, dtype=torch.float64, device=self.row.sum.device))
        self.pending_rows: Rows = 0
        self.has_pending = False

    @property
    def counts(self) -> Tensor:
        """Rows and loss terms with the factors' own decay: their ratio is s."""
        return self.own

    @property
    def row(self) -> Factor:
        """The output side, G."""
        return self.sides[0]

    @property
    def column(self) -> Factor:
        """The input side, A, where it is one factor."""
        (column,) = self.sides[1:]
        return column

    def add_rows(self, rows: Rows) -> None:
        """Counts the rows of a use. The factors cannot tell: another block may have filled a shared one."""
        self.pending_rows = self.pending_rows + rows
        self.has_pending = True

    def forget(self) -> None:
        """Forgets the rows that came in since the last commit; the factors, which others may have too, do so apart."""
        self.pending_rows = 0
        self.has_pending = False

    @property
    def weight(self) -> Tensor:
        """Above zero once every factor has seen rows."""
        return torch.stack([factor.weight for factor in self.sides]).amin()

    def known(self, whole: Whole | None = None) -> bool:
        """Whether every factor has seen rows; asks the device."""
        if whole is not None:
            return min(whole.weights[factor] for factor in self.sides) > 0
        return bool(self.weight > 0)

    def estimate(self, whole: Whole | None = None) -> Estimate:
        """Means and scale, of this process or of all ranks."""
        if whole is None:
            scale = (self.counts[0] / self.counts[1]).to(self.row.sum.dtype)
            return Estimate(tuple(factor.mean() for factor in self.sides), scale.expand(self.row.stack))
        rows, terms = whole.counts[self]
        return Estimate(
            tuple(whole.means[factor] for factor in self.sides),
            self.row.sum.new_full((self.row.stack,), rows / terms),
            tuple(whole.traces[factor] for factor in self.sides),
        )


def commit_counts(orientations: Sequence[Orientation], decay: float, terms: float) -> None:
    """Moves the running averages of the scales; the factors, which orientations may share, move apart."""
    if not orientations:
        return
    together = joint(orientations)
    new = together.counted([number for orientation in orientations for number in (orientation.pending_rows, terms)])
    torch.add(new, together.whole, alpha=decay, out=together.whole)
    for orientation in orientations:
        orientation.forget()


class KroneckerBlock:
    """One weight or vector, or one slice of it, with its bias. Gradients are stacks of (rows × columns) matrices; the
    bias is the last column.

    `form` says how the column side is factored and what counts as a row. `straight` belongs to uses in the block's
    own orientation, `swapped` to uses of the transpose (a tied head or autoencoder), whose input side is this block's
    row side.
    """

    def __init__(
        self,
        weight: Layout,
        bias: Layout | None,
        *,
        kind: str,
        form: Form,
        straight: Orientation,
        swapped: Orientation | None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.layouts = [weight] if bias is None else [weight, bias]
        self.parameters = tuple(layout.name for layout in self.layouts)  # that it has a part of
        self.kind = kind
        self.form = form
        self.straight = straight
        self.swapped = swapped

    @property
    def key(self) -> str:
        """What names the block in a checkpoint: the covered part of the weight."""
        return self.weight.label

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
            yield from orientation.sides

    def estimate(self, whole: Whole | None = None) -> Estimate:
        """The undamped block, as factors and scale: of this process's statistics, or of all ranks' together."""
        if self.swapped is None:
            return self.straight.estimate(whole)
        estimates = []
        if self.straight.known(whole):
            estimates.append(self.straight.estimate(whole))
        if self.swapped.known(whole):
            swapped = self.swapped.estimate(whole)
            estimates.append(Estimate((swapped.column, swapped.row), swapped.scale, swapped.traces[::-1]))
        return combine_orientations(estimates)

    @torch.no_grad()
    def quadratic(self, direction: Mapping[str, Tensor | None], estimate: Estimate | None = None) -> Tensor:
        """δᵀF̂δ for a direction δ by parameter name (None: stands still), with the block as it is or an `estimate`
        derived from it; needs statistics.
        """
        like = self.straight.row.sum
        given = [(layout, direction[layout.name]) for layout in self.layouts]
        parts = [like.new_zeros(layout.shape) if part is None else layout.to_matrix(part) for layout, part in given]
        matrices = torch.cat(parts, dim=2).to(like.dtype)
        own = self.estimate() if estimate is None else estimate
        return (matrices * own.times(matrices)).sum(dtype=torch.float64)

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
        sides = [side if side.dim() == 3 else side.diag_embed() for side in estimate.sides]
        stack = [scale * reduce(torch.kron, entry) for scale, *entry in zip(estimate.scale, *sides, strict=True)]
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
        row_trace, column_trace = estimate.traces
        traces.append(estimate.scale * row_trace * column_trace)
        rows.append(_normalised(estimate.row, row_trace))
        columns.append(_normalised(estimate.column, column_trace))
    total = torch.stack(traces).sum(0)
    shares = [torch.where(total > 0, trace / total, 1.0 / len(traces)) for trace in traces]
    return Estimate((_weighted_sum(rows, shares), _weighted_sum(columns, shares)), total)


def over_columns(
    matrix: Tensor, sides: Sequence[S], sizes: Sequence[int], act: Callable[[S, Tensor], Tensor]
) -> Tensor:
    """The Kronecker product of column sides acting on (K, rows, c₁·c₂…); `act` lets one act on a last axis."""
    if len(sides) == 1:
        return act(sides[0], matrix)
    # Each side in turn acts on the last axis, which then makes room for the one before it.
    for side, size in zip(reversed(sides), reversed(sizes), strict=True):
        acted = act(side, matrix.reshape(matrix.shape[0], -1, size))
        matrix = acted.reshape(*matrix.shape[:2], -1, size).mT.reshape(matrix.shape)
    return matrix


def _acting(side: Tensor, matrices: Tensor) -> Tensor:
    """A symmetric or diagonal side on the last axis."""
    return matrices * side[:, None, :] if side.dim() == 2 else matrices @ side


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

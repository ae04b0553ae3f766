"""Running averages of factors, bias-corrected and safe from NaN.

A factor keeps the weighted sum S of second moments and the weight w (rows seen): ``S ← ξS + new``, ``w ← ξw +
rows``, factor = S / w. Both are linear, so sums over
ranks or micro-batches are exact, and nothing starts from a made-up identity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Rows = int | Tensor


class Factor:
    """One side of a block: (stack, n, n), or (stack, n) where it is diagonal."""

    def __init__(self, stack: int, size: int, *, diagonal: bool, dtype: torch.dtype, device: torch.device) -> None:
        shape = (stack, size) if diagonal else (stack, size, size)
        self.sum = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.diagonal = diagonal
        self._pending: Tensor | None = None
        self._pending_rows: Rows = 0

    @property
    def stack(self) -> int:
        """Groups or heads."""
        return self.sum.shape[0]

    @property
    def bytes(self) -> int:
        """Memory of the running sum."""
        return self.sum.numel() * self.sum.element_size()

    def add(self, moment: Tensor, rows: Rows) -> None:
        """Takes in a sum over rows; it counts from the next `commit` on.

        A use that does not add the block's bias has a 0 in the bias's coordinate: its sums are one smaller.
        """
        if (missing := self.sum.shape[1] - moment.shape[1]) > 0:
            moment = functional.pad(moment, [0, missing] * (moment.dim() - 1))
        if moment.dim() > self.sum.dim():
            moment = moment.diagonal(dim1=-2, dim2=-1)
        elif moment.dim() < self.sum.dim():
            moment = moment.diag_embed()
        moment = moment.to(self.sum.dtype)
        self._pending = moment if self._pending is None else self._pending + moment
        self._pending_rows = self._pending_rows + rows

    def discard(self) -> None:
        """Forgets what came in since the last commit."""
        self._pending, self._pending_rows = None, 0

    def commit(self, decay: float) -> Tensor | None:
        """Moves the running average by what came in, unless it is not finite. Returns whether it was, on the device."""
        if self._pending is None:
            return None
        new, rows = self._pending, self._pending_rows
        self.discard()
        # A second moment is finite where its trace is; one number decides, and no host sync.
        diagonal = new if self.diagonal else new.diagonal(dim1=-2, dim2=-1)
        finite = torch.isfinite(diagonal.sum())
        self.sum.copy_(torch.where(finite, self.sum * decay + new, self.sum))
        self.weight.copy_(torch.where(finite, self.weight * decay + rows, self.weight))
        return finite

    def mean(self) -> Tensor:
        """The estimate S / w."""
        return self.sum / self.weight.to(self.sum.dtype)

    def copy(self) -> Factor:
        """An independent factor with the same state."""
        twin = Factor.__new__(Factor)
        twin.sum, twin.weight, twin.diagonal = self.sum.clone(), self.weight.clone(), self.diagonal
        twin._pending, twin._pending_rows = self._pending, self._pending_rows
        return twin

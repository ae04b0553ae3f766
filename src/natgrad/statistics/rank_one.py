"""The best rank-1 approximation of many small matrices at once (Ba et al. 2017, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.statistics.gram import accumulation_dtype

# Each squaring doubles the power of the power method: 2²⁰ separates singular values that differ by a millionth.
_SQUARINGS = 20


def rank_one(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """(N, m, n) → √σ₁ u₁ (N, m) and √σ₁ v₁ (N, n), whose outer product is nearest to each matrix.

    The power method by repeated squaring of the smaller Gram matrix: products alone, so that it neither fails nor
    waits for the device, and nothing larger than the smaller side squared is formed. Signs are arbitrary; second
    moments do not see them.
    """
    wide = matrices.to(accumulation_dtype(matrices.dtype))
    if wide.shape[1] > wide.shape[2]:
        right, left = rank_one(wide.mT)
        return left, right
    scale = wide.flatten(1).abs().amax(1).clamp(min=torch.finfo(wide.dtype).tiny)[:, None, None]
    gram = (wide / scale) @ (wide / scale).mT
    power = gram
    for _ in range(_SQUARINGS):
        power = _unit_trace(power)
        power = power @ power
    # Any column of the limit is along u₁; the largest is the one least touched by rounding. One step with the matrix
    # itself takes away what squaring has rounded.
    largest = power.diagonal(dim1=1, dim2=2).argmax(1)
    start = power.gather(2, largest[:, None, None].expand(-1, power.shape[1], 1))
    u = torch.nn.functional.normalize(gram @ start, dim=1)
    v = wide.mT @ u
    root = torch.linalg.vector_norm(v, dim=1, keepdim=True).sqrt()
    # σ₁ = ‖Mᵀu₁‖ and √σ₁ v₁ = Mᵀu₁ / √σ₁; a matrix of zeros has none of it.
    right = torch.where(root > 0, v / root, 0.0)
    return (root * u).squeeze(2), right.squeeze(2)


def _unit_trace(stack: Tensor) -> Tensor:
    trace = stack.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    return stack / trace.clamp(min=torch.finfo(stack.dtype).tiny)

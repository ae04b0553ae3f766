"""How far to step: the KL clip.

The optimizer moves by −α v. The quadratic model predicts a KL divergence of ½ α² vᵀF̂v, and vᵀF̂v = vᵀ∇ for v =
F̂⁻¹∇; v is scaled by ν so that α² ν² vᵀ∇ ≤ κ (Ba et al. 2017,
eq. 14; Pauloski et al. 2020, eq. 18).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """The factor ν, the predicted KL of the clipped step, and whether the step is finite at all; tensors, read only
    when asked for.
    """

    factor: Tensor
    predicted_kl: Tensor
    finite: Tensor


def clip(squared_length: Tensor, kappa: float | Tensor | None) -> Clip:
    """ν = min(1, √(κ / α²vᵀ∇)) for `squared_length` = α²vᵀ∇, summed over blocks."""
    finite = torch.isfinite(squared_length)
    length = torch.where(finite, squared_length, 0.0).clamp(min=0)
    one = torch.ones_like(length)
    factor = one if kappa is None else torch.where(length > kappa, (kappa / length).sqrt(), one)
    return Clip(factor, 0.5 * factor**2 * length, finite)


def tighter(first: Clip, squared_length: Tensor, kappa: float | Tensor | None) -> Clip:
    """Bounds a step that `first` has scaled by another measure too, in which the *unscaled* step has this length."""
    second = clip(squared_length * first.factor**2, kappa)
    return Clip(first.factor * second.factor, second.predicted_kl, first.finite & second.finite)

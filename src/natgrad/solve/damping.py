"""The three damping rules, for a stack of blocks scale · ⊗ sides, of which there are one, two or three.

=======  ==========================================================================================
joint    (F̂ + λI)⁻¹ exactly, in the eigenbasis (Pauloski et al. 2020, eq. 13-15)
pi       λ split over the factors in proportion to their mean eigenvalues (Ba et al. 2017, eq. 12)
plain    λ added to every factor, the scale folded into the input side (Pauloski et al. 2020, eq. 11)
=======  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RULES = ("joint", "pi", "plain")


@dataclass(frozen=True)
class FactoredDamping:
    """Side i becomes ``multiply[i] · F_i + add[i] · I``; the product of the inverses is divided by `divide`. All
    (K,).
    """

    multiply: tuple[Tensor, ...]
    add: tuple[Tensor, ...]
    divide: Tensor


def factored_damping(rule: str, means: Sequence[Tensor], scale: Tensor, damping: float | Tensor) -> FactoredDamping:
    """The factored rules. `means` holds each side's mean eigenvalue (K,), the input side last."""
    one = torch.ones_like(scale)
    if rule == "plain":
        gamma = (one * damping).to(scale.dtype)
        return FactoredDamping((one,) * (len(means) - 1) + (scale,), (gamma,) * len(means), one)
    share = (damping / scale).to(scale.dtype) ** (1 / len(means))
    return FactoredDamping((one,) * len(means), tuple(pi * share for pi in pi_weights(means)), scale)


def pi_weights(means: Sequence[Tensor]) -> list[Tensor]:
    """π_i = n_i / (Π n_j)^{1/k} for any number k of factors; 1 where a factor is zero."""
    logarithms = torch.stack([mean.clamp(min=0) for mean in means]).log()
    weights = (logarithms - logarithms.mean(0)).exp()
    usable = torch.isfinite(weights).all(0)
    return list(torch.where(usable, weights, 1.0))


def divisor(rule: str, values: Sequence[Tensor], scale: Tensor, damping: float | Tensor) -> Tensor:
    """What each coefficient of the gradient in the eigenbasis is divided by: (K, rows, columns) from each side's
    eigenvalues (K, n_i), the row side first.
    """
    if rule == "joint":
        if isinstance(damping, Tensor):
            lam = damping.to(scale.dtype).expand(1, 1, 1)
        else:
            lam = scale.new_full((1, 1, 1), damping)  # filled on the device: no copy from the host
        return torch.baddbmm(lam, (values[0] * scale[:, None])[:, :, None], columns_of(values)[:, None, :])
    damped = factored_damping(rule, [side.mean(-1) for side in values], scale, damping)
    sides = [
        side * multiply[:, None] + add[:, None]
        for side, multiply, add in zip(values, damped.multiply, damped.add, strict=True)
    ]
    return (sides[0] * damped.divide[:, None])[:, :, None] * columns_of(sides)[:, None, :]


def columns_of(sides: Sequence[Tensor]) -> Tensor:
    """The diagonal of the Kronecker product of the column sides (K, columns); 1 where there is none."""
    product = sides[0].new_ones(sides[0].shape[0], 1)
    for side in sides[1:]:
        product = (product[:, :, None] * side[:, None, :]).flatten(1)
    return product

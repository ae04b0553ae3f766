"""Which normalisation goes between a convolution and its nonlinearity."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

Norm = Callable[[int], nn.Module]
"""From the number of channels to a module: ``nn.BatchNorm2d``, ``lambda channels: nn.GroupNorm(8, channels)``."""


def chosen_norm(*, batch_norm: bool, norm: Norm | None) -> Norm | None:
    """`norm` where one is given, else batch norm or nothing."""
    if norm is None and batch_norm:
        return nn.BatchNorm2d
    return norm


def norm_or_identity(norm: Norm | None, channels: int) -> nn.Module:
    """The normalisation of some channels, or a module that does nothing."""
    return nn.Identity() if norm is None else norm(channels)

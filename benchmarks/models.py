"""The networks of the benchmarks, from `natgrad.models`."""

from __future__ import annotations

from natgrad.models import cifar_resnet, resnet50

__all__ = ["cifar_resnet", "resnet50"]

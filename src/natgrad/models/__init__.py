"""The networks that K-FAC is measured on, with the sizes that their papers publish. They need torch alone.

``build("resnet20", num_classes=100)`` makes one by its name; `names` lists them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from natgrad.models.alexnet import AlexNet
from natgrad.models.autoencoder import Autoencoder
from natgrad.models.chunked_batch_norm import ChunkedBatchNorm2d
from natgrad.models.convnet import cifar_convnet, digits_convnet
from natgrad.models.googlenet import GoogLeNet, GoogLeNetOutput
from natgrad.models.gpt import GPT
from natgrad.models.norm import Norm
from natgrad.models.resnet import (
    ResNet,
    cifar_resnet,
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet44,
    resnet50,
    resnet56,
    resnet101,
    resnet110,
    resnet152,
)
from natgrad.models.vgg import VGG16
from natgrad.models.vit import ViT
from natgrad.options import choice

__all__ = [
    "GPT",
    "VGG16",
    "AlexNet",
    "Autoencoder",
    "ChunkedBatchNorm2d",
    "GoogLeNet",
    "GoogLeNetOutput",
    "Norm",
    "ResNet",
    "ViT",
    "build",
    "builder",
    "cifar_convnet",
    "cifar_resnet",
    "digits_convnet",
    "names",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet110",
    "resnet152",
]

_BUILDERS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "alexnet": AlexNet,
        "autoencoder": Autoencoder,
        "cifar_convnet": cifar_convnet,
        "digits_convnet": digits_convnet,
        "googlenet": GoogLeNet,
        "gpt": GPT,
        "resnet18": resnet18,
        "resnet20": resnet20,
        "resnet32": resnet32,
        "resnet34": resnet34,
        "resnet44": resnet44,
        "resnet50": resnet50,
        "resnet56": resnet56,
        "resnet101": resnet101,
        "resnet110": resnet110,
        "resnet152": resnet152,
        "vgg16": VGG16,
        "vit": ViT,
    }
)


def names() -> list[str]:
    """What `build` takes."""
    return list(_BUILDERS)


def builder(name: str) -> Callable[..., nn.Module]:
    """The function or class that `build` calls."""
    return _BUILDERS[choice("name", name, names())]


def build(name: str, **options: Any) -> nn.Module:
    """The network of this name, with the options of its function or class."""
    make = builder(name)
    allowed = list(inspect.signature(make).parameters)
    for option in options:
        if option not in allowed:
            near = difflib.get_close_matches(option, allowed, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"{name} has no option {option!r}{hint}; it takes {', '.join(allowed)}")
    return make(**options)

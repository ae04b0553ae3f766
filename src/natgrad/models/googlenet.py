"""GoogLeNet, or Inception v1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from natgrad.models.norm import Norm, chosen_norm


class Widths(NamedTuple):
    """A row of table 1: the channels of an Inception module's convolutions."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pool: int

    @property
    def outputs(self) -> int:
        """The channels that come out."""
        return self.one + self.three + self.five + self.pool


TABLE = {
    "3a": Widths(64, 96, 128, 16, 32, 32),
    "3b": Widths(128, 128, 192, 32, 96, 64),
    "4a": Widths(192, 96, 208, 16, 48, 64),
    "4b": Widths(160, 112, 224, 24, 64, 64),
    "4c": Widths(128, 128, 256, 24, 64, 64),
    "4d": Widths(112, 144, 288, 32, 64, 64),
    "4e": Widths(256, 160, 320, 32, 128, 128),
    "5a": Widths(256, 160, 320, 32, 128, 128),
    "5b": Widths(384, 192, 384, 48, 128, 128),
}
"""The Inception modules of Szegedy et al. 2014, table 1."""


class GoogLeNetOutput(NamedTuple):
    """What a GoogLeNet with auxiliary heads gives in training; the paper adds 0.3 times their losses to the first."""

    logits: Tensor
    auxiliary_4a: Tensor
    auxiliary_4d: Tensor


class GoogLeNet(nn.Module):
    """Szegedy et al. 2014, table 1, with the paper's 5×5 convolutions where torchvision has 3×3.

    For 224×224 images (smaller ones work too, down to 32, without `auxiliary`). With `batch_norm` (Ioffe & Szegedy
    2015), or another `norm`, convolutions have no biases. Without local response normalisation, which table 1 does not
    list and later versions dropped. He initialisation, so that it trains without batch norm too. `auxiliary` adds the
    paper's two heads; then training gives a `GoogLeNetOutput`, and evaluation logits as ever.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        dropout: float = 0.4,
        batch_norm: bool = False,
        auxiliary: bool = False,
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        norm = chosen_norm(batch_norm=batch_norm, norm=norm)
        self.stem = nn.Sequential(
            _convolution(3, 64, size=7, stride=2, norm=norm),
            _halving_pool(),
            _convolution(64, 64, size=1, norm=norm),
            _convolution(64, 192, size=3, norm=norm),
            _halving_pool(),
        )
        channels = 192
        self.inceptions = nn.ModuleDict()
        for name, widths in TABLE.items():
            self.inceptions[name] = Inception(channels, widths, norm=norm)
            channels = widths.outputs
        self.pool = _halving_pool()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, num_classes)
        self.heads = nn.ModuleDict()
        if auxiliary:
            for name in ("4a", "4d"):
                self.heads[name] = AuxiliaryHead(TABLE[name].outputs, num_classes, norm=norm)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor | GoogLeNetOutput:
        """(N, 3, H, W) images → (N, classes) logits, three of them in training with auxiliary heads."""
        out = self.stem(x)
        auxiliary = []
        for name, inception in self.inceptions.items():
            if name in ("4a", "5a"):
                out = self.pool(out)
            out = inception(out)
            if self.training and name in self.heads:
                auxiliary.append(self.heads[name](out))
        logits: Tensor = self.fc(self.dropout(torch.flatten(self.avgpool(out), 1)))
        return GoogLeNetOutput(logits, *auxiliary) if auxiliary else logits


class Inception(nn.Module):
    """1×1, 3×3, 5×5 and pooling next to each other.

    The 1×1 convolution and both reductions read the same tensor, so that K-FAC has one input factor for the three.
    """

    def __init__(self, inputs: int, widths: Widths, *, norm: Norm | None) -> None:
        super().__init__()
        self.one = _convolution(inputs, widths.one, size=1, norm=norm)
        self.reduce_three = _convolution(inputs, widths.reduce_three, size=1, norm=norm)
        self.three = _convolution(widths.reduce_three, widths.three, size=3, norm=norm)
        self.reduce_five = _convolution(inputs, widths.reduce_five, size=1, norm=norm)
        self.five = _convolution(widths.reduce_five, widths.five, size=5, norm=norm)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.project = _convolution(inputs, widths.pool, size=1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) → the branches' channels, one after the other."""
        three = self.three(self.reduce_three(x))
        five = self.five(self.reduce_five(x))
        return torch.cat([self.one(x), three, five, self.project(self.pool(x))], 1)


class AuxiliaryHead(nn.Module):
    """The paper's second classifier, on a map of 14×14: pooling to 4×4, 1×1, two linear layers."""

    def __init__(self, inputs: int, num_classes: int, *, norm: Norm | None) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, stride=3)
        self.reduce = _convolution(inputs, 128, size=1, norm=norm)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.7)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, 14, 14) → (N, classes) logits."""
        hidden = self.relu(self.fc1(torch.flatten(self.reduce(self.pool(x)), 1)))
        logits: Tensor = self.fc2(self.dropout(hidden))
        return logits


def _convolution(inputs: int, outputs: int, *, size: int, norm: Norm | None, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=norm is None),
    ]
    if norm is not None:
        layers.append(norm(outputs))
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


def _halving_pool() -> nn.MaxPool2d:
    # ceil_mode gives the sizes of table 1: 112, 56, 28, 14, 7.
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)

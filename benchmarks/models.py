"""The networks of the benchmarks, written out so that no model library is needed.

CIFAR ResNets of He et al. 2015, section 4.2, and ResNet-50 in torchvision's v1.5 layout with torchvision's names.
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor, nn


def cifar_resnet(*, depth: int, classes: int = 10) -> nn.Module:
    """ResNet of 6n + 2 layers (20, 32, 44, ...) for 32×32 images: three stages of 16, 32 and 64 channels."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"a CIFAR ResNet has 6n + 2 layers, got depth={depth}")
    model = _CifarResNet(blocks=(depth - 2) // 6, classes=classes)
    _initialise(model)
    return model


def resnet50(*, classes: int = 1000) -> nn.Module:
    """ResNet-50 for 224×224 images (smaller ones work too, down to 32)."""
    model = _ResNet50(classes=classes)
    _initialise(model)
    return model


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _convolution(inputs: int, outputs: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, size=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs, size=3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self._stride = stride
        self._new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Option A: the identity, subsampled and with channels of zeros, without parameters."""
        if self._stride == 1 and self._new_channels == 0:
            return x
        before = self._new_channels // 2
        strided = x[:, :, :: self._stride, :: self._stride]
        return functional.pad(strided, (0, 0, 0, 0, before, self._new_channels - before))


class _CifarResNet(nn.Module):
    def __init__(self, *, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 16, size=3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, stride=1, blocks=blocks)
        self.layer2 = self._stage(16, 32, stride=2, blocks=blocks)
        self.layer3 = self._stage(32, 64, stride=2, blocks=blocks)
        self.fc = nn.Linear(64, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, *, stride: int, blocks: int) -> nn.Sequential:
        first = _BasicBlock(inputs, outputs, stride=stride)
        return nn.Sequential(first, *(_BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        logits: Tensor = self.fc(out.mean((2, 3)))
        return logits


class _Bottleneck(nn.Module):
    """1×1, 3×3, 1×1. Version 1.5: the 3×3 convolution strides, not the first 1×1."""

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = _convolution(inputs, width, size=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, size=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, size=1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                _convolution(inputs, outputs, size=1, stride=stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class _ResNet50(nn.Module):
    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, size=7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(64, 64, stride=1, blocks=3)
        self.layer2 = self._stage(256, 128, stride=2, blocks=4)
        self.layer3 = self._stage(512, 256, stride=2, blocks=6)
        self.layer4 = self._stage(1024, 512, stride=2, blocks=3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)

    @staticmethod
    def _stage(inputs: int, width: int, *, stride: int, blocks: int) -> nn.Sequential:
        first = _Bottleneck(inputs, width, stride=stride)
        return nn.Sequential(first, *(_Bottleneck(4 * width, width, stride=1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.fc(self.avgpool(out).flatten(1))
        return logits

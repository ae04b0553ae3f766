"""Residual networks of He et al. 2015, for CIFAR and for ImageNet.

Those for CIFAR follow section 4.2, with shortcuts without parameters (option A); those for ImageNet follow torchvision:
version 1.5, which strides in the 3×3 convolution of a bottleneck, with torchvision's names, so that its weights load.
All of them take `norm`, from a number of channels to a module; with ``norm=None`` the convolutions have biases instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.models.norm import Norm, norm_or_identity


def cifar_resnet(*, depth: int, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet of 6n + 2 layers for 32×32 images: three stages of 16, 32 and 64 channels."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"a CIFAR ResNet has 6n + 2 layers, got depth={depth}")
    blocks = (depth - 2) // 6
    return ResNet(block=BasicBlock, widths=(16, 32, 64), blocks=[blocks] * 3, num_classes=num_classes, norm=norm)


def resnet20(*, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-20 for CIFAR: 0.27 million parameters."""
    return cifar_resnet(depth=20, num_classes=num_classes, norm=norm)


def resnet32(*, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-32 for CIFAR: 0.46 million parameters."""
    return cifar_resnet(depth=32, num_classes=num_classes, norm=norm)


def resnet44(*, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-44 for CIFAR: 0.66 million parameters."""
    return cifar_resnet(depth=44, num_classes=num_classes, norm=norm)


def resnet56(*, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-56 for CIFAR: 0.85 million parameters."""
    return cifar_resnet(depth=56, num_classes=num_classes, norm=norm)


def resnet110(*, num_classes: int = 10, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-110 for CIFAR: 1.7 million parameters."""
    return cifar_resnet(depth=110, num_classes=num_classes, norm=norm)


def resnet18(*, num_classes: int = 1000, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-18 for 224×224 images (smaller ones work too, down to 32)."""
    return _imagenet_resnet(BasicBlock, (2, 2, 2, 2), num_classes, norm)


def resnet34(*, num_classes: int = 1000, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-34 for 224×224 images (smaller ones work too, down to 32)."""
    return _imagenet_resnet(BasicBlock, (3, 4, 6, 3), num_classes, norm)


def resnet50(*, num_classes: int = 1000, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-50 for 224×224 images (smaller ones work too, down to 32)."""
    return _imagenet_resnet(Bottleneck, (3, 4, 6, 3), num_classes, norm)


def resnet101(*, num_classes: int = 1000, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-101 for 224×224 images (smaller ones work too, down to 32)."""
    return _imagenet_resnet(Bottleneck, (3, 4, 23, 3), num_classes, norm)


def resnet152(*, num_classes: int = 1000, norm: Norm | None = nn.BatchNorm2d) -> ResNet:
    """ResNet-152 for 224×224 images (smaller ones work too, down to 32)."""
    return _imagenet_resnet(Bottleneck, (3, 8, 36, 3), num_classes, norm)


def _imagenet_resnet(
    block: type[BasicBlock] | type[Bottleneck], blocks: Sequence[int], num_classes: int, norm: Norm | None
) -> ResNet:
    widths = (64, 128, 256, 512)
    return ResNet(block=block, widths=widths, blocks=blocks, num_classes=num_classes, norm=norm, imagenet=True)


def _convolution(inputs: int, outputs: int, *, size: int, norm: Norm | None, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=norm is None)


class PaddedSubsample(nn.Module):
    """Option A's shortcut: the input, subsampled, between channels of zeros."""

    def __init__(self, new_channels: int, *, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = new_channels // 2, new_channels - new_channels // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) → (N, C + new channels, H / stride, W / stride)."""
        strided = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(strided, (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """3×3, 3×3 and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, *, stride: int, norm: Norm | None, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, size=3, stride=stride, norm=norm)
        self.bn1 = norm_or_identity(norm, width)
        self.conv2 = _convolution(width, width, size=3, norm=norm)
        self.bn2 = norm_or_identity(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    @property
    def last(self) -> nn.Conv2d:
        """The convolution that the sum with the shortcut follows."""
        return self.conv2

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the branch and the shortcut, rectified."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 with four times the channels, and a shortcut. Version 1.5: the 3×3 convolution strides."""

    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int, norm: Norm | None, shortcut: nn.Module | None) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = _convolution(inputs, width, size=1, norm=norm)
        self.bn1 = norm_or_identity(norm, width)
        self.conv2 = _convolution(width, width, size=3, stride=stride, norm=norm)
        self.bn2 = norm_or_identity(norm, width)
        self.conv3 = _convolution(width, outputs, size=1, norm=norm)
        self.bn3 = norm_or_identity(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    @property
    def last(self) -> nn.Conv2d:
        """The convolution that the sum with the shortcut follows."""
        return self.conv3

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the branch and the shortcut, rectified."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A residual network with a stage for each width; the functions of this file make the published ones.

    With `imagenet` the stem is 7×7 with stride 2 and a pooling, and shortcuts that change the shape are projections;
    without, the stem is 3×3 and such shortcuts have no parameters.
    """

    def __init__(
        self,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        widths: Sequence[int],
        blocks: Sequence[int],
        num_classes: int,
        norm: Norm | None,
        imagenet: bool = False,
    ) -> None:
        super().__init__()
        self._imagenet = imagenet
        channels = widths[0]
        if imagenet:
            self.conv1 = _convolution(3, channels, size=7, stride=2, norm=norm)
        else:
            self.conv1 = _convolution(3, channels, size=3, norm=norm)
        self.bn1 = norm_or_identity(norm, channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet else nn.Identity()
        self._stages = [f"layer{stage}" for stage in range(1, len(widths) + 1)]
        for name, width, count in zip(self._stages, widths, blocks, strict=True):
            stride = 1 if name == "layer1" else 2
            stage = nn.Sequential()
            for position in range(count):
                stage.append(self._block(block, channels, width, stride=stride if position == 0 else 1, norm=norm))
                channels = block.expansion * width
            self.add_module(name, stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        self._initialise(without_norm=norm is None)

    def _block(
        self, block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, *, stride: int, norm: Norm | None
    ) -> nn.Module:
        outputs = block.expansion * width
        shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            if self._imagenet:
                projection = _convolution(inputs, outputs, size=1, stride=stride, norm=norm)
                shortcut = nn.Sequential(projection, norm_or_identity(norm, outputs))
            else:
                shortcut = PaddedSubsample(outputs - inputs, stride=stride)
        return block(inputs, width, stride=stride, norm=norm, shortcut=shortcut)

    def _initialise(self, *, without_norm: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if without_norm:
            # Nothing else keeps the sum of many branches from growing with a power of two a block.
            branches = [module for module in self.modules() if isinstance(module, BasicBlock | Bottleneck)]
            with torch.no_grad():
                for branch in branches:
                    branch.last.weight.mul_(len(branches) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) images → (N, classes) logits."""
        out = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self._stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(out), 1))
        return logits

"""The benchmarks' networks are the published ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks.models import cifar_resnet, resnet50
from torch import nn


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "expected"), [(20, 269_722), (32, 464_154)])
def test_cifar_resnet_has_the_published_size(depth: int, expected: int) -> None:
    assert parameters(cifar_resnet(depth=depth)) == expected


def test_resnet50_has_the_published_size() -> None:
    assert parameters(resnet50()) == 25_557_032


def test_cifar_resnet_refuses_other_depths() -> None:
    with pytest.raises(ValueError, match="6n \\+ 2"):
        cifar_resnet(depth=18)


def test_resnet50_strides_on_the_3x3_convolutions() -> None:
    strided = [
        module.kernel_size
        for name, module in resnet50().named_modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and "layer" in name and "downsample" not in name
    ]
    assert strided == [(3, 3)] * 3


def test_identity_shortcuts_subsample_and_pad_with_zeros() -> None:
    # With its last normalisation at zero a block is its shortcut.
    block = cifar_resnet(depth=8).get_submodule("layer2.0")
    assert isinstance(block.bn2, nn.BatchNorm2d)
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize(
    ("build", "size", "classes"),
    [(lambda: cifar_resnet(depth=20), 32, 10), (resnet50, 64, 1000)],
    ids=["resnet20", "resnet50"],
)
def test_one_logit_a_class(build: Callable[[], nn.Module], size: int, classes: int) -> None:
    with torch.no_grad():
        assert build().eval()(torch.randn(2, 3, size, size)).shape == (2, classes)

"""Small convolutional networks, for CIFAR-10 and for digits."""

from __future__ import annotations

from torch import nn

from natgrad.models.norm import Norm, norm_or_identity


def cifar_convnet(*, num_classes: int = 10, norm: Norm | None = None) -> nn.Sequential:
    """The CIFAR-10 network of Ba, Grosse & Martens 2017, section 6.1, for 32×32 images.

    Three 5×5 convolutions of 32, 32 and 64 filters and a softmax layer; the logits come out. The paper does not say
    how it pools: this is cuda-convnet, max, mean and mean of overlapping 3×3 windows with stride 2. Like the paper, and
    unlike cuda-convnet's "quick" network, it has no hidden layer of 64 units before the last. PyTorch's default
    initialisation, as cuda-convnet's (1e-4 in the first layer) was made for hundreds of epochs of SGD.
    """
    # ceil_mode: cuda-convnet's windows reach over the border, so that the maps are 16², 8² and 4².
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        norm_or_identity(norm, 32),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        norm_or_identity(norm, 32),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2),
        norm_or_identity(norm, 64),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, num_classes),
    )


def digits_convnet(*, num_classes: int = 10) -> nn.Sequential:
    """Two convolutions for images of 8×8 pixels in one channel: what trains in seconds on a CPU."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, num_classes),
    )

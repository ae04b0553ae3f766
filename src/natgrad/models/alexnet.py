"""AlexNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from natgrad.models.norm import Norm, chosen_norm


class AlexNet(nn.Module):
    """Krizhevsky et al. 2012, as simplified in 2014 for one GPU and laid out by torchvision.

    For 224×224 images, of which the first linear layer reads 256×6×6. Without local response normalisation. The norm
    of the batch-normalised baseline of Ba, Grosse & Martens 2017 (`batch_norm`, or any other as `norm`) goes after each
    convolution.
    """

    def __init__(
        self, *, num_classes: int = 1000, dropout: float = 0.5, batch_norm: bool = False, norm: Norm | None = None
    ) -> None:
        super().__init__()
        norm = chosen_norm(batch_norm=batch_norm, norm=norm)

        def convolution(inputs: int, outputs: int, size: int, *, padding: int, stride: int = 1) -> list[nn.Module]:
            layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding)
            normalised = [layer] if norm is None else [layer, norm(outputs)]
            return [*normalised, nn.ReLU(inplace=True)]

        self.features = nn.Sequential(
            *convolution(3, 64, 11, stride=4, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(64, 192, 5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(192, 384, 3, padding=1),
            *convolution(384, 256, 3, padding=1),
            *convolution(256, 256, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)  # Does nothing to the 6×6 of a 224×224 image.
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) images → (N, classes) logits."""
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits

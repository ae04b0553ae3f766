"""VGG-16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from natgrad.models.norm import Norm, chosen_norm

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Configuration D of Simonyan & Zisserman 2014, laid out and initialised as in torchvision.

    For 224×224 images. With `batch_norm`, or another `norm`, convolutions keep their biases, as torchvision's do.
    """

    def __init__(
        self, *, num_classes: int = 1000, dropout: float = 0.5, batch_norm: bool = False, norm: Norm | None = None
    ) -> None:
        super().__init__()
        norm = chosen_norm(batch_norm=batch_norm, norm=norm)
        layers: list[nn.Module] = []
        channels = 3
        for stage in _STAGES:
            for width in stage:
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                if norm is not None:
                    layers.append(norm(width))
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)  # Does nothing to the 7×7 of a 224×224 image.
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) images → (N, classes) logits."""
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits

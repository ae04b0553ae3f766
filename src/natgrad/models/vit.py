"""Vision transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from natgrad.models.transformer import Block
from natgrad.options import choice


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2020); the defaults are ViT-B/16 for 224×224 images.

    `pool` says what the classifier reads: ``"token"``, a class token before the patches, or ``"mean"``, the mean of the
    patches without such a token. Weights start as a truncated normal with deviation 0.02, as in DeiT; the head too,
    which the paper sets to zero, so that the first step already has gradients everywhere.
    """

    def __init__(
        self,
        *,
        image: int = 224,
        patch: int = 16,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        num_classes: int = 1000,
        channels: int = 3,
        pool: str = "token",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image % patch != 0:
            raise ValueError(f"image must be a multiple of patch, got image={image} and patch={patch}")
        self.image = image
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token: nn.Parameter | None = None
        if choice("pool", pool, ("token", "mean")) == "token":
            self.token = nn.Parameter(torch.zeros(1, 1, width))
        length = (image // patch) ** 2 + (self.token is not None)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads=heads, dropout=dropout, causal=False, eps=1e-6) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, image, image) → (N, classes) logits."""
        if x.shape[-2:] != (self.image, self.image):
            raise ValueError(f"images must be {self.image}×{self.image}, got {x.shape[-2]}×{x.shape[-1]}")
        x = self.patches(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.blocks(self.dropout(x + self.positions)))
        logits: Tensor = self.head(x.mean(1) if self.token is None else x[:, 0])
        return logits

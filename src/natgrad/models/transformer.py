"""The block that `GPT` and `ViT` are made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself; queries, keys and values from one linear layer."""

    def __init__(self, width: int, *, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads != 0:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) → (N, T, width)."""
        # (N, T, 3 · width) -> three of (N, heads, T, width of a head)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a two-layer network four times as wide, normalised before each (pre-norm), with shortcuts."""

    def __init__(
        self, width: int, *, heads: int, dropout: float, causal: bool, approximate: str = "none", eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = SelfAttention(width, heads=heads, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=approximate), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) → (N, T, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x

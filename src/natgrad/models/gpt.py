"""A decoder-only language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from natgrad.models.transformer import Block


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019); the defaults are its small version.

    Pre-norm blocks, learned positions, biases, the tanh form of GELU. Its initialisation: normal with deviation 0.02,
    divided by √(2 · layers) where a branch joins the residual stream. `tied`: the head's weight is the embedding's.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50257,
        context: int = 1024,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout, causal=True, approximate="tanh") for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        joining = tuple(
            f"blocks.{layer}.{name}.weight" for layer in range(layers) for name in ("attention.out", "mlp.2")
        )
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 * (2 * layers) ** -0.5 if name in joining else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) token numbers → (N, T, vocabulary) logits of the token after each."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens does not fit into a context of {self.context}")
        # Looked up for every sequence: one row for all would have the sum of their derivatives, and K-FAC needs each.
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

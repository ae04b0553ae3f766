"""Deep autoencoders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from natgrad.options import choice

_CONNECTIONS = 15


class Autoencoder(nn.Module):
    """The deep autoencoders of Hinton & Salakhutdinov 2006, as Martens 2010 and Martens & Grosse 2015 train them.

    `sizes` are those of the encoder, from the input to the code; the decoder is its mirror image with weights of its
    own. The code is linear, and logits come out, for ``binary_cross_entropy_with_logits``. The initialisation is
    Martens's: each unit has 15 incoming weights from a standard normal, and with tanh they are those of the sigmoid
    network, a quarter as large with biases of a half.
    """

    def __init__(self, *, sizes: Sequence[int] = (784, 1000, 500, 250, 30), activation: str = "sigmoid") -> None:
        super().__init__()
        choice("activation", activation, ("sigmoid", "tanh"))
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes must be two positive numbers or more, from the input to the code, got {sizes}")
        self.encoder = _layers(sizes, activation)
        self.decoder = _layers(sizes[::-1], activation)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) inputs → (N, elements of an input) logits."""
        logits: Tensor = self.decoder(self.encoder(torch.flatten(x, 1)))
        return logits


def _layers(sizes: Sequence[int], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        if layers:
            layers.append(nn.Sigmoid() if activation == "sigmoid" else nn.Tanh())
        layers.append(_sparse_linear(inputs, outputs, tanh=activation == "tanh"))
    return nn.Sequential(*layers)


def _sparse_linear(inputs: int, outputs: int, *, tanh: bool) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        chosen = torch.rand_like(layer.weight).topk(min(_CONNECTIONS, inputs), dim=1).indices
        values = torch.randn_like(layer.weight).gather(1, chosen)
        layer.weight.zero_().scatter_(1, chosen, values * 0.25 if tanh else values)
        layer.bias.fill_(0.5 if tanh else 0.0)
    return layer

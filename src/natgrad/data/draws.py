"""Random numbers that follow from what they are for."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.data.base import Place, whole_steps

ORDER, SHIFT, CASE, MADE_UP = range(4)
"""What a draw is for, so that no two purposes share their numbers."""

_WORD = 2**64 - 1


def mixed(*numbers: int) -> int:
    """64 bits that look random and follow from the numbers (splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def generator(*numbers: int) -> torch.Generator:
    """A generator of its own on the CPU, so that every device gets the same draws."""
    return torch.Generator(device="cpu").manual_seed(mixed(*numbers) >> 1)


def rank_order(cases: int, *, seed: int, epoch: int, batch: int, start: int, place: Place) -> Tensor:
    """The cases of one rank in an epoch from step `start` on, steps × batch.

    All ranks share one permutation, of which a step takes ``batch * ranks`` cases and a rank a contiguous part, so
    that the number of ranks does not change which cases a step of all of them sees.
    """
    steps = whole_steps(cases, batch=batch, ranks=place.ranks)
    if not 0 <= start <= steps:
        raise ValueError(f"start must be between 0 and the epoch's {steps} steps, got {start}")
    order = torch.randperm(cases, generator=generator(seed, ORDER, epoch), device="cpu")
    return order[: steps * batch * place.ranks].view(steps, place.ranks, batch)[start:, place.rank]

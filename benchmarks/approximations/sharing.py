"""Factors and eigendecompositions of one K-FAC step, as they are, and as they would be if each block had its own."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.approximations.common import (
    decomposing_seconds,
    decomposition_bytes,
    distinct_factors,
    facts,
    megabytes,
    milliseconds,
    own_factors,
    progress_bar,
    text_table,
)
from benchmarks.workloads import (
    Device,
)
from natgrad.models import GPT, GoogLeNet


class SeparateAttention(nn.Module):
    """A transformer block, pre-norm, with queries, keys and values from a linear layer each, as most models have it."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) → (N, T, width)."""
        normal = self.norm1(x)
        query, key, value = (
            layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class SeparateGPT(nn.Module):
    """A language model of one such block."""

    def __init__(self, *, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(SeparateAttention(width, heads=heads))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) → (N, T, vocabulary)."""
        logits: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return logits


@dataclass(frozen=True, kw_only=True)
class SharingCosts:
    """Numbers, bytes and seconds of factors and decompositions, with (`shared`) and without (`own`) sharing."""

    name: str
    blocks: int
    factors: dict[str, int]
    factor_bytes: dict[str, int]
    decomposition_bytes: dict[str, int]
    seconds: dict[str, float]
    note: str


def sharing_costs(
    name: str,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    device: Device,
    *,
    prefix: str = "",
    repeats: int = 3,
) -> SharingCosts:
    """One K-FAC step, and what it keeps for the blocks whose names begin with `prefix`."""
    kfac = natgrad.KFAC(model, kl_clip=None)
    logits = model(inputs)
    functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()  # type: ignore[no-untyped-call, unused-ignore]
    kfac.step()
    whole = distinct_factors(kfac.blocks).values()
    expected = sum(factor.bytes + decomposition_bytes(factor) for factor in whole)
    reported = kfac.report().bytes
    note = "" if reported == expected else f"report() counts {megabytes(reported)}, its blocks {megabytes(expected)}"
    blocks = [block for block in kfac.blocks if block.key.startswith(prefix)]
    ways = {"shared": distinct_factors(blocks), "own": own_factors(blocks)}
    kfac.detach()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):  # in turns
        for way, factors in ways.items():
            seconds[way].append(decomposing_seconds(factors, device, repeats=1))
    return SharingCosts(
        name=name,
        blocks=len(blocks),
        factors={way: len(factors) for way, factors in ways.items()},
        factor_bytes={way: sum(factor.bytes for factor in factors.values()) for way, factors in ways.items()},
        decomposition_bytes={way: sum(map(decomposition_bytes, factors.values())) for way, factors in ways.items()},
        seconds={way: statistics.median(times) for way, times in seconds.items()},
        note=note,
    )


def sharing_rows(results: Sequence[SharingCosts]) -> list[list[str]]:
    """Two rows a model."""
    rows = [["", "", "blocks", "factors", "bytes", "decompositions", "decomposing (ms)"]]
    for result in results:
        for way, label in (("own", "each its own"), ("shared", "shared")):
            rows.append(
                [
                    result.name if way == "own" else "",
                    label,
                    str(result.blocks) if way == "own" else "",
                    str(result.factors[way]),
                    megabytes(result.factor_bytes[way]),
                    megabytes(result.decomposition_bytes[way]),
                    milliseconds(result.seconds[way]),
                ]
            )
        saved = [1 - part["shared"] / part["own"] for part in _quantities(result)]
        rows.append(["", "saved", "", *(f"{share:.0%}" for share in saved)])
    return rows


def _quantities(result: SharingCosts) -> Iterable[Mapping[str, float]]:
    return (result.factors, result.factor_bytes, result.decomposition_bytes, result.seconds)


def run_sharing(given: argparse.Namespace, device: Device) -> dict[str, Any]:
    """The subcommand."""
    batch = given.batch or (32 if device.is_cuda else 4)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, given.image, given.image, generator=generator).to(device.torch)
    labels = torch.randint(1000, (batch,), generator=generator).to(device.torch)
    vocabulary = 256
    tokens, following = torch.randint(vocabulary, (2, batch, given.length), generator=generator).to(device.torch)
    heads = max(1, given.width // 64)
    torch.manual_seed(0)
    models: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, str]] = {
        "GoogLeNet": (GoogLeNet, images, labels, ""),
        "block of GPT, q, k, v in one": (
            lambda: GPT(
                vocabulary=vocabulary,
                context=given.length,
                layers=1,
                heads=heads,
                width=given.width,
                tied=False,
            ),
            tokens,
            following,
            "blocks.0.",
        ),
        "block with q, k, v apart": (
            lambda: SeparateGPT(vocabulary=vocabulary, width=given.width, heads=heads),
            tokens,
            following,
            "blocks.0.",
        ),
    }
    results = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(models))
        for name, (build, inputs, targets, prefix) in models.items():
            progress.update(task, description=name)
            model = build().to(device.torch)
            results.append(sharing_costs(name, model, inputs, targets, device, prefix=prefix, repeats=given.repeats))
            progress.update(task, advance=1)
    print(
        f"Shared factors on {device}, torch {torch.__version__}: GoogLeNet at {given.image}x{given.image}, "
        f"transformers {given.width} wide"
    )
    print(text_table(sharing_rows(results), left=2))
    for result in results:
        if result.note:
            print(f"{result.name}: {result.note}")
    return {
        **facts(device, benchmark="sharing", batch=batch, image=given.image, width=given.width, length=given.length),
        "models": [asdict(result) for result in results],
    }

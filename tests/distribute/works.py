"""Work to place, by hand and drawn, and machines to place it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from natgrad.distribute.balance import place
from natgrad.distribute.costs import Costs, default_costs
from natgrad.distribute.placement import Layer, Piece, Placement, Work

H200 = default_costs(torch.device("cuda"))
# A factor of size n takes n³ seconds, its inverse a tenth; products are free, nearly.
CUBES = Costs("cubes", ((1, 1.0),), ((1, 0.1),), flops=1e12, bandwidth=100.0, latency=3.0)
RESNETS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


def dense(name: str, *sizes: int) -> Piece:
    matrices = tuple((1, size, False) for size in sizes)
    return Piece(name, matrices, matrices)


def layered(shapes: Sequence[tuple[str, int, int]], solver: str = "eigen") -> Work:
    """Layers (name, rows, columns) with an A and a G each."""
    layers = tuple(Layer(n, (1, r, c), (False, False), (f"{n} A", f"{n} G")) for n, r, c in shapes)
    pieces = tuple(piece for n, r, c in shapes for piece in (dense(f"{n} A", c), dense(f"{n} G", r)))
    return Work(layers, pieces, solver)


def singles(*sizes: int) -> Work:
    """Layers a, b, ... of one piece each."""
    names = [chr(ord("a") + number) for number in range(len(sizes))]
    return Work(
        tuple(Layer(name, (1, 1, size), (True, False), (name,)) for name, size in zip(names, sizes, strict=True)),
        tuple(dense(name, size) for name, size in zip(names, sizes, strict=True)),
        "eigen",
    )


def resnet(blocks: Sequence[int], solver: str = "eigen") -> Work:
    """The factors of an ImageNet ResNet with bottlenecks: A of cin·k², G of cout, and the head's 2049 and 1000."""
    convolutions = [("conv1", 3, 64, 7)]
    channels = 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            name = f"layer{stage}.{block}"
            convolutions += [
                (f"{name}.conv1", channels, width, 1),
                (f"{name}.conv2", width, width, 3),
                (f"{name}.conv3", width, 4 * width, 1),
            ]
            if block == 0:
                convolutions.append((f"{name}.downsample.0", channels, 4 * width, 1))
            channels = 4 * width
    return layered([*((name, out, cin * k * k) for name, cin, out, k in convolutions), ("fc", 1000, 2049)], solver)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Layers of one to three pieces, some of them shared, some diagonal or stacked."""
    matrices = st.tuples(st.integers(1, 3), st.integers(1, 40), st.booleans())
    some = st.lists(matrices, min_size=1, max_size=2).map(tuple)
    pieces = [Piece(f"p{n}", draw(some), draw(some)) for n in range(draw(st.integers(1, 12)))]
    layers = []
    unused = [piece.name for piece in pieces]
    while unused:
        own = unused[: draw(st.integers(1, 3))]
        unused = unused[len(own) :]
        shared = draw(st.lists(st.sampled_from([piece.name for piece in pieces]), max_size=1))
        names = tuple(dict.fromkeys([*own, *shared]))
        shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)))
        layers.append(Layer(f"l{len(layers)}", shape, draw(st.tuples(st.booleans(), st.booleans())), names))
    return Work(
        tuple(layers), tuple(pieces), draw(st.sampled_from(["eigen", "inverse"])), draw(st.sampled_from([4, 8]))
    )


layouts = st.integers(1, 9).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, ranks)))
# Of products that cost nothing, about as much as decompositions, and everything.
machines = st.sampled_from([CUBES, replace(CUBES, flops=1e3), replace(CUBES, flops=1e-3), H200])

HAND = Work(
    layers=(
        Layer("x", (1, 2, 3), (False, False), ("x A", "x G")),
        Layer("y", (2, 4, 5), (False, True), ("y",)),
    ),
    pieces=(
        dense("x A", 3),
        dense("x G", 2),
        Piece("y", ((2, 4, False), (1, 5, True)), ((2, 4, False), (1, 5, True), (1, 1, True))),
    ),
    solver="eigen",
    element_size=8,
)


def of(work: Work, ranks: int, size: int, **options: Any) -> Placement:
    return place(work, ranks=ranks, team_size=size, costs=CUBES, interval=10, **options)

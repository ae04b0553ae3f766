"""The factors of many blocks as they are handed over to be decomposed, inverses' with their damping: on a GPU two dozen
launches, however many blocks there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad import launches
from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.launches import ALIGNED_BYTES, HOST, Launch, addresses, kernel, uploaded
from natgrad.solve.damping import factored_damping

_BLOCK = 4096
_TRACE = 1024
_MOST = 2**31 - _BLOCK
# Each begins where four elements are stored at once.
_STEP = 4

Keys = Sequence[tuple[Hashable, ...]]


@dataclass(frozen=True)
class Prepared:
    """Factors by key, and each block's scale (for inverses: what their product is divided by)."""

    factors: dict[Hashable, Tensor]
    scales: list[Tensor]


@dataclass(frozen=True)
class _Group:
    """The blocks with so many sides: where the entries of each side are, and their scales."""

    blocks: list[int]
    sides: list[Tensor]
    scales: Tensor
    lengths: list[int]


def prepares(blocks: Sequence[KroneckerBlock]) -> bool:
    """Whether the kernels can do it."""
    factors = [factor for block in blocks for factor in block.straight.sides]
    first = factors[0].sum
    if not launches.able(first.device):
        return False
    if sum(factor.sum.numel() + _STEP for factor in factors) >= _MOST:  # no room in memory that kernels can count
        return False
    return all(block.swapped is None for block in blocks) and all(
        factor.sum.dtype == torch.float32
        and factor.sum.device == first.device
        and factor.sum.is_contiguous()
        and factor.sum.data_ptr() % ALIGNED_BYTES == 0
        for factor in factors
    )


class Preparation:
    """Of some blocks, again and again. `keys` name their sides; what has one name is prepared once."""

    def __init__(self, blocks: Sequence[KroneckerBlock], keys: Keys, solver: str, rule: str) -> None:
        self.blocks = list(blocks)  # by which it is found, as long as they are there
        self._solver, self._rule = solver, rule
        sides = [factor for block in blocks for factor in block.straight.sides]
        self._device = sides[0].sum.device
        found: dict[Hashable, Factor] = {}
        for block, own in zip(blocks, keys, strict=True):
            found.update(zip(own, block.straight.sides, strict=True))
        # Equal ones beside each other: who decomposes has them as one stack.
        named = dict(sorted(found.items(), key=lambda pair: pair[1].sum.shape, reverse=True))
        self._named = named
        entries = 0
        first: dict[Hashable, int] = {}
        for key, factor in named.items():
            first[key] = entries
            entries += factor.stack
        self._entries, self._first = entries, first
        factors = list(named.values())
        of_entries = [number for number, factor in enumerate(factors) for _ in range(factor.stack)]
        self._factors_of_entries = uploaded(torch.tensor(of_entries, device=HOST), self._device)
        sizes = [factor.sum.shape[1] for factor in factors for _ in range(factor.stack)]
        self._sizes = uploaded(torch.tensor(sizes, dtype=torch.float64, device=HOST), self._device)
        self._groups = [self._group(count, keys) for count in sorted({len(own) for own in keys})]
        self._starts: dict[Hashable, int] = {}
        self._make_launches()

    def _group(self, count: int, keys: Keys) -> _Group:
        chosen = [number for number, own in enumerate(keys) if len(own) == count]
        lengths = [self.blocks[number].straight.row.stack for number in chosen]
        sides = [
            [self._first[keys[number][side]] + entry for number in chosen for entry in range(self._stack(number))]
            for side in range(count)
        ]
        scales = [number for number in chosen for _ in range(self._stack(number))]
        return _Group(
            chosen,
            [uploaded(torch.tensor(side, device=HOST), self._device) for side in sides],
            uploaded(torch.tensor(scales, device=HOST), self._device),
            lengths,
        )

    def _stack(self, number: int) -> int:
        return self.blocks[number].straight.row.stack

    def _make_launches(self) -> None:
        traces: list[tuple[int, ...]] = []
        damped: dict[int, list[tuple[int, ...]]] = {}
        start = 0
        for slot, (key, factor) in enumerate(self._named.items()):
            size, dense, entry, count = (
                factor.sum.shape[1],
                int(not factor.diagonal),
                self._first[key],
                factor.sum.numel(),
            )
            traces.append((slot, size, dense, entry))
            damped.setdefault(4 if count % 4 == 0 else 1, []).append((slot, start, count, size, dense, entry))
            self._starts[key] = start
            start += -(-count // _STEP) * _STEP
        self._length = start
        stacks = [factor.stack for factor in self._named.values()]
        self._traces = Launch(kernel("precondition", "trace_kernel"), traces, stacks, self._device, BLOCK=_TRACE)
        self._damp = [
            Launch(
                kernel("precondition", "damp_kernel"),
                rows,
                [-(-row[2] // _BLOCK) for row in rows],
                self._device,
                BLOCK=_BLOCK,
                ALIGNED=by,
            )
            for by, rows in damped.items()
        ]

    def run(self, damping: float) -> Prepared:
        """The factors as they are now."""
        factors = list(self._named.values())
        with torch.cuda.device_of(factors[0].sum):  # Triton goes by the current one
            pointers = addresses([factor.sum.data_ptr() for factor in factors], self._device)
            weights = torch.stack([factor.weight for factor in factors])[self._factors_of_entries]
            counts = torch.stack([block.straight.counts for block in self.blocks])
            scale = (counts[:, 0] / counts[:, 1]).float()
            multiply = weights.reciprocal().float()
            add = torch.zeros_like(multiply)
            scales: list[Tensor | None] = [None] * len(self.blocks)
            means = None
            if self._solver == "inverse":
                traces = torch.empty(self._entries, dtype=torch.float32, device=self._device)
                self._traces(pointers, traces)
                means = (traces / (weights * self._sizes)).float()
            for group in self._groups:
                divide = scale[group.scales]
                if means is not None:
                    damped = factored_damping(self._rule, [means[side] for side in group.sides], divide, damping)
                    for side, more, added in zip(group.sides, damped.multiply, damped.add, strict=True):
                        multiply[side] *= more
                        add[side] = added
                    divide = damped.divide
                for number, part in zip(group.blocks, divide.split(group.lengths), strict=True):
                    scales[number] = part
            out = torch.empty(self._length, dtype=torch.float32, device=self._device)
            for launch in self._damp:
                launch(pointers, multiply, add, out)
        return Prepared(self._parts(out), [part for part in scales if part is not None])

    def _parts(self, out: Tensor) -> dict[Hashable, Tensor]:
        found = {}
        for key, start in self._starts.items():
            total = self._named[key].sum
            part = out.as_strided(total.shape, total.stride(), start)
            # What is kept after dense factors have gone elsewhere must not keep their memory.
            found[key] = part.clone() if total.dim() == 2 else part
        return found

"""Whose decomposition is when, where the layers that have moved most go first, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.blocks.registry import Registry
from natgrad.options import Now
from natgrad.overlap.turns import Loads, Unit
from natgrad.precondition.preconditioner import Preconditioner

_PROBES = 4


class DriftTurns:
    """`max_overhead` is the part of the time that decompositions may take. `total` adds up over ranks, where there are
    others: each has a part of every factor's sum, and what is measured is linear in it.

    How far a factor F has moved since it was decomposed as F₀ is the length of (F - F₀) X relative to that of F₀ X, for
    a few random vectors X: n² operations, and as much memory as X.
    """

    watches_time = True

    def __init__(self, max_overhead: float, loads: Loads, total: Callable[[Tensor], Tensor] | None) -> None:
        self._share = max_overhead
        self._loads = loads
        self._total = total
        self._began: float | None = None
        self._taken = 0.0  # seconds of decompositions, as measured here
        self._expected = 0.0  # the same as the costs have it
        self._granted = 0.0  # seconds of decompositions that have been asked for
        self._now: dict[Factor, Tensor] = {}
        self._then: dict[Factor, Tensor] = {}  # when last decomposed
        self._queue: list[Unit] = []
        self._each = 1  # units a step
        self._moved_at: int | None = None

    def told(self) -> float:
        """Seconds since training began, in units of what the costs take for a second of decomposing."""
        self._began = time.perf_counter() if self._began is None else self._began
        slower = self._taken / self._expected if self._taken > 0 and self._expected > 0 else 1.0
        return (time.perf_counter() - self._began - self._taken) / slower

    def at(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner) -> Iterable[KroneckerBlock]:
        """The next of those that were chosen when statistics last came in."""
        if step == self._moved_at and now.next_factor_interval > 1:
            return []  # that step is long already
        units, self._queue = self._queue[: self._each], self._queue[self._each :]
        return [block for unit in units for block in unit]

    def moved(self, step: int, now: Now, registry: Registry, preconditioner: Preconditioner, pace: float) -> None:
        """Chooses what is decomposed until statistics come in again."""
        self._moved_at = step
        factors = registry.factors()
        self._now = self._sketches(factors)
        self._then = {factor: self._then[factor] for factor in factors if factor in self._then}
        units = self._loads.units(registry, preconditioner)
        drifts = self._drifts(units, preconditioner)
        budget = self._share * pace - self._granted
        self._queue = []
        for number in sorted(range(len(units)), key=lambda one: -drifts[one]):
            if drifts[number] == 0:
                break
            cost = max(self._loads.seconds(units[number], preconditioner).values())
            # One that does not fit waits until there is time: others would take it away for ever.
            if cost > budget:
                break
            self._queue.append(units[number])
            self._granted += cost
            budget -= cost
        self._each = max(1, -(-len(self._queue) // max(1, now.next_factor_interval - 1)))

    def spent(self, blocks: Sequence[KroneckerBlock], seconds: float, preconditioner: Preconditioner) -> None:
        """Blocks have been decomposed."""
        self._taken += seconds
        self._expected += max(self._loads.seconds(blocks, preconditioner).values())
        for block in blocks:
            for factor in block.factors():
                if factor in self._now:
                    self._then[factor] = self._now[factor]

    def loaded(self, statistics_at: int | None) -> None:
        """Other factors have come in the place of all: how far they have moved nobody knows."""
        self._now, self._then, self._queue = {}, {}, []

    def _drifts(self, units: list[Unit], preconditioner: Preconditioner) -> list[float]:
        """Of every unit's factors the most that one has moved; 0 of those whose first decomposition is in this step,
        and no limit to those of which it is not known what they were when they were decomposed: a checkpoint's, or
        such as were one before.
        """
        found = []
        for unit in units:
            factors = [factor for block in unit if block.key in preconditioner.solved for factor in block.factors()]
            lost = any(factor not in self._then for factor in factors)
            each = [_distance(self._now[factor], self._then[factor]) for factor in factors if not lost]
            found.append(torch.stack(each).amax() if each else torch.tensor(torch.inf if lost else 0.0).double())
        device = next((one.device for one in found if one.device.type != "cpu"), torch.device("cpu"))
        drifts: list[float] = torch.stack([one.to(device) for one in found]).tolist() if found else []
        return drifts

    def _sketches(self, factors: list[Factor]) -> dict[Factor, Tensor]:
        """F X of every factor, of all ranks together."""
        parts = [_sketch(factor).double() for factor in factors]
        weights = torch.stack([factor.weight for factor in factors])
        if self._total is not None and factors:
            flat = self._total(torch.cat([weights, *(part.flatten() for part in parts)]))
            weights, *flats = flat.split([len(factors), *(part.numel() for part in parts)])
            parts = [one.view(part.shape) for one, part in zip(flats, parts, strict=True)]
        safe = torch.where(weights > 0, weights, 1.0)
        return {factor: part / weight for factor, part, weight in zip(factors, parts, safe.unbind(), strict=True)}


def _sketch(factor: Factor) -> Tensor:
    if factor.diagonal:
        return factor.sum
    size = factor.sum.shape[1]
    generator = torch.Generator().manual_seed(size)  # the same for all times and ranks
    probes = torch.randn(size, _PROBES, generator=generator, dtype=factor.sum.dtype).to(factor.sum.device)
    return factor.sum @ probes


def _distance(now: Tensor, then: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(then)
    distance: Tensor = torch.linalg.vector_norm(now - then)
    return distance / torch.where(length > 0, length, 1.0)

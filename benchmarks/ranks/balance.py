"""How evenly decompositions are spread: the second paper's tables V and VI, from the cost model.

The paper's code gives whole layers to ranks in turn, and their A and G apart where there are more ranks than layers;
that reproduces the numbers of elements that the paper gives for its fastest and slowest workers. Our round-robin takes
all factors in turn, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.ranks.common import Loop, Outcome, Table
from natgrad.distribute.balance import METHODS, place
from natgrad.distribute.costs import Costs, default_costs
from natgrad.distribute.placement import Work

MODELS = ("resnet50", "resnet101", "resnet152")
RANKS = (16, 32, 64)
SOLVERS = ("eigen", "inverse")
PUBLISHED = "published"
CLOSE = 1.1  # of the mean

# Pauloski et al. 2020, on V100: table V, milliseconds of the eigendecompositions (T_comp), and table VI, the speed-up
# of the slowest and of the fastest worker since 16.
TABLE_V = {
    "resnet50": {16: 2256.64, 32: 1668.19, 64: 1497.96},
    "resnet101": {16: 3271.72, 32: 2280.38, 64: 2410.24},
    "resnet152": {16: 4067.69, 32: 2758.42, 64: 2212.24},
}
TABLE_VI = {
    "resnet50": {16: (1.0, 1.0), 32: (1.34, 2.88), 64: (1.55, 6.61)},
    "resnet101": {16: (1.0, 1.0), 32: (1.41, 3.33), 64: (1.26, 6.18)},
    "resnet152": {16: (1.0, 1.0), 32: (1.51, 2.03), 64: (1.85, 8.27)},
}
# Section VI-C: elements of the factors of ResNet-50 that a worker gets, at least and at most.
ELEMENTS = {16: (1.46e6, 2.83e7), 64: (1.64e4, 2.26e7)}


@dataclass(frozen=True)
class Balance:
    """One placement of one model's decompositions, in seconds of the cost model."""

    model: str
    solver: str
    ranks: int
    method: str
    slowest: float
    mean: float
    fastest: float
    largest: float

    @property
    def uneven(self) -> float:
        """Slowest over mean."""
        return self.slowest / self.mean

    @property
    def bound(self) -> bool:
        """Whether the largest single factor takes as long as the slowest rank, within 1 %."""
        return self.largest >= 0.99 * self.slowest


def work_of(model: str, solver: str, *, batch: int = 2, image: int = 64) -> Work:
    """What there is to decompose, after one backward pass on a tiny batch."""
    loop = Loop(model, batch=batch, image=image, solver=solver)
    loop.backward()
    return loop.kfac.plan().work


def published_loads(work: Work, ranks: int, cost: Callable[[int], float]) -> list[float]:
    """What each rank gets in the paper's code; `cost` of a factor by its size. Layers share nothing there."""
    layers = [[cost(columns), cost(rows)] for _, rows, columns in (layer.shape for layer in work.layers)]
    parts = [[factor] for layer in layers for factor in layer] if ranks > len(layers) else layers
    loads = [0.0] * ranks
    for number, part in enumerate(parts):
        loads[number % ranks] += sum(part)
    return loads


def balances(model: str, work: Work, ranks: int, costs: Costs) -> list[Balance]:
    """The published placement and ours, with one team of all ranks."""
    loads = {PUBLISHED: published_loads(work, ranks, lambda size: costs.solve(work.solver, size))}
    for method in METHODS:
        placed = place(work, ranks=ranks, team_size=ranks, costs=costs, interval=100, method=method)
        loads[method] = list(placed.solve_seconds)
    largest = max(work.seconds(piece, costs) for piece in work.pieces)
    return [
        Balance(model, work.solver, ranks, method, max(one), sum(one) / ranks, min(one), largest)
        for method, one in loads.items()
    ]


def run_balance() -> Outcome:
    """All models, solvers and numbers of ranks."""
    costs = default_costs(torch.device("cuda"))
    works = {(model, solver): work_of(model, solver) for solver in SOLVERS for model in MODELS}
    found = [
        each for (model, _), work in works.items() for ranks in RANKS for each in balances(model, work, ranks, costs)
    ]
    tables = [table_v(found, solver, costs.device) for solver in SOLVERS]
    tables += [table_vi(found, solver) for solver in SOLVERS]
    tables.append(table_of_elements(works["resnet50", "eigen"]))
    return Outcome(tables, [asdict(each) for each in found])


def _find(found: Sequence[Balance], **wanted: Any) -> Balance:
    return next(each for each in found if all(getattr(each, name) == value for name, value in wanted.items()))


def table_v(found: Sequence[Balance], solver: str, device: str) -> Table:
    """Slowest worker and mean of a refresh."""
    rows = []
    for model in MODELS:
        for ranks in RANKS:
            first, turns, ours = (
                _find(found, model=model, ranks=ranks, solver=solver, method=method)
                for method in (PUBLISHED, "round-robin", "balanced")
            )
            close = "within 10 %" if ours.uneven <= CLOSE else "uneven"
            rows.append(
                [
                    model,
                    str(ranks),
                    *([f"{TABLE_V[model][ranks]:,.0f}"] if solver == "eigen" else []),
                    *(f"{1e3 * each.slowest:.1f} ({each.uneven:.2f})" for each in (first, turns, ours)),
                    f"{1e3 * ours.mean:.1f}",
                    "the largest factor" if ours.bound else close,
                    f"{first.slowest / ours.slowest:.2f}",
                ]
            )
    header = ["model", "ranks", *(["paper's T_comp"] if solver == "eigen" else []), "published placement"]
    header += ["round-robin", "balanced", "mean", "balanced is", "published / balanced"]
    return Table(
        f"Table V, {solver}: the slowest worker of a refresh in ms (and over the mean)",
        header,
        rows,
        f"Modelled with the costs of an {device}; the paper measured V100s. `mean` is of our pieces: layers that read "
        "the same tensor share a factor, which the published code decomposes twice.",
    )


def table_vi(found: Sequence[Balance], solver: str) -> Table:
    """Speed-ups since 16 ranks, of the slowest and the fastest worker."""
    rows = []
    for model in MODELS:
        for ranks in RANKS:
            cells = [model, str(ranks)]
            if solver == "eigen":
                cells += [f"{speedup:.2f}" for speedup in TABLE_VI[model][ranks]]
            for method in (PUBLISHED, "round-robin", "balanced"):
                before, after = (
                    _find(found, model=model, ranks=count, solver=solver, method=method) for count in (RANKS[0], ranks)
                )
                cells += [_times(before.slowest, after.slowest), _times(before.fastest, after.fastest)]
            rows.append(cells)
    header = ["model", "ranks", *(["paper's min", "max"] if solver == "eigen" else []), "published placement's min"]
    header += ["max", "round-robin's min", "max", "balanced's min", "max"]
    return Table(
        f"Table VI, {solver}: speed-up since {RANKS[0]} ranks, of the slowest (min) and the fastest worker (max)",
        header,
        rows,
        "A balanced max of more than its min means that the largest factor bounds the slowest worker, not that work "
        "is spread badly.",
    )


def _times(before: float, after: float) -> str:
    return f"{before / after:.2f}" if after else "idle"


def table_of_elements(work: Work) -> Table:
    """The paper's other measure of balance, which needs no model of costs."""
    sizes = {piece.name: sum(stack * size * size for stack, size, _ in piece.solves) for piece in work.pieces}
    costs = default_costs(torch.device("cuda"))
    rows = []
    for ranks, paper in ELEMENTS.items():
        cells = [str(ranks), *(f"{count:.2e}" for count in paper)]
        loads = published_loads(work, ranks, lambda size: float(size * size))
        cells += [f"{min(loads):.2e}", f"{max(loads):.2e}"]
        for method in ("round-robin", "balanced"):
            placed = place(work, ranks=ranks, team_size=ranks, costs=costs, interval=100, method=method)
            loads = [0.0] * ranks
            for name, rank in placed.owner_of.items():
                loads[rank] += sizes[name]
            cells += [f"{min(loads):.2e}", f"{max(loads):.2e}"]
        rows.append(cells)
    header = ["ranks", "paper's min", "max", "published placement's min", "max"]
    return Table(
        "Elements of factors per worker, ResNet-50",
        [*header, "round-robin's min", "max", "balanced's min", "max"],
        rows,
        "The published placement, as this benchmark understands it, reproduces the numbers that the paper gives.",
    )

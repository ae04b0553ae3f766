"""How K-FAC's work is spread over ranks: what the user may say."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from natgrad.distribute.balance import METHODS
from natgrad.distribute.costs import Costs
from natgrad.options import choice, flag, fraction, refuse_class, whole_number

STRATEGIES = ("auto", "comm-opt", "layer-wise", "hybrid")
_HYBRID = 0.5


@dataclass(frozen=True)
class Strategy:
    """How the work is spread over ranks: ``strategy=``, for those who want to say more than a word.

    Args:
        name: ``"comm-opt"``: each factor is decomposed by one rank, and all ranks get all decompositions.
            ``"layer-wise"``: one rank decomposes and preconditions a layer, and sends the result in every step.
            ``"hybrid"``: a team of ranks does. ``"auto"``: the one that should take the least time, of those whose
            decompositions fit into `memory`.
        grad_worker_fraction: the part of the ranks in a hybrid's team.
        placement: ``"balanced"`` by cost, or ``"round-robin"``, as the second paper does it.
        costs: of decompositions, products and messages; ``"measured"`` to take two seconds for finding out, None for
            those of the kind of device.
        memory: bytes of decompositions that ``"auto"`` may let a rank hold.
        share_statistics: each rank takes the statistics of its share of the factors only, in turns.
        wire: ``torch.bfloat16`` to send preconditioned gradients, and with ``solver="eigen"`` sums of factors, with
            half the bytes.
        timeout: seconds after which a rank that does not come is given up.
    """

    name: str = "auto"
    _: KW_ONLY
    grad_worker_fraction: float | None = None
    placement: str = "balanced"
    costs: Costs | str | None = None
    memory: int | None = None
    share_statistics: bool = False
    wire: torch.dtype | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        choice("strategy", self.name, STRATEGIES)
        choice("placement", self.placement, METHODS)
        flag("share_statistics", self.share_statistics)
        if self.grad_worker_fraction is not None:
            if self.name != "hybrid":
                raise ValueError("grad_worker_fraction goes with strategy='hybrid'")
            fraction("grad_worker_fraction", self.grad_worker_fraction)
        if not (self.costs is None or self.costs == "measured" or isinstance(self.costs, Costs)):
            raise ValueError(f"costs must be natgrad.Costs, 'measured' or None, got {self.costs!r}")
        whole_number("memory", self.memory, none="as much as there is")
        if self.memory is not None and self.name != "auto":
            raise ValueError(f"memory is what strategy='auto' chooses by; {self.name!r} has chosen already")
        if self.wire not in (None, torch.bfloat16):
            raise ValueError(f"wire must be torch.bfloat16, or None for the factors' own precision, got {self.wire!r}")
        if not isinstance(self.timeout, int | float) or isinstance(self.timeout, bool) or self.timeout <= 0:
            raise ValueError(f"timeout must be a number of seconds above 0, got {self.timeout!r}")

    def team_size(self, ranks: int) -> int | None:
        """How many ranks hold and apply a layer's decomposition; None where the costs decide."""
        share = _HYBRID if self.grad_worker_fraction is None else self.grad_worker_fraction
        sizes = {"comm-opt": ranks, "layer-wise": 1, "hybrid": max(1, min(ranks, round(share * ranks)))}
        return sizes.get(self.name)

    def wire_of_sums(self, solver: str) -> torch.dtype | None:
        """What sums of factors travel in. Rounded ones may have small eigenvalues below zero: an eigendecomposition
        takes them for zero, and a Cholesky factorisation fails.
        """
        return self.wire if solver == "eigen" else None


def checked_strategy(strategy: Any, grad_worker_fraction: Any) -> Strategy:
    """The options `strategy` and `grad_worker_fraction`: a word, or the whole."""
    refuse_class("strategy", strategy)
    if not isinstance(strategy, Strategy):
        return Strategy(name=strategy, grad_worker_fraction=grad_worker_fraction)
    if grad_worker_fraction is not None:
        raise ValueError("give grad_worker_fraction to the Strategy")
    return strategy

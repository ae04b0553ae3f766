"""All passes between two steps that take statistics: from a model's output to taps on its graph, and from there into
the running averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.blocks.registry import Registry
from natgrad.capture import outputs
from natgrad.capture.graph import Graph, has_unpack_hook
from natgrad.capture.uses import find_uses
from natgrad.capture.watch import Watch
from natgrad.passes import Pass, Tap
from natgrad.statistics.predictive import Predictive, count_predictions, predicted

FISHERS = ("empirical", "sampled", "exact")


@dataclass
class Window:
    """What has been seen since the last step that took statistics. `problem` says why a pass could not be used."""

    registry: Registry
    watch: Watch
    fisher: str
    predictive: Predictive
    generator: torch.Generator | None
    unrecognised: dict[str, str] = field(default_factory=dict)
    seen: bool = False
    problem: str = ""
    _passes: list[Pass] = field(default_factory=list)

    def observe(self, output: Any, roots: list[Tensor], parameters: Mapping[str, Tensor], terms: float | None) -> None:
        """Taps the graph of one forward pass. `terms` is N where the user gave it; else the predictions in the
        output are counted.
        """
        prediction = outputs.prediction(output)
        distribution = None
        if self.fisher != "empirical":
            distribution = predicted(self.predictive, output, prediction)
            terms = distribution.terms if terms is None else terms
        elif terms is None and prediction is not None:
            terms = count_predictions(prediction)
        if terms is None:
            self.problem = (
                "the model's output holds no prediction tensor to count loss terms in: pass loss_terms= "
                "(how many terms the loss is a mean over), or kfac.capture(loss, terms=...)"
            )
            return
        graph = Graph(roots)
        self._refuse_hidden(graph, parameters)
        findings = find_uses(graph, parameters)
        uses = [use for use in findings.uses if self.watch.claim(use.node)]
        self.seen = True
        self.unrecognised |= findings.unrecognised
        for use in uses:
            for layout in (use.weight, use.bias):
                if layout is not None:
                    self.unrecognised.pop(layout.name, None)
        assigned = self.registry.assign(uses)
        holders = _holders(self.registry)
        taps = [
            (
                use.node,
                Tap(
                    to.block,
                    to.orientation,
                    use.operation,
                    use.activation,
                    has_unpack_hook(use.node, use.activation),
                    holders[id(to.orientation.column)] > 1,
                    holders[id(to.orientation.row)] > 1,
                ),
            )
            for use, to in zip(uses, assigned, strict=True)
        ]
        if not taps:
            return
        current = Pass(terms)
        self._passes.append(current)
        if distribution is None:
            self.watch.keep(current.listen(taps))
        else:
            sampled = self.fisher == "sampled"
            derivatives = [distribution.sampled(self.generator)] if sampled else distribution.exact()
            self.watch.keep(current.differentiate(taps, derivatives, graph.roots))

    def _refuse_hidden(self, graph: Graph, parameters: Mapping[str, Tensor]) -> None:
        if "CheckpointFunction" not in graph:
            return
        hidden = [name for name, parameter in parameters.items() if id(parameter) not in graph.leaves]
        if hidden:
            reason = "hidden by reentrant activation checkpointing: use use_reentrant=False"
            self.unrecognised |= dict.fromkeys(hidden, reason)
            raise RuntimeError(
                f"reentrant activation checkpointing hides {', '.join(hidden[:3])}{' ...' if len(hidden) > 3 else ''} "
                "from K-FAC: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), which is exact, "
                "or exclude= these parameters"
            )

    def forget_open_passes(self) -> None:
        """Drops passes that no backward has reached; what was counted stays."""
        self.watch.drop_taps()
        self._passes = [current for current in self._passes if current.counted]

    @property
    def terms(self) -> float:
        """Loss terms of all passes that counted; 0 where none did."""
        return sum(current.terms for current in self._passes if current.counted)

    def commit(self, decay: float, terms: float) -> Tensor:
        """Moves the running averages of every block that was used. Returns how many factors were refused as not
        finite, on the device.
        """
        for block in self.registry:
            for orientation in block.orientations:
                if orientation.has_pending:
                    orientation.commit(decay, terms)
        finite = [flag for factor in self.registry.factors() if (flag := factor.commit(decay)) is not None]
        self.close()
        return (~torch.stack(finite)).sum()

    def close(self) -> None:
        """Forgets everything that did not reach the running averages."""
        self.watch.drop_taps()
        self._passes = []
        self.problem = ""
        for block in self.registry:
            for orientation in block.orientations:
                orientation.discard()

    def without_statistics(self) -> list[KroneckerBlock]:
        """Blocks that no pass of this window used."""
        return [block for block in self.registry if not any(o.has_pending for o in block.orientations)]


def _holders(registry: Registry) -> dict[int, int]:
    """How many blocks hold each factor."""
    count: dict[int, int] = {}
    for factor in (factor for block in registry for factor in block.factors()):
        count[id(factor)] = count.get(id(factor), 0) + 1
    return count

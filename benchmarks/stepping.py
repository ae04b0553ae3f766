"""What the ways to step cost, on steps that take no statistics, as ratios to the same step of SGD.

``python -m benchmarks.stepping --model resnet32 --size 32 --batch 128`` (on a GPU, TF32) or ``--model resnet20 --batch
32`` (on a CPU). Every way is timed over blocks of five steps, in turns with SGD; a ratio compares medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import natgrad
from natgrad.models import build

BLOCK = 5  # adaptive damping compares every fifth step
NEVER = 10**9


def ways() -> dict[str, dict[str, Any]]:
    """Options of KFAC; made anew for every model, since regions and damping have a state."""
    return {
        "K-FAC": {},
        "compiled preconditioning": {"compile_preconditioning": True},
        "raw momentum": {"raw_momentum": 0.9},
        "grafting, SGD": {"grafting": "sgd"},
        "grafting, Adam": {"grafting": "adam"},
        "trust region of the step": {"kl_clip": natgrad.TrustRegion(1e-4, of="step")},
        "exact curvature": {"kl_clip": natgrad.TrustRegion(1e-2, curvature="exact")},
        "adaptive damping": {"damping": natgrad.AdaptiveDamping(0.1)},
    }


class Loop:
    """A model, a batch and an optimizer: `block` trains a few steps and says how long one took."""

    def __init__(self, arguments: argparse.Namespace, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self._device = torch.device(arguments.device)
        self._model = build(arguments.model).to(self._device)
        self._x = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=self._device)
        self._y = torch.randint(0, 10, (arguments.batch,), device=self._device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._kfac = None
        if options is not None:
            intervals = {"factor_update_steps": NEVER, "inv_update_steps": NEVER, "solver": arguments.solver}
            self._kfac = natgrad.KFAC(self._model, **intervals, **options).attach(self._optimizer)

    def _loss(self) -> torch.Tensor:
        return functional.cross_entropy(self._model(self._x), self._y)

    def block(self) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(BLOCK):
            self._optimizer.zero_grad()
            self._loss().backward()
            if self._kfac is not None:
                self._kfac.objective = self._loss
            self._optimizer.step()
        self._wait()
        return (time.perf_counter() - start) / BLOCK

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step and its ratio to SGD's, by way."""
    sgd = Loop(arguments, None)
    sgd.block()
    result: dict[str, tuple[float, float]] = {}
    for name, options in ways().items():
        tell(name)
        loop = Loop(arguments, options)
        for _ in range(2):  # statistics, decompositions and compilation are over after these
            loop.block()
        pairs = [(sgd.block(), loop.block()) for _ in range(arguments.rounds)]
        ratio = statistics.median(own / other for other, own in pairs)
        result[name] = 1e3 * statistics.median(own for _, own in pairs), ratio
        result.setdefault("SGD", (1e3 * statistics.median(other for other, _ in pairs), 1.0))
        del loop
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What the ways to step cost.")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--solver", default="eigen", choices=["eigen", "inverse"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    console = Console()
    table = Table(
        title=f"{arguments.model}, batch {arguments.batch}, {arguments.solver}, {arguments.device}: ordinary steps",
        title_justify="left",
    )
    for heading in ("", "ms a step", "to SGD"):
        table.add_column(heading, justify="right" if heading else "left")
    with console.status("measuring") as status:
        found = measure(arguments, lambda name: status.update(f"measuring: {name}"))
    for name in ("SGD", *ways()):
        milliseconds, ratio = found[name]
        table.add_row(name, f"{milliseconds:.1f}", f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()

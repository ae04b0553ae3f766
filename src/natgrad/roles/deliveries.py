"""Statistics that a stats worker has taken, on their way into the running averages of those who train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distribute.packing import packed as folded
from natgrad.distribute.packing import unpacked as unfolded
from natgrad.distribute.union import factor_names, orientation_names, outline, unite
from natgrad.overlap.pool import DaemonPool
from natgrad.packets import packed, unpacked
from natgrad.roles.role import Role
from natgrad.roles.stats import Line
from natgrad.window import Window


def pack_statistics(window: Window, step: int) -> bytes:
    """What a window has counted, as bytes; `step` is that of the parameters that it was counted with."""
    registry = window.registry
    factors = factor_names(registry)
    return packed(
        {
            "step": step,
            "terms": window.terms,
            "blocks": outline(registry),
            "rows": {name: float(o.pending_rows) for name, o in orientation_names(registry) if o.has_pending},
            "factors": {
                name: (folded(factor.pending).cpu(), float(factor.pending_rows))
                for name, factor in factors.items()
                if factor.pending is not None
            },
        }
    )


def unpack_statistics(payload: bytes, window: Window, parameters: Mapping[str, Tensor]) -> int:
    """Adds what a stats worker has counted to what this window has; returns the step of its parameters. Both sums and
    counts are linear, so that a mean over all rows comes out.
    """
    registry = window.registry
    content = unpacked(payload)
    if content["blocks"] != outline(registry):
        unite(registry, [outline(registry), content["blocks"]], parameters)
    orientations, factors = dict(orientation_names(registry)), factor_names(registry)
    _refuse_misfit(content, orientations, factors)
    for name, rows in content["rows"].items():
        orientations[name].add_rows(rows)
    for name, (flat, rows) in content["factors"].items():
        total = factors[name].sum
        factors[name].add(unfolded(flat.to(total), total.shape), rows)
    window.accept(content["terms"])
    step: int = content["step"]
    return step


def _refuse_misfit(content: Mapping[str, Any], orientations: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
    unknown = [*(content["rows"].keys() - orientations.keys()), *(content["factors"].keys() - factors.keys())]
    if unknown:
        raise RuntimeError(
            f"a stats worker has statistics of {unknown[0]}, which is not among the blocks here: construct its KFAC "
            "with the same options"
        )


class Deliveries:
    """A gradient rank's stats workers: parameters go out, statistics come in. Nothing here waits. `on_change` is told
    of workers that are lost or back.
    """

    def __init__(self, role: Role, model: nn.Module, *, on_change: Callable[[str], None]) -> None:
        self.received = 0
        self._model = model
        self.lines = [Line(role, index, on_change=on_change) for index in role.helpers]
        self._sender = DaemonPool(1, torch_threads=1, name="natgrad-parameters")
        self._sent_at: int | None = None
        self._sending: Future[None] | None = None
        self._told = False
        self._on_change = on_change

    @property
    def alive(self) -> int:
        """How many of this rank's stats workers are connected."""
        return sum(line.alive for line in self.lines)

    def receive(self, window: Window, parameters: Mapping[str, Tensor]) -> list[int]:
        """Takes in what has come; the steps of the parameters that it was counted with."""
        steps = []
        for line in self.lines:
            while (payload := line.receive()) is not None:
                steps.append(unpack_statistics(payload, window, parameters))
        self.received += len(steps)
        return steps

    def send_if_due(self, step: int, every: int) -> None:
        """Sends the present parameters, where it is time."""
        if not self.lines or (self._sent_at is not None and step - self._sent_at < every):
            return
        if self._sending is not None:
            if not self._sending.done():
                return  # each waiting would be another copy of the model: a later step's goes instead
            if (error := self._sending.exception()) is not None and not self._told:
                self._told = True
                self._on_change(f"parameters cannot be sent to stats workers ({type(error).__name__}: {error})")
        self._sent_at = step
        # Copies on the device now; to the host, and on the way, beside training.
        state = {name: _copied(value) for name, value in self._model.state_dict().items()}
        first = next((value for value in state.values() if isinstance(value, Tensor) and value.is_cuda), None)
        ready = None if first is None else torch.cuda.current_stream(first.device).record_event()
        self._sending = self._sender.submit(self._send, step, state, ready)

    def _send(self, step: int, state: Mapping[str, Any], ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        payload = packed({name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()})
        for line in self.lines:
            line.send(step, payload)


def _copied(value: Any) -> Any:
    """Of a state, which may have more than tensors in it (`nn.Module.get_extra_state`)."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

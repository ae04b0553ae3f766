"""Ranks with fewer batches than others: ``torch.distributed.algorithms.Join([model, kfac.joinable])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel


class Joining(Joinable):
    """K-FAC's part in a `Join`: a rank that has no more batches goes on with its share of the work, as one without a
    batch, until all are done. `shadow` is one such step.
    """

    def __init__(self, wrapper: DistributedDataParallel, device: torch.device, shadow: Callable[[], None]) -> None:
        super().__init__()
        self._wrapper = wrapper
        self._device = device
        self._shadow = shadow

    @property
    def enabled(self) -> bool:
        """Whether ranks may leave early now; a `Join` that does not know of K-FAC is an error."""
        mine, theirs = self._join_config, self._wrapper._join_config
        if theirs.enable and not mine.enable:
            raise RuntimeError(
                "this Join knows the model alone, and a rank without batches would leave K-FAC waiting: use "
                "torch.distributed.algorithms.Join([model, kfac.joinable]) in place of model.join()"
            )
        if mine.enable and mine.is_first_joinable:
            raise RuntimeError("the model comes first: Join([model, kfac.joinable])")
        return bool(mine.enable)

    def join_hook(self, **options: Any) -> JoinHook:
        """What a rank does that has no more batches."""
        return _Hook(self._wrapper, self._shadow)

    @property
    def join_device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """DDP's."""
        return self._wrapper.process_group


class _Hook(JoinHook):
    def __init__(self, wrapper: DistributedDataParallel, shadow: Callable[[], None]) -> None:
        self._wrapper, self._shadow = wrapper, shadow

    def main_hook(self) -> None:
        """One step of the others; DDP's hook, which came before, knows whether it ends an accumulation."""
        if self._wrapper.require_forward_param_sync:
            self._shadow()

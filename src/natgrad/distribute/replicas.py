"""Which ranks train one model."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn

from natgrad.errors import NatgradWarning


def replicas(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """What replicates a model on several ranks; None where it is one process."""
    if not dist.is_available():
        return None
    wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    several = [wrapper for wrapper in wrappers if wrapper.process_group.size() > 1]
    if several:
        return several[0]
    if dist.is_initialized() and not wrappers and (ranks := dist.get_world_size()) > 1:
        warnings.warn(
            f"this model is not wrapped in DistributedDataParallel, so its {ranks} ranks take statistics apart, and "
            "the weights of ranks that train one model drift apart: give KFAC the wrapped one, not its .module",
            NatgradWarning,
            stacklevel=4,
        )
    return None

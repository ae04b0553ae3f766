"""Arithmetic that is not the user's model's: without gradients, and without autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


def undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """No gradients and no autocast: arithmetic keeps its precision wherever it is called from."""
    disturbed = torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)
    return _without_gradients_and_autocast(device) if disturbed else _NOTHING


@contextmanager
def _without_gradients_and_autocast(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield

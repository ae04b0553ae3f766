"""Who called a hook: torch does not say, the stack does.

Local variables are read of frames that are known by their code alone: reading those of a user's function would keep its
tensors alive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch.amp import GradScaler

_FRAMES = 100  # far enough up for any step inside a step

# The function that runs the hooks around an optimizer's step; one code object for all classes.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks belongs to a step inside a step of the same optimizer.

    torch runs the hooks of both where a subclass's step calls its base's. To whoever trains that is one step.
    """
    steps = [frame for frame in _frames() if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer]
    return len(steps) > 1


def calling_scaler() -> GradScaler | None:
    """The scaler whose step we are in."""
    for frame in _frames():
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, GradScaler):
                return caller if caller.is_enabled() else None
    return None

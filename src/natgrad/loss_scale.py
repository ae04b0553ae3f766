"""Losses that a `torch.amp.GradScaler` has multiplied: undone in gradients and statistics, skipped with the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from natgrad.callers import calling_scaler
from natgrad.foreach import multiply_all


class LossScale:
    """What a scaler does to one step. Without one nothing is scaled."""

    def __init__(self, scaler: Any = None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._scaler = scaler

    @property
    def _active(self) -> GradScaler | None:
        return self._scaler if self._scaler is not None and self._scaler.is_enabled() else None

    @property
    def known(self) -> bool:
        """Whether the user has named a scaler."""
        return self._scaler is not None

    @property
    def factor(self) -> Tensor | None:
        """S, by which the present step's losses were multiplied; on the device."""
        return None if self._active is None else self._active._get_scale_async()

    @property
    def period(self) -> object:
        """Another object after every ``scaler.update()``: what was seen before it belongs to a step that is over."""
        return None if self._active is None else self._active._per_optimizer_states

    def refuse_scaled(self, optimizer: torch.optim.Optimizer | None) -> None:
        """K-FAC's own `step` must see gradients that the scaler has unscaled already."""
        if self._active is None:
            return
        if optimizer is None:
            raise ValueError(
                "grad_scaler= needs the optimizer that it steps: pass optimizer= too, or attach(optimizer)"
            )
        if not self._active._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            raise RuntimeError(
                "call grad_scaler.unscale_(optimizer) before kfac.step(): the gradients are still scaled"
            )

    def refuse_unknown(self) -> None:
        """An attached K-FAC whose optimizer is stepped by a scaler that nobody told it of would take the scale for
        curvature.
        """
        if self._scaler is None and calling_scaler() is not None:
            raise RuntimeError(
                "a GradScaler calls this optimizer: kfac.attach(optimizer, grad_scaler=scaler), so that the loss's "
                "scale is not taken for curvature"
            )

    def unscale(self, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        """Unscales gradients that a fused optimizer would unscale itself, after K-FAC's turn; returns whether the
        scaler found all gradients finite, on the device, where it has looked.
        """
        scale = getattr(optimizer, "grad_scale", None)
        if optimizer is not None and isinstance(scale, Tensor):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            multiply_all(gradients, scale.double().reciprocal())
            optimizer.grad_scale = None  # type: ignore[attr-defined] # the kernel has nothing left to undo
        if self._active is None or optimizer is None:
            return None
        found = list(self._active._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        return None if not found else torch.stack([flag.to(found[0].device) for flag in found]).sum() == 0

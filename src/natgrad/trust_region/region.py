"""The user's trust region: how large the KL divergence of a step may be, and how it is measured."""

from __future__ import annotations

from typing import Any

from natgrad.options import Hyperparameter, Number, choice

MEASURED = ("gradient", "step")
CURVATURES = ("factored", "exact")


class TrustRegion:
    """Bounds the KL divergence of every step: δᵀFδ ≤ `cap` for the step δ, whose predicted KL is then ½ `cap`.

    With the learning rate as η_max this is Ba et al. 2017, eq. 14, ``η = min(η_max, √(c_k / vᵀFv))``, and with a
    constant cap Pauloski et al. 2020, eq. 18.

    Args:
        cap: c_k or κ, a number or a callable of the step: `natgrad.schedules` has the papers' decays.
        of: ``"gradient"``: δ = −α v, what plain SGD would make of the preconditioned gradient v. ``"step"``: the step
            that the optimizer has really taken, momentum, rescaling and weight decay included; the weights are then
            pulled back along it. (The gradient that it gets is bounded too, by the blocks: momentum must not remember
            what no step may be.) It needs the optimizer, one copy of the parameters, and two products a layer.
        curvature: ``"factored"``: F̂ of the blocks with its damping (vᵀF̂v = vᵀ∇ is free for the gradient).
            ``"exact"``: also the Fisher of this batch itself, of the distribution that ``predictive=`` names, by one
            forward-mode pass through ``kfac.objective``. The factored bound stays: a batch that the model is sure of
            has hardly any Fisher of its own.
    """

    def __init__(self, cap: Number, *, of: str = "gradient", curvature: str = "factored") -> None:
        self.of = choice("of", of, MEASURED)
        self.curvature = choice("curvature", curvature, CURVATURES)
        self.cap = Hyperparameter("kl_clip", cap, above=0)

    def __repr__(self) -> str:
        return f"TrustRegion({self.cap.value!r}, of={self.of!r}, curvature={self.curvature!r})"


def checked_region(kl_clip: Any) -> TrustRegion | None:
    """The option `kl_clip`: a trust region, its cap alone, or None."""
    if isinstance(kl_clip, str | bool):
        raise TypeError(
            "kl_clip must be a number, a callable of the step, a natgrad.TrustRegion, or None for no clip; got "
            f"{kl_clip!r}"
        )
    return kl_clip if kl_clip is None or isinstance(kl_clip, TrustRegion) else TrustRegion(kl_clip)

"""What is remembered of raw gradients from step to step: momentum, and Adam's moments for grafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.foreach import multiply_all
from natgrad.options import choice

GRAFTED = ("sgd", "adam")


class Grafting:
    """K-FAC's direction with the length, layer by layer, that another optimizer's update would have: ``grafting=``.

    `of` is ``"sgd"`` (the raw gradient's length) or ``"adam"`` (the length of Adam's update, with `betas` and `eps`),
    so that a learning rate tuned for that optimizer carries over. Parameters without a block get that update itself.
    """

    def __init__(self, of: str, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.of = choice("grafting", of, GRAFTED)
        if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas!r}")
        if not isinstance(eps, int | float) or eps <= 0:
            raise ValueError(f"eps must be a number above 0, got {eps!r}")
        self.betas, self.eps = betas, eps

    def __repr__(self) -> str:
        return f"Grafting({self.of!r}, betas={self.betas}, eps={self.eps:g})"


def checked_grafting(grafting: Any) -> Grafting | None:
    """The option `grafting`: None, a word, or the whole."""
    return grafting if grafting is None or isinstance(grafting, Grafting) else Grafting(grafting)


class Buffers:
    """Running averages of raw gradients, by parameter name. A step that is not finite leaves them as they are."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {"momentum": {}, "first": {}, "second": {}, "count": {}}

    def average(self, gradients: Mapping[str, Tensor], momentum: float, finite: Tensor) -> None:
        """m ← μ m + ∇, in place of each gradient, which is zero where the step is not `finite`."""
        own = list(gradients.values())
        sums = self._own("momentum", gradients)
        multiply_all(sums, _unless_finite(finite, momentum))
        torch._foreach_add_(sums, own)
        torch._foreach_copy_(own, sums)

    def adam(self, gradients: Mapping[str, Tensor], grafting: Grafting, finite: Tensor) -> dict[str, Tensor]:
        """Adam's update of each parameter, for a learning rate of 1."""
        own = list(gradients.values())
        first, second = self._own("first", gradients), self._own("second", gradients)
        beta, gamma = grafting.betas
        multiply_all(first, _unless_finite(finite, beta))
        torch._foreach_add_(first, own, alpha=1 - beta)
        multiply_all(second, _unless_finite(finite, gamma))
        torch._foreach_addcmul_(second, own, own, value=1 - gamma)
        counts = [
            self._kept["count"].setdefault(name, torch.zeros((), dtype=torch.float64, device=g.device))
            for name, g in gradients.items()
        ]
        torch._foreach_add_(counts, finite.to(counts[0].dtype))
        # Before the first finite step both averages are zero, and 0 / 0 would be NaN.
        steps = torch.stack(counts).clamp(min=1)
        updates = {}
        for name, step, m, v in zip(gradients, steps.unbind(), first, second, strict=True):
            root = (v / (1 - gamma**step).to(v.dtype)).sqrt_().add_(grafting.eps)
            updates[name] = (m / (1 - beta**step).to(m.dtype)).div_(root)
        return updates

    def _own(self, kind: str, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        kept = self._kept[kind]
        for name, gradient in gradients.items():
            if name not in kept or kept[name].shape != gradient.shape:
                kept[name] = torch.zeros_like(gradient)
        return [kept[name] for name in gradients]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint."""
        return {kind: {name: tensor.clone() for name, tensor in kept.items()} for kind, kept in self._kept.items()}

    @staticmethod
    def load(state: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, Tensor]) -> Buffers:
        """New ones from a checkpoint, checked against the model's parameters."""
        loaded = Buffers()
        for kind in loaded._kept:
            for name, tensor in state[kind].items():
                parameter = parameters.get(name)
                if parameter is None:
                    raise ValueError(f"the checkpoint has {kind} of {name}, which the model does not have")
                if tensor.dim() > 0 and tensor.shape != parameter.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(parameter.shape)}, its {kind} in the checkpoint {tuple(tensor.shape)}"
                    )
                loaded._kept[kind][name] = tensor.to(parameter.device).clone()
        return loaded


def _unless_finite(finite: Tensor, factor: float) -> Tensor:
    """A factor on the device, 1 where the step does not count."""
    return torch.where(finite, factor, torch.ones((), dtype=torch.float64, device=finite.device))


def same_norms(directions: Tensor, like: Tensor, counts: Sequence[int]) -> Tensor:
    """What each of (K, rows, columns) is multiplied with, so that every member has the norm of its counterpart.

    A member has `counts` entries of the stack; the result is (K,), 0 for a direction that is zero.
    """
    squares = torch.stack([tensor.square().sum((1, 2)) for tensor in (directions, like)])
    if any(count > 1 for count in counts):
        sums = torch.stack([part.sum(1) for part in squares.split(list(counts), dim=1)], dim=1)
        repeats = torch.tensor(counts, device=sums.device)
        squares = sums.repeat_interleave(repeats, dim=1, output_size=sum(counts))
    own, wanted = squares
    return torch.where(own > 0, (wanted / own).sqrt(), 0.0)

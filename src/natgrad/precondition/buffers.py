"""What is remembered of raw gradients from step to step: momentum, and Adam's moments for grafting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.foreach import multiply_all
from natgrad.options import choice, refuse_class
from natgrad.stored import refuse_not_finite, stored_tensor

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
    refuse_class("grafting", grafting)
    return grafting if grafting is None or isinstance(grafting, Grafting) else Grafting(grafting)


class Buffers:
    """Running averages of raw gradients, by parameter name, in at least 32 bits. A step that is not finite leaves them
    as they are.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {"momentum": {}, "first": {}, "second": {}}
        # How many gradients are in Adam's averages, on the device: one count for parameters with the same past.
        self._counts: dict[str, Tensor] = {}

    def average(self, gradients: Mapping[str, Tensor], momentum: float, finite: Tensor) -> None:
        """m ← μ m + ∇, in place of each gradient, which is zero where the step is not `finite`."""
        sums = self._own("momentum", gradients)
        multiply_all(sums, _unless_finite(finite, momentum))
        torch._foreach_add_(sums, _wide(gradients.values()))
        torch._foreach_copy_(list(gradients.values()), sums)

    def adam(self, gradients: Mapping[str, Tensor], grafting: Grafting, finite: Tensor) -> dict[str, Tensor]:
        """Adam's update of each parameter, for a learning rate of 1."""
        own = _wide(gradients.values())
        first, second = self._own("first", gradients), self._own("second", gradients)
        beta, gamma = grafting.betas
        multiply_all(first, _unless_finite(finite, beta))
        torch._foreach_add_(first, own, alpha=1 - beta)
        multiply_all(second, _unless_finite(finite, gamma))
        torch._foreach_addcmul_(second, own, own, value=1 - gamma)
        roots, updates = ([tensor.clone() for tensor in some] for some in (second, first))
        for count, numbers in self._cohorts(gradients, finite):
            count += finite
            # Before the first finite step both averages are zero, and 0 / 0 would be NaN.
            steps = count.clamp(min=1)
            multiply_all([updates[number] for number in numbers], 1 / (1 - beta**steps))
            multiply_all([roots[number] for number in numbers], 1 / (1 - gamma**steps))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, grafting.eps)
        torch._foreach_div_(updates, roots)
        return dict(zip(gradients, updates, strict=True))

    def _cohorts(self, gradients: Mapping[str, Tensor], finite: Tensor) -> list[tuple[Tensor, list[int]]]:
        """The places of gradients with the same past, and their common count; who has no gradient now stays behind."""
        started = torch.zeros((), dtype=torch.float64, device=finite.device)
        places: dict[int, list[int]] = {}
        names = list(gradients)
        for number, name in enumerate(names):
            places.setdefault(id(self._counts.setdefault(name, started)), []).append(number)
        cohorts = []
        for numbers in places.values():
            count = self._counts[names[numbers[0]]]
            if sum(other is count for other in self._counts.values()) > len(numbers):
                count = count.clone()
                self._counts |= {names[number]: count for number in numbers}
            cohorts.append((count, numbers))
        return cohorts

    def _own(self, kind: str, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        kept = self._kept[kind]
        for name, gradient in gradients.items():
            if name not in kept:
                kept[name] = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        return [kept[name] for name in gradients]

    def forget(self, names: Iterable[str]) -> None:
        """Parameters that are others now have no past."""
        for name in names:
            for kept in (*self._kept.values(), self._counts):
                kept.pop(name, None)

    def state(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint; waits for the device where there are counts."""
        tensors = {kind: {name: tensor.clone() for name, tensor in kept.items()} for kind, kept in self._kept.items()}
        return {**tensors, "count": {name: int(count) for name, count in self._counts.items()}}

    @staticmethod
    def load(state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Tensor]) -> Buffers:
        """New ones from a checkpoint, checked against the model's parameters."""
        loaded = Buffers()
        for kind, kept in loaded._kept.items():
            for name, tensor in state[kind].items():
                parameter = parameters.get(name)
                if parameter is None:
                    raise ValueError(f"the checkpoint has {kind} of {name}, which the model does not have")
                checked = stored_tensor(f"{kind} of {name}", tensor, tuple(parameter.shape))
                kept[name] = checked.to(parameter.device, copy=True)
            refuse_not_finite({f"{kind} of {name}": tensor for name, tensor in kept.items()})
        cohorts: dict[int, Tensor] = {}
        for name, count in state["count"].items():
            fresh = torch.tensor(float(count), dtype=torch.float64, device=parameters[name].device)
            loaded._counts[name] = cohorts.setdefault(count, fresh)
        return loaded


def _wide(gradients: Iterable[Tensor]) -> list[Tensor]:
    return [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]


def _unless_finite(finite: Tensor, factor: float) -> Tensor:
    """A factor on the device, 1 where the step does not count."""
    return torch.where(finite, factor, torch.ones((), dtype=torch.float64, device=finite.device))


def same_norms(directions: Tensor, like: Tensor, members: Tensor | None) -> Tensor:
    """What each of (K, rows, columns) is multiplied with, so that every member has the norm of its counterpart.

    `members` (K,) says which entries belong together, None that each is a member. (K,), 0 for directions that are zero.
    """
    squares = torch.stack([tensor.square().sum((1, 2)) for tensor in (directions, like)])
    if members is not None:
        squares = torch.zeros_like(squares).index_add_(1, members, squares).index_select(1, members)
    own, wanted = squares
    return torch.where(own > 0, (wanted / own).sqrt(), 0.0)

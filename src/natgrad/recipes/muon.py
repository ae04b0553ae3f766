"""torch's Muon, which takes matrices only, together with AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for the matrices of linear layers and attention but the last of them, AdamW for the rest.

    One learning rate serves both: Muon's updates are scaled to the size of AdamW's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        matrices, others = split(model)
        if not matrices:
            raise ValueError("torch's Muon is for the matrices of linear layers but the last, and this model has none")
        muon = torch.optim.Muon(
            matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas) if others else None
        self._inner: dict[str, torch.optim.Optimizer] = {"muon": muon, **({"adamw": adamw} if adamw else {})}
        super().__init__([{"params": [*matrices, *others]}], {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        """Whoever changes a learning rate changes that of the two inside."""
        self.param_groups = [group for inner in self._inner.values() for group in inner.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner.values():
            inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Those of both."""
        return {name: inner.state_dict() for name, inner in self._inner.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        for name, inner in self._inner.items():
            inner.load_state_dict(state_dict[name])
        self._share_groups()


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices that Muon is for, and all other parameters: convolutions, vectors, tables, and the last layer's.

    The last layer is the one that the model registers last.
    """
    kinds = (nn.Linear, nn.MultiheadAttention)
    found = [one for module in model.modules() if isinstance(module, kinds) for one in module.parameters(recurse=False)]
    matrices = list(dict.fromkeys(one for one in found if one.ndim == 2 and one.requires_grad))[:-1]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    chosen = {id(one): one for one in matrices if id(one) not in tables}  # a tied head is a table
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(chosen.values()), [one for one in parameters if id(one) not in chosen]

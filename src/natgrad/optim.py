"""Optimizers of torch.optim with K-FAC inside, for code that wants one object::

    optimizer = natgrad.optim.KFACSGD(model, lr=0.1, momentum=0.5, damping=1e-3)

They do what the optimizer of that name does with a `natgrad.KFAC` attached, and are no more than that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.kfac import KFAC
from natgrad.options import refuse_unknown

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _WithKFAC(torch.optim.Optimizer):
    """Put before a torch.optim class: K-FAC preconditions in front of that class's step."""

    kfac: KFAC

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        *,
        params: Parameters | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            hint = "; parameters and groups go into params="
            raise TypeError(f"{name} takes the model itself, an nn.Module, got {type(model).__name__}{hint}")
        if lr is not None:
            options["lr"] = lr
        if callable(lr):
            raise TypeError(f"{name}: lr is a number; a torch.optim.lr_scheduler changes it while training")
        base = _base_of(type(self))
        of_base, of_kfac = _split_options(name, options, base)
        super().__init__(model.parameters() if params is None else params, **of_base)
        self.kfac = KFAC(model, **of_kfac)
        try:
            self.kfac.attach(self, grad_scaler=grad_scaler)
        except Exception:
            self.kfac.detach()  # its hooks would outlive it for as long as the error is looked at
            raise

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and under ``"kfac"`` that of K-FAC; loads with ``weights_only=True``."""
        return {**super().state_dict(), "kfac": self.kfac.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a `state_dict`. One without ``"kfac"``, as plain optimizers and torch.distributed.checkpoint
        make it, leaves K-FAC as it is: in a new optimizer, without statistics. One that does not fit raises, and
        changes nothing.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        super().load_state_dict(state_dict)
        if "kfac" in state_dict:
            try:
                self.kfac.load_state_dict(state_dict["kfac"])
            except Exception:
                vars(self).update(before)
                raise

    def __reduce__(self) -> str:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it belongs to one model. Construct one for the copy "
            "and carry everything over with state_dict() and load_state_dict()"
        )


class KFACSGD(_WithKFAC, torch.optim.SGD):
    """`torch.optim.SGD` with K-FAC inside.

    Args:
        model: any module; DDP and compiled models too.
        lr: the learning rate.
        params: parameters or parameter groups with their own options, as for `torch.optim.SGD`; by default all of the
            model's.
        grad_scaler: the scaler that ``scaler.step(optimizer)`` is called on; see `natgrad.KFAC.attach`.
        **options: of `torch.optim.SGD` (``momentum``, ``weight_decay``, ``nesterov``, ``foreach``, ``fused``,
            ...) and of `natgrad.KFAC` (``damping``, ``kl_clip``, ``fisher``, ...), by name.

    Attributes:
        kfac: the `natgrad.KFAC` inside, with its ``report()``, ``metrics()``, ``targets``, ``capture()``.
    """


class KFACAdam(_WithKFAC, torch.optim.Adam):
    """`torch.optim.Adam` with K-FAC inside; arguments as for `KFACSGD`, with Adam's options in place of SGD's."""


class KFACAdamW(_WithKFAC, torch.optim.AdamW):
    """`torch.optim.AdamW` with K-FAC inside; arguments as for `KFACSGD`, with AdamW's options in place of SGD's."""


def _base_of(cls: type[_WithKFAC]) -> type[torch.optim.Optimizer]:
    """The torch.optim class that K-FAC is put before."""
    order = cls.__mro__
    base: type[torch.optim.Optimizer] = order[order.index(_WithKFAC) + 1]
    return base


def _split_options(
    name: str, options: dict[str, Any], base: type[torch.optim.Optimizer]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of the base and of KFAC; the learning rate is the base's."""
    of_base = inspect.signature(base).parameters.keys() - {"params"}
    of_kfac = inspect.signature(KFAC).parameters.keys() - {"model", "optimizer"} - of_base
    known = of_base | of_kfac | {"params", "grad_scaler"}
    refuse_unknown(name, options, known, otherwise=f" ({base.__name__}'s and KFAC's are known)")
    return (
        {option: value for option, value in options.items() if option in of_base},
        {option: value for option, value in options.items() if option in of_kfac},
    )

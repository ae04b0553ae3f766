"""Fishers, losses and loops that the tests compare K-FAC with; nothing here uses natgrad's own mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import natgrad

Loss = Callable[[Any], Tensor]


def one_step(model: nn.Module, inputs: Any, loss: Loss, **options: Any) -> natgrad.KFAC:
    """One forward and backward pass and one K-FAC step; gradients end up preconditioned."""
    options.setdefault("kl_clip", None)
    kfac = natgrad.KFAC(model, **options)
    run(model, inputs, loss)
    kfac.step()
    return kfac


def run(model: nn.Module, inputs: Any, loss: Loss) -> None:
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    model.zero_grad()
    loss(model(*arguments)).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def jacobian(output: Tensor, parameters: list[Tensor]) -> Tensor:
    """(elements of the output, elements of the parameters)."""
    rows = []
    for element in output.flatten():
        grads = torch.autograd.grad(element, parameters, retain_graph=True, allow_unused=True)
        rows.append(flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]))
    return torch.stack(rows)


def exact_fisher(output: Tensor, parameters: list[Tensor], predictive: str, terms: int) -> Tensor:
    """(1/N) Σ over predictions of Jᵀ H J, classes on the last axis."""
    jac = jacobian(output, parameters).reshape(-1, output.shape[-1], sum(p.numel() for p in parameters))
    values = output.detach().reshape(-1, output.shape[-1])
    if predictive == "categorical":
        p = values.softmax(-1)
        hessian = p.diag_embed() - p[:, :, None] * p[:, None, :]
    elif predictive == "bernoulli":
        p = values.sigmoid()
        hessian = (p * (1 - p)).diag_embed()
    else:
        hessian = torch.ones_like(values).diag_embed()
    return torch.einsum("nap,nab,nbq->pq", jac, hessian, jac) / terms


def block_of(kfac: natgrad.KFAC, name: str) -> Any:
    """The block whose first name is this."""
    return next(block for block in kfac.blocks if block.names[0] == name)


def kron_block(scale: float, a: Tensor, g: Tensor, *, bias: bool) -> Tensor:
    """scale · A ⊗ G for a weight stored (out, in) and, with `bias`, the bias's rows and columns after it."""
    dense = scale * torch.kron(g, a)
    inputs, outputs = a.shape[0], g.shape[0]
    if not bias:
        return dense
    index = torch.arange(outputs * inputs).reshape(outputs, inputs)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    return dense[order][:, order]


class Hand:
    """A source of time that moves when it is told to; the fixture ``hand`` puts one in the place of the clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds

"""Factors computed by hand: module hooks and explicit loops, sharing no code with the library."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn


class Recorder:
    """Inputs and output derivatives of modules, over all their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[dict[str, Tensor]]] = {}
        self.handles = [
            m.register_forward_hook(self._hook(name), with_kwargs=True) for name, m in model.named_modules()
        ]

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = args[0] if args else next(iter(kwargs.values()))
            if isinstance(output, Tensor) and output.requires_grad and isinstance(first, Tensor):
                call = {"input": first.detach().clone()}
                # A tensor hook, unlike retain_grad, sees the derivative of the output before an in-place activation.
                output.register_hook(lambda grad: call.update(derivative=grad.detach().clone()))
                self.calls.setdefault(name, []).append(call)

        return hook

    def rows(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """(input, derivative) of every call that got a derivative."""
        return [(call["input"], call["derivative"]) for call in self.calls[name] if "derivative" in call]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def with_one(a: Tensor) -> Tensor:
    return torch.cat([a, torch.ones_like(a[:, :1])], dim=1)


def kronecker(a: Tensor, g: Tensor, terms: float) -> tuple[Tensor, Tensor, float]:
    """(A, G, s) of rows a and derivatives g of a loss that is a mean over `terms` terms."""
    rows = a.shape[0]
    g = g * terms
    return a.mT @ a / rows, g.mT @ g / rows, rows / terms


def dense(a: Tensor, g: Tensor, terms: float) -> Tensor:
    """s · G ⊗ A: a weight stored (out, in), row by row."""
    A, G, s = kronecker(a, g, terms)
    return s * torch.kron(G, A)


def bias_last(block: Tensor, outputs: int) -> Tensor:
    """Reorders a block of [W | b], row by row, into W flattened, then b."""
    inputs = block.shape[0] // outputs
    index = torch.arange(block.shape[0]).reshape(outputs, inputs)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    return block[order][:, order]


def patches(module: Any, x: Tensor) -> Tensor:
    """What each output place of a convolution sees, by loops: (groups, N · places, C / groups · kernel)."""
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    axes = len(kernel)
    groups = module.groups
    cases, channels = x.shape[:2]
    per_group = channels // groups
    with torch.no_grad():
        places = module(x).shape[2:]
    if module.padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    elif module.padding == "valid":
        padding = (0,) * axes
    else:
        padding = module.padding
    rows = []
    for case in range(cases):
        for place in product(*map(range, places)):
            row = torch.zeros(groups, per_group, *kernel, dtype=x.dtype)
            for offset in product(*map(range, kernel)):
                position = []
                for axis in range(axes):
                    if transposed:
                        reach = place[axis] + padding[axis] - offset[axis] * dilation[axis]
                        index = reach // stride[axis] if reach % stride[axis] == 0 else -1
                    else:
                        index = place[axis] * stride[axis] - padding[axis] + offset[axis] * dilation[axis]
                        if module.padding_mode == "circular":
                            index %= x.shape[2 + axis]
                    position.append(index)
                if all(0 <= i < n for i, n in zip(position, x.shape[2:], strict=True)):
                    row[(slice(None), slice(None), *offset)] = x[(case, slice(None), *position)].reshape(
                        groups, per_group
                    )
            rows.append(row.reshape(groups, -1))
    return torch.stack(rows, dim=1)


def output_rows(module: Any, grad: Tensor) -> Tensor:
    """(N, O, *places) → (groups, N · places, O / groups)."""
    cases, channels = grad.shape[:2]
    grouped = grad.reshape(cases, module.groups, channels // module.groups, -1)
    return grouped.permute(1, 0, 3, 2).reshape(module.groups, -1, channels // module.groups)

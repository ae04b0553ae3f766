"""What a model returned: its tensors, and which of them is the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclass-like outputs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
    elif hasattr(output, "__dict__"):
        for value in vars(output).values():
            if isinstance(value, Tensor | Mapping | list | tuple):
                yield from tensors(value)


def attached_tensors(output: Any) -> list[Tensor]:
    """The tensors of an output through which gradients flow."""
    return [tensor for tensor in tensors(output) if tensor.requires_grad and tensor.grad_fn is not None]


def depends(tensor: Tensor) -> bool:
    """Whether a tensor depends on the parameters, as backward or forward mode sees it."""
    return tensor.requires_grad or forward_ad.unpack_dual(tensor).tangent is not None


def prediction(output: Any) -> Tensor | None:
    """The tensor that holds the predictions: the output itself, its `logits`, or the first that depends on the
    parameters and is not a scalar.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, Tensor):
        return output if output.dim() > 0 else None
    return next((tensor for tensor in tensors(output) if depends(tensor) and tensor.dim() > 0), None)

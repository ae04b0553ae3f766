"""A model's parameters: their names, and what must be true of them before K-FAC begins."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from natgrad.capture.choices import SHARING, Choices, split_map
from natgrad.capture.watch import clean_name, innermost
from natgrad.options import choice, whole_number


def any_nonzero(tensors: Iterable[Tensor | None]) -> bool:
    """Asks the device; for the rare case that statistics are missing."""
    present = (tensor for tensor in tensors if tensor is not None)
    return any(bool((t.coalesce().values() if t.is_sparse else t).count_nonzero() > 0) for t in present)


def patterns(option: str, wanted: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Name patterns, each of which must match something."""
    listed = (wanted,) if isinstance(wanted, str) else tuple(wanted) if isinstance(wanted, Iterable) else None
    if listed is None or not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"{option} takes name patterns, such as ['head.*', 'embed.weight'], got {wanted!r}")
    known = list(names)
    for pattern in listed:
        if not any(fnmatch(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.3)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{option}={pattern!r} matches no parameter of this model{hint}")
    return listed


def make_choices(
    parameters: Mapping[str, Tensor],
    sharing: str | Mapping[str, str],
    batch_axis: int | Mapping[str, int] | None,
    doubly_factored: Iterable[str] | Mapping[str, Sequence[int]],
    doubly_factored_above: int | None,
    vectors: str,
) -> Choices:
    """The user's choices by name pattern; what is not a dict is meant for all parameters."""
    by_name = dict(sharing) if isinstance(sharing, Mapping) else {"*": sharing}
    axes = dict(batch_axis) if isinstance(batch_axis, Mapping) else {} if batch_axis is None else {"*": batch_axis}
    maps = dict(doubly_factored) if isinstance(doubly_factored, Mapping) else None
    if maps is None:
        maps = dict.fromkeys(patterns("doubly_factored", doubly_factored, parameters), ())
    for option, values in (("sharing", by_name), ("batch_axis", axes), ("doubly_factored", maps)):
        patterns(option, [pattern for pattern in values if pattern != "*"], parameters)
    for value in by_name.values():
        choice("sharing", value, SHARING)
    for axis in axes.values():
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise TypeError(f"batch_axis must be a whole number, got {axis!r}")
    shapes = {pattern: _map_shape(pattern, shape, parameters) for pattern, shape in maps.items()}
    whole_number("doubly_factored_above", doubly_factored_above, none="never")
    return Choices(by_name, axes, shapes, doubly_factored_above, vectors)


def _map_shape(pattern: str, shape: Any, parameters: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of a feature map that the inputs of the matching weights can be; () where the graph shall tell."""
    sizes = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else None
    if sizes is None or any(not isinstance(size, int) or size < 1 for size in sizes) or len(sizes) == 1:
        raise ValueError(f"doubly_factored[{pattern!r}] must be a feature map's shape, (C, H, W), got {shape!r}")
    matrices = {name: p for name, p in parameters.items() if fnmatch(name, pattern) and p.dim() > 1}
    if not matrices:
        raise ValueError(f"doubly_factored={pattern!r} names no matrix: it is for the weights of linear layers")
    for name, parameter in matrices.items() if sizes else ():
        if parameter.numel() % math.prod(sizes):
            raise ValueError(
                f"doubly_factored: {name} of shape {tuple(parameter.shape)} has no inputs of a feature map {sizes}"
            )
    if sizes and min(split_map(sizes)) == 1:
        raise ValueError(f"doubly_factored[{pattern!r}]: {sizes} has one channel or one place, nothing to factor apart")
    return sizes


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under their names, without what wrappers put into these."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that K-FAC can work on, or an error that says why it cannot."""
    parameters = parameters_of(innermost(model))
    trainable = [p for p in parameters.values() if p.requires_grad]
    if not trainable:
        raise ValueError("this model has no trainable parameters (all are missing or have requires_grad=False)")
    devices = {str(p.device): name for name, p in parameters.items()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device: {where}")
    if "meta" in devices:
        raise ValueError("the parameters are on the meta device: materialise the model before constructing KFAC")
    return parameters

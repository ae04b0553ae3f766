"""Ranks that were started with different models, options or versions, told before anything is computed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.distribute.channel import Channel, OutOfStepError

CONSTRUCTION = "the construction of KFAC"


def refuse_disagreement(channel: Channel, parameters: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Raises on all ranks, with the same words, where one differs from the first."""
    mine = {
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "device": next(iter(parameters.values())).device.type if parameters else "cpu",
        **{
            f"the model's parameter {name}": f"{tuple(one.shape)} {one.dtype}{'' if one.requires_grad else ', frozen'}"
            for name, one in parameters.items()
        },
        **{f"the option {name}": described(value) for name, value in options.items()},
    }
    told = channel.meet(CONSTRUCTION, mine)
    for rank, other in enumerate(told):
        if "problem" in other:
            raise OutOfStepError(f"rank {rank} could not construct its KFAC: {other['problem']}")
    for rank, other in enumerate(told):
        for what in dict.fromkeys([*told[0], *other]):
            here, there = told[0].get(what, "missing"), other.get(what, "missing")
            if here != there:
                raise ValueError(f"the ranks disagree on {what}: on rank 0 it is {here}, on rank {rank} it is {there}")


def described(value: Any) -> str:
    """An option's value in words that are the same in all processes that were given the same."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(one)}" for key, one in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return described(sorted(value, key=repr))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(described, value)) + "]"
    text = repr(value)
    if " at 0x" not in text:
        return text
    if is_dataclass(value) and not isinstance(value, type):
        # One of its fields has an address: the others still count.
        parts = ", ".join(f"{one.name}={described(getattr(value, one.name))}" for one in fields(value))
        return f"{type(value).__qualname__}({parts})"
    return getattr(value, "__qualname__", type(value).__qualname__)

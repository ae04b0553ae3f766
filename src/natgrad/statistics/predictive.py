"""The distributions that a model's output stands for, and the derivatives that sampled and exact Fishers need.

A `Predicted` knows one output tensor's distribution. It yields derivatives of the *summed* negative log-likelihood
with respect to that tensor: for drawn targets
(sampled), or one set per output element whose outer products add up to the expectation over all targets (exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributions as distributions
from torch import Tensor

PREDICTIVES = ("categorical", "bernoulli", "gaussian")
Predictive = str | Callable[[Any], distributions.Distribution]


def class_axis(shape: torch.Size) -> int:
    """(N, classes), (N, length, classes), or (N, classes, height, width, ...): where the classes are."""
    return 1 if len(shape) >= 4 else -1


def count_predictions(output: Tensor) -> int:
    """How many predictions an output holds: its elements over the class axis."""
    return _count(output.shape, class_axis(output.shape))


def _count(shape: torch.Size, axis: int) -> int:
    return shape.numel() if len(shape) <= 1 else shape.numel() // max(1, shape[axis])


@dataclass(frozen=True)
class Derivative:
    """A derivative of the summed negative log-likelihood with respect to `root`."""

    root: Tensor
    gradient: Tensor


class Predicted(Protocol):
    """The distribution of one output."""

    @property
    def terms(self) -> float:
        """How many predictions it holds."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """For targets drawn from the distribution."""

    def exact(self) -> Iterator[Derivative]:
        """A set whose outer products sum to the expectation over targets."""


class _Elements:
    """Common to the built-in distributions: a root with its classes moved last, (cases, places, classes)."""

    def __init__(self, root: Tensor, axis: int | None = None) -> None:
        self.root = root
        self._axis = class_axis(root.shape) if axis is None else axis

    @property
    def terms(self) -> float:
        return _count(self.root.shape, self._axis)

    @property
    def _values(self) -> Tensor:
        root = self.root.detach()
        last = root.movedim(self._axis, -1) if root.dim() > 1 else root.unsqueeze(-1)
        wide = last if last.dtype == torch.float64 else last.float()
        return wide.reshape(wide.shape[0], -1, wide.shape[-1])

    def _derivative(self, gradient: Tensor) -> Derivative:
        root = self.root
        if root.dim() <= 1:
            return Derivative(root, gradient.reshape(root.shape).to(root.dtype))
        moved = root.movedim(self._axis, -1).shape
        return Derivative(root, gradient.reshape(moved).movedim(-1, self._axis).to(root.dtype))

    def _columns(self, columns: Tensor) -> Iterator[Derivative]:
        """One derivative per place and column of (cases, places, classes, columns); places are never mixed.

        Each case gets a random sign. It cancels in every outer product of one case with itself, and keeps cases
        uncorrelated where a derivative is summed over them (a position embedding, batch norm).
        """
        generator = torch.Generator().manual_seed(0)
        for place in range(columns.shape[1]):
            for column in range(columns.shape[3]):
                signs = torch.randint(0, 2, (columns.shape[0], 1), generator=generator) * 2 - 1
                gradient = torch.zeros_like(columns[..., 0])
                gradient[:, place] = columns[:, place, :, column] * signs.to(columns)
                yield self._derivative(gradient)


class _Categorical(_Elements):
    def sampled(self, generator: torch.Generator | None) -> Derivative:
        p = self._values.softmax(-1)
        # A NaN batch must not end the run here: it draws anything, its derivative stays NaN, and is refused later.
        safe = torch.where(torch.isfinite(p), p, 1.0)
        drawn = torch.multinomial(safe.flatten(0, 1), 1, generator=generator).reshape(*p.shape[:-1], 1)
        return self._derivative(p.scatter_add(-1, drawn, -torch.ones_like(p[..., :1])))

    def exact(self) -> Iterator[Derivative]:
        p = self._values.softmax(-1)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        yield from self._columns((p.unsqueeze(-1) - identity) * p.sqrt().unsqueeze(-2))


class _Bernoulli(_Elements):
    def sampled(self, generator: torch.Generator | None) -> Derivative:
        p = self._values.sigmoid()
        return self._derivative(p - torch.bernoulli(p.nan_to_num(0.5), generator=generator))

    def exact(self) -> Iterator[Derivative]:
        p = self._values.sigmoid()
        yield from self._columns((p * (1 - p)).sqrt().diag_embed())


class _Gaussian(_Elements):
    def sampled(self, generator: torch.Generator | None) -> Derivative:
        mean = self._values
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return self._derivative(torch.where(torch.isfinite(mean), noise, torch.nan))

    def exact(self) -> Iterator[Derivative]:
        yield from self._columns(torch.ones_like(self._values).diag_embed())


_BUILT_IN: dict[str, type[_Categorical] | type[_Bernoulli] | type[_Gaussian]] = {
    "categorical": _Categorical,
    "bernoulli": _Bernoulli,
    "gaussian": _Gaussian,
}


@dataclass(frozen=True)
class _Custom:
    """A user's `torch.distributions` object, attached to the graph through its parameters."""

    distribution: distributions.Distribution

    @property
    def terms(self) -> float:
        """A categorical or vector-valued batch entry is one prediction, a scalar one an element of it."""
        own = self.distribution
        whole = bool(own.event_shape) or isinstance(own, distributions.Categorical)
        return own.batch_shape.numel() if whole else _count(own.batch_shape, class_axis(own.batch_shape))

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        if generator is not None:
            raise ValueError(
                "generator= works with the built-in predictives only: torch.distributions draws from the global "
                "generator (use torch.manual_seed)"
            )
        with torch.enable_grad():
            drawn = self.distribution.sample()
            loss = -self.distribution.log_prob(drawn).sum()
        return Derivative(loss, torch.ones_like(loss))

    def exact(self) -> Iterator[Derivative]:
        distribution = self.distribution
        while isinstance(distribution, distributions.Independent):
            distribution = distribution.base_dist
        if isinstance(distribution, distributions.Categorical | distributions.OneHotCategorical):
            yield from _Categorical(distribution.logits, -1).exact()
        elif isinstance(distribution, distributions.Bernoulli):
            yield from _Bernoulli(distribution.logits).exact()
        elif isinstance(distribution, distributions.Normal):
            with torch.enable_grad():
                # Fisher of a normal: 1/σ² for the mean, 2/σ² for the scale, which is 2 for its logarithm.
                roots = (distribution.loc / distribution.scale.detach(), math.sqrt(2) * distribution.scale.log())
            for root in roots:
                if root.requires_grad:
                    yield from _Gaussian(root).exact()
        else:
            raise ValueError(
                "fisher='exact' knows categorical, Bernoulli and normal distributions, not "
                f"{type(distribution).__name__}: use fisher='sampled'"
            )


def predicted(predictive: Predictive, output: Any, prediction: Tensor | None) -> Predicted:
    """The distribution of a model's output: built in, from its prediction tensor, or by the user's callable, from
    the whole of it.
    """
    if callable(predictive):
        made = predictive(output)
        if not isinstance(made, distributions.Distribution):
            raise TypeError(f"predictive must return a torch.distributions object, got {type(made).__name__}")
        return _Custom(made)
    if prediction is None:
        raise ValueError(
            f"predictive={predictive!r} needs one prediction tensor in the model's output; "
            "pass a callable from the output to a torch.distributions object"
        )
    if predictive == "categorical" and prediction.dim() < 2:
        raise ValueError(
            f"predictive='categorical' needs an output with a class axis, got shape {tuple(prediction.shape)}; "
            "use 'bernoulli' or 'gaussian', or a callable that makes the distribution"
        )
    if predictive == "categorical" and prediction.shape[class_axis(prediction.shape)] == 1:
        raise ValueError(
            f"an output of shape {tuple(prediction.shape)} has one class, of which a categorical predictive learns "
            "nothing: did you mean predictive='gaussian' (regression) or 'bernoulli'?"
        )
    return _BUILT_IN[predictive](prediction)

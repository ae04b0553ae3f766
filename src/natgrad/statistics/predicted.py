"""The distribution of one output, and the derivatives that sampled and exact Fishers need.

A `Predicted` yields derivatives of the *summed* negative log-likelihood: for drawn targets (sampled), or one set per
output element whose outer products add up to the expectation over all targets (exact). Where the output carries
forward-mode derivatives, it yields their length in the Fisher metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributions as distributions
from torch import Tensor
from torch.autograd import forward_ad

from natgrad.capture.outputs import depends


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
    """Derivatives of the summed negative log-likelihood with respect to `roots`."""

    roots: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    def times(self, factor: float) -> Derivative:
        """Scaled."""
        return Derivative(self.roots, tuple(gradient * factor for gradient in self.gradients))


class Predicted(Protocol):
    """The distribution of one output."""

    @property
    def terms(self) -> float:
        """How many predictions it holds."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """For targets drawn from the distribution."""

    def exact(self) -> Iterator[Derivative]:
        """A set whose outer products sum to the expectation over targets."""

    def quadratic(self) -> Tensor:
        """Σ tᵀHt over predictions, for the forward-mode derivatives t that the outputs carry and H their Fisher."""


class _Elements:
    """Common to the built-in distributions: a root with its classes moved last, (cases, places, classes).

    `weights` (cases, places, 1), where given, say how much each prediction counts.
    """

    def __init__(self, root: Tensor, axis: int | None = None, weights: Tensor | None = None) -> None:
        self.root = root
        self._axis = class_axis(root.shape) if axis is None else axis
        self._weights = weights

    @property
    def terms(self) -> float:
        """See `Predicted`."""
        return _count(self.root.shape, self._axis) if self._weights is None else float(self._weights.sum())

    @property
    def _values(self) -> Tensor:
        return self._arranged(self.root.detach())

    def _arranged(self, root: Tensor) -> Tensor:
        last = root.movedim(self._axis, -1) if root.dim() > 1 else root.unsqueeze(-1)
        wide = last if last.dtype == torch.float64 else last.float()
        return wide.reshape(wide.shape[0], -1, wide.shape[-1])

    def _moving(self) -> tuple[Tensor, Tensor]:
        """Values and their forward-mode derivatives, (cases, places, classes)."""
        primal, tangent = forward_ad.unpack_dual(self.root)
        tangent = torch.zeros_like(primal) if tangent is None else tangent
        return self._arranged(primal), self._arranged(tangent)

    def _weighted_sum(self, terms: Tensor) -> Tensor:
        """Of one number per prediction, (cases, places)."""
        weighted = terms if self._weights is None else terms * self._weights[..., 0].to(terms.dtype)
        return weighted.sum(dtype=torch.float64)

    def _derivative(self, gradient: Tensor) -> Derivative:
        root = self.root
        if self._weights is not None:
            # Outer products then have the weight itself.
            gradient = gradient * self._weights.to(gradient.dtype).sqrt()
        if root.dim() <= 1:
            return Derivative((root,), (gradient.reshape(root.shape).to(root.dtype),))
        moved = root.movedim(self._axis, -1).shape
        return Derivative((root,), (gradient.reshape(moved).movedim(-1, self._axis).to(root.dtype),))

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


class CategoricalPredicted(_Elements):
    """One class of several; the root holds logits."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        p = self._values.softmax(-1)
        # A NaN batch must not end the run here: it draws anything, its derivative stays NaN, and is refused later.
        safe = torch.where(torch.isfinite(p), p, 1.0)
        drawn = torch.multinomial(safe.flatten(0, 1), 1, generator=generator).reshape(*p.shape[:-1], 1)
        return self._derivative(p.scatter_add(-1, drawn, -torch.ones_like(p[..., :1])))

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        p = self._values.softmax(-1)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        yield from self._columns((p.unsqueeze(-1) - identity) * p.sqrt().unsqueeze(-2))

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        values, t = self._moving()
        p = values.softmax(-1)
        # The variance of t under p, centred first: the difference of two large numbers would be left otherwise.
        centred = t - (p * t).sum(-1, keepdim=True)
        return self._weighted_sum((p * centred.square()).sum(-1))


class BernoulliPredicted(_Elements):
    """Labels that hold or not, each on its own; the root holds logits."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        p = self._values.sigmoid()
        return self._derivative(p - torch.bernoulli(p.nan_to_num(0.5), generator=generator))

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        p = self._values.sigmoid()
        yield from self._columns((p * (1 - p)).sqrt().diag_embed())

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        values, t = self._moving()
        return self._weighted_sum((values.sigmoid() * (-values).sigmoid() * t.square()).sum(-1))


class GaussianPredicted(_Elements):
    """Unit variance; another one is in the root."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        mean = self._values
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return self._derivative(torch.where(torch.isfinite(mean), noise, torch.nan))

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        yield from self._columns(torch.ones_like(self._values).diag_embed())

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        return self._weighted_sum(self._moving()[1].square().sum(-1))


class Several:
    """Independent heads. Each has its own number of terms; the loss is the sum of their means."""

    def __init__(self, parts: Sequence[Predicted]) -> None:
        self._parts = parts
        self._terms = [part.terms for part in parts]

    @property
    def terms(self) -> float:
        """N: of the head with the most."""
        return max(self._terms)

    def of_equal_terms(self) -> bool:
        """Whether one N holds for all heads."""
        return len(set(self._terms)) == 1

    def _shares(self) -> Iterator[tuple[Predicted, float]]:
        """A head that is a mean over fewer terms weighs more in each of them; one without any has no part."""
        for part, terms in zip(self._parts, self._terms, strict=True):
            if terms > 0:
                yield part, math.sqrt(self.terms / terms)

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        drawn = [part.sampled(generator).times(share) for part, share in self._shares()]
        return Derivative(
            tuple(root for one in drawn for root in one.roots), tuple(g for one in drawn for g in one.gradients)
        )

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        for part, share in self._shares():
            for derivative in part.exact():
                yield derivative.times(share)

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        return torch.stack([part.quadratic() * share**2 for part, share in self._shares()]).sum()


class LearnedGaussianPredicted:
    """A mean and a variance: Fisher 1/v for the mean, 1/(2v²) for the variance."""

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        if variance.shape == mean.shape[:-1]:
            variance = variance.unsqueeze(-1)  # one a case, as nn.GaussianNLLLoss takes it
        with torch.enable_grad():
            # Roots in which the Fisher is the identity, so that unit normals are the derivatives.
            v = variance.expand_as(mean)
            self._mean = GaussianPredicted(mean / v.detach().sqrt())
            self._spread = v / (math.sqrt(2) * v.detach()) if depends(v) else None

    @property
    def terms(self) -> float:
        """See `Predicted`."""
        return self._mean.terms

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        # y = m + √v ε: dℓ/dm = −ε/√v, dℓ/dv = (1 − ε²)/(2v); the same ε in both.
        drawn = self._mean.sampled(generator)
        if self._spread is None:
            return drawn
        noise = drawn.gradients[0]
        return Derivative((*drawn.roots, self._spread), (noise, (1 - noise.square()) / math.sqrt(2)))

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        yield from self._mean.exact()
        if self._spread is not None:
            yield from GaussianPredicted(self._spread).exact()

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        mean = self._mean.quadratic()
        return mean if self._spread is None else mean + GaussianPredicted(self._spread).quadratic()


@dataclass(frozen=True)
class CustomPredicted:
    """A user's `torch.distributions` object, attached to the graph through its parameters."""

    distribution: distributions.Distribution

    @property
    def terms(self) -> float:
        """A categorical or vector-valued batch entry is one prediction, a scalar one an element of it."""
        own = self.distribution
        whole = bool(own.event_shape) or isinstance(own, distributions.Categorical)
        return own.batch_shape.numel() if whole else _count(own.batch_shape, class_axis(own.batch_shape))

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        """See `Predicted`."""
        if generator is not None:
            raise ValueError(
                "generator= works with the built-in predictives only: torch.distributions draws from the global "
                "generator (use torch.manual_seed)"
            )
        with torch.enable_grad():
            drawn = self.distribution.sample()
            loss = -self.distribution.log_prob(drawn).sum()
        return Derivative((loss,), (torch.ones_like(loss),))

    def exact(self) -> Iterator[Derivative]:
        """See `Predicted`."""
        for part in self._known("fisher='exact'"):
            if part.root.requires_grad:
                yield from part.exact()

    def quadratic(self) -> Tensor:
        """See `Predicted`."""
        return torch.stack([part.quadratic() for part in self._known("curvature='exact'")]).sum()

    def _known(self, option: str) -> list[CategoricalPredicted | BernoulliPredicted | GaussianPredicted]:
        """The same distribution as built-in ones."""
        distribution = self.distribution
        while isinstance(distribution, distributions.Independent):
            distribution = distribution.base_dist
        if isinstance(distribution, distributions.Categorical | distributions.OneHotCategorical):
            return [CategoricalPredicted(distribution.logits, -1)]
        if isinstance(distribution, distributions.Bernoulli):
            return [BernoulliPredicted(distribution.logits)]
        if isinstance(distribution, distributions.Normal):
            with torch.enable_grad():
                # Fisher of a normal: 1/σ² for the mean, 2/σ² for the scale, which is 2 for its logarithm.
                roots = (distribution.loc / distribution.scale.detach(), math.sqrt(2) * distribution.scale.log())
            return [GaussianPredicted(root) for root in roots]
        raise ValueError(
            f"{option} knows categorical, Bernoulli and normal distributions, not {type(distribution).__name__}: "
            "use fisher='sampled' and curvature='factored'"
        )

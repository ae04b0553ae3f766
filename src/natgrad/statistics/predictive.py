"""The distributions that a model's output stands for, and the derivatives that sampled and exact Fishers need.

A `Predicted` knows the distribution of one output. It yields derivatives of the *summed* negative log-likelihood: for
drawn targets (sampled), or one set per output element whose outer products add up to the expectation over all targets
(exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributions as distributions
from torch import Tensor

from natgrad.options import choice

PREDICTIVES = ("categorical", "bernoulli", "gaussian")


@dataclass(frozen=True, eq=False)
class Categorical:
    """Logits over classes, `axis` of the output (the last one; axis 1 of outputs with four and more axes).

    Predictions whose target is `ignore_index` do not count, others count with their label's weight, as in
    `nn.CrossEntropyLoss`: both need the targets, ``kfac.targets = y`` before every forward pass. (In the sampled and
    exact Fisher a case has its label's weight w; in the empirical one, made of the loss's own gradients, w².)
    """

    ignore_index: int | None = None
    label_weights: Tensor | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for name, value in (("ignore_index", self.ignore_index), ("axis", self.axis)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"Categorical({name}=...) must be a whole number, got {value!r}")
        if self.label_weights is not None and not isinstance(self.label_weights, Tensor):
            object.__setattr__(self, "label_weights", torch.as_tensor(self.label_weights, dtype=torch.float32))
        if self.label_weights is not None and (self.label_weights.dim() != 1 or bool((self.label_weights < 0).any())):
            raise ValueError("label_weights must be one non-negative number per class")


@dataclass(frozen=True)
class Bernoulli:
    """One logit per label, each a prediction of its own (multi-label)."""


@dataclass(frozen=True)
class Gaussian:
    """A mean, with one fixed `variance`, or ``"learned"``: the model returns (mean, variance), as
    `nn.GaussianNLLLoss` takes them.
    """

    variance: float | str = 1.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.variance != "learned" and not (isinstance(self.variance, int | float) and self.variance > 0):
            raise ValueError(f"variance must be a positive number or 'learned', got {self.variance!r}")


Head = str | Categorical | Bernoulli | Gaussian | Callable[[Any], distributions.Distribution]
Predictive = Head | Mapping[str, Head]
_CLASSES: dict[str, Categorical | Bernoulli | Gaussian] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def checked_predictive(predictive: Any) -> Predictive:
    """The user's predictive, or an error that says what it may be."""
    if isinstance(predictive, Mapping):
        if not predictive:
            raise ValueError("predictive={} has no head")
        return {name: _checked_head(head, f"predictive[{name!r}]") for name, head in predictive.items()}
    return _checked_head(predictive, "predictive")


def _checked_head(head: Any, option: str) -> Head:
    if isinstance(head, Categorical | Bernoulli | Gaussian):
        return head
    if isinstance(head, type) and head in (Categorical, Bernoulli, Gaussian):
        made: Head = head()
        return made
    if callable(head):
        called: Head = head
        return called
    if not isinstance(head, str):
        raise TypeError(
            f"{option} must be one of {', '.join(map(repr, PREDICTIVES))}, a natgrad.Categorical, Bernoulli or "
            f"Gaussian, or a callable from the output to a torch.distributions object, got {head!r}"
        )
    return choice(option, head.lower(), PREDICTIVES)


def asks_more(predictive: Predictive) -> bool:
    """Whether more than the output's shape says how many terms there are."""
    if isinstance(predictive, Mapping):
        return True
    return isinstance(predictive, Categorical) and (
        predictive.ignore_index is not None or predictive.label_weights is not None or predictive.axis is not None
    )


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
        return _count(self.root.shape, self._axis) if self._weights is None else float(self._weights.sum())

    @property
    def _values(self) -> Tensor:
        root = self.root.detach()
        last = root.movedim(self._axis, -1) if root.dim() > 1 else root.unsqueeze(-1)
        wide = last if last.dtype == torch.float64 else last.float()
        return wide.reshape(wide.shape[0], -1, wide.shape[-1])

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
    """Unit variance; another one is in the root."""

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        mean = self._values
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return self._derivative(torch.where(torch.isfinite(mean), noise, torch.nan))

    def exact(self) -> Iterator[Derivative]:
        yield from self._columns(torch.ones_like(self._values).diag_embed())


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


class _LearnedGaussian:
    """A mean and a variance: Fisher 1/v for the mean, 1/(2v²) for the variance."""

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        if variance.shape == mean.shape[:-1]:
            variance = variance.unsqueeze(-1)  # one a case, as nn.GaussianNLLLoss takes it
        with torch.enable_grad():
            # Roots in which the Fisher is the identity, so that unit normals are the derivatives.
            v = variance.expand_as(mean)
            self._mean = _Gaussian(mean / v.detach().sqrt())
            self._spread = v / (math.sqrt(2) * v.detach()) if v.requires_grad else None

    @property
    def terms(self) -> float:
        return self._mean.terms

    def sampled(self, generator: torch.Generator | None) -> Derivative:
        # y = m + √v ε: dℓ/dm = −ε/√v, dℓ/dv = (1 − ε²)/(2v); the same ε in both.
        drawn = self._mean.sampled(generator)
        if self._spread is None:
            return drawn
        noise = drawn.gradients[0]
        return Derivative((*drawn.roots, self._spread), (noise, (1 - noise.square()) / math.sqrt(2)))

    def exact(self) -> Iterator[Derivative]:
        yield from self._mean.exact()
        if self._spread is not None:
            yield from _Gaussian(self._spread).exact()


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
        return Derivative((loss,), (torch.ones_like(loss),))

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


def predicted(predictive: Predictive, output: Any, prediction: Tensor | None, targets: Any = None) -> Predicted:
    """The distribution of a model's output: from its prediction tensor, by the user's callable, from the whole of it,
    or a head at a time.
    """
    if isinstance(predictive, Mapping):
        heads = []
        for name, head in predictive.items():
            own = _part(output, name)
            own_targets = targets.get(name) if isinstance(targets, Mapping) else None
            heads.append(predicted(head, own, own if isinstance(own, Tensor) else None, own_targets))
        return Several(heads)
    if isinstance(predictive, str):
        predictive = _CLASSES[predictive]
    if isinstance(predictive, Gaussian) and predictive.variance == "learned":
        if not (isinstance(output, list | tuple) and len(output) == 2 and all(isinstance(o, Tensor) for o in output)):
            raise ValueError("Gaussian(variance='learned') needs a model that returns (mean, variance)")
        return _LearnedGaussian(*output)
    if callable(predictive):
        made = predictive(output)
        if not isinstance(made, distributions.Distribution):
            raise TypeError(f"predictive must return a torch.distributions object, got {type(made).__name__}")
        return _Custom(made)
    if prediction is None:
        raise ValueError(
            f"predictive={predictive!r} needs one prediction tensor in the model's output; "
            "pass a callable from the output to a torch.distributions object, or a dict with a predictive a head"
        )
    if isinstance(predictive, Categorical):
        return _categorical(predictive, prediction, targets)
    if isinstance(predictive, Bernoulli):
        return _Bernoulli(prediction)
    assert not isinstance(predictive.variance, str), "a learned one has been dealt with"
    with torch.enable_grad():
        return _Gaussian(prediction / math.sqrt(predictive.variance) if predictive.variance != 1 else prediction)


def _part(output: Any, name: str) -> Any:
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if found is None:
        present = ", ".join(map(repr, output)) if isinstance(output, Mapping) else type(output).__name__
        raise ValueError(f"predictive has a head {name!r}, which the model's output does not have: {present}")
    return found


def _categorical(predictive: Categorical, root: Tensor, targets: Any) -> _Categorical:
    if root.dim() < 2:
        raise ValueError(
            f"predictive='categorical' needs an output with a class axis, got shape {tuple(root.shape)}; "
            "use 'bernoulli' or 'gaussian', or a callable that makes the distribution"
        )
    axis = class_axis(root.shape) if predictive.axis is None else predictive.axis
    if not -root.dim() <= axis < root.dim():
        raise ValueError(f"Categorical(axis={axis}): the output has shape {tuple(root.shape)}")
    classes = root.shape[axis]
    if classes == 1:
        raise ValueError(
            f"an output of shape {tuple(root.shape)} has one class, of which a categorical predictive learns "
            "nothing: did you mean predictive='gaussian' (regression) or 'bernoulli'?"
        )
    if predictive.ignore_index is None and predictive.label_weights is None:
        return _Categorical(root, axis)
    places = root.movedim(axis, -1).shape[:-1]
    if not isinstance(targets, Tensor) or tuple(targets.shape) != tuple(places):
        given = (
            f"have shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"are a {type(targets).__name__}"
        )
        given = "are missing" if targets is None else given
        raise ValueError(
            f"ignore_index and label_weights need the targets, a tensor of shape {tuple(places)}; they {given}: set "
            "kfac.targets before every forward pass, or pass capture(loss, outputs=..., targets=...)"
        )
    if targets.is_floating_point():
        raise TypeError(f"targets must be class numbers, got {targets.dtype}")
    targets = targets.to(root.device)
    # What is no class at all (-100, torch's own mark) does not count either.
    counts = (targets >= 0) & (targets < classes)
    if predictive.ignore_index is not None:
        counts = counts & (targets != predictive.ignore_index)
    weights = counts.to(root.dtype if root.dtype == torch.float64 else torch.float32)
    if predictive.label_weights is not None:
        if len(predictive.label_weights) != classes:
            raise ValueError(f"{len(predictive.label_weights)} label_weights for {classes} classes")
        own = predictive.label_weights.to(weights)
        weights = weights * own[torch.where(counts, targets, 0)]
    return _Categorical(root, axis, weights.reshape(weights.shape[0], -1, 1))

"""What a model's output stands for: the user's word, class, callable or dict of heads, made into a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributions as distributions
from torch import Tensor

from natgrad.options import choice
from natgrad.statistics.predicted import (
    BernoulliPredicted,
    CategoricalPredicted,
    CustomPredicted,
    GaussianPredicted,
    LearnedGaussianPredicted,
    Predicted,
    Several,
    class_axis,
)

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
        return LearnedGaussianPredicted(*output)
    if callable(predictive):
        made = predictive(output)
        if not isinstance(made, distributions.Distribution):
            raise TypeError(f"predictive must return a torch.distributions object, got {type(made).__name__}")
        return CustomPredicted(made)
    if prediction is None:
        raise ValueError(
            f"predictive={predictive!r} needs one prediction tensor in the model's output; "
            "pass a callable from the output to a torch.distributions object, or a dict with a predictive a head"
        )
    if isinstance(predictive, Categorical):
        return _categorical(predictive, prediction, targets)
    if isinstance(predictive, Bernoulli):
        return BernoulliPredicted(prediction)
    assert not isinstance(predictive.variance, str), "a learned one has been dealt with"
    with torch.enable_grad():
        return GaussianPredicted(
            prediction / math.sqrt(predictive.variance) if predictive.variance != 1 else prediction
        )


def _part(output: Any, name: str) -> Any:
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if found is None:
        present = ", ".join(map(repr, output)) if isinstance(output, Mapping) else type(output).__name__
        raise ValueError(f"predictive has a head {name!r}, which the model's output does not have: {present}")
    return found


def _categorical(predictive: Categorical, root: Tensor, targets: Any) -> CategoricalPredicted:
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
        return CategoricalPredicted(root, axis)
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
    return CategoricalPredicted(root, axis, weights.reshape(weights.shape[0], -1, 1))

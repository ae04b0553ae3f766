"""What a recipe may say: every field with its type, its default, its bounds and a line of explanation.

A recipe is TOML with one table a part of training. A number that may change while training is a number or a table
``{ schedule = ..., value = ..., ... }``, whose times are in epochs; `natgrad.recipes.values` reads it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Changing = float | dict[str, Any]
"""A number, or a schedule's table."""


def field(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field of a recipe with its explanation and bounds; without a default it must be given."""
    bounds = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    return dataclasses.field(
        default=default,
        metadata={"help": help, **{name: bound for name, bound in bounds.items() if bound is not None}},
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """``[data]``: which cases, and what is done to them."""

    kind: Literal["digits", "cifar10", "images", "text"] = field(help="which reader")
    path: str | None = field(None, "the folder or file; digits need none")
    damaged: Literal["refuse", "skip"] = field("refuse", "what to do about files that cannot be read: stop, or go on")
    flip: bool = field(False, "mirror half of the training images")
    pad: int = field(0, "in-memory images: shift by up to so many pixels (padded with zeros)", at_least=0)
    size: int = field(224, "images: height and width that the model gets", at_least=8)
    resize: int = field(256, "images: resize to this before cropping", at_least=8)
    square: bool = field(False, "images: resize both sides, without keeping the proportions; else the shorter one")
    crop: Literal["random-resized", "random", "centre"] = field(
        "random-resized", "images: which part of a training image is used; tests use the centre"
    )
    smallest_crop: float = field(
        0.08, "images: smallest part of the area that a resized crop takes", above=0, at_most=1
    )
    context: int = field(256, "text: characters in a case", at_least=1)
    test_part: float = field(0.1, "text: the last part of the file is for testing", above=0, below=1)
    workers: int | None = field(None, "images: decoding processes a rank; default: the cores that are left", at_least=0)
    augment_on: Literal["auto", "cpu", "device"] = field(
        "auto", "where crops and flips are made (of files: flips): where it is faster, or as told"
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """``[model]``: a name of `natgrad.models`, or ``"package.module:function"``; further keys are its options."""

    name: str = field(help="which network")
    norm: Literal["default", "none", "batch", "chunked"] = field(
        "default", "normalisation between convolutions: the network's own, none, batch norm, or chunked batch norm"
    )
    norm_chunk: int = field(32, "cases that chunked batch norm takes its statistics over", at_least=1)
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"rest": True})


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """``[training]``: how long, how large, and how the arithmetic is done."""

    epochs: int = field(10, "passes over the training cases", at_least=1)
    steps: int | None = field(None, "stop after so many steps, wherever that is", at_least=1)
    batch: int = field(128, "cases a step and rank", at_least=1)
    test_batch: int = field(1000, "cases a testing step and rank", at_least=1)
    loss: Literal["cross-entropy", "reconstruction"] = field(
        "cross-entropy", "of labels or next characters; or of the pixels themselves, as Bernoulli variables"
    )
    label_smoothing: float = field(0.0, "part of each label spread over all classes", at_least=0, below=1)
    seed: int = field(
        0, "of the weights, the order, crops, flips, dropout and sampled targets", at_least=0, at_most=999_999_999
    )
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "bf16 runs the model under autocast")
    channels_last: bool = field(False, "memory format of images and convolutions")
    compile: bool = field(False, "torch.compile the model")
    deterministic: bool = field(
        False, "deterministic kernels wherever there are some, so that GPU runs repeat bit for bit"
    )
    polyak: float | None = field(None, "evaluate an average of the weights with this decay", at_least=0, below=1)
    evaluate_every: float = field(1.0, "epochs between evaluations", above=0)
    checkpoint_every: float = field(10.0, "minutes between checkpoints, beside those of evaluations", above=0)
    keep: int = field(2, "latest checkpoints to keep, beside the best", at_least=1)
    log_every: int = field(50, "steps between lines of metrics.jsonl", at_least=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """``[optimizer]``: sgd, adam, adamw, muon, or ``"package.module:Class"``; further keys are its options."""

    name: str = field("sgd", "which optimizer")
    lr: Changing = field(help="learning rate, a number or a schedule", above=0)
    lr_times_ranks: bool = field(False, "multiply the learning rate by the number of ranks")
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"rest": True})


@dataclass(frozen=True, kw_only=True)
class KFACOptions:
    """``[kfac]``: options of `natgrad.KFAC`; what is not given has its default there."""

    enabled: bool = field(True, "precondition at all")
    damping: Changing | Literal["adaptive"] | None = field(None, "λ, a number, a schedule, or adaptive", above=0)
    damping_rule: Literal["joint", "pi", "plain"] | None = field(None, "how λ is added to the factors")
    kl_clip: Changing | Literal["none"] | None = field(None, "κ: bound of α² vᵀ∇ of a step", above=0)
    region_of: Literal["gradient", "step"] | None = field(None, "what the KL bound is measured on")
    factor_update_steps: int | None = field(None, "steps between statistics", at_least=1)
    factor_update_epochs: float | None = field(None, "the same in epochs", above=0)
    inv_update_steps: int | None = field(None, "steps between decompositions", at_least=1)
    inv_update_epochs: float | None = field(None, "the same in epochs", above=0)
    solver: Literal["eigen", "inverse"] | None = field(None, "eigendecomposition or Cholesky")
    factor_decay: Changing | None = field(None, "weight of the past in the running averages", at_least=0, below=1)
    fisher: Literal["empirical", "sampled", "exact"] | None = field(None, "which targets the Fisher is taken with")
    sharing: Literal["expand", "reduce"] | dict[str, str] | None = field(
        None, "places as uncorrelated rows, or averaged; also a table from name patterns"
    )
    raw_momentum: Changing | None = field(None, "momentum before preconditioning", at_least=0, below=1)
    grafting: Literal["sgd", "adam"] | None = field(None, "lengths of another optimizer's updates")
    l2: Changing | None = field(None, "coefficient of an L2 term in the loss", at_least=0)
    vectors: Literal["full", "diagonal", "optimizer"] | None = field(None, "blocks of norm layers and biases")
    fallback: Literal["per-case", "batch", "optimizer"] | None = field(None, "parameters used in unknown ways")
    exclude: list[str] | None = field(None, "name patterns of parameters to leave to the optimizer")
    doubly_factored: list[str] | None = field(None, "name patterns of layers with three factors")
    doubly_factored_above: int | None = field(None, "inputs above which a layer gets three factors", at_least=1)
    max_factor_size: int | None = field(None, "larger sides get a diagonal factor", at_least=1)
    max_vector_size: int | None = field(None, "longer vectors get a diagonal block", at_least=1)
    stats_fraction: float | None = field(None, "part of a batch that statistics are taken from", above=0, at_most=1)
    cuda_graph: bool | None = field(None, "replay ordinary steps as a CUDA graph, on a GPU")
    compile_preconditioning: bool | None = field(None, "compile the arithmetic of preconditioning")
    strategy: Literal["auto", "comm-opt", "layer-wise", "hybrid"] | None = field(None, "how ranks share the work")
    grad_worker_fraction: float | None = field(None, "part of the ranks in a hybrid's team", above=0, at_most=1)
    share_statistics: bool | None = field(None, "each rank takes the statistics of its share of the factors")
    wire: Literal["bf16"] | None = field(None, "send factors and gradients between ranks with half the bytes")
    overlap: Literal["background", "staggered"] | None = field(None, "decompositions beside training, or in turns")
    delay: int | Literal["ready"] | None = field(
        None, "steps after which decompositions are taken over; or ready: when they have come", at_least=0
    )
    max_overhead: float | None = field(None, "part of the time that staggered ones may take", above=0, at_most=1)
    max_staleness: int | None = field(None, "steps after which one in the background is waited for", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that one training run is made of."""

    summary: str = field("", "one line about it")
    data: DataOptions
    model: ModelOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    kfac: KFACOptions = KFACOptions()

"""K-FAC for the Trainer of Hugging Face's transformers::

    arguments = TrainingArguments("out", optim="sgd", learning_rate=0.1, max_grad_norm=0)
    Trainer(model, arguments, train_dataset=data, callbacks=[KFACCallback(damping=1e-3)]).train()

What the loss is a mean over, it learns from the calls of the model.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.hooks import RemovableHandle

from natgrad.capture.outputs import prediction
from natgrad.errors import NatgradWarning
from natgrad.kfac import KFAC
from natgrad.link import unwrapped
from natgrad.statistics.predicted import count_predictions
from natgrad.statistics.predictive import Categorical

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "natgrad.integrations.transformers needs transformers and accelerate: pip install 'natgrad[integrations]'"
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_FILE = "kfac.pt"
_IGNORED = -100
# The losses of transformers in which the output at a token predicts the next one.
_SHIFTED_LOSSES = ("ForCausalLM", "ForConditionalGeneration")


class KFACCallback(TrainerCallback):
    """Preconditions the gradients of a Trainer's model.

    `train` begins with a `natgrad.KFAC` attached to the optimizer. Its state lies beside each checkpoint as ``kfac.pt``
    and comes back with ``train(resume_from_checkpoint=...)``. Which tokens count (labels other than -100, shifted for
    causal language models), and what the Trainer divides the loss by under gradient accumulation, is taken from the
    model's calls.

    Args:
        resume_from_checkpoint: the folder to take ``kfac.pt`` from when training resumes, where that is not a
            checkpoint in ``output_dir``.
        **options: of `natgrad.KFAC`. Those that are given replace what this callback finds out: ``loss_terms`` or
            ``accumulated_loss`` for a loss of your own, ``predictive`` for outputs that are not logits over classes.

    Attributes:
        kfac: the `natgrad.KFAC` of the present training or the last one, for ``report()`` and ``metrics()``.
    """

    def __init__(self, *, resume_from_checkpoint: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.kfac: KFAC | None = None
        self._resume_from = resume_from_checkpoint
        self._options = options
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model and its optimizer are ready: K-FAC can begin."""
        self._detach()
        ranks = max(args.world_size, args.n_gpu)
        if ranks > 1:
            raise ValueError(
                f"natgrad preconditions on one device for now, and this Trainer has {ranks} (CUDA_VISIBLE_DEVICES=0 "
                "shows it one)"
            )
        model: nn.Module = kwargs["model"]
        loss = _Loss(model, accumulation=args.gradient_accumulation_steps)
        found: dict[str, Any] = {"predictive": _predictive(getattr(model, "config", None))}
        if "accumulated_loss" not in self._options:
            found |= {"loss_terms": loss.terms, "accumulated_loss": "mean"}
        kfac = self.kfac = KFAC(model, **{**found, **self._options})

        # Held weakly: the model must not keep K-FAC, and its claim on eager execution, after training has failed.
        reference = weakref.ref(kfac)

        def see(_: nn.Module, arguments: Any, inputs: dict[str, Any], output: Any) -> None:
            present = reference()
            if present is not None and torch.is_grad_enabled():
                loss.see(inputs, output)
                present.targets = loss.targets

        # Before K-FAC looks; and not compiled into the model, where it could not see all that it must.
        self._hook = model.register_forward_hook(torch.compiler.disable(see), with_kwargs=True, prepend=True)
        if state.global_step > 0:
            self._resume(kfac, args, state)
        optimizer, scaler = _with_scaler(kwargs["optimizer"])
        kfac.attach(optimizer, grad_scaler=scaler)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Puts K-FAC's state beside the checkpoint."""
        if self.kfac is None or not args.should_save or args.save_only_model:
            return
        folder = _checkpoint_folder(args, state)
        if not folder.is_dir():
            _warn(f"there is no folder {folder}: K-FAC's state is not saved")
            return
        unfinished = folder / f"{_FILE}.unfinished"
        torch.save(self.kfac.state_dict(), unfinished)
        os.replace(unfinished, folder / _FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Removes every hook."""
        self._detach()

    def _resume(self, kfac: KFAC, args: TrainingArguments, state: TrainerState) -> None:
        folder = _checkpoint_folder(args, state) if self._resume_from is None else Path(self._resume_from)
        if (folder / _FILE).is_file():
            kfac.load_state_dict(torch.load(folder / _FILE, map_location="cpu", weights_only=True))
        else:
            _warn(
                f"training goes on from step {state.global_step}, and K-FAC begins anew: there is no {folder / _FILE}. "
                "KFACCallback(resume_from_checkpoint=...) takes the folder that you resume from"
            )

    def _detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.kfac is not None:
            self.kfac.detach()


class _Loss:
    """What one call of the model says of its loss: L = (1/N) Σ over predictions.

    The Trainer gives models N, the predictions of all micro-batches of a step, as ``num_items_in_batch``. Some take it,
    some ignore it and average over their own predictions; those that are not given it have their loss divided by the
    number of micro-batches.
    """

    def __init__(self, model: nn.Module, *, accumulation: int) -> None:
        self.targets: Tensor | None = None
        self._shifts = _predicts_the_next(model)
        self._accumulation = accumulation
        self._uses_items: bool | None = None  # not known yet
        self._terms: Tensor | float | None = None
        self._counted = False

    def terms(self, step: int) -> float | None:
        """N, for which the device is waited; None where K-FAC counts the predictions that the targets call for, and the
        micro-batches that the Trainer has divided by.
        """
        if self._counted:
            return None
        if self._terms is None:
            raise ValueError(
                "how many terms is the loss a mean over? This model returns no predictions to count them in: "
                "KFACCallback(loss_terms=...)"
            )
        return max(float(self._terms), 1.0)

    def see(self, inputs: Mapping[str, Any], output: Any) -> None:
        """Looks at one call."""
        labels, items = inputs.get("labels"), inputs.get("num_items_in_batch")
        logits = prediction(output)
        if logits is None:
            self.targets, self._terms = None, items
            return
        self.targets = _targets(inputs, logits, shift=self._shifts)
        own = _own_terms(labels, self.targets, logits)
        self._counted = items is None and self.targets is not None
        if items is None:
            self._terms = own * self._accumulation
        elif isinstance(labels, Tensor) and labels.is_floating_point():
            self._terms = own  # squared errors and many labels are averaged, whatever the Trainer says
        else:
            self._terms = items if self._takes(items, own, logits, _loss_of(output)) else own

    def _takes(self, items: Tensor | float, own: Tensor | float, logits: Tensor, loss: Tensor | None) -> bool:
        """Whether the model divides its loss by `items`, not by its `own` predictions: found out once."""
        if self._uses_items is None and loss is not None and self.targets is not None and bool(loss.isfinite()):
            wide = logits.detach().flatten(0, -2).float()
            total = cross_entropy(wide, self.targets.flatten().to(wide.device), ignore_index=_IGNORED, reduction="sum")
            by_items, by_own = (float(abs(loss.detach() * terms - total)) for terms in (items, own))
            self._uses_items = by_items <= by_own
        return self._uses_items is not False


def _own_terms(labels: Any, targets: Tensor | None, logits: Tensor) -> Tensor | float:
    """How many predictions one call makes that count."""
    if targets is not None:
        return (targets != _IGNORED).sum()
    if isinstance(labels, Tensor) and labels.is_floating_point():
        return labels.numel()
    return count_predictions(logits)


def _targets(inputs: Mapping[str, Any], logits: Tensor, *, shift: bool) -> Tensor | None:
    """The class that each prediction is compared with, where the labels show it."""
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if shift and isinstance(labels, Tensor):
            labels = pad(labels, (0, 1), value=_IGNORED)[..., 1:]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        return None
    return labels


def _predicts_the_next(model: nn.Module) -> bool:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # their labels are those of the decoder's outputs
    causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return causal or getattr(model, "loss_type", None) in _SHIFTED_LOSSES


def _predictive(config: Any) -> str | Categorical:
    """What the heads of transformers predict."""
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        return "bernoulli"
    if kind == "regression" or getattr(config, "num_labels", None) == 1:
        return "gaussian"
    return Categorical(ignore_index=_IGNORED)


def _loss_of(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return found if isinstance(found, Tensor) and found.dim() == 0 else None


def _with_scaler(optimizer: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer inside Accelerate's, and the scaler that steps it."""
    return unwrapped(optimizer), optimizer.scaler if isinstance(optimizer, AcceleratedOptimizer) else None


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _warn(text: str) -> None:
    warnings.warn(f"natgrad: {text}", NatgradWarning, stacklevel=3)

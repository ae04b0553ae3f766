"""K-FAC for the Lightning Trainer::

    trainer = Trainer(callbacks=[KFACCallback(damping=1e-3)])
    trainer.fit(model)

Both names that Lightning has will do, ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.kfac import KFAC
from natgrad.link import run_closure

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "natgrad.integrations.lightning needs Lightning: pip install 'natgrad[integrations]'"
            ) from error


class KFACCallback(Callback):
    """Preconditions the gradients of a LightningModule that has one optimizer and automatic optimization.

    `fit` begins with a `natgrad.KFAC` attached to the optimizer; its state goes into the Trainer's checkpoints and
    comes back with ``fit(ckpt_path=...)``. Gradient clipping and ``on_before_optimizer_step`` see raw gradients, K-FAC
    comes after them. Losses that ``accumulate_grad_batches`` divides, and those that float16 precision scales, are put
    right.

    Args:
        module: the name of the attribute that ``training_step`` calls (``"net"`` for ``self.net(x)``). By default the
            LightningModule itself, for ``self(x)``; or, where it has no ``forward``, its one submodule with parameters.
        targets: from a batch to its targets, for predictives that ask for them:
            ``targets=lambda batch: batch[1]`` sets ``kfac.targets``.
        objective: from the LightningModule and a batch to its loss, for `natgrad.AdaptiveDamping` and exact trust
            regions: ``objective=lambda module, batch: cross_entropy(module(batch[0]), batch[1])``.
        log_metrics: logs ``kfac.metrics()`` as ``kfac/...``, every ``log_every_n_steps`` of the Trainer.
        **options: of `natgrad.KFAC`.

    Attributes:
        kfac: the `natgrad.KFAC` of the present fit or the last one, for ``report()``, ``metrics()``, ``capture()``.
    """

    def __init__(
        self,
        *,
        module: str | None = None,
        targets: Callable[[Any], Any] | None = None,
        objective: Callable[[Any, Any], Tensor] | None = None,
        log_metrics: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.kfac: KFAC | None = None
        self._module = module
        self._targets = targets
        self._objective = objective
        self._log_metrics = log_metrics
        self._options = options
        self._state: dict[str, Any] = {}  # of a checkpoint, until the fit begins
        self._called = False
        self._handles: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is on its device and the optimizer restored: K-FAC can begin."""
        optimizer = _only_optimizer(trainer, pl_module)
        module = _watched_module(pl_module, self._module)
        # Lightning divides every loss by this, in the shorter window at the end of an epoch too.
        divisor = {"accumulated_loss": lambda step: trainer.accumulate_grad_batches}
        self.kfac = KFAC(module, **{**divisor, **self._options})
        if self._state:
            self.kfac.load_state_dict(self._state)
            self._state = {}
        self._called = False

        def note_call(*_: Any) -> None:
            self._called = True
            noting.remove()

        def before_step(
            stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = run_closure(stepping, args, kwargs)  # Lightning computes the gradients in it
            self._refuse_unseen(module, pl_module)
            return arguments

        noting = module.register_forward_hook(note_call)
        self._handles = [noting, optimizer.register_step_pre_hook(before_step)]
        self.kfac.attach(optimizer, grad_scaler=trainer.scaler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Says what the targets and the loss of this batch are."""
        if self._targets is not None and self.kfac is not None:
            self.kfac.targets = self._targets(batch)
        if (objective := self._objective) is not None and self.kfac is not None:
            self.kfac.objective = lambda: objective(pl_module, batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the metrics, on the steps on which Lightning logs: on others nothing waits for the device."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._log_metrics and self.kfac is not None and step and every and step % every == 0:
            numbers = {f"kfac/{name}": float(value) for name, value in self.kfac.metrics().items() if value is not None}
            pl_module.log_dict(numbers, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes every hook; the state stays, for checkpoints that are saved later."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes every hook."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._state if self.kfac is None else self.kfac.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called before the fit begins: kept until there is a K-FAC."""
        self._state = state_dict

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.kfac is not None:
            self.kfac.detach()

    def _refuse_unseen(self, module: nn.Module, pl_module: LightningModule) -> None:
        """Says what to do where ``training_step`` does not call the module that K-FAC looks at."""
        assert self.kfac is not None, "there is one while its optimizer steps"
        if self._called or self.kfac.blocks or all(parameter.grad is None for parameter in pl_module.parameters()):
            return
        name = next(name for name, submodule in pl_module.named_modules() if submodule is module)
        watched = f"self.{name}" if name else "the LightningModule, self(x)"
        known = ", ".join(map(repr, _trainable_children(pl_module)))
        raise RuntimeError(
            f"K-FAC looks at calls of {watched}, and training_step made none. KFACCallback(module=...) names the "
            f"module that it calls ({known}); several are best called in one forward(), by self(x) in training_step"
        )


def _only_optimizer(trainer: Trainer, pl_module: LightningModule) -> torch.optim.Optimizer:
    if not pl_module.automatic_optimization:
        raise ValueError(
            "KFACCallback needs automatic optimization. With automatic_optimization=False, make a KFAC with optimizer= "
            "in configure_optimizers and call kfac.step() in training_step, after manual_backward"
        )
    if trainer.world_size > 1:
        raise ValueError(f"natgrad preconditions in one process for now, and this Trainer has {trainer.world_size}")
    optimizer: torch.optim.Optimizer = trainer.optimizers[0]  # Lightning itself refuses several
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS computes its gradients several times a step, and has curvature of its own: use SGD")
    return optimizer


def _watched_module(pl_module: LightningModule, name: str | None) -> nn.Module:
    """The module whose calls K-FAC looks at."""
    children = _trainable_children(pl_module)
    if name is not None:
        if name not in dict(pl_module.named_modules()):
            known = ", ".join(map(repr, children))
            raise ValueError(f"module={name!r} is no submodule of this LightningModule; it has {known}")
        return pl_module.get_submodule(name)
    defines_forward = next(c for c in type(pl_module).__mro__ if "forward" in vars(c)).__name__ != "LightningModule"
    own = any(parameter.requires_grad for parameter in pl_module.parameters(recurse=False))
    return pl_module if defines_forward or own or len(children) != 1 else next(iter(children.values()))


def _trainable_children(pl_module: LightningModule) -> dict[str, nn.Module]:
    return {
        name: child
        for name, child in pl_module.named_children()
        if any(parameter.requires_grad for parameter in child.parameters())
    }

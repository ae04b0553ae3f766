"""Polyak averaging: evaluate an average of the latest weights instead of the very last ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.hooks import RemovableHandle

from natgrad.callers import is_inner_step
from natgrad.capture.watch import clean_name, innermost
from natgrad.errors import Warner
from natgrad.link import creates_state, unwrapped
from natgrad.options import Hyperparameter, Number, whole_number

_VERSION = 1


class PolyakAverage:
    """An exponentially decayed average of a model's parameters and batch-norm statistics, for evaluation
    (Ba, Grosse & Martens 2017, section 6)::

        average = natgrad.PolyakAverage(model, decay=0.99).attach(optimizer)
        ...  # train as ever
        with average.applied():
            evaluate(model)

    At the first update the average is a copy of the weights (before it, whatever the weights are), and from then on
    decay · average + (1 − decay) · weights. Parameters and floating-point buffers named ``running_...``, as all of
    torch's norm layers have them, are averaged; every other buffer (counts, masks, tables) is copied. Weights of fewer
    than 32 bits are averaged in 32, since a small part of their difference would be rounded away.

    Args:
        model: any module; DDP and compiled models too. It may move to another device or dtype later on.
        decay: the weight of the past in each update, at least 0 and below 1, or a callable of the number of updates so
            far. ``lambda updates: min(0.99, updates / (updates + 1))`` ramps up: a plain mean over all weights at
            first, so that the very first ones do not stay in it for hundreds of steps, and 0.99 after a hundred.
    """

    def __init__(self, model: nn.Module, *, decay: Number = 0.99) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"PolyakAverage takes the model itself, an nn.Module, got {type(model).__name__}")
        self._decay = Hyperparameter("decay", decay, above=0, below=1, inclusive=True)
        self._given = model
        self._live = innermost(model)
        _refuse_unmade(self._live)
        # Now and not at the first update: after a forward pass a module may hold tensors that cannot be copied.
        self._copy = copy.deepcopy(self._live).requires_grad_(False).eval()
        self._mine = _tensors(self._copy)
        self._averaged = [name for name, tensor in self._mine.items() if _is_averaged(name, tensor)]
        self._copied = [name for name, tensor in self._mine.items() if not _is_averaged(name, tensor)]
        self._fine: dict[str, Tensor] = {}  # averages of the tensors that are too coarse to average in
        for name, tensor in self._mine.items():
            self._place(name, tensor.data, tensor)
        self._updates = 0
        self._applied = False
        self._hook: RemovableHandle | None = None
        self._warner = Warner()

    # In the training loop

    def attach(self, optimizer: torch.optim.Optimizer) -> PolyakAverage:
        """Updates the average after every ``optimizer.step()`` from now on; the loop does not change."""
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if self._hook is not None:
            raise RuntimeError("this average is attached to an optimizer already: detach() it first")
        if not self._moved_by(optimizer):
            raise ValueError("this optimizer holds none of the model's parameters")

        def hook(stepped: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_inner_step(stepped) and not creates_state(stepped):
                self._take()

        # A compiled optimizer.step() runs this eagerly.
        self._hook = optimizer.register_step_post_hook(torch.compiler.disable(hook))
        return self

    def detach(self) -> None:
        """Undoes `attach`; the average stays as it is. Harmless at any time."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def update(self) -> None:
        """Takes the present weights into the average, for loops that do not `attach`. Nothing waits for the device."""
        if self._hook is not None:
            raise RuntimeError(
                "this average is attached: optimizer.step() updates it already, and twice would be once too often"
            )
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        self._refuse_while_applied("update()")
        live = self._matching()
        if self._updates == 0:
            self._start(live)
        else:
            self._blend(live, self._decay.at(self._updates))
        self._updates += 1

    # For evaluation

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model itself with averaged parameters and buffers inside a ``with`` block; afterwards the trained ones
        are back, bit for bit.

        Values are written in place, so that optimizers, DDP and compiled wrappers stay valid. Call ``model.eval()`` as
        ever. It costs one more copy of the model while the block lasts.
        """
        self._refuse_while_applied("applied()")
        live = self._matching()
        self._start_if_new(live)
        names = [name for name, tensor in live.items() if not _is_expanded(tensor)]  # which cannot be written
        # `.data`, since a graph that is waiting for its backward finds the weights that it saved when it is run.
        targets = [live[name].data for name in names]
        trained = [tensor.clone() for tensor in targets]
        guard = register_optimizer_step_pre_hook(torch.compiler.disable(self._refuse_step))
        self._applied = True
        try:
            _overwrite(targets, [self._mine[name] for name in names])
            torch.clear_autocast_cache()  # an enclosing autocast would go on with its casts of the trained weights
            yield self._given
        finally:
            self._applied = False
            guard.remove()
            _overwrite(targets, trained)
            torch.clear_autocast_cache()

    @property
    def model(self) -> nn.Module:
        """The averaged copy, a module of its own in evaluation mode, which every update changes in place."""
        self._start_if_new(self._matching())
        return self._copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the averaged copy."""
        return self.model(*args, **kwargs)

    @property
    def updates(self) -> int:
        """How many updates are in the average."""
        return self._updates

    def __repr__(self) -> str:
        return f"<PolyakAverage(decay={self._decay.value!r}): {self._updates} updates>"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of updates, under parameter names; loads with ``weights_only=True``."""
        average = {name: self._fine.get(name, self._mine[name]).detach().clone() for name in self._saved()}
        return {"version": _VERSION, "updates": self._updates, "decay": self._decay.state(), "average": average}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`. One that does not fit raises, and changes nothing."""
        self._refuse_while_applied("load_state_dict()")
        average = _checked_state(state, {name: self._mine[name] for name in self._saved()})
        for name, value in average.items():
            self._mine[name].copy_(value)
            if name in self._fine:
                self._fine[name].copy_(value)
        self._updates = state["updates"]
        self._decay.load(state["decay"])

    def __reduce__(self) -> str:
        raise TypeError(
            "a PolyakAverage cannot be copied or pickled: it belongs to one model. Construct one for the copy and "
            "carry the average over with state_dict() and load_state_dict()"
        )

    # Inside

    def _matching(self) -> dict[str, Tensor]:
        """The model's tensors now, by name, after the copy has followed them to their devices and dtypes."""
        live = _tensors(self._live)
        if live.keys() != self._mine.keys():
            name = min(live.keys() ^ self._mine.keys())
            what = "has come" if name in live else "is gone"
            raise ValueError(f"the model has changed since its average was made: {name} {what}")
        live = {name: live[name] for name in self._mine}  # in the copy's order
        for name, tensor in live.items():
            mine = self._mine[name]
            if tensor.shape != mine.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} now, in the average {tuple(mine.shape)}")
            if tensor.device != mine.device or tensor.dtype != mine.dtype:
                self._place(name, self._fine.get(name, mine).data, tensor)
        return live

    def _place(self, name: str, value: Tensor, like: Tensor) -> None:
        """Keeps a value in the copy, and if it is averaged and too coarse there, in 32 bits as well."""
        self._mine[name].data = (value.contiguous() if _is_expanded(value) else value).to(like.device, like.dtype)
        self._fine.pop(name, None)
        dtype = torch.promote_types(like.dtype, torch.float32)
        if dtype != like.dtype and _is_averaged(name, like):
            self._fine[name] = value.to(like.device, dtype)

    def _start_if_new(self, live: Mapping[str, Tensor]) -> None:
        """Before its first update the average is the present weights."""
        if self._updates == 0 and not self._applied:
            if self._hook is None:
                self._warner.once(
                    "new", "this average has no updates yet and is not attached: it is the model's present weights"
                )
            self._start(live)

    def _start(self, live: Mapping[str, Tensor]) -> None:
        _overwrite(self._mine.values(), live.values())
        _overwrite(self._fine.values(), [live[name] for name in self._fine])

    def _blend(self, live: Mapping[str, Tensor], decay: float) -> None:
        averages = [self._fine.get(name, self._mine[name]) for name in self._averaged]
        currents = [
            live[name].to(self._fine[name].dtype) if name in self._fine else live[name] for name in self._averaged
        ]
        if averages:
            # AveragedModel itself would wait for the device, and average either no buffer or all of them: counts too,
            # and masks, whose inf − inf is NaN.
            get_ema_multi_avg_fn(decay)(averages, currents, None)
        _overwrite([self._mine[name] for name in self._fine], self._fine.values())
        _overwrite([self._mine[name] for name in self._copied], [live[name] for name in self._copied])

    def _saved(self) -> list[str]:
        """The names that belong into a checkpoint: not those of buffers that torch does not save either."""
        unsaved = {
            clean_name(f"{path}.{name}".removeprefix("."))
            for path, module in self._copy.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return [name for name in self._mine if name not in unsaved]

    def _moved_by(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(parameter) for parameter in self._live.parameters()}
        return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._moved_by(optimizer):
            raise RuntimeError(
                "optimizer.step() inside applied() would train the average and then be undone: leave the block first"
            )

    def _refuse_while_applied(self, what: str) -> None:
        if self._applied:
            raise RuntimeError(f"{what} inside applied(): the model holds its average now; leave the block first")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers under their names, tied ones once."""
    named: Iterable[tuple[str, Tensor]] = chain(model.named_parameters(), model.named_buffers())
    return {clean_name(name): tensor for name, tensor in named}


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_averaged(name: str, tensor: Tensor) -> bool:
    """Whether an average makes sense of it: a parameter, or a statistic that runs along with training."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and (isinstance(tensor, nn.Parameter) or name.rpartition(".")[2].startswith("running_"))


@torch.no_grad()
def _overwrite(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies values in place, in as few kernels as there are."""
    listed = list(targets)
    if listed:
        torch._foreach_copy_(listed, list(sources))


def _refuse_unmade(model: nn.Module) -> None:
    for name, parameter in chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise ValueError(
                f"{name} has no values yet: run a lazy model once, or materialise one on the meta device, before "
                "averaging it"
            )


def _checked_state(state: Any, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages in a state, each of which fits what is expected under its name."""
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        raise ValueError(f"this is not the state_dict() of a PolyakAverage of version {_VERSION}")
    if missing := {"updates", "decay", "average"} - state.keys():
        raise ValueError(f"this state of a PolyakAverage lacks {min(missing)!r}")
    whole_number("updates", state["updates"], at_least=0)
    average: dict[str, Tensor] = dict(state["average"])
    if average.keys() != expected.keys():
        name = min(average.keys() ^ expected.keys())
        where = "the state, but not in the model" if name in average else "the model, but not in the state"
        raise ValueError(f"this average is of another model: {name} is in {where}")
    for name, tensor in expected.items():
        if average[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the model, in the state {tuple(average[name].shape)}"
            )
    return average

"""Graphs that change from step to step: remembering them changes nothing of what is found."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from natgrad import KFAC
from natgrad.capture import recipes

Change = Callable[[nn.Module, Any], None]
CASES = 6


class Function(nn.Module):
    """A function of the model and its input. `mode` is what changes."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.mode: Any = None
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def linear(inputs: int, outputs: int, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64, **options)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def batch(model: nn.Module, mode: Any) -> Tensor:
    return data(CASES, 4)


def layers(**more: nn.Module | nn.Parameter) -> dict[str, Any]:
    return {"first": linear(4, 4), "second": linear(4, 4), "head": linear(4, 3), **more}


def take_mode(model: nn.Module, mode: Any) -> None:
    model.mode = mode


def branch(m: Any, x: Tensor) -> Tensor:
    return m.head(m.first(x).tanh() if m.mode else m.second(x).tanh())


def activation(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return m.head(hidden.tanh() if m.mode else hidden.sigmoid())


def freeze(*names: str) -> Change:
    def change(model: nn.Module, mode: Any) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(not mode)

    return change


def swap_for_another(model: Any, mode: Any) -> None:
    if mode:
        torch.manual_seed(mode)
        model.first = linear(4, 4)


def swap_with_each_other(model: Any, mode: Any) -> None:
    if mode:
        model.first, model.second = model.second, model.first


def in_a_row(m: Any, x: Tensor) -> Tensor:
    return m.head(m.second(m.first(x).tanh()).tanh())


def checkpointed(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    inner = lambda h: m.second(h.tanh()).tanh()  # noqa: E731
    return m.head(checkpoint(inner, hidden, use_reentrant=False) if m.mode else inner(hidden))


def packed(m: Any, x: Tensor) -> Tensor:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with hooks if m.mode else contextlib.nullcontext():
        return in_a_row(m, x)


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(m.mode)):
        return in_a_row(m, x).float()


def train_or_eval(model: nn.Module, mode: Any) -> None:
    model.train(not mode)


def normed(m: Any, x: Tensor) -> Tensor:
    return m.head(m.norm(m.first(x)))


def other_eps(model: Any, mode: Any) -> None:
    model.eval()
    model.norm.eps = 0.5 if mode else 1e-5


def shared_input(m: Any, x: Tensor) -> Tensor:
    """Graphs that do not differ: the inputs have no gradient, and only where they lie in memory tells them apart."""
    return torch.cat([m.first(x), m.second(x.clone() if m.mode else x)], dim=1)


def summed_output(m: Any, x: Tensor) -> Tensor:
    one, other = m.first(x), m.second(x * 2)
    return m.head(one + other if m.mode else one * other)


def once_or_twice(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x).tanh()
    return m.head(m.first(hidden).tanh() if m.mode else hidden)


def orientation(m: Any, x: Tensor) -> Tensor:
    return m.head((x @ (m.w if m.mode else m.w.T)).tanh())


def scaled_sum(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.add(m.first(x), m.b, alpha=2 if m.mode else 1))


def slice_of(m: Any, x: Tensor) -> Tensor:
    slices = (m.wide[:, :4], m.wide[:, 4:])
    one, other = slices if m.mode else slices[::-1]
    return m.head((x @ one) * (x @ other).tanh())


def geometry(m: Any, x: Tensor) -> Tensor:
    """Other distances between the pixels that a kernel sees, of which no shape tells."""
    options = {"padding": 2, "dilation": 2} if m.mode else {"padding": 1, "dilation": 1}
    return m.head(functional.conv2d(x, m.kernel, **options).mean((2, 3)))


def with_penalty(m: Any, x: Tensor) -> Tensor:
    output = in_a_row(m, x)
    return output + (m.first.weight.square().sum() if m.mode else m.first.weight.sum() * output.mean())


def by_parameter(m: Any, x: Tensor) -> Tensor:
    """x W V: where V is a parameter, W is multiplied with another one."""
    other = nn.Parameter(torch.eye(4, dtype=torch.float64)) if m.mode else torch.eye(4, dtype=torch.float64)
    return m.head(x @ (m.w @ other.requires_grad_()))


def positions(m: Any, x: Tensor) -> Tensor:
    where = torch.arange(x.shape[1]) if m.mode else torch.arange(x.shape[1]).flip(0)
    return m.head(m.first(x + m.table(where)).tanh())


def token(m: Any, x: Tensor) -> Tensor:
    return m.head(m.first(torch.cat([m.start.expand(len(x), 1, 4), x], 1)).tanh().mean(1))


def sequence(model: nn.Module, mode: Any) -> Tensor:
    return data(CASES, 3 + (mode or 0), 4)


def images(model: nn.Module, mode: Any) -> Tensor:
    return data(CASES, 2, 6, 6)


def other_size(model: nn.Module, mode: Any) -> Tensor:
    return data(CASES + (mode or 0), 4)


def with_gradient(model: nn.Module, mode: Any) -> Tensor:
    return data(CASES, 4).requires_grad_(bool(mode))


def nothing(model: nn.Module, mode: Any) -> None:
    return


def norm() -> nn.Module:
    return nn.BatchNorm1d(4, dtype=torch.float64)


# name → function, its modules and parameters, what is changed, the batch, options of KFAC
CHANGES: dict[str, tuple[Any, ...]] = {
    "branch": (branch, layers, take_mode, batch, {}),
    "activation": (activation, layers, take_mode, batch, {}),
    "batch size": (in_a_row, layers, nothing, other_size, {}),
    "batch size of a norm": (normed, lambda: layers(norm=norm()), nothing, other_size, {}),
    "sequence length": (in_a_row, layers, nothing, sequence, {}),
    "sequence length, reduced": (in_a_row, layers, nothing, sequence, {"sharing": "reduce", "loss_terms": CASES}),
    "frozen weight": (in_a_row, layers, freeze("first.weight"), batch, {}),
    "frozen bias": (in_a_row, layers, freeze("first.bias", "head.bias"), batch, {}),
    "frozen layer": (in_a_row, layers, freeze("second.weight", "second.bias"), batch, {}),
    "another module": (in_a_row, layers, swap_for_another, batch, {}),
    "modules exchanged": (in_a_row, layers, swap_with_each_other, batch, {}),
    "checkpointing": (checkpointed, layers, take_mode, batch, {}),
    "packed": (packed, layers, take_mode, batch, {}),
    "autocast": (autocast, layers, take_mode, batch, {}),
    "evaluation": (normed, lambda: layers(norm=norm()), train_or_eval, batch, {}),
    "eps": (normed, lambda: layers(norm=norm()), other_eps, batch, {}),
    "shared input": (shared_input, layers, take_mode, batch, {}),
    "summed output": (summed_output, layers, take_mode, batch, {}),
    "used twice": (once_or_twice, layers, take_mode, batch, {}),
    "orientation": (orientation, lambda: layers(w=matrix(4, 4)), take_mode, batch, {}),
    "scale of a sum": (scaled_sum, lambda: layers(b=matrix(4)), take_mode, batch, {"fallback": "batch"}),
    "slice": (slice_of, lambda: layers(wide=matrix(4, 8)), take_mode, batch, {}),
    "geometry": (geometry, lambda: layers(kernel=matrix(4, 2, 3, 3)), take_mode, images, {}),
    "penalty": (with_penalty, layers, take_mode, batch, {"fallback": "batch"}),
    "parameter of nobody": (by_parameter, lambda: layers(w=matrix(4, 4)), take_mode, batch, {"fallback": "batch"}),
    "positions": (positions, lambda: layers(table=nn.Embedding(9, 4).double()), take_mode, sequence, {}),
    "token": (token, lambda: layers(start=matrix(4)), nothing, sequence, {}),
    "input with a gradient": (in_a_row, layers, nothing, with_gradient, {}),
    "exact Fisher": (once_or_twice, layers, take_mode, batch, {"fisher": "exact"}),
    "exact Fisher, packed": (packed, layers, take_mode, batch, {"fisher": "exact"}),
    "doubly factored": (
        lambda m, x: m.wide((x if m.mode else x * 1.5).tanh().flatten(1)),
        lambda: {"wide": linear(72, 3)},
        take_mode,
        images,
        {"doubly_factored": {"wide.weight": (2, 6, 6)}},
    ),
}
MODES = (0, 0, 1, 1, 0, 1, 2, 0)


class Run:
    """A model and its KFAC, whose factors are those of the last batch that used them."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model = model
        options = {"kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 1, "factor_decay": 0.0, **options}
        self.kfac = KFAC(model, damping=0.1, **options)

    def step(self, x: Tensor) -> None:
        self.model.zero_grad()
        output = self.model(x.clone().detach().requires_grad_(x.requires_grad))
        functional.cross_entropy(output.flatten(0, -2), torch.arange(output[..., 0].numel()) % 3).backward()
        self.kfac.step()

    def forget(self) -> None:
        self.kfac._window._recipes._kept.clear()
        self.kfac._registry._taps.clear()

    def state(self) -> dict[str, Any]:
        blocks = self.kfac.state_dict(decompositions=False)["blocks"]
        return {"blocks": blocks, "gradients": {n: p.grad for n, p in self.model.named_parameters()}}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def is_comparable(veteran: Any, fresh: Any) -> bool:
    """Blocks keep the bias, the other orientation and the source that earlier batches have shown."""
    kept = (veteran.names, veteran.weight, veteran.swapped is None, veteran.form.source)
    return kept == (fresh.names, fresh.weight, fresh.swapped is None, fresh.form.source)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_remembered_changes_nothing(name: str) -> None:
    function, modules, change, make_batch, options = CHANGES[name]
    torch.manual_seed(0)
    model = Function(function, **modules())
    remembering, forgetting = Run(model, options), Run(copy.deepcopy(model), options)
    for number, mode in enumerate(MODES):
        for run in (remembering, forgetting):
            change(run.model, mode)
        torch.manual_seed(number)
        x = make_batch(model, mode)
        # As one without a past sees the same batch.
        fresh = Run(copy.deepcopy(model), options)
        forgetting.forget()
        for run in (remembering, forgetting, fresh):
            run.step(x)
        assert_same(remembering.state(), forgetting.state())
        blocks = {block.key: block for block in remembering.kfac.blocks}
        for block in fresh.kfac.blocks:
            if (known := blocks.get(block.key)) is not None and is_comparable(known, block):
                torch.testing.assert_close(known.to_dense(), block.to_dense(), rtol=1e-9, atol=1e-12)


def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every search."""
    made: list[int] = []
    search = recipes.find_uses

    def counted(*arguments: Any, **keywords: Any) -> Any:
        made.append(1)
        return search(*arguments, **keywords)

    monkeypatch.setattr(recipes, "find_uses", counted)
    return made


def test_a_graph_like_one_before_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = Run(Function(in_a_row, **layers()), {}), searches(monkeypatch)
    run.step(data(CASES, 4))
    run.step(data(CASES, 4))  # there are blocks by now
    assert len(made) == 2
    for _ in range(3):
        run.step(data(CASES, 4))
        run.step(data(CASES - 1, 4))
    assert len(made) == 3  # the smaller batch is another one, once


def test_uses_that_are_the_same_are_the_same_objects() -> None:
    run = Run(Function(shared_input, **layers()), {})
    seen = []
    for mode in (0, 0, 0, 1, 1, 0):
        run.model.mode = mode
        run.step(data(CASES, 4))
        seen.append(run.kfac._window._recipes._kept[0]._uses)
    assert seen[1] is seen[2]
    assert seen[2] is not seen[3]
    assert [use.share_input for use in seen[2]] != [use.share_input for use in seen[3]]


def test_only_so_many_are_kept() -> None:
    run = Run(Function(in_a_row, **layers()), {})
    for size in range(2, 20):
        run.step(data(size, 4))
    assert len(run.kfac._window._recipes._kept) <= recipes._KEPT


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_recipes_keep_neither_graph_nor_activations_alive(fisher: str) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(m: Any, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        hidden = m.first(x + m.table(where)).tanh()
        output = m.head(hidden)
        alive.extend(map(weakref.ref, (where, hidden, output)))
        return output

    run = Run(Function(watched, **layers(table=nn.Embedding(9, 4).double())), {"fisher": fisher})
    for _ in range(3):
        run.step(data(CASES, 3, 4))
    gc.collect()
    assert not [one for one in alive if one() is not None]
    assert run.kfac._window._recipes._kept

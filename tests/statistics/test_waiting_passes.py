"""What waits for others is computed when the backward pass is over, from what it was: without a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC, passes
from natgrad.blocks.factor import Factor
from natgrad.errors import NatgradWarning
from natgrad.statistics import waiting as waiting_of
from natgrad.statistics.gpu import Norm
from natgrad.statistics.image import Image
from natgrad.statistics.operations import Operation
from natgrad.statistics.waiting import Late, Part, Parts, together
from waits import Fake, factors, install, loss_of, network


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=False, outputs=True)


@pytest.fixture
def waiting_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=True, outputs=False)


class BrokenError(Exception):
    pass


def broken(gradient: Tensor) -> Tensor:
    raise BrokenError


@pytest.mark.parametrize("again", ["backward", "forward"])
def test_nothing_is_held_after_a_backward_pass_that_broke(waiting: None, again: str) -> None:
    model = network()
    x, y = torch.randn(6, 3), torch.arange(6) % 4
    hidden = model[:2](x)
    handle = hidden.register_hook(broken)
    rest = nn.Sequential(*model[2:])
    kfac = KFAC(rest, lr=0.1)
    loss = functional.cross_entropy(rest(hidden), y)
    with pytest.raises(BrokenError):
        loss.backward(retain_graph=True)
    (current,) = kfac._window.contents
    assert current._late
    handle.remove()
    if again == "forward":
        rest(hidden.detach())
    else:
        with pytest.warns(NatgradWarning, match="a second backward"):
            loss.backward()
    assert not current._late
    assert all(factor.pending is not None for block in kfac.blocks for factor in block.factors())
    kfac.detach()


def test_threads_lose_nothing(waiting: None) -> None:
    """Autograd has one for each GPU; another pass, that begins in one of them, has all that waits computed."""
    model = network()
    kfac = KFAC(model, lr=0.1)
    loss_of(model, 0).backward()
    (current,) = kfac._window.contents
    made: list[Tensor] = []
    work, x = Fake(lambda tensors: tensors[0]), torch.zeros(1)
    parts = Parts([Part(work, (0,), (made.append,))], 4)
    current._settled_after = torch._C._current_graph_task_id()  # nobody is called at the end of a backward pass
    over, count = threading.Event(), 3000

    def settle() -> None:
        while not over.is_set():
            current.settle()

    other = threading.Thread(target=settle)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other.start()
        for _ in range(count):
            assert current._wait(parts, [x], ())
    finally:
        over.set()
        other.join()
        sys.setswitchinterval(before)
    current.settle()
    assert len(made) == count
    kfac.detach()


@pytest.mark.parametrize("place", range(3))
def test_one_tensor_that_kernels_cannot_read_is_enough_not_to_wait(place: int) -> None:
    tensors = [torch.zeros(16) for _ in range(3)]
    tensors[place] = torch.zeros(16)[1:]
    nobody: Any = None  # who holds tensors is not asked
    assert not passes.Pass._wait(nobody, Parts([Part(Fake(torch.stack), (0, 1, 2), ())], 0), tensors, ())


def test_nothing_is_held_after_a_backward_pass(waiting: None) -> None:
    model = network()
    kfac = KFAC(model, lr=0.1, accumulated_loss="sum")
    for seed in range(3):
        loss_of(model, seed).backward()
        assert all(not current._late for current in kfac._window.contents)
        assert all(factor.pending is not None for block in kfac.blocks for factor in block.factors())


def test_factors_are_the_same(request: pytest.FixtureRequest) -> None:
    results = []
    for _ in range(2):
        model = network()
        kfac = KFAC(model, lr=0.1, accumulated_loss="sum")
        for seed in range(2):
            loss_of(model, seed).backward()
        kfac.step()
        results.append(factors(kfac))
        request.getfixturevalue("waiting")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Reuse(torch.autograd.Function):
    """The identity, whose backward overwrites derivatives that autograd is through with."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *derivatives: Tensor) -> Tensor:
        for tensor in Reuse.seen:
            tensor.zero_()
        Reuse.seen.clear()
        return derivatives[0]


class Reusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Reuse.apply(self.first(x)).tanh())


@pytest.mark.filterwarnings("ignore:.*NaN or inf")
def test_what_is_overwritten_is_refused_and_waits_no_more(waiting: None) -> None:
    torch.manual_seed(0)
    model = Reusing()
    kfac = KFAC(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)

    def step() -> None:
        model.zero_grad()
        output = model(torch.randn(6, 3))
        output.register_hook(lambda gradient: Reuse.seen.append(gradient))
        functional.cross_entropy(output, torch.arange(6) % 4).backward()
        kfac.step()

    with pytest.warns(match="written into during the backward pass"):
        step()
    assert kfac.metrics()["rejected_statistics"] == 1
    step()
    assert kfac.metrics()["rejected_statistics"] == 1
    (second,) = [block for block in kfac.blocks if block.key == "second.weight"]
    assert float(second.straight.row.mean().diagonal(dim1=-2, dim2=-1).sum()) > 0


class Branches(nn.Module):
    """Two layers on one activation, or, `apart`, on two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.apart = False

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.one(x), self.other(x * 2 if self.apart else x)
        return left.tanh() * right.tanh()


def test_what_waits_reaches_factors_that_become_separate(request: pytest.FixtureRequest) -> None:
    """One backward pass through two calls of the model, of which only one has a common activation."""
    results = []
    for waits in (False, True):
        if waits:
            request.getfixturevalue("waiting_inputs")
        torch.manual_seed(0)
        model = Branches()
        kfac = KFAC(model, lr=0.1)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 6, 3, generator=generator), torch.arange(6) % 4
        outputs = []
        for model.apart in (True, False):  # the last call's backward comes first
            outputs.append(model(x[len(outputs)]))
        sum((functional.cross_entropy(output, y) for output in outputs), torch.zeros(())).backward()
        kfac.step()
        results.append(factors(kfac))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_node_leads_to_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it waits, as one entry; another batch size is decided anew, and factors are the same as without."""
    asked: list[torch.Size] = []
    held: list[int] = []

    def run(sizes: Sequence[int]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        kfac = KFAC(model, lr=0.1, factor_update_steps=1)
        generator = torch.Generator().manual_seed(0)
        for size in sizes:
            model.zero_grad()
            x, y = torch.randn(size, 3, generator=generator), torch.arange(size) % 4
            functional.cross_entropy(model(x), y).backward()
            kfac.step()
        return factors(kfac)

    expected = run((6, 6, 6, 5, 6))
    install(monkeypatch, inputs=True, outputs=True)
    late, put = passes.late, waiting_of.Waiting.put

    def counted(operation: Operation, derivative: Tensor, *arguments: Any, **options: Any) -> Late | None:
        asked.append(derivative.shape)
        return late(operation, derivative, *arguments, **options)

    def watched(own: waiting_of.Waiting, parts: Parts, tensors: Sequence[Tensor], *, grows: bool) -> None:
        held.append(len(parts.each))
        put(own, parts, tensors, grows=grows)

    monkeypatch.setattr(passes, "late", counted)
    monkeypatch.setattr(waiting_of.Waiting, "put", watched)
    for one, other in zip(run((6, 6, 6, 5, 6)), expected, strict=True):
        torch.testing.assert_close(one, other)
    # In the first step blocks are made, and what is known of uses is forgotten.
    assert asked == [(6, 4)] * 2 * 2 + [(5, 4)] * 2
    assert held == [2] * 10  # an entry a node, with both of its works


class Kinds(nn.Module):
    """Two layers that share both of their factors, a norm layer with two uses at a node, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.LayerNorm(4), Plain(4, 4)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x) + self.second(x)).tanh()
        out: Tensor = self.last(self.norm(hidden) if self.twice else hidden)
        return out


class Plain(nn.Linear):
    """Without a bias: nothing but a product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


@pytest.mark.parametrize("change", ["nothing", "terms", "gradients", "uses", "ranks"])
def test_what_is_remembered_of_a_node_holds_only_for_the_same_work(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors lie as they did in every step: something else decides what is to be done with them."""
    held: list[int] = []

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Kinds()
        kfac = KFAC(model, lr=0.1, factor_update_steps=1, inv_update_steps=100, kl_clip=None)
        elsewhere: list[Factor] = []
        kfac._window.takes = lambda factor: factor not in elsewhere
        for step in range(6):
            model.zero_grad()
            odd = step % 2 == 1
            model.twice = odd and change == "uses"
            if change == "ranks" and step > 1:
                elsewhere = [block.straight.row for block in kfac._registry][step % 2 :: 2]
            loss = functional.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 4)
            if change == "terms":
                kfac.capture(loss, terms=12.0 if odd else 6.0)
            some = [parameter for name, parameter in model.named_parameters() if name != "norm.bias"]
            loss.backward(inputs=some if odd and change == "gradients" else None)
            kfac.step()
        return [*factors(kfac), *(factor.weight for factor in kfac._registry.factors())]

    def late(
        operation: Operation,
        derivative: Tensor,
        saved: Any,
        *,
        scale: float,
        homogeneous: bool,
        diagonal: Any,
        **_: Any,
    ) -> Late:
        def input_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.input_factors(tensors, homogeneous=homogeneous, diagonal=diagonal[1:])[0]

        def output_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.output_factor(tensors[0], tensors[1:], diagonal=diagonal[0]) * scale

        rows = operation.rows(saved, derivative)
        assert isinstance(rows, int)
        return Late(
            rows, Fake(input_factor) if len(diagonal) == 2 else None, Fake(output_factor, tensors=1 + len(saved)), True
        )

    def watched(own: waiting_of.Waiting, parts: Parts, tensors: Sequence[Tensor], *, grows: bool) -> None:
        held.append(len(parts.each))
        put(own, parts, tensors, grows=grows)

    expected = run()
    install(monkeypatch, inputs=True, outputs=True)
    put = waiting_of.Waiting.put
    monkeypatch.setattr(passes, "late", late)
    monkeypatch.setattr(waiting_of.Waiting, "put", watched)
    for one, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert 2 in held  # a node's works as one entry


def test_gains_and_biases_of_one_derivative_are_one_work() -> None:
    image = Image((2, 4, 3, 3), 36, False, torch.float32)
    gains, biases = (Norm(image, one, not one, False, 1.0) for one in (True, False))
    delivered: list[str] = []

    def of(work: Norm, which: tuple[int, ...]) -> Part:
        return Part(work, which, (lambda moment: delivered.append("gains" if work.gains else "biases"),))

    (both,) = together([of(gains, (0, 1, 2, 3)), of(biases, (0,))])
    assert both.work == Norm(image, True, True, False, 1.0)
    assert both.which == (0, 1, 2, 3)
    for deliver in both.deliver:
        deliver(torch.zeros(()))
    assert delivered == ["gains", "biases"]  # the order of the results
    assert len(together([of(biases, (0,)), of(gains, (0, 1, 2, 3))])) == 2
    assert len(together([of(gains, (0, 1, 2, 3)), of(biases, (4,))])) == 2  # of another derivative

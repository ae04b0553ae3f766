"""What waits for others is computed when the backward pass is over, from what it was: without a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from natgrad import KFAC, passes
from natgrad.blocks.factor import Factor
from natgrad.errors import NatgradWarning
from natgrad.statistics import gpu
from natgrad.statistics import waiting as waiting_of
from natgrad.statistics.gpu import Norm
from natgrad.statistics.image import Image
from natgrad.statistics.operations import Operation
from natgrad.statistics.waiting import Late, Part, Parts, together


@dataclass(frozen=True)
class Fake:
    """A work that this process does itself."""

    compute: Callable[[Sequence[Tensor]], Tensor]
    results: int = 0
    tensors: int = 1

    def plan(self, plan: Any) -> None:
        raise AssertionError("there is no GPU")


def _install(monkeypatch: pytest.MonkeyPatch, *, inputs: bool, outputs: bool, results: bool = False) -> None:
    """Works of which `results` say that they take memory."""

    def late(
        operation: Operation,
        derivative: Tensor,
        saved: Any,
        *,
        fraction: float,
        scale: float,
        homogeneous: bool,
        diagonal: Any,
    ) -> Late:
        def input_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.input_factors(tensors, homogeneous=False, diagonal=[False])[0]

        def output_factor(tensors: Sequence[Tensor]) -> Tensor:
            return operation.output_factor(tensors[0], [], diagonal=diagonal[0]) * scale

        rows, size = operation.rows(saved, derivative), derivative.shape[-1] ** 2 if results else 0
        assert isinstance(rows, int)
        return Late(
            rows,
            Fake(input_factor) if inputs and not homogeneous and not any(diagonal) else None,
            Fake(output_factor, size) if outputs and not operation.keeps_saved else None,
            False,
        )

    monkeypatch.setattr(passes, "late", late)
    monkeypatch.setattr(passes, "ALIGNED_BYTES", 1)

    def moments(works: Sequence[Fake], tensors: Sequence[Tensor]) -> list[Tensor]:
        each = iter(tensors)
        return [work.compute(list(islice(each, work.tensors))) for work in works]

    monkeypatch.setattr(gpu, "moments", moments)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, inputs=False, outputs=True)


@pytest.fixture
def waiting_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, inputs=True, outputs=False)


def put(
    own: waiting_of.Waiting,
    work: Fake,
    size: int,
    deliver: Callable[[Tensor], None] = lambda moment: None,
    *,
    grows: bool = False,
) -> None:
    x = torch.zeros(size)
    own.put(Parts([Part(work, (0,), (deliver,))], x.nbytes), [x], grows=grows)


def test_what_makes_room_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows is done in the end, however much of it waits."""
    _install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_FIRST", 800)
    done: list[str] = []

    def work(name: str) -> Fake:
        def compute(tensors: Sequence[Tensor]) -> Tensor:
            done.append(name)
            return tensors[0]

        return Fake(compute)

    own = waiting_of.Waiting()
    for name in ("small", "large", "small too", "large too"):
        put(own, work(name), 100, grows=name.startswith("large"))
        assert not own.is_full
    put(own, work("last straw"), 1)
    assert own.is_full
    assert own.flush(everything=False)
    assert done == ["small", "small too", "last straw"]
    put(own, work("huge"), 10**6, grows=True)
    assert not own.is_full
    assert own.flush(everything=False)
    assert own.flush()
    assert done[3:] == ["large", "large too", "huge"]


@pytest.mark.parametrize(("results", "grows"), [(100, False), (101, True)])
def test_results_that_are_larger_than_what_they_are_of(results: int, grows: bool) -> None:
    assert Parts([Part(Fake(lambda tensors: tensors[0], results), (0,), ())], 400).grows is grows


def turns(own: waiting_of.Waiting, sizes: Sequence[int]) -> list[int]:
    """The bytes that are done in each turn of a backward pass, as `Pass` goes about it."""
    waits, found = 0, []

    def flush() -> None:
        nonlocal waits
        assert own.flush(everything=False)
        found.append(waits)
        waits = 0

    for size in sizes:
        if not own.has_room(Parts([Part(Fake(lambda tensors: tensors[0]), (0,), ())], size)):
            flush()
        put(own, Fake(lambda tensors: tensors[0]), size // 4)
        waits += size
        if own.is_full:
            flush()
    own.flush()
    return [*found, waits]


def test_little_waits_at_first_and_a_third_of_what_has_been_done_more_later(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_MOST", 1500)
    monkeypatch.setattr(waiting_of, "_FIRST", 600)
    assert turns(waiting_of.Waiting(), [300] * 20) == [600, 600, 900, 1200, 1500, 1200]
    assert turns(waiting_of.Waiting(), [700, 300, 900, 100]) == [700, 300, 900, 100]


def test_activations_that_come_and_go_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_FIRST", 200)
    monkeypatch.setattr(waiting_of, "_MOST_OF_NOTHING_FREED", 300)
    assert turns(waiting_of.Waiting(frees=False), [100] * 20) == [200, 200, *[300] * 5, 100]


def test_what_may_wait_is_bounded() -> None:
    """The numbers that the docs name."""
    assert (waiting_of._FIRST, waiting_of._MOST, waiting_of._MOST_OF_NOTHING_FREED) == (2**26, 2**30, 2**28)
    assert 4 * waiting_of._RESULTS == 2**27


@pytest.mark.parametrize("seed", range(5))
def test_the_backward_pass_has_freed_what_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first, or one layer's: half of what waits or is done are activations, which autograd frees. Results
    take a quarter of what is done, and copies a quarter of what is being done.
    """
    _install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_FIRST", 400)
    generator = torch.Generator().manual_seed(seed)
    sizes = (4 * torch.randint(1, 200, (200,), generator=generator)).tolist()
    done, beyond = 0, 0.0
    for size in turns(waiting_of.Waiting(), sizes):
        freed = (done + size) / 2
        beyond = max(beyond, size + done / 4 + size / 4 - freed)
        done += size
    assert done == sum(sizes)
    assert beyond <= 0.75 * max(400, *sizes)


def counted_turns(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Gets the sizes of the derivatives whose factors are made together."""
    plain, found = gpu.moments, list[list[int]]()

    def moments(works: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        found.append([tensor.shape[-1] for tensor in tensors])
        return plain(works, tensors)

    monkeypatch.setattr(gpu, "moments", moments)
    return found


@pytest.mark.parametrize(
    ("widths", "first", "turns"),
    [
        ((4, 8, 4, 4), 96, [[4], [4], [8, 4]]),
        ((6, 8, 4), 100, [[4], [6], [8]]),
        ((4, 8, 4, 4), 288, [[4, 4, 8, 4]]),
    ],
    ids=["no room for more", "no room for one", "room"],
)
def test_large_factors_are_made_in_the_end(
    widths: tuple[int, ...], first: int, turns: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 × 8, of 6 rows of 8; others, 4 × 4 of 6 rows of 4, when there is no room for more of them."""
    _install(monkeypatch, inputs=False, outputs=True, results=True)
    made = counted_turns(monkeypatch)
    monkeypatch.setattr(waiting_of, "_FIRST", first)
    kfac = KFAC(model := nn.Sequential(*map(nn.Linear, (3, *widths), widths)), lr=0.1)
    loss_of(model, 0).backward()
    assert made == turns
    kfac.step()


def test_what_a_large_factor_has_already_is_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all uses of a weight one waits to the end: moments of others are added to its own, and freed."""
    _install(monkeypatch, inputs=False, outputs=True, results=True)
    made = counted_turns(monkeypatch)
    monkeypatch.setattr(waiting_of, "_FIRST", 200)
    first, again, last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)
    kfac = KFAC(model := nn.Sequential(first, *[again] * 5, last), lr=0.1)
    loss_of(model, 0).backward()
    # 192 bytes each, and 96 of the last layer, which comes first: rooms of 200, 232, 296, 360.
    assert made == [[4], [8], [8], [8], [8, 8, 8]]
    kfac.step()


def test_what_has_no_room_at_all_is_done_at_once(waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_of, "_FIRST", 95)
    made = counted_turns(monkeypatch)
    model = network()
    seen: list[int] = []
    hidden = model[:4](torch.randn(6, 3))
    hidden.register_hook(lambda gradient: seen.append(len(made)))
    kfac = KFAC(model[4], lr=0.1)
    functional.cross_entropy(model[4](hidden), torch.arange(6) % 4).backward()
    assert seen == [1]
    kfac.detach()


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


def test_less_waits_where_nothing_is_freed(waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are computed again in the backward pass, and once graphs have been gone through twice."""
    freed: list[bool] = []

    class Watched(waiting_of.Waiting):
        def __init__(self, *, frees: bool) -> None:
            super().__init__(frees=frees)
            freed.append(frees)

    monkeypatch.setattr(passes, "Waiting", Watched)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 4)
            self.checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
            out: Tensor = self.head(hidden)
            return out

    kfac = KFAC(model := Model(), lr=0.1, accumulated_loss="sum")
    for model.checkpointed in (False, True, False):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
    assert freed == [True, False, True]
    with pytest.warns(NatgradWarning, match="a second backward"):
        loss.backward()
    loss_of(model, 0).backward()
    assert freed == [True, False, True, False]
    kfac.detach()


@pytest.mark.parametrize("place", range(3))
def test_one_tensor_that_kernels_cannot_read_is_enough_not_to_wait(place: int) -> None:
    tensors = [torch.zeros(16) for _ in range(3)]
    tensors[place] = torch.zeros(16)[1:]
    nobody: Any = None  # who holds tensors is not asked
    assert not passes.Pass._wait(nobody, Parts([], 0), tensors, ())


def test_large_results_are_made_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[list[int]] = []

    def moments(works: Sequence[Any], tensors: Any) -> list[Tensor]:
        together.append([work.results for work in works])
        return [torch.zeros(1)] * len(works)

    monkeypatch.setattr(gpu, "moments", moments)
    monkeypatch.setattr(waiting_of, "_RESULTS", 100)
    own = waiting_of.Waiting()
    delivered: list[Tensor] = []
    for results in (60, 40, 1, 99, 250, 10):
        put(own, Fake(lambda tensors: tensors[0], results), 1, delivered.append)
    assert own.flush()
    assert together == [[60, 40], [1, 99], [250], [10]]
    assert len(delivered) == 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return functional.cross_entropy(model(torch.randn(6, 3, generator=generator)), torch.arange(6) % 4)


def factors(kfac: KFAC) -> list[Tensor]:
    return [factor.mean() for block in kfac.blocks for factor in block.factors()]


def test_nothing_is_held_after_a_backward_pass(waiting: None) -> None:
    model = network()
    kfac = KFAC(model, lr=0.1, accumulated_loss="sum")
    for seed in range(3):
        loss_of(model, seed).backward()
        assert all(not current._late for current in kfac._window.contents)
        assert all(factor.pending is not None for block in kfac.blocks for factor in block.factors())


def test_what_has_no_room_is_done_in_the_middle(waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = counted_turns(monkeypatch), []
    for first in (waiting_of._FIRST, 2 * 6 * 4 * 4):  # of derivatives of three layers, 6 rows of 4 each
        monkeypatch.setattr(waiting_of, "_FIRST", first)
        model = network()
        kfac = KFAC(model, lr=0.1)
        loss_of(model, 0).backward()
        kfac.step()
        found.append(factors(kfac))
    assert made == [[4, 4, 4], [4, 4], [4]]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
    _install(monkeypatch, inputs=True, outputs=True)
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
    _install(monkeypatch, inputs=True, outputs=True)
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

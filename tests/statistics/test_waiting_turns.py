"""What waits in a backward pass, and when it is done: without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import KFAC, passes
from natgrad.errors import NatgradWarning
from natgrad.statistics import gpu
from natgrad.statistics import waiting as waiting_of
from natgrad.statistics.gpu import Norm, Patches
from natgrad.statistics.image import Image
from natgrad.statistics.waiting import Part, Parts
from waits import Fake, counted_turns, factors, install, loss_of, network


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=False, outputs=True)


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
    install(monkeypatch, inputs=True, outputs=True)
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


IMAGES = torch.arange(6 * 4 * 2 * 2.0).reshape(6, 4, 2, 2)


def held(*tensors: Tensor, cases: Sequence[int], frees: bool = True, grows: bool = True) -> list[Tensor]:
    """What works, each of the first `cases` of one of the tensors, get in the end."""
    found: list[Tensor] = []

    def compute(some: Sequence[Tensor]) -> Tensor:
        found.extend(some)
        return some[0].sum()

    own = waiting_of.Waiting(frees=frees)
    works = [Fake(compute, cases=count) for count in cases]
    parts = Parts([Part(work, (number,), (lambda moment: None,)) for number, work in enumerate(works)], 0)
    own.put(parts, tensors, grows=grows)
    assert own.flush()
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_waits_to_the_end_is_no_more_than_what_is_read(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_WORTH", IMAGES.nbytes // 2)
    one, other = IMAGES.to(memory_format=layout), (-IMAGES).to(memory_format=layout)
    for first, x in zip(held(one, other, cases=(1, 3)), (one, other), strict=True):
        assert torch.equal(first, x[:3])  # what the work that reads most of them needs
        assert first.stride() == x.stride()  # kernels read it as they would have read the whole
        assert first.untyped_storage().nbytes() == x.nbytes // 2
    assert held(one, cases=[4])[0] is one  # less would become free than a copy is worth
    assert held(one, cases=[3], grows=False)[0] is one
    assert held(one, cases=[3], frees=False)[0] is one  # autograd keeps it: a copy would come on top


@pytest.mark.parametrize("x", [IMAGES[:, :, :1], IMAGES[::2], IMAGES[:1].expand(6, -1, -1, -1), torch.ones(8)])
def test_what_is_no_image_or_would_lie_otherwise_waits_as_it_is(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_WORTH", 1)
    for cases in (1, 2, len(x)):
        assert held(x, cases=[cases])[0] is x


def test_what_a_copy_was_made_of_may_be_written_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, as an in-place activation does, and while the copy waits."""
    install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_WORTH", 1)
    x, found = IMAGES.clone().mul_(1), list[Tensor]()
    own = waiting_of.Waiting()
    work = Fake(lambda tensors: tensors[0].sum(), cases=3)
    own.put(Parts([Part(work, (0,), (found.append,))], x.nbytes), [x], grows=True)
    x.zero_()
    assert own.flush()
    assert found == [IMAGES[:3].sum()]


def test_works_know_how_many_cases_they_read() -> None:
    image = Image.of(torch.zeros(6, 4, 2, 3), 5)
    assert Patches(image).cases == Norm(image, True, True, False, 1.0).cases == 5


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
    install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_MOST", 1500)
    monkeypatch.setattr(waiting_of, "_FIRST", 600)
    assert turns(waiting_of.Waiting(), [300] * 20) == [600, 600, 900, 1200, 1500, 1200]
    assert turns(waiting_of.Waiting(), [700, 300, 900, 100]) == [700, 300, 900, 100]


def test_activations_that_come_and_go_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=True, outputs=True)
    monkeypatch.setattr(waiting_of, "_FIRST", 200)
    monkeypatch.setattr(waiting_of, "_MOST_OF_NOTHING_FREED", 300)
    assert turns(waiting_of.Waiting(frees=False), [100] * 20) == [200, 200, *[300] * 5, 100]


def test_what_may_wait_is_bounded() -> None:
    """The numbers that the docs name."""
    assert (waiting_of._FIRST, waiting_of._MOST, waiting_of._MOST_OF_NOTHING_FREED) == (2**26, 2**30, 2**28)
    assert 4 * waiting_of._RESULTS == 2**27
    assert waiting_of._WORTH == 2**20


@pytest.mark.parametrize("seed", range(5))
def test_the_backward_pass_has_freed_what_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first, or one layer's: half of what waits or is done are activations, which autograd frees. Results
    take a quarter of what is done, and copies a quarter of what is being done.
    """
    install(monkeypatch, inputs=True, outputs=True)
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
    install(monkeypatch, inputs=False, outputs=True, results=True)
    made = counted_turns(monkeypatch)
    monkeypatch.setattr(waiting_of, "_FIRST", first)
    kfac = KFAC(model := nn.Sequential(*map(nn.Linear, (3, *widths), widths)), lr=0.1)
    loss_of(model, 0).backward()
    assert made == turns
    kfac.step()


def test_the_time_of_copies_is_that_of_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, inputs=True, outputs=True, results=True)
    layers = nn.Linear(3, 16, bias=False), nn.Linear(16, 4, bias=False)
    kfac = KFAC(model := nn.Sequential(*layers), lr=0.1)
    kfac.clock = natgrad.Clock()
    during: list[tuple[bool, str | None]] = []
    put = waiting_of.Waiting.put

    def watched(own: waiting_of.Waiting, parts: Parts, tensors: Sequence[Tensor], *, grows: bool) -> None:
        during.append((grows, kfac.clock.present))
        put(own, parts, tensors, grows=grows)

    monkeypatch.setattr(waiting_of.Waiting, "put", watched)
    loss_of(model, 0).backward()
    assert during == [(False, None), (True, "statistics")]  # the last layer comes first, and is small
    kfac.detach()


def test_what_a_large_factor_has_already_is_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all uses of a weight one waits to the end: moments of others are added to its own, and freed."""
    install(monkeypatch, inputs=False, outputs=True, results=True)
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

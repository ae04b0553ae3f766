"""Digits and CIFAR-10 in memory: order, crops and flips follow from seed, epoch and case alone, and are exact."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad import data
from natgrad.data import chunks
from natgrad.data.draws import ORDER, SHIFT, generator, mixed
from natgrad.data.loading import CIFAR10, DIGITS, in_memory
from natgrad.recipes.schema import DataOptions

CPU = torch.device("cpu")
CASES = 50
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def raw(cases: int = CASES) -> tuple[Tensor, Tensor]:
    """Random images, each with its number as its label."""
    return torch.randint(0, 256, (cases, 3, 32, 32), generator=generator(7), dtype=torch.uint8), torch.arange(cases)


def small(
    *,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    channels_last: bool = False,
    reconstruct: bool = False,
    **kwargs: Any,
) -> data.Data:
    options = DataOptions(kind="cifar10", **{"pad": 4, "flip": True, **kwargs})
    place = data.Place(device=CPU, rank=rank, ranks=ranks, channels_last=channels_last)
    names = tuple("abc")
    return in_memory("small", raw(), raw(11), options, CIFAR10, names, seed=seed, place=place, reconstruct=reconstruct)


def batches(split: data.Split, number: int = 0, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    return list(split.epoch(number, **kwargs))


def same(some: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_crops_and_flips_are_those_of_a_plain_implementation() -> None:
    images, _ = raw()
    random = generator(3, SHIFT, 2)
    down, right = torch.randint(9, (2, CASES), generator=random)
    flips = torch.rand(CASES, generator=random) < 0.5
    order = torch.randperm(CASES, generator=generator(3, ORDER, 2))
    assert flips.any()
    assert not flips.all()
    pixels = torch.cat([x for x, _ in small(seed=3, reconstruct=True).train.epoch(2, batch=8)]).mul(255).round()
    inputs, labels = (torch.cat(both) for both in zip(*small(seed=3).train.epoch(2, batch=8), strict=True))
    assert torch.equal(labels, order[:48])
    for place, case in enumerate(labels.tolist()):
        padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
        padded[:, 4:36, 4:36] = images[case]
        cut = padded[:, down[case] : down[case] + 32, right[case] : right[case] + 32]
        cut = cut.flip(-1) if flips[case] else cut
        assert torch.equal(pixels[place].to(torch.uint8), cut)
        torch.testing.assert_close(inputs[place], (cut / 255 - MEAN) / DEVIATION, rtol=1e-5, atol=1e-6)


def test_without_augmentation_every_image_is_as_it_is() -> None:
    images, _ = raw()
    for x, y in small(pad=0, flip=False).train.epoch(0, batch=10):
        torch.testing.assert_close(x, (images[y] / 255 - MEAN) / DEVIATION, rtol=1e-4, atol=1e-5)


def test_tests_come_once_in_order_and_not_augmented() -> None:
    images, labels = raw(11)
    found = list(small().test.once(batch=4))
    assert [len(y) for _, y in found] == [4, 4, 3]
    assert torch.equal(torch.cat([y for _, y in found]), labels)
    torch.testing.assert_close(
        torch.cat([x for x, _ in found]), (images / 255 - MEAN) / DEVIATION, rtol=1e-4, atol=1e-5
    )
    training = torch.cat([x for x, _ in small().train.once(batch=16)])
    torch.testing.assert_close(training, (raw()[0] / 255 - MEAN) / DEVIATION, rtol=1e-4, atol=1e-5)


def test_an_epoch_can_begin_anywhere() -> None:
    train = small().train
    whole = batches(train, 3, batch=8)
    assert len(whole) == train.steps(8) == 6
    for start in (1, 5, 6):
        assert same(batches(train, 3, batch=8, start=start), whole[start:])
    assert same(batches(small().train, 3, batch=8), whole)
    with pytest.raises(ValueError, match="between 0 and the epoch's 6 steps, got 7"):
        train.epoch(3, batch=8, start=7)


def test_epochs_and_seeds_differ() -> None:
    train = small().train
    assert not same(batches(train, 0, batch=8), batches(train, 1, batch=8))
    assert not same(batches(train, 0, batch=8), batches(small(seed=1).train, 0, batch=8))
    assert mixed(1, 2) != mixed(2, 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_steps_of_one(ranks: int) -> None:
    alone = batches(small().train, 1, batch=4 * ranks)
    shares = [batches(small(rank=rank, ranks=ranks).train, 1, batch=4) for rank in range(ranks)]
    together = [
        (torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in zip(*shares, strict=True)
    ]
    assert same(together, alone)
    tests = [torch.cat([y for _, y in small(rank=rank, ranks=ranks).test.once(batch=2)]) for rank in range(ranks)]
    assert [one.tolist() for one in tests] == [list(range(rank, 11, ranks)) for rank in range(ranks)]


def test_a_rank_may_have_nothing_to_test() -> None:
    assert list(small(rank=11, ranks=12).test.once(batch=4)) == []


def test_the_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = batches(small().train, batch=8)
    monkeypatch.setattr(chunks, "STEPS", 1)
    assert same(batches(small().train, batch=8), at_once)
    monkeypatch.setattr(chunks, "STEPS", 4)
    assert same(batches(small().train, batch=8), at_once)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    found = small()
    batches(found.train, batch=8)
    list(found.test.once(batch=8))
    data.load(DataOptions(kind="digits"), seed=0, place=data.Place(device=CPU))
    data.synthetic(DataOptions(kind="cifar10"), seed=0, place=data.Place(device=CPU), classes=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_channels_last_changes_the_layout_alone() -> None:
    plain, last = batches(small().train, batch=8), batches(small(channels_last=True).train, batch=8)
    assert same(plain, last)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in last)
    assert all(x.is_contiguous() for x, _ in plain)


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_autoencoder_gets_pixels_as_targets(channels_last: bool) -> None:
    images, _ = raw()
    found = small(reconstruct=True, pad=0, flip=False, channels_last=channels_last)
    (x, y), *_ = batches(found.train, batch=50)
    order = torch.randperm(CASES, generator=generator(0, ORDER, 0))
    torch.testing.assert_close(x, images[order] / 255)
    assert torch.equal(y, x.reshape(50, -1))
    assert x.min() == 0
    assert x.max() == 1
    x.zero_()
    assert y.max() == 1  # a loop may change its inputs


def test_too_few_cases_for_a_step() -> None:
    train = small(ranks=3).train
    with pytest.raises(data.DataError, match=r"50 cases, and one step takes 17 × 3 ranks = 51: .*training.batch=16"):
        train.steps(17)
    with pytest.raises(data.DataError, match="one step takes 51"):
        small().train.epoch(0, batch=51)
    with pytest.raises(data.DataError, match="use fewer ranks"):
        small(ranks=64).train.steps(1)


def test_digits() -> None:
    place = data.Place(device=CPU)
    found = data.load(DataOptions(kind="digits"), seed=5, place=place)
    assert (found.train.cases, found.test.cases, found.classes, found.shape) == (1500, 297, 10, (1, 8, 8))
    assert found.labels == tuple("0123456789")
    assert found.description == "digits: 1,500 training and 297 test images of 8×8"
    assert (found.notes, found.damaged_seen()) == ((), [])
    x, y = next(found.train.epoch(0, batch=1500))
    assert (x.shape, x.dtype, y.dtype) == ((1500, 1, 8, 8), torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert torch.equal(16 * x, (16 * x).round())
    tests, other = (
        torch.cat([y for _, y in data.load(DataOptions(kind="digits"), seed=seed, place=place).test.once(batch=100)])
        for seed in (5, 6)
    )
    assert torch.equal(tests, other)  # the split does not depend on the seed
    assert tests.bincount().min() > 15
    assert DIGITS.largest == 16
    found.close()
    found.close()


def test_the_library_does_not_import_it() -> None:
    code = (
        "import sys, natgrad; assert 'natgrad.data' not in sys.modules\n"
        "import natgrad.data; assert not {'PIL', 'sklearn'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(data.DataError, match=r'needs scikit-learn: pip install "natgrad\[cli\]"'):
        data.load(DataOptions(kind="digits"), seed=0, place=data.Place(device=CPU))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("side", ["cpu", "device", "auto"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gpu_gets_the_same(side: Any, channels_last: bool) -> None:
    options = DataOptions(kind="cifar10", pad=4, flip=True, augment_on=side)
    place = data.Place(device=torch.device("cuda"), channels_last=channels_last)
    found = in_memory("s", raw(), raw(11), options, CIFAR10, ("a",), seed=0, place=place, reconstruct=False)
    assert side in ("auto", found.train.where)
    assert "augmented on the" in found.description
    next(found.train.epoch(1, batch=8))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if found.train.where == "device" else "default")
    try:
        here = batches(found.train, batch=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same([(x.cpu(), y.cpu()) for x, y in here], batches(small().train, batch=8))
    assert same([(x.cpu(), y.cpu()) for x, y in found.test.once(batch=4)], list(small().test.once(batch=4)))

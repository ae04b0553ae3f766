"""Folders of images: found, decoded by workers in any number, repeated bit for bit, and what is damaged."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor

import natgrad
from natgrad import data
from natgrad.data import decoding, folders, images
from natgrad.data.draws import CASE, ORDER, generator, mixed
from natgrad.recipes.schema import DataOptions

CPU = torch.device("cpu")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def picture(seed: int, width: int = 26, height: int = 20) -> Image.Image:
    noise = random.Random(seed).randbytes(48)
    return Image.frombytes("RGB", (4, 4), noise).resize((width, height), Image.Resampling.BICUBIC)


def write(root: Path, layout: dict[str, int], ending: str = "jpg") -> Path:
    """So many pictures in each folder."""
    for folder, count in layout.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture(hash((folder, number))).save(root / folder / f"{number:03}.{ending}", quality=95)
    return root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, 20 images for training and 7 for testing. Nobody changes it."""
    layout = {"train/cat": 8, "train/ant": 12, "val/ant": 4, "val/cat": 3}
    return write(tmp_path_factory.mktemp("images"), layout)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The same for one test."""
    return write(tmp_path, {"train/ant": 6, "train/cat": 4, "val/ant": 3, "val/cat": 2})


def load(
    path: Path, *, seed: int = 0, rank: int = 0, ranks: int = 1, channels_last: bool = False, reconstruct: bool = False,
    **kwargs: Any,
) -> data.Data:  # fmt: skip
    given = {"size": 16, "resize": 18, "workers": 0, "flip": True, **kwargs}
    options = DataOptions(kind="images", path=str(path), **given)
    place = data.Place(device=CPU, rank=rank, ranks=ranks, channels_last=channels_last)
    return data.load(options, seed=seed, place=place, reconstruct=reconstruct)


def same(some: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)
    )


def labels(batches: Iterator[tuple[Tensor, Tensor]]) -> list[int]:
    return [label for _, y in batches for label in y.tolist()]


def test_what_is_found(shared: Path) -> None:
    found = load(shared)
    assert (found.train.cases, found.test.cases, found.classes) == (20, 7, 2)
    assert found.labels == ("ant", "cat")
    assert found.shape == (3, 16, 16)
    assert "20 training and 7 test images of 2 classes at 16×16" in found.description
    assert found.notes == ()
    assert labels(found.test.once(batch=3)) == [0] * 4 + [1] * 3
    assert sorted(labels(found.train.epoch(0, batch=5))) == [0] * 12 + [1] * 8


def test_an_epoch_is_what_a_plain_loop_makes(shared: Path) -> None:
    files = folders.find(shared, data.base.Notes(skip=False)).train
    order = torch.randperm(20, generator=generator(3, ORDER, 2))
    inputs, targets = (torch.cat(both) for both in zip(*load(shared, seed=3).train.epoch(2, batch=6), strict=True))
    assert len(inputs) == 18
    flipped = 0
    for place, case in enumerate(order[:18].tolist()):
        numbers = random.Random(mixed(3, CASE, 2, case))
        flip = numbers.random() < 0.5
        flipped += flip
        with Image.open(files.path(case)) as image:
            left, upper, right, lower = decoding.random_box(*image.size, 0.08, numbers)
            small = image.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR, (left, upper, right, lower))
        plain = torch.tensor(list(small.tobytes()), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
        plain = plain.flip(-1) if flip else plain
        torch.testing.assert_close(inputs[place], (plain / 255 - MEAN) / DEVIATION, rtol=1e-5, atol=1e-5)
        assert targets[place] == files.labels[case]
    assert 0 < flipped < 18


def test_workers_do_not_change_anything_and_live_on(shared: Path) -> None:
    alone, helped = load(shared), load(shared, workers=2)
    before = torch.get_rng_state()
    whole = list(alone.train.epoch(0, batch=4))
    assert same(list(helped.train.epoch(0, batch=4)), whole)
    processes = {process.pid for process in multiprocessing.active_children()}
    assert len(processes) == 2
    assert same(list(helped.train.epoch(0, batch=4, start=3)), whole[3:])
    begun = helped.train.epoch(1, batch=4)  # and left
    next(begun)
    for process in processes:  # signals to the whole job are the main process's business
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGTERM)
    assert same(list(helped.train.epoch(2, batch=4)), list(alone.train.epoch(2, batch=4)))
    with pytest.raises(RuntimeError, match="another one of the same split was begun"):
        next(begun)
    assert {process.pid for process in multiprocessing.active_children()} == processes
    begun = helped.train.epoch(3, batch=4)
    next(begun)
    assert same(list(helped.test.once(batch=4)), list(alone.test.once(batch=4)))  # in the middle of an epoch
    assert same([next(begun)], list(alone.train.epoch(3, batch=4))[1:2])
    helped.close()
    helped.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="or the split was closed"):
        next(begun)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_go_on_one_after_the_other_or_not(shared: Path, workers: int) -> None:
    found = load(shared, workers=workers)
    once = {number: list(load(shared).train.epoch(number, batch=4)) for number in range(4)}
    for number in (0, 1, 3, 3, 2):  # what the workers have begun is used where it is right, and dropped where not
        assert same(list(found.train.epoch(number, batch=4)), once[number])
    assert same(list(found.train.epoch(3, batch=5)), list(load(shared).train.epoch(3, batch=5)))
    list(found.train.epoch(0, batch=4))
    assert same(list(found.train.epoch(1, batch=4, start=2)), once[1][2:])
    list(found.train.epoch(0, batch=4))
    assert len(list(found.test.once(batch=3))) == 3  # an evaluation in between
    assert same(list(found.train.epoch(1, batch=4)), once[1])
    found.close()
    assert same(list(found.train.epoch(2, batch=4)), once[2])
    found.close()


def test_workers_that_die_are_told_and_replaced(shared: Path) -> None:
    found, whole = load(shared, workers=2), list(load(shared).train.epoch(1, batch=4))
    batches = found.train.epoch(1, batch=4)
    served = [next(batches)]
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.warns(natgrad.NatgradWarning, match=r"decodes images ended: DataLoader worker.*taken its place"):
        served += list(batches)
    assert same(served, whole)
    found.close()


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error.\nAnd so on."), "Bus error."),
        (ConnectionResetError(104, "Connection reset by peer"), "reset by peer'\\)"),  # with its answer under way
        (EOFError(), "EOFError\\(\\)"),
    ],
)
def test_workers_that_always_die_end_the_run(
    shared: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    class Dead:
        def __iter__(self) -> Iterator[Any]:
            raise error

    train = load(shared).train
    with monkeypatch.context() as patched:
        patched.setattr(train, "_started", lambda batch: Dead())
        with pytest.raises(
            data.DataError, match=rf"images ended: DataLoader worker .*{said} \(out of memory\?.*/dev/shm"
        ):
            list(train.epoch(1, batch=4))
    assert len(list(train.epoch(1, batch=4))) == 5


def test_what_workers_get_can_be_sent(shared: Path) -> None:
    decoder = load(shared).train._decoder  # spawned processes get a pickle
    images_here, *rest = decoder[(1, [3, 4])]
    images_there, *others = pickle.loads(pickle.dumps(decoder))[(1, [3, 4])]
    assert torch.equal(images_here, images_there)
    assert rest == others


def test_an_epoch_can_begin_anywhere(shared: Path) -> None:
    train = load(shared).train
    whole = list(train.epoch(5, batch=3))
    assert len(whole) == train.steps(3) == 6
    assert same(list(train.epoch(5, batch=3, start=4)), whole[4:])
    assert not same(list(train.epoch(6, batch=3)), whole)
    assert not same(list(load(shared, seed=1).train.epoch(5, batch=3)), whole)


def test_ranks_share_the_steps_of_one(shared: Path) -> None:
    alone = list(load(shared).train.epoch(1, batch=6))
    shares = [list(load(shared, rank=rank, ranks=2).train.epoch(1, batch=3)) for rank in (0, 1)]
    together = [(torch.cat([a, b]), torch.cat([c, d])) for (a, c), (b, d) in zip(*shares, strict=True)]
    assert same(together, alone)
    tests = [labels(load(shared, rank=rank, ranks=2).test.once(batch=3)) for rank in (0, 1)]
    assert tests == [[0, 0, 1, 1], [0, 0, 1]]
    assert list(load(shared, rank=8, ranks=9).test.once(batch=3)) == []


def test_batches_in_parts_are_the_same(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(load(shared).train.epoch(0, batch=10))
    monkeypatch.setattr(images, "PART", 4)
    assert same(list(load(shared).train.epoch(0, batch=10)), whole)


def test_layouts_and_targets(shared: Path) -> None:
    plain, last = (list(load(shared, channels_last=one).train.epoch(0, batch=10)) for one in (False, True))
    assert same(plain, last)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in last)
    assert all(x.is_contiguous() for x, _ in plain)
    for x, y in load(shared, reconstruct=True).train.epoch(0, batch=10):
        assert torch.equal(y, x.flatten(1))
        assert x.min() >= 0
        assert x.max() <= 1


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize(("width", "height"), [(100, 60), (60, 100), (10, 7), (20, 20), (1, 1), (3, 300)])
def test_resized_parts_are_inside_and_of_the_right_size(width: int, height: int, at_random: bool, square: bool) -> None:
    options = DataOptions(kind="images", size=16, resize=20, square=square)
    across = 20 / (width if square else min(width, height))
    down = 20 / (height if square else min(width, height))
    corners = set()
    for seed in range(40 if at_random else 1):
        box = decoding.resized_box(width, height, options, random.Random(seed) if at_random else None)
        left, upper, right, lower = box
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        assert ((right - left) * across, (lower - upper) * down) == pytest.approx((16, 16))
        if at_random:
            assert left * across == pytest.approx(round(left * across))
            corners.add((left, upper))
        else:
            assert (left + right, upper + lower) == pytest.approx((width, height))
    assert not at_random or len(corners) > 10


@pytest.mark.parametrize(("width", "height"), [(100, 60), (10, 7), (1, 1), (3, 300), (300, 3)])
def test_random_parts_are_inside_and_of_the_right_proportions(width: int, height: int) -> None:
    for seed in range(100):
        left, upper, right, lower = decoding.random_box(width, height, 0.08, random.Random(seed))
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        if (width, height) == (100, 60):
            assert 0.07 < (right - left) * (lower - upper) / 6000 <= 1
            assert 0.7 < (right - left) / (lower - upper) < 1.4
    if width != height and min(width, height) == 3:  # after ten tries, the centre
        assert abs(left + right - width) <= 1
        assert abs(upper + lower - height) <= 1


def test_the_centre_of_a_large_jpeg_is_that_of_a_whole_decoding(tmp_path: Path) -> None:
    picture(1, 800, 600).save(tmp_path / "large.jpg", quality=98)
    options = DataOptions(kind="images", size=48, resize=64)
    found = decoding.decode(str(tmp_path / "large.jpg"), 48, lambda w, h: decoding.resized_box(w, h, options, None))
    with Image.open(tmp_path / "large.jpg") as image:
        whole = image.resize((48, 48), Image.Resampling.BILINEAR, (175, 75, 625, 525))
    plain = torch.tensor(list(whole.tobytes()), dtype=torch.uint8).view(48, 48, 3)
    assert (found.float() - plain.float()).abs().mean() < 2


@pytest.mark.parametrize("crop", ["random-resized", "random", "centre"])
@pytest.mark.parametrize("square", [False, True])
def test_every_kind_of_crop_serves_small_images_too(tmp_path: Path, crop: Any, square: bool) -> None:
    write(tmp_path, {"train/a": 2, "val/a": 1})
    picture(5, 5, 3).save(tmp_path / "train/a/tiny.png")
    train = load(tmp_path, crop=crop, square=square).train
    (x, _), *_ = train.epoch(0, batch=3)
    assert x.shape == (3, 3, 16, 16)
    assert same(list(train.epoch(0, batch=3)), [(x, torch.zeros(3, dtype=torch.long))])
    assert same(list(train.epoch(1, batch=3)), list(load(tmp_path, crop=crop, square=square).train.epoch(1, batch=3)))


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("L", "png"), ("L", "jpg"), ("P", "png"), ("P", "gif"), ("RGBA", "png"), ("LA", "png"), ("1", "png"),
     ("CMYK", "jpg"), ("I;16", "png"), ("RGB", "webp"), ("RGB", "bmp")],
)  # fmt: skip
def test_every_mode_becomes_colour(tmp_path: Path, mode: str, ending: str) -> None:
    grey = Image.new("L", (20, 20), 255)
    grey.paste(64, (0, 0, 10, 20))
    if mode == "I;16":
        image = Image.frombytes("I;16", (20, 20), b"".join(bytes([0, value]) for value in grey.tobytes()))
    else:
        image = grey.convert("RGB").convert(mode)
    image.save(tmp_path / f"one.{ending}")
    pixels = decoding.decode(str(tmp_path / f"one.{ending}"), 20, lambda w, h: (0, 0, w, h)).float()
    assert pixels.shape == (20, 20, 3)
    assert pixels[:, 15:].mean() > 250
    if mode != "1":
        assert abs(pixels[:, :6].mean() - 64) < 6


def broken(path: Path) -> dict[str, Any]:
    """Ways to damage a file, with what is said about them."""
    whole = path.read_bytes()
    return {
        "truncated": (whole[:-60], "image file is truncated"),
        "empty": (b"", "the file is empty"),
        "text": (b"<html>not found</html>", "not an image of a known format"),
        "png": (b"\x89PNG\r\n\x1a\n" + bytes(40), "damaged|not an image"),
    }


@pytest.mark.parametrize(
    ("kind", "workers"), [("truncated", 0), ("empty", 0), ("text", 0), ("png", 0), ("truncated", 1)]
)
def test_damaged_images_are_refused_by_name(own: Path, kind: str, workers: int) -> None:
    path = own / "train/ant/002.jpg"
    content, reason = broken(path)[kind]
    path.write_bytes(content)
    found = load(own, workers=workers)
    with pytest.raises(data.DataError, match=rf"^{path}: .*({reason}).*data.damaged=\"skip\"$"):
        list(found.train.epoch(0, batch=10))
    test = own / "val/cat/001.jpg"
    test.write_bytes(content)
    with pytest.raises(data.DataError, match=rf"^{test}: "):
        list(found.test.once(batch=2))
    found.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_replaced_in_training_left_out_in_tests_and_told_once(own: Path, workers: int) -> None:
    paths = [own / "train/ant/002.jpg", own / "train/ant/003.jpg", own / "train/cat/003.jpg", own / "val/ant/001.jpg"]
    for path, (content, _) in zip(paths, broken(paths[0]).values(), strict=True):
        path.write_bytes(content)
    found = load(own, damaged="skip", workers=workers)
    (x, y), *_ = found.train.epoch(0, batch=10)
    order = torch.randperm(10, generator=generator(0, ORDER, 0)).tolist()
    stands_in = {2: 4, 3: 4, 9: 0}
    cases = [stands_in.get(case, case) for case in order]
    assert torch.equal(x[cases.index(4)], x[order.index(3)])
    assert y.tolist() == [0 if case < 6 else 1 for case in cases]
    assert {text.split(":")[0] for text in found.damaged_seen()} == {str(path) for path in paths[:3]}
    list(found.train.epoch(1, batch=10))
    assert found.damaged_seen() == []
    assert labels(found.test.once(batch=2)) == [0, 0, 1, 1]
    assert [text.split(":")[0] for text in found.damaged_seen()] == [str(paths[3])]
    found.close()


def test_a_batch_of_damaged_tests_alone_is_not_served(own: Path) -> None:
    for number in (0, 1):
        (own / f"val/ant/00{number}.jpg").write_bytes(b"")
    assert [len(y) for _, y in load(own, damaged="skip").test.once(batch=2)] == [2, 1]
    assert list(load(own, damaged="skip", rank=0, ranks=5).test.once(batch=2)) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_damaged(own: Path) -> None:
    (own / "train/ant/000.jpg").chmod(0)
    with pytest.raises(data.DataError, match=r"000.jpg: Permission denied"):
        list(load(own).train.epoch(0, batch=10))


def test_files_that_vanish_and_bombs_are_damaged(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(own)
    (own / "val/ant/000.jpg").unlink()
    with pytest.raises(data.DataError, match=r"000.jpg: No such file"):
        list(found.test.once(batch=10))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(data.DataError, match="DecompressionBombError"):
        list(found.train.epoch(0, batch=10))
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_nothing_readable_at_all_is_an_error_not_a_loop(own: Path) -> None:
    for path in own.rglob("*.jpg"):
        path.write_bytes(b"?")
    found = load(own, damaged="skip")
    with pytest.raises(data.DataError, match=r"none of the 10 images can be read: .*\.jpg: not an image"):
        list(found.train.epoch(0, batch=2))
    with pytest.raises(data.DataError, match="none of the 5 images can be read"):
        list(found.test.once(batch=2))


def test_classes_that_training_lacks_are_wrong_labels(own: Path) -> None:
    write(own, {"val/dog": 2})
    with pytest.raises(data.DataError, match=rf"{own / 'val/dog'}: a class that .*train has no images of"):
        load(own)
    found = load(own, damaged="skip")
    assert (found.classes, found.test.cases) == (2, 5)
    assert "its 2 images are left out" in found.notes[0]


def test_empty_class_folders_are_refused_or_left_out(own: Path) -> None:
    (own / "train/bee").mkdir()
    (own / "train/bee/notes.txt").touch()
    with pytest.raises(data.DataError, match=rf"{own / 'train/bee'}: no images in it"):
        load(own)
    found = load(own, damaged="skip")
    assert found.labels == ("ant", "cat")
    assert str(own / "train/bee") in found.notes[0]


def test_what_is_no_image_is_ignored(own: Path) -> None:
    for name in ("readme.txt", ".DS_Store", "._000.jpg", "list.csv"):
        (own / "train/ant" / name).touch()
    (own / "train/.cache").mkdir()
    (own / "train/index.json").touch()
    write(own, {"train/ant/images": 2}, ending="JPEG")  # as Tiny ImageNet has them
    assert load(own).train.cases == 12


def test_one_folder_is_split_by_the_names_of_its_files(tmp_path: Path) -> None:
    write(tmp_path, {"a": 30, "b": 2, "c": 1}, ending="png")
    found = load(tmp_path)
    assert (found.train.cases, found.test.cases) == (27 + 1 + 1, 3 + 1)
    assert "(one in 10 of each class, held back)" in found.description
    parts = folders.find(tmp_path, data.base.Notes(skip=False))
    train, test = ({files.path(case) for case in range(len(files))} for files in (parts.train, parts.test))
    assert not train & test
    assert len(train | test) == 33
    assert labels(found.test.once(batch=10)) == [0, 0, 0, 1]
    again = folders.find(tmp_path, data.base.Notes(skip=False)).test
    assert {again.path(case) for case in range(len(again))} == test


def test_missing_data_says_what_belongs_where(tmp_path: Path) -> None:
    with pytest.raises(data.MissingData, match=rf"no folder {tmp_path / 'none'}: .*data.path="):
        load(tmp_path / "none")
    with pytest.raises(data.MissingData, match="has no folders; each image belongs into a folder"):
        load(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(data.MissingData, match="none of val, validation, test to test with"):
        load(tmp_path)
    with pytest.raises(data.MissingData, match="needs data.path="):
        data.load(DataOptions(kind="images"), seed=0, place=data.Place(device=CPU))
    (tmp_path / "val").mkdir()
    picture(0).save(tmp_path / "val" / "loose.jpg")
    write(tmp_path, {"train/a": 1})
    with pytest.raises(data.MissingData, match="val has no folders"):
        load(tmp_path)


def test_too_few_cases_for_a_step(shared: Path) -> None:
    with pytest.raises(data.DataError, match="20 cases, and one step takes 32: choose training.batch=20 or less"):
        load(shared).train.epoch(0, batch=32)


def test_workers_are_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, workers in ((64, 1, 16), (64, 8, 7), (2, 1, 1), (1, 1, 1), (4, 8, 1)):
        monkeypatch.setattr(images, "available_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert images.default_workers() == workers


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("side", ["cpu", "device", "auto"])
def test_the_gpu_gets_the_same(shared: Path, side: Any) -> None:
    options = DataOptions(kind="images", path=str(shared), size=16, resize=18, flip=True, workers=2, augment_on=side)
    found = data.load(options, seed=0, place=data.Place(device=torch.device("cuda"), channels_last=True))
    for epoch in (0, 1):
        here = [(x.cpu(), y.cpu()) for x, y in found.train.epoch(epoch, batch=4)]
        assert same(here, list(load(shared).train.epoch(epoch, batch=4)))
    assert same([(x.cpu(), y.cpu()) for x, y in found.test.once(batch=3)], list(load(shared).test.once(batch=3)))
    found.close()
    assert not multiprocessing.active_children()

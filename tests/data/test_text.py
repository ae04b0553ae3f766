"""Text: windows tile it, targets follow by one, and what is not text is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from natgrad import data
from natgrad.recipes.schema import DataOptions


def load(path: Path, *, seed: int = 0, rank: int = 0, ranks: int = 1, **kwargs: Any) -> data.Data:
    options = DataOptions(kind="text", path=str(path), **{"context": 8, **kwargs})
    return data.load(options, seed=seed, place=data.Place(device=torch.device("cpu"), rank=rank, ranks=ranks))


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """200 different characters, so that each says where it stands."""
    path = tmp_path / "numbered.txt"
    path.write_text("".join(chr(0x4E00 + place) for place in range(200)), encoding="utf-8")
    return path


def test_characters_are_sorted_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes("ä b\r\nba\n".encode() * 10)
    found = load(path, context=2)
    assert found.labels == ("\n", "\r", " ", "a", "b", "ä")
    assert (found.classes, found.shape) == (6, (2,))
    assert found.description == "poem.txt: 72 training and 8 test characters, 6 different, in windows of 2"
    x, y = next(found.test.once(batch=2))
    assert "".join(found.labels[one] for one in x.flatten().tolist()) == "ä b\r"
    assert "".join(found.labels[one] for one in y.flatten().tolist()) == " b\r\n"
    assert (x.dtype, y.dtype, x.shape) == (torch.int64, torch.int64, (2, 2))


def test_an_epoch_tiles_the_text_from_a_place_of_its_own(numbered: Path) -> None:
    train = load(numbered).train
    offsets = set()
    for epoch in range(30):
        found = list(train.epoch(epoch, batch=3))
        x, y = (torch.cat([one[part] for one in found]) for part in (0, 1))
        assert torch.equal(y, x + 1)
        begins = sorted(x[:, 0].tolist())
        assert x.max() < 179
        offsets.add(begins[0] % 8)
        assert {begin % 8 for begin in begins} == {begins[0] % 8}
        assert len(set(begins)) == len(begins) == 21
        assert x[:, 0].tolist() != begins
    assert len(offsets) > 4
    assert train.cases == 21


def test_tests_tile_from_the_start_and_drop_the_rest(numbered: Path) -> None:
    found = load(numbered)
    x = torch.cat([x for x, _ in found.test.once(batch=2)])
    assert torch.equal(x, 180 + torch.arange(16).view(2, 8))
    shares = [[x[:, 0].tolist() for x, _ in load(numbered, rank=rank, ranks=3).test.once(batch=2)] for rank in range(3)]
    assert shares == [[[180]], [[188]], []]


def test_it_repeats_from_anywhere_and_on_several_ranks(numbered: Path) -> None:
    whole = [x for x, _ in load(numbered).train.epoch(4, batch=4)]
    assert all(map(torch.equal, [x for x, _ in load(numbered).train.epoch(4, batch=4, start=2)], whole[2:]))
    shares = [[x for x, _ in load(numbered, rank=rank, ranks=2).train.epoch(4, batch=2)] for rank in (0, 1)]
    assert all(torch.equal(torch.cat(both), one) for both, one in zip(zip(*shares, strict=True), whole, strict=True))
    other = [x for x, _ in load(numbered, seed=1).train.epoch(4, batch=4)]
    assert not all(map(torch.equal, whole, other))


def test_the_shortest_text_has_one_window(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghi" * 2)
    found = load(path, test_part=0.5)
    assert (found.train.cases, found.test.cases) == (1, 1)
    (x, y), *_ = found.train.epoch(0, batch=1)
    assert (x.tolist(), y.tolist()) == ([list(range(8))], [list(range(1, 9))])
    with pytest.raises(data.DataError, match=r"test part of \S+short.txt has 2 characters, and one case takes 9"):
        load(path)


def test_many_characters_need_more_than_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("".join(chr(0x4E00 + place) for place in range(1000)), encoding="utf-8")
    found = load(path)
    x, y = next(found.test.once(batch=1))
    assert torch.equal(x[0], torch.arange(900, 908))
    assert torch.equal(y, x + 1)


def test_what_is_not_utf_8_is_refused_by_its_place_or_dropped(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"abcdefgh" * 10 + b"\xe4b" + b"abcdefgh" * 10 + b"\xff")
    with pytest.raises(data.DataError, match=r"latin.txt: byte 80 \(0xe4\) is not UTF-8.*damaged=\"skip\""):
        load(path)
    found = load(path, damaged="skip")
    assert found.classes == 8
    assert "2 such bytes were dropped" in found.notes[0]
    assert "latin.txt" in found.notes[0]


def test_missing_and_empty_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(data.MissingData, match=f"no text at {tmp_path / 'none.txt'}.*data.path="):
        load(tmp_path / "none.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(data.DataError, match=r"empty.txt is empty"):
        load(tmp_path / "empty.txt")
    with pytest.raises(data.DataError, match="cannot be read: Is a directory"):
        load(tmp_path)
    place = data.Place(device=torch.device("cpu"))
    with pytest.raises(data.MissingData, match="needs data.path="):
        data.load(DataOptions(kind="text"), seed=0, place=place)
    with pytest.raises(data.DataError, match="cannot be reconstructed"):
        data.load(DataOptions(kind="text", path="x"), seed=0, place=place, reconstruct=True)


def test_the_global_generator_is_left_alone(numbered: Path) -> None:
    before = torch.get_rng_state()
    list(load(numbered).train.epoch(0, batch=4))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_windows_for_a_step(numbered: Path) -> None:
    with pytest.raises(data.DataError, match=r"21 cases, and one step takes 22: choose training.batch=21"):
        load(numbered).train.epoch(0, batch=22)

"""CIFAR-10's files, python and binary: read, missing, damaged, and not run."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from natgrad import data
from natgrad.recipes.schema import DataOptions

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
RECORDS = 4


def records(name: str) -> tuple[numpy.ndarray, list[int]]:
    random = numpy.random.default_rng(NAMES.index(name))
    return random.integers(0, 256, (RECORDS, 3072), dtype=numpy.uint8), random.integers(0, 10, RECORDS).tolist()


def python_2_pickle(pixels: numpy.ndarray, labels: list[int]) -> bytes:
    """As the official files are written: protocol 2 of Python 2, whose strings are bytes, and numpy of then."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"tR("
        + number(1) + number(len(pixels)) + number(pixels.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR("
        + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        + b"\x89" + string(pixels.tobytes()) + b"tb"
    )  # fmt: skip
    entries = string(b"data") + array + string(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"batch_label") + string(b"training batch") + entries + b"u."


def write_python(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).write_bytes(python_2_pickle(*records(name)))
    return folder


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        pixels, numbers = records(name)
        table = numpy.concatenate([numpy.array(numbers, numpy.uint8)[:, None], pixels], 1)
        (folder / f"{name}.bin").write_bytes(table.tobytes())
    return folder


def load(path: Path, **kwargs: Any) -> data.Data:
    options = DataOptions(kind="cifar10", path=str(path), **kwargs)
    return data.load(options, seed=0, place=data.Place(device=torch.device("cpu")), reconstruct=True)


def labels(path: Path, which: str) -> list[int]:
    options = DataOptions(kind="cifar10", path=str(path), damaged="skip")
    found = data.load(options, seed=0, place=data.Place(device=torch.device("cpu")))
    return torch.cat([y for _, y in getattr(found, which).once(batch=100)]).tolist()


@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("write", [write_python, write_binary])
def test_both_versions_are_read_from_where_people_have_them(tmp_path: Path, write: Any, usual: bool) -> None:
    subfolder = "cifar-10-batches-py" if write is write_python else "cifar-10-batches-bin"
    write(tmp_path / subfolder if usual else tmp_path)
    found = load(tmp_path)
    assert (found.train.cases, found.test.cases, found.classes, found.shape) == (20, 4, 10, (3, 32, 32))
    assert found.labels[9] == "truck"
    assert found.description == "CIFAR-10: 20 training and 4 test images of 32×32"
    pixels = torch.from_numpy(numpy.concatenate([records(name)[0] for name in NAMES[:5]]))
    expected = [label for name in NAMES[:5] for label in records(name)[1]]
    x = torch.cat([x for x, _ in found.train.once(batch=7)])
    torch.testing.assert_close(x, pixels.view(-1, 3, 32, 32) / 255)
    assert labels(tmp_path, "train") == expected
    assert labels(tmp_path, "test") == records("test_batch")[1]
    assert len(found.notes) == 6
    assert "4 records, where CIFAR-10 has 10,000" in found.notes[0]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_python_3_and_new_numpy_are_read_too(tmp_path: Path, protocol: int) -> None:
    for name in NAMES:
        pixels, numbers = records(name)
        content = {b"data": pixels, b"labels": numbers, b"filenames": [b"a.png"] * RECORDS}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=protocol))
    assert labels(tmp_path, "test") == records("test_batch")[1]
    assert load(tmp_path).train.cases == 20


def test_missing_data_says_what_to_get_and_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(data.MissingData) as caught:
        load(Path("somewhere"))
    for part in (str(tmp_path / "somewhere"), "cs.toronto.edu/~kriz/cifar.html", "data.path=", "binary", "python"):
        assert part in str(caught.value)
    with pytest.raises(data.MissingData, match=str(tmp_path / "data" / "cifar10")):
        data.load(DataOptions(kind="cifar10"), seed=0, place=data.Place(device=torch.device("cpu")))
    (tmp_path / "cifar-10-python.tar.gz").touch()
    with pytest.raises(data.MissingData, match="still packed: tar -xf"):
        load(tmp_path)


def test_missing_batches_are_named(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(data.DataError, match=r"data_batch_2.bin, data_batch_4.bin are missing in .*anew.*skip"):
        load(tmp_path)
    found = load(tmp_path, damaged="skip")
    assert found.train.cases == 12
    assert "data_batch_2.bin, data_batch_4.bin are missing" in found.notes[0]
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(data.MissingData, match=r"has no test_batch.bin"):
        load(tmp_path, damaged="skip")


def test_there_must_be_something_to_train_on(tmp_path: Path) -> None:
    write_python(tmp_path)
    for name in NAMES[:5]:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(data.DataError, match="no training record of CIFAR-10"):
        load(tmp_path, damaged="skip")
    for name in NAMES[:5]:
        (tmp_path / name).unlink()
    with pytest.raises(data.MissingData, match="has no training batches"):
        load(tmp_path)


def test_a_truncated_binary_file_is_refused_or_used_as_far_as_it_goes(tmp_path: Path) -> None:
    write_binary(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(data.DataError, match=r"data_batch_3.bin: 12,192 bytes, which is not a whole number"):
        load(tmp_path)
    found = load(tmp_path, damaged="skip")
    assert found.train.cases == 19
    assert any("data_batch_3.bin" in note and "3 whole records are used" in note for note in found.notes)
    path.write_bytes(b"")
    with pytest.raises(data.DataError, match=r"data_batch_3.bin: empty"):
        load(tmp_path)
    assert load(tmp_path, damaged="skip").train.cases == 16


def test_a_truncated_pickle_is_refused_or_left_out(tmp_path: Path) -> None:
    write_python(tmp_path)
    path = tmp_path / "data_batch_3"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(data.DataError, match=r"data_batch_3: cannot be unpickled"):
        load(tmp_path)
    found = load(tmp_path, damaged="skip")
    assert found.train.cases == 16
    assert any("data_batch_3" in note and "left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "not a batch of CIFAR-10, but a list"),
        ({b"data": 3, b"labels": [1]}, "lacks the array 'data'"),
        (
            {b"data": numpy.zeros((2, 3072), numpy.uint8), b"labels": [1]},
            r"data is uint8 \(2, 3072\), not uint8 \(1, 30",
        ),
        ({b"data": numpy.zeros((1, 3072)), b"labels": [1]}, "data is float64"),
        ({b"data": numpy.zeros((1, 3072), numpy.uint8), b"labels": ["cat"]}, "cannot be unpickled"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    write_python(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(data.DataError, match=message):
        load(tmp_path)


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    write_python(tmp_path)

    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'was-run'}",)

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Bad()}))
    with pytest.raises(data.DataError, match=r"data_batch_1: asks for \w+.system, which .*; it was not run"):
        load(tmp_path)
    assert load(tmp_path, damaged="skip").train.cases == 16
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("version", ["python", "binary"])
def test_wrong_labels_are_refused_by_record_and_value_or_left_out(tmp_path: Path, version: str) -> None:
    pixels, wrong = records("data_batch_5")
    wrong[1] = wrong[3] = 77
    if version == "python":
        (write_python(tmp_path) / "data_batch_5").write_bytes(python_2_pickle(pixels, wrong))
    else:
        table = numpy.concatenate([numpy.array(wrong, numpy.uint8)[:, None], pixels], 1)
        (write_binary(tmp_path) / "data_batch_5.bin").write_bytes(table.tobytes())
    with pytest.raises(data.DataError, match=r"data_batch_5\S*: record 1 has the label 77, .* \(and 1 more\)"):
        load(tmp_path)
    found = load(tmp_path, damaged="skip")
    assert found.train.cases == 18
    assert any("record 1 has the label 77" in note and "2 left out" in note for note in found.notes)
    assert labels(tmp_path, "train")[-2:] == [wrong[0], wrong[2]]

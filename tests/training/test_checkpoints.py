"""Checkpoints: exact, whole or not there, checked when read; full disks, kills, flipped bits and foreign files."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from natgrad.training import checkpoints as module
from natgrad.training import files
from natgrad.training.checkpoints import CheckpointError, Checkpoints, NewerCheckpointError, load

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.tensor([float("nan"), -0.0])},
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "numbers": [1, 2.5, None, True, "text"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def run(script: str, *arguments: Any, **options: Any) -> Any:
    """Runs a script in a process of its own, which must live to its end; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_state_comes_back_bit_for_bit(folder: Path) -> None:
    path = Checkpoints(folder, keep=2).save(STATE, step=1200)
    assert path.name == "step-00001200.pt"
    loaded = Checkpoints(folder, keep=2).latest()
    assert loaded is not None
    assert (loaded.path, loaded.step, loaded.damaged) == (path, 1200, [])
    assert bits(loaded.state["model"]["weight"]) == bits(STATE["model"]["weight"])
    assert bits(loaded.state["model"]["bias"]) == bits(STATE["model"]["bias"])
    assert bits(loaded.state["half"]) == bits(STATE["half"])
    assert loaded.state["numbers"] == STATE["numbers"]
    assert torch.load(path, weights_only=True)["step"] == 1200  # anybody can read it


def test_tensors_go_where_they_are_asked_to(folder: Path) -> None:
    path = Checkpoints(folder, keep=1).save(STATE, step=1)
    assert load(path, map_location="meta").state["half"].is_meta


def test_the_last_few_are_kept_by_number(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 20, 99_999_999, 100_000_000):
        checkpoints.save({"step": step}, step=step)
    assert [path.name for path in checkpoints.paths()] == ["step-99999999.pt", "step-100000000.pt"]
    loaded = checkpoints.latest()
    assert loaded is not None
    assert loaded.step == 100_000_000


def test_later_checkpoints_of_a_run_that_went_back_do_not_push_out_the_new_one(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save({}, step=100)
    (folder / "step-00000200.pt").write_bytes(b"damaged")
    for step in (110, 120):
        checkpoints.save({}, step=step)
    assert names(folder) == ["step-00000120.pt", "step-00000200.pt"]
    loaded = checkpoints.latest()
    assert loaded is not None
    assert loaded.step == 120
    checkpoints.save({}, step=210)
    assert names(folder) == ["step-00000210.pt"]


def test_no_checkpoints_is_none(folder: Path) -> None:
    assert Checkpoints(folder, keep=1).latest() is None
    folder.mkdir()
    (folder / ".writing-00000000-step-00000001.pt").write_bytes(b"left by a kill")
    assert Checkpoints(folder, keep=1).latest() is None


def test_files_have_the_permissions_of_the_umask(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        path = Checkpoints(folder, keep=1).save({}, step=1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        Checkpoints(folder, keep=1).save({}, step=1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("links", [True, False])
def test_the_best_outlives_its_step(folder: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    checkpoints = Checkpoints(folder, keep=1)
    path = checkpoints.save({"value": torch.ones(3)}, step=1)
    checkpoints.mark_best(path)
    checkpoints.mark_best(path)  # replacing a file by itself would leave the temporary
    assert (folder / "best.pt").samefile(path) == links
    checkpoints.save({"value": torch.zeros(3)}, step=2)
    assert names(folder) == ["best.pt", "step-00000002.pt"]
    best = load(folder / "best.pt")
    assert best.step == 1
    assert best.state["value"].tolist() == [1, 1, 1]


def test_marking_a_missing_file_as_best_keeps_the_best(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.mark_best(checkpoints.save({}, step=1))
    with pytest.raises(CheckpointError, match="best.pt from step-00000007.pt: No such file"):
        checkpoints.mark_best(folder / "step-00000007.pt")
    assert names(folder) == ["best.pt", "step-00000001.pt"]


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_torch_itself_does_not_notice_flipped_bits(folder: Path) -> None:  # which is why there is a checksum
    path = Checkpoints(folder, keep=1).save({"value": torch.full((1000,), 3.0)}, step=1)
    data = path.read_bytes()
    place = data.index(torch.full((1000,), 3.0).numpy().tobytes())
    path.write_bytes(flipped(data, 8 * place))
    assert torch.load(path, weights_only=True)["state"]["value"][0] != 3.0
    with pytest.raises(CheckpointError, match="damaged: its checksum is wrong"):
        load(path)


def test_every_flipped_bit_and_every_cut_is_noticed(folder: Path) -> None:
    path = Checkpoints(folder, keep=1).save({"value": torch.arange(3.0)}, step=1)
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 7):  # every byte, and every place in one
        path.write_bytes(flipped(data, bit))
        with pytest.raises(CheckpointError, match="checksum is wrong|does not end as"):
            module._check(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="is empty|does not end as|checksum"):
            module._check(path)
    path.write_bytes(data)
    assert load(path).step == 1


def foreign(folder: Path) -> Iterator[tuple[str, str]]:
    """Writes files that are no good; yields their names and what should be said of them."""
    (folder / "step-00000011.pt").write_bytes(b"")
    yield "step-00000011.pt", "step-00000011.pt is empty"
    (folder / "step-00000012.pt").write_bytes(b"hello\n" * 100)
    yield "step-00000012.pt", "does not end as natgrad's checkpoints do: cut off, or of another program"
    torch.save({"weight": torch.ones(3)}, folder / "step-00000013.pt")
    yield "step-00000013.pt", "does not end as natgrad's checkpoints do"
    (folder / "step-00000014.pt").mkdir()
    yield "step-00000014.pt", "cannot be read: Is a directory"
    (folder / "step-00000015.pt").symlink_to(folder / "nowhere")
    yield "step-00000015.pt", "step-00000015.pt does not exist"


def test_what_cannot_be_read_is_named_and_the_one_before_is_taken(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=5)
    good = checkpoints.save({"value": 1}, step=10)
    bad = list(foreign(folder))
    loaded = checkpoints.latest()
    assert loaded is not None
    assert (loaded.path, loaded.state) == (good, {"value": 1})
    assert len(loaded.damaged) == len(bad)
    for text, (name, said) in zip(reversed(loaded.damaged), bad, strict=True):
        assert name in text
        assert said in text
    for name, said in bad:
        with pytest.raises(CheckpointError, match=said):
            load(folder / name)


def test_the_best_is_taken_where_no_other_can_be_read(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.mark_best(checkpoints.save({}, step=1))
    checkpoints.save({}, step=2).write_bytes(b"damaged")
    loaded = checkpoints.latest()
    assert loaded is not None
    assert (loaded.path.name, loaded.step, len(loaded.damaged)) == ("best.pt", 1, 1)


def test_where_none_can_be_read_all_are_named(folder: Path) -> None:
    folder.mkdir()
    bad = [name for name, _ in foreign(folder)]
    (folder / "best.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read:\n(.*\n)+.*start again .*--out") as raised:
        Checkpoints(folder, keep=1).latest()
    assert all(name in str(raised.value) for name in [*bad, "best.pt"])


def write_with_checksum(contents: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents, path)
    data = path.read_bytes()
    path.write_bytes(data + b"\nnatgrad crc32 %08x\n" % zlib.crc32(data))


def test_a_newer_format_is_refused_rather_than_passed_over(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save({}, step=1)
    path = folder / "step-00000002.pt"
    write_with_checksum({"format": "natgrad checkpoint", "version": 2, "step": 2, "state": {}}, path)
    for read in (lambda: load(path), checkpoints.latest):
        with pytest.raises(NewerCheckpointError, match="version 2 of the format, and this natgrad knows up to 1"):
            read()


@pytest.mark.parametrize("contents", [{"weight": 1}, [1, 2], {"format": "another"}])
def test_something_else_is_not_a_checkpoint(folder: Path, contents: Any) -> None:
    write_with_checksum(contents, folder / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt is not a natgrad checkpoint"):
        load(folder / "x.pt")


def test_code_in_a_file_is_not_run(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "evil"),)

    write_with_checksum({"format": "natgrad checkpoint", "state": Evil()}, folder / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt cannot be read with torch"):
        load(folder / "x.pt")
    assert not (folder / "evil").exists()


def test_a_state_that_could_not_be_read_back_is_not_written(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save({}, step=1)
    with pytest.raises(TypeError, match="pathlib.* could be written but not read back"):
        checkpoints.save({"path": Path("/tmp")}, step=2)
    assert names(folder) == ["step-00000001.pt"]


@pytest.mark.parametrize("failing", [1, 3, 8])
def test_ctrl_c_while_writing_leaves_what_was_there(
    folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    path = checkpoints.save({"value": 1}, step=1)
    calls = 0

    class Interrupted:
        @staticmethod
        def crc32(data: bytes, crc: int) -> int:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise KeyboardInterrupt
            return zlib.crc32(data, crc)

    monkeypatch.setattr(module, "zlib", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(STATE, step=2)
    monkeypatch.undo()
    assert names(folder) == [path.name]
    assert load(path).state == {"value": 1}


FULL = """
import json, os, resource, signal, sys
from pathlib import Path
import torch
from natgrad.training.checkpoints import Checkpoints, CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, keep=2)
size = checkpoints.save({"value": torch.ones(100_000)}, step=1).stat().st_size
texts = []
for limit in (1, 100, 5000, 200_000, size - 1000, size - 100, size - 30, size - 10, size - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoints.save({"value": torch.zeros(100_000)}, step=2)
    except CheckpointError as error:
        text = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    texts.append(text)
    assert os.listdir(folder) == ["step-00000001.pt"], os.listdir(folder)
    assert checkpoints.latest().state["value"].sum() == 100_000
checkpoints.save({"value": torch.zeros(100_000)}, step=2)
print(json.dumps({"texts": texts, "step": checkpoints.latest().step}))
"""


def test_a_file_that_may_not_grow_is_reported_and_training_lives(folder: Path) -> None:
    result = run(FULL, folder)
    assert result["step"] == 2
    for text in result["texts"]:
        assert f"could not write the checkpoint {folder}/step-00000002.pt: File too large." in text
        assert "It needs about 390.6 KiB; " in text
        assert "B are free on its disk. The previous checkpoint step-00000001.pt is intact. Make room" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs a root that may mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported_and_leftovers_do_not_fill_it(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=1)
    checkpoints.save({"value": torch.ones(100_000)}, step=1)
    with pytest.raises(
        CheckpointError, match=r"No space left on device. It needs about 1.1 MiB; 6\d\d.\d KiB are free"
    ):
        checkpoints.save({"value": torch.ones(300_000)}, step=2)
    (checkpoints.folder / ".writing-00000000-step-00000002.pt").write_bytes(bytes(600_000))
    checkpoints.save({"value": torch.zeros(100_000)}, step=3)
    assert names(checkpoints.folder) == ["step-00000003.pt"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory.* There is no earlier one"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1).save({}, step=1)


UNWRITABLE = """
import json, os, sys
from pathlib import Path
import torch
from natgrad.training.checkpoints import Checkpoints, CheckpointError

os.umask(0o022)
os.chmod(".", 0o755 if sys.argv[1] == "folder" else 0o700)
checkpoints = Checkpoints(Path("checkpoints"), keep=1)
path = checkpoints.save({}, step=1)
if os.getuid() == 0:
    os.setuid(65534)
else:
    path.parent.chmod(0o555 if sys.argv[1] == "folder" else 0o000)
texts = []
for call in (lambda: checkpoints.save({}, step=2), lambda: checkpoints.latest().step):
    try:
        texts.append(call())
    except CheckpointError as error:
        texts.append(str(error))
print(json.dumps(texts))
"""


def test_a_folder_that_may_not_be_written_is_reported(tmp_path: Path) -> None:
    text, step = run(UNWRITABLE, "folder", cwd=tmp_path)
    assert "checkpoints/step-00000002.pt: Permission denied." in text
    assert "The previous checkpoint step-00000001.pt is intact." in text
    assert step == 1


def test_a_folder_that_may_not_even_be_looked_into_is_reported(tmp_path: Path) -> None:
    text, reading = run(UNWRITABLE, "nothing", cwd=tmp_path)
    if os.getuid() != 0:
        (tmp_path / "checkpoints").chmod(0o755)  # so that pytest can clean up
    assert "checkpoints/step-00000002.pt: Permission denied." in text
    assert "Earlier ones were not touched (cannot look for checkpoints in checkpoints: Permission denied)." in text
    assert reading == "cannot look for checkpoints in checkpoints: Permission denied"


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from natgrad.training.checkpoints import Checkpoints

torch.set_num_threads(1)
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
weights = torch.arange(20_000.0)
checkpoints.mark_best(checkpoints.save({"weights": weights}, step=0))
random.seed(0)
before = kills_inside = 0
for _ in range(30):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        step = checkpoints.latest().step
        os.write(writing, b"x")
        while True:
            step += 1
            path = checkpoints.save({"weights": weights + step}, step=step)
            if step % 3 == 0:
                checkpoints.mark_best(path)
    os.read(reading, 1)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    kills_inside += any(name.startswith(".writing-") for name in os.listdir(sys.argv[1]))
    loaded = checkpoints.latest()
    assert loaded.damaged == [], loaded.damaged
    assert loaded.step >= before, (loaded.step, before)
    assert torch.equal(loaded.state["weights"], weights + loaded.step)
    assert Checkpoints(Path(sys.argv[1]), keep=2).paths()
    before = loaded.step
checkpoints.save({}, step=before + 1)
print(json.dumps({"kills_inside": kills_inside, "step": before, "names": sorted(os.listdir(sys.argv[1]))}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_random_moments_always_leave_a_whole_checkpoint(folder: Path) -> None:
    result = run(KILLED, folder)
    assert result["kills_inside"] > 0  # some were while writing
    assert result["step"] > 0
    assert len(result["names"]) == 3  # best and two; what the kills left is gone
    assert not any(name.startswith(".") for name in result["names"])


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_keep_must_be_a_count(folder: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match="keep must be a whole number of at least 1, got"):
        Checkpoints(folder, keep=keep)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_a_failed_write_leaves_the_file_and_no_temporary(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "recipe.toml"
    files.write_text_atomically(path, "räzept\n")

    def write(file: Any) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error):
        files.write_atomically(path, write)
    assert path.read_bytes() == "räzept\n".encode()
    assert names(tmp_path) == ["recipe.toml"]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".writing-0a1b2c3d-best.pt", ".hidden", "writing-x", "step-00000001.pt"):
        (tmp_path / name).write_text("")
    files.remove_leftovers(tmp_path)
    files.remove_leftovers(tmp_path / "missing")
    assert names(tmp_path) == [".hidden", "step-00000001.pt", "writing-x"]

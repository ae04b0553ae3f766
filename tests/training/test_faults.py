"""What can go wrong in a run: disks, folders, files, recipes, numbers and terminals. Each is told in words."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from tests.training.test_resume import digits, forked, last, network, same, to_the_end
from tests.training.test_resume import train as train_quietly
from tests.training.test_stop import OFTEN, natgrad
from torch import nn

from natgrad import recipes
from natgrad.cli import app
from natgrad.training import checkpoints, metrics_file, trainer
from natgrad.training.ranks import Ranks
from natgrad.training.run import run

SMALL = [f"model.name={network.__module__}:network", "training.batch=50", "training.log_every=1"]


class Command:
    """`natgrad train` in a folder, and what it has written."""

    def __init__(self, tmp_path: Path) -> None:
        self.out, self._output = tmp_path / "run", tmp_path / "output"

    def __call__(self, *arguments: Any, before: Callable[[], None] = lambda: None, resume: bool = False) -> int:
        self._output.write_text("")
        where = [self.out, "--resume"] if resume else ["digits", *SMALL, "--out", self.out]
        return self.plain(*where, *arguments, before=before)

    def plain(self, *arguments: Any, before: Callable[[], None] = lambda: None) -> int:
        code = natgrad("train", *arguments, output=self._output, before=before)
        assert "Traceback" not in self.written, self.written
        return code

    @property
    def written(self) -> str:
        return self._output.read_text()

    def checkpoint(self, step: int) -> Path:
        return self.out / "checkpoints" / f"step-{step:08d}.pt"


@pytest.fixture
def train(tmp_path: Path) -> Command:
    return Command(tmp_path)


def at_step(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Makes a forked process act in the middle of a step."""
    usual = trainer.seed_step

    def seed_step(seed: int, step: int, ranks: Any) -> None:
        usual(seed, step, ranks)
        if step == number:
            act()

    def prepare() -> None:
        trainer.seed_step = seed_step

    return prepare


def no_large_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def no_longer_files(path: Path) -> None:
    """None gets longer than this one is."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))


def equal_to_the_undisturbed(folder: Path, tmp_path: Path, *overrides: str) -> bool:
    train_quietly(digits(*overrides), tmp_path / "quiet")
    return same(last(folder), last(tmp_path / "quiet"))


# Disks and folders


def test_a_disk_without_room_for_a_checkpoint_costs_that_checkpoint(train: Command, tmp_path: Path) -> None:
    few = ["training.steps=8", OFTEN, "training.keep=1"]
    assert train(*few, before=at_step(5, no_large_files)) == 1
    assert f"could not write the checkpoint {train.checkpoint(6)}: File too large" in train.written
    assert "The previous checkpoint step-00000005.pt is intact. Make room" in train.written
    assert "step 8/8" in train.written  # it went on to the end
    assert last(train.out)["step"] == 5
    assert os.listdir(train.out / "checkpoints") == ["step-00000005.pt"]

    assert train(resume=True) == 0  # there is room again
    assert equal_to_the_undisturbed(train.out, tmp_path, "training.steps=8")


def test_a_disk_that_is_quite_full_costs_the_metrics_too(train: Command, tmp_path: Path) -> None:
    metrics = train.out / "metrics.jsonl"
    assert train("training.steps=14", OFTEN, before=at_step(11, lambda: no_longer_files(metrics))) == 1
    assert train.written.count("metrics.jsonl cannot be written (File too large)") == 1
    assert last(train.out)["step"] == 11
    assert train(resume=True) == 0
    assert equal_to_the_undisturbed(train.out, tmp_path, "training.steps=14")
    steps = [line["step"] for line in metrics_file.read(metrics) if line["kind"] == "train"]
    assert steps == list(range(1, 15))


def test_a_disk_that_has_room_again_gets_the_last_checkpoint(train: Command, tmp_path: Path) -> None:
    def room_again() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def before() -> None:
        at_step(3, no_large_files)()
        at_step(6, room_again)()

    assert train("training.steps=8", OFTEN, before=before) == 0
    assert train.written.count("could not write the checkpoint") == 3
    assert equal_to_the_undisturbed(train.out, tmp_path, "training.steps=8")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_is_told_as_such(train: Command, tmp_path: Path) -> None:
    train.out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", train.out], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        assert train("training.steps=2", "model.name=digits_convnet") == 1
        assert "No space left on device" in train.written
        assert "There is no earlier one. Make room" in train.written
    finally:
        subprocess.run(["umount", train.out], check=True)


def test_a_file_in_place_of_the_folder_is_refused(train: Command) -> None:
    train.out.write_text("")
    assert train() == 1
    assert f"error: {train.out} is a file" in train.written


@pytest.mark.parametrize(
    ("out", "message"),
    [("/proc/natgrad", "the results cannot be written"), ("/dev/null/natgrad", "/dev/null is a file")],
)
def test_a_place_that_no_folder_can_be_made_in_is_refused(train: Command, out: str, message: str) -> None:
    train.out = Path(out)
    assert train() == 1
    assert f"error: {message}" in train.written


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder that belongs to root. Not below `tmp_path`, where nobody else may look."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def as_nobody() -> None:
    def run_as_nobody(*arguments: Any, **options: Any) -> Any:
        os.setuid(65534)  # now, and not earlier: Python itself may be out of nobody's reach
        return run(*arguments, **options)

    app.run = run_as_nobody


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
@pytest.mark.parametrize(
    "mode",
    [
        0o755,
        pytest.param(0o700),
    ],
)
def test_a_folder_of_somebody_else_is_refused(train: Command, theirs: Path, mode: int) -> None:
    theirs.chmod(mode)
    train.out = theirs / "run"
    assert train(before=as_nobody) == 1
    assert f"no permission to write in {theirs}" in train.written


def test_a_folder_that_is_removed_costs_no_training(train: Command, tmp_path: Path) -> None:
    before = at_step(4, lambda: shutil.rmtree(train.out))
    assert train("training.steps=8", OFTEN, before=before) == 0
    assert train.written.count("metrics.jsonl cannot be written (No such file or directory)") == 1
    assert "step 8/8" in train.written
    assert equal_to_the_undisturbed(train.out, tmp_path, "training.steps=8")


def test_a_folder_that_was_removed_can_be_gone_on_from(train: Command) -> None:
    before = at_step(4, lambda: shutil.rmtree(train.out))
    assert train("training.steps=8", OFTEN, before=before) == 0
    assert train("training.steps=10", resume=True) == 0


# Checkpoints


def test_a_cut_off_checkpoint_is_told_and_the_one_before_it_used(train: Command, tmp_path: Path) -> None:
    assert train("training.steps=6", OFTEN) == 0
    os.truncate(train.checkpoint(6), 10_000)
    assert train("training.steps=9", resume=True) == 0
    assert f"warning: {train.checkpoint(6)} does not end as natgrad's checkpoints do" in train.written
    assert "going on from step-00000005.pt instead" in train.written
    assert equal_to_the_undisturbed(train.out, tmp_path, "training.steps=9")
    lines = metrics_file.read(train.out / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 10))


def test_damage_in_all_checkpoints_is_told(train: Command) -> None:
    assert train("training.steps=3", OFTEN) == 0
    before = (train.out / "recipe.toml").read_text()
    for path in (train.out / "checkpoints").iterdir():
        os.truncate(path, 1000)
    assert train("training.steps=9", resume=True) == 1
    assert "error: no checkpoint can be read:" in train.written
    assert all(name in train.written for name in ("step-00000002.pt", "step-00000003.pt", "best.pt", "--out"))
    assert (train.out / "recipe.toml").read_text() == before


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ([], ["model.dropout=0.5", "kfac.enabled=false"], "the checkpoint has one of 'kfac'"),
        (["kfac.enabled=false"], ["kfac.enabled=true"], "the checkpoint has none of 'kfac'"),
        ([], ["training.polyak=0.9"], "the checkpoint has none of 'average'"),
        (["training.polyak=0.9"], ["model.width=5"], "size mismatch"),
        ([], ["kfac.solver=inverse"], ""),
        pytest.param(
            [],
            ["optimizer.name=adam"],
            "does not fit the recipe",
        ),
    ],
    ids=["without K-FAC", "with K-FAC", "with Polyak", "another size", "another solver", "another optimizer"],
)
def test_a_checkpoint_of_another_recipe_is_refused_in_words(
    train: Command, first: list[str], then: list[str], message: str
) -> None:
    assert train("training.steps=2", *first) == 0
    before = (train.out / "recipe.toml").read_text()
    code = train("training.steps=4", *then, resume=True)
    if not message:
        assert code == 0
        return
    assert code == 1
    assert "error: " in train.written
    assert message in train.written
    assert (train.out / "recipe.toml").read_text() == before


def test_options_of_the_optimizer_that_are_changed_for_the_rest_count(train: Command, tmp_path: Path) -> None:
    assert train("training.steps=3") == 0
    assert train("training.steps=6", "optimizer.weight_decay=0.5", resume=True) == 0
    assert not equal_to_the_undisturbed(train.out, tmp_path, "training.steps=6")


def test_a_folder_that_holds_a_run_is_not_written_over(train: Command) -> None:
    assert train("training.steps=2") == 0
    assert train("training.steps=2") == 1
    assert "holds a run already: go on with --resume, or choose another --out" in train.written


# Data


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 6), ("val", 3)):
        for kind in ("cats", "dogs"):
            folder = tmp_path / "photos" / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                PIL.Image.new("RGB", (20, 20), (number, 200, 7)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def images(photos: Path, out: Path) -> list[Any]:
    few = ["data.size=16", "data.resize=16", "data.workers=1", "model.channels=3", "training.batch=4"]
    return [
        "folder",
        *SMALL[:1],
        *few,
        "training.epochs=2",
        "training.log_every=1",
        f"data.path={photos}",
        "--out",
        out,
    ]


def test_a_damaged_image_is_refused_by_its_name(train: Command, photos: Path) -> None:
    os.truncate(photos / "train" / "cats" / "3.jpg", 100)
    assert train.plain(*images(photos, train.out)) == 1
    assert f"error: {photos / 'train' / 'cats' / '3.jpg'}: " in train.written
    assert 'data.damaged="skip"' in train.written


def test_a_damaged_image_may_be_skipped_and_is_named(train: Command, photos: Path) -> None:
    os.truncate(photos / "train" / "cats" / "3.jpg", 100)
    assert train.plain(*images(photos, train.out), "data.damaged=skip") == 0
    assert train.written.count(f"warning: skipped {photos / 'train' / 'cats' / '3.jpg'}: ") == 1


@pytest.mark.parametrize(
    "epochs",
    [2, pytest.param(1)],
)
def test_a_damaged_test_image_that_is_skipped_is_named(train: Command, photos: Path, epochs: int) -> None:
    os.truncate(photos / "val" / "dogs" / "1.jpg", 100)
    assert train.plain(*images(photos, train.out), "data.damaged=skip", f"training.epochs={epochs}") == 0
    assert train.written.count(f"warning: skipped {photos / 'val' / 'dogs' / '1.jpg'}: ") == 1
    assert "  5 cases in " in train.written


def test_a_damaged_image_that_another_rank_skips_is_named(photos: Path, tmp_path: Path) -> None:
    os.truncate(photos / "val" / "cats" / "1.jpg", 100)  # the second of the test images
    recipe = recipes.load("folder", [*images(photos, tmp_path)[1:-2], "training.batch=2", "data.damaged=skip"])
    to_the_end(recipe, tmp_path / "run", 2)
    lines = metrics_file.read(tmp_path / "run" / "metrics.jsonl")
    assert [line["cases"] for line in lines if line["kind"] == "test"] == [5, 5]
    assert [line["text"] for line in lines if "val/cats/1.jpg" in line.get("text", "")]


def test_a_wrong_label_of_cifar10_is_refused_by_its_place(train: Command, tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(bytes(3073 * 4))
    content = bytearray(3073 * 4)
    content[3073] = 11
    (folder / "data_batch_3.bin").write_bytes(content)
    assert train.plain("cifar10-convnet", f"data.path={folder}", "--out", train.out) == 1
    assert f"{folder / 'data_batch_3.bin'}: record 1 has the label 11, which is not one of 0 to 9" in train.written


@pytest.mark.parametrize("recipe", ["cifar10-convnet", "folder", "text-gpt"])
def test_missing_data_is_told_with_its_place(train: Command, tmp_path: Path, recipe: str) -> None:
    assert train.plain(recipe, f"data.path={tmp_path / 'nothing'}", "--out", train.out) == 1
    assert "error: there is no " in train.written
    assert str(tmp_path / "nothing") in train.written
    assert not train.out.exists()


def test_a_batch_larger_than_the_data_is_refused(train: Command) -> None:
    assert train("training.batch=2000") == 1
    assert "error: there are 1,500 cases, and one step takes 2,000: choose training.batch=1500 or less" in train.written


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.channels=3"], "the model does not take the data's cases of shape (1, 8, 8)"),
        (["model.num_classes=4"], "the data has 10 classes, and the model only 4 outputs"),
        (["training.loss=reconstruction"], "the model gives 10 outputs for the 64 pixels of a case"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(train: Command, overrides: list[str], message: str) -> None:
    assert train(*overrides) in (1, 2)
    assert f"error: {message}" in train.written


# Numbers


def test_divergence_ends_the_run_and_spares_the_last_good_checkpoint(train: Command) -> None:
    rate = 'optimizer.lr={schedule="steps", value=0.1, factor=1e31, at=[0.1]}'
    assert train("kfac.enabled=false", rate, OFTEN, "training.steps=20", "training.keep=1") == 1
    assert "error: the weights are not finite after step 5: nothing is saved" in train.written
    assert f"the last good checkpoint is {train.checkpoint(4)}. Try a smaller optimizer.lr" in train.written
    assert os.listdir(train.out / "checkpoints") == ["step-00000004.pt"]
    assert all(torch.isfinite(weight).all() for weight in last(train.out)["model"].values())


def test_divergence_before_the_first_checkpoint_says_so(train: Command) -> None:
    assert train("kfac.enabled=false", "optimizer.lr=1e30", "training.steps=20") == 1
    assert "the training loss is nan at step" in train.written
    assert "error: the weights are not finite after step 20: nothing is saved. Try" in train.written
    assert not (train.out / "checkpoints").exists()


def test_divergence_is_told_by_all_ranks(tmp_path: Path) -> None:
    recipe = digits("kfac.enabled=false", "optimizer.lr=1e30", "training.steps=9")

    def work(these: Ranks) -> None:
        try:
            train_quietly(recipe, tmp_path / "run", ranks=these)
        except trainer.DivergedError:
            os._exit(9)

    with forked(2, work, tmp_path / "store") as processes:
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [9, 9]


class Stumbling(nn.Module):
    """Gives NaN for one batch in training."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self._left = nn.Linear(64, 10), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x.flatten(1))
        if self.training:
            self._left -= 1
            if self._left == 0:
                return out * torch.nan
        return out


def stumbling(*, number: int) -> nn.Module:
    return Stumbling(number)


def test_a_batch_of_nan_costs_one_step(train: Command) -> None:
    few = [f"model.name={__name__}:stumbling", "kfac.inv_update_steps=2", "training.steps=9", OFTEN, "training.keep=9"]
    assert train(*few, "model.number=5") == 0
    assert "the training loss is nan at step 5" in train.written
    before, after, end = (checkpoints.load(train.checkpoint(step)).state["model"] for step in (4, 5, 9))
    assert same(dict(before), dict(after))
    assert not same(dict(after), dict(end))
    losses = [line["loss"] for line in metrics_file.read(train.out / "metrics.jsonl") if line["kind"] == "train"]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [5]
    assert losses[-1] < losses[0]


# Terminals


def test_a_reader_of_the_output_that_goes_away_ends_no_training(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "natgrad", "train", "digits", "training.steps=30", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        f"{' '.join(words)} | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr
    assert last(tmp_path / "run")["step"] == 30

"""Curves with the fast paths on and off: the comparison's arithmetic, and a run on a handful of images."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import fast_paths
from benchmarks.cifar10 import Run


def run(variant: str, seed: int, losses: list[float]) -> Run:
    return Run(variant=variant, seed=seed, train_loss=losses, test_error=[loss / 10 for loss in losses])


def test_distances_are_measured_in_deviations_of_seeds():
    exact = [run("exact", 0, [4.0, 1.0]), run("exact", 1, [6.0, 3.0])]
    fast = [run("fast", 0, [5.0, 3.0]), run("fast", 1, [5.0, 4.0])]
    assert fast_paths.compared([*exact, fast[0]]) == {}
    told = fast_paths.compared(exact + fast)["train_loss"]
    assert (told["largest_distance"], told["after_epoch"], told["relative"]) == (1.5, 2, 0.75)
    # Variances of seeds, as parts of the squared means: 2/25 and 2/4.
    assert told["in_spreads"] == pytest.approx(0.75 / (0.5 * (2 / 25 + 2 / 4)) ** 0.5)
    assert "in_spreads" not in fast_paths.compared([exact[0], fast[0]])["train_loss"]
    assert len(fast_paths.sentences(fast_paths.compared(exact + fast))) == 2


def test_both_variants_of_a_few_images(tmp_path, capsys, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for name, count in (("data_batch_1", 20), ("test_batch", 10)):
        pixels = torch.randint(256, (count, 3073), generator=generator, dtype=torch.uint8)
        pixels[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(pixels.numpy().tobytes())
    entered = []

    @contextmanager
    def noted(name):
        entered.append(name)
        yield

    monkeypatch.setattr(fast_paths, "variant_options", lambda name: ({"damping_rule": "pi"}, noted(name)))
    out = tmp_path / "curves.json"
    options = ["--model", "convnet", "--epochs", "2", "--batch", "10", "--seeds", "2", "--device", "cpu"]
    assert fast_paths.main(["--data", str(tmp_path), *options, "--out", str(out)]) == 0
    assert entered == ["exact", "fast"] * 2
    found = json.loads(out.read_text())
    assert [(one["variant"], one["seed"]) for one in found["runs"]] == [
        ("exact", 0),
        ("fast", 0),
        ("exact", 1),
        ("fast", 1),
    ]
    # The same arithmetic here: the same weights, batches and order make the same runs.
    assert found["comparison"]["train_loss"]["largest_distance"] == 0
    assert found["runs"][0]["train_loss"] != found["runs"][2]["train_loss"]
    out.with_suffix(".png").unlink()
    assert fast_paths.main(["--plot-only", str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "deviations of seeds" in capsys.readouterr().out


def test_unknown_variants_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        fast_paths.main(["--data", str(tmp_path), "--variants", "slow"])
    assert "slow" in capsys.readouterr().err

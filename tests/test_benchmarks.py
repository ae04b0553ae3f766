"""The benchmarks' own arithmetic. Nothing about time."""

from __future__ import annotations

import json
import pickle
import threading
import time

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import autoencoder, cifar10, digits
from benchmarks.approximations import alexnet, common, reduce, sharing
from benchmarks.laps import background_ended, differences
from benchmarks.overlap import cifar10 as overlapped
from benchmarks.overlap import times as step_times
from benchmarks.overlap.__main__ import main as overlap
from benchmarks.overlap.common import chosen, every
from benchmarks.ranks import balance, times, traffic
from benchmarks.ranks.common import Table
from benchmarks.workloads import Device

import natgrad
from natgrad.distribute.costs import default_costs
from natgrad.distribute.traffic import Sent
from natgrad.models import resnet50

CPU = Device("cpu")


def test_tables_align():
    text = common.text_table([["name", "a"], ["b", "12.5"]])
    assert text.splitlines() == ["name     a", "b     12.5"]


def test_numbers_are_written_shortly():
    assert common.megabytes(2**20) == "1.0 MiB"
    assert common.megabytes(None) == common.milliseconds(None) == "-"
    assert [common.milliseconds(s) for s in (1e-5, 0.02, 2.0)] == ["0.010", "20.0", "2,000.0"]


def test_geometries_of_resnet50(monkeypatch):
    for name in ("kaiming_normal_", "kaiming_uniform_"):  # the weights are not looked at
        monkeypatch.setattr(nn.init, name, lambda *_, **__: None)
    layers = reduce.collect_layers(resnet50(), 224)
    assert sum(layer.count for layer in layers) == 53
    assert len(layers) == len({layer.geometry for layer in layers}) == 23
    assert str(layers[0].geometry) == "3→64 7×7 /2 on 224²"
    assert [layer.name for layer in layers if layer.geometry.first] == ["conv1"]
    assert [layer.count for layer in layers if str(layer.geometry) == "256→256 3×3 on 14²"] == [5]


def test_totals_count_every_layer():
    geometry = reduce.Geometry(
        inputs=2, outputs=3, kernel=(1, 1), stride=(1, 1), padding=(0, 0), image=(4, 4), first=False
    )
    layer = reduce.Layer(name="conv", geometry=geometry, count=3)
    factors = {"expand": {"input": 1.0, "output": 0.5}, "reduce": {"input": 0.25, "output": 0.125}}
    cost = reduce.LayerCosts(layer=layer, own=2.0, factors=factors)
    totals = reduce.weighted_totals([cost, cost])
    assert (totals["own"], totals["expand"], totals["reduce"]) == (12.0, 9.0, 2.25)
    rows = reduce.reduce_rows([cost, cost], iteration=24.0)
    assert len(rows) == 5
    assert rows[-1][6] == "0.38"
    assert common.text_table(rows, left=2)


def test_convolutions_factors_are_made_for_both_ways():
    (layer,) = reduce.collect_layers(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), 6)
    cost = reduce.layer_costs(layer, CPU, batch=2, precision="fp32", repeats=1)
    assert set(cost.factors) == {"expand", "reduce"}


def test_shared_factors_are_counted_once():
    torch.manual_seed(0)
    model = sharing.SeparateGPT(vocabulary=5, width=8, heads=2)
    tokens, following = torch.randint(5, (2, 3, 4))
    found = sharing.sharing_costs("small", model, tokens, following, CPU, prefix="blocks.0.", repeats=1)
    # q, k and v read one tensor.
    assert found.factors["own"] - found.factors["shared"] == 2
    assert found.factor_bytes["own"] - found.factor_bytes["shared"] == 2 * 9 * 9 * 4
    assert not found.note
    assert len(sharing.sharing_rows([found])) == 4


def test_steps_of_three_and_two_factors():
    data = alexnet.Batch(images=torch.randn(4, 3, 6, 6), labels=torch.tensor([0, 1, 2, 0]))

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    results = [
        alexnet.step_costs(name, build, data, CPU, kfac=options, layer="3.weight", repeats=1)
        for name, options in {
            "SGD": None,
            "three": {"doubly_factored_above": 60},
            "two": {"doubly_factored_above": None},
        }.items()
    ]
    assert "doubly factored" in results[1].line
    assert "doubly factored" not in results[2].line
    assert results[1].factor_bytes < results[2].factor_bytes
    assert all(result.report_bytes == result.factor_bytes + result.decomposition_bytes for result in results)
    assert len({len(row) for row in alexnet.alexnet_rows(results)}) == 1


@pytest.fixture
def folder(tmp_path):
    """Two small binary batches in CIFAR-10's format."""
    generator = torch.Generator().manual_seed(0)
    for name, count in (("data_batch_1", 20), ("test_batch", 10)):
        rows = torch.randint(256, (count, 3073), generator=generator, dtype=torch.uint8)
        rows[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(rows.numpy().tobytes())
    return tmp_path


def test_binary_and_python_batches_are_the_same_images(folder):
    binary = cifar10.load(folder, CPU.torch)
    python = folder / "cifar-10-batches-py"
    python.mkdir()
    for name in ("data_batch_1", "test_batch"):
        rows = torch.frombuffer(bytearray((folder / f"{name}.bin").read_bytes()), dtype=torch.uint8).reshape(-1, 3073)
        with (python / name).open("wb") as file:
            pickle.dump({b"data": rows[:, 1:].numpy(), b"labels": rows[:, 0].tolist()}, file)
        (folder / f"{name}.bin").unlink()
    for one, other in zip(binary, cifar10.load(folder, CPU.torch), strict=True):
        assert one.pixels.shape[1:] == (32, 32, 3)
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)


def test_a_folder_without_batches_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="data_batch_1"):
        cifar10.load(tmp_path, CPU.torch)


def test_crops_are_windows_of_the_padded_images():
    # Each image has one grey value, and its label is that value.
    labels = torch.arange(1, 51)
    pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 32, 32, 3)
    images = cifar10.Images(pixels=cifar10.padded(pixels), labels=labels)
    one, two = (cifar10.shuffled_crops(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.pixels, two.pixels)
    assert one.pixels.shape == (50, 32, 32, 3)
    assert torch.equal(one.pixels.amax((1, 2, 3)).long(), one.labels)
    assert torch.equal(one.labels.sort().values, labels)
    black = (one.pixels[..., 0] == 0).float().mean((1, 2))
    assert black.amax() <= 1 - (28 / 32) ** 2
    assert black.std() > 0


def test_pixels_are_normalised():
    grey = torch.full((2, 4, 4, 3), 125, dtype=torch.uint8)
    result = cifar10.normalised(grey)
    assert result.shape == (2, 3, 4, 4)
    assert result.abs().amax() < 0.2


def test_schedule_and_variants():
    assert (cifar10.cosine(0, 10), cifar10.cosine(10, 10)) == (1.0, 0.0)
    assert cifar10.chosen_variants("sgd,no-norm", "resnet20") == ["sgd", "no-norm"]
    assert cifar10.chosen_variants("sgd,no-norm", "convnet") == ["sgd"]
    with pytest.raises(ValueError, match="adam"):
        cifar10.chosen_variants("adam", "convnet")


def test_training_writes_numbers_and_a_picture(folder, capsys):
    out = folder / "small.json"
    options = ["--model", "convnet", "--variants", "sgd,reduce", "--seeds", "0", "--epochs", "1", "--batch", "8"]
    assert cifar10.main(["--data", str(folder), "--device", "cpu", "--out", str(out), *options]) == 0
    assert "K-FAC, reduce" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [run["variant"] for run in found["runs"]] == ["sgd", "reduce"]
    assert found["settings"]["kl_clip"] == 1e-4
    assert all(len(run["train_loss"]) == len(run["test_error"]) == 1 for run in found["runs"])
    assert out.with_suffix(".png").stat().st_size > 1000


def test_the_autoencoders_goals():
    def runs(last: float) -> dict:
        curve = [20.0] * 100 + [15.0] * 300 + [last]
        return {setting.name: [autoencoder.Run(curve, [1.0])] for setting in autoencoder.SETTINGS}

    assert autoencoder.met(runs(14.1))
    assert not autoencoder.met(runs(14.3))


def test_the_directions_of_both_rules_are_those_of_kfac():
    pixels = digits.load_pixels()[:100]
    for rule in ("pi", "joint"):
        model = digits.autoencoder(0)
        kfac = natgrad.KFAC(
            model, kl_clip=None, damping=1e-2, damping_rule=rule, fisher="sampled", predictive="bernoulli"
        )
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(pixels), pixels, reduction="sum") / 100
        loss.backward()
        raw = {name: p.grad.double() for name, p in model.named_parameters()}
        kfac.step()
        for block in kfac.blocks:
            for name, part in autoencoder.solved(block, raw, rule, 1e-2).items():
                own = model.get_parameter(name).grad.double()
                assert float((part - own).norm() / own.norm()) < 1e-3


def test_divergence_is_that_of_the_predictions():
    optimizers = pytest.importorskip("benchmarks.optimizers")
    before, after = torch.randn(5, 3), torch.randn(5, 3)
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (before, after))
    expected = torch.distributions.kl_divergence(p, q).mean()
    assert optimizers.divergence(before, after) == pytest.approx(float(expected))
    assert optimizers.divergence(before, before + 1) == pytest.approx(0, abs=1e-6)
    for variant in optimizers.VARIANTS:
        run = optimizers.train(optimizers.KINDS["LARS"], 1.0, variant, steps=20, tick=lambda: None)
        assert len(run.losses) == 3
        assert run.losses[-1] < run.losses[0]


def test_balance_and_messages_of_a_small_network_by_hand():
    """ResNet-20: the numbers that are known of the published code, and placements that no rank has to wait for."""
    work = balance.work_of("resnet20", "eigen", batch=2, image=8)
    assert len(work.layers) == 20
    known = traffic.published(work)
    assert {kind: (round(sent.bytes / 2**20, 2), sent.calls) for kind, sent in known.items()} == {
        "factors": (8.92, 40),
        "solutions": (8.95, 80),
        "products": (9.95, 60),
    }
    # One rank does it all; with more ranks than layers A and G go to different ones.
    whole = balance.published_loads(work, 1, float)
    assert whole == [sum(size for layer in work.layers for size in layer.shape[1:])]
    assert balance.published_loads(work, 40, float)[:4] == [27, 16, 144, 16]
    assert balance.published_loads(work, 20, float)[:2] == [43, 160]
    found = {each.method: each for each in balance.balances("resnet20", work, 4, default_costs(torch.device("cuda")))}
    assert found["balanced"].uneven < balance.CLOSE < found["round-robin"].uneven
    assert found["balanced"].mean <= found["published"].mean * (1 + 1e-9)
    assert found["balanced"].fastest <= found["balanced"].mean <= found["balanced"].slowest


def test_the_ranks_tables():
    assert str(Table("t", ["a", "b"], [["1", "2"]], "n")) == "### t\n\nn\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |"
    setting = traffic.Setting("resnet20", 2, "layer-wise", "eigen")
    kinds = {kind: Sent() for kind in traffic.KINDS}
    work = balance.work_of("resnet20", "eigen", batch=2, image=8)
    sent = {
        traffic.REFRESH: {**kinds, "factors": Sent(1000, 2), "gradients": Sent(116, 2)},
        traffic.ORDINARY: {**kinds, "gradients": Sent(116, 2)},
    }
    planned = {**kinds, "factors": Sent(1000, 2), "gradients": Sent(100, 2)}
    counted = traffic.Counted(setting, sent, planned, work)
    assert counted.average == 10 + 116
    assert traffic.agreement(counted) == "equal"
    assert "factors" in traffic.agreement(traffic.Counted(setting, sent, {**planned, "factors": Sent(9, 2)}, work))
    assert [traffic.kind_of(step) for step in range(5)] == [
        traffic.REFRESH,
        traffic.ORDINARY,
        traffic.STATISTICS,
        traffic.ORDINARY,
        traffic.REFRESH,
    ]
    steps = [{"step": 2.0, "solve": 1.0, "the rest": 1.0} for _ in range(6)]
    timed = [times.Timed(steps, 3, 1.0), times.Timed([{**step, "solve": 1.5} for step in steps], 1, 3.0)]
    told = times.summarised(2, "comm-opt", "eigen", timed)
    assert (told.shares, told.modelled_shares) == ([0.75, 0.25], [0.25, 0.75])
    assert told.parts["refresh"] == {"step": 2.0, "solve": 1.5, "the rest": 1.0}
    assert "| comm-opt | 2 | eigen | refresh | 2000.0 | 2000.0 | 1500.0 | 1000.0 | 75% / 25% |" in str(
        times.table([told], "t")
    )


def test_a_distribution_of_step_times():
    values = [float(number) for number in range(1, 201)]
    assert step_times.percentile(values, 0.99) == 198
    assert step_times.percentile([3.0], 0.99) == 3
    assert differences([0.0, 1.0, 3.0]) == [1.0, 2.0]
    sgd = step_times.Measured(name="sgd", ms=[2.0, 2.0, 2.0], means=[1.0, 3.0])
    one = step_times.Measured(name="eigen/none", ms=[3.0, 3.0, 9.0], means=[5.0], ages=[0, 1, 5])
    found = one.summary(sgd)
    assert (found["median"], found["worst"], found["worst_to_median"], found["spikes"]) == (3, 9, 3, 1)
    assert (found["median_to_sgd"], found["mean_to_sgd"]) == (1.5, 2.5)
    assert (found["mean_age"], found["largest_age"]) == (2, 5)
    assert "mean_to_sgd" not in one.summary(None)
    assert step_times.Measured(name="failed").summary(sgd) == {}


def test_step_times_of_a_tiny_model(tmp_path, capsys):
    options = ["--model", "tiny", "--batch", "8", "--steps", "12", "--factor-steps", "2", "--inv-steps", "4"]
    assert overlap(["times", "--device", "cpu", "--out", str(tmp_path), *options]) == 0
    assert "worst/median" in capsys.readouterr().out
    out = tmp_path / "overlap-times.json"
    found = {run["name"]: run for run in json.loads(out.read_text())["runs"]}
    assert list(found) == [name for name in step_times.METHODS if not name.endswith("/gpu")]
    assert {len(run["ms"]) for run in found.values()} == {12}
    # A refresh every fourth step, from the warm-up's last but one on.
    assert found["eigen/none"]["ages"] == [2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert max(found["eigen/staggered"]["ages"]) == 3
    assert found["inverse/cpu"]["metrics"]["background_failures"] == 0
    out.with_suffix(".png").unlink()
    assert overlap(["times", "--plot-only", str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 1000


def test_overlap_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        overlap(["times", "--only", "sgd,adam"])
    assert "adam" in capsys.readouterr().err
    assert chosen("b,a", ["a", "b", "c"], []) == ["a", "b"]
    assert (every(1, "step"), every(10, "step")) == ("every step", "every 10 steps")


def test_who_comes_next_waits_for_the_background():
    name = "natgrad-test"
    with background_ended():
        thread = threading.Thread(target=time.sleep, args=(0.1,), name=name)
        thread.start()
    assert not thread.is_alive()


def test_speed_ups_at_equal_progress():
    def run(variant: str, losses: list[float], pace: float) -> overlapped.Run:
        updates = list(range(len(losses)))
        return overlapped.Run(
            variant=variant, seed=0, updates=updates, seconds=[pace * update for update in updates], train_loss=losses
        )

    base = run("synchronous", [5.0, 4.0, 3.0, 2.0, 1.0], 2.0)
    assert base.until(2.5, base.seconds) == 5.0
    assert base.until(0.5, base.seconds) is None
    # What goes up again is not progress: from the best so far on.
    assert run("cpu", [4.0, 3.0, 3.5, 1.0], 1.0).until(2.0, range(4)) == 2.0
    same = [base, run("cpu", base.train_loss, 1.0)]
    assert {(one.clock, one.updates) for one in overlapped.speed_ups(same, "cpu")} == {(2.0, 1.0)}
    assert overlapped.progress_difference(same, "cpu") == 0
    short = [base, run("cpu", [5.0, 4.0, 3.0, 2.0, 2.0], 1.0)]
    assert overlapped.speed_ups(short, "cpu")[-1].clock is None
    assert overlapped.common_speed_up(short, "cpu") == overlapped.SpeedUp(loss=2.0, clock=2.0, updates=1.0)
    assert overlapped.progress_difference(short, "cpu") == pytest.approx(1 / 3)
    assert overlapped.comparison(short)["cpu"]["seconds_ratio"] == 2.0


def test_training_beside_decompositions_writes_numbers_and_a_picture(folder, capsys):
    options = ["--epochs", "2", "--batch", "5", "--limit", "10", "--every", "1", "--inv-steps", "2"]
    assert overlap(["cifar10", "--data", str(folder), "--device", "cpu", "--out", str(folder), *options]) == 0
    assert "K-FAC, background (CPU): speed-up" in capsys.readouterr().out
    out = folder / "overlap-cifar10.json"
    found = json.loads(out.read_text())
    assert [run["variant"] for run in found["runs"]] == ["sgd", "synchronous", "staggered", "cpu"]
    assert all(run["updates"] == [0, 1, 2, 3, 4] for run in found["runs"])
    assert len({run["test_loss"][0] for run in found["runs"]}) == 1  # the same weights at the start
    assert set(found["comparison"]) == {"spread_of_seeds", "sgd", "staggered", "cpu"}
    out.with_suffix(".png").unlink()
    assert overlap(["cifar10", "--plot-only", str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 1000

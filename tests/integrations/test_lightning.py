"""The Lightning callback against plain training loops, in float64."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import natgrad

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from natgrad.integrations.lightning import KFACCallback

OPTIONS: dict[str, Any] = {"damping": 1e-2, "factor_update_steps": 3, "inv_update_steps": 5}
BATCH, BATCHES = 8, 8
EXACT = {"rtol": 0.0, "atol": 1e-12}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*GPU available but not used.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*exists and is not empty.*",
)


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * BATCHES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (BATCH * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


class CallsItself(pl.LightningModule):
    def __init__(self, **sgd: Any) -> None:
        super().__init__()
        self.net = network()
        self.sgd = sgd

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **{"lr": 0.3, "momentum": 0.5, **self.sgd})


class CallsNet(CallsItself):
    """`forward` is there, and `training_step` does not call it."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.net(x), y)


class HasNoForward(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


def fit(model: pl.LightningModule, *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return trainer


def plain_loop(
    *, epochs: int = 1, accumulate: int = 1, clip: float | None = None, options: Any = OPTIONS
) -> nn.Sequential:
    """What a user would write without Lightning."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    kfac = natgrad.KFAC(net, accumulated_loss="mean", **options)
    kfac.attach(optimizer)
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches(), start=1):
            (cross_entropy(net(x), y) / accumulate).backward()
            if number % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return net


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(
    ("model", "module"),
    [(CallsItself, None), (CallsItself, "net"), (CallsNet, "net"), (HasNoForward, None), (HasNoForward, "net")],
)
def test_trains_like_the_plain_loop(model, module):
    lightning, callback = model(), KFACCallback(module=module, **OPTIONS)
    fit(lightning, callback)
    assert callback.kfac.steps == BATCHES
    assert_equal(lightning.net, plain_loop())


def test_accumulated_losses_are_divided_by_lightning():
    model = CallsItself()
    fit(model, KFACCallback(**OPTIONS), accumulate_grad_batches=2)
    assert_equal(model.net, plain_loop(accumulate=2))


def test_adaptive_damping_with_an_objective():
    callback = KFACCallback(
        objective=lambda module, batch: cross_entropy(module(batch[0]), batch[1]),
        **{**OPTIONS, "damping": natgrad.AdaptiveDamping(0.1, every=2)},
    )
    fit(CallsItself(), callback)
    assert callback.kfac.damping != 0.1


def test_the_shorter_window_at_the_end_of_an_epoch():
    """Of one batch, and divided by 7 like all others: the Fisher is that of its cases. (8 batches are 7 and 1.)"""
    options = {"kl_clip": None, "factor_update_steps": 1, "factor_decay": 0.0, "damping": 1e-2}
    callback = KFACCallback(**options)
    fit(CallsItself(lr=0.0), callback, accumulate_grad_batches=7)
    assert callback.kfac.steps == 2
    net = network()
    kfac = natgrad.KFAC(net, **options)
    cross_entropy(net(list(batches())[-1][0]), list(batches())[-1][1]).backward()
    kfac.step()
    for ours, theirs in zip(callback.kfac.blocks, kfac.blocks, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-10, atol=1e-14)


def test_accumulation_has_the_fisher_of_the_whole_batch():
    """Two batches of 8 divided by 2 are one of 16."""
    whole = network()
    x, y = (torch.cat(parts) for parts in zip(*list(batches())[:2], strict=True))
    kfac = natgrad.KFAC(whole, kl_clip=None)
    cross_entropy(whole(x), y).backward()
    kfac.step()
    callback = KFACCallback(**OPTIONS)
    fit(CallsItself(), callback, accumulate_grad_batches=2, max_steps=1)
    for ours, theirs in zip(callback.kfac.blocks, kfac.blocks, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-12, atol=1e-14)


def test_clipping_comes_before_kfac():
    model = CallsItself()
    fit(model, KFACCallback(**OPTIONS), gradient_clip_val=0.05)
    assert_equal(model.net, plain_loop(clip=0.05))


def test_other_callbacks_see_raw_gradients():
    class Norm(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.gradient = pl_module.net[0].weight.grad.clone()

    before, after = Norm(), Norm()
    fit(CallsItself(), before, KFACCallback(**OPTIONS), after, max_steps=1)
    net = network()
    x, y = next(iter(batches()))
    cross_entropy(net(x), y).backward()
    for norm in (before, after):
        torch.testing.assert_close(norm.gradient, net[0].weight.grad, **EXACT)


def test_resumes_exactly(tmp_path):
    straight = CallsItself()
    fit(straight, KFACCallback(**OPTIONS), max_epochs=3)
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(CallsItself(), KFACCallback(**OPTIONS), saving, max_epochs=1, enable_checkpointing=True)
    resumed, callback = CallsItself(), KFACCallback(**OPTIONS)
    fit(resumed, callback, saving, ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=3, enable_checkpointing=True)
    assert callback.kfac.steps == 3 * BATCHES
    assert_equal(resumed, straight)


def test_checkpoint_loads_with_weights_only(tmp_path):
    callback = KFACCallback(**OPTIONS)
    trainer = fit(CallsItself(), callback, max_steps=3)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["KFACCallback"]
    assert state["step"] == 3


def test_a_second_fit_begins_anew_and_leaves_no_hooks():
    model, callback = CallsItself(), KFACCallback(**OPTIONS)
    for _ in range(2):
        fit(model, callback, max_steps=2)
        assert callback.kfac.steps == 2
        assert not any(module._forward_hooks for module in model.modules())


def test_an_error_leaves_no_hooks():
    class Fails(CallsItself):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("of the user's own")
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(KeyError):
        fit(model, KFACCallback(factor_update_steps=1))
    assert not any(module._forward_hooks for module in model.modules())


def test_logs_metrics_when_lightning_logs(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = fit(CallsItself(), KFACCallback(**OPTIONS), logger=logger, log_every_n_steps=3)
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kfac/clip_factor"]] == ["2", "5"]
    assert 0 < trainer.callback_metrics["kfac/clip_factor"] <= 1
    quiet = fit(CallsItself(), KFACCallback(log_metrics=False, **OPTIONS), log_every_n_steps=3)
    assert not quiet.callback_metrics


def test_targets_of_a_batch():
    """Half of the targets are ignored: the Fisher counts the others."""

    class Ignores(CallsItself):
        def on_train_batch_start(self, batch, batch_idx):
            batch[1][::2] = -100

    options = {"predictive": natgrad.Categorical(ignore_index=-100), **OPTIONS}
    callback = KFACCallback(targets=lambda batch: batch[1].index_fill(0, torch.arange(0, BATCH, 2), -100), **options)
    fit(Ignores(), callback, max_steps=1)
    net = network()
    x, y = next(iter(batches()))
    y[::2] = -100
    kfac = natgrad.KFAC(net, kl_clip=None, loss_terms=BATCH // 2)
    cross_entropy(net(x), y).backward()
    kfac.step()
    torch.testing.assert_close(callback.kfac.blocks[0].to_dense(), kfac.blocks[0].to_dense(), **EXACT)


def test_float16_losses_are_unscaled():
    """The loss scale changes neither gradients nor Fisher; the plugin's autocast is off, so that this is exact."""

    class Scaled(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    model, callback = CallsItself(), KFACCallback(**OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    fit(model, callback, plugins=[Scaled("16-mixed", "cpu", scaler)])
    assert_equal(model.net, plain_loop())


def test_steps_without_a_loss_are_skipped():
    class Skips(CallsItself):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)

    model, callback = Skips(), KFACCallback(**OPTIONS)
    fit(model, callback)
    assert callback.kfac.steps == BATCHES - 2


def test_works_under_lightnings_other_name():
    other = pytest.importorskip("pytorch_lightning")

    class Model(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        training_step, configure_optimizers = CallsNet.training_step, HasNoForward.configure_optimizers

    model = Model()
    trainer = other.Trainer(
        accelerator="cpu",
        callbacks=[KFACCallback(**OPTIONS)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches())
    assert_equal(model.net, plain_loop())


def test_says_which_module_to_name():
    with pytest.raises(RuntimeError, match=r"calls of the LightningModule.*KFACCallback\(module=.*'net'"):
        fit(CallsNet(), KFACCallback())
    model = CallsNet()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"calls of self\.spare.*'net', 'spare'"):
        fit(model, KFACCallback(module="spare"))


def test_refuses_an_unknown_module():
    with pytest.raises(ValueError, match=r"module='body' is no submodule.*'net'"):
        fit(CallsItself(), KFACCallback(module="body"))


def test_refuses_manual_optimization():
    class Manual(CallsItself):
        automatic_optimization = False

    with pytest.raises(ValueError, match="automatic optimization"):
        fit(Manual(), KFACCallback())


def test_lightning_refuses_several_optimizers():
    class Two(CallsItself):
        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(Two(), KFACCallback())


def test_refuses_lbfgs():
    class LBFGS(CallsItself):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="LBFGS"):
        fit(LBFGS(), KFACCallback())


def test_refuses_unknown_options():
    with pytest.raises(TypeError, match="dampening"):
        fit(CallsItself(), KFACCallback(dampening=1e-3))


def test_names_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "natgrad.integrations.lightning")
    with pytest.raises(ImportError, match=r"pip install 'natgrad\[integrations\]'"):
        importlib.import_module("natgrad.integrations.lightning")


def test_natgrad_imports_no_framework():
    code = "import natgrad, sys; print({'lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"

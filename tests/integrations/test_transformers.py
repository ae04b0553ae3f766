"""The callback for the Trainer of transformers against loops written by hand, and its Fisher against its formula."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import natgrad

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

from helpers import block_of
from natgrad.capture.eager import _shared
from natgrad.integrations.transformers import KFACCallback

OPTIONS: dict[str, Any] = {"damping": 1e-2, "factor_update_steps": 3, "inv_update_steps": 5}
BATCH, LENGTH, WORDS, STEPS = 4, 5, 7, 7
EXACT = {"rtol": 0.0, "atol": 1e-12}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double()


def bert(**options: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **{"num_labels": 3, **options},
    )
    return BertForSequenceClassification(config).double()


class OwnLoss(nn.Module):
    """A model that is not of transformers: its loss is a mean over its own batch, and is divided by the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()

    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def sentences(labels: str = "tokens") -> list[dict[str, Tensor]]:
    """As many as all steps need. Every second micro-batch has many ignored labels."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(2 * STEPS * BATCH):
        words = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        targets = words.clone()
        targets[: 3 if (number // BATCH) % 2 else 1] = -100
        rows.append({"input_ids": words, "labels": targets if labels == "tokens" else words[0] % 3})
    return rows


def micro_batches(rows: list[dict[str, Tensor]], size: int = BATCH) -> list[dict[str, Tensor]]:
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def train(
    model: nn.Module, folder: Path, callback: Any, *, data: Any = None, resume: Any = None, **arguments: Any
) -> Trainer:
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "max_grad_norm": 0,
        "save_strategy": "no",
        "gradient_accumulation_steps": 1,
        **arguments,
    }
    settings = TrainingArguments(
        str(folder),
        optim="sgd",
        learning_rate=0.3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
        **chosen,
    )
    data = sentences() if data is None else data
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:BATCH], callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_causal_model_trains_like_the_loop_by_hand(tmp_path, accumulation, clip):
    """The loss of a step is a sum over its tokens, divided by the Trainer's count of them."""
    model, callback = gpt2(), KFACCallback(**OPTIONS)
    train(model, tmp_path, callback, gradient_accumulation_steps=accumulation, max_grad_norm=clip)
    other = gpt2()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    terms = 0
    kfac = natgrad.KFAC(other, loss_terms=lambda step: terms, **OPTIONS)
    kfac.attach(optimizer)
    parts = micro_batches(sentences())
    for step in range(STEPS):
        own = parts[step * accumulation : (step + 1) * accumulation]
        terms = sum(int((part["labels"] != -100).sum()) for part in own)
        for part in own:
            logits = other(part["input_ids"]).logits.float()  # transformers' losses are float32
            total = cross_entropy(logits.flatten(0, 1), shifted(part["labels"]).flatten(), reduction="sum")
            (total / terms).backward()
        if clip:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert callback.kfac.steps == STEPS
    assert_equal(model, other)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fisher_of_a_causal_model(tmp_path, accumulation):
    """(1/N) Σ over tokens of a aᵀ ⊗ g gᵀ, factored: of the head, all tokens of a step, N the Trainer's count."""
    reference = gpt2()
    activations = []
    reference.lm_head.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0].detach()))
    parts = micro_batches(sentences())[:accumulation]
    logits = torch.cat([reference(part["input_ids"]).logits.detach() for part in parts]).flatten(0, 1)
    labels = torch.cat([part["labels"] for part in parts])
    targets = shifted(labels).flatten()
    g = logits.softmax(-1) - nn.functional.one_hot(targets.clamp_min(0), WORDS)
    g[targets == -100] = 0
    a = torch.cat(activations).flatten(0, 1)
    terms = int((labels != -100).sum())
    expected = len(a) / terms * torch.kron(g.T @ g / len(g), a.T @ a / len(a))
    callback = KFACCallback(**OPTIONS)
    train(gpt2(), tmp_path, callback, gradient_accumulation_steps=accumulation, max_steps=1)
    # The loss is float32, and so is g.
    torch.testing.assert_close(block_of(callback.kfac, "lm_head.weight").to_dense(), expected, rtol=1e-5, atol=1e-8)


def test_exact_fisher_counts_the_tokens_that_the_loss_counts(tmp_path):
    callback = KFACCallback(fisher="exact")
    train(gpt2(), tmp_path, callback, max_steps=1)
    part = micro_batches(sentences())[0]
    other = gpt2()
    kfac = natgrad.KFAC(other, fisher="exact", predictive=natgrad.Categorical(ignore_index=-100), kl_clip=None)
    kfac.targets = shifted(part["labels"])
    logits = other(part["input_ids"]).logits
    cross_entropy(logits.flatten(0, 1), shifted(part["labels"]).flatten()).backward()
    kfac.step()
    for ours, theirs in zip(callback.kfac.blocks, kfac.blocks, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), **EXACT)


def test_label_smoothing(tmp_path):
    """The labels do not reach the model, the Trainer's count does."""
    callback = KFACCallback(**OPTIONS)
    train(gpt2(), tmp_path, callback, gradient_accumulation_steps=2, label_smoothing_factor=0.1, max_steps=1)
    other, parts = gpt2(), micro_batches(sentences())[:2]
    terms = sum(int((part["labels"] != -100).sum()) for part in parts)
    kfac = natgrad.KFAC(other, loss_terms=terms, kl_clip=None)
    for part in parts:
        smoothed = LabelSmoother(epsilon=0.1)
        smoothed(other(part["input_ids"]), part["labels"], shift_labels=True, num_items_in_batch=terms).backward()
    kfac.step()
    for ours, theirs in zip(callback.kfac.blocks, kfac.blocks, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), **EXACT)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_heads_that_ignore_the_trainers_count(tmp_path, accumulation):
    """BERT's heads average over their own batch and the Trainer does not divide by the number of batches, so that a
    step's loss is the sum of their means (transformers issue 47688).
    """
    model, callback = bert(), KFACCallback(**OPTIONS)
    train(model, tmp_path, callback, data=sentences("classes"), gradient_accumulation_steps=accumulation)
    other = bert()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    kfac = natgrad.KFAC(other, loss_terms=BATCH, **OPTIONS)
    kfac.attach(optimizer)
    for number, part in enumerate(micro_batches(sentences("classes"))[: STEPS * accumulation], start=1):
        cross_entropy(other(part["input_ids"]).logits, part["labels"]).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, other)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_models_whose_loss_the_trainer_divides(tmp_path, accumulation):
    rows = [{**row, "labels": row["input_ids"].flip(0)} for row in sentences()]
    model, callback = OwnLoss(), KFACCallback(**OPTIONS)
    train(model, tmp_path, callback, data=rows, gradient_accumulation_steps=accumulation)
    other = OwnLoss()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    kfac = natgrad.KFAC(other, accumulated_loss="mean", **OPTIONS)
    kfac.attach(optimizer)
    for number, part in enumerate(micro_batches(rows)[: STEPS * accumulation], start=1):
        (other(**part)["loss"] / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, other)


def test_the_shorter_window_at_the_end_of_an_epoch(tmp_path):
    """The Trainer divides it by its own length: every window of equal batches has the same Fisher."""
    row = {**sentences()[0], "labels": sentences()[0]["input_ids"].flip(0)}
    options = {"factor_update_steps": 1, "inv_update_steps": 1, "factor_decay": 0.0, "kl_clip": None, "damping": 1e6}
    traces = []
    for batches in (4, 5):
        callback = KFACCallback(**options)
        arguments = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}
        train(OwnLoss(), tmp_path, callback, data=[row] * (batches * BATCH), **arguments)
        assert callback.kfac.steps == (1 if batches == 4 else 2)
        traces.append(float(callback.kfac.blocks[-1].to_dense().trace()))
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


@pytest.mark.parametrize("options", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_losses_that_average_over_elements(tmp_path, options):
    """`nn.MSELoss` and `nn.BCEWithLogitsLoss`: N is the number of elements; the predictive is not categorical."""
    size = options.get("num_labels", 3)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:size].double() % 2} for row in sentences()]
    for accumulation in (1, 2):
        callback = KFACCallback(**OPTIONS)
        train(bert(**options), tmp_path, callback, data=rows, max_steps=1, gradient_accumulation_steps=accumulation)
        other = bert(**options)
        kfac = natgrad.KFAC(other, loss_terms=BATCH * size, kl_clip=None)
        for part in micro_batches(rows)[:accumulation]:
            other(**part).loss.backward()
        kfac.step()
        ours, theirs = (block_of(one, "classifier.weight").to_dense() for one in (callback.kfac, kfac))
        torch.testing.assert_close(ours, theirs, **EXACT)
    train(bert(**options), tmp_path, KFACCallback(fisher="sampled"), data=rows, max_steps=1)


def test_resumes_exactly(tmp_path):
    straight = gpt2()
    train(straight, tmp_path / "straight", KFACCallback(**OPTIONS))
    out = tmp_path / "out"
    train(gpt2(), out, KFACCallback(**OPTIONS), save_strategy="steps", save_steps=4)
    assert sorted(path.name for path in (out / "checkpoint-4").glob("kfac*")) == ["kfac.pt"]
    assert torch.load(out / "checkpoint-4" / "kfac.pt", weights_only=True)["step"] == 4
    resumed, callback = gpt2(), KFACCallback(**OPTIONS)
    train(resumed, out, callback, resume=str(out / "checkpoint-4"))
    assert callback.kfac.steps == STEPS
    assert_equal(resumed, straight)
    elsewhere, callback = gpt2(), KFACCallback(resume_from_checkpoint=out / "checkpoint-4", **OPTIONS)
    train(elsewhere, tmp_path / "elsewhere", callback, resume=str(out / "checkpoint-4"))
    assert_equal(elsewhere, straight)


def test_resuming_without_a_state_says_so(tmp_path):
    train(gpt2(), tmp_path, KFACCallback(**OPTIONS), save_strategy="steps", save_steps=4)
    (tmp_path / "checkpoint-4" / "kfac.pt").unlink()
    with pytest.warns(natgrad.NatgradWarning, match=r"from step 4, and K-FAC begins anew.*resume_from_checkpoint="):
        train(gpt2(), tmp_path, KFACCallback(**OPTIONS), resume=str(tmp_path / "checkpoint-4"))


def test_weights_alone_are_saved_alone(tmp_path):
    train(gpt2(), tmp_path, KFACCallback(), save_strategy="steps", save_steps=2, max_steps=2, save_only_model=True)
    assert not (tmp_path / "checkpoint-2" / "kfac.pt").exists()


def test_evaluation_and_further_training_leave_no_trace(tmp_path):
    straight = gpt2()
    train(straight, tmp_path, KFACCallback(**OPTIONS))
    model, callback = gpt2(), KFACCallback(**OPTIONS)
    trainer = train(model, tmp_path, callback, eval_strategy="steps", eval_steps=2)
    assert_equal(model, straight)
    assert not model._forward_hooks
    trainer.train()
    assert callback.kfac.steps == STEPS
    assert not model._forward_hooks


def test_the_users_options_count(tmp_path):
    """`loss_terms` for a loss of one's own."""
    callback = KFACCallback(loss_terms=1, **OPTIONS)
    train(gpt2(), tmp_path, callback, max_steps=1)
    found = KFACCallback(**OPTIONS)
    train(gpt2(), tmp_path, found, max_steps=1)
    terms = int((micro_batches(sentences())[0]["labels"] != -100).sum())
    ours, theirs = (block_of(one.kfac, "lm_head.weight").to_dense() for one in (callback, found))
    torch.testing.assert_close(ours * terms, theirs, rtol=1e-10, atol=0)


def test_asks_for_the_terms_of_a_bare_loss(tmp_path):
    class Bare(OwnLoss):
        def forward(self, input_ids, labels=None):
            return {"loss": super().forward(input_ids, labels)["loss"]}

    rows = [{**row, "labels": row["input_ids"]} for row in sentences()]
    with pytest.raises(ValueError, match=r"returns no predictions.*KFACCallback\(loss_terms="):
        train(Bare(), tmp_path, KFACCallback(), data=rows)
    told, seen = KFACCallback(loss_terms=BATCH * LENGTH), KFACCallback()
    train(Bare(), tmp_path, told, data=rows, max_steps=1)
    train(OwnLoss(), tmp_path, seen, data=rows, max_steps=1)
    torch.testing.assert_close(told.kfac.blocks[1].to_dense(), seen.kfac.blocks[1].to_dense(), **EXACT)


def test_a_training_that_fails_leaves_nothing_behind(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, *_, **__):
            raise KeyError("on purpose")

    model = gpt2()
    before = _shared._holders
    arguments = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True)
    with pytest.raises(KeyError, match="on purpose"):
        Trainer(model, arguments, train_dataset=sentences(), callbacks=[KFACCallback(**OPTIONS), Fails()]).train()
    gc.collect()
    assert _shared._holders == before


def test_refuses_unknown_options(tmp_path):
    with pytest.raises(TypeError, match="dampening"):
        train(gpt2(), tmp_path, KFACCallback(dampening=1e-3))


def test_refuses_several_devices():
    arguments = type("Arguments", (), {"world_size": 2, "n_gpu": 1})
    with pytest.raises(ValueError, match="one device for now, and this Trainer has 2"):
        KFACCallback().on_train_begin(arguments, None, None)


@pytest.mark.parametrize("missing", ["transformers", "accelerate.optimizer"])
def test_names_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "natgrad.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'natgrad\[integrations\]'"):
        importlib.import_module("natgrad.integrations.transformers")

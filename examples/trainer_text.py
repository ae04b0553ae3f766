"""K-FAC under the Trainer of transformers: one callback. A tiny GPT-2 learns to spell a few proverbs.

pip install -e ".[cli,integrations]"
python examples/trainer_text.py
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from natgrad.integrations.transformers import KFACCallback

PROVERBS = [
    "a rolling stone gathers no moss",
    "all that glitters is not gold",
    "birds of a feather flock together",
    "every cloud has a silver lining",
    "fortune favours the bold",
    "still waters run deep",
    "the early bird catches the worm",
    "time and tide wait for no man",
]
LETTERS = sorted(set("".join(PROVERBS)))
END = len(LETTERS)  # and padding


def example(text: str, length: int) -> dict[str, torch.Tensor]:
    """Letters as numbers; what is padding is no label."""
    letters = torch.tensor([LETTERS.index(letter) for letter in text] + [END])
    padding = length - len(letters)
    return {
        "input_ids": torch.nn.functional.pad(letters, (0, padding), value=END),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(letters), (0, padding)),
        "labels": torch.nn.functional.pad(letters, (0, padding), value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    length = max(map(len, PROVERBS)) + 1
    data = [example(text, length) for text in PROVERBS]
    words = {"vocab_size": END + 1, "bos_token_id": END, "eos_token_id": END}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=length, n_embd=32, n_layer=2, n_head=4, **words, **dropout))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0,  # K-FAC's KL clip bounds the step
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # The Trainer's default, AdamW, would rescale what K-FAC has scaled.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        callback = KFACCallback(damping=1e-2, kl_clip=1e-2, factor_update_steps=1, inv_update_steps=5)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback], optimizers=(optimizer, None))
        trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    beginning = data[4]["input_ids"][None, :4].to(model.device)
    written = model.generate(beginning, max_length=length, do_sample=False, pad_token_id=END)
    print("".join((*LETTERS, ".")[letter] for letter in written[0]))
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

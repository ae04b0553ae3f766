"""K-FAC under the Lightning Trainer: one callback.

pip install -e ".[cli,integrations]"
python examples/lightning_digits.py
"""

import argparse
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from natgrad.integrations.lightning import KFACCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)  # for self.net(x) say KFACCallback(module="net")
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    training, held_out = Subset(data, range(1500)), Subset(data, range(1500, 1797))

    model = Digits()
    callback = KFACCallback(damping=1e-2, kl_clip=1e-2, inv_update_steps=20)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="auto", devices=1, max_steps=steps, callbacks=[callback], **quiet)
    trainer.fit(model, DataLoader(training, batch_size=250, shuffle=True), DataLoader(held_out, batch_size=297))

    assert callback.kfac is not None
    print(callback.kfac.report())
    trainer.validate(model, DataLoader(held_out, batch_size=297))
    print(f"loss {model.losses[0]:.3f} → {model.losses[-1]:.3f}")


if __name__ == "__main__":
    main()

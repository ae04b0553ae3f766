"""K-FAC with Accelerate: attach it to the optimizer inside Accelerate's, and say that losses are accumulated.

pip install -e ".[cli,integrations]"
python examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import natgrad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=125, shuffle=True)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # accelerator.backward() divides each loss by this number.
    divisor = accelerator.gradient_accumulation_steps
    kfac = natgrad.KFAC(model, accumulated_loss=divisor, damping=1e-2, kl_clip=1e-2, inv_update_steps=20)
    kfac.attach(optimizer, grad_scaler=accelerator.scaler)
    accelerator.register_for_checkpointing(kfac)  # save_state() and load_state() include it

    losses: list[float] = []
    while kfac.steps < steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

    print(kfac.report())
    x, y = x[1500:].to(accelerator.device), y[1500:].to(accelerator.device)
    accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy on 297 other digits {accuracy:.3f}")


if __name__ == "__main__":
    main()

"""K-FAC in a training loop of your own: two lines more than without it.

pip install -e ".[cli]"
python examples/plain.py
"""

import argparse

import torch
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
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=250, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    kfac = natgrad.KFAC(model, damping=1e-2, kl_clip=1e-2, inv_update_steps=20)
    kfac.attach(optimizer)

    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    print(kfac.report())
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy on 297 other digits {accuracy:.3f}")


if __name__ == "__main__":
    main()

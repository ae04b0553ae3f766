"""Two ways to train in a script of your own, written down for `natgrad report`: a Log, and a line a step.

pip install -e ".[cli]"
python examples/your_own_script.py
"""

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import natgrad


def train(folder: Path, *, name: str, seed: int, steps: int) -> tuple[float, float]:
    """The first and the last loss."""
    torch.manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=250, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    kfac = None
    if name == "K-FAC":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        kfac = natgrad.KFAC(model, damping=1e-2, kl_clip=1e-2, inv_update_steps=20)
        kfac.attach(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    losses: list[torch.Tensor] = []
    about = {"data": "digits", "batch": 250, "total_steps": steps}
    with natgrad.Log(
        folder, name=name, seed=seed, model=model, optimizer=optimizer, kfac=kfac, every=5, about=about
    ) as log:
        while log.step < steps:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                log.train(loss=loss)
                losses.append(loss.detach())
                if log.step == steps:
                    break
            with log.testing(), torch.no_grad():
                outputs = model(x[1500:])
                accuracy = (outputs.argmax(1) == y[1500:]).float().mean()
                log.test(loss=cross_entropy(outputs, y[1500:]), accuracy=accuracy, cases=len(outputs))
    return losses[0].item(), losses[-1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    arguments = parser.parse_args()

    folders = [arguments.out / "sgd", arguments.out / "kfac"]
    if held := [str(folder) for folder in folders if folder.exists()]:
        sys.exit(f"{' and '.join(held)}: there already; remove them, or choose another --out")
    for folder, name in zip(folders, ("SGD", "K-FAC"), strict=True):
        first, last = train(folder, name=name, seed=0, steps=arguments.steps)
        print(f"{name}: {arguments.steps} steps, written to {folder}")
        print(f"loss {first:.3f} → {last:.3f}")
    print(f"natgrad report {' '.join(map(str, folders))}")


if __name__ == "__main__":
    main()

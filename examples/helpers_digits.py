"""Figure 1 of Ba, Grosse & Martens (2017): processes that train, one that takes statistics, one that decomposes.

pip install -e ".[cli]"
torchrun --standalone --nproc-per-node 4 examples/helpers_digits.py
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import natgrad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    role = natgrad.roles.take(stats=1, inverse=1)  # first; the inverse worker works in here

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    if role.trains:
        dist.init_process_group("gloo")  # of those that train alone
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(role.rank)  # everybody has batches of its own
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=125, shuffle=True)

    kfac = natgrad.KFAC(model, damping=1e-2, kl_clip=1e-2, inv_update_steps=20, fisher="sampled", roles=role)
    if not role.trains:
        kfac.help(loader)  # until training is over
        return

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    kfac.attach(optimizer)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if dist.get_rank() == 0:
        known = {name: kfac.metrics()[name] for name in ("deliveries", "delivery_age", "decomposition_age")}
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy on 297 other digits {accuracy:.3f}; {known}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

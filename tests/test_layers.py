from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import natgrad

DAMPING = 0.03


def trained(**options) -> natgrad.KFAC:
    """Three steps of a network with a convolution, a product and a norm layer, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = natgrad.KFAC(model, damping=DAMPING, factor_update_steps=2, inv_update_steps=2, **options)
    kfac.attach(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        x, y = torch.randn(64, 1, 6, 6, dtype=torch.float64), torch.randint(4, (64,))
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return kfac


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_layers_have_the_eigenvalues_and_the_condition_number_of_their_dense_blocks(solver):
    options = {"damping_rule": "pi"} if solver == "inverse" else {}
    kfac = trained(solver=solver, **options)
    layers = {layer.name: layer for layer in kfac.layers()}
    assert set(layers) == {block.key for block in kfac.blocks}
    for block in kfac.blocks:
        values = torch.linalg.eigvalsh(block.to_dense()).clamp(min=0)
        layer = layers[block.key]
        scale = values[-1].item()
        assert layer.eigenvalue_max == pytest.approx(scale, rel=1e-9)
        assert layer.eigenvalue_min == pytest.approx(values[0].item(), abs=1e-9 * scale)
        expected = (values[-1].item() + DAMPING) / (values[0].item() + DAMPING)
        assert layer.condition == pytest.approx(expected, rel=1e-6)
        assert layer.age == 1  # decomposed at the third step of four


def test_there_are_no_layers_before_the_first_step():
    assert natgrad.KFAC(nn.Linear(2, 2)).layers() == []

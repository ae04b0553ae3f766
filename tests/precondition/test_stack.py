"""Padding sides to sizes that a GPU likes changes nothing but the speed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad.precondition import stack


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3 * 5 * 5, 7),
        nn.LayerNorm(7),
        nn.Linear(7, 7),
        nn.Linear(7, 7),
        nn.Linear(7, 3, bias=False),
    ).double()


def _after_two_steps(options: dict[str, Any], through: bool = False) -> list[Tensor]:
    """Parameters and gradients after two steps; `through` a checkpoint in between."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = natgrad.KFAC(model, factor_update_steps=1, inv_update_steps=1, **options)
    kfac.attach(optimizer)
    x, y = torch.randn(8, 2, 5, 5, dtype=torch.float64), torch.randint(3, (8,))
    for step in range(2):
        if step and through:
            file = io.BytesIO()
            torch.save(kfac.state_dict(), file)
            file.seek(0)
            kfac.load_state_dict(torch.load(file, weights_only=True))
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [tensor.detach().clone() for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"damping_rule": "pi"},
    {"solver": "inverse"},
    {"doubly_factored": ["4.weight"]},
    {"solver": "inverse", "doubly_factored": ["4.weight"]},
    {"max_factor_size": 5},
    {"grafting": "sgd"},
    {"kl_clip": natgrad.TrustRegion(1e-3, of="step")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("through", [False, True], ids=["", "saved"])
def test_padding_changes_nothing(options: dict[str, Any], through: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    plain = _after_two_steps(options)
    sizes: set[int] = set()

    def padded_size(size: int, device: torch.device) -> int:
        sizes.add(size)
        return -(-size // 4) * 4

    monkeypatch.setattr(stack, "padded_size", padded_size)
    torch.manual_seed(1)
    padded = _after_two_steps(options, through)
    assert {3, 7} <= sizes or options.get("max_factor_size")
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-14)


def test_only_large_sides_on_a_gpu_are_padded() -> None:
    assert stack.padded_size(769, torch.device("cpu")) == 769
    assert stack.padded_size(769, torch.device("cuda")) == 776
    assert stack.padded_size(768, torch.device("cuda")) == 768
    assert stack.padded_size(147, torch.device("cuda")) == 147

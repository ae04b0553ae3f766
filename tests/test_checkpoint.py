"""Checkpoints: bit for bit, before the first forward pass too, weights_only, refused where they do not fit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, groups=1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 3)
    )


class Tied(nn.Module):
    """Shared input factor, both orientations, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed((x[:, 0] > 0).long() + (x[:, 1] > 0).long())
        return functional.linear(self.a(hidden).tanh() * self.b(hidden), self.embed.weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "convnet": (convnet, (1, 4, 4)),
    "tied": (Tied, (4,)),
}


def train(model: nn.Module, optimizer: Any, first: int, last: int, shape: tuple[int, ...]) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, *shape, generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), torch.arange(12) % 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(name: str, **options: Any) -> tuple[nn.Module, Any, KFAC]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"factor_update_steps": 2, "inv_update_steps": 5} | options
    return model, optimizer, KFAC(model, **options).attach(optimizer)


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("name", MODELS)
def test_continues_bit_for_bit(name: str, solver: str, stop: int) -> None:
    shape = MODELS[name][1]
    generator = torch.Generator().manual_seed(3)
    model, optimizer, kfac = make(name, solver=solver, fisher="sampled", generator=generator)
    train(model, optimizer, 0, stop, shape)
    state = through_a_file(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "kfac": kfac.state_dict()}
    )
    whole = train(model, optimizer, stop, 12, shape)

    model, optimizer, kfac = make(name, solver=solver, fisher="sampled", generator=torch.Generator())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    kfac.load_state_dict(state["kfac"])
    assert kfac.steps == stop
    assert train(model, optimizer, stop, 12, shape) == whole


def test_without_decompositions_the_present_factors_are_decomposed() -> None:
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 4, (4,))
    state = through_a_file(kfac.state_dict(decompositions=False))
    size = {key: len(torch.save(value, buffer := io.BytesIO()) or buffer.getvalue()) for key, value in state.items()}
    assert size["decompositions"] < size["blocks"]
    other = KFAC(model, kl_clip=None)
    other.load_state_dict(state)
    for block, mine in zip(kfac.blocks, other.blocks, strict=True):
        torch.testing.assert_close(block.to_dense(), mine.to_dense(), rtol=0, atol=0)
    (member, *_) = other._preconditioner.solved.values()
    expected = torch.linalg.eigvalsh(kfac.blocks[0].estimate().row)
    torch.testing.assert_close(member.sides[0].values, expected.clamp(min=0), rtol=1e-4, atol=1e-6)


def test_another_solver_decomposes_anew() -> None:
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 4, (4,))
    state = kfac.state_dict()
    kfac.detach()
    other = KFAC(model, solver="inverse", optimizer=optimizer)
    other.load_state_dict(state)
    train(model, optimizer, 4, 5, (4,))
    assert other.report()["0.weight"].covered


def test_keys_are_parameter_names() -> None:
    model, optimizer, kfac = make("tied")
    train(model, optimizer, 0, 2, (4,))
    state = kfac.state_dict()
    assert set(state["blocks"]) == {"embed.weight", "a.weight", "b.weight"}
    assert isinstance(state["blocks"]["b.weight"]["orientations"][0]["sides"][1], str)  # shared with a's


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
            r"0\.weight has shape \(6, 4\), in the .* \(5, 4\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3)),
            r"a block for 2\.weight, which",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), r"a block for 2\.bias, which"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_which_parameter_and_changes_nothing(other: Any, message: str) -> None:
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 3, (4,))
    state = kfac.state_dict()
    torch.manual_seed(1)
    model = other()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = KFAC(model).attach(optimizer)
    train(model, optimizer, 0, 3, (4,))
    before = target.state_dict()
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state)
    after = target.state_dict()
    assert after["step"] == before["step"] == 3
    for key, block in before["blocks"].items():
        assert torch.equal(
            block["orientations"][0]["sides"][0]["sum"], after["blocks"][key]["orientations"][0]["sides"][0]["sum"]
        )
    train(model, optimizer, 3, 5, (4,))


def test_a_truncated_or_foreign_state() -> None:
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 3, (4,))
    with pytest.raises(ValueError, match="not a natgrad checkpoint of version 5"):
        kfac.load_state_dict(optimizer.state_dict())
    state = kfac.state_dict()
    state["blocks"]["0.weight"]["orientations"][0]["sides"][0]["sum"] = torch.zeros(1, 2, 2)
    with pytest.raises(ValueError, match=r"factor 0\.weight/0/0 has shape \(1, 2, 2\) .* needs \(1, 5, 5\)"):
        kfac.load_state_dict(state)
    state = kfac.state_dict()
    del state["decompositions"]
    with pytest.raises(ValueError, match="lacks 'decompositions'"):
        kfac.load_state_dict(state)
    assert kfac.steps == 3


def test_a_state_is_a_snapshot() -> None:
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 3, (4,))
    state = kfac.state_dict()
    before = state["blocks"]["0.weight"]["orientations"][0]["sides"][0]["sum"].clone()
    train(model, optimizer, 3, 9, (4,))
    assert torch.equal(before, state["blocks"]["0.weight"]["orientations"][0]["sides"][0]["sum"])


def test_a_checkpoint_under_other_choices() -> None:
    """Resuming with other approximations takes them up, block by block, and keeps what fits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(4, 2, 5, 5).double(), torch.arange(4) % 2
    model(x)

    def step(kfac: KFAC) -> None:
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()

    kfac = KFAC(model, kl_clip=None)
    step(kfac)
    state = kfac.state_dict()
    kfac.detach()
    other = KFAC(model, kl_clip=None, sharing="reduce", vectors="optimizer", factor_update_steps=1)
    other.load_state_dict(state)
    assert [line.covered for line in other.report()] == [True, True, False, False, True, True]
    step(other)
    assert [block.form.reduced for block in other.blocks] == [True, True]
    assert other.blocks[0].straight.counts.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("options", [{"vectors": "diagonal"}, {"max_vector_size": 2}, {"max_factor_size": 4}])
def test_a_checkpoint_under_other_size_limits_follows_the_new_ones(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)), torch.randn(6, 4)
    kfac = KFAC(model, kl_clip=None)
    model(x).square().mean().backward()
    kfac.step()
    state = kfac.state_dict()
    kfac.detach()
    other = KFAC(model, kl_clip=None, factor_update_steps=1, **options)
    other.load_state_dict(state)
    model(x).square().mean().backward()
    other.step()
    fresh = KFAC(model, kl_clip=None, **options)
    model(x).square().mean().backward()
    fresh.step()
    assert [line.factors for line in other.report()] == [line.factors for line in fresh.report()]


def test_schedules_go_on_from_the_step_of_a_checkpoint() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    seen: list[int] = []

    def terms(step: int) -> float:
        seen.append(step)
        return 6.0

    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, loss_terms=terms)
    for _ in range(3):
        model(x).square().mean().backward()
        kfac.step()
    state = kfac.state_dict()
    kfac.detach()
    other = KFAC(model, kl_clip=None, factor_update_steps=1, loss_terms=terms)
    other.load_state_dict(state)
    model(x).square().mean().backward()
    other.step()
    assert seen == [0, 1, 2, 3]

"""Checkpoints: bit for bit, before the first forward pass too, weights_only, refused where they do not fit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC, NatgradWarning


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


def test_a_layer_that_the_checkpoint_does_not_know_has_no_statistics_yet() -> None:
    model, optimizer, kfac = make("mlp", factor_update_steps=5)
    train(model, optimizer, 0, 3, (4,))
    state = kfac.state_dict()
    kfac.detach()
    larger = nn.Sequential(*model, nn.Linear(3, 3))
    optimizer = torch.optim.SGD(larger.parameters(), lr=0.1)
    other = KFAC(larger, factor_update_steps=5).attach(optimizer)
    other.load_state_dict(state)
    for step in (3, 4):
        report = other.report()
        assert report["0.weight"].covered
        assert report["3.weight"].reason == "no statistics yet: known after the next step that takes them"
        assert "left to the optimizer" not in str(report)
        train(larger, optimizer, step, step + 1, (4,))
    train(larger, optimizer, 5, 6, (4,))
    assert all(line.covered for line in other.report())


# Tensors that are not what they were


def trained(stop: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    model, optimizer, kfac = make("mlp", **options)
    model.to(dtype)
    train_in(dtype, model, optimizer, 0, stop)
    return kfac.state_dict()


def train_in(dtype: torch.dtype, model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return train(model, optimizer, first, last, (4,))
    finally:
        torch.set_default_dtype(before)


def altered(state: Any, field: str, change: Callable[[Tensor], Any]) -> Any:
    """The state with every tensor under this name changed."""
    if isinstance(state, dict):
        return {
            name: change(value) if name == field and isinstance(value, Tensor) else altered(value, field, change)
            for name, value in state.items()
        }
    return [altered(one, field, change) for one in state] if isinstance(state, list) else state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return all(map(same, one, other)) if isinstance(one, list) else bool(one == other)


NAMED = {
    "sum": r"factor 0\.weight/0/0",
    "weight": r"'weight' of the factor 0\.weight/0/0",
    "counts": r"'counts' of 0\.weight/0",
    "matrix": r"'matrix' of the decomposition 0\.weight/0",
    "values": r"'values' of the decomposition 0\.weight/0",
    "scale": r"'scale' of the decomposition of 0\.weight",
}
BAD: list[tuple[Callable[[Tensor], Any], str]] = [
    (Tensor.int, "int32 in the checkpoint, expected a floating-point tensor of shape"),
    (Tensor.bool, "bool in the checkpoint, expected a floating-point"),
    (lambda tensor: tensor.to(torch.complex64), "complex64 in the checkpoint"),
    (lambda tensor: None, "missing from the checkpoint, expected a floating-point"),
    (lambda tensor: "x", "a str in the checkpoint"),
    (lambda tensor: tensor[None], "has shape .* in the checkpoint, the model needs"),
]


@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_tensor_that_cannot_be_used_is_named_and_changes_nothing(
    field: str, change: Callable[[Tensor], Any], message: str
) -> None:
    state = altered(trained(), field, change)
    model, optimizer, kfac = make("mlp")
    train(model, optimizer, 0, 4, (4,))
    expected = kfac.state_dict()
    with pytest.raises(ValueError, match=f"{NAMED[field]}.*{message}"):
        kfac.load_state_dict(state)
    assert same(kfac.state_dict(), expected)


@pytest.mark.parametrize("field", ["sum", "weight", "counts"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_refused(field: str, value: float) -> None:
    state = altered(trained(), field, lambda tensor: tensor.clone().fill_(value))
    kfac = make("mlp")[2]
    with pytest.raises(ValueError, match=rf"{NAMED[field]} holds NaN or inf.* in the checkpoint: load an earlier one"):
        kfac.load_state_dict(state)
    assert kfac.steps == 0
    assert not kfac.blocks


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("field", ["matrix", "scale"])
def test_decompositions_that_are_not_finite_are_made_again(field: str, solver: str) -> None:
    state = trained(stop=4, solver=solver)
    own = state["decompositions"]["0.weight"]
    state["decompositions"]["0.weight"] = altered(own, field, lambda tensor: tensor * float("nan"))
    model, optimizer, kfac = make("mlp", solver=solver, inv_update_steps=100)
    with pytest.warns(NatgradWarning, match=r"the checkpoint's decompositions of 0\.weight hold NaN or inf"):
        kfac.load_state_dict(state)
    assert kfac.metrics()["skipped_steps"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 4, 6, (4,))
    assert kfac.metrics()["skipped_steps"] == 0
    # What was whole is not made again.
    assert {key: member.solved_at for key, member in kfac._preconditioner.solved.items()} == {
        "0.weight": 4,
        "2.weight": 0,
    }


def test_a_decomposition_that_is_missing_is_made_in_the_next_step() -> None:
    state = trained(stop=3)
    del state["decompositions"]["2.weight"]
    model, optimizer, kfac = make("mlp", factor_update_steps=100)
    kfac.load_state_dict(state)
    train(model, optimizer, 3, 4, (4,))
    assert kfac._preconditioner.solved["2.weight"].solved_at == 3


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float64])
def test_tensors_of_another_precision_are_converted(field: str, dtype: torch.dtype, solver: str) -> None:
    whole = trained(solver=solver)
    model, optimizer, kfac = make("mlp", solver=solver)
    kfac.load_state_dict(whole)
    expected = train(model, optimizer, 3, 9, (4,))
    model, optimizer, kfac = make("mlp", solver=solver)
    kfac.load_state_dict(altered(whole, field, lambda tensor: tensor.to(dtype)))
    torch.testing.assert_close(train(model, optimizer, 3, 9, (4,)), expected, rtol=1e-2, atol=0)
    dtypes = {factor.sum.dtype for block in kfac.blocks for factor in block.factors()}
    assert dtypes == {torch.float64 if (field, dtype) == ("sum", torch.float64) else torch.float32}


def test_one_factor_of_another_precision() -> None:
    state = trained()
    part = state["blocks"]["0.weight"]["orientations"][0]["sides"][1]
    part["sum"] = part["sum"].double()
    model, optimizer, kfac = make("mlp")
    kfac.load_state_dict(state)
    train(model, optimizer, 3, 9, (4,))


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(("before", "after"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_model_of_another_precision_goes_on_in_that_of_the_checkpoint(
    before: torch.dtype, after: torch.dtype, solver: str
) -> None:
    state = trained(dtype=before, solver=solver)
    model, optimizer, kfac = make("mlp", solver=solver)
    model.to(after)
    kfac.load_state_dict(state)
    train_in(after, model, optimizer, 3, 9)
    assert {factor.sum.dtype for block in kfac.blocks for factor in block.factors()} == {before}


def test_a_shared_factor_whose_first_block_is_gone_is_named() -> None:
    model, optimizer, kfac = make("tied")
    train(model, optimizer, 0, 2, (4,))
    state = kfac.state_dict()
    del state["blocks"]["a.weight"]
    with pytest.raises(ValueError, match=r"factor b\.weight/0/1 is a\.weight/0/1 in the checkpoint, which does not"):
        kfac.load_state_dict(state)

"""Raw momentum, grafting and L2, in float64 by hand, and what a batch that is not finite leaves behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import block_of, flat, gradients
from natgrad import KFAC, Grafting

TIGHT = {"rtol": 1e-10, "atol": 1e-14}
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 4, generator=generator).double(), torch.arange(16) % 3) for _ in range(count)]


def steps(model: nn.Module, data: list[tuple[Tensor, Tensor]], **options: Any) -> tuple[KFAC, list[Any], list[Any]]:
    """K-FAC on a model that stands still: raw and preconditioned gradients of every step, statistics of the first."""
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1000, **options)
    raw, natural = [], []
    for x, y in data:
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        raw.append(gradients(model))
        kfac.step()
        natural.append(gradients(model))
    return kfac, raw, natural


def solve(kfac: KFAC, gradient: dict[str, Tensor], damping: float) -> dict[str, Tensor]:
    """(F̂ + λ)⁻¹ ∇, dense."""
    result = {}
    for block in kfac.blocks:
        names = list(block.names)
        dense = block.to_dense()
        solution = torch.linalg.solve(
            dense + damping * torch.eye(len(dense)).double(), flat([gradient[n] for n in names])
        )
        parts = solution.split([gradient[n].numel() for n in names])
        result |= {n: part.reshape(gradient[n].shape) for n, part in zip(names, parts, strict=True)}
    return result


def test_raw_momentum_is_summed_before_preconditioning() -> None:
    kfac, raw, natural = steps(net(), batches(4), raw_momentum=0.8, damping=1e-2)
    for step in range(4):
        summed = {n: sum(0.8 ** (step - k) * raw[k][n] for k in range(step + 1)) for n in NAMES}
        expected = solve(kfac, summed, 1e-2)
        for name in NAMES:
            torch.testing.assert_close(natural[step][name], expected[name], **TIGHT)


def test_raw_momentum_equals_the_optimizers_while_the_fisher_stands_still() -> None:
    """F̂⁻¹ is linear: the sums differ only once the decomposition changes."""
    _, _, raw = steps(net(), batches(3), raw_momentum=0.8)
    _, _, plain = steps(net(), batches(3))
    for name in NAMES:
        torch.testing.assert_close(raw[2][name], plain[2][name] + 0.8 * plain[1][name] + 0.64 * plain[0][name], **TIGHT)


def test_the_clip_counts_raw_momentum() -> None:
    """vᵀm is the squared length of the step that momentum makes: it stays under the cap, without a factor (1 − μ)²."""
    model, (x, y) = net(), batches(1)[0]
    kfac = KFAC(model, lr=1.0, raw_momentum=0.9, kl_clip=1e-4, damping=1e-2, factor_update_steps=1000)
    for _ in range(5):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        v = flat([gradients(model)[n] for n in NAMES])
        damped = torch.block_diag(*(b.to_dense() for b in kfac.blocks)) + 1e-2 * torch.eye(len(v)).double()
        assert float(v @ damped @ v) == pytest.approx(1e-4)


@pytest.mark.parametrize("graft", ["sgd", "adam", Grafting("adam", betas=(0.5, 0.7), eps=1e-3)])
def test_grafting_has_kfacs_direction_and_the_others_length(graft: Any) -> None:
    kfac, raw, natural = steps(net(), batches(4), grafting=graft, damping=1e-2)
    model = net()
    adam = graft if isinstance(graft, Grafting) else Grafting("adam")
    other = torch.optim.Adam(model.parameters(), lr=1.0, betas=adam.betas, eps=adam.eps)
    for step in range(4):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = raw[step][name].clone()
        other.step()
        moved = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        wanted = raw[step] if graft == "sgd" else moved
        direction = solve(kfac, raw[step], 1e-2)
        for layer in ("0", "2"):
            names = (f"{layer}.weight", f"{layer}.bias")
            v, length = flat([direction[n] for n in names]), flat([wanted[n] for n in names]).norm()
            torch.testing.assert_close(flat([natural[step][n] for n in names]), v * length / v.norm(), **TIGHT)


def test_grafting_of_groups_heads_and_what_has_no_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3)).double()
    data = [(torch.randn(8, 4, 4, 4).double(), torch.arange(8) % 3)]
    _, raw, natural = steps(model, data, grafting="sgd", exclude="2.*")
    norms = [flat([g[n] for n in ("0.weight", "0.bias")]).norm() for g in (raw[0], natural[0])]
    torch.testing.assert_close(*norms, **TIGHT)
    assert torch.equal(raw[0]["2.weight"], natural[0]["2.weight"])
    _, raw, natural = steps(model, data, grafting="adam", exclude="2.*")
    torch.testing.assert_close(natural[0]["2.weight"], raw[0]["2.weight"].sign(), rtol=1e-3, atol=1e-3)


def test_the_clip_measures_the_grafted_step() -> None:
    model, (x, y) = net(), batches(1)[0]
    kfac = KFAC(model, lr=1.0, grafting="sgd", kl_clip=1e-6, damping=1e-2)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    v = flat([gradients(model)[n] for n in NAMES])
    damped = torch.block_diag(*(block.to_dense() for block in kfac.blocks)) + 1e-2 * torch.eye(len(v)).double()
    assert float(v @ damped @ v) == pytest.approx(1e-6)


@pytest.mark.parametrize("options", [{"raw_momentum": 0.9}, {"grafting": "adam"}])
def test_a_nan_batch_leaves_nothing_in_the_averages(options: dict[str, Any]) -> None:
    data = batches(3)
    _, _, clean = steps(net(), [data[0], data[2]], **options)
    poisoned = [data[0], (data[1][0] * math.nan, data[1][1]), data[2]]
    with pytest.warns(UserWarning, match="NaN or inf"):
        _, _, natural = steps(net(), poisoned, **options)
    assert all(float(natural[1][name].abs().sum()) == 0 for name in NAMES)
    for name in NAMES:
        torch.testing.assert_close(natural[2][name], clean[1][name], **TIGHT)


@pytest.mark.parametrize("rule", ["joint", "pi", "plain"])
def test_l2_is_added_to_the_damping(rule: str) -> None:
    one = steps(net(), batches(1), damping=1e-2, l2=3e-2, damping_rule=rule)[2]
    other = steps(net(), batches(1), damping=4e-2, damping_rule=rule)[2]
    for name in NAMES:
        torch.testing.assert_close(one[0][name], other[0][name], **TIGHT)


def test_l2_in_the_loss_with_its_curvature_is_a_newton_step_on_a_quadratic() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2).double(), torch.randn(16, 4).double(), torch.randn(16, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"fisher": "exact", "predictive": "gaussian", "kl_clip": None, "damping": 1e-14}
    KFAC(model, l2=0.3, **options).attach(optimizer)

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / 32 + 0.15 * sum(p.square().sum() for p in model.parameters())

    loss().backward()
    optimizer.step()
    grads = torch.autograd.grad(loss(), list(model.parameters()))
    assert float(flat(list(grads)).norm()) < 1e-10  # the minimum, in one step


@pytest.mark.parametrize("options", [{"raw_momentum": 0.9}, {"grafting": "adam"}, {"grafting": "sgd"}])
def test_checkpoints_continue_bit_for_bit(options: dict[str, Any]) -> None:
    results = []
    for stop in (None, 2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, **options).attach(optimizer)
        for step, (x, y) in enumerate(batches(5)):
            if step == stop:
                state = kfac.state_dict()
                kfac.detach()
                kfac = KFAC(model, **options).attach(optimizer)
                kfac.load_state_dict(state)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(3, 3), r"has shape \(3, 3\) in the checkpoint, .* needs \(5, 4\)"),
        (torch.zeros(5, 4, dtype=torch.int32), r"is int32 in the checkpoint, expected a floating-point tensor"),
        (None, r"is missing from the checkpoint, expected a floating-point tensor of shape \(5, 4\)"),
        (torch.full((5, 4), math.nan), r"holds NaN or inf in the checkpoint: load an earlier one"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_whole(found: Any, message: str) -> None:
    kfac, _, _ = steps(net(), batches(1), raw_momentum=0.9)
    state = kfac.state_dict()
    state["buffers"]["momentum"]["0.weight"] = found
    other = KFAC(net(), kl_clip=None)
    with pytest.raises(ValueError, match=rf"momentum of 0\.weight {message}"):
        other.load_state_dict(state)
    assert (other.steps, other.blocks) == (0, [])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grafting": "adagrad"}, ValueError, "grafting must be one of 'sgd', 'adam'"),
        ({"raw_momentum": 1.0}, ValueError, "raw_momentum must be at least 0 and below 1"),
        ({"l2": -1.0}, ValueError, "l2 must be at least 0"),
        ({"accumulated_loss": "average"}, ValueError, "accumulated_loss must be one of 'sum', 'mean'"),
        ({"grad_scaler": 3}, TypeError, "grad_scaler must be a torch.amp.GradScaler"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KFAC(net(), **options)
    with pytest.raises(ValueError, match="betas must be two numbers"):
        Grafting("adam", betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="eps must be a number above 0"):
        Grafting("adam", eps=0)


def test_quadratic_form_of_every_kind_of_block() -> None:
    """δᵀF̂δ equals the dense block's: groups, diagonal sides, three factors, both orientations, vectors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.norm = nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)
            self.flat, self.tied = nn.Linear(24, 5), nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.flat(self.norm(self.conv(x)).flatten(1)).tanh()
            return functional.linear(functional.linear(hidden, self.tied.t()).tanh(), self.tied)

    model = Model().double()
    kfac = KFAC(model, kl_clip=None, doubly_factored=["flat.weight"], max_factor_size=18)
    functional.cross_entropy(model(torch.randn(8, 4, 4, 4).double()), torch.arange(8) % 5).backward()
    kfac.step()
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    assert kfac.report()["flat.weight"].factors == "A 6² · A 4² · G 5²"
    assert "both orientations" in kfac.report()["tied"].factors
    assert "diagonal" in kfac.report()["conv.weight"].factors
    for block in kfac.blocks:
        delta = flat([direction[name] for name in block.names])
        torch.testing.assert_close(block.quadratic(direction), delta @ block.to_dense() @ delta, **TIGHT)
    assert block_of(kfac, "norm.weight") in kfac.blocks

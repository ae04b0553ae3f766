"""Cases where K-FAC is exact (MATH section 8), in float64, against Fishers computed by autograd."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import block_of, exact_fisher, flat, gradients, one_step, run
from natgrad import KFAC

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
RULES = [("eigen", "joint"), ("eigen", "pi"), ("eigen", "plain"), ("inverse", "pi"), ("inverse", "plain")]


def mean_loss(weights: Tensor) -> object:
    return lambda output: (output * weights).sum() / output.shape[0]


def deep_linear(bias: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Linear(5, 3, bias=bias), nn.Linear(3, 2, bias=bias)).double()


@pytest.mark.parametrize("bias", [True, False])
def test_deep_linear_network_with_gaussian_predictive_is_exact(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = deep_linear(bias), torch.randn(7, 4).double()
    kfac = one_step(model, x, lambda out: out.square().sum() / 7, fisher="exact", predictive="gaussian")
    assert len(kfac.blocks) == 3
    for block in kfac.blocks:
        parameters = [dict(model.named_parameters())[name] for name in block.names]
        torch.testing.assert_close(block.to_dense(), exact_fisher(model(x), parameters, "gaussian", 7), **TIGHT)


@pytest.mark.parametrize("predictive", ["categorical", "bernoulli"])
def test_last_layer_with_one_case_is_exact(predictive: str) -> None:
    # With a single case A and G are independent, so the block is exact for any predictive.
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(1, 4).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive=predictive)
    for block in kfac.blocks:
        parameters = [dict(model.named_parameters())[name] for name in block.names]
        torch.testing.assert_close(block.to_dense(), exact_fisher(model(x), parameters, predictive, 1), **TIGHT)


@pytest.mark.parametrize(("solver", "rule"), RULES)
def test_golden_factors_and_preconditioned_gradients(solver: str, rule: str) -> None:
    """Numbers of an independent implementation (kfac-jax): tests/data/README.md."""
    arrays = np.load(Path(__file__).parent / "data/mlp.npz")
    golden = {name: torch.from_numpy(np.asarray(v)) for name, v in arrays.items() if v.dtype.kind in "fi"}
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    with torch.no_grad():
        for layer in range(3):
            model[2 * layer].bias.copy_(golden[f"params_{2 * layer}"])
            model[2 * layer].weight.copy_(golden[f"params_{2 * layer + 1}"].mT)
    x, y = golden["batch_0"], golden["batch_1"].long()
    damping = float(golden["damping"] + golden["l2"])
    kfac = KFAC(model, fisher="exact", solver=solver, damping_rule=rule, damping=damping, kl_clip=None)
    loss = functional.cross_entropy(model(x), y)
    torch.testing.assert_close(loss, golden["loss"], **TIGHT)
    loss.backward()
    with torch.no_grad():
        for layer in range(3):  # the golden gradients are those of the mean loss
            torch.testing.assert_close(model[2 * layer].bias.grad, golden[f"grads_{2 * layer}"], **TIGHT)
            torch.testing.assert_close(model[2 * layer].weight.grad.mT, golden[f"grads_{2 * layer + 1}"], **TIGHT)
    kfac.step()
    for layer, block in enumerate(kfac.blocks):
        estimate = block.estimate()
        torch.testing.assert_close(estimate.column[0], golden[f"block{layer}_factor0"], **TIGHT)
        torch.testing.assert_close(estimate.row[0], golden[f"block{layer}_factor1"], **TIGHT)
        torch.testing.assert_close(float(estimate.scale[0]), 1.0)
    prefix = {"joint": "eig_precon", "pi": "pi_precon"}.get(rule)
    if prefix is not None:
        for layer in range(3):
            module = model[2 * layer]
            torch.testing.assert_close(module.bias.grad, golden[f"{prefix}_{2 * layer}"], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(module.weight.grad.mT, golden[f"{prefix}_{2 * layer + 1}"], rtol=1e-9, atol=1e-9)


def dense_inverse(block: object, rule: str, damping: float) -> Tensor:
    """Each rule written out with Kronecker products of whole matrices (MATH section 4), for a weight stored (out,
    in).
    """
    estimate = block.estimate()
    row, column, s = estimate.row[0], estimate.column[0], float(estimate.scale[0])
    eye_r, eye_c = torch.eye(row.shape[0]).double(), torch.eye(column.shape[0]).double()
    if rule == "joint":
        return torch.linalg.inv(s * torch.kron(row, column) + damping * torch.kron(eye_r, eye_c))
    if rule == "plain":
        return torch.linalg.inv(torch.kron(row + damping * eye_r, s * column + damping * eye_c))
    pi = (row.trace() / row.shape[0] / (column.trace() / column.shape[0])).sqrt()
    root = (damping / s) ** 0.5
    return torch.linalg.inv(torch.kron(row + pi * root * eye_r, column + root / pi * eye_c)) / s


@pytest.mark.parametrize(("solver", "rule"), RULES)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_preconditioned_gradient_equals_a_dense_solve(kind: str, solver: str, rule: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 3, 5, 5).double()
    if kind == "linear":
        model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), x[:, 0, 0]
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    y = torch.randint(0, 3, (6,))
    damping = 0.03
    kfac = KFAC(model, solver=solver, damping_rule=rule, damping=damping, kl_clip=None)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    after = gradients(model)
    for block in kfac.blocks:
        weight, bias = block.names
        rows = before[weight].shape[0]
        matrix = torch.cat([before[weight].reshape(rows, -1), before[bias][:, None]], dim=1)
        expected = (dense_inverse(block, rule, damping) @ matrix.flatten()).reshape(rows, -1)
        actual = torch.cat([after[weight].reshape(rows, -1), after[bias][:, None]], dim=1)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        if rule == "joint":  # and with the dense block itself, in the parameters' own order
            dense = block.to_dense()
            identity = torch.eye(dense.shape[0]).double()
            solution = torch.linalg.solve(dense + damping * identity, flat([before[weight], before[bias]]))
            torch.testing.assert_close(flat([after[weight], after[bias]]), solution, rtol=1e-9, atol=1e-9)


# Plain damping adds λ to A too, which does not scale with the loss: it alone is not invariant.
@pytest.mark.parametrize(("solver", "rule"), [pair for pair in RULES if pair[1] != "plain"])
def test_empirical_direction_is_invariant_to_the_loss_scale(solver: str, rule: str) -> None:
    # F scales with c², so damping · c² leaves the direction (F + λ)⁻¹g · c unchanged.
    directions = []
    for c in (1.0, 7.0):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        x, y = torch.randn(8, 5).double(), torch.randint(0, 3, (8,))
        one_step(
            model,
            x,
            lambda out, c=c, y=y: c * functional.cross_entropy(out, y),
            solver=solver,
            damping_rule=rule,
            damping=0.01 * c**2,
        )
        directions.append(c * flat(list(gradients(model).values())))
    torch.testing.assert_close(*directions, **TIGHT)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_sampled_and_exact_fishers_ignore_the_loss_scale(fisher: str) -> None:
    blocks = []
    for c in (1.0, 7.0):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        x = torch.randn(8, 5).double()
        generator = torch.Generator().manual_seed(5)
        kfac = one_step(model, x, lambda out, c=c: c * out.square().sum(), fisher=fisher, generator=generator)
        blocks.append([block.to_dense() for block in kfac.blocks])
    for first, second in zip(*blocks, strict=True):
        torch.testing.assert_close(first, second, **TIGHT)


def test_undamped_update_is_invariant_to_an_affine_change_of_the_input() -> None:
    torch.manual_seed(4)
    original = deep_linear(bias=True)
    x, targets = torch.randn(40, 4).double(), torch.randn(40, 2).double()
    mix, shift = torch.randn(4, 4).double() + 2 * torch.eye(4).double(), torch.randn(4).double()
    changed = deep_linear(bias=True)
    changed.load_state_dict(original.state_dict())
    with torch.no_grad():  # the same function of x' = x mixᵀ + shift
        changed[0].weight.copy_(original[0].weight @ torch.linalg.inv(mix))
        changed[0].bias.copy_(original[0].bias - changed[0].weight @ shift)
    moved = []
    for model, inputs in ((original, x), (changed, x @ mix.mT + shift)):
        # Rank-deficient output factors (5 units feeding 2 outputs) make a λ as small as rounding allows necessary.
        optimizer = torch.optim.SGD(model[:1].parameters(), lr=1.0)
        kfac = KFAC(model, damping=1e-9, fisher="exact", predictive="gaussian", kl_clip=None)
        loss = (model(inputs) - targets).square().sum() / 80
        loss.backward()
        kfac.step()
        optimizer.step()
        moved.append(model(inputs).detach())
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)


def test_sampled_factors_converge_to_the_exact_ones_as_the_root_of_draws() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3).double()
    exact = one_step(model, x, lambda out: out.sum(), fisher="exact")
    errors = []
    for draws in (100, 10_000):
        many = x.repeat(draws, 1)
        generator = torch.Generator().manual_seed(0)
        sampled = one_step(model, many, lambda out: out.sum(), fisher="sampled", generator=generator)
        errors.append(
            max(
                float((a.to_dense() - b.to_dense()).norm() / b.to_dense().norm())
                for a, b in zip(sampled.blocks, exact.blocks, strict=True)
            )
        )
    assert errors[0] < 0.3
    assert errors[1] < errors[0] / 4  # 100 times the draws: a tenth, up to luck


def test_exact_fisher_keeps_the_tokens_of_a_sequence_apart() -> None:
    """Tokens that see each other: one backward per token and class, or cross terms appear."""
    torch.manual_seed(7)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            result: Tensor = self.head(hidden.cumsum(1))
            return result

    model, x = Mixer().double(), torch.randn(3, 4, 3).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact")
    hidden = model.first(x).detach().requires_grad_()
    output = model.head(hidden.cumsum(1))
    p = output.softmax(-1).detach()
    g_factor = torch.zeros(4, 4).double()
    for case in range(3):
        for token in range(4):
            for label in range(2):
                score = -output[case, token].log_softmax(-1)[label]
                g = torch.autograd.grad(score, hidden, retain_graph=True)[0][case]
                g_factor += p[case, token, label] * g.mT @ g / 12
    block = block_of(kfac, "first.weight")
    torch.testing.assert_close(block.estimate().row[0], g_factor, **TIGHT)
    torch.testing.assert_close(block.estimate().column[0], x.reshape(-1, 3).mT @ x.reshape(-1, 3) / 12, **TIGHT)
    torch.testing.assert_close(float(block.estimate().scale[0]), 1.0)


def test_running_average_is_bias_corrected_and_weighted_by_rows() -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    kfac = KFAC(model, factor_update_steps=1, factor_decay=0.9, kl_clip=None)
    batches = [torch.randn(n, 3).double() for n in (4, 7, 2)]
    for x in batches:
        run(model, x, lambda out: functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)))
        kfac.step()
    weights = [0.9**age * len(x) for age, x in zip((2, 1, 0), batches, strict=True)]
    moments = [x.mT @ x / len(x) for x in batches]
    expected = sum(w * m for w, m in zip(weights, moments, strict=True)) / sum(weights)
    torch.testing.assert_close(kfac.blocks[0].estimate().column[0], expected, **TIGHT)


def test_damping_may_change_without_a_new_decomposition() -> None:
    torch.manual_seed(9)
    model, x = nn.Sequential(nn.Linear(3, 2)).double(), torch.randn(6, 3).double()
    dampings = [0.5, 0.02]
    kfac = KFAC(model, damping=lambda step: dampings[step], kl_clip=None, inv_update_steps=1000)
    for damping in dampings:
        run(model, x, lambda out: out.square().sum() / 6)
        before = flat(list(gradients(model).values()))
        kfac.step()
        dense = kfac.blocks[0].to_dense()
        expected = torch.linalg.solve(dense + damping * torch.eye(len(dense)).double(), before)
        torch.testing.assert_close(flat(list(gradients(model).values())), expected, **TIGHT)
    assert kfac.metrics()["decomposition_age"] == 1


def test_equal_shapes_are_solved_as_one_stack_and_stay_apart() -> None:
    torch.manual_seed(10)
    layers: list[nn.Module] = []
    for width, following in pairwise((5, 5, 5, 5, 3)):
        layers += [nn.Linear(width, following), nn.Tanh()]
    model, x, y = nn.Sequential(*layers[:-1]).double(), torch.randn(9, 5).double(), torch.randint(0, 3, (9,))
    kfac = KFAC(model, damping=0.01, kl_clip=None)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    assert len(kfac._preconditioner._stacks) == 2
    for block in kfac.blocks:
        dense = block.to_dense()
        expected = torch.linalg.solve(
            dense + 0.01 * torch.eye(len(dense)).double(), flat([before[name] for name in block.names])
        )
        actual = flat([gradients(model)[name] for name in block.names])
        torch.testing.assert_close(actual, expected, **TIGHT)

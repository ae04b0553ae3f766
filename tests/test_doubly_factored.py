"""Three factors for a linear layer on a flattened feature map (Ba et al. 2017, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import block_of, flat, gradients, one_step, run
from natgrad import KFAC
from natgrad.statistics.rank_one import rank_one

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
C, H, W, OUT, N = 3, 2, 2, 4, 8
RULES = [("eigen", "joint"), ("eigen", "pi"), ("eigen", "plain"), ("inverse", "pi"), ("inverse", "plain")]


@pytest.mark.parametrize("shape", [(7, 4, 6), (7, 6, 4), (1, 5, 5), (3, 1, 4)])
def test_rank_one_is_the_leading_singular_pair(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    maps = torch.randn(shape).double()
    left, right = rank_one(maps)
    u, s, vh = torch.linalg.svd(maps)
    for case in range(shape[0]):
        nearest = s[case, 0] * u[case, :, :1] @ vh[case, :1]
        torch.testing.assert_close(left[case, :, None] * right[case], nearest, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(left.norm(dim=1), s[:, 0].sqrt())
    torch.testing.assert_close(right.norm(dim=1), s[:, 0].sqrt())


def test_rank_one_of_zeros_huge_tiny_and_half_precision_maps() -> None:
    maps = torch.zeros(4, 3, 2)
    maps[1, 0, 1], maps[2, 2, 0], maps[3, 1, 1] = 1e18, 1e-18, 2
    left, right = rank_one(maps)
    assert torch.isfinite(left).all()
    torch.testing.assert_close(left[:, :, None] * right[:, None], maps)
    left, right = rank_one(maps[3:].bfloat16())
    assert left.dtype == torch.float32
    torch.testing.assert_close(left[:, :, None] * right[:, None], maps[3:])


def layer_after(flatten: Callable[[Tensor], Tensor], bias: bool = True) -> nn.Module:
    """A convolution makes the map, so that the graph shows its flattening."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(C, C, 1, bias=False), nn.Linear(C * H * W, OUT, bias=bias)
            with torch.no_grad():
                self.conv.weight.copy_(torch.eye(C)[:, :, None, None])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(flatten(self.conv(x)))
            return result

    torch.manual_seed(0)
    return Net().double()


def hand_factors(maps: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[ΨΨᵀ], E[KKᵀ], E[ggᵀ] by one SVD a case; maps (N, C, T)."""
    psi, kappa = [], []
    for case in maps:
        u, s, vh = torch.linalg.svd(case)
        psi.append(s[0].sqrt() * u[:, 0])
        kappa.append(s[0].sqrt() * vh[0])
    p, k = torch.stack(psi), torch.stack(kappa)
    return p.mT @ p / len(maps), k.mT @ k / len(maps), g.mT @ g / len(maps)


FLATTENINGS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "flatten": (lambda x: torch.flatten(x, 1), (C, H * W)),
    "view": (lambda x: x.view(len(x), -1), (C, H * W)),
    "reshape, relu, dropout": (lambda x: functional.dropout(x.reshape(len(x), -1).tanh(), 0.5), (C, H * W)),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).flatten(1), (H * W, C)),
    "channels last, reshape": (lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1), (H * W, C)),
    "unsqueezed in between": (lambda x: x.flatten(1).unsqueeze(0).squeeze(0), (C, H * W)),
    "two flattenings": (lambda x: x.flatten(2).flatten(1), (C, H * W)),
}


@pytest.mark.parametrize("name", FLATTENINGS)
def test_the_feature_map_is_found_in_the_graph(name: str) -> None:
    flatten, shape = FLATTENINGS[name]
    model = layer_after(flatten)
    kfac = one_step(model, torch.randn(N, C, H, W).double(), lambda out: out.square().mean(), doubly_factored_above=11)
    assert block_of(kfac, "fc.weight").form.columns == shape
    line = kfac.report()["fc.weight"]
    assert line.block == "linear, doubly factored"
    assert line.factors == f"A {shape[0]}² · A {shape[1]}² · G {OUT}²"


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_the_block_is_the_product_of_three_second_moments(fisher: str) -> None:
    model = layer_after(lambda x: torch.flatten(x, 1))
    x, weights = torch.randn(N, C, H, W).double(), torch.randn(N, OUT).double()
    options: dict[str, Any] = {
        "fisher": fisher,
        "predictive": "gaussian",
        "generator": torch.Generator().manual_seed(3),
    }
    if fisher == "sampled":
        weights = torch.randn(N, 1, OUT, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[:, 0]
    loss = lambda out: (out * weights).sum() / N  # noqa: E731
    kfac = one_step(model, x, loss, doubly_factored=["fc.weight"], **options)
    psi, kappa, G = hand_factors(x.flatten(2), weights)
    weight, bias = block_of(kfac, "fc.weight"), block_of(kfac, "fc.bias")
    torch.testing.assert_close(weight.to_dense(), torch.kron(G, torch.kron(psi, kappa)), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(bias.to_dense(), G, **TIGHT)
    assert bias.straight.row is weight.straight.row  # computed, kept and decomposed once
    assert kfac.report()["fc.bias"].factors == f"G {OUT}² (of fc.weight)"


def test_three_factors_are_two_on_a_full_factorial_design() -> None:
    """Unit-norm rank-1 maps u_i v_jᵀ, every u with every v: E[aaᵀ] = E[uuᵀ] ⊗ E[vvᵀ]."""
    torch.manual_seed(0)
    u = functional.normalize(torch.randn(4, C).double(), dim=1)
    v = functional.normalize(torch.randn(3, H * W).double(), dim=1)
    x = torch.einsum("ic,jt->ijct", u, v).reshape(12, C, H, W)
    model = layer_after(lambda x: torch.flatten(x, 1), bias=False)
    weights = torch.randn(12, OUT).double()
    blocks = []
    for chosen in (["fc.weight"], []):
        kfac = one_step(model, x, lambda out: (out * weights).sum() / 12, doubly_factored=chosen)
        blocks.append(block_of(kfac, "fc.weight"))
        kfac.detach()
    assert [len(block.straight.sides) for block in blocks] == [3, 2]
    torch.testing.assert_close(blocks[0].to_dense(), blocks[1].to_dense(), rtol=1e-8, atol=1e-9)
    # and not for arbitrary rank-1 maps, whose norms the two factors weigh differently
    kfac = one_step(model, x * torch.rand(12, 1, 1, 1).double(), lambda out: (out * weights).sum() / 12)
    assert not torch.allclose(kfac.blocks[1].to_dense(), blocks[0].to_dense(), rtol=1e-3)


def dense_inverse(block: Any, rule: str, damping: float) -> Tensor:
    """Each rule written out for k factors (MATH section 4), in the weight's order (out, C, T)."""
    estimate = block.estimate()
    factors, s = [side[0] for side in estimate.sides], float(estimate.scale[0])
    eyes = [torch.eye(len(factor)).double() for factor in factors]
    if rule == "joint":
        return torch.linalg.inv(s * reduce(torch.kron, factors) + damping * reduce(torch.kron, eyes))
    if rule == "plain":
        factors[-1] = s * factors[-1]
        return torch.linalg.inv(reduce(torch.kron, [f + damping * eye for f, eye in zip(factors, eyes, strict=True)]))
    means = [factor.trace() / len(factor) for factor in factors]
    k = len(factors)
    root = torch.stack(means).prod() ** (1 / k)
    damped = [
        factor + mean / root * (damping / s) ** (1 / k) * eye
        for factor, mean, eye in zip(factors, means, eyes, strict=True)
    ]
    return torch.linalg.inv(reduce(torch.kron, damped)) / s


@pytest.mark.parametrize(("solver", "rule"), RULES)
def test_every_rule_is_a_dense_solve_with_three_factors(solver: str, rule: str) -> None:
    model = layer_after(lambda x: torch.flatten(x, 1))
    x, weights = torch.randn(N, C, H, W).double(), torch.randn(N, OUT).double()
    kfac = KFAC(model, solver=solver, damping_rule=rule, damping=0.03, kl_clip=None, doubly_factored_above=8)
    run(model, x, lambda out: (out * weights).sum() / N)
    before = gradients(model)
    kfac.step()
    after = gradients(model)
    for name in ("fc.weight", "fc.bias"):
        expected = dense_inverse(block_of(kfac, name), rule, 0.03) @ before[name].flatten()
        torch.testing.assert_close(after[name].flatten(), expected, rtol=1e-9, atol=1e-9)
    if rule == "joint":
        dense = block_of(kfac, "fc.weight").to_dense()
        solved = torch.linalg.solve(dense + 0.03 * torch.eye(len(dense)).double(), flat([before["fc.weight"]]))
        torch.testing.assert_close(after["fc.weight"].flatten(), solved, rtol=1e-9, atol=1e-9)


def test_raw_data_has_no_map_unless_the_user_says_so() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, OUT)).double(), torch.randn(N, 12).double()
    kfac = one_step(model, x, lambda out: out.square().mean(), doubly_factored_above=8)
    assert len(kfac.blocks[0].straight.sides) == 2
    assert "no feature map was found" in kfac.report()["0.weight"].note
    kfac.detach()
    for shape, split in (((3, 2, 2), (3, 4)), ((4, 3), (4, 3))):
        kfac = one_step(model, x, lambda out: out.square().mean(), doubly_factored={"0.weight": shape})
        assert kfac.blocks[0].form.columns == split
        kfac.detach()
    with pytest.raises(ValueError, match=r"0\.weight of shape \(4, 12\) has no inputs of a feature map \(5, 2\)"):
        KFAC(model, doubly_factored={"0.weight": (5, 2)})
    _kept = KFAC(model, kl_clip=None, doubly_factored={"0.weight": (4, 2)})  # 8 divides 48, but not 12
    with pytest.raises(ValueError, match=r"0\.weight has 12 inputs, which are no feature map of shape \(4, 2\)"):
        model(x)
    for shape, message in (((1, 3, 4), "one channel or one place"), (12, "must be a feature map's shape")):
        with pytest.raises(ValueError, match=message):
            KFAC(model, doubly_factored={"0.weight": shape})
    with pytest.raises(ValueError, match="names no matrix"):
        KFAC(model, doubly_factored=["0.bias"])


def test_small_layers_and_none_keep_two_factors() -> None:
    model, x = layer_after(lambda x: torch.flatten(x, 1)), torch.randn(N, C, H, W).double()
    for options in ({}, {"doubly_factored_above": None}, {"doubly_factored_above": 12}):
        kfac = one_step(model, x, lambda out: out.square().mean(), **options)
        assert block_of(kfac, "fc.weight").form.columns == (12,)
        kfac.detach()


def test_a_checkpoint_keeps_three_factors_and_the_shared_bias_block() -> None:
    model, x = layer_after(lambda x: torch.flatten(x, 1)), torch.randn(N, C, H, W).double()
    kfac = one_step(model, x, lambda out: out.square().mean(), doubly_factored_above=8)
    state = kfac.state_dict()
    dense = [block.to_dense() for block in kfac.blocks]
    kfac.detach()
    other = KFAC(model, kl_clip=None, doubly_factored_above=8)
    other.load_state_dict(state)
    for block, expected in zip(other.blocks, dense, strict=True):
        torch.testing.assert_close(block.to_dense(), expected, rtol=0, atol=0)
    assert block_of(other, "fc.bias").straight.row is block_of(other, "fc.weight").straight.row
    run(model, x, lambda out: out.square().mean())
    other.step()
    assert block_of(other, "fc.bias").straight.row is block_of(other, "fc.weight").straight.row


def test_what_cannot_be_doubly_factored_says_so() -> None:
    model, x = layer_after(lambda x: torch.flatten(x, 1)), torch.randn(N, C, H, W).double()
    kfac = one_step(model, x, lambda out: out.square().mean(), doubly_factored=["conv.*"])
    assert kfac.report()["conv.weight"].note.startswith("doubly_factored is for linear layers")

"""Uses that no module announces: functions, einsum, slices, tied and shared weights; each factor against a hand
computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hand
from helpers import block_of, gradients, one_step
from natgrad import KFAC

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
N = 6


class Function(nn.Module):
    """A model that is one function of an input and some parameters."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


def step(model: nn.Module, x: Tensor, **options: Any) -> tuple[KFAC, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """One step of the loss mean over N of <output, C>; returns C, so that N · derivative = C, and gradients before
    and after.
    """
    kfac = KFAC(model, kl_clip=None, loss_terms=N, damping=0.02, **options)
    output = model(x)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ((output * weights).sum() / N).backward()
    before = gradients(model)
    kfac.step()
    return kfac, weights, before, gradients(model)


def check_dense_solve(kfac: KFAC, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """The preconditioned gradient equals a solve with to_dense() in the parameters' own order."""
    for block in kfac.blocks:
        dense = block.to_dense()
        flat = [
            torch.cat([layout.region(g[layout.name]).flatten() for layout in block.layouts]) for g in (before, after)
        ]
        expected = torch.linalg.solve(dense + 0.02 * torch.eye(len(dense), dtype=torch.float64), flat[0])
        torch.testing.assert_close(flat[1], expected, rtol=1e-8, atol=1e-8)


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# name → (function, parameter shapes, input shape, activation rows, derivative rows, how the dense block is stored)
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "functional linear": (
        lambda x, w, b: functional.linear(x, w, b),
        {"w": (4, 3), "b": (4,)},
        (N, 3),
        lambda x: hand.with_one(x),
        rows,
        lambda block: hand.bias_last(block, 4),
    ),
    "x @ w": (lambda x, w: x @ w, {"w": (3, 4)}, (N, 3), rows, rows, "swap"),
    "w @ x": (lambda x, w: w @ x, {"w": (4, 3)}, (3, N), lambda x: x.mT, lambda g: g.mT, None),
    "w @ batch": (
        lambda x, w: w @ x,
        {"w": (4, 3)},
        (2, 3, 5),
        lambda x: rows(x.mT),
        lambda g: rows(g.mT),
        None,
    ),
    "vector": (lambda x, w: w @ x, {"w": (4, 3)}, (3,), lambda x: x[None], lambda g: g[None], None),
    "one row": (
        lambda x, w, b: functional.linear(x, w, b),
        {"w": (4, 3), "b": (4,)},
        (3,),
        lambda x: hand.with_one(x[None]),
        lambda g: g[None],
        lambda block: hand.bias_last(block, 4),
    ),
    "matmul plus bias": (
        lambda x, w, b: x @ w.T + b,
        {"w": (4, 3), "b": (4,)},
        (2, 5, 3),
        lambda x: hand.with_one(rows(x)),
        rows,
        lambda block: hand.bias_last(block, 4),
    ),
    "einsum": (lambda x, w: torch.einsum("bti,oi->bto", x, w), {"w": (4, 3)}, (2, 5, 3), rows, rows, None),
    "einsum, three axes": (
        lambda x, w: torch.einsum("btd,dhk->bthk", x, w),
        {"w": (3, 2, 2)},
        (2, 5, 3),
        rows,
        lambda g: g.reshape(-1, 4),
        "swap",
    ),
    "einsum, input axes joined": (
        lambda x, w: torch.einsum("bthk,hkd->btd", x, w),
        {"w": (2, 2, 3)},
        (2, 5, 2, 2),
        lambda x: x.reshape(-1, 4),
        rows,
        "swap",
    ),
    "transposed storage": (lambda x, w: functional.linear(x, w.t()), {"w": (3, 4)}, (N, 3), rows, rows, "swap"),
    "four axes, non-contiguous": (
        lambda x, w, b: functional.linear(x.transpose(1, 2), w, b),
        {"w": (4, 3), "b": (4,)},
        (2, 5, 2, 3),
        lambda x: hand.with_one(rows(x.transpose(1, 2))),
        rows,
        lambda block: hand.bias_last(block, 4),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    torch.manual_seed(0)
    function, shapes, size, activations, derivatives, order = PRODUCTS[name]
    model, x = Function(function, **shapes), torch.randn(size, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    assert [block.names for block in kfac.blocks] == [tuple(shapes)]
    a, g = activations(x), derivatives(weights) / N
    if order == "swap":  # stored (in, out)
        A, G, s = hand.kronecker(a, g, N)
        expected = s * torch.kron(A, G)
    else:
        expected = hand.dense(a, g, N)
        expected = order(expected) if order is not None else expected
    torch.testing.assert_close(kfac.blocks[0].to_dense(), expected, **TIGHT)
    check_dense_solve(kfac, before, after)


def test_a_matrix_per_head_is_a_stack() -> None:
    torch.manual_seed(0)
    model = Function(lambda x, w: torch.einsum("bhi,hio->bho", x, w), w=(2, 3, 4))
    x = torch.randn(N, 2, 3, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    parts = []
    for head in range(2):
        A, G, s = hand.kronecker(x[:, head], weights[:, head] / N, N)
        parts.append(s * torch.kron(A, G))
    torch.testing.assert_close(kfac.blocks[0].to_dense(), torch.block_diag(*parts), **TIGHT)
    check_dense_solve(kfac, before, after)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_one_parameter_have_a_block_each(axis: int) -> None:
    torch.manual_seed(0)

    def function(x: Tensor, w: Tensor) -> Tensor:
        first, second = w.split([2, 3], dim=axis)
        inputs = (x, x.cos()) if axis == 0 else (x[:, :2], x[:, :3].cos())
        return torch.cat([functional.linear(inputs[0], first), functional.linear(inputs[1], second)], dim=1)

    model = Function(function, w=(5, 4) if axis == 0 else (4, 5))
    x = torch.randn(N, 4, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    names = [block.names for block in kfac.blocks]
    assert names == ([("w[0:2]",), ("w[2:5]",)] if axis == 0 else [("w[:, 0:2]",), ("w[:, 2:5]",)])
    width = 2 if axis == 0 else 4
    a = (x, x.cos()) if axis == 0 else (x[:, :2], x[:, :3].cos())
    for block, activation, g in zip(kfac.blocks, a, (weights[:, :width], weights[:, width:]), strict=True):
        torch.testing.assert_close(block.to_dense(), hand.dense(activation, g / N, N), **TIGHT)
    check_dense_solve(kfac, before, after)
    assert len(kfac.report()) == 1


def test_cross_attention_has_a_block_per_slice_of_its_projection() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).double()
    q, k, v = (torch.randn(2, t, 8, dtype=torch.float64) for t in (3, 5, 5))
    kfac = KFAC(model, kl_clip=None)
    output = model(q, k, v, need_weights=False)[0]
    output.square().sum().backward()
    before = gradients(model)
    kfac.step()
    names = [block.names for block in kfac.blocks]
    assert names == [
        *((f"in_proj_weight[{i}:{i + 8}]", f"in_proj_bias[{i}:{i + 8}]") for i in (0, 8, 16)),
        ("out_proj.weight", "out_proj.bias"),
    ]
    for block, x in zip(kfac.blocks, (q, k, v), strict=False):
        a = hand.with_one(x.reshape(-1, 8))
        torch.testing.assert_close(block.estimate().column[0], a.mT @ a / len(a), **TIGHT)
    # The gradient of a linear use is Σ g aᵀ, so a wrong derivative would show in its second moment's diagonal scale.
    assert all(not torch.equal(before[name], grad) for name, grad in gradients(model).items())


def test_one_weight_used_twice_pools_its_rows() -> None:
    torch.manual_seed(0)
    model = Function(lambda x, w: functional.linear(x, w) + functional.linear(x.cos(), w).sin(), w=(4, 3))
    x = torch.randn(N, 3, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    a = torch.cat([x, x.cos()])
    second = functional.linear(x.cos(), model.w).cos().detach() * weights
    g = torch.cat([weights, second])
    block = kfac.blocks[0]
    torch.testing.assert_close(float(block.estimate().scale[0]), 2.0)
    torch.testing.assert_close(block.to_dense(), hand.dense(a, g / N, N), **TIGHT)
    check_dense_solve(kfac, before, after)


def test_both_orientations_are_normalised_before_they_are_averaged() -> None:
    """W and Wᵀ: sides swap roles; the block is ΣT · Σ(T_u/ΣT)·R̂_u ⊗ Σ(T_u/ΣT)·Ĉ_u with trace-one factors (MATH
    section 1).
    """
    torch.manual_seed(0)
    model = Function(lambda x, w: functional.linear(functional.linear(x, w).tanh(), w.t()), w=(4, 3))
    x = torch.randn(N, 3, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    hidden = functional.linear(x, model.w).tanh().detach()
    g_hidden = (weights @ model.w.t() * (1 - hidden**2)).detach()
    A1, G1, s1 = hand.kronecker(x, g_hidden / N, N)  # W: columns see x, rows see g_hidden
    A2, G2, s2 = hand.kronecker(hidden, weights / N, N)  # Wᵀ: rows see hidden, columns see g
    traces = [s1 * A1.trace() * G1.trace(), s2 * A2.trace() * G2.trace()]
    total = sum(traces)
    shares = [t / total for t in traces]
    row = shares[0] * G1 / G1.trace() + shares[1] * A2 / A2.trace()
    column = shares[0] * A1 / A1.trace() + shares[1] * G2 / G2.trace()
    (block,) = kfac.blocks
    dense = block.to_dense()
    torch.testing.assert_close(dense.trace(), total, **TIGHT)
    torch.testing.assert_close(dense, total * torch.kron(row, column), **TIGHT)
    check_dense_solve(kfac, before, after)
    assert "both orientations" in str(kfac.report())


def test_tied_embedding_and_head_are_one_block() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, dtype=torch.float64)

        def forward(self, tokens: Tensor) -> Tensor:
            return functional.linear(self.embed(tokens).tanh(), self.embed.weight)

    model, tokens = Tied(), torch.randint(0, 5, (N,))
    kfac, weights, before, after = step(model, tokens)
    hidden = model.embed(tokens).tanh().detach()
    g_hidden = (weights @ model.embed.weight * (1 - hidden**2)).detach()
    one_hot = functional.one_hot(tokens, 5).double()
    A1, G1, s1 = hand.kronecker(one_hot, g_hidden / N, N)
    A2, G2, s2 = hand.kronecker(hidden, weights / N, N)
    traces = [s1 * A1.trace() * G1.trace(), s2 * A2.trace() * G2.trace()]
    total = sum(traces)
    first = traces[0] / total * A1 / A1.trace() + traces[1] / total * G2 / G2.trace()
    second = traces[0] / total * G1 / G1.trace() + traces[1] / total * A2 / A2.trace()
    (block,) = kfac.blocks
    torch.testing.assert_close(block.to_dense(), total * torch.kron(first, second), **TIGHT)
    check_dense_solve(kfac, before, after)


def test_layers_fed_by_one_tensor_share_their_input_factor() -> None:
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)

    model, x = Heads().double(), torch.randn(N, 4, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    q, k, v = (block_of(kfac, f"{name}.weight") for name in "qkv")
    assert q.straight.column is k.straight.column is v.straight.column
    assert len({id(block.straight.row) for block in (q, k, v)}) == 3
    for block, g in zip((q, k, v), weights.split([3, 3, 5], dim=1), strict=True):
        expected = hand.bias_last(hand.dense(hand.with_one(x), g / N, N), g.shape[1])
        torch.testing.assert_close(block.to_dense(), expected, **TIGHT)
    check_dense_solve(kfac, before, after)
    assert str(kfac.report()).count("(of q.weight)") == 2


def test_layers_whose_outputs_are_summed_share_their_output_factor() -> None:
    torch.manual_seed(0)

    class Merge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) + self.b(x[:, :2]) + self.c(x.cos())).tanh()

    model, x = Merge().double(), torch.randn(N, 4, dtype=torch.float64)
    kfac, weights, before, after = step(model, x)
    a, b, c = (block_of(kfac, f"{name}.weight") for name in "abc")
    assert a.straight.row is b.straight.row is c.straight.row
    g = (weights * (1 - model(x) ** 2)).detach()
    torch.testing.assert_close(b.to_dense(), hand.bias_last(hand.dense(hand.with_one(x[:, :2]), g / N, N), 3), **TIGHT)
    torch.testing.assert_close(c.to_dense(), hand.dense(x.cos(), g / N, N), **TIGHT)
    check_dense_solve(kfac, before, after)


def test_a_shared_factor_is_split_as_soon_as_it_is_not_shared() -> None:
    torch.manual_seed(0)

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.together = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False), True

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x if self.together else x * 3)], dim=1)

    model = Switch().double()
    kfac = KFAC(model, kl_clip=None, loss_terms=N, factor_update_steps=1, inv_update_steps=1, factor_decay=0.5)
    batches = [torch.randn(N, 4, dtype=torch.float64) for _ in range(2)]
    for number, x in enumerate(batches):
        model.together = number == 0
        model.zero_grad()
        model(x).square().sum().backward()
        kfac.step()
        a, b = kfac.blocks
        assert (a.straight.column is b.straight.column) == model.together
    moments = [x.mT @ x / N for x in batches]
    torch.testing.assert_close(a.estimate().column[0], (0.5 * moments[0] + moments[1]) / 1.5, **TIGHT)
    torch.testing.assert_close(b.estimate().column[0], (0.5 * moments[0] + 9 * moments[1]) / 1.5, **TIGHT)


def test_what_is_not_recognised_is_left_with_a_reason() -> None:
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
            self.both = nn.Parameter(torch.randn(3, 3))
            self.sparse = nn.Embedding(3, 3, sparse=True)
            self.bilinear = nn.Bilinear(3, 3, 3)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x) * self.scale + self.sparse(torch.zeros(len(x), dtype=torch.long))
            hidden = hidden @ self.both + self.both.sum()
            result: Tensor = self.normed(self.bilinear(hidden, hidden))
            return result

    model, x = Odd(), torch.randn(N, 4)
    kfac = one_step(model, x, lambda out: out.square().mean(), fallback="optimizer")
    report = kfac.report()
    assert {line.parameter for line in report if line.covered} == {
        *("layer.weight", "layer.bias", "scale", "normed.bias", "bilinear.bias")
    }
    assert "Sum" in report["both"].reason
    assert "sparse gradients" in report["sparse.weight"].reason
    assert all(line.reason for line in report if not line.covered)


def test_a_pass_that_reaches_back_into_an_earlier_one_counts_it_once() -> None:
    """Truncated recurrence outside the model: the second call's graph contains the first's."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    kfac = KFAC(model, kl_clip=None, loss_terms=N)
    hidden = model(x).tanh()
    model(hidden).square().sum().backward()
    kfac.step()
    a = torch.cat([x, hidden.detach()])
    torch.testing.assert_close(kfac.blocks[0].estimate().column[0], a.mT @ a / (2 * N), **TIGHT)
    torch.testing.assert_close(float(kfac.blocks[0].estimate().scale[0]), 2.0)


def test_large_sides_get_a_diagonal_factor() -> None:
    torch.manual_seed(0)
    model = Function(lambda x, w, b: functional.linear(x, w, b), w=(5, 3), b=(5,))
    x = torch.randn(N, 3, dtype=torch.float64)
    kfac, weights, before, after = step(model, x, max_factor_size=4)
    A, G, s = hand.kronecker(hand.with_one(x), weights / N, N)
    expected = hand.bias_last(s * torch.kron(G.diag().diag(), A), 5)
    torch.testing.assert_close(kfac.blocks[0].to_dense(), expected, **TIGHT)
    check_dense_solve(kfac, before, after)
    assert "G 5 diagonal" in str(kfac.report())


def test_a_shared_factor_is_not_filled_by_a_pass_that_not_all_of_its_layers_are_part_of() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False), True

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x)
            return result + self.b(x).tanh() if self.both else result

    torch.manual_seed(0)
    model, x = Sometimes().double(), torch.randn(N, 3, dtype=torch.float64)
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    model(x).square().sum().backward()
    kfac.step()
    model.zero_grad()
    model.both = False
    model(10 * x).square().sum().backward()
    kfac.step()
    b = next(block for block in kfac.blocks if block.key == "b.weight")
    torch.testing.assert_close(b.estimate().column[0], x.mT @ x / N, **TIGHT)


def test_learned_queries_are_rows_like_any_other() -> None:
    """What is repeated for each case is data from there on, though it is made of parameters (Perceiver, DETR)."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.q, self.k = nn.Parameter(torch.randn(2, 3)), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(self.latents.expand(len(x), -1, -1))
            return (q @ self.k(x).mT).softmax(-1).sum(-1) @ self.k(x)[:, :2]

    torch.manual_seed(0)
    model = Queries().double()
    kfac = one_step(model, torch.randn(N, 4, 3, dtype=torch.float64), lambda out: out.square().mean())
    assert kfac.report()["q.weight"].block == "linear"
    assert kfac.report()["latents"].covered


@pytest.mark.parametrize("length", [4, N])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("leading", [True, False])
def test_positions_looked_up_once_for_all_cases_are_seen_case_by_case(leading: bool, tables: int, length: int) -> None:
    """x + emb(arange(T)), as Hugging Face's GPT-2 does: the derivative at the look-up is summed over the batch."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.place, self.head = nn.Embedding(9, 3), nn.Embedding(8, 3), nn.Linear(3, 2)
            self.kind = nn.Embedding(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            index = torch.arange(x.shape[1])
            index = index[None] if leading else index
            places = self.place(index) if tables == 1 else self.place(index) + self.kind(index % 2)
            result: Tensor = self.head(self.tokens(x) + places)
            return result

    torch.manual_seed(0)
    model, x = Positions().double(), torch.randint(0, 9, (N, length))
    weights = torch.randn(N, length, 2, dtype=torch.float64)
    kfac = one_step(model, x, lambda out: (out * weights).sum() / (length * N))
    g = (weights @ model.head.weight.detach()).reshape(-1, 3)
    estimate = next(block for block in kfac.blocks if block.key == "place.weight").estimate()
    torch.testing.assert_close(estimate.row[0], g.mT @ g / (length * N), **TIGHT)
    counts = torch.tensor([1 / length] * length + [0.0] * (8 - length))
    torch.testing.assert_close(estimate.column[0].double(), counts.double())
    torch.testing.assert_close(float(estimate.scale[0]), 1.0)


def test_elements_outside_the_covered_slices_get_no_raw_gradient() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.rows = nn.Parameter(torch.randn(4, 3, dtype=torch.float64)), 2

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.w[: self.rows])

    torch.manual_seed(0)
    model, x = Growing(), torch.randn(N, 3, dtype=torch.float64)
    kfac = KFAC(model, kl_clip=None)
    for rows in (2, 4):
        model.rows = rows
        model.zero_grad()
        model(x).square().sum().backward()
        kfac.step()
    assert model.w.grad[:2].abs().min() > 0
    assert not model.w.grad[2:].any()

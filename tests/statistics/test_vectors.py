"""Norm layers, biases, scales and tokens: full blocks from the gradients of single cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import block_of, exact_fisher, gradients, one_step, run
from natgrad import KFAC

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
B = 5


def randomise(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return model.double()


class Positions(nn.Module):
    """Everything a ViT adds to its tokens: a class token, positions, a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.positions = nn.Parameter(torch.randn(1, 4, 3))
        self.scale = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        result: Tensor = self.head((x + self.scale * x.tanh()).mean(1))
        return result


class ByHand(nn.Module):
    """A function of x and a vector."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.vector, self.head, self.function = nn.Parameter(torch.randn(shape)), nn.LazyLinear(2), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.function(x, self.vector).flatten(1))
        return result


def after_norm(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(norm, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


IMAGE = (B, 4, 3, 2)
TABLE = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
# name → model, input shape, parameters to check. In evaluation mode every block is the exact Fisher block.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "batch norm 1d": (lambda: after_norm(nn.BatchNorm1d(4)), (B, 4), ("0.weight", "0.bias")),
    "batch norm 2d": (lambda: after_norm(nn.BatchNorm2d(4)), IMAGE, ("0.weight", "0.bias")),
    "batch norm 3d": (lambda: after_norm(nn.BatchNorm3d(4)), (B, 4, 2, 2, 2), ("0.weight", "0.bias")),
    "group norm": (lambda: after_norm(nn.GroupNorm(2, 4)), IMAGE, ("0.weight", "0.bias")),
    "layer norm": (lambda: after_norm(nn.LayerNorm(4)), (B, 3, 4), ("0.weight", "0.bias")),
    "layer norm, two axes": (lambda: after_norm(nn.LayerNorm([3, 2])), IMAGE, ("0.weight", "0.bias")),
    "layer norm without bias": (lambda: after_norm(nn.LayerNorm(4, bias=False)), (B, 3, 4), ("0.weight",)),
    "rms norm": (lambda: after_norm(nn.RMSNorm(4)), (B, 3, 4), ("0.weight",)),
    "instance norm": (lambda: after_norm(nn.InstanceNorm2d(4, affine=True)), IMAGE, ("0.weight", "0.bias")),
    "prelu": (lambda: after_norm(nn.PReLU(4)), IMAGE, ("0.weight",)),
    "one slope": (lambda: after_norm(nn.PReLU()), IMAGE, ("0.weight",)),
    "token, positions, scale": (Positions, (B, 3, 3), ("token", "positions", "scale")),
    "bias": (lambda: ByHand((4,), lambda x, v: (x + v).tanh()), (B, 3, 4), ("vector",)),
    "subtracted": (lambda: ByHand((4,), lambda x, v: (v - x).tanh()), (B, 3, 4), ("vector",)),
    "scale per channel": (lambda: ByHand((4, 1, 1), lambda x, v: (v * x).tanh()), IMAGE, ("vector",)),
    "viewed": (lambda: ByHand((4,), lambda x, v: (x * v.view(1, -1, 1, 1)).tanh()), IMAGE, ("vector",)),
    "expanded by hand": (lambda: ByHand((4,), lambda x, v: (x + v.expand_as(x)).tanh()), (B, 3, 4), ("vector",)),
    "temperature": (lambda: ByHand((), lambda x, v: (x * v).tanh()), (B, 4), ("vector",)),
    "scale of a look-up": (
        lambda: ByHand((4,), lambda x, v: nn.functional.embedding((x > 0).long(), TABLE) * v),
        (B, 3),
        ("vector",),
    ),
    "positions up to a length": (
        lambda: ByHand((6, 4), lambda x, v: (x + v[: x.shape[1]]).tanh()),
        (B, 3, 4),
        ("vector",),
    ),
    "half of it": (lambda: ByHand((8,), lambda x, v: (x + v[:4]).tanh() * v[4:]), (B, 3, 4), ("vector",)),
}


def build(name: str) -> tuple[nn.Module, Tensor, tuple[str, ...]]:
    make, shape, names = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape).double()
    model.double()(x)
    # As inside a model, where activations have gradients: what is added to bare data is run case by case instead.
    return randomise(model).eval(), x.requires_grad_(), names


@pytest.mark.parametrize("predictive", ["gaussian", "categorical"])
@pytest.mark.parametrize("name", CASES)
def test_the_block_is_the_exact_fisher_in_evaluation_mode(name: str, predictive: str) -> None:
    model, x, names = build(name)
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive=predictive)
    parameters = dict(model.named_parameters())
    for key in names:
        assert not kfac.report()[key].note  # found in the graph, not by running the model case by case
        truth = exact_fisher(model(x), [parameters[key]], predictive, B)
        torch.testing.assert_close(block_of(kfac, key).to_dense(), truth, **TIGHT)


@pytest.mark.parametrize("name", CASES)
def test_the_diagonal_block_is_the_diagonal_of_the_full_one(name: str) -> None:
    model, x, names = build(name)
    y = torch.randn_like(model(x))
    blocks = []
    for vectors in ("full", "diagonal"):
        kfac = one_step(model, x, lambda out: (out * y).sum() / B, vectors=vectors)
        blocks.append([block.to_dense() for block in kfac.blocks if block.weight.name in names])
        if vectors == "diagonal":
            assert all("diagonal" in kfac.report()[key].factors for key in names)
        kfac.detach()
    for full, diagonal in zip(*blocks, strict=True):
        torch.testing.assert_close(full.diag().diag(), diagonal, **TIGHT)


@pytest.mark.parametrize("name", CASES)
def test_vectors_can_be_left_to_the_optimizer(name: str) -> None:
    model, x, names = build(name)
    kfac = KFAC(model, kl_clip=None, vectors="optimizer")
    run(model, x, lambda out: out.square().mean())
    before = gradients(model)
    kfac.step()
    for key in names:
        assert kfac.report()[key].reason == "vectors='optimizer'"
        assert torch.equal(before[key], gradients(model)[key])


def test_preconditioning_a_vector_is_a_solve_under_every_rule() -> None:
    model, x, _ = build("layer norm")
    for solver, rule in (
        ("eigen", "joint"),
        ("eigen", "pi"),
        ("eigen", "plain"),
        ("inverse", "pi"),
        ("inverse", "plain"),
    ):
        kfac = KFAC(model, kl_clip=None, solver=solver, damping_rule=rule, damping=0.02)
        run(model, x, lambda out: out.square().mean())
        before = gradients(model)
        kfac.step()
        dense = block_of(kfac, "0.weight").to_dense()
        expected = torch.linalg.solve(dense + 0.02 * torch.eye(4).double(), before["0.weight"])
        torch.testing.assert_close(gradients(model)["0.weight"], expected, **TIGHT)
        kfac.detach()


def test_batch_norm_in_training_takes_each_cases_part_of_the_gradient() -> None:
    """What is assumed of the coupling of cases: the gradient is a sum over cases, and its terms are theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)).double()
    x, y = torch.randn(B, 3, 2, 2).double(), torch.randn(B, 2).double()
    kfac = one_step(model, x, lambda out: (out * y).sum() / B)
    g = (y @ model[2].weight.detach()).reshape(B, 3, 2, 2)  # N times the derivative at the norm's output
    normed = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    for name, rows in (("0.weight", (g * normed).sum((2, 3))), ("0.bias", g.sum((2, 3)))):
        torch.testing.assert_close(block_of(kfac, name).to_dense(), rows.mT @ rows / B, **TIGHT)


def test_large_vectors_have_a_diagonal_block() -> None:
    model, x, _ = build("layer norm")
    kfac = one_step(model, x, lambda out: out.square().mean(), max_vector_size=3)
    assert kfac.report()["0.weight"].factors == "G 4 diagonal"
    kfac.detach()
    kfac = one_step(model, x, lambda out: out.square().mean(), max_vector_size=4)
    assert kfac.report()["0.weight"].factors == "G 4²"


def test_rows_count_as_cases_where_a_norms_batch_is_not_known() -> None:
    torch.manual_seed(0)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.norm(x.flatten(0, 1)).reshape(x.shape).mean(1))
            return result

    model, x, y = Flat().double(), torch.randn(B, 4, 3).double(), torch.randn(B, 2).double()
    kfac = one_step(model, x, lambda out: (out * y).sum() / B)
    g = (y @ model.head.weight.detach())[:, None].expand(B, 4, 3).reshape(-1, 3) / 4
    torch.testing.assert_close(block_of(kfac, "norm.bias").to_dense(), g.mT @ g / B, **TIGHT)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_vector_with_several_uses_has_the_sum_of_their_gradients(fisher: str) -> None:
    """A bias of two products, and a norm that is called twice: exact, cross terms included."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 3))
            self.bias, self.norm = nn.Parameter(torch.randn(3)), nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(functional.linear(x, self.a, self.bias)).tanh()
            result: Tensor = self.norm(functional.linear(x, self.b, self.bias))
            return result

    torch.manual_seed(0)
    model, x, y = Twice().double(), torch.randn(B, 4).double(), torch.randn(B, 3).double()
    kfac = one_step(model, x, lambda out: (out * y).sum() / B, fisher=fisher)
    for name in ("bias", "norm.weight", "norm.bias"):
        parameter = dict(model.named_parameters())[name]
        truth = exact_fisher(model(x), [parameter], "categorical", B)
        if fisher == "empirical":
            rows = torch.stack([torch.autograd.grad((model(x) * y)[case].sum(), parameter)[0] for case in range(B)])
            truth = rows.mT @ rows / B
        torch.testing.assert_close(block_of(kfac, name).to_dense(), truth, **TIGHT)


def test_a_free_bias_on_flattened_rows_is_noted() -> None:
    class Flat(nn.Module):
        """A bias of two products has a block of its own; its rows are tokens here, not cases."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 3, 3))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            rows = functional.linear(x.flatten(0, 1), self.a, self.bias).tanh()
            return functional.linear(rows, self.b[0], self.bias).reshape(*x.shape[:2], 3).mean(1)

    model = Flat().double()
    kfac = one_step(model, torch.randn(B, 4, 4).double(), lambda out: out.sum())
    line = kfac.report()["bias"]
    assert line.block == "bias"
    assert line.note.startswith("rows count as cases: axis 0 of (20,) is not the batch of 5")


def test_a_vector_that_is_subtracted_and_added() -> None:
    """The bias of a sparse autoencoder's decoder, taken off its input: signs matter in the sum over uses."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(5, 3, bias=False)
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.decode(self.encode(self.first(x) - self.bias).tanh()) + self.bias
            return result

    torch.manual_seed(0)
    model, x = Sparse().double(), torch.randn(B, 3).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive="gaussian")
    truth = exact_fisher(model(x), [model.bias], "gaussian", B)
    torch.testing.assert_close(block_of(kfac, "bias").to_dense(), truth, **TIGHT)


def test_an_ambiguous_batch_goes_on_with_the_axis_known_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)).double()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, factor_decay=0.5)
    rows = []
    for cases in (5, 6):  # of six tokens each
        x = torch.randn(cases, 6, 2).double()
        run(model, x, lambda out: out.sum() / len(out))
        kfac.step()
        hidden = model[1](model[0](x)).detach().requires_grad_()
        model[2:](hidden).sum().backward()
        rows.append(hidden.grad.sum(1))
    expected = (0.5 * rows[0].mT @ rows[0] + rows[1].mT @ rows[1]) / (0.5 * 5 + 6)
    torch.testing.assert_close(block_of(kfac, "1.bias").to_dense(), expected, **TIGHT)
    assert not kfac.report()["1.bias"].note


def test_frames_folded_into_the_batch_are_noted() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.conv(x.flatten(0, 1))).mean((2, 3))
            result: Tensor = self.head(hidden.reshape(*x.shape[:2], 4).mean(1))
            return result

    model = Frames().double()
    kfac = one_step(model, torch.randn(B, 3, 1, 5, 5).double(), lambda out: out.sum())
    assert kfac.report()["norm.weight"].note.startswith("rows count as cases: axis 0 of (15,) is not the batch of 5")


def test_positions_of_other_lengths_stay_in_one_block() -> None:
    """A later batch may be longer than any that statistics were taken of."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pos, self.head = nn.Linear(2, 3), nn.Parameter(torch.randn(1, 8, 3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head((self.first(x) + self.pos[:, : x.shape[1]]).tanh().mean(1))
            return result

    torch.manual_seed(0)
    model = Positions().double()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=2, factor_decay=0.5)
    for step, length in enumerate((4, 8, 4, 8, 6)):
        run(model, torch.randn(B, length, 2).double(), lambda out: out.square().mean())
        before = gradients(model)["pos"]
        kfac.step()
        if step == 1:  # where there is no curvature yet, damping alone divides
            torch.testing.assert_close(gradients(model)["pos"][:, 4:], before[:, 4:] / 1e-3, **TIGHT)
    assert float(block_of(kfac, "pos").straight.row.weight) == B * 1.75


def test_axes_that_only_happen_to_have_the_batchs_size() -> None:
    class Windows(nn.Module):
        """Two windows a case, of as many tokens as there are cases."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            windows = self.norm(self.first(x.reshape(2 * len(x), B, 2))) * self.scale
            result: Tensor = self.head(windows.reshape(len(x), 2 * B, 3).mean(1))
            return result

    class Table(nn.Module):
        """A scale of a table with as many rows as cases, and a repeated vector that is no instance norm."""

        def __init__(self) -> None:
            super().__init__()
            self.alpha, self.many, self.head = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(1)), nn.Linear(3, 2)
            self.register_buffer("table", torch.randn(B, 3))

        def forward(self, x: Tensor) -> Tensor:
            scaled = (self.table * self.alpha)[None] + self.many.repeat(B)[None, :, None]
            result: Tensor = self.head((x[:, None] + scaled.tanh()).tanh().mean(1))
            return result

    torch.manual_seed(0)
    model, x = Windows().double(), torch.randn(B, 2 * B, 2).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive="gaussian", sharing="reduce")
    assert "first axis of (10, 5) may hold cases too" in kfac.report()["first.weight"].note
    assert kfac.report()["norm.weight"].note.startswith("rows count as cases: the first axis")
    torch.testing.assert_close(
        block_of(kfac, "scale").to_dense(), exact_fisher(model(x), [model.scale], "gaussian", B), **TIGHT
    )
    other, x = Table().double(), torch.randn(B, 3).double()
    kfac = one_step(other, x, lambda out: out.sum(), fisher="exact", predictive="gaussian")
    for name in ("alpha", "many"):
        truth = exact_fisher(other(x), [getattr(other, name)], "gaussian", B)
        torch.testing.assert_close(block_of(kfac, name).to_dense(), truth, **TIGHT)


def test_parameters_among_themselves_are_not_taken_for_cases() -> None:
    """g · v / ‖v‖ broadcasts over inputs, of which there may be as many as cases."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.v = nn.Parameter(torch.rand(3, 1) + 0.5), nn.Parameter(torch.randn(3, B))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))

    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(B, B).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive="gaussian")
    for name, parameter in model.named_parameters():
        assert kfac.report()[name].block == "gradients of cases"
        truth = exact_fisher(model(x), [parameter], "gaussian", B)
        torch.testing.assert_close(block_of(kfac, name).to_dense(), truth, **TIGHT)


def test_a_repeated_parameter_used_twice_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            many = self.token.expand(len(x), -1)
            result: Tensor = self.head(torch.sigmoid(many) * x + torch.exp(many))
            return result

    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(B, 3).double()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive="gaussian")
    truth = exact_fisher(model(x), [model.token], "gaussian", B)
    torch.testing.assert_close(block_of(kfac, "token").to_dense(), truth, **TIGHT)


@pytest.mark.parametrize("options", [{}, {"solver": "inverse"}])
def test_norm_blocks_of_one_size_are_solved_as_one_stack(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    norms = [layer for _ in range(3) for layer in (nn.BatchNorm2d(4), nn.Tanh())]
    model = nn.Sequential(*norms, nn.Flatten(), nn.Linear(16, 3)).double()
    x, y = torch.randn(B, 4, 2, 2).double(), torch.arange(B) % 3
    kfac = KFAC(model, kl_clip=None, damping=0.02, **options)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    assert len(kfac._preconditioner._stacks) == 2
    for block in kfac.blocks[:-1]:
        dense = block.to_dense()
        expected = torch.linalg.solve(dense + 0.02 * torch.eye(4).double(), before[block.names[0]])
        torch.testing.assert_close(gradients(model)[block.names[0]], expected, **TIGHT)

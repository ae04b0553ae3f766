"""`sharing="reduce"`: each case's places averaged and summed before the outer product; which rows are a case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hand
from helpers import block_of, gradients, one_step, run
from natgrad import KFAC

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
B, T = 5, 4


class Tokens(nn.Module):
    """A linear layer over (B, T, d), pooled into one prediction a case."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.mix(x).tanh().mean(1))
        return result


def derivative_of(model: Tokens, x: Tensor, y: Tensor) -> Tensor:
    """N times the derivative at `mix`'s output."""
    hidden = model.mix(x).detach().requires_grad_()
    functional.cross_entropy(model.head(hidden.tanh().mean(1)), y).backward()
    assert hidden.grad is not None
    return hidden.grad * len(x)


def test_sequences_are_averaged_and_summed_by_case() -> None:
    torch.manual_seed(0)
    model, x, y = Tokens().double(), torch.randn(B, T, 3).double(), torch.arange(B) % 2
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce")
    g = derivative_of(model, x, y)
    a = hand.with_one(x.mean(1))
    estimate = block_of(kfac, "mix.weight").estimate()
    torch.testing.assert_close(estimate.column[0], a.mT @ a / B, **TIGHT)
    torch.testing.assert_close(estimate.row[0], g.sum(1).mT @ g.sum(1) / B, **TIGHT)
    torch.testing.assert_close(float(estimate.scale[0]), 1.0)
    assert kfac.report()["mix.weight"].block == "linear, reduced"
    dense = block_of(kfac, "mix.weight").to_dense()
    expected = hand.bias_last(torch.kron(g.sum(1).mT @ g.sum(1) / B, a.mT @ a / B), 4)
    torch.testing.assert_close(dense, expected, **TIGHT)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("kind", ["sequence", "convolution", "dense"])
def test_reduce_is_expand_where_there_is_one_place(kind: str, fisher: str) -> None:
    torch.manual_seed(0)
    if kind == "sequence":
        model, x = Tokens(), torch.randn(B, 1, 3)
    elif kind == "convolution":
        model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 2)), torch.randn(B, 2, 3, 3)
    else:
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)
    model, x, y = model.double(), x.double(), torch.arange(B) % 2
    blocks = []
    for sharing in ("expand", "reduce"):
        kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing=sharing, fisher=fisher)
        blocks.append([block.to_dense() for block in kfac.blocks])
        kfac.detach()
    for expand, reduce in zip(*blocks, strict=True):
        torch.testing.assert_close(expand, reduce, **TIGHT)


def test_token_losses_keep_the_scale_of_the_fisher() -> None:
    """N counts tokens, rows are sequences: s = B / (B T). For one linear layer with a Gaussian it is exact only in
    trace of A ⊗ G; the numbers are what counts.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2, bias=False)).double(), torch.randn(B, T, 3).double()
    weights = torch.randn(B, T, 2).double()
    kfac = one_step(model, x, lambda out: (out * weights).sum() / (B * T), sharing="reduce")
    estimate = kfac.blocks[0].estimate()
    torch.testing.assert_close(float(estimate.scale[0]), 1 / T)
    torch.testing.assert_close(estimate.row[0], weights.sum(1).mT @ weights.sum(1) / B, **TIGHT)
    torch.testing.assert_close(estimate.column[0], x.mean(1).mT @ x.mean(1) / B, **TIGHT)


class TimeMajor(nn.Module):
    """`nn.MultiheadAttention` flattens its rows time first, whatever its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return result


def test_the_batch_axis_is_found_by_its_size() -> None:
    torch.manual_seed(0)
    model, x, y = TimeMajor().double(), torch.randn(B, T, 4).double(), torch.arange(B) % 2
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce")
    block = block_of(kfac, "attention.in_proj_weight")
    assert block.form.reduced
    assert block.form.case_axis == 1
    a = hand.with_one(x.mean(1))
    torch.testing.assert_close(block.estimate().column[0], a.mT @ a / B, **TIGHT)


def test_cases_that_cannot_be_told_apart_are_expanded_with_a_note() -> None:
    torch.manual_seed(0)
    model, x, y = TimeMajor().double(), torch.randn(T, T, 4).double(), torch.arange(T) % 2
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce")
    block = block_of(kfac, "attention.in_proj_weight")
    assert not block.form.reduced
    note = kfac.report()["attention.in_proj_weight"].note
    assert note == "expand: several axes of (4, 4) have the batch's size: pass batch_axis="
    assert note in str(kfac.report())
    assert block_of(kfac, "head.weight").form.reduced
    rows = hand.with_one(x.reshape(-1, 4))
    torch.testing.assert_close(block.estimate().column[0], rows.mT @ rows / (T * T), **TIGHT)


@pytest.mark.parametrize("batch_axis", [{"attention.*": 1}, {"attention.in_*": -1, "*": 0}, 1])
def test_the_user_may_say_which_axis_is_the_batch(batch_axis: object) -> None:
    torch.manual_seed(0)
    model, x, y = TimeMajor().double(), torch.randn(T, T, 4).double(), torch.arange(T) % 2
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce", batch_axis=batch_axis)
    block = block_of(kfac, "attention.in_proj_weight")
    a = hand.with_one(x.mean(1))
    torch.testing.assert_close(block.estimate().column[0], a.mT @ a / T, **TIGHT)


def test_a_wrong_batch_axis_expands_with_a_note() -> None:
    model, x, y = TimeMajor().double(), torch.randn(B, T, 4).double(), torch.arange(B) % 2
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce", batch_axis=0)
    report = kfac.report()
    assert report["attention.in_proj_weight"].note == "expand: axis 0 of (4, 5) is not the batch of 5: pass batch_axis="
    kfac.detach()
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing="reduce", batch_axis=2)
    assert kfac.report()["attention.in_proj_weight"].note == "expand: batch_axis=2 is not an axis of (4, 5)"


def test_an_ambiguous_batch_goes_on_with_the_axis_known_before() -> None:
    """The last batch of an epoch may be as long as the sequences."""
    torch.manual_seed(0)
    model = TimeMajor().double()
    kfac = KFAC(model, kl_clip=None, sharing="reduce", factor_update_steps=1)
    for cases in (B, T):
        x, y = torch.randn(cases, T, 4).double(), torch.arange(cases) % 2
        run(model, x, lambda out, y=y: functional.cross_entropy(out, y))
        kfac.step()
    block = block_of(kfac, "attention.in_proj_weight")
    assert block.form.reduced
    assert float(block.straight.row.weight) == 0.95 * B + T


def test_sharing_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(B, 2, 7, 7).double(), torch.arange(B) % 2
    model(x)
    options = {"sharing": {"1.*": "reduce", "*": "expand"}}
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), **options)
    assert [block.form.reduced for block in kfac.blocks] == [False, True, False]


def test_embeddings_and_unknown_batches_expand() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7)).double()
    kfac = KFAC(model, kl_clip=None, sharing="reduce")
    loss = functional.cross_entropy(model(torch.arange(6).reshape(2, 3)).flatten(0, 1), torch.arange(6))
    kfac.capture(loss, terms=6)
    loss.backward()
    kfac.step()
    assert not any(block.form.reduced for block in kfac.blocks)
    assert kfac.report()["1.weight"].note == "expand: the batch size is not known: pass batch_axis="


def test_layers_that_share_an_input_share_its_reduced_factor() -> None:
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) + self.b(x)).mean((2, 3))

    model, x, y = Branches().double(), torch.randn(B, 2, 4, 4).double(), torch.arange(B) % 3
    for sharing in ("expand", "reduce"):
        kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), sharing=sharing)
        a, b = kfac.blocks
        assert a.straight.column is b.straight.column
        assert a.straight.row is b.straight.row  # their outputs are summed: one derivative reaches both
        kfac.detach()


@pytest.mark.parametrize(("solver", "rule"), [("eigen", "joint"), ("inverse", "pi")])
def test_preconditioning_with_reduced_factors_is_a_dense_solve(solver: str, rule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(B, 2, 5, 5).double(), torch.arange(B) % 2
    model(x)
    kfac = KFAC(model, kl_clip=None, sharing="reduce", solver=solver, damping_rule=rule, damping=0.02)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    block = kfac.blocks[0]
    flat = [torch.cat([g[name].flatten() for name in block.names]) for g in (before, gradients(model))]
    if rule == "joint":
        dense = block.to_dense()
        expected = torch.linalg.solve(dense + 0.02 * torch.eye(len(dense)).double(), flat[0])
        torch.testing.assert_close(flat[1], expected, rtol=1e-8, atol=1e-8)
    assert torch.isfinite(flat[1]).all()
    assert not torch.allclose(flat[0], flat[1])


def test_time_major_models_say_so() -> None:
    """Outputs (T, B, classes): batch_axis=1 for all."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double(), torch.randn(T, B, 3).double()
    y = torch.arange(T * B) % 2
    loss = lambda out: functional.cross_entropy(out.flatten(0, 1), y)  # noqa: E731
    kfac = one_step(model, x, loss, sharing="reduce", batch_axis=1)
    a = hand.with_one(x.mean(0))
    torch.testing.assert_close(block_of(kfac, "0.weight").estimate().column[0], a.mT @ a / B, **TIGHT)
    assert float(block_of(kfac, "1.weight").straight.row.weight) == B


def test_a_batch_first_model_with_token_losses_and_time_major_rows() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0])
            return result

    torch.manual_seed(0)
    model, x, y = Encoder().double(), torch.randn(B, T, 4).double(), torch.arange(T * B) % 2
    for axis in (None, {"attention.in_*": 1}):
        kfac = one_step(
            model, x, lambda out: functional.cross_entropy(out.flatten(0, 1), y), sharing="reduce", batch_axis=axis
        )
        a = hand.with_one(x.mean(1))
        column = block_of(kfac, "attention.in_proj_weight").estimate().column[0]
        torch.testing.assert_close(column, a.mT @ a / B, **TIGHT)
        kfac.detach()


def test_a_note_that_asks_for_a_batch_axis_is_heard_on_resuming() -> None:
    torch.manual_seed(0)
    model, x, y = TimeMajor().double(), torch.randn(T, T, 4).double(), torch.arange(T) % 2
    loss = lambda out: functional.cross_entropy(out, y)  # noqa: E731
    kfac = one_step(model, x, loss, sharing="reduce")
    state = kfac.state_dict()
    kfac.detach()
    other = KFAC(model, kl_clip=None, sharing="reduce", batch_axis={"attention.*": 1}, factor_update_steps=1)
    other.load_state_dict(state)
    run(model, x, loss)
    other.step()
    assert block_of(other, "attention.in_proj_weight").form.reduced

"""Parameters whose use is not recognised: per-case gradients, the batch's gradient, or the optimizer."""

from __future__ import annotations

import copy
import gc
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import block_of, exact_fisher, flat, gradients, one_step, run
from natgrad import KFAC
from natgrad.passes import Pass

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
B = 6


class Table(nn.Module):
    """A table looked up by index and added to attention scores, as Swin's relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(5)), nn.Linear(3, 2)
        self.register_buffer("index", torch.tensor([[0, 1, 2], [1, 2, 3], [4, 0, 1]]))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        scores = x[:, :, None] * x[:, None, :] + scale * self.table[self.index].tanh()
        result: Tensor = self.head((scores.softmax(-1) @ x[:, :, None])[..., 0])
        return result


def setup() -> tuple[Table, Tensor, Tensor]:
    torch.manual_seed(0)
    return Table().double(), torch.randn(B, 3).double(), torch.arange(B) % 2


@pytest.mark.parametrize("predictive", ["categorical", "gaussian"])
def test_per_case_gradients_give_the_exact_fisher_block(predictive: str) -> None:
    model, x, _ = setup()
    kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive=predictive)
    truth = exact_fisher(model(x), [model.table], predictive, B)
    torch.testing.assert_close(block_of(kfac, "table").to_dense(), truth, **TIGHT)
    line = kfac.report()["table"]
    assert line.block == "gradients of cases"
    assert line.note == "its use by Index is not recognised"


def case_gradients(model: Table, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    for case in range(len(x)):
        loss = functional.cross_entropy(model(x[case : case + 1]), y[case : case + 1])
        rows.append(torch.autograd.grad(loss, model.table)[0])
    return torch.stack(rows)


def test_empirical_per_case_gradients_and_their_solve() -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, damping=0.02)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    rows = case_gradients(model, x, y)
    dense = block_of(kfac, "table").to_dense()
    torch.testing.assert_close(dense, rows.mT @ rows / B, **TIGHT)
    expected = torch.linalg.solve(dense + 0.02 * torch.eye(5).double(), before["table"])
    torch.testing.assert_close(gradients(model)["table"], expected, **TIGHT)


def test_accumulated_batches_add_their_cases() -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, loss_terms=B)
    for part in (slice(0, 2), slice(2, B)):
        (functional.cross_entropy(model(x[part]), y[part], reduction="sum") / B).backward()
    kfac.step()
    rows = case_gradients(model, x, y)
    torch.testing.assert_close(block_of(kfac, "table").to_dense(), rows.mT @ rows / B, **TIGHT)


@pytest.mark.parametrize("clipped", [False, True])
def test_the_batch_gradient_gives_a_diagonal(clipped: bool) -> None:
    """N ĝ², whose mean over sampled targets is the diagonal of the Fisher; what happens to .grad later is no matter."""
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, fallback="batch", damping=0.02)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)["table"]
    if clipped:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    kfac.step()
    torch.testing.assert_close(block_of(kfac, "table").to_dense(), (B * before.square()).diag(), **TIGHT)
    line = kfac.report()["table"]
    assert (line.block, line.factors) == ("gradient of the batch", "G 5 diagonal")


def test_the_sampled_batch_gradient_has_the_fishers_diagonal_in_the_mean() -> None:
    model, x, _ = setup()
    kfac = KFAC(model, kl_clip=None, fallback="batch", fisher="sampled", factor_update_steps=1, factor_decay=0.9999)
    torch.manual_seed(1)
    for _ in range(600):
        run(model, x, lambda out: out.sum())
        kfac.step()
    truth = exact_fisher(model(x), [model.table], "categorical", B).diag()
    found = block_of(kfac, "table").to_dense().diag()
    assert float((found - truth).norm() / truth.norm()) < 0.25


def test_left_to_the_optimizer_where_asked() -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, fallback="optimizer")
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)["table"]
    kfac.step()
    assert torch.equal(before, gradients(model)["table"])
    assert kfac.report()["table"].reason == "its use by Index is not recognised"


class Counting(nn.Module):
    """Batch norm in training writes to its buffers, which torch.func does not allow case by case."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.norm, self.head = nn.Parameter(torch.randn(3)), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x * self.odd.exp()))
        return result


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_a_model_that_cannot_run_case_by_case_falls_back_to_the_batch(fisher: str) -> None:
    torch.manual_seed(0)
    model, x, y = Counting().double(), torch.randn(B, 3).double(), torch.arange(B) % 2
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, fisher=fisher)
    for _ in range(3):
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
    line = kfac.report()["odd"]
    assert line.block == "gradient of the batch"
    assert "its use by Exp is not recognised; not case by case:" in line.note
    assert model.norm.num_batches_tracked == 3
    assert torch.isfinite(gradients(model)["odd"]).all()


def test_large_parameters_are_not_run_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natgrad.kfac.PER_CASE_ELEMENTS", 4)
    model, x, y = setup()
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y))
    assert kfac.report()["table"].block == "gradient of the batch"


def test_keyword_inputs_and_random_numbers_are_no_obstacle() -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None)
    functional.cross_entropy(model(x=x, scale=1.0), y).backward()
    kfac.step()
    rows = case_gradients(model, x, y)
    torch.testing.assert_close(block_of(kfac, "table").to_dense(), rows.mT @ rows / B, **TIGHT)


class Random(Table):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return functional.dropout(super().forward(x, scale=scale), 0.5)


class Seeing(Table):
    """Cases that see each other, as in batch norm without running statistics."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = super().forward(x, scale=scale)
        return hidden - 0.9 * hidden.mean(0)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("kind", [Random, Seeing])
def test_gradients_of_cases_that_do_not_add_up_are_not_used(kind: type[Table], fisher: str) -> None:
    torch.manual_seed(0)
    model, x, y = kind().double(), torch.randn(B, 3).double(), torch.arange(B) % 2
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), fisher=fisher, generator=generator)
    line = kfac.report()["table"]
    assert line.block == "gradient of the batch"
    assert "do not add up to the batch's" in line.note
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    assert torch.equal(after, torch.get_rng_state())  # the user's random numbers are left alone


def test_a_model_that_changes_its_mind_goes_on_with_the_batch() -> None:
    """Found to add up at first, not any more later: three batches without statistics of it, then the batch's."""
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    kfac.step()
    assert kfac.report()["table"].block == "gradients of cases"
    model.__class__ = Seeing
    for number in range(4):
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
        assert kfac.report()["table"].block == ("gradients of cases" if number < 3 else "gradient of the batch")


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_running_the_model_again_leaves_no_trace(fisher: str) -> None:
    class Storing(Table):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.last = super().forward(x, scale=scale)
            self.calls = getattr(self, "calls", 0) + 1
            self.history.append(self.last)
            self._private.append(self.last)
            return self.last * 1.0

    torch.manual_seed(0)
    model, x, y = Storing().double(), torch.randn(B, 3).double(), torch.arange(B) % 2
    model.history, model._private = [], deque()
    kfac = KFAC(model, kl_clip=None, fisher=fisher)
    loss = functional.cross_entropy(model(x), y) + model.last.square().mean()
    loss.backward()
    kfac.step()
    assert model.calls == 1
    assert list(model.history) == list(model._private) == [model.last]
    assert kfac.report()["table"].covered


def test_outputs_that_others_are_computed_from_do_not_count_twice() -> None:
    class Hidden(Table):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            hidden = self.table[:3].exp() * x
            return {"logits": self.head(hidden), "hidden": hidden}

    torch.manual_seed(0)
    model, x, y = Hidden().double(), torch.randn(B, 3).double(), torch.arange(B) % 2
    for fisher in ("empirical", "exact"):
        kfac = one_step(model, x, lambda out: functional.cross_entropy(out["logits"], y), fisher=fisher)
        truth = exact_fisher(model(x)["logits"], [model.table], "categorical", B)
        if fisher == "empirical":
            losses = functional.cross_entropy(model(x)["logits"], y, reduction="none")
            rows = torch.stack([torch.autograd.grad(one, model.table, retain_graph=True)[0] for one in losses])
            truth = rows.mT @ rows / B
        assert kfac.report()["table"].block == "gradients of cases"
        torch.testing.assert_close(block_of(kfac, "table").to_dense(), truth, **TIGHT)
        kfac.detach()


def test_outputs_without_the_parameter_and_wrapped_modules_are_no_obstacle() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = torch.compile(Table(), backend="eager"), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.other(x), self.inner(x)

    torch.manual_seed(0)
    model, x = Wrapped().double(), torch.randn(B, 3).double()
    kfac = one_step(model, x, lambda out: out[0].square().mean() + out[1].square().mean())
    assert kfac.report()["inner.table"].block == "gradients of cases"


def test_several_calls_in_one_backward_keep_their_cases() -> None:
    model, x, _ = setup()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    for _ in range(2):
        model.zero_grad()
        (model(x) - model(x.flip(0) * 2)).square().sum(1).mean().backward()
        kfac.step()
    assert kfac.report()["table"].block == "gradients of cases"


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_half_precision_does_not_look_like_a_mistake(fisher: str) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(32))
            self.body = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(x * self.gate.sigmoid())
            return result

    torch.manual_seed(0)
    model, x, y = Deep(), torch.randn(64, 32), torch.arange(64) % 32
    kfac = KFAC(model, kl_clip=None, fisher=fisher)
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model(x).float(), y)
    loss.backward()
    kfac.step()
    assert kfac.report()["gate"].block == "gradients of cases"


def test_an_output_dict_that_is_the_input_dict_holds_no_graph() -> None:
    """As sentence-transformers' models do; the call is kept for running it again."""

    class Updating(Table):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            features.update(logits=super().forward(features["x"]))
            return features

    torch.manual_seed(0)
    model = Updating().double()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    for backward in (False, True, False, True):
        features = {"x": torch.randn(B, 3).double()}
        loss = model(features)["logits"].square().mean()
        if backward:
            loss.backward()
            kfac.step()
        del features, loss
        gc.collect()
        alive = [thing for thing in gc.get_objects() if type(thing) is Pass and thing._owner is kfac._window]
        assert not alive
    assert kfac.report()["table"].block == "gradients of cases"


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_model_that_returns_its_loss_too(fisher: str) -> None:
    class WithLoss(Table):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return logits, functional.cross_entropy(logits, y)

    torch.manual_seed(0)
    model, x, y = WithLoss().double(), torch.randn(B, 3).double(), torch.arange(B) % 2
    kfac = one_step(model, (x, y), lambda out: out[1], fisher=fisher)
    truth = exact_fisher(model(x, y)[0], [model.table], "categorical", B)
    if fisher == "empirical":
        losses = functional.cross_entropy(model(x, y)[0], y, reduction="none")
        rows = torch.stack([torch.autograd.grad(one, model.table, retain_graph=True)[0] for one in losses])
        truth = rows.mT @ rows / B
    assert kfac.report()["table"].block == "gradients of cases"
    torch.testing.assert_close(block_of(kfac, "table").to_dense(), truth, **TIGHT)


def test_one_odd_batch_does_not_give_up_the_gradients_of_cases() -> None:
    """A (T, T) mask is cut into cases in the one batch that has T of them."""

    class Masked(Table):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask.sum()

    torch.manual_seed(0)
    model = Masked().double()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    for cases in (6, 4, 6, 6):
        run(model, (torch.randn(cases, 3).double(), torch.rand(4, 4).double()), lambda out: out.square().mean())
        kfac.step()
    assert kfac.report()["table"].block == "gradients of cases"
    assert kfac.report()["table"].note == "its use by Index is not recognised"


def test_why_not_case_by_case() -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None)
    loss = functional.cross_entropy(model(x), y)
    kfac.capture(loss, terms=B)
    loss.backward()
    kfac.step()
    assert kfac.report()["table"].note.endswith("not case by case: the loss was captured by hand")


def test_a_copy_of_an_armed_recurrent_model_runs_as_ever() -> None:
    model = Recurrent(nn.LSTM)
    kfac = KFAC(model, kl_clip=None)
    twin = copy.deepcopy(model)
    fused = names_in_graph(Recurrent(nn.LSTM)(torch.randn(B, 3, 4)).sum())
    assert names_in_graph(twin(torch.randn(B, 3, 4)).sum()) == fused
    kfac.detach()


def test_a_model_without_any_recognised_use() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.odd.exp()

    for fallback in ("per-case", "batch"):
        torch.manual_seed(0)
        model, x = Only().double(), torch.randn(B, 3).double()
        kfac = one_step(model, x, lambda out: out.square().sum() / B, fallback=fallback)
        assert kfac.report()["odd"].covered
        assert torch.isfinite(gradients(model)["odd"]).all()


@pytest.mark.parametrize("fallback", ["per-case", "batch"])
def test_a_probing_backward_and_passes_without_one_leave_nothing(fallback: str) -> None:
    model, x, y = setup()
    kfac = KFAC(model, kl_clip=None, fallback=fallback)
    for _ in range(5):
        model(x)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Pass and thing._owner is kfac._window]
    assert not model.table._backward_hooks
    probe = x.clone().requires_grad_()
    torch.autograd.grad(functional.cross_entropy(model(probe), y), probe)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)["table"]
    kfac.step()
    dense = block_of(kfac, "table").to_dense()
    rows = case_gradients(model, x, y)
    expected = rows.mT @ rows / B if fallback == "per-case" else (B * before.square()).diag()
    torch.testing.assert_close(dense, expected, **TIGHT)
    assert not model.table._backward_hooks


def test_the_state_continues_with_fallback_blocks() -> None:
    model, x, y = setup()
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), factor_update_steps=1)
    state = kfac.state_dict()
    kfac.detach()
    results = []
    for _ in range(2):
        again = KFAC(model, kl_clip=None, factor_update_steps=1)
        again.load_state_dict(state)
        run(model, x, lambda out: functional.cross_entropy(out, y))
        again.step()
        results.append(flat(list(gradients(model).values())))
        again.detach()
    assert torch.equal(*results)


# Recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.cell(x)[0][:, -1])
        return result


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_unfused_on_statistics_steps(kind: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Recurrent(kind), torch.randn(B, 3, 4), torch.arange(B) % 3
    plain = functional.cross_entropy(model(x), y)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    kfac = KFAC(model, kl_clip=None, factor_update_steps=2)
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    torch.testing.assert_close(loss, plain)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert "Mkldnn" not in names_in_graph(loss)
    kfac.step()
    assert all(line.covered for line in kfac.report())
    assert all(line.block.startswith(("linear", "with")) for line in kfac.report())
    assert ("Mkldnn" in names_in_graph(model(x).sum())) == ("Mkldnn" in names_in_graph(plain))  # as before
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_unfusing_can_be_switched_off() -> None:
    torch.manual_seed(0)
    model, x, y = Recurrent(nn.LSTM), torch.randn(B, 3, 4), torch.arange(B) % 3
    if "Mkldnn" not in names_in_graph(model(x).sum()):
        pytest.skip("no fused kernel on this machine")
    kfac = one_step(model, x, lambda out: functional.cross_entropy(out, y), unfuse_recurrent=False)
    line = kfac.report()["cell.weight_hh_l0"]
    assert line.note.startswith("inside a fused recurrent kernel")


def names_in_graph(tensor: Tensor) -> str:
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [producer for producer, _ in node.next_functions]
    return " ".join(sorted({type(node).__name__ for node in seen}))

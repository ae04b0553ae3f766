"""The interface that training loops see: hooks, passes, learning rates, clip, metrics, failures."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from helpers import flat, gradients, run
from natgrad import KFAC, NatgradWarning

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(cases: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(cases, 4, generator=generator).double(), torch.arange(cases) % 3


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def weights(model: nn.Module) -> Tensor:
    return flat([p.detach().clone() for p in model.parameters()])


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks)
        for m in model.modules()
    )


def train(model: nn.Module, optimizer: Any, steps: int, kfac: KFAC | None = None) -> None:
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()


def test_attached_equals_explicit_steps() -> None:
    first, second = mlp(), mlp()
    one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    two = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    KFAC(first, factor_update_steps=2, inv_update_steps=4).attach(one)
    train(first, one, 7)
    train(second, two, 7, KFAC(second, optimizer=two, factor_update_steps=2, inv_update_steps=4))
    torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=0)


def test_nothing_is_installed_on_steps_that_take_no_statistics() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, factor_update_steps=3).attach(optimizer)
    armed = []
    for _ in range(7):
        armed.append(hooks(model))
        train(model, optimizer, 1)
    assert armed == [1, 0, 0, 1, 0, 0, 1]


def test_detach_removes_every_hook_and_is_harmless_at_any_time() -> None:
    model, (x, y) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model)
    kfac.detach()
    kfac.detach()
    assert hooks(model) == 0
    kfac.attach(optimizer)
    loss = loss_of(model, x, y)
    kfac.detach()  # between forward and backward
    loss.backward()
    before = gradients(model)
    optimizer.step()
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert all(torch.equal(before[name], grad) for name, grad in gradients(model).items())
    kfac.attach(optimizer)
    train(model, optimizer, 2)
    assert kfac.steps == 2


def test_a_dropped_kfac_takes_its_hooks_and_the_stance_with_it() -> None:
    from torch._dynamo import eval_frame

    model = mlp()
    kfac = KFAC(model)
    reference = weakref.ref(kfac)
    del kfac
    gc.collect()
    assert reference() is None
    assert hooks(model) == 0
    assert eval_frame._stance.stance == "default"


def test_copies_and_pickles_of_an_armed_model_carry_a_hook_that_does_nothing() -> None:
    model, (x, y) = mlp(), data()
    kfac = KFAC(model, kl_clip=None)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        loss_of(other, x, y).backward()
    assert not kfac.blocks
    loss_of(model, x, y).backward()
    kfac.step()
    assert len(kfac.blocks) == 2


def counted_rows(kfac: KFAC) -> float:
    return float(kfac.blocks[0].straight.row.weight)


def test_only_passes_with_gradients_and_a_backward_count() -> None:
    model, (x, y) = mlp(), data()
    kfac = KFAC(model, kl_clip=None)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model(x)  # with gradients, but no backward
    loss_of(model, x, y).backward()
    kfac.step()
    assert counted_rows(kfac) == 8


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_evaluation_mode_counts_and_a_second_backward_does_not(fisher: str) -> None:
    model, (x, y) = mlp().eval(), data()
    kfac = KFAC(model, kl_clip=None, fisher=fisher)
    model(x)  # never differentiated
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    first = gradients(model)
    if fisher == "empirical":
        with pytest.warns(NatgradWarning, match=r"only the first counts .* \(loss1 \+ loss2\)\.backward\(\)"):
            loss.backward()
    else:
        loss.backward()
    kfac.step()
    assert counted_rows(kfac) == 8
    dense = kfac.blocks[0].to_dense()
    again = mlp().eval()
    other = KFAC(again, kl_clip=None, fisher=fisher)
    loss_of(again, x, y).backward()
    other.step()
    if fisher != "sampled":
        torch.testing.assert_close(dense, other.blocks[0].to_dense(), **TIGHT)
    assert first.keys() == gradients(model).keys()


def test_statistics_survive_backward_inside_autocast_and_with_create_graph() -> None:
    results = []
    for create_graph in (False, True):
        model, (x, y) = mlp(), data()
        kfac = KFAC(model, kl_clip=None)
        loss = loss_of(model, x, y)
        with torch.autocast("cpu", torch.bfloat16, enabled=create_graph):
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.detach()
        kfac.step()
        results.append(kfac.blocks[0].to_dense())
    torch.testing.assert_close(*results, **TIGHT)


@pytest.mark.parametrize(
    "options", [{}, {"solver": "inverse"}, {"kl_clip": natgrad.TrustRegion(1e-3, of="step")}], ids=str
)
def test_a_step_inside_autocast_is_as_exact_as_outside(options: dict[str, Any]) -> None:
    results = []
    for inside in (False, True):
        model, (x, y) = mlp().float(), data()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kfac = KFAC(model, **options).attach(optimizer)
        loss_of(model, x.float(), y).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            optimizer.step()
        results.append((gradients(model), weights(model), kfac.metrics()["predicted_kl"]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("terms", [8, None])
def test_explicit_capture_for_a_loss_made_of_several_calls(terms: int | None) -> None:
    """A siamese loss over pairs: N is the number of pairs, and each weight has rows from both branches."""
    model, (x, _) = mlp(), data()
    kfac = KFAC(model, kl_clip=None)
    left, right = model(x), model(x.flip(0) * 2)
    loss = (left - right).square().sum() / 8
    kfac.capture(loss, terms=terms)
    loss.backward()
    kfac.step()
    (first, _) = kfac.blocks
    a = torch.cat([x, x.flip(0) * 2])
    a = torch.cat([a, torch.ones(16, 1).double()], dim=1)
    torch.testing.assert_close(first.estimate().column[0], a.mT @ a / 16, **TIGHT)
    assert float(first.estimate().scale[0]) == 2.0
    kfac.capture(loss_of(model, *data()), terms=8)  # not due: does nothing
    assert not model[0]._forward_hooks


def test_capture_when_only_submodules_are_called() -> None:
    model, (x, y) = mlp(), data()
    whole = KFAC(model, kl_clip=None)
    loss_of(model, x, y).backward()
    whole.step()
    whole.detach()
    model.zero_grad()
    kfac = KFAC(model, kl_clip=None, loss_terms=8)
    loss = functional.cross_entropy(model[2](model[1](model[0](x))), y)
    kfac.capture(loss)
    loss.backward()
    kfac.step()
    for one, other in zip(whole.blocks, kfac.blocks, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense(), **TIGHT)


def test_a_model_that_returns_its_loss_needs_the_number_of_terms() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(self.net, x, y)

    model, (x, y) = WithLoss(), data()
    kfac = KFAC(model, kl_clip=None)
    model(x, y).backward()
    with pytest.raises(RuntimeError, match="loss_terms="):
        kfac.step()
    model.zero_grad()
    kfac = KFAC(model, kl_clip=None, loss_terms=lambda step: 8)
    model(x, y).backward()
    kfac.step()
    assert len(kfac.blocks) == 2


@pytest.mark.parametrize("reduction", ["sum", "mean over elements"])
def test_loss_terms_undo_the_reduction(reduction: str) -> None:
    """N for a summed loss is 1, for nn.MSELoss all elements: then N · derivative is the derivative of the summed
    loss.
    """
    model, (x, _) = mlp(), data()
    terms = 1 if reduction == "sum" else 24
    kfac = KFAC(model, kl_clip=None, loss_terms=terms)
    output = model(x)
    (output.square().sum() / terms).backward()
    kfac.step()
    g = 2 * output.detach()
    torch.testing.assert_close(kfac.blocks[1].estimate().row[0], g.mT @ g / 8, **TIGHT)
    assert float(kfac.blocks[1].estimate().scale[0]) == pytest.approx(8 / terms)


@pytest.mark.parametrize(
    ("make", "builtin"),
    [
        (lambda out: torch.distributions.Categorical(logits=out), "categorical"),
        (lambda out: torch.distributions.Bernoulli(logits=out), "bernoulli"),
        (lambda out: torch.distributions.Independent(torch.distributions.Normal(out, 1.0), 1), "gaussian"),
    ],
)
def test_a_distribution_of_the_users_own(make: Any, builtin: str) -> None:
    results = []
    for predictive in (make, builtin):
        model, (x, y) = mlp(), data()
        kfac = KFAC(model, kl_clip=None, fisher="exact", predictive=predictive)
        loss_of(model, x, y).backward()
        kfac.step()
        results.append([block.to_dense() for block in kfac.blocks])
        sampled = KFAC(model, kl_clip=None, fisher="sampled", predictive=predictive)
        loss_of(model, x, y).backward()
        sampled.step()
        assert all(torch.isfinite(block.to_dense()).all() for block in sampled.blocks)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_normal_with_learned_scale_has_the_fisher_of_both() -> None:
    model, (x, _) = nn.Sequential(nn.Linear(4, 2, bias=False)).double(), data(1)

    def predictive(out: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(out[:, 0], out[:, 1].exp())

    kfac = KFAC(model, kl_clip=None, fisher="exact", predictive=predictive, loss_terms=1)
    out = model(x)
    out.sum().backward()
    kfac.step()
    scale = out[0, 1].exp().detach()
    expected = torch.tensor([[1 / scale**2, 0.0], [0.0, 2.0]]).double()
    torch.testing.assert_close(kfac.blocks[0].estimate().row[0], expected, **TIGHT)


@pytest.mark.parametrize("source", ["optimizer", "attached", "lr", "callable"])
def test_clip_scales_to_the_cap_and_predicts_the_kl(source: str) -> None:
    lr, kappa = 0.5, 1e-3
    model, (x, y) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options: dict[str, Any] = {"optimizer": {"optimizer": optimizer}, "lr": {"lr": lr}}.get(source, {})
    if source == "callable":
        options = {"lr": lambda step: lr}
    kfac = KFAC(model, kl_clip=kappa, damping=0.01, **options)
    loss_of(model, x, y).backward()
    raw = flat(list(gradients(model).values()))
    if source == "attached":
        kfac.attach(optimizer)
        optimizer.step()
    else:
        kfac.step()
    clipped = flat(list(gradients(model).values()))
    dense = torch.block_diag(*[b.to_dense() for b in kfac.blocks]) + 0.01 * torch.eye(len(raw)).double()
    direction = torch.linalg.solve(dense, raw)
    nu = min(1.0, math.sqrt(kappa / (lr**2 * float(direction @ raw))))
    assert nu < 1
    torch.testing.assert_close(clipped, nu * direction, **TIGHT)
    metrics = kfac.metrics()
    assert metrics["clip_factor"] == pytest.approx(nu)
    assert metrics["predicted_kl"] == pytest.approx(0.5 * kappa)
    assert metrics["predicted_kl"] == pytest.approx(0.5 * lr**2 * float(clipped @ dense @ clipped))


def test_clip_uses_each_groups_learning_rate() -> None:
    model, (x, y) = mlp(), data()
    groups = [
        {"params": [model[0].weight], "lr": 0.3},
        {"params": [model[0].bias], "lr": 0.7},
        {"params": model[2].parameters(), "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    kfac = KFAC(model, optimizer=optimizer, damping=0.01, kl_clip=1e-4)
    loss_of(model, x, y).backward()
    raw = gradients(model)
    kfac.step()
    clipped = gradients(model)
    rates = {"0.weight": 0.3, "0.bias": 0.7, "2.weight": 0.1, "2.bias": 0.1}
    nu = kfac.metrics()["clip_factor"]
    assert nu is not None
    total = sum(rates[name] ** 2 * float((clipped[name] / nu * raw[name]).sum()) for name in raw)
    assert nu == pytest.approx(math.sqrt(1e-4 / total))


def test_clip_reads_a_learning_rate_that_a_scheduler_changes() -> None:
    model, (x, y) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kfac = KFAC(model, kl_clip=1e-6).attach(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    before = weights(model)
    loss_of(model, x, y).backward()
    raw = flat(list(gradients(model).values()))
    optimizer.step()
    moved = weights(model) - before
    nu = kfac.metrics()["clip_factor"]
    assert nu is not None
    assert float(-moved @ raw) * 0.05 * nu == pytest.approx(1e-6, rel=1e-6)


def test_every_number_may_be_a_callable_of_the_step() -> None:
    model, (x, y) = mlp(), data()
    seen: dict[str, list[int]] = {}

    def schedule(name: str, value: float) -> Any:
        return lambda step: seen.setdefault(name, []).append(step) or value

    kfac = KFAC(
        model,
        lr=schedule("lr", 0.1),
        factor_update_steps=schedule("factors", 2),
        inv_update_steps=schedule("inverses", 3),
        damping=schedule("damping", 0.1),
        factor_decay=schedule("decay", 0.9),
        kl_clip=schedule("clip", 1e-3),
        loss_terms=schedule("terms", 8),
    )
    for _ in range(5):
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
    assert set(seen) == {"lr", "factors", "inverses", "damping", "decay", "clip", "terms"}
    assert max(seen["damping"]) == 4


def test_changing_intervals() -> None:
    model, (x, y) = mlp(), data()
    kfac = KFAC(
        model,
        kl_clip=None,
        factor_update_steps=lambda s: 1 if s < 3 else 4,
        inv_update_steps=lambda s: 2 if s < 4 else 50,
    )
    ages = []
    for _ in range(8):
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
        metrics = kfac.metrics()
        ages.append((metrics["factor_age"], metrics["decomposition_age"]))
    assert [age for age, _ in ages] == [0, 0, 0, 1, 2, 3, 0, 1]
    assert [age for _, age in ages] == [0, 1, 0, 1, 2, 3, 4, 5]


def test_a_layer_that_first_appears_later_is_solved_then() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.late = nn.Linear(4, 3), nn.Linear(4, 3), False

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) + self.b(x.cos()) if self.late else self.a(x)
            return result

    model, (x, y) = Late().double(), data()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=2)
    for step in range(5):
        model.late = step >= 2
        run(model, x, lambda out: functional.cross_entropy(out, y))
        before = gradients(model)
        kfac.step()
        if model.late:
            assert not torch.equal(before["b.weight"], model.b.weight.grad)
    assert len(kfac.blocks) == 2
    model.late = False  # unused again: no gradient, no statistics, no error
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        loss_of(model, x, y).backward()
        kfac.step()


def test_parameters_frozen_and_unfrozen_while_training() -> None:
    model, (x, y) = mlp(), data()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, inv_update_steps=1)
    for frozen in ((), ("2.bias",), ("0.weight", "0.bias"), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        run(model, x, lambda out: functional.cross_entropy(out, y))
        before = gradients(model)
        kfac.step()
        assert set(before) == {"0.weight", "0.bias", "2.weight", "2.bias"} - set(frozen)
        assert all(not torch.equal(before[name], grad) for name, grad in gradients(model).items())
        lines = {line.parameter: line for line in kfac.report()}
        if "2.bias" in frozen:
            assert "frozen" in lines["2.bias"].reason
        assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


def test_excluded_parameters_are_left_alone() -> None:
    model, (x, y) = mlp(), data()
    kfac = KFAC(model, kl_clip=None, exclude=["2.*"])
    loss_of(model, x, y).backward()
    before = gradients(model)
    kfac.step()
    assert torch.equal(before["2.weight"], model[2].weight.grad)
    assert kfac.report()["2.weight"].reason == "excluded"
    assert [block.names[0] for block in kfac.blocks] == ["0.weight"]


def test_set_to_zero_gradients_of_the_optimizers_state_initialisation_change_nothing() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, (x, y) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model).attach(optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert kfac.steps == 0
    assert kfac.metrics()["predicted_kl"] is None
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()
    assert kfac.steps == 1


def test_compiled_model_is_compiled_on_ordinary_steps_and_eager_on_armed_ones() -> None:
    gc.collect()  # other tests' KFACs, one of which may be waiting for statistics
    compiled_calls = []

    def backend(graph: Any, example: Any) -> Any:
        def forward(*args: Any) -> Any:
            compiled_calls.append(1)
            return graph.forward(*args)

        return forward

    class Net(nn.Module):  # torch itself cannot compile a bare nn.Sequential in place
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x)
            return result

    for place in ("wrapper", "inner", "in place"):
        compiled_calls.clear()
        torch._dynamo.reset()
        model, (x, y) = Net(), data()
        called: Any = model
        if place == "in place":
            model.compile(backend=backend, fullgraph=True)
        else:
            called = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(called if place == "wrapper" else model, factor_update_steps=3).attach(optimizer)
        per_step = []
        for _ in range(7):
            optimizer.zero_grad()
            before = len(compiled_calls)
            functional.cross_entropy(called(x), y).backward()
            optimizer.step()
            per_step.append(len(compiled_calls) - before)
        assert per_step == [0, 1, 1, 0, 1, 1, 0], place
        if place == "wrapper":  # the next step is armed, but evaluation and other models stay compiled
            train(model, optimizer, 2)
            other = torch.compile(Net(), backend=backend)
            assert hooks(model) == 1
            before = len(compiled_calls)
            with torch.no_grad():
                called(x)
            other(x)
            assert len(compiled_calls) == before + 2
            continue
        eager = mlp()
        plain = torch.optim.SGD(eager.parameters(), lr=0.1)
        KFAC(eager, factor_update_steps=3).attach(plain)
        train(eager, plain, 7)
        torch.testing.assert_close(weights(model), weights(eager), **TIGHT)
        kfac.detach()


# Bad days


def test_a_nan_batch_changes_neither_averages_nor_weights() -> None:
    model, (x, y) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, factor_update_steps=1, inv_update_steps=1).attach(optimizer)
    train(model, optimizer, 2)
    before, blocks = weights(model), [block.to_dense() for block in kfac.blocks]
    optimizer.zero_grad()
    loss_of(model, torch.full_like(x, math.nan), y).backward()
    with pytest.warns(NatgradWarning, match="4 factor statistics were refused"):
        optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    for block, old in zip(kfac.blocks, blocks, strict=True):
        torch.testing.assert_close(block.to_dense(), old, rtol=0, atol=0)
    metrics = kfac.metrics()
    assert metrics["skipped_steps"] == 1
    assert metrics["rejected_statistics"] == 4
    train(model, optimizer, 2)
    assert torch.isfinite(weights(model)).all()
    assert kfac.metrics()["clip_factor"] is not None


def test_a_nan_batch_at_the_very_first_step_costs_only_that_step() -> None:
    model, (x, y) = mlp(), data()
    model.append(nn.LayerNorm(3, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model).attach(optimizer)
    before = weights(model)
    loss_of(model, torch.full_like(x, math.inf), y).backward()
    with pytest.warns(NatgradWarning):
        optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    train(model, optimizer, 1)
    assert kfac.metrics()["decomposition_age"] == 0
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_failed_decompositions_keep_the_last_good_ones(monkeypatch: pytest.MonkeyPatch, solver: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, factor_update_steps=1, inv_update_steps=1, solver=solver).attach(optimizer)
    train(model, optimizer, 2)

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    solved = {k: [p.clone() for p in (side.matrix for side in m.sides)] for k, m in kfac._preconditioner.solved.items()}
    monkeypatch.setattr(torch.linalg, "eigh" if solver == "eigen" else "cholesky_ex", fail)
    with pytest.warns(NatgradWarning, match="decompositions failed"):
        train(model, optimizer, 1)
    for key, member in kfac._preconditioner.solved.items():
        assert all(torch.equal(a, b) for a, b in zip(solved[key], (side.matrix for side in member.sides), strict=True))
    assert kfac.metrics()["failed_decompositions"] == 4
    train(model, optimizer, 1)  # warned once
    monkeypatch.undo()
    train(model, optimizer, 1)
    assert torch.isfinite(weights(model)).all()


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_failure_at_the_first_decomposition_falls_back_to_the_diagonal(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, solver=solver).attach(optimizer)

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh" if solver == "eigen" else "cholesky_ex", fail)
    with pytest.warns(NatgradWarning, match="decompositions failed"):
        train(model, optimizer, 3)
    assert torch.isfinite(weights(model)).all()
    assert kfac.steps == 3


def test_an_empty_batch_is_skipped_with_a_warning() -> None:
    model, (x, _) = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model).attach(optimizer)
    with pytest.warns(NatgradWarning, match="empty batch"):
        model(x[:0]).sum().backward()
    optimizer.step()
    train(model, optimizer, 1)
    assert kfac.steps == 1
    assert counted_rows(kfac) == 8


def test_all_zero_and_one_by_one_factors() -> None:
    for solver, rule in (("eigen", "joint"), ("eigen", "pi"), ("inverse", "pi"), ("inverse", "plain")):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
        with torch.no_grad():
            model[0].weight.fill_(-1.0)  # a dead unit: the second layer's input and the first's derivative are zero
        kfac = KFAC(model, solver=solver, damping_rule=rule, kl_clip=None)
        run(model, torch.ones(4, 1).double(), lambda out: (out + 1).square().sum() / 4)
        kfac.step()
        assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


def test_metrics_are_plain_numbers() -> None:
    model = mlp()
    kfac = KFAC(model, lr=0.1)
    assert kfac.metrics()["predicted_kl"] is None
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, kfac)
    metrics = kfac.metrics()
    assert all(isinstance(value, int | float) for value in metrics.values())
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block.to_dense()) for block in kfac.blocks])
    assert metrics["eigenvalue_max"] == pytest.approx(float(eigenvalues.max()))
    assert metrics["eigenvalue_min"] == pytest.approx(max(0.0, float(eigenvalues.min())), abs=1e-12)


def test_report_prints_a_table_before_and_after_the_first_pass() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    assert "not known yet: run one training step" in str(kfac.report())
    loss_of(model, *data()).backward()
    kfac.step()
    text = str(kfac.report())
    assert all(name in text for name, _ in model.named_parameters())
    assert "A 5² · G 5²" in text
    assert kfac.report().bytes > 0


def test_scale_does_not_depend_on_the_batch_and_convolutions_really_turn() -> None:
    """At the defaults a convolution's preconditioned gradient is far from parallel to the raw one, at batch 32 and
    512 alike.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    cosines, sizes = [], []
    images = torch.randn(512, 3, 8, 8)
    labels = torch.randint(0, 10, (512,))
    for batch in (32, 512):
        kfac = KFAC(model, kl_clip=None)
        run(model, images[:batch], lambda out, b=batch: functional.cross_entropy(out, labels[:b]))
        before = model[2].weight.grad.clone()
        kfac.step()
        after = model[2].weight.grad
        cosines.append(float(functional.cosine_similarity(before.flatten(), after.flatten(), dim=0)))
        estimate = next(b for b in kfac.blocks if b.names[0] == "2.weight").estimate()
        trace = estimate.scale[0] * estimate.row[0].trace() * estimate.column[0].trace()
        sizes.append(float(trace))
        kfac.detach()
    assert all(cosine < 0.9 for cosine in cosines)
    assert abs(cosines[0] - cosines[1]) < 0.2
    assert 0.7 < sizes[0] / sizes[1] < 1.4


def test_package_exports() -> None:
    assert natgrad.KFAC is KFAC
    assert natgrad.__version__


def test_what_was_asked_for_is_printed() -> None:
    model = nn.Linear(2, 2)
    assert "overlap" not in repr(KFAC(model, lr=0.1))
    assert "overlap='background', delay=2, stats_fraction=0.5" in repr(
        KFAC(model, lr=0.1, overlap="background", delay=2, stats_fraction=0.5)
    )

"""What real loops do between two steps: probes, dropped batches, several networks, optimizers and calls.

Each of these was once wrong.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hand
from helpers import block_of, exact_fisher, gradients, one_step, run
from natgrad import KFAC, NatgradWarning
from natgrad.link import creates_state
from natgrad.passes import Pass

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int = 1, cases: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(cases, 4, generator=generator).double(), torch.arange(cases) % 3


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def expected_blocks() -> list[Tensor]:
    """What one plain batch gives."""
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    loss_of(model, *batch()).backward()
    kfac.step()
    return [block.to_dense() for block in kfac.blocks]


def check(kfac: KFAC) -> None:
    for block, expected in zip(kfac.blocks, expected_blocks(), strict=True):
        torch.testing.assert_close(block.to_dense(), expected, **TIGHT)


# Learning rates and optimizers


def test_the_clip_follows_the_learning_rate_after_the_optimizer_loaded_a_state() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kfac = KFAC(model, kl_clip=1e-6).attach(optimizer)
    factors = []
    for lr in (1.0, 100.0):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = lr
        state = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        optimizer.step()
        model.load_state_dict(state)
        factors.append(kfac.metrics()["clip_factor"])
    assert factors[0] / factors[1] == pytest.approx(100.0)


def test_restoring_an_optimizer_state_is_no_step() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, factor_update_steps=10).attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        optimizer.step()
    stored = get_optimizer_state_dict(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac.detach()
    kfac.attach(other)
    optimizer.zero_grad()
    set_optimizer_state_dict(model, other, stored)
    assert kfac.steps == 3


def test_a_learning_rate_on_a_device_is_not_waited_for() -> None:
    """Telling a state-creating step apart must not cost a host sync; a meta tensor cannot be read at all."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0, device="meta")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not creates_state(optimizer)


def test_an_attached_kfac_leaves_other_optimizers_gradients_alone() -> None:
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    KFAC(model).attach(first)
    loss_of(model, *batch()).backward()
    before = gradients(model)
    first.step()
    assert torch.equal(before["2.weight"], model[2].weight.grad)
    assert not torch.equal(before["0.weight"], model[0].weight.grad)
    second.step()


# Which backward counts


def test_a_dropped_batch_takes_its_statistics_with_it() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    (1000 * loss_of(model, *batch(seed=7))).backward()
    model.zero_grad()
    loss_of(model, *batch()).backward()
    kfac.step()
    check(kfac)


def test_a_dropped_nan_batch_leaves_nothing_behind() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    loss_of(model, torch.full((8, 4), math.nan).double(), batch()[1]).backward()
    model.zero_grad()
    loss_of(model, *batch()).backward()
    kfac.step()
    check(kfac)
    assert kfac.metrics()["rejected_statistics"] == 0


def test_an_exception_in_backward_does_not_count_half_a_batch() -> None:
    model, (x, y) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None)

    def fail(_: Tensor) -> None:
        raise MemoryError("out of memory")

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hidden = model[1].register_forward_hook(watch)
    with pytest.raises(MemoryError):
        loss_of(model, x, y).backward()
    hidden.remove()
    model.zero_grad()
    loss_of(model, x, y).backward()
    kfac.step()
    check(kfac)


def test_a_probe_of_the_inputs_is_not_the_batch() -> None:
    model, (x, y) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None)
    x.requires_grad_()
    output = model(x)
    torch.autograd.grad(1000 * output[:, 0].sum(), x, retain_graph=True)
    functional.cross_entropy(output, y).backward()
    kfac.step()
    check(kfac)


def test_gradients_by_autograd_grad_count() -> None:
    model, (x, y) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None)
    grads = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    kfac.step()
    check(kfac)


def test_another_networks_loss_through_this_one_does_not_count() -> None:
    """A GAN: the generator's backward runs through the discriminator, whose gradients are then cleared."""
    model = mlp()
    generator = nn.Linear(4, 4).double()
    kfac = KFAC(model, kl_clip=None)
    (100 * loss_of(model, generator(batch(seed=3)[0]), batch()[1])).backward()
    model.zero_grad()
    loss_of(model, *batch()).backward()
    kfac.step()
    check(kfac)


def test_two_passes_in_one_backward_both_count() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    (loss_of(model, *batch()) + loss_of(model, *batch(seed=2))).backward()
    kfac.step()
    assert float(kfac.blocks[0].straight.row.weight) == 16


# Several calls of the model


def test_a_model_called_on_its_own_output_has_one_loss() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3, bias=False).double(), torch.randn(8, 3).double()
    kfac = KFAC(model, kl_clip=None)
    hidden = x
    for _ in range(5):
        hidden = model(hidden)
    (hidden.square().sum() / 8).backward()
    kfac.step()
    assert float(kfac.blocks[0].estimate().scale[0]) == 5.0


def test_captures_add_up_and_bring_their_own_terms() -> None:
    model, (x, _) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None, loss_terms=100)
    first, second = (model(part).square().sum() / 8 for part in (x, 2 * x))
    kfac.capture(first, terms=8)
    kfac.capture(second, terms=8)
    (first + second).backward()
    kfac.step()
    assert kfac.blocks[0].straight.counts.tolist() == [16.0, 16.0]


def test_capture_with_outputs_still_walks_the_whole_loss() -> None:
    model, (x, _) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None)
    left, right = model(x), model(2 * x)
    loss = (left - right).square().sum() / 8
    kfac.capture(loss, outputs=left)
    loss.backward()
    kfac.step()
    assert kfac.blocks[0].straight.counts.tolist() == [16.0, 8.0]


def test_a_penalty_in_the_captured_loss_is_no_use_of_the_weights() -> None:
    model, (x, y) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None)
    penalty = sum((p.square().sum() + p.abs().sum() + p.norm() + (p * p).sum()) for p in model.parameters())
    loss = loss_of(model, x, y) + 0.0 * penalty
    kfac.capture(loss, terms=8)
    loss.backward()
    kfac.step()
    check(kfac)


# Graphs that are not what they seem


def test_a_product_of_two_parameters_is_no_layer() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Parameter(torch.randn(3, 2).double()), nn.Parameter(torch.randn(2, 4).double())
            self.square, self.head = nn.Parameter(torch.randn(3, 3).double()), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(functional.linear(x, self.u @ self.v) @ (self.square @ self.square))
            return result

    model = LowRank()
    kfac = one_step(model, batch()[0], lambda out: out.square().mean(), fallback="optimizer")
    report = kfac.report()
    assert [report[name].reason for name in ("u", "v", "square")] == ["multiplied with another parameter"] * 3
    assert report["head.weight"].covered


def test_position_embeddings_have_the_exact_fisher_of_a_sum_over_cases() -> None:
    """Their derivative is summed over the batch; random signs keep the cases apart, in the mean."""
    ratios = []
    for seed in range(40):
        torch.manual_seed(seed)

        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.place = nn.Embedding(1, 3).double()

            def forward(self, x: Tensor) -> Tensor:
                return x + self.place(torch.zeros(1, dtype=torch.long))

        model, x = Positions(), torch.randn(16, 3).double()
        kfac = one_step(model, x, lambda out: out.sum(), fisher="exact", predictive="gaussian")
        truth = exact_fisher(model(x), [model.place.weight], "gaussian", 16)
        ratios.append(float(kfac.blocks[0].to_dense().trace() / truth.trace()))
    assert 0.7 < sum(ratios) / len(ratios) < 1.3


def test_a_vector_along_the_columns_of_a_left_product_is_no_bias() -> None:
    class Left(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(rows, 4).double()), nn.Parameter(torch.randn(5).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.w @ x + self.b

    for rows in (3, 5, 6):
        model = Left(rows)
        kfac = one_step(model, torch.randn(4, 5).double(), lambda out: out.square().mean())
        assert [block.names for block in kfac.blocks] == [("w",), ("b",)]


def test_a_users_own_function_is_not_taken_for_a_built_in_of_the_same_name() -> None:
    class Clone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 0.5

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.plain = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.plain(functional.linear(x, Clone.apply(self.odd.weight)))
            return result

    model = Net().double()
    kfac = one_step(model, batch()[0], lambda out: out.square().mean(), fallback="optimizer")
    assert "CloneBackward" in kfac.report()["odd.weight"].reason
    assert kfac.report()["plain.weight"].covered


def test_baddbmm_is_a_stack_of_products() -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 4, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.baddbmm(torch.zeros(2, 1, 3).double(), x, self.w)

    model, x = Batched(), torch.randn(2, 5, 4).double()
    kfac = one_step(model, x, lambda out: out.square().sum() / 10)
    for head in range(2):
        torch.testing.assert_close(kfac.blocks[0].estimate().column[head], x[head].mT @ x[head] / 5, **TIGHT)


def test_a_weight_used_with_and_without_its_bias_is_one_block() -> None:
    torch.manual_seed(0)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x) + functional.linear(x.cos(), self.layer.weight)
            return result

    model, (x, _) = Sometimes(), batch()
    kfac = KFAC(model, kl_clip=None)
    out = model(x)
    (out.square().sum() / 8).backward()
    kfac.step()
    zeros, ones = torch.zeros(8, 1).double(), torch.ones(8, 1).double()
    a = torch.cat([torch.cat([x, ones], 1), torch.cat([x.cos(), zeros], 1)])
    g = (2 * out.detach()).repeat(2, 1) / 8
    assert [block.names for block in kfac.blocks] == [("layer.weight", "layer.bias")]
    torch.testing.assert_close(kfac.blocks[0].to_dense(), hand.bias_last(hand.dense(a, g, 8), 3), **TIGHT)


def test_a_stray_forward_pass_changes_no_block() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bare = nn.Linear(4, 3).double(), False

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.layer.weight, None if self.bare else self.layer.bias)

    model, (x, y) = Optional(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    for _ in range(3):
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
    before = kfac.blocks[0].to_dense()
    model.bare = True
    model(x)  # no backward
    torch.testing.assert_close(kfac.blocks[0].to_dense(), before, rtol=0, atol=0)
    run(model, x, lambda out: functional.cross_entropy(out, y))  # the bias stays in the block
    kfac.step()
    assert [block.names for block in kfac.blocks] == [("layer.weight", "layer.bias")]
    assert float(kfac.blocks[0].straight.row.weight) > 16


def test_an_unused_layer_with_a_shared_factor_keeps_its_scale_and_its_error() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = nn.Linear(4, 3).double(), nn.Linear(4, 3).double(), True

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], 1) if self.both else self.a(x)

    model, (x, _) = Heads(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    for step in range(10):
        model.both = step == 0
        run(model, x, lambda out: out.square().sum() / 8)
        kfac.step()
    b = block_of(kfac, "b.weight")
    assert float(b.estimate().scale[0]) == 1.0
    model.zero_grad()
    (model(x).square().sum() + model.b(x).square().sum()).backward()
    with pytest.raises(RuntimeError, match=r"b\.weight: a gradient but no statistics"):
        kfac.step()


def test_a_parameter_that_is_no_longer_recognised_is_left_with_a_warning() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(4, 3).double()), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(x @ (self.w if len(x) == 1 else self.w.exp()))
            return result

    for fallback in ("optimizer", "batch", "per-case"):
        model = Changing()
        kfac = KFAC(model, kl_clip=None, factor_update_steps=1, fallback=fallback)
        for cases in (1, 4, 1, 4):
            model.zero_grad()
            loss = loss_of(model, *batch(cases=cases))
            if cases == 4 and kfac.steps == 1 and fallback == "optimizer":
                with pytest.warns(NatgradWarning, match="w is left to the optimizer from step 1 on"):
                    loss.backward()
            else:
                loss.backward()
            kfac.step()
        assert kfac.report()["w"].covered == (fallback != "optimizer")
        assert kfac.report()["head.weight"].covered


def test_an_empty_part_of_the_output_does_not_matter() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.net(x)
            return {"logits": out, "boxes": out[:0]}

    model, (x, y) = Detector(), batch()
    kfac = KFAC(model, kl_clip=None)
    functional.cross_entropy(model(x)["logits"], y).backward()
    kfac.step()
    check(kfac)


def test_an_expert_without_tokens_does_not_arm_every_step() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.idle = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.stem(x), self.idle(x[:0])])

    model, (x, y) = Experts(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=5)
    armed = []
    for _ in range(6):
        armed.append(bool(model._forward_hooks))
        run(model, x, lambda out: functional.cross_entropy(out, y))
        kfac.step()
    assert armed == [True, False, False, False, False, True]


def test_exchanged_modules_are_followed() -> None:
    model, (x, y) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1)
    run(model, x, lambda out: functional.cross_entropy(out, y))
    kfac.step()
    model[2] = nn.Linear(5, 3).double()
    run(model, x, lambda out: functional.cross_entropy(out, y))
    before = gradients(model)
    kfac.step()
    assert not torch.equal(before["2.weight"], model[2].weight.grad)
    block = block_of(kfac, "2.weight")
    assert float(block.straight.row.weight) == 8
    # Its own decomposition, not that of the module whose name it took over.
    solved = kfac._preconditioner.solved["2.weight"]
    torch.testing.assert_close(
        solved.sides[0].values, torch.linalg.eigvalsh(block.estimate().row).clamp(min=0), **TIGHT
    )


# Sampled and exact Fishers


@pytest.mark.parametrize("predictive", ["categorical", "bernoulli", "gaussian"])
def test_a_nan_batch_survives_sampling(predictive: str) -> None:
    model, (x, y) = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, fisher="sampled", predictive=predictive).attach(optimizer)
    loss_of(model, torch.full_like(x, math.nan), y).backward()
    with pytest.warns(NatgradWarning):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert kfac.metrics()["decomposition_age"] == 0


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_forward_passes_without_a_backward_leave_nothing_in_memory(fisher: str) -> None:
    model, (x, _) = mlp(), batch()
    kfac = KFAC(model, kl_clip=None, fisher=fisher)
    for _ in range(20):
        model(x)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Pass and thing._owner is kfac._window]
    output = model(x)
    graph = weakref.ref(output)
    del output
    assert graph() is None
    assert kfac.steps == 0


def test_classes_are_last_in_a_users_categorical_and_second_in_an_image() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, 1).double(), torch.randn(2, 2, 3, 2).double()
    results = []
    for predictive in (
        "categorical",
        lambda out: torch.distributions.Categorical(logits=out.permute(0, 2, 3, 1)),
    ):
        kfac = KFAC(layer, kl_clip=None, fisher="exact", predictive=predictive)
        layer.zero_grad()
        layer(x).square().sum().backward()
        kfac.step()
        results.append(kfac.blocks[0].to_dense())
        kfac.detach()
    torch.testing.assert_close(*results, **TIGHT)


def test_loss_terms_are_for_the_empirical_fisher_alone() -> None:
    results = []
    for terms in (None, 1):
        model = mlp()
        kfac = KFAC(model, kl_clip=None, fisher="exact", loss_terms=terms)
        loss_of(model, *batch()).backward()
        kfac.step()
        results.append(kfac.blocks[0].to_dense())
    torch.testing.assert_close(*results, **TIGHT)


# Life around the object


def test_a_kfac_is_not_copied() -> None:
    kfac = KFAC(mlp())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(kfac)


def test_a_detached_kfac_without_statistics_says_so() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None)
    kfac.detach()
    loss_of(model, *batch()).backward()
    with pytest.raises(RuntimeError, match="detached before it had statistics"):
        kfac.step()
    model.zero_grad()
    loss_of(model, *batch()).backward()
    kfac.step()
    check(kfac)


def test_a_pattern_that_excludes_nothing() -> None:
    with pytest.raises(ValueError, match=r"exclude='0.weigth' matches no parameter of this model .*'0\.weight'"):
        KFAC(mlp(), exclude="0.weigth")


def test_the_stance_of_others_is_respected() -> None:
    from torch._dynamo import eval_frame

    gc.collect()
    before = eval_frame._stance.stance
    kfac = KFAC(mlp())
    with torch.compiler.set_stance("eager_on_recompile"):
        kfac.detach()
        assert eval_frame._stance.stance == "eager_on_recompile"
    torch.compiler.set_stance(before)


def test_states_that_do_not_fit_are_refused_whole() -> None:
    model, (x, y) = mlp(), batch()
    source = KFAC(model, kl_clip=None, fisher="sampled", generator=torch.Generator().manual_seed(0))
    loss_of(model, x, y).backward()
    source.step()
    state = source.state_dict()
    without = KFAC(model, kl_clip=None)
    with pytest.raises(ValueError, match="generator="):
        without.load_state_dict(state)
    target = KFAC(model, kl_clip=None, generator=torch.Generator())
    with pytest.raises(ValueError, match="generator state does not fit"):
        target.load_state_dict(state | {"generator": torch.zeros(3, dtype=torch.uint8)})
    assert (without.steps, target.steps, target.blocks) == (0, 0, [])
    excluding = KFAC(model, kl_clip=None, generator=torch.Generator(), exclude="0.*")
    excluding.load_state_dict(state)
    assert [block.names[0] for block in excluding.blocks] == ["2.weight"]


def test_another_damping_rule_inverts_anew() -> None:
    model, (x, y) = mlp(), batch()
    source = KFAC(model, kl_clip=None, solver="inverse", damping_rule="pi")
    loss_of(model, x, y).backward()
    raw = gradients(model)
    source.step()
    results = []
    for load in (False, True):
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(raw[name])
        kfac = KFAC(model, kl_clip=None, solver="inverse", damping_rule="plain", inv_update_steps=100)
        if load:
            kfac.load_state_dict(source.state_dict())
        else:
            model.zero_grad()
            loss_of(model, x, y).backward()
        kfac.step()
        results.append(gradients(model)["0.weight"])
    torch.testing.assert_close(*results, **TIGHT)


# What a newcomer does


def test_weights_alone_in_the_optimizer_get_blocks_without_their_biases() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    kfac = KFAC(model, factor_update_steps=1).attach(optimizer)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()  # leaves the biases' gradients to pile up
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [block.names for block in kfac.blocks] == [("0.weight",), ("2.weight",)]
    assert kfac.report()["0.bias"].reason == "not in the attached optimizer"
    assert losses[-1] < losses[0]


def test_a_cell_run_twice_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = KFAC(model).attach(optimizer)
    second = KFAC(model)
    with pytest.raises(RuntimeError, match=r"another KFAC .* detach\(\) it first"):
        second.attach(optimizer)
    first.detach()
    second.attach(optimizer)


def test_one_optimizer_for_two_networks_takes_a_kfac_each() -> None:
    actor, critic = mlp(), mlp()
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    pair = [KFAC(net).attach(optimizer) for net in (actor, critic)]
    (loss_of(actor, *batch()) + loss_of(critic, *batch(seed=2))).backward()
    optimizer.step()
    assert [kfac.steps for kfac in pair] == [1, 1]


@pytest.mark.parametrize("interval", [1, 100])
def test_nan_is_told_at_once_on_a_cpu(interval: int) -> None:
    """With this step counted, whether it decomposes or not."""
    model, (x, y) = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    KFAC(model, factor_update_steps=interval, inv_update_steps=interval).attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, x * (math.nan if step == 2 else 1.0), y).backward()
        if step == 2:
            with pytest.warns(NatgradWarning, match="gradients of 1 steps were set to zero"):
                optimizer.step()
        else:
            optimizer.step()


def test_one_class_is_no_classification() -> None:
    model = nn.Linear(4, 1).double()
    kfac = KFAC(model, kl_clip=None, fisher="sampled")
    with pytest.raises(ValueError, match="did you mean predictive='gaussian'"):
        model(batch()[0])
    kfac.detach()


def test_messages_name_what_was_wrong() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got 0"):
        KFAC(model, generator=0)  # type: ignore[arg-type]
    kfac = KFAC(model, kl_clip=None, damping=lambda: 1e-3)  # type: ignore[misc, arg-type]
    loss_of(model, *batch()).backward()
    with pytest.raises(TypeError, match="damping must be a number or a callable of the step"):
        kfac.step()
    with pytest.raises(ValueError, match="not the whole checkpoint"):
        kfac.load_state_dict({"model": model.state_dict(), "kfac": kfac.state_dict()})


def test_report_tells_how_far_it_is() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model)
    assert "0 steps taken, not attached to an optimizer" in str(kfac.report())
    kfac.attach(optimizer)
    loss_of(model, *batch()).backward()
    optimizer.step()
    assert "4 of 4 parameters (100.0% of all weights) have a block" in str(kfac.report())
    assert "1 step taken" in str(kfac.report())


def test_a_pass_that_goes_on_from_one_without_gradients_still_counts() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3, bias=False).double(), torch.randn(8, 3).double()
    kfac = KFAC(model, kl_clip=None)
    first = model(x)
    second = model(x) + 0.0 * first.detach()  # looks apart, and is
    third = model(second)  # goes on from the second
    (third.square().sum() / 8).backward()
    kfac.step()
    assert float(kfac.blocks[0].estimate().scale[0]) == 2.0


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_an_output_changed_in_place_after_the_model_returned_it(fisher: str) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x).view(-1, 3)
            return result

    model, (x, y) = Viewing(), batch()
    kfac = KFAC(model, kl_clip=None, fisher=fisher)
    output = model(x)
    output.mul_(2.0)
    functional.cross_entropy(output, y).backward()
    kfac.step()
    assert float(kfac.blocks[0].straight.row.weight) == 8


def test_an_orientation_that_first_appears_in_a_nan_batch_waits_for_a_good_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.both = nn.Parameter(torch.randn(4, 3).double()), False

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.linear(x, self.w.t())
            return functional.linear(hidden, self.w) if self.both else hidden

    model, (x, _) = Tied(), batch()
    kfac = KFAC(model, kl_clip=None, factor_update_steps=1, inv_update_steps=1)
    run(model, x, lambda out: out.square().sum() / 8)
    kfac.step()
    before = kfac.blocks[0].to_dense()
    model.both = True
    run(model, x * math.nan, lambda out: out.square().sum() / 8)
    with pytest.warns(NatgradWarning, match="NaN or inf"):
        kfac.step()
    torch.testing.assert_close(kfac.blocks[0].to_dense() / before.trace(), before / before.trace(), **TIGHT)
    run(model, x, lambda out: out.square().sum() / 8)
    kfac.step()
    assert torch.isfinite(kfac.blocks[0].to_dense()).all()
    assert kfac.metrics()["failed_decompositions"] == 0


def test_sparse_gradients_without_statistics_get_the_same_message() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)

    model = Sparse()
    kfac = KFAC(model, kl_clip=None)
    model.table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="saw no forward pass"):
        kfac.step()


def test_metrics_of_the_inverse_solver() -> None:
    model = mlp()
    kfac = KFAC(model, kl_clip=None, solver="inverse")
    loss_of(model, *batch()).backward()
    kfac.step()
    largest = max(float(torch.linalg.eigvalsh(block.to_dense()).max()) for block in kfac.blocks)
    assert kfac.metrics()["eigenvalue_max"] == pytest.approx(largest)

"""One step on many kinds of model: finite, every parameter in the report, factors equal to a hand computation from
module hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hand
from helpers import gradients
from natgrad import KFAC, AdaptiveDamping, NatgradWarning, TrustRegion

BATCH = 4


class Sequence(nn.Module):
    """Embedding, a linear layer over (B, T, d), a pooled classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 5, padding_idx=0), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.mix(self.embed(tokens)).tanh().mean(1))
        return result


class Strided(nn.Module):
    """Linear layers on non-contiguous and four-dimensional inputs, given by keyword, and on single vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, *, x: Tensor) -> Tensor:
        hidden = self.first(input=x.transpose(1, 2))
        hidden = self.second(hidden.tanh().transpose(0, 1))
        result: Tensor = self.third(hidden[:, :, 0].mean(0))
        return result


class Unrolled(nn.Module):
    """A recurrent cell by hand: both matrices are used once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.state, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            hidden = torch.tanh(self.input(step) + self.state(hidden))
        result: Tensor = self.head(hidden)
        return result


class Attention(nn.Module):
    def __init__(self, *, memory: bool = False) -> None:
        super().__init__()
        self.attention, self.head, self.memory = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3), memory

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1) * 2 if self.memory else x
        mixed = self.attention(x, other, other.cos() if self.memory else x, need_weights=False)[0]
        result: Tensor = self.head(mixed.mean(1))
        return result


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.embed(tokens)).tanh())
        return result


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.region = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.region, self.stem(x), use_reentrant=False)
        hidden = checkpoint(self.region, hidden, use_reentrant=False)
        result: Tensor = self.head(hidden)
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


class Branches(nn.Module):
    """A layer that is unused, one that is frozen, and a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.used(self.frozen(x).tanh())}


def convnet(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(6, 4, 3, stride=2, groups=2),
        nn.ReLU(inplace=inplace),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def volumes() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(2, 3, 2, dilation=2), nn.Tanh(), nn.ConvTranspose3d(3, 2, 2, stride=2), nn.Flatten(), nn.LazyLinear(3)
    )


def signals() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, padding="same"),
        nn.Tanh(),
        nn.Conv1d(4, 3, 3, padding=2, padding_mode="circular", dilation=2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


@dataclass(frozen=True)
class Case:
    """`linear` inputs are floats, `tokens` integers; `left` names parameters that K-FAC leaves to the optimizer."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False
    per_token: bool = False
    left: tuple[str, ...] = ()
    blocks: int | None = None
    keyword: str = ""
    double: bool = True
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    memory_format: torch.memory_format = torch.contiguous_format
    autocast: bool = False


CASES: dict[str, Case] = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (BATCH, 4), blocks=2),
    "no bias": Case(lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3)), (BATCH, 4), blocks=2),
    "sequence with one label": Case(Sequence, (BATCH, 6), tokens=True, blocks=3),
    "token loss": Case(
        lambda: nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)), (BATCH, 6), tokens=True, per_token=True, blocks=2
    ),
    "non-contiguous and keyword inputs": Case(Strided, (BATCH, 5, 3, 5), keyword="x", blocks=3),
    "convnet": Case(convnet, (BATCH, 3, 6, 6), blocks=5),
    "in-place activations": Case(lambda: convnet(inplace=True), (BATCH, 3, 6, 6)),
    "channels last": Case(convnet, (BATCH, 3, 6, 6), memory_format=torch.channels_last, blocks=5),
    "3-d, dilated, transposed": Case(volumes, (BATCH, 2, 4, 4, 4), blocks=3),
    "1-d, same and circular padding": Case(signals, (BATCH, 2, 7), blocks=2),
    "unrolled recurrent cell": Case(Unrolled, (BATCH, 4, 3), blocks=3),
    "self-attention": Case(Attention, (BATCH, 5, 8), blocks=3),
    "cross-attention": Case(lambda: Attention(memory=True), (BATCH, 5, 8), blocks=5),
    "tied language model": Case(TiedLanguageModel, (BATCH, 5), tokens=True, per_token=True, blocks=2),
    "activation checkpointing": Case(Checkpointed, (BATCH, 4), blocks=4),
    "fused LSTM": Case(
        Recurrent,
        (BATCH, 5, 4),
        blocks=3,
        double=False,
    ),
    "frozen, unused, dict of outputs": Case(
        Branches, (BATCH, 4), left=("unused.weight", "unused.bias", "frozen.weight", "frozen.bias"), blocks=1
    ),
    "transformer encoder": Case(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Linear(8, 3)),
        (BATCH, 5, 8),
        per_token=True,
        blocks=9,
    ),
    "compiled": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        (BATCH, 4),
        wrap=lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),  # type: ignore[return-value]
        blocks=2,
    ),
    "autocast bf16": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (64, 4), double=False, autocast=True
    ),
}


def make(case: Case) -> tuple[nn.Module, Any, Callable[[Any], Tensor], int]:
    """Model, call, loss and N."""
    torch.manual_seed(0)
    model = case.build()
    x: Tensor = torch.randint(0, 7, case.shape) if case.tokens else torch.randn(case.shape)
    if case.double:
        model = model.double()
        x = x if case.tokens else x.double()
    if x.dim() == 4 and not case.keyword:
        model, x = model.to(memory_format=case.memory_format), x.to(memory_format=case.memory_format)
    with torch.no_grad():
        model(**{case.keyword: x}) if case.keyword else model(x)  # fills lazy layers
    model = case.wrap(model)
    terms = case.shape[0] * (case.shape[1] if case.per_token else 1)

    def call() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            return model(**{case.keyword: x}) if case.keyword else model(x)

    def loss(output: Any) -> Tensor:
        logits = output["logits"] if isinstance(output, dict) else output
        target = torch.arange(terms) % logits.shape[-1]
        return functional.cross_entropy(logits.reshape(terms, -1).double() if case.double else logits.float(), target)

    return model, call, loss, terms


@pytest.mark.parametrize("name", CASES)
def test_one_step(name: str) -> None:
    case = CASES[name]
    model, call, loss, terms = make(case)
    recorder = hand.Recorder(getattr(model, "_orig_mod", model))
    kfac = KFAC(model, kl_clip=None)
    loss(call()).backward()
    plain = gradients(model)
    kfac.step()
    recorder.close()

    after = gradients(model)
    assert all(torch.isfinite(grad).all() for grad in after.values())
    report = kfac.report()
    names = [key.removeprefix("_orig_mod.") for key, _ in model.named_parameters()]
    assert [line.parameter for line in report] == names
    assert tuple(line.parameter for line in report if not line.covered) == case.left
    assert all(line.reason for line in report if not line.covered)
    assert all(line.block and line.factors for line in report if line.covered)
    if case.blocks is not None:
        assert len(kfac.blocks) == case.blocks
    for key, grad in after.items():
        untouched = torch.equal(grad, plain[key])
        assert untouched == (key.removeprefix("_orig_mod.") in case.left)
    checked = compare_with_hand(kfac, getattr(model, "_orig_mod", model), recorder, terms, loose=case.autocast)
    assert checked > 0


def compare_with_hand(kfac: KFAC, model: nn.Module, recorder: hand.Recorder, terms: int, *, loose: bool = False) -> int:
    """Checks every block that belongs to one module alone; returns how many there were."""
    tolerance = {"rtol": 0.05, "atol": 0.02} if loose else {"rtol": 1e-9, "atol": 1e-9}
    if not loose and next(model.parameters()).dtype != torch.float64:
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
    modules = dict(model.named_modules())
    checked = 0
    for block in kfac.blocks:
        owner, _, field = block.names[0].rpartition(".")
        module = modules[owner]
        if (
            field != "weight"
            or len(block.straight.sides) != 2
            or block.swapped is not None
            or isinstance(module, nn.MultiheadAttention)
        ):
            continue
        if owner not in recorder.calls:
            continue  # MultiheadAttention's out_proj is used as a function
        a, g = rows_by_hand(module, recorder.rows(owner))
        estimate = block.estimate()
        for group in range(a.shape[0]):
            A, G, s = hand.kronecker(a[group].double(), g[group].double(), terms)
            column = estimate.column[group]
            torch.testing.assert_close((column if column.dim() == 2 else column.diag()).double(), A, **tolerance)
            torch.testing.assert_close(estimate.row[group].double(), G, **tolerance)
            torch.testing.assert_close(float(estimate.scale[group]), s)
        checked += 1
    return checked


def rows_by_hand(module: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All (activation, derivative) rows of a module: (groups, R, inputs), (groups, R, outputs)."""
    inputs, outputs = [], []
    for x, grad in calls:
        if isinstance(module, nn.Linear):
            a, g = x.reshape(1, -1, x.shape[-1]), grad.reshape(1, -1, grad.shape[-1])
        elif isinstance(module, nn.Embedding):
            a = functional.one_hot(x.flatten(), module.num_embeddings).to(grad.dtype)[None]
            g = grad.reshape(1, -1, grad.shape[-1])
            if module.padding_idx is not None:
                keep = x.flatten() != module.padding_idx
                a, g = a[:, keep], g[:, keep]
        else:
            a, g = hand.patches(module, x), hand.output_rows(module, grad)
        if getattr(module, "bias", None) is not None:
            a = torch.cat([a, torch.ones_like(a[:, :, :1])], dim=2)
        inputs.append(a)
        outputs.append(g)
    return torch.cat(inputs, dim=1), torch.cat(outputs, dim=1)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("inner", [False, True])
def test_ddp_on_one_rank_writes_into_its_buckets(one_rank: None, inner: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    recorder = hand.Recorder(module)
    kfac = KFAC(module if inner else model, kl_clip=None)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    functional.cross_entropy(model(x), y).backward()
    places = [p.grad.data_ptr() for p in module.parameters()]
    kfac.step()
    assert [p.grad.data_ptr() for p in module.parameters()] == places
    assert [block.names[0] for block in kfac.blocks] == ["0.weight", "2.weight"]
    assert compare_with_hand(kfac, module, recorder, 6) == 2


@pytest.mark.parametrize("inner", [False, True])
def test_adaptive_damping_and_an_exact_region_behind_ddp(one_rank: None, inner: bool) -> None:
    """Passes that nobody's backward follows do not disturb its reducer."""
    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        model = nn.parallel.DistributedDataParallel(module) if wraps else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        region = TrustRegion(1e-3, of="step", curvature="exact")
        kfac = KFAC(module if inner else model, damping=AdaptiveDamping(0.1, every=1), kl_clip=region)
        kfac.attach(optimizer)
        x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
        for _ in range(4):
            optimizer.zero_grad()
            kfac.objective = lambda net=model, a=x, b=y: functional.cross_entropy(net(a), b)
            kfac.objective().backward()
            optimizer.step()
        results.append((kfac.damping, *module.state_dict().values()))
    assert results[0][0] == results[1][0] != 0.1
    assert all(torch.equal(one, other) for one, other in zip(results[0][1:], results[1][1:], strict=True))


def test_functional_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    recorder = hand.Recorder(model)
    kfac = KFAC(model, kl_clip=None)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    functional.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
    kfac.step()
    assert compare_with_hand(kfac, model, recorder, 6) == 2


@pytest.mark.parametrize("divided", [True, False])
def test_gradient_accumulation_counts_all_micro_batches(divided: bool) -> None:
    """Four micro-batches have the factors of one large batch, whether the loss is divided (N said) or summed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    whole = KFAC(model, kl_clip=None)
    functional.cross_entropy(model(x), y).backward()
    whole.step()
    whole.detach()
    model.zero_grad()
    parts = KFAC(model, kl_clip=None, loss_terms=8 if divided else None)
    with nullcontext() if divided else pytest.warns(NatgradWarning, match="several backward passes feed one step"):
        for part, target in zip(x.split(2), y.split(2), strict=True):
            (functional.cross_entropy(model(part), target) / (4 if divided else 1)).backward()
    parts.step()
    for one, other in zip(whole.blocks, parts.blocks, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_checkpointed_regions_give_the_same_factors_as_plain_ones(fisher: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 4).double()
    plain = nn.Sequential(model.stem, model.region, model.region, model.head)
    results = []
    for called in (model, plain):
        model.zero_grad()
        kfac = KFAC(called, kl_clip=None, fisher=fisher, generator=torch.Generator().manual_seed(0))
        functional.cross_entropy(called(x), torch.arange(5) % 3).backward()
        kfac.step()
        results.append([block.to_dense() for block in kfac.blocks] + list(gradients(model).values()))
        kfac.detach()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

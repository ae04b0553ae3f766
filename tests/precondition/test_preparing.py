"""Which factors kernels prepare; without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad import launches
from natgrad.overlap.piles import side_by_side
from natgrad.precondition import preparing
from natgrad.precondition.preparing import Preparation
from natgrad.solve.solver import damped_sides


class Sum:
    """Of a factor on a GPU that is not there."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

    def __init__(self, size: int) -> None:
        self.numel = lambda: size * size
        self.is_contiguous = lambda: True
        self.data_ptr = lambda: 256


def block(*sizes: int) -> Any:
    sides = [SimpleNamespace(sum=Sum(size)) for size in sizes]
    return SimpleNamespace(straight=SimpleNamespace(sides=sides), swapped=None)


def test_factors_that_32_bits_cannot_count_are_prepared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "able", lambda device: True)
    layer = [block(1280, 5121), block(5120, 1281), block(3840, 1281), block(1280, 1281)]  # GPT-2 large has 36
    assert preparing.prepares(layer * 20)
    assert not preparing.prepares(layer * 36)


class Interpreter:
    """Does what the kernels would, with factors that it knows by their addresses."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._factors = {factor.data_ptr(): factor for factor in factors}

    def __call__(self, name: str, rows: Sequence[Sequence[int]], *_: Any, **options: Any) -> Callable[..., None]:
        def trace_kernel(pointers: Tensor, out: Tensor) -> None:
            for slot, size, dense, entry in rows:
                factor = self._factors[int(pointers[slot])]
                assert factor.shape[-1] == size
                assert factor.dim() == 2 + dense
                traces = factor.diagonal(dim1=-2, dim2=-1).sum(-1) if dense else factor.sum(-1)
                out[entry : entry + len(traces)] = traces

        def damp_kernel(pointers: Tensor, multiply: Tensor, add: Tensor, out: Tensor) -> None:
            for slot, start, count, size, dense, entry in rows:
                factor = self._factors[int(pointers[slot])]
                assert factor.numel() == count
                assert start % 4 == 0  # four elements are stored at once
                assert count % options["ALIGNED"] == 0
                more = add[entry : entry + len(factor), None]
                by = multiply[entry : entry + len(factor)].view(-1, *[1] * (1 + dense))
                damped = factor * by + (more[..., None] * torch.eye(size) if dense else more)
                out[start : start + count] = damped.flatten()

        return {"trace_kernel": trace_kernel, "damp_kernel": damp_kernel}[name]


@pytest.fixture
def blocks() -> list[Any]:
    """Equal factors far from each other, several in a stack, and diagonal ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(9, 6),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.Unflatten(1, (4, 5)), nn.Conv1d(4, 4, 1, groups=2)),
        *(nn.Flatten(), nn.Linear(20, 6), nn.LayerNorm(6), nn.Linear(6, 5)),
    )
    kfac = natgrad.KFAC(model, lr=0.1, factor_update_steps=1)
    x = torch.randint(9, (12, 5))

    def forward() -> Tensor:
        rows = model[3](model[2](model[1](model[0](x))))
        return model[6:](model[5](rows.mT).mT.flatten(1))

    for _ in range(2):
        loss = nn.functional.cross_entropy(forward(), torch.arange(12) % 5)
        kfac.capture(loss, terms=12)
        loss.backward()
        kfac.step()
    return list(kfac.blocks)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_equal_factors_lie_beside_each_other(monkeypatch, blocks, solver):
    sums = [side.sum for block in blocks for side in block.straight.sides]
    assert {sum.dim() for sum in sums} == {2, 3}
    assert any(sum.shape[0] > 1 for sum in sums)
    monkeypatch.setattr(preparing, "Launch", Interpreter(sums))
    monkeypatch.setattr(preparing, "kernel", lambda package, name: name)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    rule = "joint" if solver == "eigen" else "pi"
    keys = [tuple((block.key, number) for number in range(len(block.straight.sides))) for block in blocks]
    prepared = Preparation(blocks, keys, solver, rule).run(1e-2)
    for block, own, scale in zip(blocks, keys, prepared.scales, strict=True):
        estimate = block.estimate()
        sides, expected = estimate.sides, estimate.scale
        if solver == "inverse":
            sides, expected = damped_sides(estimate, rule, 1e-2)
        torch.testing.assert_close(scale, expected)
        for key, side in zip(own, sides, strict=True):
            torch.testing.assert_close(prepared.factors[key], side)
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for factor in prepared.factors.values():
        if factor.dim() == 3:
            by_shape.setdefault(factor.shape, []).append(factor)
    several = [equal for equal in by_shape.values() if len(equal) > 1]
    assert several
    for equal in several:
        assert side_by_side(equal) is not None

"""Chunked batch norm is batch norm of each chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from natgrad.models import ChunkedBatchNorm2d

FEATURES = 3


def pair(chunk: int, **options: Any) -> tuple[ChunkedBatchNorm2d, nn.BatchNorm2d]:
    """A chunked and a plain batch norm in the same random state."""
    plain = nn.BatchNorm2d(FEATURES, **options).double()
    for tensor in [*plain.parameters(), *plain.buffers()]:
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
    chunked = ChunkedBatchNorm2d(FEATURES, chunk, **options).double()
    chunked.load_state_dict(plain.state_dict())
    return chunked, plain


def cases(count: int, *, seed: int = 0, side: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, count + 1, dtype=torch.float64).view(-1, 1, 1, 1)  # so that chunks differ
    return scale * torch.randn(count, FEATURES, side, side, generator=generator, dtype=torch.float64) + scale


def by_chunks(plain: nn.BatchNorm2d, x: Tensor, chunk: int) -> Tensor:
    """A loop of batch norms, each from the same state; then the mean of their running statistics, a case a weight."""
    outputs = []
    mean, variance = torch.zeros(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    for part in x.split(chunk):
        norm = copy.deepcopy(plain)
        norm.weight, norm.bias = plain.weight, plain.bias
        outputs.append(norm(part))
        if norm.running_mean is not None and norm.running_var is not None:
            mean += norm.running_mean * len(part) / len(x)
            variance += norm.running_var * len(part) / len(x)
    if plain.running_mean is not None and plain.running_var is not None and plain.num_batches_tracked is not None:
        plain.running_mean.copy_(mean)
        plain.running_var.copy_(variance)
        plain.num_batches_tracked.add_(1)
    return torch.cat(outputs)


def assert_same_pass(chunked: nn.Module, plain: nn.Module, x: Tensor, expected_of: Tensor, expected: Tensor) -> None:
    out = chunked(x)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    names = [name for name, _ in plain.named_parameters()]
    actual = torch.autograd.grad((out * weights).sum(), [x, *chunked.parameters()])
    wanted = torch.autograd.grad((expected * weights).sum(), [expected_of, *plain.parameters()])
    for name, one, other in zip(["input", *names], actual, wanted, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(chunked.state_dict(), plain.state_dict())


@pytest.mark.parametrize("batch", [8, 10, 4, 3, 9])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_a_loop_of_batch_norms(batch: int, options: dict[str, Any]) -> None:
    chunked, plain = pair(4, **options)
    for seed in range(3):  # running statistics go on from pass to pass
        x, same = cases(batch, seed=seed).requires_grad_(), cases(batch, seed=seed).requires_grad_()
        assert_same_pass(chunked, plain, x, same, by_chunks(plain, same, 4))


@pytest.mark.parametrize("chunk", [6, 7, 100])
def test_one_chunk_is_batch_norm(chunk: int) -> None:
    chunked, plain = pair(chunk)
    x, same = cases(6).requires_grad_(), cases(6).requires_grad_()
    assert_same_pass(chunked, plain, x, same, plain(same))


def test_evaluation_is_batch_norms() -> None:
    chunked, plain = pair(4)
    x = cases(10)
    assert torch.equal(chunked.eval()(x), plain.eval()(x))
    torch.testing.assert_close(chunked.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_gradients_are_derivatives() -> None:
    chunked, _ = pair(2)
    assert torch.autograd.gradcheck(chunked, cases(5, side=2).requires_grad_())


def test_gain_and_bias_are_used_once_a_pass() -> None:
    chunked, _ = pair(2)
    out = chunked(cases(7))
    uses, seen, left = [], set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions]
        uses += [child.variable for child in children if hasattr(child, "variable")]
        left += children
    assert len(uses) == 2
    assert {id(use) for use in uses} == {id(chunked.weight), id(chunked.bias)}


def test_channels_last_and_low_precision_keep_their_type() -> None:
    chunked = ChunkedBatchNorm2d(FEATURES, 4)
    x = cases(10).float()
    expected = chunked(x)
    torch.testing.assert_close(chunked(x.contiguous(memory_format=torch.channels_last)), expected)
    low = chunked(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.02, atol=0.02)


def test_errors() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 case, got 0"):
        ChunkedBatchNorm2d(FEATURES, 0)
    with pytest.raises(ValueError, match="expected 4D input"):
        ChunkedBatchNorm2d(FEATURES)(torch.randn(4, FEATURES))
    with pytest.raises(
        ValueError, match="last chunk of a batch of 5 has one value per channel"
    ):  # a last chunk without a variance
        ChunkedBatchNorm2d(FEATURES, 4)(torch.randn(5, FEATURES, 1, 1))


def test_the_chunk_shows() -> None:
    assert "chunk=16" in repr(ChunkedBatchNorm2d(FEATURES, chunk=16))

"""The empirical Fisher of a part of the batch: factors of that part, with the scale of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import KFAC


class Mixed(nn.Module):
    """A convolution, a batch norm, and a linear layer on places."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.convolution(x)).relu()
        return self.head(hidden.flatten(2).mT).mean(1)


def taken(fraction: float, cases: int = 8) -> tuple[KFAC, Mixed, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Mixed().double()
    x, y = torch.randn(cases, 2, 4, 4, dtype=torch.float64), torch.arange(cases) % 4
    seen: dict[str, Tensor] = {}
    model.convolution.register_full_backward_hook(lambda _, __, outputs: seen.update(convolution=outputs[0]))
    model.norm.register_full_backward_hook(lambda _, __, outputs: seen.update(norm=outputs[0]))
    model.head.register_full_backward_hook(lambda _, __, outputs: seen.update(head=outputs[0]))
    model.head.register_forward_hook(lambda _, inputs, __: seen.update(rows=inputs[0].detach()))
    kfac = KFAC(model, lr=0.1, stats_fraction=fraction)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    return kfac, model, x, seen


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 4), (0.3, 3), (0.01, 1)])
def test_factors_are_those_of_the_first_cases(fraction: float, count: int) -> None:
    kfac, _, x, seen = taken(fraction)
    blocks = {block.key: block for block in kfac.blocks}
    patches = functional.unfold(x[:count], 3, padding=1).permute(0, 2, 1).reshape(-1, 18)
    ones = torch.ones(len(patches), 1, dtype=torch.float64)
    rows = torch.cat([patches, ones], 1)
    convolution = blocks["convolution.weight"]
    torch.testing.assert_close(convolution.straight.column.mean()[0], rows.T @ rows / len(rows))
    g = 8 * seen["convolution"][:count].permute(0, 2, 3, 1).reshape(-1, 3)
    torch.testing.assert_close(convolution.straight.row.mean()[0], g.T @ g / len(g))
    gradients = 8 * seen["norm"][:count].sum((2, 3))
    torch.testing.assert_close(blocks["norm.bias"].straight.row.mean()[0], gradients.T @ gradients / count)


def test_rows_are_taken_at_equal_distances() -> None:
    kfac, _, _, seen = taken(0.25)
    head = next(block for block in kfac.blocks if block.key == "head.weight")
    rows = seen["rows"].reshape(-1, 3)[::4]
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(head.straight.column.mean()[0], rows.T @ rows / len(rows))
    g = 8 * seen["head"].reshape(-1, 4)[::4]
    torch.testing.assert_close(head.straight.row.mean()[0], g.T @ g / len(g))


def test_the_scale_is_that_of_the_whole_batch() -> None:
    part, whole = taken(0.25)[0], taken(1.0)[0]
    for one, other in zip(part.blocks, whole.blocks, strict=True):
        torch.testing.assert_close(one.straight.counts, other.straight.counts)


def test_equal_cases_have_the_factors_of_one() -> None:
    results = []
    for fraction in (0.25, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
        x = torch.randn(1, 1, 4, 4, dtype=torch.float64).expand(8, -1, -1, -1).contiguous()
        kfac = KFAC(model, lr=0.1, stats_fraction=fraction)
        functional.cross_entropy(model(x), torch.ones(8, dtype=torch.long)).backward()
        kfac.step()
        results.append([block.to_dense() for block in kfac.blocks])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Twice(nn.Module):
    """One weight from the right, of which a part of the rows is taken, and from the left, where all are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + (self.weight @ (3 * x).T.tanh()).T


def test_uses_count_alike_whatever_part_is_taken_of_them() -> None:
    results = []
    for fraction in (0.25, 1.0):
        torch.manual_seed(0)
        model = Twice()
        x = torch.randn(1, 3, dtype=torch.float64).expand(8, -1).contiguous()
        kfac = KFAC(model, lr=0.1, stats_fraction=fraction)
        functional.cross_entropy(model(x), torch.ones(8, dtype=torch.long)).backward()
        kfac.step()
        results.append([block.to_dense() for block in kfac.blocks])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)

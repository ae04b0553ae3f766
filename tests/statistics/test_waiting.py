"""Statistics of layers that are taken together are those of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from natgrad import KFAC, passes
from natgrad.models import cifar_resnet
from natgrad.statistics import waiting

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def factors(*, channels_last: bool, half: bool, fraction: float) -> list[Tensor]:
    torch.manual_seed(0)
    model = cifar_resnet(depth=20).cuda()
    x, y = torch.randn(16, 3, 32, 32).cuda(), torch.arange(16).cuda() % 10
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    kfac = KFAC(model, lr=0.1, stats_fraction=fraction)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss = functional.cross_entropy(model(x), y)
    loss.backward()
    kfac.step()
    return [factor.mean() for block in kfac.blocks for factor in block.factors()]


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("held", [0, 2**22, 2**28])
def test_together_or_each_alone(
    held: int, channels_last: bool, half: bool, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        monkeypatch.setattr(passes, "late", lambda *given, **options: None)
        alone = factors(channels_last=channels_last, half=half, fraction=fraction)
        monkeypatch.undo()
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        monkeypatch.setattr(waiting, "_MOST", held)
        monkeypatch.setattr(waiting, "_FIRST", held // 4)
        monkeypatch.setattr(waiting, "_WORTH", 1)
        together = factors(channels_last=channels_last, half=half, fraction=fraction)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert (one - other).norm() <= 1e-3 * one.norm()

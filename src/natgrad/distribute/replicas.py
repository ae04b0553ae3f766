"""Which ranks train one model, and the sum of their statistics."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.errors import NatgradWarning


def replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of ranks that a DDP model is replicated on; None where it is one process."""
    if not dist.is_available():
        return None
    wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    groups = [wrapper.process_group for wrapper in wrappers if wrapper.process_group.size() > 1]
    if groups:
        return groups[0]
    if dist.is_initialized() and not wrappers and (ranks := dist.get_world_size()) > 1:
        warnings.warn(
            f"this model is not wrapped in DistributedDataParallel, so its {ranks} ranks take statistics apart: if "
            "they train one model, give KFAC the wrapped one",
            NatgradWarning,
            stacklevel=4,
        )
    return None


def sum_over_ranks(
    moments: Sequence[Tensor], counts: Sequence[float | Tensor], *, labels: Sequence[str], group: dist.ProcessGroup
) -> tuple[list[Tensor], list[float]]:
    """Sums of all ranks' second moments, and of the numbers of rows and terms that go with them.

    Both are linear, so that the running averages are those of one rank that saw all cases. One message a dtype.
    `labels` say what the sums are of: ranks that disagree are told, instead of adding up what does not belong together.
    """
    device = moments[0].device
    _refuse_disagreement(labels, [tuple(moment.shape) for moment in moments], device, group)
    summed: list[Tensor] = list(moments)
    for dtype in dict.fromkeys(moment.dtype for moment in moments):
        places = [place for place, moment in enumerate(moments) if moment.dtype == dtype]
        flat = torch.cat([moments[place].flatten() for place in places])
        dist.all_reduce(flat, group=group)
        parts = flat.split([moments[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            summed[place] = part.view(moments[place].shape)
    numbers = torch.tensor([0.0 if isinstance(count, Tensor) else count for count in counts], dtype=torch.float64)
    numbers = numbers.to(device)
    for place, count in enumerate(counts):
        if isinstance(count, Tensor):
            numbers[place] = count
    dist.all_reduce(numbers, group=group)
    return summed, numbers.tolist()


def _refuse_disagreement(
    labels: Sequence[str], shapes: Sequence[tuple[int, ...]], device: torch.device, group: dist.ProcessGroup
) -> None:
    digest = hashlib.blake2b(repr((list(labels), list(shapes))).encode(), digest_size=7).digest()
    mine = int.from_bytes(digest, "big")
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    high, low = extremes.tolist()
    if high != -low:
        raise RuntimeError(
            f"the ranks have statistics of different layers in this step; rank {dist.get_rank(group)} has those of "
            f"{', '.join(labels)}. Every rank must run the same model, on a batch of its own, in every step"
        )

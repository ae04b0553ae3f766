"""Loss and accuracy of many steps, added up on the device and read without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HELD = 2**19  # elements of outputs kept for later: a few launches for many small steps instead of a few for each
_LARGE, _EVERY = 2**18, 8  # of outputs larger than this, only those of every eighth step are looked at


class Tally:
    """Adds up loss, correct predictions (also among the best five) and predictions. `sampled`: the accuracy of large
    outputs is that of every eighth batch.
    """

    def __init__(self, device: torch.device, *, accuracy: bool, top5: bool = False, sampled: bool = False) -> None:
        self._sampled = sampled
        self._device = device
        self._accuracy, self._top5 = accuracy, top5
        self._reset()

    def _reset(self) -> None:
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._held = 0
        self._skipped = 0
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._device)  # loss, correct, in five, predictions

    @torch.no_grad()
    def add(self, loss: Tensor, output: Tensor, target: Tensor, *, weight: float = 1.0) -> None:
        """Takes in a batch; its loss counts `weight` times. Mostly it is only put aside."""
        self._losses.append(loss.detach())
        self._weights.append(weight)
        if self._accuracy and (not self._sampled or output.numel() <= _LARGE or self._skipped % _EVERY == 0):
            self._outputs.append((output.detach(), target))
            self._held += output.numel()
            if self._held > _HELD:
                self._count()
        self._skipped += 1

    def _count(self) -> None:
        if not self._outputs:
            return
        output = torch.cat([one.reshape(-1, one.shape[-1]) for one, _ in self._outputs])
        target = torch.cat([one.reshape(-1) for _, one in self._outputs])
        self._sums[1] += (output.argmax(1) == target).sum()
        if self._top5:
            self._sums[2] += (output.topk(5, 1).indices == target[:, None]).sum()
        self._sums[3] += target.numel()
        self._outputs, self._held = [], 0

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Loss, correct, correct in five, predictions, and the weights of the losses, on the device; begins anew."""
        self._count()
        if self._losses:
            losses = torch.stack(self._losses).double()
            weights = losses.new_tensor(self._weights) if len(set(self._weights)) > 1 else self._weights[0]
            self._sums[0] += (losses * weights).sum()
        total = torch.full_like(self._sums[:1], sum(self._weights))
        result = torch.cat([self._sums, total])
        self._reset()
        return result


class Reading:
    """Numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        self._values = numbers
        if numbers.device.type == "cuda":
            self._values = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._values.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        """Whether `values` would not wait."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """The numbers; waits for them if it must."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers

"""Batch norm with the statistics of small batches in large ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ChunkedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that takes its training statistics over chunks of `chunk` consecutive cases of a larger batch.

    Ba, Grosse & Martens 2017, figures 3 to 5, call the size of a chunk *rbz*. Where the batch is not a multiple of it,
    the last chunk is smaller. Running statistics move once a pass, towards the mean of the chunks' statistics weighted
    with their cases. Evaluation and the state dict are those of ``nn.BatchNorm2d``.
    """

    def __init__(
        self,
        features: int,
        chunk: int = 32,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 case, got {chunk}")
        super().__init__(features, eps, momentum, affine, track_running_stats)
        self.chunk = chunk

    def extra_repr(self) -> str:
        """The options of ``nn.BatchNorm2d`` and the size of a chunk."""
        options = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{options}, chunk={self.chunk}"

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each chunk on its own in training, everything with the running statistics in evaluation."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        whole = len(input) // self.chunk
        if whole == 0:
            parts = [(input, 1)]
        else:
            head, rest = input[: whole * self.chunk], input[whole * self.chunk :]
            parts = [(head, whole), (rest, 1)] if len(rest) else [(head, whole)]
            if len(rest) == 1 and rest[0, 0].numel() == 1:
                raise ValueError(
                    f"the last chunk of a batch of {len(input)} has one value per channel (chunks of {self.chunk}): "
                    "drop the last incomplete batch, or choose another chunk"
                )
        normalised, means, variances = zip(*(self._normalise(part, chunks) for part, chunks in parts), strict=True)
        if self.track_running_stats:
            self._follow(means, variances, cases=[len(part) for part, _ in parts])
        out = normalised[0] if len(parts) == 1 else torch.cat(normalised)
        if self.affine:
            # Once a pass and not once a chunk: every use of a parameter is a block of statistics for K-FAC.
            out = out * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        return out.to(input.dtype)

    def _normalise(self, x: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cases of so many chunks with zero mean and unit variance; the mean of the chunks' means and variances."""
        channels = x.shape[1]
        # (chunks · cases, C, H, W) -> (cases, chunks · C, H, W): each chunk's channels are channels of their own, so
        # that one call of the fused kernel does all chunks, with its precision and its memory.
        grouped = x if chunks == 1 else x.unflatten(0, (chunks, -1)).transpose(0, 1).flatten(1, 2)
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = (torch.zeros(chunks * channels, dtype=dtype, device=x.device) for _ in range(2))
        # With momentum 1 the kernel leaves the statistics themselves in the running ones, the variance unbiased.
        out = functional.batch_norm(grouped, mean, variance, training=True, momentum=1.0, eps=self.eps)
        if chunks > 1:
            out = out.unflatten(1, (chunks, channels)).transpose(0, 1).flatten(0, 1)
        return out, mean.view(chunks, channels).mean(0), variance.view(chunks, channels).mean(0)

    @torch.no_grad()
    def _follow(self, means: tuple[Tensor, ...], variances: tuple[Tensor, ...], *, cases: list[int]) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # As in nn.BatchNorm2d: without a momentum, the mean over all passes.
        rate = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        for running, values in ((self.running_mean, means), (self.running_var, variances)):
            mean = sum(value * count for value, count in zip(values, cases, strict=True)) / sum(cases)
            running.lerp_(torch.as_tensor(mean).to(running.dtype), rate)

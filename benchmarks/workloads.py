"""Networks with their data, devices, and a step of training: what the timing benchmarks have in common."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from natgrad.models import GPT, cifar_resnet, resnet50

SOLVERS = ("eigen", "inverse")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Pictures:
    """What a classifier of images learns from: random ones, with random labels."""

    size: int
    classes: int

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, 3, size, size)."""
        return torch.randn((count, 3, self.size, self.size), generator=generator)

    def target_shape(self, count: int) -> tuple[int, ...]:
        """One label an image."""
        return (count,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over images."""
        return functional.cross_entropy(outputs, targets)

    def __str__(self) -> str:
        return f"{self.size}x{self.size}"


@dataclass(frozen=True)
class Words:
    """What a language model learns from: random tokens, with random ones to follow each."""

    size: int
    classes: int

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, size) token numbers."""
        return torch.randint(self.classes, (count, self.size), generator=generator)

    def target_shape(self, count: int) -> tuple[int, ...]:
        """One token for each."""
        return (count, self.size)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over tokens."""
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def __str__(self) -> str:
        return f"of {self.size} tokens"


@dataclass(frozen=True, kw_only=True)
class Network:
    """How to build a network for so many classes, and its data: what it takes, what it is to answer, and its loss."""

    build: Callable[[int], nn.Module]
    data: Pictures | Words
    label: str


def tiny(classes: int) -> nn.Module:
    """For tests of benchmarks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, classes)
    )


def gpt(words: int) -> nn.Module:
    """GPT-2's small version, 12 layers of width 768 with a context of 1024."""
    return GPT(vocabulary=words)


def tiny_gpt(words: int) -> nn.Module:
    """For tests of benchmarks."""
    return GPT(vocabulary=words, context=8, layers=1, heads=2, width=8)


NETWORKS = {
    "tiny": Network(build=tiny, data=Pictures(8, 10), label="Tiny"),
    "tiny-gpt": Network(build=tiny_gpt, data=Words(8, 11), label="Tiny GPT"),
    "resnet20": Network(
        build=lambda n: cifar_resnet(depth=20, num_classes=n), data=Pictures(32, 10), label="ResNet-20"
    ),
    "resnet32": Network(
        build=lambda n: cifar_resnet(depth=32, num_classes=n), data=Pictures(32, 10), label="ResNet-32"
    ),
    "resnet50": Network(build=lambda n: resnet50(num_classes=n), data=Pictures(224, 1000), label="ResNet-50"),
    # A head of GPT-2's 50257 words is left out (--classes has it): beyond max_factor_size its factor is diagonal.
    "gpt": Network(build=gpt, data=Words(1024, 1024), label="GPT"),
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One workload. `size`: height and width of images, or tokens of a sequence; `classes`: labels, or words. None is
    what the model is made for.
    """

    model: str
    batch: int
    precision: str
    size: int | None = None
    classes: int | None = None

    @property
    def network(self) -> Network:
        """The model's."""
        return NETWORKS[self.model]

    @property
    def data(self) -> Pictures | Words:
        """What the model learns from, of the size that is meant."""
        own = self.network.data
        return replace(own, size=self.size or own.size, classes=self.classes or own.classes)

    def __str__(self) -> str:
        return f"{self.model} batch {self.batch} {self.data} {self.precision}"


# The machine


# What glibc calls them: when memory goes back to the system, and from how many bytes on it is asked for anew each time.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = 2**30


def keep_memory() -> None:
    """The process does not give freed memory back, as GPUs' allocators don't either (glibc; elsewhere nothing happens).

    By default whether it does depends on what happens to lie at the heap's end: the same SGD step of ResNet-20 met
    none, 16,000 or 28,000 page faults in different runs and took 133 to 162 ms, and K-FAC's own share drowned in that.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # TypeError: no such handle on Windows
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _MOST)
        allocator.mallopt(_M_TRIM_THRESHOLD, _MOST)


def kept_by_graphs(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that nobody else gets and that count as free: what a graph frees while it is captured stays its own. Of a
    snapshot of torch's allocator.
    """
    own = [segment for segment in segments if tuple(segment["segment_pool_id"]) != _EVERYBODYS]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


_EVERYBODYS = (0, 0)  # the pool that is no graph's


class Device:
    """A torch device, with a clock and a memory gauge. On the CPU there is no gauge, and memory is kept."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"
        if self.torch.type == "cpu":
            keep_memory()

    def __str__(self) -> str:
        if self.is_cuda:
            return str(torch.cuda.get_device_name(self.torch))
        return f"cpu ({torch.get_num_threads()} threads)"

    def now(self) -> float:
        """Seconds, once all work so far is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)
        return time.perf_counter()

    def allocated(self) -> int:
        """Bytes in use by tensors."""
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else 0

    def reset_peak(self) -> None:
        """Starts a new measurement of peak memory."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak(self) -> int | None:
        """Most bytes in use at a time since `reset_peak`, and what CUDA graphs keep for when they run."""
        if not self.is_cuda:
            return None
        return torch.cuda.max_memory_allocated(self.torch) + kept_by_graphs(torch.cuda.memory_snapshot())

    def set_precision(self, precision: str) -> None:
        """Process-wide. By the older switches: torch refuses to answer about them once the newer ones were used."""
        if precision == "tf32" and not self.is_cuda:
            raise ValueError("tf32 needs a GPU")
        fast = precision != "fp32" and self.is_cuda
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast
        torch.backends.cudnn.benchmark = True

    def settle(self) -> None:
        """Frees what nobody uses, and makes cuBLAS allocate its lasting workspaces (of this thread and of autograd's)
        now, so that they are counted for no method.
        """
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            layer = nn.Linear(64, 64, device=self.torch)
            layer(torch.ones(64, 64, device=self.torch)).sum().backward()


class Failing(Protocol):
    """What may go wrong."""

    error: str | None

    @property
    def name(self) -> str:
        """For messages."""


@dataclass
class Failure:
    """Of something that keeps no results."""

    name: str
    error: str | None = None


@contextmanager
def failing_into(result: Failing) -> Iterator[None]:
    """Whatever goes wrong is printed and kept as text, and the benchmark goes on."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        result.error = text.splitlines()[0]
        print(f"\n{result.name} failed:\n{traceback.format_exc()}", flush=True)


# Training


class Workload:
    """A configuration on a device, with its one batch of random data."""

    def __init__(self, configuration: Configuration, device: Device) -> None:
        self.configuration = configuration
        self.device = device
        self._data = configuration.data
        self._half = configuration.precision == "bf16"
        self._format = torch.channels_last if self._half else torch.contiguous_format
        generator = torch.Generator().manual_seed(0)
        inputs = self._data.inputs(configuration.batch, generator).to(device.torch)
        self._inputs = inputs.contiguous(memory_format=self._format) if inputs.ndim == 4 else inputs
        shape = self._data.target_shape(configuration.batch)
        self._targets = torch.randint(self._data.classes, shape, generator=generator).to(device.torch)

    @property
    def data_bytes(self) -> int:
        """What every method holds besides its model."""
        return self._inputs.nbytes + self._targets.nbytes

    def draw_targets(self) -> None:
        """New ones, for loops: a model that has learned its one batch by heart has no curvature left to decompose."""
        self._targets.random_(self._data.classes)

    def model(self) -> nn.Module:
        """A new model, always with the same initial weights."""
        torch.manual_seed(0)
        model = self.configuration.network.build(self._data.classes).to(self.device.torch)
        model.to(memory_format=self._format)  # type: ignore[call-overload]  # missing in the stubs
        return model

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """The training loss of the batch."""
        with torch.autocast(self.device.torch.type, dtype=torch.bfloat16, enabled=self._half):
            return self._data.loss(model(self._inputs), self._targets)


Mark = Callable[[str], None]


class Trainer:
    """A model, SGD, and K-FAC in front of it where options for it are given."""

    def __init__(self, work: Workload, *, kfac: Mapping[str, Any] | None = None, compiled: bool = False) -> None:
        self._work = work
        model = work.model()
        self._forward = cast(nn.Module, torch.compile(model)) if compiled else model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.kfac = None if kfac is None else natgrad.KFAC(self._forward, optimizer=self._optimizer, **kfac)

    def step(self, *, mark: Mark = lambda phase: None) -> None:
        """One step of training; `mark` is called at the end of each phase."""
        self._optimizer.zero_grad()
        loss = self._work.loss(self._forward)
        mark("forward")
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        mark("backward")
        if self.kfac is not None:
            self.kfac.step()
            mark("kfac.step")
        self._optimizer.step()
        mark("optimizer.step")

    def timed(self) -> float:
        """Seconds of one step, alone on the device."""
        start = self._work.device.now()
        self.step()
        return self._work.device.now() - start

    def mean(self, steps: int) -> float:
        """Seconds a step when nobody waits for the device in between."""
        start = self._work.device.now()
        for _ in range(steps):
            self.step()
        return (self._work.device.now() - start) / steps

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of one step."""
        now = self._work.device.now
        ends = [("", now())]
        self.step(mark=lambda phase: ends.append((phase, now())))
        return {ends[i][0]: ends[i][1] - ends[i - 1][1] for i in range(1, len(ends))}

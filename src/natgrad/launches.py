"""One launch for many pieces of work, of tensors that lie anywhere.

A GPU does the statistics of a small layer in less time than a host takes to launch them. Kernels here get a table of
pieces, each with its numbers, and programs find out for themselves whose part they do. The tables are made once; what
changes from step to step is where tensors are.
"""

from __future__ import annotations

import importlib
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import NatgradWarning

ALIGNED_BYTES = 16
"""Where tensors have to begin."""
COUNTABLE = 2**31 - 2**14
"""Elements that kernels, which count in 32 bits, can tell apart; the last program's part may end a little later."""
HOST = torch.device("cpu")
"""Where tables are made, whatever the user's default is."""


@cache
def able(device: torch.device) -> bool:
    """Whether kernels run on a device; they are tried once. Triton needs a C compiler, and `Launch` a Triton that
    launches what it has compiled as this one does.
    """
    # On other makers' GPUs nobody has tried.
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from natgrad import pieces
    except ImportError:  # no Triton: not on this system, or a torch without a GPU
        return False
    try:
        problem = None if _tried(pieces.trial_kernel, device) else "a trial gave wrong numbers"
    except Exception as error:  # whatever a compiler or a driver comes up with
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        warnings.warn(
            f"natgrad: Triton's kernels do not run on {device} ({problem}); it goes on without them, slower",
            NatgradWarning,
            stacklevel=2,
        )
    return problem is None


def _tried(kernel: Any, device: torch.device) -> bool:
    """Whether a kernel does what it should, when it is compiled and afterwards."""
    out = torch.zeros(3, dtype=torch.float32, device=device)
    with torch.cuda.device_of(out):
        launch = Launch(kernel, [(0,), (1,)], [2, 1], device, TIMES=2)
        for number in (0.5, 1.0):
            launch(addresses([out.data_ptr(), out.data_ptr() + 2 * out.element_size()], device), number)
    return bool(out.tolist() == [3.0] * 3)


def countable(tensor: Tensor) -> bool:
    """Whether kernels get from its first to its last element: a part of a larger tensor is as long as that."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last < COUNTABLE and tensor.numel() < COUNTABLE


def bits(number: float) -> int:
    """A float32 in the table of whole numbers."""
    (found,) = struct.unpack("i", struct.pack("f", number))
    return int(found)


def addresses(pointers: Sequence[int], device: torch.device) -> Tensor:
    """Where tensors are, on the device; nobody waits for it."""
    here = torch.tensor(pointers, dtype=torch.int64, device=HOST, pin_memory=device.type == "cuda")
    return here if device.type == "cpu" else here.to(device, non_blocking=True)


def triton_type(value: Any) -> Any:
    """A torch dtype in Triton's words; anything else as it is."""
    if not isinstance(value, torch.dtype):
        return value
    import triton.language as tl  # who launches has it

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[value]


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; nobody waits for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """What works are launched on: tables that went to the device on one stream are not for another."""
    if device.type != "cuda":  # tables are for kernels, which run nowhere else
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # What current_stream(device).cuda_stream is, without an object around it: asked for with every tensor that waits.
    return int(torch._C._cuda_getCurrentRawStream(index))


def kernel(package: str, name: str) -> Any:
    """A kernel of ``natgrad.<package>.kernels``, which only systems with Triton can import: ask `able` first."""
    return getattr(importlib.import_module(f"natgrad.{package}.kernels"), name)


class Launch:
    """A kernel and its pieces: the `numbers` of each, and how many programs it has. `options` are constants of the
    kernel, and how it is compiled.
    """

    def __init__(
        self,
        kernel: Any,
        numbers: Sequence[Sequence[int]],
        programs: Sequence[int],
        device: torch.device,
        **options: Any,
    ) -> None:
        self._kernel, self._device, self._options = kernel, device, options
        self._direct: _Direct | None = None
        self._tried = False
        counts = torch.tensor(programs, device=HOST)
        starts = (counts.cumsum(0) - counts).tolist()
        self._grid = (int(counts.sum()), 1, 1)
        rows = [[start, *row] for start, row in zip(starts, numbers, strict=True)]
        table = torch.tensor(rows, dtype=torch.int32, device=HOST)
        owners = torch.repeat_interleave(torch.arange(len(programs), dtype=torch.int32, device=HOST), counts)
        self._tables = (uploaded(table, device), uploaded(owners, device))
        self._constants = [options[name] for name in kernel.arg_names if name in options]

    def __call__(self, pointers: Tensor, *arguments: Any) -> None:
        """On the current device."""
        if self._direct is not None:
            try:
                self._direct(stream_of(self._device), pointers, *arguments)
            except TypeError:  # a Triton that wants other arguments here: nothing has been launched
                self._direct = None
            else:
                return
        compiled = self._kernel[self._grid](pointers, *self._tables, *arguments, **self._options)
        if not self._tried:
            self._tried, self._direct = True, _direct(compiled, self._grid, self._tables, self._constants)


# A kernel that has been compiled: to launch it on a stream, with where tables are, and the other arguments.
_Direct = Callable[..., None]


def _direct(compiled: Any, grid: tuple[int, ...], tables: Sequence[Tensor], constants: Sequence[Any]) -> _Direct | None:
    """A launch that does not ask which compiled form is the right one, who wants to be told of it, and of every tensor
    whether it is on a GPU, each of which takes as long as to launch: what Inductor does too. None where nothing has
    been compiled, by Triton's interpreter.
    """
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return None
    places = [table.data_ptr() for table in tables]
    nobody = (None, None, None)  # no words of ours for those who watch launches, nor hooks before and after

    def launch(stream: int, pointers: Tensor, *arguments: Any) -> None:
        given = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        run(*grid, stream, function, metadata, *nobody, pointers.data_ptr(), *places, *given, *constants)

    return launch

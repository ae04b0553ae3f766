"""Kernels without a GPU: in Triton's interpreter, which is chosen before Triton is imported. These tests have a process
of their own, which `tests/test_interpreted.py` starts.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are on the CPU; products of bfloat16, which the interpreter keeps as whole numbers, are of its values."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def values(handle: TensorHandle) -> TensorHandle:
        if str(handle.dtype.scalar) != "bf16":
            return handle
        data = interpreter._convert_float(handle.data, handle.dtype.scalar, interpreter.tl.float32, None)
        return TensorHandle(data.view("float32"), interpreter.tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return plain(self, values(a), values(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())

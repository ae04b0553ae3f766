"""Running compiled models eagerly while statistics are taken.

A compiled model is one opaque node of the graph. While any KFAC is armed, PyTorch's stance "force_eager" runs the
same compiled callables eagerly; it is process-wide by
nature, so the count of who asks for it is too.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch


class _EagerStance:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: Any = None

    def acquire(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                # Whoever changed the stance in the meantime keeps theirs.
                present = getattr(sys.modules["torch._dynamo.eval_frame"], "_stance", None)
                if present is None or present == self._stance.stance:
                    self._stance.__exit__(None, None, None)
                self._stance = None


_shared = _EagerStance()


class ForceEager:
    """One holder's claim on eager execution; taking or dropping it twice does nothing."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self) -> None:
        """Compiled callables run eagerly from now on."""
        if not self._held:
            self._held = True
            _shared.acquire()

    def release(self) -> None:
        """Compiled callables run compiled again, unless someone else still claims otherwise."""
        if self._held:
            self._held = False
            _shared.release()

"""Where the processes of a run find each other, and learn that it is over: a few keys in torch's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from natgrad.roles.wire import Address

T = TypeVar("T")

_ANSWER = timedelta(seconds=10)
_KNOCK = 2.0  # seconds
_AGAIN = 0.25  # seconds


class Directory:
    """The addresses of helpers, the key of the run, and whether training is over. Every operation survives a store
    that is not there yet, or is gone: nobody is found then. For all threads of a process, and connected at first use,
    so that it may be made before a fork. Without an address it is empty for ever.
    """

    def __init__(self, address: Address | None, *, attempt: str = "0", alone: bool = True) -> None:
        self.address = address
        self.alone = alone
        self._attempt = attempt
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._bird: socket.socket | None = None
        self._reached = False
        self._token: bytes | None = None

    @classmethod
    def of_environment(cls) -> Directory:
        """In torchrun's store, or that of rank 0 where the variables are set by hand. On one machine every attempt of
        torchrun has keys of its own; several machines may count attempts differently, and write over the last one's.
        """
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "any"
        world = os.environ["WORLD_SIZE"]
        everybody = os.environ.get("LOCAL_WORLD_SIZE", world) == world
        return cls(address, attempt=attempt, alone=alone and everybody)

    def wait(self, seconds: float) -> bool:
        """Waits until there is a store; whether there is."""
        until = time.monotonic() + seconds
        while not self._ask(lambda store: True, otherwise=False):
            if time.monotonic() > until:
                return False
            time.sleep(_AGAIN)
        return True

    @property
    def token(self) -> bytes:
        """The key by which processes of this run know each other, made by whoever comes first."""
        if self._token is None:
            mine = secrets.token_hex(32)
            found: bytes | None = self._ask(lambda store: store.compare_set(self._key("token"), "", mine), None)
            if found is None:
                return mine.encode()  # which nobody will ever know
            self._token = bytes(found)
        return self._token

    def publish(self, role: str, index: int, address: Address, incarnation: int) -> None:
        """Tells everybody where a helper listens."""
        entry = json.dumps([*address, incarnation])
        self._ask(lambda store: store.set(self._key(f"{role}/{index}"), entry), None)

    def find(self, role: str, index: int) -> tuple[Address, bytes, int] | None:
        """Address, key and incarnation of a helper that has told. Never waits."""
        key = self._key(f"{role}/{index}")
        entry: bytes | None = self._ask(lambda store: store.get(key) if store.check([key]) else None, None)
        if entry is None:
            return None
        host, port, incarnation = json.loads(entry)
        return (host, port), self.token, incarnation

    def begin(self) -> None:
        """Takes back that training is over, which an earlier attempt may have said."""
        key = self._key("finished")
        self._ask(lambda store: store.delete_key(key) if store.check([key]) else None, None)

    def finish(self) -> None:
        """Tells everybody that training is over."""
        self._ask(lambda store: store.set(self._key("finished"), "yes"), None)

    @property
    def finished(self) -> bool:
        """Whether training is over: so it was told, or the store was there and is no more."""
        return self._ask(lambda store: bool(store.check([self._key("finished")])), None) is not False and self._reached

    def close(self) -> None:
        """Gives the connection back; the next operation makes a new one."""
        with self._lock:
            self._drop()

    def _key(self, name: str) -> str:
        return f"natgrad/roles/{self._attempt}/{name}"

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        with self._lock:
            for _ in range(2):  # a connection that broke says little about the store
                if self._sings() or self._open():
                    assert self._store is not None
                    with contextlib.suppress(RuntimeError, ValueError):
                        return question(self._store)
                self._drop()
            return otherwise

    def _open(self) -> bool:
        """torch complains at length where nobody listens, and where the store has gone: a connection of our own, on
        which nothing is said, is asked before.
        """
        self._drop()
        if self.address is None:
            return False
        try:
            self._bird = socket.create_connection(self.address, timeout=_KNOCK)
            self._store = TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=_ANSWER)
        except (OSError, RuntimeError):
            self._drop()
            return False
        self._reached = True
        return True

    def _sings(self) -> bool:
        return self._bird is not None and not wait([self._bird], 0)

    def _drop(self) -> None:
        self._store = None
        if self._bird is not None:
            self._bird.close()
            self._bird = None

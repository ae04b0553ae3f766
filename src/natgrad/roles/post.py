"""Both ends of a connection between a gradient rank and a helper: the helper's open door, and the way to it."""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from socket import socket
from typing import TYPE_CHECKING

from natgrad.overlap.pool import ending
from natgrad.roles.wire import SHAKE, Wire, connected, listening, welcomed

if TYPE_CHECKING:
    from natgrad.roles.role import Role

AGAIN = 1.0
"""Seconds between two looks for a helper that has gone."""
_LOOK = 0.5  # seconds between two looks whether training is over
_LAST_WAIT = 5.0  # seconds that the end of the interpreter waits for who is asking the directory

Story = Callable[[str], None]


class Post:
    """The open door of a helper: it listens where the directory says, and talks to each that comes and knows the key,
    in a thread of its own, until `serve` returns or the wire breaks.
    """

    def __init__(self, role: Role, serve: Callable[[Wire], None]) -> None:
        self._directory = role.directory
        self._serve = serve
        self._over, self._closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._guests: dict[threading.Thread, Wire | None] = {}
        assert self._directory.address is not None, "a helper was started by somebody"
        self._key = self._directory.token
        self._listener = listening(self._directory.address, alone=self._directory.alone)
        self._listener.settimeout(_LOOK)
        address = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._open, daemon=True, name=f"natgrad {role.name} door")
        self._thread.start()
        self._directory.publish(role.name, role.index, address, role.incarnation)

    @property
    def over(self) -> bool:
        """Whether training is over, or this is closed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Until training is over."""
        self._over.wait()

    def close(self) -> None:
        """Lets nobody in any more, and sends away who is there."""
        self._closed.set()
        self._thread.join()

    def _open(self) -> None:
        looked = time.monotonic()
        while not self._closed.is_set() and not self._over.is_set():
            try:
                plugged, _ = self._listener.accept()
            except TimeoutError:
                pass
            except OSError:
                self._closed.wait(_LOOK)  # no room for another file: later, perhaps
            else:
                self._let_in(plugged)
            if time.monotonic() - looked >= _LOOK:
                if self._directory.finished:
                    self._over.set()
                looked = time.monotonic()
        self._over.set()
        self._listener.close()
        with self._lock:
            guests = dict(self._guests)
        for wire in guests.values():
            if wire is not None:
                wire.cut()
        until = time.monotonic() + SHAKE  # by then a handshake has failed, too
        for thread in guests:
            thread.join(max(0.0, until - time.monotonic()))

    def _let_in(self, plugged: socket) -> None:
        thread = threading.Thread(target=self._talk, args=(plugged,), daemon=True, name="natgrad guest")
        with self._lock:
            self._guests[thread] = None
        thread.start()

    def _talk(self, plugged: socket) -> None:
        me, wire = threading.current_thread(), None
        try:
            wire = welcomed(plugged, self._key)
            with self._lock:
                self._guests[me] = wire
            if not self._over.is_set():
                self._serve(wire)
        except (OSError, struct.error):
            pass  # it has gone, or is none of us
        finally:
            with self._lock:
                del self._guests[me]
            if wire is not None:
                wire.close()


class Way:
    """One helper as a gradient rank sees it: looked up, called, lost and found again."""

    def __init__(self, role: Role, name: str, index: int, on_change: Story | None) -> None:
        self.who = f"{name} worker {index}"
        self.trouble = "it has not told where it is"
        self._directory = role.directory
        self._name, self._index = name, index
        self._on_change = on_change
        self._lost = False

    def call(self) -> Wire | None:
        """A wire to it, if it is there; tries once."""
        found = self._directory.find(self._name, self._index)
        if found is None:
            return None
        address, key, _ = found
        try:
            wire = connected(address, key)
        except OSError as error:
            self.trouble = str(error)
            return None
        if self._lost:
            self._lost = False
            self.tell(f"{self.who} is back")
        return wire

    def lose(self, why: object) -> None:
        """Tells that it is lost."""
        self._lost = True
        self.trouble = str(why)
        self.tell(f"{self.who} is lost: {why}")

    def tell(self, story: str) -> None:
        """Hands a story on. Whoever listens cannot stop us by an error."""
        if self._on_change is not None:
            try:
                self._on_change(story)
            except Exception:
                traceback.print_exc()


class Caller:
    """Has threads that call helpers, until it is told to hang up; the end of the interpreter tells all."""

    def __init__(self) -> None:
        self.threads: Sequence[threading.Thread] = ()
        self._process = os.getpid()
        _callers.add(self)

    @property
    def at_home(self) -> bool:
        """Whether its threads are in this process, and not in one that this was forked from: wires are shared then."""
        return self._process == os.getpid()

    def hang_up(self) -> None:
        """Ends the threads as soon as they can, and waits for nobody."""
        raise NotImplementedError


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()


def hang_up(callers: Iterable[Caller]) -> None:
    """Hangs up, unless these are the calls of a process that this one was forked from."""
    for caller in callers:
        if caller.at_home:
            caller.hang_up()


@atexit.register
def _end() -> None:
    """A thread that came back from torch's store to an interpreter that is gone would abort the process."""
    ending.set()
    callers = list(_callers)
    hang_up(callers)
    until = time.monotonic() + _LAST_WAIT
    for thread in [thread for caller in callers if caller.at_home for thread in caller.threads]:
        thread.join(max(0.0, until - time.monotonic()))

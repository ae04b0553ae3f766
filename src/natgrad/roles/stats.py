"""Between a stats worker and its gradient rank: parameters one way, statistics the other.

The gradient rank asks and the worker answers, again and again, so that neither ever sends while the other does, and
each hears from the other all the time. A question says which delivery was the last to arrive, and may bring parameters;
an answer may bring a delivery.
"""

from __future__ import annotations

import math
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from natgrad.roles.post import AGAIN, Caller, Post, Story, Way
from natgrad.roles.wire import Wire

if TYPE_CHECKING:
    from natgrad.roles.role import Role

_QUESTION = struct.Struct("!Q??q")  # the last delivery; room for another; whether parameters follow, of which step
_ANSWER = struct.Struct("!Q")  # the delivery that follows, or 0
_PERIOD = 0.05  # seconds between questions while nothing happens
_LOOK = 0.2  # seconds between two looks at what cannot wake anybody up


class Desk:
    """The stats worker's side. Any number of lines may come, one after another: the newest counts."""

    def __init__(self, role: Role) -> None:
        self._news = threading.Condition()
        self._wire: Wire | None = None
        self._parameters: tuple[int, bytes] | None = None
        self._number = secrets.randbits(62) + 1  # of deliveries: no other worker, or incarnation, has the same
        self._waiting: bytes | None = None
        self._post = Post(role, self._answer)

    @property
    def over(self) -> bool:
        """Whether training is over."""
        return self._post.over

    def latest(self, wait: float = 60.0) -> tuple[int, bytes] | None:
        """Step and content of the newest parameters that have come. Waits for the first, `wait` seconds at most or
        until training is over.
        """
        self._wait(lambda: self._parameters is not None, wait)
        return self._parameters

    def deliver(self, payload: bytes) -> None:
        """Hands statistics over. Waits while those before are not taken yet, or until training is over."""
        self._wait(lambda: self._waiting is None)
        with self._news:
            if self._waiting is None:
                self._number += 1
                self._waiting = payload

    def close(self) -> None:
        """Leaves the line."""
        self._post.close()

    def _wait(self, done: Callable[[], bool], seconds: float = math.inf) -> None:
        until = time.monotonic() + seconds
        with self._news:
            while not done() and not self._post.over and time.monotonic() < until:
                self._news.wait(_LOOK)

    def _answer(self, wire: Wire) -> None:
        with self._news:
            before, self._wire = self._wire, wire
        if before is not None:
            before.cut()
        while True:
            last, room, brings, step = _QUESTION.unpack(wire.receive())
            parameters = wire.receive() if brings else None
            with self._news:
                if self._wire is not wire:
                    return
                if parameters is not None:
                    self._parameters = step, parameters
                if last == self._number:
                    self._waiting = None
                self._news.notify_all()
                number = self._number if room else 0
                content = self._waiting if number else None
            wire.send(_ANSWER.pack(0 if content is None else number))
            if content is not None:
                wire.send(content)


class Line(Caller):
    """The gradient rank's side: calls the stats worker, and again when it was lost. Nothing here ever waits. `keep`
    deliveries are held at most; until they are received the worker keeps the next. A worker that does not answer
    within `timeout` seconds counts as lost. `on_change` is told in a line, by another thread, when it is and when it
    is back.
    """

    def __init__(
        self, role: Role, index: int, *, keep: int = 4, timeout: float = 30.0, on_change: Story | None = None
    ) -> None:
        if not 0 <= index < role.stats:
            raise ValueError(f"there is no stats worker {index}: natgrad.roles.take() was told of {role.stats}")
        super().__init__()
        self._way = Way(role, "stats", index, on_change)
        self._keep, self._timeout = keep, timeout
        self._news = threading.Condition()
        self._wire: Wire | None = None
        self._closed = False
        self._newest: tuple[int, bytes] | None = None
        self._on_its_way: tuple[int, bytes] | None = None  # what this worker has been given
        self._inbox: deque[bytes] = deque()
        self._last = 0
        self.threads = [threading.Thread(target=self._work, daemon=True, name=f"natgrad {self._way.who}")]
        self.threads[0].start()

    @property
    def alive(self) -> bool:
        """Whether the worker is connected."""
        return self._wire is not None

    def send(self, step: int, payload: bytes) -> None:
        """Sends the parameters of a step, in time: newer ones take their place while others are on their way. A worker
        that comes later is given the newest.
        """
        with self._news:
            self._newest = step, payload
            self._news.notify_all()

    def receive(self) -> bytes | None:
        """The oldest delivery that has come and was not received yet."""
        with self._news:
            if not self._inbox:
                return None
            self._news.notify_all()
            return self._inbox.popleft()

    def hang_up(self) -> None:
        """Lets its thread end."""
        with self._news:
            self._closed = True
            if self._wire is not None:
                self._wire.cut()
            self._news.notify_all()

    def close(self) -> None:
        """Hangs up, and waits for its thread."""
        self.hang_up()
        self.threads[0].join()

    def _work(self) -> None:
        while not self._closed:
            wire = self._way.call()
            if wire is not None:
                self._talk(wire)
            with self._news:
                self._news.wait_for(lambda: self._closed, AGAIN)

    def _talk(self, wire: Wire) -> None:
        with self._news:
            self._wire, self._on_its_way = wire, None
        try:
            while not self._closed:
                if not self._exchange(wire):
                    with self._news:
                        self._news.wait_for(lambda: self._closed or self._newest is not self._on_its_way, _PERIOD)
        except (OSError, struct.error) as error:
            with self._news:
                self._wire = None
            if not self._closed:
                self._way.lose(error)
        finally:
            with self._news:
                self._wire = None
            wire.close()

    def _exchange(self, wire: Wire) -> bool:
        """Asks once. Whether there was something to say, or to hear."""
        with self._news:
            room = len(self._inbox) < self._keep
            given = self._newest if self._newest is not self._on_its_way else None
            self._on_its_way = self._newest
        wire.send(_QUESTION.pack(self._last, room, given is not None, 0 if given is None else given[0]))
        if given is not None:
            wire.send(given[1])
        (number,) = _ANSWER.unpack(wire.receive(self._timeout))
        if number:
            content = wire.receive(self._timeout)
            with self._news:
                self._inbox.append(content)
                self._last = number
        return bool(number) or given is not None

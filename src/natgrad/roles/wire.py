"""Messages over TCP: bytes in, bytes out. Nothing that arrives is ever unpickled, and nothing waits for ever.

Framing and handshake are those of `multiprocessing.connection`: both sides prove that they know the key of the run
before anything else is said. It asks for room for all that is still to come at every read, which makes long messages
slow: they go in pieces, after one that tells how long they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

Address = tuple[str, int]

SHAKE = 5.0
"""Seconds for a connection to be made, and for each word of the handshake."""
STALL = 30.0
"""Seconds without a single byte in the middle of a message."""

_LENGTH = struct.Struct("!Q")
_PIECE = 2**20  # bytes
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


class Wire:
    """One connection. Its owner alone sends, receives and closes; any thread may cut it, which wakes the owner up.
    Whatever goes wrong is a `ConnectionError`, after which the wire is of no more use; an answer that does not come is
    a `TimeoutError`.
    """

    def __init__(self, plugged: socket.socket) -> None:
        plugged.setblocking(True)
        plugged.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plugged.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that has vanished says nothing
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                plugged.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = plugged
        self._connection = Connection(os.dup(plugged.fileno()))
        self._closing = threading.Lock()
        self._limit(STALL)

    def send(self, payload: bytes) -> None:
        """Sends a message. Waits as long as the other side takes some of it now and then."""
        try:
            self._connection.send_bytes(_LENGTH.pack(len(payload)))
            for start in range(0, len(payload), _PIECE):
                self._connection.send_bytes(payload, start, min(_PIECE, len(payload) - start))
        except Exception as error:
            raise _told(error) from error

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message, which may take `timeout` seconds to begin."""
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError(f"no answer within {timeout:g} s")
            (missing,) = _LENGTH.unpack(self._connection.recv_bytes(_LENGTH.size))
            pieces = []
            while missing > 0:
                pieces.append(self._connection.recv_bytes(_PIECE))
                missing -= len(pieces[-1])
            return b"".join(pieces)
        except TimeoutError:
            raise
        except Exception as error:  # no memory is one, too
            raise _told(error) from error

    @property
    def quiet(self) -> bool:
        """Whether all is well while nothing is expected: a side that has gone makes itself heard by its end."""
        try:
            return not self._connection.poll(0)
        except (OSError, EOFError):
            return False

    def cut(self) -> None:
        """Ends the talk on both sides, from any thread."""
        with self._closing, contextlib.suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cuts and gives the sockets back. For the owner: others might find the number of a file taken by another."""
        self.cut()
        with self._closing:
            self._connection.close()
            self._socket.close()

    def _limit(self, seconds: float) -> None:
        """On what a system call waits, since `Connection` knows no limits of its own."""
        spelt = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, spelt)

    def _shake(self, key: bytes, *, first: bool) -> None:
        self._limit(SHAKE)
        try:
            for challenge in (answer_challenge, deliver_challenge) if first else (deliver_challenge, answer_challenge):
                challenge(self._connection, key)
        except Exception as error:  # anything may have been sent: lengths, texts, assertions fail
            self.close()
            raise ConnectionError(f"the handshake failed ({_told(error)})") from error
        self._limit(STALL)


def connected(address: Address, key: bytes) -> Wire:
    """A wire to a process that listens."""
    try:
        plugged = socket.create_connection(address, timeout=SHAKE)
    except OSError as error:
        raise ConnectionError(f"{address[0]}:{address[1]}: {error}") from error
    wire = Wire(plugged)
    wire._shake(key, first=True)
    return wire


def welcomed(plugged: socket.socket, key: bytes) -> Wire:
    """A wire to a process that has knocked, if it knows the key."""
    try:
        wire = Wire(plugged)
    except OSError as error:  # it has gone already
        plugged.close()
        raise ConnectionError(str(error)) from error
    wire._shake(key, first=False)
    return wire


def listening(towards: Address, *, alone: bool) -> socket.socket:
    """A socket on a free port of the address by which this machine reaches another one. `alone`: all is on this
    machine; otherwise an address that only this machine can see, as some name themselves, will not do.
    """
    host = _source(towards)
    if not alone and (host.startswith("127.") or host == "::1"):
        host = _source(("192.0.2.1", 9))  # nobody's: the way out of this machine. Nothing is sent
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def _source(towards: Address) -> str:
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as asked:
                asked.connect(address)  # of a datagram socket: chooses a way, sends nothing
                return str(asked.getsockname()[0])
    except OSError:
        pass
    return "127.0.0.1"


def _told(error: BaseException) -> ConnectionError:
    if isinstance(error, ConnectionError):
        return error
    if isinstance(error, EOFError):
        return ConnectionError("the other side has gone")
    if isinstance(error, BlockingIOError):
        return ConnectionError("the other side has stopped in the middle of a message")
    return ConnectionError(str(error) or type(error).__name__)

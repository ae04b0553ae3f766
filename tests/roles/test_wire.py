from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from natgrad.packets import packed, unpacked
from natgrad.roles import wire
from natgrad.roles.wire import Wire

KEY = b"k" * 32


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with wire.listening(("127.0.0.1", 1), alone=True) as listener:
        yield listener


def pair(door: socket.socket) -> tuple[Wire, Wire]:
    let_in: list[Wire] = []
    thread = threading.Thread(target=lambda: let_in.append(wire.welcomed(door.accept()[0], KEY)))
    thread.start()
    out = wire.connected(door.getsockname(), KEY)
    thread.join()
    return out, let_in[0]


def test_messages_of_any_length_arrive(door: socket.socket) -> None:
    out, back = pair(door)
    for size in (0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7):
        payload = os.urandom(size)
        sending = threading.Thread(target=out.send, args=(payload,))
        sending.start()
        assert back.receive(5) == payload
        sending.join()
    back.send(b"done")
    assert out.receive(5) == b"done"
    assert out.quiet
    back.close()
    assert not out.quiet
    with pytest.raises(ConnectionError, match="the other side has gone"):
        out.receive(5)
    out.close()


def test_nothing_waits_for_ever(door: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL", 0.2)
    out, back = pair(door)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        out.receive(0.1)
    back._connection.send_bytes(wire._LENGTH.pack(100))
    with pytest.raises(ConnectionError, match="stopped in the middle of a message"):
        out.receive(5)
    with pytest.raises(ConnectionError, match="stopped in the middle of a message"):
        out.send(bytes(2**26))  # nobody reads
    out.close()
    back.close()


def test_a_cut_wakes_who_waits(door: socket.socket) -> None:
    out, back = pair(door)
    threading.Timer(0.1, out.cut).start()
    with pytest.raises(ConnectionError):
        out.receive()
    out.close()
    back.close()


def test_a_stranger_is_refused(door: socket.socket) -> None:
    refused: list[BaseException] = []

    def welcome() -> None:
        try:
            wire.welcomed(door.accept()[0], KEY)
        except ConnectionError as error:
            refused.append(error)

    thread = threading.Thread(target=welcome)
    thread.start()
    with pytest.raises(ConnectionError, match="handshake"):
        wire.connected(door.getsockname(), b"another")
    thread.join()
    assert "handshake" in str(refused[0])


def test_a_handshake_that_stalls_is_given_up(door: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SHAKE", 0.2)
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="handshake"):
        wire.connected(door.getsockname(), KEY)  # nobody accepts
    assert time.monotonic() - begun < 2


def test_nobody_there_is_told_with_the_address() -> None:
    with wire.listening(("127.0.0.1", 1), alone=True) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{address[1]}: .*refused"):
        wire.connected(address, KEY)


def test_an_address_for_others_is_not_one_of_this_machine_alone() -> None:
    with wire.listening(("localhost", 1), alone=True) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    assert wire._source(("no such host.invalid", 1)) == "127.0.0.1"


def test_packets() -> None:
    content = {"a": [torch.arange(3), 1.5, "text"], "b": (True, None)}
    found = unpacked(packed(content))
    assert torch.equal(found["a"].pop(0), content["a"].pop(0))
    assert found == content
    with pytest.raises(Exception, match="[Ww]eights.only"):
        unpacked(packed({"run": os.system}))

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.roles.conftest import Hosts, pause, wait_for

from natgrad.roles import Desk, Line, Role, stats


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "AGAIN", 0.1)


@pytest.fixture
def desk(hosts: Hosts) -> Iterator[Desk]:
    made = Desk(hosts.role("stats"))
    yield made
    made.close()


@pytest.fixture
def line(hosts: Hosts) -> Iterator[Line]:
    made = Line(hosts.role(), 0)
    yield made
    made.close()


def received(line: Line) -> bytes:
    found = wait_for(line.receive)
    assert isinstance(found, bytes)
    return found


def test_the_newest_parameters_win(desk: Desk, line: Line) -> None:
    assert desk.latest(0.05) is None
    line.send(1, b"one")
    assert desk.latest() == (1, b"one")
    for step in range(2, 50):
        line.send(step, os.urandom(10_000))
    line.send(50, b"fifty")
    wait_for(lambda: desk.latest() == (50, b"fifty"))
    assert desk.latest() == (50, b"fifty")  # still the newest


def test_deliveries_come_in_order_and_all_of_them(desk: Desk, line: Line) -> None:
    deliveries = [bytes([number]) * 3_000_000 for number in range(12)]
    threading.Thread(target=lambda: [desk.deliver(one) for one in deliveries], daemon=True).start()
    line.send(0, bytes(5_000_000))
    assert [received(line)[:1] for _ in range(12)] == [one[:1] for one in deliveries]
    time.sleep(0.2)
    assert line.receive() is None


def test_a_worker_is_one_delivery_ahead_at_most(hosts: Hosts, desk: Desk) -> None:
    done: list[int] = []

    def deliver() -> None:
        for number in range(10):
            desk.deliver(b"%d" % number)
            done.append(number)

    threading.Thread(target=deliver, daemon=True).start()
    time.sleep(0.3)
    assert done == [0]  # the second waits
    line = Line(hosts.role(), 0, keep=3)
    wait_for(lambda: len(done) >= 4)
    time.sleep(0.3)
    assert len(done) == 4  # three are held for the rank, one is here, and the next waits
    assert [received(line) for _ in range(10)] == [b"%d" % number for number in range(10)]
    line.close()


def test_nothing_is_delivered_twice_on_a_bad_line(desk: Desk, line: Line) -> None:
    threading.Thread(target=lambda: [desk.deliver(b"%d" % number) for number in range(20)], daemon=True).start()
    found = []
    for _ in range(20):
        found.append(received(line))
        wire = line._wire
        if wire is not None:
            wire.cut()
    assert found == [b"%d" % number for number in range(20)]


def test_a_worker_that_comes_back_is_given_the_newest(hosts: Hosts) -> None:
    def work(incarnation: int) -> None:
        desk = Desk(hosts.role("stats", incarnation=incarnation))
        while not desk.over:
            latest = desk.latest(1)
            if latest is not None:
                desk.deliver(b"%d of %d: %s" % (incarnation, latest[0], latest[1]))

    first = hosts.start(work, 0)
    stories: list[str] = []
    line = Line(hosts.role(), 0, on_change=stories.append)
    assert not line.alive
    line.send(7, b"seven")
    assert received(line) == b"0 of 7: seven"
    first.kill()
    wait_for(lambda: not line.alive)
    wait_for(lambda: stories)
    assert stories[0].startswith("stats worker 0 is lost: ")
    line.send(8, b"eight")
    while line.receive() is not None:
        pass
    second = hosts.start(work, 1)
    assert received(line) == b"1 of 8: eight"
    assert line.alive
    assert stories[1:] == ["stats worker 0 is back"]
    hosts.role().close()
    second.join(5)
    assert second.exitcode == 0
    line.close()
    assert not line.alive


def test_a_worker_that_hangs_is_lost_in_time(hosts: Hosts) -> None:
    hanging = hosts.start(lambda: (Desk(hosts.role("stats")), time.sleep(30)))
    stories: list[str] = []
    line = Line(hosts.role(), 0, timeout=0.3, on_change=stories.append)
    wait_for(lambda: line.alive)
    pause(hanging.pid)
    wait_for(lambda: stories == ["stats worker 0 is lost: no answer within 0.3 s"], 3)
    assert not line.alive
    hanging.kill()
    line.close()


@pytest.mark.parametrize("end", ["told", "gone"])
def test_nobody_waits_when_training_is_over(hosts: Hosts, desk: Desk, end: str) -> None:
    ended: list[str] = []

    def thread(name: str, wait: Callable[[], Any]) -> threading.Thread:
        made = threading.Thread(target=lambda: (wait(), ended.append(name)), daemon=True)
        made.start()
        return made

    desk.deliver(b"nobody takes it")
    threads = [thread("latest", lambda: desk.latest(60)), thread("deliver", lambda: desk.deliver(b"more"))]
    time.sleep(0.2)
    assert ended == []
    assert not desk.over
    if end == "told":
        hosts.role().close()
    else:
        hosts.store.kill()
    for one in threads:
        one.join(4)
    assert sorted(ended) == ["deliver", "latest"]
    assert desk.over
    desk.deliver(b"does not matter")


def test_an_error_of_who_listens_stops_nobody(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(story: str) -> None:
        raise ValueError(story)

    line = Line(hosts.role(), 0, on_change=fail)
    Desk(hosts.role("stats")).close()
    desk = Desk(hosts.role("stats"))
    line.send(1, b"x")
    assert desk.latest(5) == (1, b"x")
    desk.close()
    wait_for(lambda: "ValueError: stats worker 0 is lost" in capsys.readouterr().err)
    desk = Desk(hosts.role("stats"))
    assert desk.latest(5) == (1, b"x")
    desk.close()
    line.close()


def test_nothing_is_left_open(hosts: Hosts) -> None:
    role, worker = hosts.role(), hosts.role("stats")
    role.directory.find("stats", 0), worker.directory.find("stats", 0)
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        desk, line = Desk(worker), Line(role, 0)
        line.send(1, b"x")
        assert desk.latest(5)
        line.close()
        desk.close()
        line.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_workers_are_dealt_out_to_ranks() -> None:
    role = Role(name="gradient", index=1, gradients=2, stats=5, directory=None)  # type: ignore[arg-type]
    assert list(role.helpers) == [1, 3]
    assert list(dataclasses.replace(role, index=0).helpers) == [0, 2, 4]
    assert list(dataclasses.replace(role, name="stats").helpers) == []
    with pytest.raises(ValueError, match="there is no stats worker 5"):
        Line(role, 5)

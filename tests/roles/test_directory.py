from __future__ import annotations

import time

import pytest
from tests.roles.conftest import Hosts, wait_for

from natgrad.roles import Directory


def test_helpers_are_found(hosts: Hosts) -> None:
    one, other = hosts.directory(), hosts.directory()
    assert one.find("stats", 0) is None
    other.publish("stats", 0, ("127.0.0.1", 1234), 0)
    assert one.find("stats", 0) == (("127.0.0.1", 1234), one.token, 0)
    other.publish("stats", 0, ("127.0.0.1", 4321), 1)
    assert one.find("stats", 0) == (("127.0.0.1", 4321), other.token, 1)
    assert one.find("inverse", 0) is one.find("stats", 1) is None
    assert len(one.token) == 64
    one.close()
    assert one.find("stats", 0)  # connected anew


def test_the_end_of_training_is_told(hosts: Hosts) -> None:
    one, other, later = hosts.directory(), hosts.directory(), hosts.directory(attempt="1")
    assert not one.finished
    other.finish()
    other.finish()
    assert one.finished
    assert not later.finished  # torchrun has started everybody again
    other.begin()
    assert not one.finished


def test_a_store_that_is_gone_is_the_end(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    directory = hosts.directory()
    directory.publish("stats", 0, ("127.0.0.1", 1), 0)
    assert directory.find("stats", 0)
    hosts.store.kill()
    hosts.store.join()
    assert wait_for(lambda: directory.finished)
    assert directory.find("stats", 0) is None
    directory.publish("stats", 0, ("127.0.0.1", 1), 0)
    directory.finish()
    directory.begin()
    assert "c10d" not in capfd.readouterr().err  # torch's complaints would fill a screen


@pytest.mark.parametrize("address", [("127.0.0.1", 9), None])
def test_before_there_is_a_store_nobody_is_found(address: tuple[str, int] | None) -> None:
    directory = Directory(address)
    begun = time.monotonic()
    assert directory.find("stats", 0) is None
    assert not directory.finished
    assert directory.token
    directory.finish()
    assert not directory.wait(0.1)
    assert time.monotonic() - begun < 3


def test_the_environment_tells_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "there"), ("MASTER_PORT", "7"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    directory = Directory.of_environment()
    assert (directory.address, directory.alone, directory._attempt) == (("there", 7), True, "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Directory.of_environment()._attempt == "2"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    directory = Directory.of_environment()
    assert (directory.alone, directory._attempt) == (False, "any")

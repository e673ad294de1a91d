"""Ports for servers that bind them much later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtrace.errors import LabError
from kvtrace.lab import ports


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Give back what a test takes."""
    before = set(ports._taken)
    yield
    ports._taken.clear()
    ports._taken.update(before)


def test_no_port_is_handed_out_twice() -> None:
    taken = [ports.take() for _ in range(200)]

    assert len(set(taken)) == 200


def test_a_span_is_free_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 20_002
    monkeypatch.setattr(ports, "_is_free", lambda port: port != busy)
    monkeypatch.setattr(ports, "_ephemeral_lowest", lambda: 20_010)

    first = ports.take(4)

    assert busy not in range(first, first + 4)


def test_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    assert lowest > 21_000, "this machine leaves no room below; the next line would not hold"
    assert all(ports.take() < lowest for _ in range(50))


def test_a_listening_port_is_not_free() -> None:
    with socket.create_server((ports.HOST, 0)) as server:
        assert not ports._is_free(server.getsockname()[1])


def test_given_back_ports_can_be_taken_again_and_none_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda _: True)
    monkeypatch.setattr(ports, "_ephemeral_lowest", lambda: 20_002)
    first = ports.take()

    with pytest.raises(LabError, match="no 1 neighbouring free ports"):
        ports.take()

    ports.give_back(first)
    assert ports.take() == first

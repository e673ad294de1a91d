"""Leases on P's blocks: kept, extended, read, expired."""

from __future__ import annotations

import pytest

from instrumented_connectors.holdings import Holdings
from tests import connector_doubles as doubles


def held(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch, now: int = 1_000) -> tuple[Holdings, list[int]]:
    """Return holdings with a lease on request r that ends at 2 s, and the clock, in ns."""
    clock = [now]
    monkeypatch.setattr("instrumented_connectors.holdings.now_ns", lambda: clock[0])
    holdings = Holdings(memory, 1, extension_ns=3_000_000_000)
    step = doubles.metadata(reqs_in_batch={"r"}, reqs_to_send={"r": 102.0}, scheduler_clock=100.0)
    holdings.take(step)
    holdings.lease(step)
    return holdings, clock


def test_a_lease_that_nobody_reads_expires(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    clock[0] = 2_000_001_000
    holdings.settle(doubles.results(sent={"r"}))

    assert memory.of("prefill.lease_started")[0].numbers == (1, 2_000_000_000, 0, 0)
    assert memory.names == ["prefill.lease_started", "prefill.lease_expired"]


def test_a_lease_that_was_read_ends_without_expiring(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    holdings.notified("r", "2")
    holdings.notified("r", "2")
    clock[0] = 9_000_000_000
    holdings.settle(doubles.results(sent={"r"}))
    holdings.notified("r", "1")

    assert memory.names[1:] == ["transfer.notified", "transfer.notified", "notification.orphaned"]


def test_a_heartbeat_extends_the_leases_that_it_names(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, clock = held(memory, monkeypatch)
    holdings.extend("s,r")
    clock[0] = 2_500_000_000
    holdings.settle(doubles.results(sent={"r"}))

    assert memory.names == ["prefill.lease_started", "prefill.lease_extended"]

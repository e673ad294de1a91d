"""The observers of P's sender thread and of handshakes."""

from __future__ import annotations

import pytest

from instrumented_connectors import privates
from instrumented_connectors.peers import PeerSide
from instrumented_connectors.sender import SenderSide
from tests import connector_doubles as doubles
from tests.observers import agent, read
from tests.waiting import until


def test_the_wake_that_finds_work_is_shown_and_idle_ones_are_not(memory: doubles.Memory) -> None:
    side, _, _ = agent(memory)
    pushing = doubles.PushWorker()
    SenderSide(memory, side, 1).attach(pushing)
    pushing.registrations["r"] = {"request_id": "r-on-D"}
    pushing.start()
    try:
        until(lambda: pushing.rounds == 1)
        for expected in (2, 3):
            pushing._push_writer_wake.set()
            until(lambda expected=expected: pushing.rounds == expected)
        assert memory.names == []
        pushing._finished_blocks_inbox.put(("r", ([1],)))
        pushing._push_writer_wake.set()
        until(lambda: "sender.slept" in memory.names)
    finally:
        pushing.stop()

    assert memory.names[:4] == ["sender.woke", "sender.picked", "transfer.matched", "sender.slept"]
    woke, picked, matched, _ = memory.events[:4]
    assert woke.numbers[1] == 1
    assert 0 < woke.numbers[2] < 60_000_000_000
    assert (picked.request, matched.request, matched.ref) == ("r", "r", "r-on-D")
    assert pushing.started == [("r", "r-on-D")]


def test_a_push_that_waits_for_a_handshake_is_matched_once(memory: doubles.Memory) -> None:
    side, proxy, _ = agent(memory)
    pushing = doubles.PushWorker()
    SenderSide(memory, side, 1).attach(pushing)
    inner = pushing.started

    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    read(proxy, operation="WRITE")

    assert memory.names == ["transfer.matched", "transfer.prepared"]
    assert len(inner) == 2


def test_a_release_without_a_private_member_loses_its_points_only(memory: doubles.Memory) -> None:
    side, _, _ = agent(memory)
    pushing = doubles.PushWorker()
    del pushing._push_writer_stop, pushing._deferred_push_inbox
    pushing._push_finished_blocks = None
    SenderSide(memory, side, 1).attach(pushing)

    pushing._do_start_push_kv("r", ([1],), {"request_id": "r-on-D"})
    assert memory.names == ["transfer.matched"]
    assert privates.missing(pushing, "push") == [
        "_nixl_handshake", "_push_writer_stop", "_deferred_push_inbox", "_push_finished_blocks",
    ]  # fmt: skip


def test_handshakes_have_an_end_either_way(memory: doubles.Memory) -> None:
    class Worker:
        def _nixl_handshake(self, host: str, port: int, remote_tp_size: int, expected_engine_id: str) -> str:
            if port == 0:
                raise ConnectionError(host)
            return "agents"

    peer = Worker()
    PeerSide(memory, 1).attach(peer)
    assert peer._nixl_handshake("h", 1, 1, "P") == "agents"
    with pytest.raises(ConnectionError):
        peer._nixl_handshake("h", 0, remote_tp_size=1, expected_engine_id="P")

    assert [(event.stage, event.numbers[:2], event.ref) for event in memory.events] == [
        ("handshake.started", (1, 0), "P"),
        ("handshake.ended", (1, 1), "P"),
        ("handshake.started", (1, 0), "P"),
        ("handshake.ended", (1, 0), "P"),
    ]

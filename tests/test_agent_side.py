"""The observer of the NIXL agent: transfers between polls, bytes by descriptors, notifications, the probe."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_connectors.descriptors import Lengths
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.probe import Probe
from tests import connector_doubles as doubles
from tests.observers import REMOTE, agent, read
from tests.waiting import until

# Agent -------------------------------------------------------------------------------------------


def test_a_read_is_bracketed_by_its_polls_and_its_bytes_need_no_telemetry(memory: doubles.Memory) -> None:
    side, proxy, inner = agent(memory)
    inner.states = ["PROC", "PROC", "DONE", "DONE"]
    side.enter("r", REMOTE)
    handle = read(proxy)
    proxy.transfer(handle)
    before_ns = time.monotonic_ns()
    states = [proxy.check_xfer_state(handle) for _ in range(4)]
    proxy.release_xfer_handle(handle)

    number = memory.events[0].numbers[0]
    assert states == ["PROC", "PROC", "DONE", "DONE"]
    assert memory.names == [
        "transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done",
    ]  # fmt: skip
    assert memory.of("transfer.prepared")[0][1:4] == ("r", (number, 2, 1, 0), REMOTE)
    assert memory.of("transfer.post_ended")[0].numbers == (number, 400, 2, 0)
    done = memory.of("transfer.done")[0]
    assert before_ns <= done.numbers[1] <= done.t_ns
    assert done.numbers[2] == 3
    assert inner.released == [handle]


@pytest.fixture
def count_ms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time and the kernel's count for the thread, both in ms, and the readings so far: a test sets them."""
    state = [1_000.0, 50.0, 0.0]

    def starved_ns() -> int:
        state[2] += 1
        return int(state[1] * 1_000_000)

    monkeypatch.setattr("instrumented_connectors.starvation.starved_ns", starved_ns)
    for module in ("agent", "holdings"):
        monkeypatch.setattr(f"instrumented_connectors.{module}.now_ns", lambda: int(state[0] * 1_000_000))
    return state


def test_a_read_says_how_long_its_thread_had_no_processor(
    memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch, count_ms: list[float]
) -> None:
    """4 of 5 ms of the post, 3 of the 20 since the last poll; what was so before that poll is not said."""
    side, proxy, inner = agent(memory)
    inner.states = ["PROC", "DONE"]
    side.enter("r", REMOTE)
    handle = read(proxy)
    post = inner.transfer

    def slow(handle: Any) -> str:
        count_ms[0] += 5
        count_ms[1] += 4
        return str(post(handle))

    monkeypatch.setattr(inner, "transfer", slow)
    proxy = side.attach(inner)  # which calls the slow one from now on
    proxy.transfer(handle)
    for ms, lacks in ((10, 9), (20, 3)):
        count_ms[0] += ms
        count_ms[1] += lacks
        proxy.check_xfer_state(handle)

    number = memory.events[0].numbers[0]
    (post_ended,), (done,) = memory.of("transfer.post_ended"), memory.of("transfer.done")
    posted, noticed = memory.of("transfer.post_starved"), memory.of("transfer.notice_starved")
    assert [(one.request, one.numbers, one.t_ns) for one in posted] == [
        ("r", (number, 4_000_000, 0, 0), post_ended.t_ns)
    ]  # fmt: skip
    assert [(one.request, one.numbers, one.t_ns) for one in noticed] == [
        ("r", (1, 3_000_000, 20_000_000, 0), done.t_ns)
    ]
    assert count_ms[2] == 4


@pytest.mark.parametrize("held", [False, True], ids=["awaited", "held"])
def test_a_notification_says_how_long_its_reader_had_no_processor(
    memory: doubles.Memory, count_ms: list[float], held: bool
) -> None:
    """Since its look before; of KV that it waits for, not of blocks that it holds; looks for nothing cost nothing."""
    holdings = Holdings(memory, 1, 20)
    _, proxy, inner = agent(memory, holdings)
    proxy.get_new_notifs()
    assert count_ms[2] == 0
    request = {"reqs_in_batch": {"r"}} if held else {"reqs_to_recv": {"r": doubles.meta()}}
    holdings.take(doubles.metadata(**request))
    proxy.get_new_notifs()
    proxy.get_new_notifs()  # at once
    count_ms[0] += 8
    count_ms[1] += 6
    inner.notifications = {"P": [b"r:1"]}
    proxy.get_new_notifs()

    (notified,) = memory.of("transfer.notified")
    told = [(one.request, one.numbers, one.t_ns) for one in memory.of("transfer.notice_starved")]
    assert told == ([] if held else [("r", (1, 6_000_000, 8_000_000, 0), notified.t_ns)])
    assert count_ms[2] == (0 if held else 2)


def test_a_small_transfer_that_comes_back_done_has_no_pending_poll(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)
    inner.post, inner.states = "DONE", ["DONE"]
    handle = read(proxy)
    proxy.transfer(handle)
    proxy.check_xfer_state(handle)

    assert memory.of("transfer.post_ended")[0].numbers[3] == 1
    assert memory.of("transfer.done")[0].numbers[1:] == (0, 1, 0)


@pytest.mark.parametrize(("state", "reason"), [("ERR", "ERR"), (OSError("gone"), "OSError: gone")])
def test_a_transfer_that_fails_says_why_once(memory: doubles.Memory, state: Any, reason: str) -> None:
    _, proxy, inner = agent(memory)
    inner.states = [state, "ERR"]
    handle = read(proxy)
    proxy.transfer(handle)
    if isinstance(state, OSError):
        with pytest.raises(OSError, match="gone"):
            proxy.check_xfer_state(handle)
    else:
        assert proxy.check_xfer_state(handle) == "ERR"
    proxy.check_xfer_state(handle)

    assert [event.ref for event in memory.of("transfer.failed")] == [reason]


def test_a_post_or_a_preparation_that_raises_is_a_failure(memory: doubles.Memory) -> None:
    side, proxy, inner = agent(memory)
    side.enter("r", REMOTE)
    handle = read(proxy)
    inner.post = RuntimeError("no route")
    with pytest.raises(RuntimeError, match="no route"):
        proxy.transfer(handle)
    inner.post = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        read(proxy)

    assert [(event.request, event.ref) for event in memory.of("transfer.failed")] == [
        ("r", "RuntimeError: no route"),
        ("r", "OSError: no memory"),
    ]


def test_registrations_are_seen_leaving_and_arriving(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)
    fields = {"request_id": "r-on-D", "decode_engine_id": "D", "local_block_ids": [[1, 2]], "remote_port": 1}
    message = b"PUSH_REG:" + msgspec.msgpack.encode(fields)
    proxy.send_notif("rank-0", notif_msg=message)
    proxy.send_notif("rank-1", notif_msg=message)
    inner.notifications = {"d": [message, b"PUSH_REG:garbage"]}

    assert proxy.get_new_notifs() == {"d": [message, b"PUSH_REG:garbage"]}
    assert [event.numbers for event in memory.of("decode.registration_sent")] == [
        (1, len(message), 0, 0),
        (1, len(message), 1, 0),
    ]
    assert memory.of("registration.received")[0][1:4] == ("r-on-D", (1, 0, 0, 0), "D")
    assert memory.enabled


def test_a_completion_notification_is_the_readers_own_request_or_an_orphan(memory: doubles.Memory) -> None:
    holdings = Holdings(memory, 1, 20)
    holdings.take(doubles.metadata(reqs_to_recv={"a:b": doubles.meta()}))
    _, proxy, inner = agent(memory, holdings)
    inner.notifications = {"p": [b"a:b:1", b"unknown:1", b"\xff\xfe"]}
    proxy.get_new_notifs()

    assert [(event.stage, event.request) for event in memory.events[:2]] == [
        ("transfer.notified", "a:b"),
        ("notification.orphaned", "unknown"),
    ]
    assert memory.enabled


def test_the_stand_in_is_the_agent_in_everything_else(memory: doubles.Memory) -> None:
    _, proxy, inner = agent(memory)

    assert proxy.name == "agent"
    with pytest.raises(RuntimeError, match="telemetry is off"):
        proxy.get_xfer_telemetry("handle")
    with pytest.raises(AttributeError):
        _ = proxy.no_such_method
    assert inner.released == []


lengths = st.lists(st.integers(1, 4).map(lambda n: n * 100), min_size=1, max_size=30)


@given(lengths, st.data())
def test_bytes_are_those_of_the_chosen_descriptors_in_every_form(sizes: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    rows = [(1_000 * number, size, 0) for number, size in enumerate(sizes)]
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    strided = np.array([(0, size, 0, size, count) for size, count in runs])
    expected = sum(sizes[index] for index in chosen)

    for descs in (rows, np.array(rows), strided):
        found = Lengths.of(descs)
        assert found is not None
        assert found.total(chosen) == expected
        assert found.total(np.array(chosen, dtype=np.int64)) == expected


def test_descriptors_of_an_unknown_form_have_no_length() -> None:
    assert [Lengths.of(descs) for descs in (None, [], object(), np.zeros((0, 3)), [(1, 2)])] == [None] * 5


# Probe -------------------------------------------------------------------------------------------


def test_the_probe_sees_a_transfer_done_and_never_touches_a_released_one(memory: doubles.Memory) -> None:
    probe = Probe(memory, rate=1.0)
    _, proxy, inner = agent(memory, probe=probe)
    polled: set[int] = set()  # by identity: the doubles' handles are all equal
    released: set[int] = set()
    late: list[int] = []

    def check(handle: object) -> str:
        polled.add(id(handle))
        late.extend({id(handle)} & released)
        return "PROC"

    inner.release_xfer_handle = lambda handle: released.add(id(handle))
    probe._check = inner.check_xfer_state = check
    handles = [read(proxy) for _ in range(20)]
    for handle in handles:
        proxy.transfer(handle)
    until(lambda: len(polled) == 20)
    for handle in handles[1:]:
        proxy.release_xfer_handle(handle)
    polled.clear()
    until(lambda: polled)
    probe._check = lambda _handle: "DONE"
    until(lambda: memory.of("transfer.probed"))
    probe.stop()

    [probed] = memory.of("transfer.probed")
    assert late == []
    assert probed.numbers[0] == memory.of("transfer.prepared")[0].numbers[0]
    assert 0 < probed.numbers[1] <= probed.t_ns
    assert memory.enabled


def test_the_probe_is_off_unless_asked_for(memory: doubles.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTRACE_PROBE", raising=False)
    assert Probe.from_environment(memory) is None
    for value, wanted in (("0", False), ("often", False), ("0.5", True)):
        monkeypatch.setenv("KVTRACE_PROBE", value)
        assert (Probe.from_environment(memory) is not None) is wanted

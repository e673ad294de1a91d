"""The stand-in over real NIXL agents in one process: real bytes move, and what the events say of them is true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from instrumented_connectors.agent import AgentSide
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.probe import Probe
from tests import connector_doubles as doubles
from tests.waiting import until

BLOCKS, BLOCK_BYTES = 64, 16_384


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    """Skip without NIXL, which brings torch along: seconds that a process which only collects tests need not spend."""
    pytest.importorskip("nixl._api")


class Side:
    """One agent with a block of memory, watched, and the descriptors of its peer."""

    def __init__(self, name: str, memory: doubles.Memory, probe: Probe | None = None) -> None:
        from nixl import _api as nixl

        os.environ.setdefault("UCX_TLS", "tcp,self,sm")
        self.holdings = Holdings(memory, 0, 20)
        self.bytes = np.zeros(BLOCKS * BLOCK_BYTES, dtype=np.uint8)
        self.side = AgentSide(memory, self.holdings, 0, probe)
        self.agent: Any = self.side.attach(nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"])))
        self.name = name
        self.agent.register_memory(
            self.agent.get_reg_descs([(self.bytes.ctypes.data, self.bytes.nbytes, 0, "")], "DRAM")
        )
        self.local = self._prepare("NIXL_INIT_AGENT", self.bytes.ctypes.data)

    def _prepare(self, agent: str, address: int) -> Any:
        rows = np.array([(address + BLOCK_BYTES * block, BLOCK_BYTES, 0) for block in range(BLOCKS)], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(rows, "DRAM"))

    def meet(self, peer: Side) -> None:
        self.agent.add_remote_agent(peer.agent.get_agent_metadata())
        self.remote = self._prepare(peer.name, peer.bytes.ctypes.data)

    def move(self, operation: str, blocks: list[int], message: bytes) -> list[str]:
        """Move the blocks, polling until done; return the states that the polls saw."""
        indices = np.array(blocks, dtype=np.int32)
        handle = self.agent.make_prepped_xfer(operation, self.local, indices, self.remote, indices, notif_msg=message)
        self.agent.transfer(handle)
        states = []
        while not states or states[-1] == "PROC":
            states.append(self.agent.check_xfer_state(handle))
        self.agent.release_xfer_handle(handle)
        return states


@pytest.fixture
def probe(memory: doubles.Memory) -> Iterator[Probe]:
    probe = Probe(memory, rate=1.0)
    yield probe
    probe.stop()
    if probe._thread is not None:
        probe._thread.join()


@pytest.fixture
def pair(memory: doubles.Memory) -> tuple[Side, Side]:
    """Return P and D, who know each other."""
    p, d = Side("P", memory), Side("D", memory)
    p.meet(d)
    d.meet(p)
    return p, d


def notified(memory: doubles.Memory, reader: Side, stage: str) -> doubles.Emitted:
    def is_in() -> list[doubles.Emitted]:
        reader.agent.get_new_notifs()
        return memory.of(stage)

    until(is_in)
    return memory.of(stage)[0]


def test_a_real_read(memory: doubles.Memory, pair: tuple[Side, Side]) -> None:
    p, d = pair
    p.bytes[:] = 7
    p.holdings.take(doubles.metadata(reqs_in_batch={"r-on-P"}))
    d.side.enter("r-on-D", "r-on-P")
    states = d.move("READ", [1, 5, 9], b"r-on-P:1")
    seen = notified(memory, p, "transfer.notified")

    assert d.bytes.sum() == 7 * 3 * BLOCK_BYTES
    assert [name for name in memory.names if name.startswith("transfer")] == [
        "transfer.prepared", "transfer.post_started", "transfer.post_ended", "transfer.done", "transfer.notified",
    ]  # fmt: skip
    prepared, ended, done = (memory.of(f"transfer.{name}")[0] for name in ("prepared", "post_ended", "done"))
    assert (prepared.request, prepared.ref, seen.request) == ("r-on-D", "r-on-P", "r-on-P")
    assert ended.numbers[1:3] == (3 * BLOCK_BYTES, 3)
    assert done.numbers[2] == len(states)
    assert memory.enabled


def test_a_real_write_that_fails_leaves_the_agent_as_it_was(memory: doubles.Memory, pair: tuple[Side, Side]) -> None:
    p, d = pair
    with pytest.raises(Exception, match=r"\w"):
        p.move("WRITE", [BLOCKS + 1], b"r-on-D:1")
    p.bytes[:] = 3
    p.side.enter("r-on-P", "")
    d.holdings.take(doubles.metadata(reqs_to_recv={"r-on-D": doubles.meta()}))
    p.move("WRITE", [0], b"r-on-D:1")

    assert notified(memory, d, "transfer.notified").request == "r-on-D"
    assert d.bytes.sum() == 3 * BLOCK_BYTES
    assert [event.request for event in memory.of("transfer.done")] == ["r-on-P"]
    assert memory.enabled


def test_the_probe_follows_real_transfers_and_takes_nothing_from_them(memory: doubles.Memory, probe: Probe) -> None:
    p, d = Side("P", memory, probe), Side("D", memory)
    p.meet(d)
    d.meet(p)
    p.bytes[:] = 1
    for _ in range(50):
        assert p.move("WRITE", list(range(BLOCKS)), b"r:1")[-1] == "DONE"

    assert d.bytes.sum() == BLOCKS * BLOCK_BYTES
    assert len(memory.of("transfer.done")) == 50
    done = {event.numbers[0]: event for event in memory.of("transfer.done")}
    for probed in memory.of("transfer.probed"):
        assert probed.numbers[1] <= probed.t_ns
        assert probed.numbers[0] in done
    assert memory.enabled

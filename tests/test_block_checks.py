"""Checksums of blocks over doubles of vLLM and real memory: the same on both sides, and honest where none was taken."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from instrumented_connectors.agent import AgentSide
from instrumented_connectors.block_checks import BlockChecks
from instrumented_connectors.block_news import NEWS_ATTRIBUTE, News
from instrumented_connectors.holdings import Holdings
from instrumented_connectors.sampling import Sampling
from tests import connector_doubles as doubles
from tests.waiting import until

REGIONS, LENGTH = 3, 64
P_ID, D_ID = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    """Skip without torch: seconds to import, which a process that only collects tests need not spend."""
    pytest.importorskip("torch")


class Side:
    """One worker with memory of its own, watched, whose blocks hold other bytes than anybody else's."""

    def __init__(self, *, pulls: bool, blocks: int, seed: int, rate: float = 1.0, **worker: Any) -> None:
        import torch

        self.tracer = doubles.Memory()
        self.blocks = blocks
        self.kv = torch.from_numpy(
            np.random.default_rng(seed).integers(0, 256, (REGIONS, blocks, LENGTH), dtype=np.uint8)
        )
        self.connector = doubles.Connector()
        for name in ("register_kv_caches", "unregister_kv_caches"):
            setattr(self.connector, name, self.connector._hook(name))
        self.agent = AgentSide(self.tracer, Holdings(self.tracer, 1, 20), 1, None)
        proxy = self.agent.attach(doubles.Agent())
        self.worker = SimpleNamespace(num_blocks=blocks, nixl_wrapper=proxy, **worker)
        self.checks = BlockChecks(self.tracer, Sampling(rate), 1, pulls=pulls)
        self.checks.attach(self.connector, self.worker, self.agent)
        base = self.kv.data_ptr()
        rows = np.array([(base + at * LENGTH, LENGTH, 0) for at in range(REGIONS * blocks)])
        self.own = proxy.prep_xfer_dlist("NIXL_INIT_AGENT", proxy.get_xfer_descs(rows, "DRAM"))
        self.connector.register_kv_caches({"layers": self.kv})

    def step(self, news: News | None = None, **fields: Any) -> None:
        """Run a step up to the loading of its metadata."""
        metadata = doubles.metadata(**fields)
        if news is not None:
            setattr(metadata, NEWS_ATTRIBUTE, news)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)

    def move(self, request: str, remote: str, own: list[int], other: list[int], other_blocks: int, **how: Any) -> None:
        """Prepare the transfer of these blocks, as vLLM does on the side that drives it."""
        local, there = (
            np.concatenate([np.array(ids) + region * count for region in range(REGIONS)])
            for ids, count in ((own, self.blocks), (other, other_blocks))
        )
        indices = (list(local), list(there)) if how.get("lists") else (local, there)
        self.agent.enter(request, remote)
        self.worker.nixl_wrapper.make_prepped_xfer(
            "READ", how.get("handle", self.own), indices[0], "there", indices[1], notif_msg=remote.encode() + b":1"
        )
        self.agent.enter("", "")

    def end(self, **results: Any) -> None:
        self.connector.returns["get_transfer_results"] = doubles.results(**results)
        self.connector.get_transfer_results(set())

    def said(self, stage: str, count: int) -> dict[int, int]:
        """Return the checksums by block once there are so many of them."""
        until(lambda: len(self.tracer.of(stage)) >= count)
        assert {event.numbers[3] for event in self.tracer.of(stage)} <= {REGIONS * LENGTH}
        return {event.numbers[1]: event.numbers[2] for event in self.tracer.of(stage)}

    def unchecked(self) -> tuple[int, str]:
        """Return how many blocks were not checked, and why, once that is said."""
        until(lambda: self.tracer.of("transfer.unchecked"))
        (event,) = self.tracer.of("transfer.unchecked")
        return event.numbers[1], event.ref


def a_pull(blocks: tuple[list[int], list[int]] = ([2, 3, 4], [5, 6, 7]), **d: Any) -> tuple[Side, Side]:
    """Return P and D of a pull whose bytes have arrived; D has not reported yet."""
    kept, own = blocks
    p, d_side = Side(pulls=True, blocks=16, seed=1), Side(pulls=True, blocks=20, seed=2, **d)
    p.step(News({P_ID: [kept]}, []))
    d_side.step(reqs_to_recv={D_ID: doubles.meta((own,), remote=P_ID)})
    d_side.move(D_ID, P_ID, own, kept[-len(own) :], p.blocks)
    d_side.kv[:, own] = p.kv[:, kept[-len(own) :]]
    return p, d_side


def test_a_pull_has_the_same_checksums_under_ps_numbers() -> None:
    """P keeps three blocks; D had the first cached and reads the other two."""
    p, d = a_pull(([2, 3, 4], [6, 7]))
    d.end(received=[D_ID])
    computed, arrived = p.said("prefill.checked", 3), d.said("decode.checked", 2)

    assert computed.keys() == {2, 3, 4}
    assert arrived == {block: computed[block] for block in (3, 4)}
    assert len(set(computed.values())) == 3
    assert (p.tracer.enabled, d.tracer.enabled) == (True, True)
    assert {event.request for event in d.tracer.of("decode.checked")} == {D_ID}


def test_a_push_has_the_same_checksums_under_ds_numbers() -> None:
    p, d = Side(pulls=False, blocks=16, seed=1), Side(pulls=False, blocks=20, seed=2)
    p.step(News({P_ID: [[2, 3, 4]]}, []))
    d.step(reqs_to_recv={D_ID: doubles.meta(([5, 6, 7],), remote="")})
    p.move(P_ID, D_ID, [2, 3, 4], [5, 6, 7], d.blocks)
    d.kv[:, [5, 6, 7]] = p.kv[:, [2, 3, 4]]
    d.end(received=[D_ID])

    assert p.said("prefill.checked", 3) == d.said("decode.checked", 3)
    assert {event.ref for event in p.tracer.of("prefill.checked")} == {D_ID}


def test_one_changed_byte_in_any_region_changes_its_blocks_checksum_alone() -> None:
    for region in range(REGIONS):
        p, d = a_pull()
        d.kv[region, 6, 17] ^= 1
        d.end(received=[D_ID])
        computed, arrived = p.said("prefill.checked", 3), d.said("decode.checked", 3)

        assert [block for block in (2, 3, 4) if computed[block] != arrived[block]] == [3]


def test_the_last_blocks_are_those_of_the_moment_at_which_d_reports() -> None:
    """D's next step writes into them, before the thread has got to them."""
    p, d = a_pull(([1, 2, 3, 4], [5, 6, 7, 8]))
    with d.checks._reading:
        d.end(received=[D_ID])
        d.kv[:, [7, 8]] = 0

    assert d.said("decode.checked", 4) == p.said("prefill.checked", 4)


def test_blocks_that_were_given_up_before_they_were_read_are_unchecked() -> None:
    """On D the request is over, on P it lets go: what comes into the blocks then is nobody's fault."""
    p, d = a_pull(([1, 2, 3, 4], [5, 6, 7, 8]))
    p.said("prefill.checked", 4)
    with d.checks._reading:
        d.end(received=[D_ID])
        d.step(News({}, [D_ID]))
        d.kv[:] = 0
    q = Side(pulls=True, blocks=16, seed=3)
    with q.checks._reading:
        q.step(News({P_ID: [[2, 3]]}, []))
        q.end(sent=[P_ID])
        q.kv[:] = 0

    assert d.unchecked() == (2, "the blocks were let go before they were read")
    assert d.said("decode.checked", 2).keys() == {3, 4}, "copied when D reported"
    assert q.unchecked() == (2, "the blocks were let go before they were read")
    assert q.tracer.of("prefill.checked") == []


def test_a_block_that_changes_hands_while_it_is_read_does_not_count() -> None:
    q = Side(pulls=True, blocks=16, seed=3)
    read = q.checks._memory.checksum

    def interrupted(block: int) -> int:
        checksum = read(block)
        q.checks._end(P_ID)
        return checksum

    q.checks._memory.checksum = interrupted
    q.step(News({P_ID: [[2, 3]]}, []))

    assert q.unchecked() == (2, "the blocks were let go before they were read")
    assert q.tracer.of("prefill.checked") == []


def test_what_cannot_be_compared_is_said_with_its_reason() -> None:
    def told(groups: Any = ([5, 6],), lists: bool = False, handle: Any = None, **worker: Any) -> tuple[int, str]:
        d = Side(pulls=True, blocks=20, seed=2, **worker)
        d.step(reqs_to_recv={D_ID: doubles.meta(groups, remote=P_ID)})
        d.move(D_ID, P_ID, [5, 6], [1, 2], 16, lists=lists, **({} if handle is None else {"handle": handle}))
        d.end(received=[D_ID])
        assert d.unchecked()
        assert d.tracer.of("decode.checked") == []
        assert d.tracer.enabled
        return d.unchecked()

    assert told(groups=([5], [6])) == (2, "the model has several kinds of KV cache")
    assert told(_has_mamba=True) == (2, "the model has several kinds of KV cache")
    assert told(dcp_size=2)[1] == "context or pipeline parallel ranks hold parts of the blocks"
    assert told(enable_permute_local_kv=True)[1] == "D rearranges blocks that arrive"
    assert told(lists=True)[1] == "the blocks' layout is not understood"
    assert told(handle=SimpleNamespace())[1] == "the blocks' layout is not understood"


def test_a_transfer_that_was_not_seen_leaves_blocks_unchecked() -> None:
    d = Side(pulls=True, blocks=20, seed=2)
    d.step(reqs_to_recv={D_ID: doubles.meta(([5, 6],), remote=P_ID)})
    d.end(received=[D_ID])

    assert d.unchecked() == (2, "no transfer of these blocks was seen")


def test_failed_loads_and_requests_that_were_not_chosen_are_left_alone() -> None:
    for rate, results in ((1.0, {"failed": [D_ID]}), (0.0, {"received": [D_ID]})):
        _, d = a_pull(rate=rate)
        d.end(**results)
        time.sleep(0.05)

        assert not [name for name in d.tracer.names if name.endswith("checked")]


def test_the_schedulers_blocks_may_be_several_of_nixls() -> None:
    """Of two logical blocks, 2 and 3, NIXL knows 4, 5, 6 and 7; all of the last two are copied."""
    d = Side(pulls=True, blocks=20, seed=2, _physical_blocks_per_logical_kv_block=2)
    d.step(reqs_to_recv={D_ID: doubles.meta(([2, 3],), remote=P_ID)})
    d.move(D_ID, P_ID, [4, 5, 6, 7], [0, 1, 2, 3], 16)
    with d.checks._reading:
        d.end(received=[D_ID])
        assert len(d.checks._holds[D_ID].copies) == 4

    assert d.said("decode.checked", 4).keys() == {0, 1, 2, 3}


def test_an_error_on_the_thread_ends_tracing_and_nothing_else() -> None:
    p = Side(pulls=True, blocks=16, seed=1)
    p.checks._memory.checksum = lambda _block: 1 // 0
    p.step(News({P_ID: [[2]]}, []))
    until(lambda: p.tracer.disabled)
    p.step(News({P_ID: [[2]]}, []))

    assert p.tracer.disabled == [("checks", "integer division or modulo by zero")]
    assert p.connector.calls.count("bind_connector_metadata") == 2


def test_no_block_is_read_after_the_memory_was_given_back() -> None:
    p = Side(pulls=True, blocks=16, seed=1)
    p.connector.unregister_kv_caches()
    p.step(News({P_ID: [[2]]}, []))
    time.sleep(0.05)

    assert p.tracer.of("prefill.checked") == []
    assert p.tracer.enabled


def test_too_many_at_once_are_unchecked_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrumented_connectors.block_checks._WAITING_MOST", 2)
    p = Side(pulls=True, blocks=16, seed=1)
    with p.checks._reading:
        for number in range(6):
            p.step(News({f"cmpl-{number}": [[number]]}, []))
    until(lambda: len(p.tracer.of("transfer.unchecked")) + len(p.tracer.of("prefill.checked")) == 6)

    assert {event.ref for event in p.tracer.of("transfer.unchecked")} == {"too many requests to check at once"}
    assert len(p.tracer.of("transfer.unchecked")) >= 3

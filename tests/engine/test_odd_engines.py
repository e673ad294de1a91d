"""Engines that are not the usual pair: several ranks, a KV pool too small, prefix caches, checked blocks.

Two labs carry all of it: pull, with two ranks on D against one on P; and push, with few blocks on D.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtrace.findings.checks import findings
from kvtrace.findings.gather import gather
from kvtrace.findings.model import Finding
from kvtrace.lab import workload
from kvtrace.store import Store
from tests.engine import programs
from tests.engine.deployment import Answer, Deployment
from tests.waiting import until
from tests.walk_compare import compare

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BLOCK_TOKENS = 128
BLOCK_BYTES = 524_288  # 128 tokens of 4 layers, 2 KV heads, K and V of 64 numbers of 4 bytes
SLOW_RANK_MS = 500.0
OTHER_RANK_MS = 150.0
"""How late the other rank may notice its own KV now and then: three ranks share two cores."""
SLOW_REQUESTS = 22
LATE_PREFILL_MS = 800.0
BURSTS, BURST = 4, 3
CHECKED_TRIES = 8
WALKED_REQUESTS = 10


def prompt(seed: int, number: int, tokens: int) -> str:
    """Return a prompt that no other request of these labs begins with."""
    return workload.prompt(seed, number, tokens)


def found(deployment: Deployment) -> dict[str, Finding]:
    """Return the findings about everything that the lab has served so far, by name."""
    with Store.open(deployment.record(), "read") as store:
        return {finding.name: finding for finding in findings(gather(store, None))}


def of_rank(answer: Answer, rank: int) -> float:
    """Return how long the path waited for a rank of D, ms."""
    named = f"rank {rank} of D"
    return sum((s["end_ns"] - s["start_ns"]) / 1e6 for s in answer.segments if s["waited_for"].startswith(named))


def settled(deployment: Deployment, kind: str) -> Answer:
    """Return the last answer of a kind once its blocks' checks are in."""
    answers: list[Answer] = []

    def is_in() -> bool:
        answers[:] = deployment.answers()[kind]
        return bool(answers) and answers[-1].row["checked_blocks"] is not None

    until(is_in, what=f"the checks of {kind} are in")
    time.sleep(0.2)  # what the other side may still have to say
    return deployment.answers()[kind][-1]


def check_known_prompt(deployment: Deployment) -> None:
    """Send a prompt twice: the second time one block moves, since vLLM takes a prompt's last block in any case."""
    text = prompt(11, 0, 4 * BLOCK_TOKENS + 40)
    for kind in ("new", "known"):
        deployment.send(kind, prompt=text)
    answers = deployment.answers()
    new, known = (answers[kind][-1].row for kind in ("new", "known"))

    assert {new["verdict"], known["verdict"]} == {"complete"}
    assert (new["moved_bytes"], known["moved_bytes"]) == (5 * BLOCK_BYTES, BLOCK_BYTES)
    assert new["transfers"] == known["transfers"] == (2 if deployment.mode == "pull" else 1)
    assert new["held_blocks"] == known["held_blocks"] == 5
    assert known["held_ns"] is not None


# Two ranks on D ---------------------------------------------------------------------------------------------


def test_a_rank_that_is_slow_is_named(two_ranks: Deployment) -> None:
    """Rank 1 notices each KV 500 ms late: the path waits for it, the note names it, and so does a finding."""
    point = ("decode", "nixl.sees_done_on_rank_1")
    for number in range(SLOW_REQUESTS):
        two_ranks.send("slow", {point: SLOW_RANK_MS}, prompt=prompt(8, number, 2 * BLOCK_TOKENS))
    answers = two_ranks.answers()["slow"]
    straggler = found(two_ranks)["rank.last"]

    assert len(two_ranks.held_ms["slow"]) == len(answers) == SLOW_REQUESTS
    for answer in answers:
        programs.assert_exact({**answer.row, "segments": list(answer.segments)})
        assert answer.row["verdict"] == "complete"
        assert (answer.row["straggler_rank"], answer.row["transfers"]) == (1, 2)
        assert answer.row["straggler_ns"] >= (SLOW_RANK_MS - OTHER_RANK_MS) * 1e6
        assert of_rank(answer, 1) >= SLOW_RANK_MS - OTHER_RANK_MS
        assert answer.causes_ms["detection"] >= SLOW_RANK_MS - 50
        assert "it waited for rank 1 of D" in answer.row["note"]
    assert statistics.median(answer.row["straggler_ns"] for answer in answers) >= (SLOW_RANK_MS - 50) * 1e6
    assert statistics.median(of_rank(answer, 1) for answer in answers) >= SLOW_RANK_MS - 50
    assert straggler.sentence.startswith("Rank 1 of ")
    assert straggler.stake_ns >= SLOW_REQUESTS * (SLOW_RANK_MS - 50) * 1e6


def test_sql_walks_what_two_ranks_read(two_ranks: Deployment) -> None:
    """Each rank of D reads for itself, from the one of P: SQL answers for nearly all, as the reference does."""
    for number in range(WALKED_REQUESTS):
        two_ranks.send("walked", prompt=prompt(12, number, 2 * BLOCK_TOKENS))
    with Store.open(two_ranks.record(), "read") as store:
        compare(store)
        rows = store.rows("SELECT unwalked, count(*) AS n FROM walk_request GROUP BY ALL ORDER BY n DESC")
        moved = store.rows(
            "SELECT count(*) AS n, count(*) FILTER (walked) AS walked "
            "FROM request JOIN walk_request USING (request_id) WHERE transfers = 2"
        )[0]

    assert moved["n"] >= WALKED_REQUESTS
    assert moved["walked"] >= 0.8 * moved["n"], rows


def test_ranks_of_other_widths_leave_blocks_unchecked(two_ranks: Deployment) -> None:
    """P's one rank and D's two cut blocks differently: no verdict rests on that, and the note says so."""
    two_ranks.send("wide", prompt=prompt(9, 0, 3 * BLOCK_TOKENS))
    row = settled(two_ranks, "wide").row

    assert row["verdict"] == "complete"
    assert (row["checked_blocks"], row["corrupt_blocks"], row["unchecked_blocks"]) == (0, 0, 6)
    assert "P has 1 and D 2 tensor-parallel ranks, which cut blocks differently" in row["note"]


def test_what_d_has_cached_is_not_read_and_the_rest_is_whole(two_ranks: Deployment) -> None:
    check_known_prompt(two_ranks)


# Few blocks on D --------------------------------------------------------------------------------------------


def test_requests_that_wait_for_blocks_on_d_are_told_so(few_blocks: Deployment) -> None:
    """Three requests reserve D's blocks while the router holds their prefill back; three more find none left."""
    held_back = {("router", "router.before_prefill_leg"): LATE_PREFILL_MS}
    late, waiting = set(), set()
    for burst in range(BURSTS):
        load = {"input_len": 380, "output_len": 1, "rate_qps": float("inf"), "requests": BURST, "quiet": True}
        with ThreadPoolExecutor(1) as pool:
            with few_blocks.faults.on(held_back):
                first = pool.submit(workload.run, few_blocks.lab.url, seed=100 + burst, **load)
                time.sleep(LATE_PREFILL_MS / 8000)
            second = workload.run(few_blocks.lab.url, seed=200 + burst, **load)
            late |= {record.client_request_id for record in first.result().completed}
        waiting |= {record.client_request_id for record in second.completed}
    with Store.open(few_blocks.record(), "read") as store:
        waited = store.rows(
            "SELECT client_request_id AS id, verdict, sum(s.end_ns - s.start_ns) / 1e6 AS ms, "
            "list(DISTINCT s.waited_for) AS waited_for FROM request JOIN segment AS s USING (request_key) "
            "WHERE s.cause = 'decode.capacity' GROUP BY ALL"
        )
    by_id = {row["id"]: row for row in waited if row["id"] in waiting}

    assert len(late) == len(waiting) == BURSTS * BURST
    assert {row["verdict"] for row in by_id.values()} == {"complete"}
    # Where the machine is so slow that a burst came before the other had its blocks, fewer wait so long.
    assert sum(row["ms"] >= LATE_PREFILL_MS / 4 for row in by_id.values()) >= BURSTS * BURST / 2
    assert any("those that wait for KV 9" in told for row in by_id.values() for told in row["waited_for"])
    shortage = found(few_blocks)["decode.capacity"]
    assert shortage.sentence.startswith("D is short of KV blocks, not of network: ")
    assert set(shortage.examples) <= {row["request_id"] for row in rows_of(few_blocks, waiting)}


def rows_of(deployment: Deployment, client_ids: set[str]) -> list[dict[str, object]]:
    """Return the rows of a client's requests."""
    with Store.open(deployment.record(), "read") as store:
        wanted = {"ids": sorted(client_ids)}
        return store.rows("SELECT * FROM request WHERE list_contains($ids, client_request_id)", wanted)


def test_what_d_has_cached_is_not_written_and_the_rest_is_whole(few_blocks: Deployment) -> None:
    check_known_prompt(few_blocks)


# Blocks that are not what P computed ------------------------------------------------------------------------


def checked(deployment: Deployment, kind: str, **settings: str) -> dict[str, object]:
    """Send requests until every block of one was compared, and return its row; P may let go before its are read."""
    for number in range(CHECKED_TRIES):
        point = {("decode", "corrupts"): settings["corrupts"]} if settings else {}
        deployment.send(kind, point, prompt=prompt(20 + len(kind), number, 380))
        row = dict(settled(deployment, kind).row)
        if row["checked_blocks"] == 3:
            return row
        assert row["corrupt_blocks"] <= row["checked_blocks"]
        assert row["unchecked_blocks"] == 3 - row["checked_blocks"]
    raise AssertionError(f"of {CHECKED_TRIES} requests none was compared whole: {row['note']}")


def test_a_block_that_changes_between_p_and_d_is_corrupt(few_blocks: Deployment) -> None:
    """One byte of the first block changes on D behind the write: that block is named, before and after all is well."""
    before = checked(few_blocks, "before")
    changed = checked(few_blocks, "changed", corrupts="1")
    after = checked(few_blocks, "after")

    assert few_blocks.held_ms["changed"], "no byte was changed"
    for row in (before, after):
        assert (row["verdict"], row["corrupt_blocks"], row["unchecked_blocks"]) == ("complete", 0, 0)
    assert (changed["verdict"], changed["checked_blocks"], changed["corrupt_blocks"]) == ("corrupt", 3, 1)
    assert "the output is suspect: 1 of 3 blocks on D differ from what P computed" in changed["note"]
    assert changed["request_id"] in found(few_blocks)["corrupt"].examples

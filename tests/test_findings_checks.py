"""The checks behind findings, on numbers alone: each sees its own fault and nothing else, and what is usual is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtrace import queries, stages
from kvtrace.findings import checks
from kvtrace.findings.model import CauseFacts, Detection, Facts, Group, Held, Late, Pacing, Posting, Straggler
from tests.test_findings import names
from tests.trace import MS

PLAIN = Group("push", "router", requests=100, ttft_ns=100 * 100 * MS)


def of_group(group: Group) -> list[str]:
    return names(checks.findings(Facts((group,))))


def cause(share: float, requests: int = 100) -> CauseFacts:
    return CauseFacts(requests, int(share * PLAIN.ttft_ns), int(share * 100 * MS), ("a",))


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("decode.capacity", {"causes": {"decode.capacity": cause(0.2, 10)}}),
        ("prefill.capacity", {"causes": {"prefill.capacity": cause(0.2, 10)}}),
        ("submit.wait", {"causes": {"submit.wait": cause(0.2)}}),
        ("writer.wake", {"causes": {"writer.wake": cause(0.2)}}),
        ("handshake", {"causes": {"handshake": CauseFacts(2, 4_000 * MS, 2_000 * MS)}}),
        ("unattributed", {"causes": {"unattributed": cause(0.2)}}),
        ("recomputed", {"verdicts": {"recomputed": CauseFacts(3, 0, 0)}}),
        ("no_handoff", {"verdicts": {"no handoff": CauseFacts(3, 0, 0)}}),
        ("expired", {"verdicts": {"expired": CauseFacts(3, 0, 0)}}),
        ("detection", {"detection": Detection(50, 2_000 * MS, 28 * MS, 28 * MS)}),
        ("post.descriptors", {"posting": Posting(100, 100, 2_000 * MS, 500 * MS, 1_888_000, 100 * 2**20)}),
        ("tpot.extension", {"pacing": Pacing(100, 10_000 * MS, 3_000 * MS, 2_000 * MS)}),
    ],
)  # fmt: skip
def test_each_check_sees_its_own_fault_and_nothing_else(name: str, faulty: dict[str, object]) -> None:
    assert of_group(PLAIN) == []
    assert of_group(replace(PLAIN, **faulty)) == [name]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faulty", "push", "pull"),
    [
        ({"causes": {"step.connector": cause(0.2)}}, "read notifications", "move posting"),
        ({"pacing": Pacing(100, 10_000 * MS, 3_000 * MS, 2_000 * MS)}, "read notifications", "move posting"),
        ({"detection": Detection(50, 2_000 * MS, 28 * MS, 28 * MS)}, "read notifications", "poll outside"),
        ({"causes": {"decode.capacity": cause(0.2)}}, "later reservation", "more KV memory"),
    ],
)
def test_a_remedy_is_that_of_the_mode(faulty: dict[str, object], push: str, pull: str) -> None:
    """Posts are on D's forward thread by pull alone, and D reserves long before the KV comes by push alone."""
    for mode, begins in (("push", push), ("pull", pull)):
        (found,) = checks.findings(Facts((replace(PLAIN, mode=mode, **faulty),)))  # type: ignore[arg-type]

        assert found.remedy.startswith(begins)


@pytest.mark.parametrize(
    "harmless",
    [
        {"causes": {name: cause(0.03) for name in stages.CAUSE_BY_NAME}},
        {"causes": {"prefill.forward": cause(0.9), "prefill.queue": cause(0.1)}},
        {"verdicts": {"complete": CauseFacts(100, 0, 0), "aborted": CauseFacts(50, 0, 0)}},
        {"detection": Detection(19, 9_000 * MS, 28 * MS, 28 * MS)},
        {"posting": Posting(100, 100, 2_000 * MS, 2_500 * MS, 1_888_000, 100 * 2**20)},
        {"pacing": Pacing(100, 10_000 * MS, 3_000 * MS, 0)},
    ],
)  # fmt: skip
def test_what_is_usual_is_no_finding(harmless: dict[str, object]) -> None:
    assert of_group(replace(PLAIN, **harmless)) == []  # type: ignore[arg-type]


def test_a_saturated_run_says_so_and_blames_no_wait() -> None:
    """Public case: 8 requests/s offered, 4.65 served."""
    group = replace(PLAIN, causes={"submit.wait": cause(0.5)})
    broken = replace(group, causes={"unattributed": cause(0.5)}, verdicts={"recomputed": CauseFacts(9, 0, 0)})
    facts = Facts((broken,), offered_rate_hz=8.0, served_rate_hz=4.65, saturated=True)
    (found,) = checks.findings(Facts((group,), offered_rate_hz=8.0, served_rate_hz=4.65, saturated=True))

    assert found.name == "saturated"
    assert "queue growth" in found.sentence
    assert "8.00 requests/s, served 4.65" in found.sentence
    assert names(checks.findings(facts)) == ["saturated", "unattributed", "recomputed"]
    assert {(one.kind, one.remedy) for one in [found, *checks.findings(facts)]} == {("", "")}
    assert all(one.remedy for one in checks.findings(replace(facts, saturated=False)))


def test_a_p90_is_told_of_twenty_requests_and_more() -> None:
    """Nineteen say little about their slowest tenth."""
    few, many = (replace(cause(0.2, requests), p90_ns=90 * MS) for requests in (19, 20))
    told = [
        one.sentence
        for seen in (few, many)
        for one in checks.findings(Facts((replace(PLAIN, causes={"decode.capacity": seen}),)))
    ]

    assert [": 19 of 100 " in told[0], "at p90" in told[0]] == [True, False]
    assert told[1] == (
        "D is short of KV blocks, not of network: 20 of 100 requests (push, scope router) waited for blocks that no "
        "computing request held, 20.0 ms at the median, 90.0 ms at p90, and 20 % of the time to first token of all 100 "
        "together."
    )


def test_a_lease_that_ended_too_early_asks_for_a_longer_one() -> None:
    """What frees P's blocks sooner would make it worse."""
    (found,) = checks.findings(Facts((replace(PLAIN, verdicts={"expired": CauseFacts(3, 0, 0)}),)))

    assert found.remedy.startswith("longer leases")
    assert "shorter" not in found.remedy


def test_the_rank_that_is_always_last_is_named() -> None:
    slow = Straggler("engine-d", 1, 100, 99, 2_000 * MS, 20 * MS)
    fair = replace(slow, last=50)

    (found,) = checks.findings(Facts((PLAIN,), stragglers=(slow,)))
    assert "Rank 1 of engine-d is the one that the others wait for in 99 % of 100 requests" in found.sentence
    assert (found.kind, found.remedy) == ("", "")
    assert checks.findings(Facts((PLAIN,), stragglers=(fair,))) == []


def test_blocks_held_after_aborts_and_lost_records_are_told() -> None:
    found = checks.findings(Facts((PLAIN,), held=Held(4, 120_000 * MS, 30_000 * MS), lost_records=7))

    assert names(found) == ["blocks.held", "records.lost"]
    assert "P held the blocks of 4 requests that were over for 30.0 s each, 30.0 s at most" in found[0].sentence
    assert checks.findings(Facts((PLAIN,), held=Held(2, 120_000 * MS, 60_000 * MS))) == []


def test_one_corrupt_hand_off_is_told_also_of_a_saturated_run() -> None:
    group = replace(PLAIN, verdicts={"corrupt": CauseFacts(1, 60 * MS, 60 * MS, ("r7",))})
    saturated = Facts((group,), offered_rate_hz=8.0, served_rate_hz=4.65)
    (found,) = checks.findings(Facts((group,)))

    assert (found.name, found.examples, found.query) == ("corrupt", ("r7",), "integrity")
    assert "In 1 request (push" in found.sentence
    assert "corrupt" in names(checks.findings(saturated))
    assert checks.findings(Facts((PLAIN,))) == []


def test_findings_are_ranked_by_the_time_at_stake() -> None:
    group = replace(PLAIN, causes={"submit.wait": cause(0.2), "writer.wake": cause(0.4)})

    assert of_group(group) == ["writer.wake", "submit.wait"]


def test_evidence_names_queries_that_exist() -> None:
    """Whatever a finding sends the reader to is there."""
    source = Path(checks.__file__).read_text()
    told = {name for name in queries.names() if f'"{name}"' in source}
    group = replace(
        PLAIN,
        causes={name: cause(0.5) for name in stages.CAUSE_BY_NAME},
        verdicts={
            name: CauseFacts(9, 0, 0)
            for name in ("recomputed", "no handoff", "expired", "failed", "incomplete", "corrupt")
        },
        late=Late(100, 50, 10 * MS, {"D's sender thread": MS}),
        detection=Detection(50, 2_000 * MS, 28 * MS, 28 * MS),
        posting=Posting(100, 100, 2_000 * MS, 500 * MS, 1_888_000, 100 * 2**20),
        pacing=Pacing(100, 10_000 * MS, 3_000 * MS, 2_000 * MS),
    )
    facts = Facts(
        (group,), (Straggler("d", 1, 100, 99, 9_000 * MS, MS),), Held(4, 120_000 * MS, 30_000 * MS), lost_records=1,
    )  # fmt: skip
    found = checks.findings(facts) + checks.findings(
        replace(facts, offered_rate_hz=8.0, served_rate_hz=4.0, saturated=True)
    )

    assert {finding.query for finding in found} == told

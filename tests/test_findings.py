"""Findings: none on a run with nothing wrong, on its twin with one fault that one, none on too little data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtrace import queries, stages
from kvtrace.analyze import analyze
from kvtrace.findings import checks, gather
from kvtrace.findings.model import CauseFacts, Detection, Facts, Finding, Group, Held, Late, Pacing, Posting, Straggler
from kvtrace.report import population
from kvtrace.store import Store
from tests.test_analyze import fill
from tests.trace import MS, Trace, pull, push

REQUESTS = 24
LAPSE_MS = 500.0


def run_of(make: Callable[[str], Trace], count: int = REQUESTS) -> Trace:
    """Return `count` hand-offs one after the other."""
    whole = Trace()
    for number in range(count):
        whole.events += make(f"r{number:03}").later(LAPSE_MS * number, 100 * (number + 1)).events
    return whole


def findings_of(path: Path, trace: Trace) -> list[Finding]:
    """Record a trace, work it out, and return what its numbers say."""
    with Store.open(path / "run.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        return checks.findings(gather.gather(store, population.load(store, {})))


def names(found: list[Finding]) -> list[str]:
    return [finding.name for finding in found]


@pytest.mark.parametrize(
    "make", [lambda name: push(4, name), pull, lambda name: push(24, name)], ids=["push", "pull", "push, just in time"]
)
def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path, make: Callable[[str], Trace]) -> None:
    assert findings_of(tmp_path, run_of(make)) == []


def _late(name: str) -> Trace:
    """D's leg leaves the router at 70: the registration is sent at 74."""
    trace = push(74, name).shifted(1, 69, only=["router.decode_sent", "decode.http_received", "decode.enqueued"])
    return trace.shifted(3.4, 69, only=["decode.allocated"]).shifted(3.7, 70.1, only=["decode.registration_queued"])


def _sequential(name: str) -> Trace:
    """P's reply takes 40 ms back to the router."""
    moved = {"router.prefill_returned"}
    trace = pull(name).shifted(33.5, 40)
    return trace.shifted(32.5, 40, only=moved) if moved else trace


def _staged(name: str) -> Trace:
    """P's blocks ride behind a step of 40 ms."""
    return push(4, name).shifted(32.9, 40)


def _posted(name: str) -> Trace:
    """Return a read whose post takes 40 ms; the wire is as before."""
    return pull(name).shifted(39.5, 40)


FAULTS = {
    "registration.late": _late,
    "router.waits": _sequential,
    "stage.wait": _staged,
    "post.descriptors": _posted,
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_one_finding(tmp_path: Path, name: str) -> None:
    found = findings_of(tmp_path, run_of(FAULTS[name]))

    assert names(found) == [name]
    assert found[0].stake_ns >= REQUESTS * 30 * MS
    assert found[0].examples
    assert set(found[0].examples) <= {f"r{number:03}" for number in range(REQUESTS)}


@pytest.mark.parametrize("name", FAULTS)
def test_few_requests_tell_nothing(tmp_path: Path, name: str) -> None:
    assert findings_of(tmp_path, run_of(FAULTS[name], count=checks.LEAST_REQUESTS - 1)) == []


def test_a_late_registration_names_what_it_waited_for(tmp_path: Path) -> None:
    (found,) = findings_of(tmp_path, run_of(_late))

    assert "late in 100 % of 24 push requests" in found.sentence
    assert "the router sends D's leg after P's" in found.sentence
    assert found.grade == "explained"


# Checks on numbers alone ------------------------------------------------------------------------------------

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
        ("post.descriptors", {"posting": Posting(100, 2_000 * MS, 500 * MS, 1_888_000, 100 * 2**20)}),
        ("tpot.extension", {"pacing": Pacing(100, 10_000 * MS, 3_000 * MS, 2_000 * MS)}),
    ],
)  # fmt: skip
def test_each_check_sees_its_own_fault_and_nothing_else(name: str, faulty: dict[str, object]) -> None:
    assert of_group(PLAIN) == []
    assert of_group(replace(PLAIN, **faulty)) == [name]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "harmless",
    [
        {"causes": {name: cause(0.03) for name in stages.CAUSE_BY_NAME}},
        {"causes": {"prefill.forward": cause(0.9), "prefill.queue": cause(0.1)}},
        {"verdicts": {"complete": CauseFacts(100, 0, 0), "aborted": CauseFacts(50, 0, 0)}},
        {"detection": Detection(19, 9_000 * MS, 28 * MS, 28 * MS)},
        {"posting": Posting(100, 2_000 * MS, 2_500 * MS, 1_888_000, 100 * 2**20)},
        {"pacing": Pacing(100, 10_000 * MS, 3_000 * MS, 0)},
    ],
)  # fmt: skip
def test_what_is_usual_is_no_finding(harmless: dict[str, object]) -> None:
    assert of_group(replace(PLAIN, **harmless)) == []  # type: ignore[arg-type]


def test_a_saturated_run_says_so_and_blames_no_wait() -> None:
    """Public case: 8 requests/s offered, 4.65 served."""
    group = replace(PLAIN, causes={"submit.wait": cause(0.5)})
    (found,) = checks.findings(Facts((group,), offered_rate_hz=8.0, served_rate_hz=4.65))

    assert found.name == "saturated"
    assert "queue growth" in found.sentence
    assert "8.00 requests/s, served 4.65" in found.sentence


def test_the_rank_that_is_always_last_is_named() -> None:
    slow = Straggler("engine-d", 1, 100, 99, 2_000 * MS, 20 * MS)
    fair = replace(slow, last=50)

    (found,) = checks.findings(Facts((PLAIN,), stragglers=(slow,)))
    assert "Rank 1 of engine-d is the one that the others wait for in 99 % of 100 requests" in found.sentence
    assert checks.findings(Facts((PLAIN,), stragglers=(fair,))) == []


def test_blocks_held_after_aborts_and_lost_records_are_told() -> None:
    found = checks.findings(Facts((PLAIN,), held=Held(4, 120_000 * MS, 30_000 * MS), lost_records=7))

    assert names(found) == ["blocks.held", "records.lost"]
    assert "for 30.0 s each" in found[0].sentence
    assert checks.findings(Facts((PLAIN,), held=Held(2, 120_000 * MS, 60_000 * MS))) == []


def test_one_corrupt_hand_off_is_told_also_of_a_saturated_run() -> None:
    group = replace(PLAIN, verdicts={"corrupt": CauseFacts(1, 60 * MS, 60 * MS, ("r7",))})
    saturated = Facts((group,), offered_rate_hz=8.0, served_rate_hz=4.65)
    (found,) = checks.findings(Facts((group,)))

    assert (found.name, found.examples, found.query) == ("corrupt", ("r7",), "integrity")
    assert "In 1 requests" in found.sentence
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
        posting=Posting(100, 2_000 * MS, 500 * MS, 1_888_000, 100 * 2**20),
        pacing=Pacing(100, 10_000 * MS, 3_000 * MS, 2_000 * MS),
    )
    facts = Facts(
        (group,), (Straggler("d", 1, 100, 99, 9_000 * MS, MS),), Held(4, 120_000 * MS, 30_000 * MS), lost_records=1,
    )  # fmt: skip
    found = checks.findings(facts) + checks.findings(replace(facts, offered_rate_hz=8.0, served_rate_hz=4.0))

    assert {finding.query for finding in found} == told

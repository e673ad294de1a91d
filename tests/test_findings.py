"""Findings of recorded runs: none where nothing is wrong, on the twin with one fault that one, none of too few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrace import queries, stages
from kvtrace.analyze import analyze
from kvtrace.findings import checks, gather
from kvtrace.findings.model import Finding
from kvtrace.report import population
from kvtrace.store import Store
from kvtrace.wording import ms
from tests.field.published import joined
from tests.field.scenes import engines_only, renamed, repeated, unanswered
from tests.test_analyze import fill
from tests.test_pace import decoding
from tests.trace import MS, P, Trace, pull, push

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


def _without_core(name: str) -> Trace:
    """P's forward takes 40 ms longer, for which its thread has no processor."""
    return push(4, name).shifted(20, 40).at(70.5, stages.WORKER_STARVED, "", 1, 0, 40 * MS, 0, process=P)


FAULTS = {
    "processor.wait": _without_core,
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


def _wide(name: str) -> Trace:
    """Return a read of eight ranks, each of whose posts takes 40 ms at the same time."""
    trace = pull(name).shifted(39.5, 40)
    d = f"cmpl-{name}-0-bbbbbbbb"
    for rank in range(1, 8):
        number = 20 + rank
        trace.at(38.5, stages.PREPARED, d, number, 20, rank).at(39, stages.POST_STARTED, d, number)
        trace.at(79.9, stages.POST_ENDED, d, number, 1_300_000, 20).at(82, stages.TRANSFER_DONE, d, number)
    return trace


def test_ranks_that_post_side_by_side_do_not_share_the_time(tmp_path: Path) -> None:
    """The path has one rank's post of 41 ms, whatever the number of ranks."""
    (wide,) = findings_of(tmp_path, run_of(_wide))

    assert wide.name == "post.descriptors"
    assert "Posting takes longer than the wire: 41.0 ms a request against at most 3.00 ms on average" in wide.sentence
    assert "(posts at p90: 41.0 ms)" in wide.sentence
    assert "with 20 descriptors of 65,000 bytes a transfer" in wide.sentence


def test_an_id_that_repeats_is_as_many_requests_as_there_are(tmp_path: Path) -> None:
    """24 requests under one id, without a router to tell them apart: each is counted, in causes and in paces."""
    named = {
        f"cmpl-r{number:03}-0-{side * 8}": f"cmpl-same-0-{side * 8}" for number in range(REQUESTS) for side in "ab"
    }
    trace = renamed(engines_only(run_of(_decoding_long)), named)
    trace.events = [e._replace(request="same") if e.request.startswith("r0") else e for e in trace.events]
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        (group,) = gather.gather(store, None).groups

    assert group.requests == REQUESTS
    assert {name: seen.requests for name, seen in group.causes.items()}["prefill.forward"] == REQUESTS
    assert (group.pacing.requests, group.pacing.decode_ns) == (REQUESTS, REQUESTS * 36 * MS)


def _decoding_long(name: str) -> Trace:
    return decoding(push(4, name))


def test_a_findings_median_is_the_one_that_the_table_and_the_query_show(tmp_path: Path) -> None:
    """Of 24 waits none lies in the middle: everybody says half-way between the two that are next to it.

    The p90 lies likewise between two, and the share is one of all requests.
    """
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, run_of(lambda name: push(4, name).shifted(32.9, 40 + 4 * int(name[1:]))))
        analyze(store)
        summary, query = population.summary(store, {}), queries.load("causes")
        (asked,) = (row for row in store.rows(query.sql, query.bind({})) if row["cause"] == "stage.wait")
        waits = "SELECT sum(end_ns - start_ns)::BIGINT FROM segment WHERE cause = 'stage.wait' GROUP BY request_key"
        waited_ns = sorted(waited for (waited,) in store.select(waits).values)
        (p90_ns,) = store.select(f"SELECT quantile_cont(ns, 0.9) FROM ({waits}) AS t(ns)").values[0]  # noqa: S608 -- ours
        (ttft_ns,) = store.select("SELECT sum(ttft_ns) FROM request").values[0]
    middle_ns = (waited_ns[11] + waited_ns[12]) // 2

    (found,) = summary["findings"]
    (shown,) = (row for row in summary["groups"][0]["causes"] if row["cause"] == "stage.wait")
    assert waited_ns[12] - waited_ns[11] == 4 * MS
    assert shown["median_ns"] == middle_ns
    assert asked["p50_ms"] == pytest.approx(middle_ns / 1e6)
    assert waited_ns[20] < p90_ns < waited_ns[21]
    assert found["sentence"].endswith(
        f": {ms(middle_ns)} at the median, {ms(p90_ns)} at p90, and "
        f"{100 * sum(waited_ns) / ttft_ns:.0f} % of the time to first token of all 24 together."
    )


def _given_up(trace: Trace) -> Trace:
    """Add a pull whose lease ends after 480 s, unread: nobody has an answer of it."""
    lost = unanswered(engines_only(pull("x"))).without("transfer.done").later(100, 90)
    return repeated(trace, lost.at(480_000, stages.LEASE_EXPIRED, "cmpl-x-0-aaaaaaaa"))


def test_a_request_that_was_never_answered_was_not_served(tmp_path: Path) -> None:
    """One of 25 requests expires at 480 s: the others were served as fast as they came, and their fault is found."""
    trace = engines_only(run_of(_posted))
    (tmp_path / "plain").mkdir()
    found, plain = findings_of(tmp_path, _given_up(trace)), findings_of(tmp_path / "plain", trace)

    assert names(found) == names(plain) == ["post.descriptors"]


def test_requests_that_hang_are_not_served(tmp_path: Path) -> None:
    """Of 48 requests every second gets no answer, and each is seen at once for the last time: half were served."""
    whole = Trace()
    for number in range(2 * REQUESTS):
        one = pull(f"r{number:03}")
        one = one if number % 2 else unanswered(one).without("transfer.done")
        whole.events += one.later(LAPSE_MS * number, 100 * (number + 1)).events
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, whole)
        analyze(store)
        load = population.load(store, {})

    assert load is not None
    assert (load["offered_rate_hz"], load["saturated"]) == (2.0, False)
    assert load["served_rate_hz"] == pytest.approx(1.0)


def test_a_late_registration_names_what_it_waited_for(tmp_path: Path) -> None:
    (found,) = findings_of(tmp_path, run_of(_late))

    assert "late in 100 % of 24 push requests" in found.sentence
    assert "the router sends D's leg after P's" in found.sentence
    assert found.grade == "explained"


def _sent_to_p_late(name: str) -> Trace:
    """Return a pull whose router takes 40 ms to send P's own leg, and 1 ms for D's."""
    return pull(name).shifted(0.9, 40)


def test_the_way_to_p_is_not_the_way_from_p_to_d(tmp_path: Path) -> None:
    """P's reply takes 1 ms, dispatch and hop of D's leg 2 ms: that P's leg was sent late is another matter."""
    assert "router.waits" not in names(findings_of(tmp_path, run_of(_sent_to_p_late)))


def test_the_answer_that_waits_for_ps_reply_is_charged_with_that_alone(tmp_path: Path) -> None:
    """200 ms until P's reply; 40 ms in which the router sent the legs are no part of it."""
    (found,) = (
        one for one in findings_of(tmp_path, run_of(lambda name: joined(200, name).shifted(0.9, 40)))
        if one.name == "router.waits"
    )  # fmt: skip

    assert (found.stake_ns, found.grade) == (REQUESTS * 200 * MS, "supposed")
    assert found.sentence.endswith(
        ": 24 of 24 requests (push, scope router) wait so, 200 ms at the median, 200 ms at p90, and 67 % of the "
        "time to first token of all 24 together."
    )


@pytest.mark.parametrize(("state", "found"), [("recording", []), ("complete", ["incomplete"])])
def test_requests_under_way_are_not_said_to_lack_records(tmp_path: Path, state: str, found: list[str]) -> None:
    """Of 27 requests the last three have no token yet: while the recording goes on they may still get one."""
    trace = run_of(pull)
    for number in range(REQUESTS, REQUESTS + 3):
        trace.events += unanswered(pull(f"r{number:03}")).later(LAPSE_MS * number, 100 * (number + 1)).events
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        store.remember({"recorder.state": state})

        assert names(checks.findings(gather.gather(store, None))) == found

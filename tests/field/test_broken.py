"""Requests of which only a part is known, lost processes, failures: what is known, what is missing, never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrace import queries, stages
from kvtrace.analyze import analyze
from kvtrace.findings import checks, gather
from kvtrace.report import comparison, contrasts, population
from kvtrace.store import Store
from tests.asked import ask
from tests.field.scenes import D_LEG, P_LEG, engines_only, lacking, total_ms, unanswered
from tests.test_analyze import fill
from tests.test_findings import LAPSE_MS, findings_of, names, run_of
from tests.trace import MS, P_API, D, P, Trace, causes_ms, ns, pull, push


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ((P, P_API), "no event of the engine that computed the prompt"),
        ((D,), "no event of the engine that answered"),
    ],
    ids=["P is not instrumented", "D is not instrumented"],
)
def test_one_engine_not_seen_is_incomplete(gone: tuple[int, ...], reason: str) -> None:
    """What the other side did is not guessed: its time is unattributed, and the shares still sum."""
    answer = lacking(push(), lambda event: event.process in gone).answer()

    assert (answer.verdict, answer.note) == ("incomplete", reason)
    assert sum(answer.shares_ns.values()) == answer.ttft_ns == 60 * MS
    assert answer.shares_ns["unattributed"] > 10 * MS
    assert push().answer().verdict == "complete"


def test_a_process_that_dies_leaves_a_truncated_trace() -> None:
    """vllm#28120. P's last event is of 12 ms; by the router's word it failed, without it is incomplete."""
    trace = lacking(unanswered(push()), lambda e: e.process in (P, P_API) and e.t_ns > ns(12))
    trace = trace.without("transfer.notified", "router.prefill_returned")
    unknown = trace.answer()
    failed = trace.at(500, stages.ROUTER_FAILED, "r1", 502, ref="prefill: connection reset").answer()

    assert (unknown.verdict, unknown.ttft_ns) == ("incomplete", None)
    assert unknown.note == "no first token was recorded; the last point is registration.received"
    assert (failed.verdict, failed.note) == ("failed", "the router gave up: prefill: connection reset")


def test_a_peer_that_is_gone_is_named() -> None:
    """vllm#28120. D's read fails with what NIXL said; had the read come through, the request would be complete."""
    trace = unanswered(pull()).without("transfer.done")
    trace.at(41, stages.TRANSFER_FAILED, D_LEG, 7, ref="NIXL_ERR_REMOTE_DISCONNECT")
    answer = trace.at(44, stages.LOAD_FAILED, D_LEG, 0, 38).answer()

    assert (answer.verdict, answer.note) == ("failed", "the hand-off failed: NIXL_ERR_REMOTE_DISCONNECT")
    assert pull().answer().verdict == "complete"


def test_a_failed_write_of_which_d_is_not_told() -> None:
    """vllm#50754. The write fails at 37 and D waits; told of it, D would have said so."""
    trace = unanswered(push()).without("transfer.done", "transfer.notified")
    silent = trace.at(37, stages.TRANSFER_FAILED, P_LEG, 7, ref="ERR", process=P).answer()
    told = trace.at(60, stages.LOAD_FAILED, D_LEG, 0, 38).answer()

    assert (silent.verdict, silent.note) == ("failed", "the hand-off failed: ERR; D was not seen to be told")
    assert (told.verdict, told.note) == ("failed", "the hand-off failed: ERR")
    assert trace.without("transfer.failed", "decode.load_failed").answer().verdict == "incomplete"


def test_a_notification_for_an_unknown_request_is_kept_and_linked() -> None:
    """aibrix#1772. P is told of a read of which it knows nothing: the request has it in its note."""
    told = pull().without("transfer.notified").at(43.5, stages.ORPHANED, P_LEG, process=P).answer()

    assert told.verdict == "complete"
    assert told.note == "a completion notification came to a worker (rank 0) that did not know the request"
    assert pull().answer().note == ""


def test_a_notification_before_the_worker_knew_the_request() -> None:
    """vllm#43509. D's worker hears at 3.6 of a write whose registration it queues at 3.8, and forgets it."""
    early = push().at(3.6, stages.ORPHANED, D_LEG, process=D).answer()
    late = push().at(3.9, stages.ORPHANED, D_LEG, process=D).answer()

    assert early.note.endswith("that did not know the request yet")
    assert late.note.endswith("that did not know the request")


def test_a_gap_that_nobody_covers_is_shown() -> None:
    """vllm#22454. Both engines are quick and the client waits: of 202 ms before P nothing was recorded."""
    rest = [s.name for s in stages.STAGES if s is not stages.ROUTER_RECEIVED]
    late = pull().shifted(0, 200, only=rest)
    uncovered = late.without("router.decided", "router.prefill_sent", "router.decode_sent").answer()
    covered = late.answer()

    assert (total_ms(uncovered), causes_ms(uncovered)["unattributed"]) == (260, 202)
    assert causes_ms(covered)["router.decide"] == 200.5
    assert "unattributed" not in causes_ms(covered)


def test_there_is_one_ttft_and_its_scope_is_named() -> None:
    """vllm#29474. It is neither engine's nor the sum of both; without the router's points it is another scope's."""
    routed, engines = pull().answer(), engines_only(pull()).answer()

    assert (routed.scope, total_ms(routed)) == ("router", 60)
    assert (engines.scope, total_ms(engines)) == ("engine", 55)


def test_two_recordings_differ_in_the_stage_that_differs() -> None:
    """vllm#27081. Of two runs, one with P's blocks staged 40 ms later, one cause differs, by 40 ms."""
    one, other = causes_ms(push().answer()), causes_ms(push().shifted(32.9, 40).answer())
    grown = {name: other.get(name, 0) - ms for name, ms in one.items() if abs(other.get(name, 0) - ms) > 1.1}

    assert (set(grown), other.get("unattributed", 0)) == ({"stage.wait"}, 0)
    assert sum(other.values()) - sum(one.values()) == pytest.approx(40)


def test_what_got_slower_between_two_recordings_is_named(tmp_path: Path) -> None:
    """vllm#27081. 24 requests each, P's blocks staged 40 ms later in one of two recordings; none in a third."""
    for name, later_ms in (("old", 0), ("new", 40), ("again", 0)):
        with Store.open(tmp_path / f"{name}.duckdb", "write") as store:
            fill(store, run_of(lambda request, later_ms=later_ms: push(4, request).shifted(32.9, later_ms)))
            analyze(store)
    with Store.open(tmp_path / "old.duckdb") as old:
        with Store.open(tmp_path / "new.duckdb") as new:
            slower = comparison.compare(new, old)
        with Store.open(tmp_path / "again.duckdb") as again:
            alike = comparison.compare(again, old)
    (group,) = slower["groups"]
    told = contrasts.sentence(slower, ("new.duckdb", "old.duckdb"))

    assert [one["cause"] for one in group["causes"] if one["told_apart"]] == ["stage.wait"]
    assert group["causes"][0]["difference"] == group["ttft_ns"]["mean"]["difference"] == pytest.approx(40 * MS, abs=MS)
    assert told.startswith("The first token comes 40.0 ms (67 %) later in new.duckdb than in old.duckdb")
    assert "most of it stage.wait, +40.0 ms" in told
    assert contrasts.sentence(alike, ("again.duckdb", "old.duckdb")).startswith("Nothing is told apart")


def test_the_prompt_is_tokenised_again_on_d() -> None:
    """vllm-project/router#144. 40 ms between D's HTTP server and its scheduler are D's front end."""
    late = pull().shifted(35.5, 40).answer()

    assert causes_ms(late)["decode.frontend"] - causes_ms(pull().answer())["decode.frontend"] == 40
    assert causes_ms(late)["decode.hop"] == causes_ms(pull().answer())["decode.hop"]


# Over many requests --------------------------------------------------------------------------------------------


def _failing(name: str) -> Trace:
    return pull(name) if int(name[1:]) % 6 else _failed(name)


def _failed(name: str) -> Trace:
    leg = f"cmpl-{name}-0-bbbbbbbb"
    trace = unanswered(pull(name)).without("transfer.done")
    return trace.at(41, stages.TRANSFER_FAILED, leg, 7, ref="ERR").at(44, stages.LOAD_FAILED, leg, 0, 38)


def test_failures_of_a_pair_are_counted(tmp_path: Path) -> None:
    """wtdcode/vllm-backport#33. Four of 24 reads fail: a finding and a count by engine; none on a run without."""
    trace = run_of(_failing)
    trace.events = [
        e._replace(a=round((e.t_ns - ns(0)) / MS) // 500) if e.stage.startswith("transfer.") else e
        for e in trace.events
    ]
    with Store.open(tmp_path / "run.duckdb", "write") as store:
        fill(store, trace)
        analyze(store)
        found = checks.findings(gather.gather(store, population.load(store, {})))
        query = queries.load("transfers")
        (row,) = store.rows(query.sql, query.bind({}))

    assert names(found) == ["failed"]
    assert "In 4 requests (pull" in found[0].sentence
    assert (row["engine"], row["transfers"], row["failed"]) == ("engine-d", 24, 4)
    (tmp_path / "plain").mkdir()
    assert findings_of(tmp_path / "plain", run_of(pull)) == []


def test_since_when_a_pair_fails_is_told(tmp_path: Path) -> None:
    """wtdcode/vllm-backport#33. Dead after ten reads: none of the first five seconds fails, then all of them do."""

    def told(trace: Trace, path: Path) -> list[tuple[object, ...]]:
        with Store.open(path / "run.duckdb", "write") as store:
            fill(store, trace)
            analyze(store)
        rows = ask(path / "run.duckdb", "failures_over_time", bucket_ns=10 * int(LAPSE_MS) * MS)
        return [
            (row["prefill_engine"], row["decode_engine"], row["requests"], row["failed_share"], row["verdict"])
            for row in rows
        ]

    dead = told(run_of(lambda name: pull(name) if int(name[1:]) < 10 else _failed(name)), tmp_path)
    (tmp_path / "alive").mkdir()
    alive = told(run_of(pull), tmp_path / "alive")

    pair = ("engine-p", "engine-d")
    assert dead == [(*pair, 10, 0, None), (*pair, 10, 1, "failed"), (*pair, 4, 1, "failed")]
    assert alive == [(*pair, count, 0, None) for count in (10, 10, 4)]

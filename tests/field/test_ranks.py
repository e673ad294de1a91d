"""Several ranks, several transfers: ready is the last one's, and it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrace import stages
from kvtrace.store import Store
from tests.asked import ask
from tests.field.scenes import D1, D_LEG, P1, P_LEG, changed, lacking, ranks, total_ms, two_ranks, waited_ms
from tests.test_analyze import fill
from tests.test_schema import append_process
from tests.trace import MS, D, P, Trace, causes_ms, ns, pull, push

BOTH = ranks(2, 2)


def test_ready_is_the_last_ranks_and_the_straggler_is_named() -> None:
    """vllm#56104. Rank 1 sees its KV 20 ms after rank 0; without its delay the request is as fast as with one rank."""
    (slow,) = two_ranks().answers(BOTH)
    quick = two_ranks().shifted(62.5, -20)
    (fast,) = quick.answers(BOTH)

    assert total_ms(slow) - total_ms(fast) == 20
    # rank 0 took 4 ms from its post on: what rank 1 took longer was on the wire or not noticed
    assert causes_ms(slow)["detection"] == 20
    assert waited_ms(slow, "detection") == {"rank 1 of D, the last of 2": 20}
    assert "it waited for rank 1 of D, the last of 2" in slow.note
    assert slow.verdict == fast.verdict == "complete"


def test_a_rank_that_spins_while_it_waits_for_another_lacks_nothing() -> None:
    """Rank 1's thread could have run for 15 of the 20 ms, but ranks wait for each other; one rank alone does not."""
    lacked = two_ranks()
    notice = next(e for e in lacked.events if e.process == D1 and e.stage == "transfer.done")
    lacked.events.append(notice._replace(stage="transfer.notice_starved", a=1, b=15 * MS, c=20 * MS, d=0))
    (answer,) = lacked.answers(BOTH)

    assert causes_ms(answer)["detection"] == 20
    assert "processor.wait" not in causes_ms(answer)


def test_a_rank_that_never_reported_makes_the_hand_off_incomplete() -> None:
    (answer,) = lacking(two_ranks(), lambda e: e.stage == "decode.reported" and e.a == 1).answers(BOTH)

    assert answer.verdict == "incomplete"
    assert answer.note.startswith("1 of 2 ranks of D reported the KV")


def test_a_rank_whose_read_was_not_recorded_makes_the_hand_off_incomplete() -> None:
    """Of rank 1, the last to report, no transfer is known: rank 0's explains nothing of what it waited for."""
    (whole,) = two_ranks().answers(BOTH)
    (answer,) = lacking(two_ranks(), lambda e: e.process == D1 and e.stage.startswith("transfer.")).answers(BOTH)

    assert (whole.verdict, answer.verdict) == ("complete", "incomplete")
    assert answer.note.startswith("transfers of 1 of 2 ranks of D were recorded")
    # loading since 38, reported at 64
    assert causes_ms(answer)["unattributed"] == 26
    assert causes_ms(answer)["report"] == 1
    assert (answer.shares_ns["transfer"], answer.transfer_high_ns) == (0, 26 * MS)


def test_a_rank_whose_write_was_not_recorded_makes_the_hand_off_incomplete() -> None:
    """Push, two ranks a side: D was told of both writes, and only rank 0's was seen."""
    trace = _second_write(push().shifted(41.5, 20))
    trace = changed(trace, stages.NOTIFIED, lambda e: e.a == 0, t_ns=ns(52))
    (whole,) = trace.answers(BOTH)
    (answer,) = lacking(trace, lambda e: e.process == P1).answers(BOTH)

    assert (whole.verdict, answer.verdict) == ("complete", "incomplete")
    assert answer.note.startswith("transfers of 1 of 2 ranks of P were recorded")
    # matched at 35, told at 62: rank 0's write, of which D was told at 52, is not in between
    assert (causes_ms(answer)["unattributed"], answer.shares_ns["transfer"]) == (27, 0)


def _second_write(trace: Trace) -> Trace:
    """Add rank 1's write, 36..38: D hears of it at 62 and reports it at 64."""
    trace.at(32, stages.SENDER_WOKE, process=P1).at(90, stages.SENDER_SLEPT, process=P1)
    trace.at(33, stages.PREFILL_STAGED, P_LEG, 1, process=P1).at(34, stages.SENDER_PICKED, P_LEG, 1, process=P1)
    trace.at(35, stages.MATCHED, P_LEG, 1, ref=D_LEG, process=P1)
    trace.at(35.5, stages.PREPARED, P_LEG, 3, 20, 1, ref=D_LEG, process=P1)
    trace.at(36, stages.POST_STARTED, P_LEG, 3, process=P1)
    trace.at(38, stages.POST_ENDED, P_LEG, 3, 1_300_000, 20, process=P1)
    trace.at(63, stages.TRANSFER_DONE, P_LEG, 3, process=P1)
    return trace.at(62, stages.NOTIFIED, D_LEG, 1, process=D1).at(64, stages.REPORTED, D_LEG, 1, process=D1)


def test_every_points_rank_is_the_one_that_was_waited_for() -> None:
    """Push, two ranks: rank 0 matches and posts late but completes early, rank 1 is the last; the path is rank 1's."""
    trace = _second_write(push().shifted(41.5, 20))
    trace = changed(trace, stages.NOTIFIED, lambda e: e.a == 0, t_ns=ns(52))
    trace = changed(trace, stages.MATCHED, lambda e: e.a == 0, t_ns=ns(45))
    for stage, at_ms in ((stages.PREPARED, 45.5), (stages.POST_STARTED, 46), (stages.POST_ENDED, 47)):
        trace = changed(trace, stage, lambda e: e.a == 7, t_ns=ns(at_ms))
    (answer,) = trace.answers(BOTH)
    (other,) = lacking(trace, lambda e: e.process in (P1, D1)).answers()

    assert answer.verdict == "complete"
    assert "unattributed" not in causes_ms(answer)
    assert causes_ms(answer)["post"] == 2
    assert causes_ms(other)["post"] == 1


def _writes_to_one(process: int = P1, rank: int = 1) -> Trace:
    """Return a push with a second write to the same rank of D: both at 36..38, D hears of them at 41 and 42."""
    trace = push().at(35, stages.MATCHED, P_LEG, rank, ref=D_LEG, process=process)
    trace.at(35.5, stages.PREPARED, P_LEG, 8, 20, rank, ref=D_LEG, process=process).at(
        36, stages.POST_STARTED, P_LEG, 8, process=process
    )
    trace.at(38, stages.POST_ENDED, P_LEG, 8, 1_300_000, 20, process=process).at(
        43, stages.TRANSFER_DONE, P_LEG, 8, process=process
    )
    return trace.at(41, stages.NOTIFIED, D_LEG)


@pytest.mark.parametrize(
    ("process", "rank"), [(P1, 1), (P1, 0), (P, 0)], ids=["another rank", "another pipeline stage", "the same worker"]
)
def test_one_rank_of_d_needs_every_write_told(process: int, rank: int) -> None:
    """vllm#48633, vllm#45880. Two writes to one rank are two notifications; one of them is not enough."""
    processes, trace = ranks(2, 1), _writes_to_one(process, rank)
    (whole,) = trace.answers(processes)
    (part,) = lacking(trace, lambda e: e.stage == "transfer.notified" and e.t_ns == ns(41)).answers(processes)

    assert (whole.verdict, len(whole.request.transfers)) == ("complete", 2)
    assert part.verdict == "incomplete"
    assert part.note.startswith("D was told of 1 of 2 writes")


def test_one_failed_write_of_two_makes_the_output_suspect() -> None:
    """vllm#56104. Rank 0's write fails while rank 1's goes on; D answers as if nothing had happened."""
    processes = ranks(2, 1)
    trace = _writes_to_one()
    failing = lacking(trace, lambda e: e.stage == "transfer.done" and e.a == 7)
    failing.at(39, stages.TRANSFER_FAILED, P_LEG, 7, ref="NIXL_ERR_REMOTE_DISCONNECT", process=P)
    (whole,), (failed,) = trace.answers(processes), failing.answers(processes)

    assert whole.verdict == "complete"
    assert failed.verdict == "failed"
    assert failed.note.startswith("the output is suspect: 1 of 2 transfers failed and D went on: NIXL_ERR_REMOTE")


def test_each_ranks_post_and_wire_are_told_apart() -> None:
    """vllm#26382. Rank 1 posts for 12 ms and has its KV 1 ms later; a short post with the same end is wire."""
    long_post = changed(two_ranks().shifted(62.5, -10), stages.POST_ENDED, lambda e: e.a == 3, t_ns=ns(51))
    long_post = changed(long_post, stages.TRANSFER_DONE, lambda e: e.a == 3, t_ns=ns(52))
    (answer,) = long_post.answers(BOTH)
    short_post = changed(long_post, stages.POST_ENDED, lambda e: e.a == 3, t_ns=ns(40))
    (other,) = changed(short_post, stages.TRANSFER_DONE, lambda e: e.a == 3, b=ns(51.9)).answers(BOTH)

    assert (causes_ms(answer)["post"], waited_ms(answer, "post")) == (12, {"rank 1 of D, the last of 2": 12})
    assert (causes_ms(other)["post"], causes_ms(other)["wire"]) == (1, pytest.approx(11.9))


def test_by_which_ways_an_engines_bytes_may_go(tmp_path: Path) -> None:
    """vllm#26382. Backends and transports of every worker, each once; nothing is said for an engine that says none."""
    path = tmp_path / "run.duckdb"
    with Store.open(path, "write") as store:
        fill(store, pull())
        append_process(store, 20, kind="worker", engine_id="engine-d", nixl_backends="UCX", ucx_tls="cuda_ipc,tcp")
        append_process(store, 21, kind="worker", engine_id="engine-d", nixl_backends="UCX", ucx_tls="all")
    rows = {row["engine"]: row for row in ask(path, "engines")}

    told = [(row["nixl_backends"], row["ucx_tls"], row["ucx_net_devices"]) for row in rows.values()]
    assert dict(zip(rows, told, strict=True)) == {
        "engine-p": (None, None, None), "engine-d": ("UCX", "all; cuda_ipc,tcp", None),
    }  # fmt: skip


def test_completions_that_come_twice_change_nothing() -> None:
    """vllm#51786. A second report, notification and ready after the first step are told, and move no time."""
    plain = push()
    trace = push().at(79, stages.NOTIFIED, D_LEG).at(80, stages.REPORTED, D_LEG).at(81, stages.READY, D_LEG)
    answer = trace.answer()

    assert causes_ms(answer) == causes_ms(plain.answer())
    assert (answer.verdict, answer.note) == ("complete", "rank 0 of D reported the KV 2 times")
    only_late = lacking(trace, lambda e: e.stage in ("decode.reported", "decode.ready") and e.t_ns < ns(60))
    assert causes_ms(only_late.answer()) != causes_ms(plain.answer())


def test_which_of_a_workers_connectors_spoke_is_told() -> None:
    """vllm#51786, vllm#31145. Both children of a MultiConnector report one request, or one of them does so twice."""
    both = push().at(80, stages.REPORTED, D_LEG, 0, 1)
    one = changed(both, stages.REPORTED, b=0)

    assert both.answer().note == "rank 0 of D reported the KV 2 times, by its connectors 0 and 1"
    assert one.answer().note == "rank 0 of D reported the KV 2 times"


def test_a_transfer_to_another_engine_than_the_prompts_is_flagged() -> None:
    """vllm#46115, vllm-project/router#223. D loads from engine-q, and the prompt was computed on engine-p."""
    wrong = changed(pull(), stages.LOAD_STARTED, ref="engine-q").answer()
    right = changed(pull(), stages.LOAD_STARTED, ref="engine-p").answer()

    assert "D was told to read from engine-q, and engine-p has the prompt" in wrong.note
    assert right.note == ""


@pytest.mark.parametrize(("descriptors", "each"), [(112_000, 12), (118, 11_017)])
def test_descriptors_have_no_ceiling(descriptors: int, each: int) -> None:
    """vllm#55434. Descriptors are counted, not put into buckets; fewer of them are larger."""
    (transfer,) = changed(pull(), stages.POST_ENDED, c=descriptors).answer().request.transfers

    assert (transfer.descriptors, round(transfer.moved_bytes / transfer.descriptors)) == (descriptors, each)
    assert transfer.process == D


def _held_up() -> Trace:
    """Return a pull of two ranks: both have their KV at 40, rank 1 sees its own at 42.9 and leaves step 8 only at 92.

    So rank 0, which saw its transfer in progress at 41, looks again at 93: everything from there on comes 50 ms later.
    """
    trace = lacking(pull().shifted(42.5, 50), lambda event: event.stage == "transfer.done")
    trace.at(93, stages.TRANSFER_DONE, D_LEG, 7, ns(41), 2, process=D)
    trace.at(38, stages.LOAD_STARTED, D_LEG, 1, 38, process=D1)
    trace.at(38.5, stages.PREPARED, D_LEG, 3, 20, 1, ref=P_LEG, process=D1)
    trace.at(39, stages.POST_STARTED, D_LEG, 3, process=D1)
    trace.at(40, stages.POST_ENDED, D_LEG, 3, 1_300_000, 20, 0, process=D1)
    trace.at(42.9, stages.TRANSFER_DONE, D_LEG, 3, process=D1).at(43, stages.REPORTED, D_LEG, 1, process=D1)
    trace.at(41.5, stages.STEP_SCHEDULED, "", 8, 0, 0, 1, process=D)
    trace.at(42, stages.STEP_STARTED, "", 8, 1, process=D1)
    trace.at(92, stages.STEP_CONNECTED, "", 8, 1, int(50 * MS), process=D1)
    return trace.at(92.5, stages.STEP_ENDED, "", 8, process=D)


def test_a_rank_that_holds_up_the_steps_of_the_last_one_is_named() -> None:
    """Seen on engines: the slow rank reports first, and the quick one only because the step lasted, long after."""
    (held,) = _held_up().answers(BOTH)
    (free,) = changed(_held_up(), stages.STEP_CONNECTED, lambda e: e.a == 8, t_ns=ns(43.1)).answers(BOTH)

    assert held.straggler is not None
    assert (held.straggler.rank, held.straggler.last) == (1, 0)
    assert held.straggler.waited_ns == pytest.approx(49.1 * MS, abs=0.1 * MS)
    told = "rank 1 of D, which held up the steps of rank 0"
    assert waited_ms(held, "detection") == {told: pytest.approx(50.1, abs=0.1)}
    assert f"it waited for {told}" in held.note
    assert free.straggler is not None
    assert (free.straggler.rank, free.straggler.last) == (0, 0)
    assert "it waited for rank 0 of D, the last of 2" in free.note


def test_who_held_up_whom_is_not_told_of_kv_whose_arrival_nobody_saw() -> None:
    """The same without a record of rank 0's read: its KV may have been under way while rank 1 held up the step."""
    (answer,) = lacking(_held_up(), lambda e: e.process == D and e.stage.startswith("transfer.")).answers(BOTH)

    assert answer.straggler is not None
    assert (answer.verdict, answer.straggler.rank, answer.straggler.last) == ("incomplete", 0, 0)
    assert answer.straggler.waited_ns < 5 * MS
    assert "held up" not in answer.note

"""vLLM's totals beside the store's: the same, differing for a reason that is named, or unexplained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtrace import cli, stages
from kvtrace.analyze import analyze
from kvtrace.lab import metrics
from kvtrace.report import selection
from kvtrace.report import totals as report
from kvtrace.store import Store
from kvtrace.totals import METRICS, SILENT, UNEXPLAINED, Recorded, Total, compare
from tests.test_analyze import fill
from tests.trace import MS, START_NS, D, pull, push

OURS = Recorded(
    requests=3, prompt_tokens=1800, unfinished_prompt_tokens=0, transfers=3, moved_bytes=3_900_000, descriptors=60
)
THEIRS = {
    "requests finished": 3.0, "prompt tokens": 1800.0, "transfers": 3.0, "bytes": 3_900_000.0, "descriptors": 60.0,
    "failed transfers": 0.0, "expired leases": 0.0, "late notifications": 0.0,
}  # fmt: skip


def compared(ours: Recorded = OURS, **theirs: float) -> dict[str, Total]:
    values = THEIRS | {name.replace("_", " "): value for name, value in theirs.items()}
    return {one.name: one for one in compare({"d": values}, {"d": ours})}


def apart(found: dict[str, Total]) -> dict[str, str]:
    return {name: one.why for name, one in found.items() if not one.agrees}


def test_totals_that_agree_have_nothing_to_explain() -> None:
    found = compared()

    assert list(found) == [metric.name for metric in METRICS]
    assert apart(found) == {}
    assert report.sentences(list(found.values())) == ["vLLM's /metrics and the store agree in 8 of 8 totals."]


def test_every_difference_without_a_rule_is_unexplained() -> None:
    """One more or one less, on either side, of whatever total."""
    for metric in METRICS:
        for more in (-1, 1):
            found = compared(**{metric.name.replace(" ", "_"): THEIRS[metric.name] + more})
            expected = {} if (metric.name, more) == ("descriptors", -1) else {metric.name: UNEXPLAINED}
            assert {name: why for name, why in apart(found).items() if why == UNEXPLAINED} == expected
    (told,) = report.sentences(list(compared(transfers=2).values()))
    assert told.endswith("in 7 of 8 totals; 1 differs: transfers of d (vLLM 2, the store 3), without explanation.")


def test_totals_that_differ_are_named_with_why_a_line_for_each_reason() -> None:
    """What nothing explains comes first; of many with one reason the first few are named."""
    told = report.sentences(list(compared(expired_leases=2, descriptors=48).values()))
    silenced = THEIRS | {"transfers": 0.0, "bytes": 0.0, "descriptors": 0.0}
    off = report.sentences(compare({"a": silenced, "b": silenced}, {"a": OURS, "b": OURS}))

    assert told == [
        "vLLM's /metrics and the store agree in 6 of 8 totals; 1 differs, 1 is explained:",
        "expired leases of d (vLLM 2, the store 0), without explanation.",
        "descriptors of d (vLLM 48, the store 60), because NIXL joins neighbouring descriptors and counts them as one; "
        "transfers and bytes are the same.",
    ]
    assert len(off) == 1
    assert "; 6 are explained: transfers of a (vLLM 0, the store 3), bytes of a " in off[0]
    assert off[0].endswith(" and 3 more, because vLLM counts transfers by NIXL's telemetry, which is off.")


def test_what_is_counted_otherwise_is_no_difference_and_what_was_lost_is_one() -> None:
    (otherwise,) = report.sentences(list(compared(descriptors=48).values()))
    (lost,) = report.sentences(list(compared(replace(OURS, transfers=2, lost_records=9)).values()))

    assert "agree in 7 of 8 totals; 1 is explained: descriptors of d (vLLM 48, the store 60), because NIXL" in otherwise
    assert "agree in 7 of 8 totals; 1 differs: transfers of d (vLLM 3, the store 2), because 9 records" in lost


def test_what_explains_a_difference_is_named_and_nothing_beyond_it() -> None:
    off = apart(compared(transfers=0, bytes=0, descriptors=0))
    joined = apart(compared(descriptors=48))
    others = apart(compared(descriptors=48, bytes=3_899_999))
    fewer = apart(compared(descriptors=2))
    unfinished = replace(OURS, prompt_tokens=2400, unfinished_prompt_tokens=600)
    lost = apart(compared(replace(OURS, transfers=2, lost_records=9)))
    departed = replace(OURS, departed=1)

    assert set(off) == {"transfers", "bytes", "descriptors"}
    assert set(off.values()) == {"vLLM counts transfers by NIXL's telemetry, which is off"}
    assert joined == {
        "descriptors": "NIXL joins neighbouring descriptors and counts them as one; transfers and bytes are the same"
    }
    assert others == {"descriptors": UNEXPLAINED, "bytes": UNEXPLAINED}
    assert fewer == {"descriptors": UNEXPLAINED}, "a transfer has one at least"
    assert "these requests ended before" in apart(compared(unfinished))["prompt tokens"]
    assert apart(compared(unfinished, prompt_tokens=1799)) == {"prompt tokens": UNEXPLAINED}
    assert "client leaves while" in apart(compared(departed, requests_finished=2))["requests finished"]
    assert apart(compared(departed, requests_finished=1)) == {"requests finished": UNEXPLAINED}
    assert apart(compared(departed, requests_finished=4)) == {"requests finished": UNEXPLAINED}
    assert lost == {"transfers": "9 records of this engine were lost"}
    assert apart(compared(replace(OURS, transfers=4, lost_records=9))) == {"transfers": UNEXPLAINED}
    assert apart(compared(replace(OURS, transfers=1, lost_records=1))) == {"transfers": UNEXPLAINED}
    assert apart(compared(replace(OURS, moved_bytes=1, lost_records=1))) == {
        "bytes": "1 record of this engine was lost"
    }
    assert apart(compared(transfers=0))["transfers"] == UNEXPLAINED


def test_what_a_release_does_not_tell_is_no_zero() -> None:
    (first, *_) = compare({"d": {}}, {"d": OURS})

    assert (first.vllm, first.kvtrace, first.why) == (None, 3, "this vLLM has no such metric")


def test_an_engine_that_did_not_answer_is_named_and_agrees_in_nothing() -> None:
    """Neither is one compared whose totals before the load nobody knows."""
    before, after = {"p": {"transfers": 1.0}}, {"p": {"transfers": 4.0}, "d": {"transfers": 4.0}}
    said = metrics.since(before, after)
    assert said == {"p": {"transfers": 3.0}}

    found = compare({"p": THEIRS}, {"p": OURS, "d": OURS})
    lacking = [one for one in found if not one.agrees]
    assert {(one.engine, one.vllm, one.why) for one in lacking} == {("d", None, SILENT)}
    assert len(lacking) == len(METRICS)
    assert report.sentences(found) == [
        "vLLM's /metrics and the store agree in 8 of 8 totals.",
        "The totals of d are not known: /metrics did not answer before and after the load.",
    ]


SAID = """
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 1.0
vllm:request_success_total{engine="0",finished_reason="length"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort"} 7.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 600.0
vllm:prompt_tokens_total{engine="1"} 1200.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{le="2048.0"} 1.0
vllm:nixl_bytes_transferred_bucket{le="+Inf"} 3.0
vllm:nixl_bytes_transferred_count 3.0
vllm:nixl_bytes_transferred_sum 3.9e+06
"""


def test_a_reply_is_read_by_name_and_summed_over_engines_of_one_server() -> None:
    pytest.importorskip("prometheus_client")

    assert metrics.parse(SAID) == {
        "requests finished": 3.0, "prompt tokens": 1800.0, "transfers": 3.0, "bytes": 3_900_000.0
    }  # fmt: skip


def store(path: Path, **changed: float) -> Path:
    """Write the store of a push and a pull, each 600 tokens and 1.3 MB, in which vLLM said the same but for changes."""
    said = dict.fromkeys(("failed transfers", "expired leases", "late notifications"), 0.0)
    said |= {"requests finished": 2, "prompt tokens": 1200, "transfers": 1, "bytes": 1_300_000, "descriptors": 20}
    with Store.open(path, "write") as opened:
        fill(opened, push(name="a"))
        fill(opened, pull("b").later(1_000))
        analyze(opened)
        opened.remember(report.facts({"engine-p": said, "engine-d": said | changed}))
    return path


def test_the_store_counts_per_engine_what_vllm_counts(tmp_path: Path) -> None:
    with Store.open(store(tmp_path / "run.duckdb", transfers=3)) as opened:
        found = report.totals(opened, selection.run_facts(opened))

    assert [(one.engine, one.name, one.vllm, one.kvtrace) for one in found if not one.agrees] == [
        ("engine-d", "transfers", 3, 1)
    ]
    assert len(found) == 2 * len(METRICS)


def test_explain_shows_the_totals_of_a_run_that_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "run.duckdb", transfers=3)

    assert cli.main(["explain", str(path), "--reconcile"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "agree in 15 of 16 totals; 1 differs: transfers of engine-d (vLLM 3, the store 1), without" in text
    assert cli.main(["explain", str(path), "--reconcile", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["totals"]) == 16
    assert cli.main(["explain", str(path), "--json"]) == 0
    assert "totals" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("asks_again", "departed"), [(False, 1), (True, 0)])
def test_a_client_that_left_an_earlier_attempt_did_not_leave_this_one(
    tmp_path: Path, asks_again: bool, departed: int
) -> None:
    """One id, asked for again: the engine finished the attempt that was answered, so vLLM has counted it."""
    trace = pull("a").without("decode.http_received", "decode.http_done")
    finished_ms = (max(event.t_ns for event in trace.events if event.stage == "decode.finished") - START_NS) / MS
    trace.at(0.1, stages.DECODE_HTTP_RECEIVED, "a", process=D)
    trace.at(finished_ms - 2, stages.DECODE_HTTP_DISCONNECTED, "a", process=D)
    if asks_again:
        trace.at(finished_ms - 1, stages.DECODE_HTTP_RECEIVED, "a", process=D)
        trace.at(finished_ms + 1, stages.DECODE_HTTP_DONE, "a", process=D)
    with Store.open(tmp_path / "run.duckdb", "write") as opened:
        fill(opened, trace)
        analyze(opened)
        assert len(report._departed(opened)) == departed

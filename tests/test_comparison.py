"""`kvtrace explain RUN --against OTHER`: what differs and how surely, and what must hold of any two recordings."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtrace.findings import rates
from kvtrace.intervals import BLOCKS
from kvtrace.report import comparison, contrasts
from kvtrace.report.samples import Figure, Group
from kvtrace.report.samples import Sample as Drawn
from kvtrace.store import Store
from tests.comparisons import Row, compared, recording, told
from tests.sample_store import MS

# What differs ------------------------------------------------------------------------------------------------


def test_the_cause_that_takes_longer_is_named_with_its_time(tmp_path: Path) -> None:
    """The same requests, but that stage.wait takes 40 ms longer and detection 5 ms less: 35 ms in all."""
    document = compared(tmp_path, recording(longer={"stage.wait": 40, "detection": -5}), recording(jitter=3))
    (group,) = document["groups"]
    causes = {one["cause"]: one for one in group["causes"]}

    assert [one["cause"] for one in group["causes"]][:2] == ["stage.wait", "detection"]
    assert causes["stage.wait"] == {
        "cause": "stage.wait", "class": "coordination", "run": 43 * MS, "against": 3 * MS,
        "difference": 40 * MS, "low": 40 * MS, "high": 40 * MS, "told_apart": True,
    }  # fmt: skip
    assert causes["detection"]["difference"] == -5 * MS
    assert causes["prefill.forward"]["told_apart"] is False
    assert causes["prefill.forward"]["low"] < 0 < causes["prefill.forward"]["high"]
    mean = group["ttft_ns"]["mean"]
    assert (mean["run"], mean["against"], mean["difference"]) == (137 * MS, 102 * MS, 35 * MS)
    assert mean["low"] < 35 * MS < mean["high"] < 38 * MS
    assert told(document).startswith(
        "The first token comes 35.0 ms (34 %) later in run.duckdb than in against.duckdb (means of 137 ms and 102 ms; "
    )
    assert "most of it stage.wait, +40.0 ms (+40.0 to +40.0 ms), in spite of detection, -5.00 ms" in told(document)


def test_a_difference_that_a_new_start_makes_is_called_small(tmp_path: Path) -> None:
    """4 ms of 102 are told apart, and less than two starts of one deployment differ by."""
    document = compared(tmp_path, recording(longer={"wire": 4}), recording(jitter=3))

    assert "The first token comes 4.00 ms (4 %) later" in told(document)
    assert "So small a difference can come of starting the same deployment anew." in told(document)


def test_a_difference_near_0_has_the_digits_that_show_it() -> None:
    line = {"run": 20 * MS, "against": 20 * MS - 40_000, "difference": 40_000, "low": 3_000, "high": 77_000}

    assert contrasts.digits({**line, "told_apart": True}, 20 * MS) == 3
    assert contrasts.digits({**line, "told_apart": False}, 20 * MS) == 1


def test_prompts_that_differ_by_less_than_a_hundredth_are_no_reason(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(), recording(jitter=3, prompt_tokens=601))

    assert document["groups"][0]["prompt_tokens"]["mean"]["told_apart"] is True
    assert "may be the reason" not in told(document)


def test_requests_that_scatter_alike_are_not_told_apart(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(), recording(jitter=3))
    (group,) = document["groups"]
    lines = [*group["causes"], *group["classes"], *group["ttft_ns"].values(), *group["tpot_ns"].values()]

    assert {line["told_apart"] for line in lines} == {False, None}
    assert told(document).startswith(
        "Nothing is told apart between run.duckdb and against.duckdb: mean TTFT is 102 ms against 102 ms, 0 ms, 95 %"
    )


def test_what_differs_where_the_mean_does_not_is_said(tmp_path: Path) -> None:
    """Posts take 3 ms longer and detection 3 ms less, so that the sum stays; TPOT is 5 ms longer."""
    run = recording(longer={"post": 3, "detection": -3})
    for pace, request in zip(run.pace, run.requests, strict=True):
        pace["tpot_ns"] += 5 * MS
        request["tpot_ns"] += 5 * MS
    document = compared(tmp_path, run, recording(jitter=3))

    assert document["groups"][0]["ttft_ns"]["mean"]["told_apart"] is False
    assert told(document).startswith("Mean TTFT of run.duckdb and against.duckdb is not told apart (")
    assert "; what is: TPOT mean (+5.00 ms" in told(document)
    assert "detection, -3.00 ms (-3.00 to -3.00 ms) and post, +3.00 ms (+3.00 to +3.00 ms)." in told(document)


def test_percentiles_are_those_that_explain_shows(tmp_path: Path) -> None:
    """p50 of the jitter 0 to 6 is 2; a p99 of 66 requests is bounded by nothing."""
    document = compared(tmp_path, recording(longer={"wire": 8}), recording(jitter=3))
    ttft = document["groups"][0]["ttft_ns"]

    assert (ttft["p50"]["run"], ttft["p50"]["against"], ttft["p50"]["told_apart"]) == (110 * MS, 102 * MS, True)
    assert (ttft["p99"]["difference"], ttft["p99"]["low"], ttft["p99"]["told_apart"]) == (8 * MS, None, None)


def test_many_requests_bound_a_high_percentile(tmp_path: Path) -> None:
    ttft = compared(tmp_path, recording(3_300, longer={"wire": 8}), recording(3_300, jitter=3))["groups"][0]["ttft_ns"]

    assert (ttft["p99"]["difference"], ttft["p99"]["told_apart"]) == (8 * MS, True)


def test_rates_are_those_of_the_findings(tmp_path: Path) -> None:
    run, against = recording(), recording(every_ms=400)
    document = compared(tmp_path, run, against)
    found = document["load"]["rates"]
    with Store.open(tmp_path / "run.duckdb") as one, Store.open(tmp_path / "against.duckdb") as other:
        expected = [rates.rates(store) for store in (one, other)]

    for name in ("offered_rate_hz", "served_rate_hz"):
        assert [found[name][side] for side in ("run", "against")] == [one[name] for one in expected if one]
    assert found["offered_rate_hz"]["difference"] == -0.5
    assert found["offered_rate_hz"]["told_apart"] is True
    assert "offered load (2.00 and 2.50 requests/s)" in told(document)


# Invariants --------------------------------------------------------------------------------------------------

CAUSES = [("wire", "transfer"), ("post", "transfer"), ("report", "coordination"), ("prefill.forward", "compute.run")]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Draw a sample of blocks with any times by cause."""
    counts = draw(st.lists(st.integers(1, 9), min_size=BLOCKS, max_size=BLOCKS))
    times = st.lists(st.integers(0, 10**10), min_size=BLOCKS, max_size=BLOCKS)
    causes = {cause: draw(times) for cause in draw(st.lists(st.sampled_from(CAUSES), min_size=1, unique=True))}
    ttft = [sum(parts) for parts in zip(*causes.values(), strict=True)]
    group = Group("push", "router", sum(counts), sum(counts), {"complete": sum(counts)})
    return Drawn(group, {"ttft_ns": Figure(ttft, counts, {}, {})}, causes, {"prefill": 1, "decode": 1})


def both_ways(one: Drawn, other: Drawn) -> list[dict[str, Row]]:
    """Return all lines by name, the one against the other and the other way round."""
    found = []
    for sides in ((one, other), (other, one)):
        causes = comparison._causes(sides, judged=True)
        lines = {line["cause"]: line for line in causes["causes"]} | {line["class"]: line for line in causes["classes"]}
        mean = comparison._mean(sides, "ttft_ns", lines=8, judged=True)
        found.append({**lines, "TTFT": mean})
    return found


@given(drawn(), drawn())
def test_differences_by_cause_and_by_class_add_up_to_that_of_the_mean_ttft(one: Drawn, other: Drawn) -> None:
    """To the nanosecond, and so do the means of either side."""
    found, _ = both_ways(one, other)
    causes = [line for name, line in found.items() if name in dict(CAUSES)]
    classes = [line for name, line in found.items() if name in dict(CAUSES).values()]

    for value in ("run", "against", "difference"):
        assert sum(line[value] for line in causes) == found["TTFT"][value]
        assert sum(line[value] for line in classes) == found["TTFT"][value]


@given(drawn(), drawn())
def test_swapping_the_recordings_negates_every_difference(one: Drawn, other: Drawn) -> None:
    found, swapped = both_ways(one, other)

    for name, line in found.items():
        assert swapped[name] == {
            **line, "run": line["against"], "against": line["run"], "difference": -line["difference"],
            "low": -line["high"], "high": -line["low"],
        }  # fmt: skip


def test_swapping_two_stores_negates_too(tmp_path: Path) -> None:
    """Percentiles and rates, which the database works out."""
    one = recording(longer={"wire": 8})
    other = recording(jitter=3, every_ms=400)
    (tmp_path / "swapped").mkdir()
    documents = compared(tmp_path, one, other), compared(tmp_path / "swapped", other, one)
    for found in zip(*(list(lines_of(document)) for document in documents), strict=True):
        assert found[1]["difference"] == -found[0]["difference"]
        assert found[1]["told_apart"] == found[0]["told_apart"]
        if found[0]["low"] is not None:
            assert (found[1]["low"], found[1]["high"]) == (-found[0]["high"], -found[0]["low"])


def lines_of(document: Row) -> list[Row]:
    (group,) = document["groups"]
    names = ("ttft_ns", "tpot_ns", "prompt_tokens", "output_tokens")
    return [*document["load"]["rates"].values(), *(line for name in names for line in group[name].values())]

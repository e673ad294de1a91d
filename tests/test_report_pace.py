"""The time per token in sentences: from rows with round numbers to what a person reads."""

from __future__ import annotations

from pathlib import Path

from kvtrace.report import pace, page
from tests.printed import one, plain_console, summary_of, text_of
from tests.sample_store import MS, Sample
from tests.test_queries import PARTS


def sample() -> Sample:
    """Return r1 with four tokens in 100 ms, 7 of them for r2's transfers and 1 for its own, and r2 without a pace."""
    made = Sample()
    made.add("r1")
    made.add("r2")
    made.add_pace("r1", PARTS, (20, 20, 20, 40), r1=1, r2=7)
    return made


def test_one_requests_pace_says_what_made_it_longer(tmp_path: Path) -> None:
    told = pace.explanation(one(tmp_path, sample()))

    assert told == (
        "After the first token: 4 tokens in 100.0 ms, 25.0 ms each (TPOT); the longest time between two was 40.0 ms. "
        "Connector work on D's forward thread made its steps 10.0 ms (10 %) longer, 7.0 ms of it for 1 other "
        "request. For 20.0 ms its steps worked on somebody's prompt too. 10.0 ms between steps are unattributed."
    )


def test_a_request_without_a_pace_says_nothing(tmp_path: Path) -> None:
    assert pace.explanation(one(tmp_path, sample(), key=2)) is None


def test_json_has_the_whole_pace(tmp_path: Path) -> None:
    document = one(tmp_path, sample()).to_json()["pace"]

    assert (document["tpot_ns"], document["itl_max_ns"], document["tokens"]) == (25 * MS, 40 * MS, 4)
    assert sum(part["duration_ns"] for part in document["parts"]) == document["end_ns"] - document["start_ns"]
    assert document["blame"] == [
        {"blamed_request_id": "r2", "extension_ns": 7 * MS},
        {"blamed_request_id": "r1", "extension_ns": 1 * MS},
    ]


def test_the_population_ranks_those_who_cost_others_most(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, sample())
    console = plain_console()
    page.print_population(summary, {}, "run.duckdb", console)
    text = " ".join(text_of(console).split())

    assert summary["pace"]["groups"][0]["tpot_ns"] == {"p50": 25 * MS, "p90": 25 * MS, "p99": 25 * MS}
    assert [(row["request_id"], row["victims"], row["extension_ns"]) for row in summary["pace"]["blamed"]] == [
        ("r2", 1, 7 * MS)
    ]
    assert "Connector work on the forward thread was 10 % of that time, 70 % of it for other requests'" in text
    assert "cost others most" in text


def test_a_run_without_paces_has_nothing_to_say(tmp_path: Path) -> None:
    made = Sample()
    made.add("r1")

    assert summary_of(tmp_path, made)["pace"] == {"groups": [], "blamed": []}

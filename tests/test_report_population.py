"""Many requests summed up: percentiles, causes, load; scopes and modes never mixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtrace.reconcile import Line
from kvtrace.report import page, population, selection, sentences, tables
from kvtrace.store import Store
from tests.printed import plain_console, summary_of, text_of
from tests.sample_store import MS, Sample, scaled


def test_percentiles_are_those_of_all_requests_and_shares_those_of_the_requests_around(tmp_path: Path) -> None:
    """101 requests of 100 ms .. 10.1 s: rank r is percentile r, so 45..55, 85..95 and 98..100 are around."""
    sample = Sample()
    for factor in range(1, 102):
        slow = factor > 95
        path = (("prefill.forward", "compute.run", "prefill", "", 100 * factor),)
        if slow:
            path = (("detection", "coordination", "decode", "", 100 * factor),)
        sample.add(f"kvt-{factor}", path, ())
    group = summary_of(tmp_path, sample)["groups"][0]
    expected = np.quantile(np.arange(1, 102) * 100 * MS, [0.5, 0.9, 0.99])

    assert list(group["ttft_ns"].values()) == [round(value) for value in expected]
    assert [group["shares"][name]["requests"] for name in ("p50", "p90", "p99")] == [11, 11, 3]
    assert group["shares"]["p50"]["compute.run"] == 1
    assert group["shares"]["p99"]["coordination"] == 1
    # Ranks 85 to 95 are requests 86 to 96, of which only the last one waited.
    assert group["shares"]["p90"]["coordination"] == pytest.approx(96 / sum(range(86, 97)))


@pytest.mark.parametrize(("state", "called"), [("recording", "under way"), ("complete", "incomplete")])
def test_what_is_under_way_is_called_so(tmp_path: Path, state: str, called: str) -> None:
    sample = Sample(facts={"recorder.state": state})
    sample.add("a")
    sample.add("b", (), start_ms=50)

    assert summary_of(tmp_path, sample)["groups"][0]["verdicts"] == {"complete": 1, called: 1}


def test_scopes_and_modes_are_never_mixed(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("a", scaled(1))
    sample.add("b", scaled(2), scope="engine")
    sample.add("c", scaled(4), mode="pull")
    summary = summary_of(tmp_path, sample)

    assert summary["requests"] == 3
    assert {(group["scope"], group["mode"]): group["ttft_ns"]["p99"] // MS for group in summary["groups"]} == {
        ("router", "push"): 100,
        ("engine", "push"): 200,
        ("router", "pull"): 400,
    }


def test_causes_are_summed_per_request_and_their_median_is_of_those_affected(tmp_path: Path) -> None:
    sample = Sample()
    twice = (("wire", "transfer", "transfer", "", 1), ("detection", "coordination", "decode", "", 4)) * 2
    sample.add("a", twice, ())
    sample.add("b", (("wire", "transfer", "transfer", "", 10),), ())
    causes = {row["cause"]: row for row in summary_of(tmp_path, sample)["groups"][0]["causes"]}

    assert causes["wire"]["total_ns"] == 12 * MS
    assert causes["wire"]["median_ns"] == 6 * MS
    assert causes["wire"]["requests"] == 2
    assert causes["detection"] == {
        "cause": "detection", "class": "coordination",
        "total_ns": 8 * MS, "median_ns": 8 * MS, "share": 0.4, "requests": 1,
    }  # fmt: skip


def test_requests_without_a_first_token_are_counted_and_not_timed(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("a")
    sample.add("b", (), verdict="aborted")
    sample.add("c", (), verdict="expired")
    group = summary_of(tmp_path, sample)["groups"][0]

    assert group["verdicts"] == {"aborted": 1, "complete": 1, "expired": 1}
    assert (group["requests"], group["with_first_token"]) == (3, 1)
    assert sentences.population_sentence(group).startswith("The one request had its first token after 100 ms:")


def test_no_first_token_at_all_is_said_and_draws_no_table(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("a", (), verdict="aborted")
    summary = summary_of(tmp_path, sample)
    console = plain_console()

    page.print_population(summary, {}, "run.duckdb", console)

    assert summary["groups"][0]["ttft_ns"] == {"p50": None, "p90": None, "p99": None}
    assert "None of 1 request had a first token." in text_of(console)
    assert "p50" not in text_of(console)


def test_a_run_that_keeps_up_and_one_that_does_not(tmp_path: Path) -> None:
    """30 requests, one each 10 ms. Served at the same pace, then with each 10 ms slower than the one before."""
    steady, growing = Sample(), Sample()
    for position in range(30):
        steady.add(f"a-{position}", start_ms=10 * position)
        growing.add(
            f"a-{position}", (("wire", "transfer", "transfer", "", 10 * position + 10),), (), start_ms=10 * position
        )
    with Store.open(steady.write(tmp_path / "steady.duckdb")) as store:
        kept_up = population.load(store, {"workload": '{"rate_qps": 90}'})
    with Store.open(growing.write(tmp_path / "growing.duckdb")) as store:
        saturated = population.load(store, {"workload": "python load.py"})

    assert kept_up == {"stated_rate_hz": 90.0, "offered_rate_hz": 100.0, "served_rate_hz": 100.0, "saturated": False}
    assert saturated == {"stated_rate_hz": None, "offered_rate_hz": 100.0, "served_rate_hz": 50.0, "saturated": True}


def test_answers_that_come_late_and_together_are_no_proof_of_keeping_up() -> None:
    load = {"stated_rate_hz": 2.0, "offered_rate_hz": 2.0, "served_rate_hz": 3.73, "saturated": False}

    late = sentences.load_sentence(load)
    steady = sentences.load_sentence({**load, "served_rate_hz": 2.1})

    assert late is not None
    assert "ended closer together than they came" in late
    assert "kept up" not in late
    assert steady == (
        "Offered 2.00 requests/s from the first arrival to the last (told to: 2), served 2.10 from the first end to "
        "the last: the run kept up."
    )


def test_too_few_requests_say_nothing_about_load(tmp_path: Path) -> None:
    sample = Sample()
    for position in range(19):
        sample.add(f"a-{position}", start_ms=10 * position)

    assert summary_of(tmp_path, sample)["load"] is None


CALM = (("prefill.forward", "compute.run", "prefill", "", 20), ("detection", "coordination", "decode", "", 1))


def told_of(tmp_path: Path, sample: Sample) -> str:
    """Return the sample's page as one line."""
    console = plain_console()
    page.print_population(summary_of(tmp_path, sample), {}, "run.duckdb", console)
    return " ".join(text_of(console).split())


@pytest.mark.parametrize(
    ("push", "pull", "told"),
    [
        (20, 0, "No finding passed its threshold, over 20 requests. push"),
        (20, 3, "No finding passed its threshold, over 20 of 23 requests. Findings about waiting need 20 requests of "
         "one mode and scope with a first token; the other 3 are too few. push"),
        (10, 10, "No finding passed its threshold, over 20 requests. Findings about waiting need 20 requests of one "
         "mode and scope with a first token, and the largest such group has 10: that none is listed does not mean that "
         "nothing was waited for. Only failures and losses are told of fewer."),
        (1, 0, "over 1 request. Findings about waiting need 20 requests of one mode and scope with a first token, and "
         "the largest such group has 1:"),
    ],
)  # fmt: skip
def test_that_no_finding_passed_is_said_and_over_how_many_requests(
    push: int, pull: int, told: str, tmp_path: Path
) -> None:
    sample = Sample()
    for number in range(push + pull):
        sample.add(f"kvt-{number}", CALM, (), start_ms=10 * number, mode="push" if number < push else "pull")

    assert told in told_of(tmp_path, sample)
    assert summary_of(tmp_path, sample)["findings_basis"] == {
        "requests": push + pull,
        "judged_requests": sum(count for count in (push, pull) if count >= 20),
        "largest_group": max(push, pull),
        "least_requests": 20,
    }


def test_failures_of_few_requests_are_findings_and_do_not_hide_that_waiting_was_not_judged(tmp_path: Path) -> None:
    sample = Sample()
    for number in range(3):
        sample.add(f"kvt-{number}", (), verdict="failed")
    sample.add("kvt-3", CALM, ())
    told = told_of(tmp_path, sample)

    assert "1. In 3 requests (push, scope router) the request or its hand-off failed." in told
    assert "No finding passed" not in told
    assert "Findings about waiting need 20 requests" in told


def test_a_finding_over_enough_requests_needs_no_word_about_their_number(tmp_path: Path) -> None:
    sample = Sample()
    for number in range(20):
        sample.add(f"kvt-{number}", start_ms=10 * number, transfer_high_ns=10 * MS)
    told = told_of(tmp_path, sample)

    assert "1. D notices 12.0 ms after the KV has arrived" in told
    assert "Findings about waiting need" not in told


def test_a_wide_bracket_is_told_in_the_sentence_and_in_the_table(tmp_path: Path) -> None:
    """Of 100 ms, 10 count as transfer; 6 to 18 may be it. Where the bracket is tight nothing is said of it."""
    wide, tight = Sample(), Sample()
    for number in range(5):
        wide.add(f"kvt-{number}", start_ms=10 * number)
        tight.add(f"kvt-{number}", start_ms=10 * number, transfer_low_ns=9 * MS, transfer_high_ns=12 * MS)
    told, plain = told_of(tmp_path, wide), told_of(tmp_path, tight)
    (group,) = summary_of(tmp_path, wide)["groups"]

    assert group["transfer_bounds"]["p99"] == {"low": pytest.approx(0.06), "high": pytest.approx(0.18)}
    assert told.count("10 % transfer (6 % to 18 %), 1 % unattributed.") == 2
    assert "since a wire ended somewhere between two polls" in told
    assert "between 6 % to 18 % 6 % to 18 % 6 % to 18 %" in told
    assert "10 % transfer, 1 % unattributed." in plain
    assert "between" not in plain


def test_the_slowest_requests_have_their_own_bounds_of_transfer(tmp_path: Path) -> None:
    """Of 100 ms, 10 count as transfer: for one 6 to 18 may be, for the other a bracket of 3 ms says little more."""
    sample = Sample()
    sample.add("wide")
    sample.add("tight", start_ms=10, transfer_low_ns=9 * MS, transfer_high_ns=12 * MS)
    (group,) = summary_of(tmp_path, sample)["groups"]
    table = tables.worst(group, plain_console(100))

    names, transfers = ([str(cell) for cell in table.columns[at].cells] for at in (0, 4))
    assert (names, transfers) == (["wide", "tight"], ["6 to 18 %", "10 %"])
    assert table.columns[4].header == "transf."


def test_a_column_of_times_has_one_number_of_decimals(tmp_path: Path) -> None:
    """A request of 3 ms beside one of seconds: each alone would have other decimals."""
    sample = Sample()
    hidden = (
        ("registration", "coordination", "decode", 0, 2000, 40),
        ("sender.poll", "coordination", "prefill", 1, 2, 1),
    )
    path = (("prefill.forward", "compute.run", "prefill", "", 2400), ("wire", "transfer", "transfer", "", 3))
    sample.add("slow", path, hidden, client_request_id="mine")
    sample.add("quick", (("wire", "transfer", "transfer", "", 3),), (), client_request_id="mine", attempt=1)
    console = plain_console(160)
    (group,) = summary_of(tmp_path, sample)["groups"]
    with Store.open(tmp_path / "run.duckdb") as store:
        rows = [explained.request for explained in selection.explained(store, [1, 2])]
    lines = [
        Line("vLLM", name, duration_ns, "", "", "")
        for name, duration_ns in (("a", 2_400 * MS), ("b", 3 * MS), ("c", None))
    ]
    blamed = [{"request_id": "a", "extension_ns": ms * MS, "victims": 1, "descriptors": 1} for ms in (20, 3)]

    for table in (
        tables.population_causes(group, console), tables.population_hidden(group, console),
        tables.worst(group, console), tables.attempts(rows, "mine", console), tables.reconciled(lines, console),
        tables.blamed(blamed, console),
    ):  # fmt: skip
        numbers = [
            [str(cell).removesuffix(" ms") for cell in column.cells if "." in str(cell)] for column in table.columns
        ]
        found = [{len(text.rpartition(".")[2]) for text in cells if text[-1].isdecimal()} for cells in numbers]
        assert {len(decimals) for decimals in found if decimals} == {1}, (table.columns[0].header, numbers)


def test_what_first_contact_cost_is_told_beside_the_percentiles_of_the_others(tmp_path: Path) -> None:
    """One of 21 requests waited 2 s in a handshake: p99 is its. A handshake that moves nothing is not worth a line."""
    slow, quick = Sample(), Sample()
    for number in range(21):
        paid = (("handshake", "coordination", "transfer", "agent metadata of p0", 2000),) if number == 4 else ()
        slow.add(f"kvt-{number}", (*paid, *scaled(1)), start_ms=10 * number)
        brief = tuple((*part[:4], 1) for part in paid)
        quick.add(f"kvt-{number}", (*brief, *scaled(1)), start_ms=10 * number)
    told, plain = told_of(tmp_path, slow), told_of(tmp_path, quick)
    (group,) = summary_of(tmp_path, slow)["groups"]

    assert group["first_contact"] == {
        "requests": 1,
        "longest_ns": 2000 * MS,
        "others_ttft_ns": dict.fromkeys(("p50", "p90", "p99"), 100 * MS),
    }
    assert (
        "1 of these requests paid for the first contact of its pair (handshake, 2,000 ms at most). TTFT of the "
        "others: p50 100 ms, p90 100 ms, p99 100 ms." in told
    )
    assert summary_of(tmp_path, quick)["groups"][0]["first_contact"]["requests"] == 1
    assert "paid for the first contact" not in plain


@pytest.mark.parametrize("width", [40, 60, 72, 100, 240])
def test_the_population_page_fits_whatever_the_width(width: int, tmp_path: Path) -> None:
    sample = Sample(facts={"model": "tiny\x1b[31m"})
    for position in range(30):
        sample.add(f"kvt-{position:032x}", start_ms=10 * position, mode="\x1b[31m", scope="\r", verdict="\x1b[32m")
    console = plain_console(width)

    page.print_population(summary_of(tmp_path, sample), {"model": "tiny\x1b[31m"}, "run.duckdb", console)

    lines = [line for line in text_of(console).splitlines() if not line.startswith("   See: ")]  # to be copied whole
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text_of(console)
    assert "30 \\x1b[32m" in " ".join(text_of(console).split())
    assert "tiny\\x1b[31m" in text_of(console).replace("\n", " ")


def test_one_client_id_lists_its_attempts_in_a_table(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", client_request_id="mine")
    sample.add("kvt-2", client_request_id="mine", attempt=1)
    console = plain_console()
    with Store.open(sample.write(tmp_path / "run.duckdb")) as store:
        rows = [explained.request for explained in selection.explained(store, [1, 2])]

    console.print(tables.attempts(rows, "mine", console))

    assert [line.split()[:2] for line in text_of(console).splitlines()[3:]] == [["kvt-1", "0"], ["kvt-2", "1"]]

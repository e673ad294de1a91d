"""Pictures, tables, sentences and units: from rows with round numbers to what a person reads."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvtrace.attribution import VERDICTS
from kvtrace.report import page, population, selection, sentences, style, tables, waterfall
from kvtrace.stages import CAUSES, Class, Where
from kvtrace.store import Store
from tests.sample_store import MS, PUSH_PATH, Sample, scaled

PICTURE_CELLS = 60


def plain_console(width: int = 100, encoding: str = "utf-8") -> Console:
    """Return a console without colour that keeps what it is given."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, no_color=True)


def text_of(console: Console) -> str:
    """Return what was printed to a console of `plain_console`."""
    console.file.flush()
    return console.file.buffer.getvalue().decode()  # type: ignore[attr-defined]


def one(tmp_path: Path, sample: Sample, key: int = 1) -> selection.Explained:
    """Write the sample and read one of its requests back."""
    with Store.open(sample.write(tmp_path / "run.duckdb")) as store:
        return next(iter(selection.explained(store, [key])))


def summary_of(tmp_path: Path, sample: Sample) -> dict:
    """Write the sample and return its population summary."""
    with Store.open(sample.write(tmp_path / "run.duckdb")) as store:
        return population.summary(store, selection.run_facts(store))


@pytest.fixture
def push(tmp_path: Path) -> selection.Explained:
    """Return one push request of 100 ms with hidden work."""
    sample = Sample()
    sample.add("kvt-1")
    return one(tmp_path, sample)


# Style -------------------------------------------------------------------------------------------------


def test_every_class_has_a_colour_and_glyphs_of_its_own() -> None:
    kinds = {kind.value for kind in Class}

    assert set(style.CLASS_STYLE) == kinds
    for attribute in ("colour", "glyph", "ascii_glyph"):
        assert len({getattr(item, attribute) for item in style.CLASS_STYLE.values()}) == len(kinds)
    assert all(item.ascii_glyph.isascii() for item in style.CLASS_STYLE.values())


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("plain-id", "plain-id"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\r\tc\x00", "a\\nb\\r\\tc\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u200bthin", "\\u200bthin"),
        ("\ud800", "\\ud800"),
        ("\x9b31m", "\\x9b31m"),
        ("[red]markup[/red]", "[red]markup[/red]"),
        ("ünïcødé 漢字", "ünïcødé 漢字"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_kept(hostile: str, shown: str) -> None:
    assert style.printable(hostile) == shown


@given(st.text(max_size=300), st.integers(min_value=1, max_value=80))
def test_a_fitted_text_fits_and_is_one_printable_line(text: str, width: int) -> None:
    fitted = style.fitted(text, width, plain_console())

    assert style.cell_len(fitted) <= width
    assert fitted.isprintable()


def test_a_long_id_keeps_both_its_ends() -> None:
    assert style.fitted("a" * 5000 + "b" * 5000, 11, plain_console()) == "aaaaa…bbbbb"
    assert style.fitted("short", 11, plain_console()) == "short"


@pytest.mark.parametrize(
    ("duration_ns", "scale_ns", "shown"),
    [
        (61_240_000, None, "61.2"),
        (0, 61_000_000, "0.0"),
        (12_000, 61_000_000, "<0.1"),
        (51_000, 61_000_000, "0.1"),
        (1_234_000, None, "1.234"),
        (100, None, "<0.001"),
        (123_456_789_000, None, "123456.8"),
        (None, None, "-"),
    ],
)
def test_milliseconds_have_the_digits_that_the_whole_deserves(duration_ns: int, scale_ns: int, shown: str) -> None:
    assert style.milliseconds(duration_ns, scale_ns) == shown


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(1, 2, "50 %"), (1, 1000, "<1 %"), (0, 5, "0 %"), (3, 0, "-"), (None, 5, "-")]
)
def test_a_small_share_is_not_called_nothing(part: int, whole: int, shown: str) -> None:
    assert style.percent(part, whole) == shown


def test_prose_keeps_a_number_with_its_unit() -> None:
    for width in range(12, 60):
        lines = style.prose("It took 12 ms and 3 % of 4 MB, which is 5 % more.", plain_console(width)).split("\n")
        assert not any(line.startswith(("%", "ms", "MB")) for line in lines)
        assert all(len(line) <= width for line in lines)


# One request -------------------------------------------------------------------------------------------


def test_the_path_is_drawn_once_per_lane_and_cause_and_its_bars_tile_the_picture(push: selection.Explained) -> None:
    console = plain_console()
    request = push.request
    scale = waterfall.Scale(request["start_ns"], request["ttft_ns"], cells=100)
    bars = [bar for bar in waterfall.path_bars(push, console) if bar.label != "wire ended within"]
    columns = sorted(scale.columns(start, end) for bar in bars for start, end, _ in bar.marks)

    assert [bar.duration_ns // MS for bar in bars] == [step[4] for step in PUSH_PATH]
    assert columns[0][0] == 0
    assert columns[-1][1] == 100
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(columns))


def test_the_bracket_lies_around_the_end_of_the_wire(push: selection.Explained) -> None:
    """Transfer is 10 ms and ends 70 ms after the start; its bounds are 6 and 18 ms: the wire ended within 66..78 ms."""
    bracket = next(bar for bar in waterfall.path_bars(push, plain_console()) if bar.label == "wire ended within")
    (start_ns, end_ns, _), begin_ns = bracket.marks[0], push.request["start_ns"]

    assert (start_ns - begin_ns, end_ns - begin_ns) == (66 * MS, 78 * MS)
    assert bracket.duration_ns == 12 * MS


def test_hidden_work_is_drawn_with_its_slack_behind_it(push: selection.Explained) -> None:
    """The registration took 5..13 ms and had 40 ms of slack: marks for 8 ms, then slack for 40 ms."""
    console = plain_console()
    bar = next(bar for bar in waterfall.hidden_bars(push, console) if bar.label == "registration")
    begin_ns = push.request["start_ns"]

    assert [(start - begin_ns, end - begin_ns, mark) for start, end, mark in bar.marks] == [
        (13 * MS, 53 * MS, "·"),
        (5 * MS, 13 * MS, "░"),
    ]
    assert bar.note == "slack 40.0"


@pytest.mark.parametrize("width", [1, 20, 40, 60, 72, 100, 240, 500])
def test_every_line_fits_whatever_the_width(width: int, push: selection.Explained) -> None:
    console = plain_console(width)

    page.print_request(push, saturated=False, console=console)

    assert max(len(line) for line in text_of(console).splitlines()) <= width


def test_a_segment_of_no_length_still_shows() -> None:
    scale = waterfall.Scale(0, 1000, 10)

    assert scale.columns(500, 500) == (5, 6)
    assert scale.columns(1000, 1000) == (9, 10)
    assert scale.columns(0, 1) == (0, 1)


def test_where_only_ascii_goes_only_ascii_is_printed(push: selection.Explained) -> None:
    console = plain_console(encoding="ascii")

    page.print_request(push, saturated=False, console=console)

    assert text_of(console).isascii()
    assert "####" in text_of(console)


def test_the_sentence_says_shares_the_longest_wait_and_what_is_left(push: selection.Explained) -> None:
    assert sentences.explanation(push) == (
        "Of 100.0 ms to the first token, as the router saw it, "
        "50 % was compute (most of it P's forward, 30.0 ms), "
        "39 % coordination (longest: detection, 12.0 ms) and 10 % transfer (most of it wire, 6.0 ms); "
        "1.0 ms (1 %) is unattributed. Its longest wait was detection, 12.0 ms: "
        "the bytes have arrived and nobody has noticed yet."
    )


def test_one_class_alone_makes_a_sentence_too(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", (("prefill.forward", "compute.run", "prefill", "", 20),), (), scope="engine")

    assert sentences.explanation(one(tmp_path, sample)) == (
        "Of 20.0 ms to the first token, as the engines saw it, 100 % was compute (P's forward, 20.0 ms); "
        "nothing is unattributed."
    )


def test_without_a_first_token_it_says_what_is_known_and_what_is_missing(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", (), verdict="aborted", prefill_engine="p0")
    console = plain_console()
    explained = one(tmp_path, sample)

    page.print_request(explained, saturated=False, console=console)

    assert sentences.explanation(explained) == (
        "No first token was recorded, so there is no TTFT to explain. Verdict aborted: the request was aborted before "
        "its answer was whole; nothing was recorded of D's side, a first token and its end. "
        "Known: its start and P's side."
    )
    assert "critical path" not in text_of(console)


@pytest.mark.parametrize("verdict", [verdict for verdict in VERDICTS if verdict != "complete"])
def test_a_verdict_that_is_not_complete_is_named_and_explained(verdict: str, tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", verdict=verdict)

    assert f"Verdict {verdict}: {VERDICTS[verdict]}." in sentences.explanation(one(tmp_path, sample))


def test_a_remedy_is_called_supposed_and_left_out_of_a_saturated_run(push: selection.Explained) -> None:
    assert sentences.remedy(push, saturated=False) == (
        "Supposed, not measured: against detection this usually helps: poll outside the step, "
        "notification by interrupt."
    )
    assert "no class names a remedy" in (sentences.remedy(push, saturated=True) or "")


def test_segments_that_cross_hosts_are_marked(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", crosses_hosts=True)
    console = plain_console()

    page.print_request(one(tmp_path, sample), saturated=False, console=console)

    assert "wire*" in text_of(console)
    assert "* crosses hosts" in text_of(console)


def test_causes_and_lanes_of_the_vocabulary_all_have_a_place(tmp_path: Path) -> None:
    """A request that passes through every cause is drawn whole: no cause is cut to something ambiguous."""
    sample = Sample()
    sample.add("kvt-1", tuple((cause.name, cause.kind.value, cause.where.value, "", 1) for cause in CAUSES), ())
    console = plain_console()

    page.print_request(one(tmp_path, sample), saturated=False, console=console)

    assert {where.value for where in Where} == set(waterfall.LANES)
    for cause in CAUSES:
        assert cause.name in text_of(console)


def test_chunked_prefill_is_one_row_with_several_marks(tmp_path: Path) -> None:
    sample = Sample()
    chunk = (
        ("prefill.forward", "compute.run", "prefill", "", 10),
        ("prefill.others", "compute.queue", "prefill", "", 10),
    )
    sample.add("kvt-1", chunk * 20, ())
    bars = waterfall.path_bars(one(tmp_path, sample), plain_console())

    assert [(bar.label, bar.duration_ns, len(bar.marks)) for bar in bars[:2]] == [
        ("prefill.forward", 200 * MS, 20),
        ("prefill.others", 200 * MS, 20),
    ]


# Populations -------------------------------------------------------------------------------------------


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
    assert sentences.population_sentence(group).startswith("The one request had its first token after 100.0 ms:")


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


def test_too_few_requests_say_nothing_about_load(tmp_path: Path) -> None:
    sample = Sample()
    for position in range(19):
        sample.add(f"a-{position}", start_ms=10 * position)

    assert summary_of(tmp_path, sample)["load"] is None


@pytest.mark.parametrize("width", [40, 60, 72, 100, 240])
def test_the_population_page_fits_whatever_the_width(width: int, tmp_path: Path) -> None:
    sample = Sample(facts={"model": "tiny\x1b[31m"})
    for position in range(30):
        sample.add(f"kvt-{position:032x}", start_ms=10 * position)
    console = plain_console(width)

    page.print_population(summary_of(tmp_path, sample), {"model": "tiny\x1b[31m"}, "run.duckdb", console)

    assert max(len(line) for line in text_of(console).splitlines()) <= width
    assert "\x1b" not in text_of(console)
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

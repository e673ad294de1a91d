"""One request drawn and told: rows with round numbers become lanes, bars and sentences."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from kvtrace.report import page, selection, sentences, tables, waterfall
from kvtrace.stages import CAUSES, Where
from kvtrace.verdict import VERDICTS
from tests.printed import one, plain_console, text_of
from tests.sample_store import MS, PUSH_PATH, Sample


@pytest.fixture
def push(tmp_path: Path) -> selection.Explained:
    """Return one push request of 100 ms with hidden work."""
    sample = Sample()
    sample.add("kvt-1")
    return one(tmp_path, sample)


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
        "Of 100 ms to the first token, as the router saw it, "
        "50 % was compute (most of it P's forward, 30.0 ms), "
        "39 % coordination and 10 % transfer (most of it wire, 6.00 ms); "
        "1.00 ms (1 %) is unattributed. Transfer is between 6 % and 18 %, since the wire ended somewhere between two "
        "polls: up to 8.00 ms of what counts as detection may be the wire. Its longest wait was detection, 12.0 ms at "
        "most, part of the coordination: the bytes have arrived and nobody has noticed yet."
    )


WAITED = (
    ("prefill.forward", "compute.run", "prefill", "", 40),
    ("wire", "transfer", "transfer", "", 10),
    ("detection", "coordination", "decode", "", 50),
)


@pytest.mark.parametrize(
    ("low_ms", "high_ms", "told"),
    [
        (10, 10, None),
        (6, 14, None),
        (10, 15, "between 10 % and 15 %, since the wire ended somewhere between two polls: up to 5.00 ms of what "
         "counts as detection may be the wire."),
        (2, 12, "between 2 % and 12 %, since the wire ended somewhere between two polls: up to 8.00 ms of what "
         "counts as the wire may be detection."),
        (10, 60, "up to 50.0 ms of what counts as detection may be the wire, which would make transfer the largest "
         "part."),
    ],
)  # fmt: skip
def test_a_wide_bracket_is_told_with_what_else_it_may_be(
    low_ms: int, high_ms: int, told: str | None, tmp_path: Path
) -> None:
    """A point or two more or less change nothing; from five points on, or with another largest class, they do."""
    sample = Sample()
    sample.add("kvt-1", WAITED, (), transfer_low_ns=low_ms * MS, transfer_high_ns=high_ms * MS)
    explanation = sentences.explanation(one(tmp_path, sample))

    assert ("Transfer is between" in explanation) == (told is not None)
    assert told is None or told in explanation
    assert (" ms at most, all of the coordination: the bytes have arrived" in explanation) == (high_ms >= 15)


def test_a_little_that_would_make_another_class_the_largest_is_told(tmp_path: Path) -> None:
    sample = Sample()
    path = (("wire", "transfer", "transfer", "", 49), ("detection", "coordination", "decode", "", 51))
    sample.add("kvt-1", path, (), transfer_low_ns=49 * MS, transfer_high_ns=51 * MS)

    assert "up to 2.00 ms of what counts as detection may be the wire, which would make transfer the largest part" in (
        sentences.explanation(one(tmp_path, sample))
    )


def test_a_wire_that_may_have_ended_earlier_was_recorded_though_nobody_was_late_to_notice(tmp_path: Path) -> None:
    sample = Sample()
    path = (("prefill.forward", "compute.run", "prefill", "", 60), ("wire", "transfer", "transfer", "", 40))
    sample.add("kvt-1", path, (), transfer_low_ns=10 * MS, transfer_high_ns=40 * MS)

    assert (
        "Transfer is between 10 % and 40 %, since the wire ended somewhere between two polls: up to 30.0 ms of what "
        "counts as the wire may be detection." in sentences.explanation(one(tmp_path, sample))
    )


def test_a_transfer_of_which_nothing_was_recorded_may_be_what_is_unattributed(tmp_path: Path) -> None:
    sample = Sample()
    path = (("prefill.forward", "compute.run", "prefill", "", 60), ("unattributed", "unattributed", "process", "", 40))
    sample.add("kvt-1", path, (), transfers=0, transfer_low_ns=0, transfer_high_ns=30 * MS)

    assert (
        "Transfer is between 0 % and 30 %, since no whole transfer was recorded: up to 30.0 ms of what counts as "
        "unattributed may be the wire." in sentences.explanation(one(tmp_path, sample))
    )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_what_was_waited_for_is_wrapped_between_words_and_the_rest_counted(width: int, tmp_path: Path) -> None:
    """No name is cut: each stands whole, on as many lines as it needs, or is one of those that are counted."""
    request_id = "kvt-608e574382c02d7d3289b1e12e3e7a11"
    slots = [f"a batch slot: step {step} makes tokens of {step} requests" for step in range(10, 30)]
    sample = Sample()
    sample.add("kvt-1", (
        ("writer.busy", "coordination", "prefill", f"the post of {request_id}", 40),
        *(("decode.queue", "compute.queue", "decode", slot, 1) for slot in slots),
    ), ())  # fmt: skip
    explained = one(tmp_path, sample)
    console = plain_console(width)

    console.print(tables.request_causes(explained, console))

    lines = text_of(console).splitlines()
    column = lines[0].index("waited for")
    shown = [line[column : column + 48].split("  ")[0].strip() for line in lines[2:]]
    whole = " ".join(filter(None, shown))
    assert request_id in whole.replace(" ", "")
    assert slots[0] in whole
    counted = re.search(r" and (\d+) more", whole)
    assert counted is not None
    assert sum(slot in whole for slot in slots) + int(counted[1]) == len(slots)
    assert "…" not in whole


@pytest.mark.parametrize(
    ("times_ms", "said"),
    [((30, 0, 0), "30.0 ms, all of"), ((30, 20, 0), "30.0 ms, most of"), ((30, 20, 20), "30.0 ms, part of")],
)
def test_the_longest_wait_is_named_once_with_its_part_of_its_class(
    times_ms: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    causes = ("stage.wait", "writer.wake", "report")
    path = [(name, "coordination", "prefill", "", took) for name, took in zip(causes, times_ms, strict=True) if took]
    sample = Sample()
    sample.add("kvt-1", (*path, ("prefill.forward", "compute.run", "prefill", "", 90)), ())
    told = sentences.explanation(one(tmp_path, sample))

    assert told.count("stage.wait") == 1
    assert f"Its longest wait was stage.wait, {said} the coordination: P has finished" in told
    assert "compute (P's forward, 90.0 ms)" in told


def test_the_longest_wait_may_be_what_nothing_explains(tmp_path: Path) -> None:
    sample = Sample()
    sample.add(
        "kvt-1", (("report", "coordination", "decode", "", 10), ("unattributed", "unattributed", "process", "", 40)), ()
    )
    told = sentences.explanation(one(tmp_path, sample))

    assert "40.0 ms (80 %) is unattributed." in told
    assert told.endswith("Its longest wait is what no recorded event explains.")


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
        "No time of a first token is known, so there is no TTFT to explain. Verdict aborted: the request was aborted "
        "before its answer was whole; nothing usable was recorded of D's side, a first token and its end. "
        "Known: its start and P's side."
    )
    assert "critical path" not in text_of(console)


@pytest.mark.parametrize("verdict", [verdict for verdict in VERDICTS if verdict != "complete"])
def test_a_verdict_that_is_not_complete_is_named_and_explained(verdict: str, tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", verdict=verdict)

    assert f"Verdict {verdict}: {VERDICTS[verdict]}." in sentences.explanation(one(tmp_path, sample))


def test_a_request_under_way_is_not_said_to_lack_records(tmp_path: Path) -> None:
    sample = Sample(facts={"recorder.state": "recording"})
    sample.add("kvt-1", (), prefill_engine="p0")
    console = plain_console()

    explained = one(tmp_path, sample)
    page.print_request(explained, saturated=False, console=console)
    assert "push, under way, scope router" in text_of(console)
    assert explained.to_json()["verdict"] == "under way"
    assert sentences.explanation(explained) == (
        "No time of a first token is known, so there is no TTFT to explain. It may still get one: it was under way "
        "when this snapshot of the recording was made. Known: its start and P's side."
    )


def test_a_request_that_d_served_alone_lacks_nothing_of_p(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", verdict="no handoff", prefill_engine="")

    assert "nothing usable" not in sentences.explanation(one(tmp_path, sample))


def test_no_remedy_is_named_against_a_wait_that_hardly_counts(tmp_path: Path) -> None:
    """Of 100 ms 95 are P's forward: that a poll takes 5 of them is no reason for another connector."""
    sample = Sample()
    path = (("prefill.forward", "compute.run", "prefill", "", 95), ("detection", "coordination", "decode", "", 5))
    sample.add("kvt-1", path, ())

    assert sentences.remedy(one(tmp_path, sample), saturated=False) is None


def test_a_remedy_is_called_supposed_and_left_out_of_a_saturated_run(push: selection.Explained) -> None:
    assert sentences.remedy(push, saturated=False) == (
        "Supposed, not measured, and as far as it was not the wire: against detection this usually helps: read "
        "notifications outside the step, or by interrupt."
    )
    push.request["transfer_high_ns"] = push.request["transfer_ns"]
    assert (sentences.remedy(push, saturated=False) or "").startswith("Supposed, not measured: against detection this")
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


def test_what_a_store_says_of_a_request_moves_no_terminal(tmp_path: Path) -> None:
    sample = Sample()
    sample.add("kvt-1", mode="\x1b[31m", scope="\x1b[32m", verdict="\x1b[33m", join_method="\x1b[34m")
    console = plain_console()

    page.print_request(one(tmp_path, sample), False, console)

    assert "\x1b" not in text_of(console)
    assert "\\x1b[31m, \\x1b[33m, scope \\x1b[32m, joined by \\x1b[34m" in text_of(console)

"""The board Hand-off: what was recorded, where the time to first token goes, push against pull."""

from __future__ import annotations

from kvtrace.dashboards.handoff.columns import (
    CLASS,
    COORDINATION,
    LAST_ATTEMPT_LINK,
    MODE,
    PAIR,
    REQUESTS,
    SHARE,
    TRANSFER,
    TTFT,
)
from kvtrace.dashboards.panels import Column, Panel, class_columns, figures, table, time_series
from kvtrace.palette import GREY, YELLOW

RANGE_LINK = (
    "/d/kvtrace-handoff/kvtrace-hand-off?${run:queryparam}&from=${__data.fields.from_ms}&to=${__data.fields.to_ms}"
)


def run() -> list[Panel]:
    """Return the panels about the recording itself."""
    return [
        table(
            "Recorded",
            "set the time range to the recording: click on its times",
            "run_span",
            [
                Column("first_at", "from", link=RANGE_LINK),
                Column("last_at", "to", link=RANGE_LINK),
                REQUESTS,
                Column("from_ms", hidden=True),
                Column("to_ms", hidden=True),
            ],
            width=10,
            height=4,
        ),
        figures(
            "Recorder",
            "see whether anything is missing before trusting the rest",
            "recorder",
            [
                Column("events", colour=GREY),
                Column("lost_records", "lost records", bad_from=1),
                Column("silenced", "silenced processes", bad_from=1),
                Column("lag_ms", "lag", "ms", GREY),
            ],
            width=14,
        ),
    ]


def findings() -> list[Panel]:
    """Return the panel with what the run says in plain words."""
    return [
        table(
            "Findings",
            "read first what the numbers below come to, and which query and request show it",
            "findings",
            [
                Column("rank", "#", width=40),
                Column("sentence", "finding", wraps=True),
                Column("grade", "how sure", width=90),
                CLASS,
                Column("stake_ns", "at stake", "ns", width=90),
                Column("remedy", "what usually helps", width=210, wraps=True),
                Column("query", "kvtrace sql", width=100),
                Column("request_id", "for example", width=120, link=LAST_ATTEMPT_LINK),
                Column("since", width=180),
                Column("as_of", "as of", width=180),
            ],
            height=9,
            note="Each is about all requests of its mode and scope in the run, whichever of them are chosen; what "
            "usually helps is supposed, not measured.",
        )
    ]


def ttft() -> list[Panel]:
    """Return the panels about where the time to first token goes."""
    return [
        time_series(
            "Time to first token by class",
            "see what it is made of and when that changed",
            "ttft_over_time",
            [
                *class_columns(),
                Column("ttft_p50_ms", "TTFT p50", "ms", GREY, line=True),
                Column("ttft_p99_ms", "TTFT p99", "ms", YELLOW, line=True),
            ],
            unit="ms",
            width=16,
            height=10,
            stacked=True,
            note="Bars are means per request of each class; the lines are percentiles of the whole.",
        ),
        figures(
            "Shares",
            "decide whether accelerators, connector and router, or network come first",
            "ttft_shares",
            class_columns("_share", "percentunit"),
            kind="bargauge",
            width=8,
            height=10,
        ),
    ]


def groups() -> list[Panel]:
    """Return the panels that hold requests of one kind against those of another."""
    return [
        table(
            "By length of the prompt",
            "see from which length on computing or moving takes over",
            "ttft_by_length",
            [
                Column("tokens_from", "tokens from"),
                Column("tokens_to", "to"),
                MODE,
                REQUESTS,
                *class_columns(bar=True),
                *TTFT,
                Column("us_per_token", "per prompt token", "µs"),
            ],
            height=5,
        ),
        table(
            "By concurrency",
            "see whether the queue or the hand-off grows with the number of requests in flight",
            "ttft_by_concurrency",
            [
                Column("in_flight_from", "in flight from"),
                Column("in_flight_to", "to"),
                MODE,
                REQUESTS,
                *class_columns(bar=True),
                *TTFT,
            ],
            height=5,
        ),
        table(
            "By pair of engines",
            "find the pair whose hand-off is slower than the others'",
            "ttft_by_pair",
            [*PAIR, MODE, REQUESTS, *class_columns(bar=True), *TTFT],
            height=5,
        ),
    ]


def modes() -> list[Panel]:
    """Return the panels that hold push against pull, and both against the targets."""
    return [
        table(
            "Percentiles and goodput",
            "compare push and pull under the same load and against your targets",
            "goodput",
            [
                MODE,
                REQUESTS,
                Column("answered"),
                Column("good_share", "good, of all", "percentunit", TRANSFER, bar=True),
                Column("offered_per_s", "offered", "reqps"),
                Column("good_per_s", "good, per second", "reqps"),
                *(Column(f"ttft_{p}_ms", f"TTFT {p}", "ms") for p in ("mean", "p50", "p90", "p99")),
                *(Column(f"tpot_{p}_ms", f"TPOT {p}", "ms") for p in ("mean", "p50", "p90", "p99")),
            ],
            height=5,
        ),
        time_series(
            "Goodput",
            "see when the targets were missed, and at which load",
            "goodput_over_time",
            [Column("offered_per_s", "offered", colour=GREY), Column("good_per_s", "good", colour=TRANSFER)],
            unit="reqps",
        ),
        table(
            "Classes by connector",
            "see which class push saves and which it adds",
            "shares_by_class",
            [
                MODE,
                CLASS,
                REQUESTS,
                SHARE,
                *(Column(f"{p}_ms", p, "ms") for p in ("mean", "p50", "p90", "p99")),
            ],
            width=12,
        ),
    ]


def registrations() -> list[Panel]:
    """Return the panels about D's registrations."""
    return [
        table(
            "Push: was the registration there",
            "see how often P had to wait for D's registration",
            "scenarios",
            [
                Column("scenario"),
                REQUESTS,
                SHARE,
                Column("lateness_p50_ms", "lateness p50", "ms"),
                Column("lateness_p99_ms", "lateness p99", "ms"),
                Column("ttft_p50_ms", "TTFT p50", "ms"),
                Column("coordination_p50_ms", "coordination p50", "ms"),
            ],
            width=12,
            height=6,
        ),
        table(
            "Registrations by pair",
            "find the pair whose registrations come late",
            "registrations",
            [
                *PAIR,
                REQUESTS,
                Column("late"),
                Column("late_share", "late, of all", "percentunit", COORDINATION, bar=True),
                Column("late_p50_ms", "late p50", "ms"),
                Column("late_max_ms", "late max", "ms"),
                Column("slack_p50_ms", "slack p50", "ms"),
            ],
            width=12,
            height=6,
        ),
    ]

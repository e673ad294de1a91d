"""The board Request: one request's waterfall and the numbers behind it, the same as `kvtrace explain` gives."""

from __future__ import annotations

from kvtrace.dashboards.boards import Board, run_source, typed
from kvtrace.dashboards.panels import Column, Panel, class_columns, class_mappings, figures, table, trace
from kvtrace.palette import GREY
from kvtrace.profiles.links import EXPLORE_PATH, PROFILE_TYPE

UID = "kvtrace-request"
EXPLAIN = "All numbers are those of `kvtrace explain`, to the nanosecond."
PROFILE_LINK = (
    f"{EXPLORE_PATH}?explorationType=flame-graph&var-serviceName=${{__data.fields.application:percentencode}}"
    f"&var-profileMetricId={PROFILE_TYPE}&from=${{__data.fields.from_ms}}&to=${{__data.fields.to_ms}}"
    "&var-filters=engine%7C%3D%7C${__data.fields.engine:percentencode}"
)
"""Grafana's app for profiles, over the Pyroscope that is its data source: one side's time of this request."""


def board() -> Board:
    """Return the board."""
    return Board(
        UID,
        "kvtrace / Request",
        "One request: what it waited for on its way to the first token, piece by piece.",
        (
            run_source(),
            typed("request", "Request", "The request's id, or the one that its client sent."),
            typed("attempt", "Attempt", "Which attempt, from 0; empty: the last one."),
        ),
        {
            "In one line": _summary(),
            "Waterfall": [_waterfall()],
            "Piece by piece": _pieces(),
            "Its facts": [_facts(), _profiles()],
        },
    )


def _summary() -> list[Panel]:
    return [
        figures(
            "Time to first token, and its classes",
            "see at a glance what this request spent its time on",
            "request_summary",
            [Column("ttft_ns", "TTFT", "ns", GREY), *class_columns("_ns", "ns")],
            width=24,
            note=EXPLAIN,
        )
    ]


def _waterfall() -> Panel:
    return trace(
        "Waterfall",
        "follow the request from router to P to D: each span is what it waited for at that time",
        "request_spans",
        note="Spans under `time to first token` tile it; those under `beside the path` delayed nobody.",
    )


def _pieces() -> list[Panel]:
    kind = Column("class", mappings=class_mappings(), width=130)
    return [
        table(
            "Critical path",
            "read the exact times, and what each wait was for",
            "request_path",
            [
                Column("position", "#", width=50),
                Column("where", width=100),
                Column("cause", width=180),
                kind,
                Column("offset_ns", "begins after", "ns"),
                Column("duration_ns", "took", "ns"),
                Column("share", unit="percentunit", colour=GREY, bar=True),
                Column("waited_for", "waited for", width=220),
                Column("crosses_hosts", "crosses hosts"),
            ],
            height=14,
            note=EXPLAIN,
        ),
        table(
            "Beside the path",
            "see what was hidden, and how much longer it could have taken",
            "request_hidden",
            [
                Column("where"),
                Column("cause"),
                kind,
                Column("offset_ns", "begins after", "ns"),
                Column("duration_ns", "took", "ns"),
                Column("slack_ns", "slack", "ns"),
            ],
            width=14,
            height=7,
        ),
        table(
            "Whose transfers made its tokens late",
            "find the requests that shared D's forward thread with it",
            "request_blame",
            [Column("blamed_request_id", "request"), Column("extension_ns", "by", "ns")],
            width=10,
            height=7,
        ),
    ]


def _facts() -> Panel:
    return table(
        "Facts",
        "see how it went, where, and how much it moved",
        "request_summary",
        [
            Column("request_id", width=300),
            Column("client_request_id", "client's id"),
            Column("attempt", width=70),
            Column("started"),
            Column("mode", "connector"),
            Column("verdict"),
            Column("scope"),
            Column("prefill_engine", "P"),
            Column("decode_engine", "D"),
            Column("prompt_tokens", "prompt tokens"),
            Column("output_tokens", "output tokens"),
            Column("transfer_low_ns", "transfer at least", "ns"),
            Column("transfer_high_ns", "at most", "ns"),
            Column("registration_late_ns", "registration late", "ns"),
            Column("tpot_ns", "TPOT", "ns"),
            Column("moved_bytes", "moved", "bytes"),
            Column("descriptors"),
            Column("transfers"),
            Column("note"),
        ],
        height=5,
    )


def _profiles() -> Panel:
    return table(
        "Profiles",
        "see in a flame graph what the threads of P and of D did while this request was served",
        "request_profiles",
        [
            Column("side", link=PROFILE_LINK, width=160),
            Column("engine"),
            Column("application"),
            Column("from_ms", hidden=True),
            Column("to_ms", hidden=True),
        ],
        height=5,
        note="Empty unless the run was recorded with `--profile URL`; Grafana needs its app Profiles Drilldown.",
    )

"""The board Hand-off: engines, queues, blocks, failures, and what was lost in recording."""

from __future__ import annotations

from kvtrace.dashboards.handoff.columns import (
    COORDINATION,
    MODE,
    PAIR,
    QUEUE,
    REQUESTS,
    RUN,
    TRANSFER,
    UNATTRIBUTED,
)
from kvtrace.dashboards.panels import Column, Panel, table, time_series
from kvtrace.palette import GREY, VERMILION, YELLOW


def engines() -> list[Panel]:
    """Return the panels about load, queues and steps."""
    return [
        time_series(
            "Offered against served",
            "see saturation: arrivals above first tokens, and requests piling up",
            "offered_over_time",
            [
                Column("arrived_per_s", "arrived", colour=GREY),
                Column("first_tokens_per_s", "first tokens", colour=RUN),
                Column("ended_per_s", "ended", colour=TRANSFER),
                Column("in_flight", "before their first token", "none", VERMILION, axis="right"),
            ],
            unit="reqps",
        ),
        time_series(
            "Queues on both sides",
            "see on which side requests pile up, and whether for KV",
            "queues_over_time",
            [
                Column("prefill_waiting", "waiting on P", colour=RUN),
                Column("decode_waiting", "waiting on D", colour=QUEUE),
                Column("decode_waiting_for_kv", "on D for KV", colour=COORDINATION),
            ],
            unit="none",
        ),
        time_series(
            "Steps and the connector's part",
            "see whether posting on the forward thread lengthens steps",
            "steps_over_time",
            [
                Column("prefill_step_p50_ms", "step of P p50", colour=RUN),
                Column("decode_step_p50_ms", "step of D p50", colour=QUEUE),
                Column("decode_step_p99_ms", "step of D p99", colour=GREY),
                Column("prefill_connector_ms", "connector on P", colour=COORDINATION),
                Column("decode_connector_ms", "connector on D", colour=VERMILION),
            ],
            unit="ms",
        ),
    ]


def within() -> list[Panel]:
    """Return the panels about what goes on in one engine: its steps and its forward threads."""
    return [
        table(
            "Steps",
            "compare engines: tokens and requests a step, and the connector's share",
            "steps",
            [
                Column("engine"),
                Column("steps"),
                Column("tokens_per_step", "tokens"),
                Column("requests_per_step", "requests"),
                Column("step_p50_ms", "step p50", "ms"),
                Column("step_p99_ms", "step p99", "ms"),
                Column("connector_p50_us", "connector p50", "µs"),
                Column("connector_p99_us", "p99", "µs"),
                Column("connector_share", "connector", "percentunit", COORDINATION, bar=True),
                Column("starved_p99_ms", "scheduler without processor p99", "ms"),
                Column("worker_starved_p99_ms", "worker without p99", "ms"),
            ],
            width=12,
        ),
        table(
            "Cores of forward threads",
            "see whether another busy thread of the worker takes the forward thread's core",
            "cores",
            [
                Column("engine"),
                Column("rank"),
                Column("looks"),
                Column("shared_share", "shared, of all", "percentunit", COORDINATION, bar=True),
                Column("beside_most", "most beside it"),
                Column("beside", "by name, looks"),
                Column("cpus", "CPUs it was on"),
            ],
            width=12,
        ),
    ]


def trouble() -> list[Panel]:
    """Return the panels about how requests ended and what failed."""
    verdicts = {
        "complete": GREY,
        "no_handoff": QUEUE,
        "recomputed": RUN,
        "incomplete": UNATTRIBUTED,
        "expired": YELLOW,
        "aborted": COORDINATION,
        "failed": VERMILION,
        "corrupt": TRANSFER,
    }
    return [
        time_series(
            "How requests ended",
            "see when requests began to fail",
            "verdicts_over_time",
            [Column(name, name.replace("_", " "), colour=colour) for name, colour in verdicts.items()],
            unit="none",
            stacked=True,
        ),
        table(
            "Failures",
            "see what failed, where, and one request to look at",
            "failures",
            [
                Column("kind", width=170),
                Column("what"),
                Column("engine"),
                Column("count", width=80),
                Column("last_at", "last"),
                Column("example"),
            ],
            width=12,
        ),
        table(
            "Failures by pair",
            "see since when requests of a pair of engines go wrong",
            "failures_over_time",
            [
                Column("ts", "from"),
                *PAIR,
                REQUESTS,
                Column("failed_share", "failed, of all", "percentunit", VERMILION, bar=True),
                Column("verdict"),
                Column("example"),
            ],
            width=12,
        ),
    ]


def blocks() -> list[Panel]:
    """Return the panels about blocks and leases."""
    return [
        table(
            "Blocks that hand-offs keep occupied",
            "weigh what preparing early costs in memory",
            "blocks",
            [
                MODE,
                REQUESTS,
                Column("reserved_block_seconds", "reserved on D, block s"),
                Column("reserved_p50_ms", "p50", "ms"),
                Column("held_block_seconds", "held on P, block s"),
                Column("held_p50_ms", "held p50", "ms"),
                Column("held_p99_ms", "held p99", "ms"),
                Column("held_after_end_block_seconds", "once over, block s"),
            ],
            width=12,
            height=6,
        ),
        table(
            "Checked blocks",
            "see whether D went on from the KV that P had computed (record --verify-kv)",
            "integrity",
            [
                MODE,
                REQUESTS,
                Column("corrupt_requests", "corrupt"),
                Column("whole_requests", "whole"),
                Column("checked_blocks", "blocks compared"),
                Column("corrupt_blocks", "blocks that differ"),
                Column("unchecked_blocks", "not compared"),
            ],
            width=12,
            height=6,
        ),
        table(
            "Leases",
            "see whether P gives blocks up before they are read",
            "leases",
            [
                Column("engine"),
                Column("leases"),
                Column("extensions"),
                Column("expired"),
                Column("expired_share", "of all", "percentunit"),
                Column("lease_s", "lease", "s"),
                Column("held_p50_ms", "held p50", "ms"),
                Column("held_max_ms", "held max", "ms"),
                Column("never_released", "never released"),
            ],
            width=12,
            height=6,
        ),
    ]


def recording() -> list[Panel]:
    """Return the panels about what the recording lacks."""
    return [
        table(
            "What was lost",
            "see which processes could not keep what",
            "drops",
            [
                Column("kind"),
                Column("engine"),
                Column("stage"),
                Column("lost_records", "lost records"),
                Column("last_at", "last event"),
            ],
            width=10,
            height=6,
        ),
        table(
            "What the recorder said",
            "find out why something is missing",
            "recorder_messages",
            [Column("at"), Column("subject"), Column("message", width=400)],
            width=14,
            height=6,
            given={"limit": "50"},
        ),
    ]

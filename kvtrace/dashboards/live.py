"""The board Live: what a recording shows to Prometheus, while it goes on."""

from __future__ import annotations

from kvtrace.dashboards.boards import Board, label_of, prometheus_instance
from kvtrace.dashboards.panels import Panel, prometheus_figures, prometheus_series
from kvtrace.dashboards.promql import chosen, quantile, rate, share
from kvtrace.metrics import names
from kvtrace.palette import CLASS_COLOUR, GREY, VERMILION, YELLOW
from kvtrace.verdict import ABORTED, ALARMING

UID = "kvtrace-live"
_SCOPE = "Where the first token was seen; scopes do not compare: choose one where there are several."


def board() -> Board:
    """Return the board."""
    pair = names.REQUESTS.name
    return Board(
        UID,
        "kvtrace / Live",
        "What a recording sees right now: time to first token and its classes, transfers, queues, the recorder itself.",
        (
            prometheus_instance(),
            label_of("run", "Run", "Only this recording.", names.RUN_INFO.name),
            label_of("model", "Model", "Only this model.", names.RUN_INFO.name),
            label_of("prefill", "P", "Only requests with this engine as P.", pair),
            label_of("decode", "D", "Only requests with this engine as D.", pair),
            # Not named as the variable of Hand-off, which knows no All and would be given it by a link.
            label_of("ttft_scope", "Scope", _SCOPE, f"{names.TTFT.name}_count", "scope"),
            label_of("connector", "Connector", "Only this connector.", names.RUN_INFO.name),
        ),
        {
            "Now": _now(),
            "Time to first token": _ttft(),
            "Hand-off": [*_handoff(), *_burden()],
            "Engines": _engines(),
            "After the first token": _pace(),
            "Recorder": _recorder(),
        },
        refresh="10s",
    )


def _now() -> list[Panel]:
    coordination = rate(names.CLASS, extra='class="coordination"', suffix="_sum")
    failed = chosen(names.TRANSFERS, 'outcome="failed"')
    return [
        prometheus_figures(
            "Time to first token",
            "see how long answers take to begin",
            {"p50": quantile(0.5, names.TTFT), "p99": quantile(0.99, names.TTFT)},
            unit="s",
        ),
        prometheus_figures(
            "Coordination",
            "see whether the two sides' waiting for each other is the problem",
            {"of TTFT": share(coordination, rate(names.TTFT, suffix="_sum"))},
            unit="percentunit",
            width=4,
            colours={"of TTFT": CLASS_COLOUR["coordination"]},
        ),
        prometheus_figures(
            "Requests",
            "see the load",
            {"per second": rate(names.ARRIVALS), "in flight": f"sum ({chosen(names.IN_FLIGHT)})"},
            unit="none",
        ),
        prometheus_figures(
            "Failures",
            "see at once that something breaks",
            {
                "transfers failed": f"sum (increase({failed}[$__range]))",
                "leases expired": f"sum (increase({chosen(names.EXPIRED)}[$__range]))",
            },
            unit="none",
            bad=1,
        ),
        prometheus_figures(
            "Recorder lag",
            "know how old what you see is",
            {"lag": f"max ({chosen(names.LAG)})"},
            unit="s",
            width=2,
            bad=5,
        ),
    ]


def _ttft() -> list[Panel]:
    requests = rate(names.TTFT, suffix="_count")
    of_all_pairs = rate(names.TTFT, suffix="_count", beside=names.CAUSE)
    return [
        prometheus_series(
            "Time to first token by class",
            "see what it is made of and when that changed",
            {kind: share(rate(names.CLASS, extra=f'class="{kind}"', suffix="_sum"), requests) for kind in CLASS_COLOUR},
            unit="s",
            stacked=True,
            colours=CLASS_COLOUR,
            note="Means per request.",
        ),
        prometheus_series(
            "Percentiles",
            "see the tail, by connector",
            {
                f"{name} {{{{mode}}}}": quantile(part, names.TTFT, "mode")
                for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
            },
            unit="s",
        ),
        prometheus_series(
            "Costliest causes",
            "see what requests wait for most",
            {"{{cause}}": f"topk(8, {rate(names.CAUSE, 'cause')} / on () group_left () ({of_all_pairs} > 0))"},
            unit="s",
            width=24,
            note="Seconds per request, of all pairs of engines whatever P and D are chosen.",
        ),
    ]


def _handoff() -> list[Panel]:
    late = rate(names.REGISTRATIONS, extra='outcome="late"')
    return [
        prometheus_series(
            "Late registrations (push)",
            "see how often P waits for D, and how long",
            {
                "late, of all": share(late, rate(names.REGISTRATIONS)),
            },
            unit="percentunit",
            width=8,
            colours={"late, of all": CLASS_COLOUR["coordination"]},
        ),
        prometheus_series(
            "Transfers",
            "compare posting with the whole until completion is seen",
            {
                "post p50 {{engine}}": quantile(0.5, names.POSTING, "engine"),
                "seen p50 {{engine}}": quantile(0.5, names.SEEN, "engine"),
                "seen p99 {{engine}}": quantile(0.99, names.SEEN, "engine"),
            },
            unit="s",
            width=8,
        ),
        prometheus_series(
            "Descriptors of a transfer",
            "see whether transfers break into many small pieces",
            {
                "p50 {{engine}}": quantile(0.5, names.DESCRIPTORS, "engine"),
                "p99 {{engine}}": quantile(0.99, names.DESCRIPTORS, "engine"),
            },
            unit="none",
            width=8,
        ),
    ]


def _burden() -> list[Panel]:
    return [
        prometheus_series(
            "Bytes moved",
            "see the load on the network",
            {"{{engine}}": rate(names.MOVED, "engine")},
            unit="Bps",
            width=8,
        ),
        prometheus_series(
            "Blocks kept for hand-offs",
            "see memory that neither side can use",
            {
                "held on P {{engine}}": f"sum by (engine) ({chosen(names.HELD)})",
                "reserved on D {{engine}}": f"sum by (engine) ({chosen(names.RESERVED)})",
            },
            unit="none",
            width=8,
        ),
        prometheus_series(
            "What went wrong",
            "see when failures began",
            {
                "transfers failed": rate(names.TRANSFERS, extra='outcome="failed"'),
                "handshakes failed": rate(names.HANDSHAKES, extra='outcome="failed"'),
                "leases expired": rate(names.EXPIRED),
                "requests failed": rate(names.REQUESTS, extra=f'verdict=~"{"|".join(ALARMING)}"'),
                "requests aborted": rate(names.REQUESTS, extra=f'verdict="{ABORTED}"'),
            },
            unit="ops",
            width=8,
            colours={"transfers failed": VERMILION, "leases expired": YELLOW},
        ),
    ]


def _engines() -> list[Panel]:
    return [
        prometheus_series(
            "Offered against served",
            "see saturation",
            {"arrived": rate(names.ARRIVALS), "ended": rate(names.REQUESTS)},
            unit="reqps",
            width=8,
            colours={"arrived": GREY, "ended": CLASS_COLOUR["transfer"]},
        ),
        prometheus_series(
            "Queues",
            "see where requests pile up, and whether for KV",
            {
                "waiting {{engine}}": f"sum by (engine) ({chosen(names.WAITING)})",
                "for KV {{engine}}": f"sum by (engine) ({chosen(names.WAITING_FOR_KV)})",
                "running {{engine}}": f"sum by (engine) ({chosen(names.RUNNING)})",
            },
            unit="none",
            width=8,
        ),
        prometheus_series(
            "The connector on the forward thread",
            "see which part of the steps it takes",
            {"{{engine}}": share(rate(names.CONNECTOR_TIME, "engine"), rate(names.STEP_TIME, "engine"))},
            unit="percentunit",
            width=8,
        ),
    ]


def _pace() -> list[Panel]:
    return [
        prometheus_series(
            "Time per token after the first",
            "see whether hand-offs slow down requests that are being answered",
            {
                "p50 {{mode}}": quantile(0.5, names.TPOT, "mode"),
                "p99 {{mode}}": quantile(0.99, names.TPOT, "mode"),
            },
            unit="s",
        ),
        prometheus_series(
            "Steps made longer by the connector",
            "see what others' hand-offs cost the requests on D",
            {"{{decode}}": rate(names.EXTENSION, "decode")},
            unit="s",
            note="Seconds per second, summed over the requests in the steps.",
        ),
    ]


def _recorder() -> list[Panel]:
    return [
        prometheus_series(
            "Events",
            "see that all engines are heard",
            {"per second": rate(names.EVENTS)},
            unit="cps",
            width=8,
            colours={"per second": GREY},
        ),
        prometheus_series(
            "Lost",
            "see whether processes drop records",
            {"{{kind}}": rate(names.LOST, "kind"), "silenced {{kind}}": f"sum by (kind) ({chosen(names.SILENCED)})"},
            unit="none",
            width=8,
        ),
        prometheus_series(
            "Lag and publication",
            "see how old the store is that others read",
            {
                "lag": f"max ({chosen(names.LAG)})",
                "since publication": f"time() - max ({chosen(names.PUBLISHED)})",
            },
            unit="s",
            width=8,
            colours={"lag": VERMILION, "since publication": GREY},
        ),
        prometheus_series(
            "Cost of publication",
            "see which part of a processor the recorder spends on what others read",
            {"processors": rate(names.PUBLISHING)},
            unit="percentunit",
            width=8,
            colours={"processors": GREY},
        ),
    ]

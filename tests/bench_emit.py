"""What an event costs the process that emits it: `python -m tests.bench_emit [--json] [--events N] [--figures FILE]`.

All figures come from one run on one machine, so their ratios hold where the figures themselves do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kvtrace import emit, stages
from kvtrace.segments import SegmentFile
from tests import figures
from tests.figure_rows import Row, at_least, at_most, plain, shortened
from tests.timed_loop import clock_ns, loop_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

THREADS = 4
EVENTS_PER_REQUEST = 25
BURST_EVENTS = 250  # an engine step's worth; then the thread waits, as a serving thread does
PAUSE_S = 0.002
KILLED_EVENTS = 50_000
WANTED_NS, WANTED_OFF_NS, WANTED_TAIL_NS, WANTED_SPANS, WANTED_LOST = 250, 30, 3_000, 50, 0

SCHEDULED = stages.DECODE_SCHEDULED.code
METHOD = """\
How it was measured. `each`: every call between two clock readings, four threads at once, bursts of 250 events and
2 ms of waiting, a new request id (52 characters, made outside the timing) every 25 events, four numbers and no ref per
event; `net` is less the clock's own cost (the median of two readings in a row). `flat out`: the same without waiting;
there a thread is made to give the interpreter lock away every 5 ms, which is in the tail. `a call that does nothing`:
the same threads and bursts with tracing off, so what any call at all pays to the machine. `loop`: a single thread,
ten calls in a row per reading, the lowest quarter of 400 such blocks, as for the clock, the off cost and the span.
Span: OpenTelemetry SDK, start_span with five attributes and end(), BatchSpanProcessor, an exporter that does nothing.
Loss: a process emits 50,000 events flat out and kills itself with SIGKILL; the spool is read afterwards."""


class NoExporter(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Say that all went well."""
        return SpanExportResult.SUCCESS


def request_ids(thread: int, count: int) -> list[str]:
    """Return request ids as long as the engines' own."""
    return [f"cmpl-kvt-{thread:08x}{number:024x}-0-{number:08x}" for number in range(count)]


def each_ns(tracer: emit.NullEmitter, events: int, pause_s: float) -> np.ndarray[Any, Any]:
    """Return the ns of every single call, four threads at once, the two clock readings included.

    With the emitter that does nothing it says what the machine and the interpreter lock add to any call at all.
    """
    taken = [array("q", bytes(8 * events)) for _ in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        clock, record, out = time.perf_counter_ns, tracer.emit, taken[thread]
        ids = request_ids(thread, events // EVENTS_PER_REQUEST + 1)
        start.wait()
        for number in range(events):
            request = ids[number // EVENTS_PER_REQUEST]
            began = clock()
            record(SCHEDULED, request, number, 1, 2, 3)
            out[number] = clock() - began
            if pause_s and number % BURST_EVENTS == BURST_EVENTS - 1:
                time.sleep(pause_s)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate([np.frombuffer(part, np.int64) for part in taken])


def clock_pair_ns(count: int = 200_000) -> float:
    """Return the median ns between two clock readings with nothing between them."""
    clock, out = time.perf_counter_ns, array("q", bytes(8 * count))
    for number in range(count):
        began = clock()
        out[number] = clock() - began
    return float(np.median(np.frombuffer(out, np.int64)))


def killed(folder: Path) -> dict[str, int]:
    """Return how many events a process emitted before SIGKILL, and how many of them the spool holds."""
    script = (
        "import os, signal\nfrom kvtrace import emit\ntracer = emit.tracer()\n"
        f"for n in range({KILLED_EVENTS}): tracer.emit({SCHEDULED}, f'r{{n // 25}}', n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, emit.SPOOL_VARIABLE: str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    if done.returncode != -signal.SIGKILL:
        sys.exit(f"bench_emit: the process to be killed ended by itself with {done.returncode}")
    found: set[int] = set()
    for path in folder.glob("*.kvt"):
        records = SegmentFile.open(path).poll().records
        found.update(records["a"][records["code"] == SCHEDULED].tolist())
    return {"emitted": KILLED_EVENTS, "lost": KILLED_EVENTS - len(found & set(range(KILLED_EVENTS)))}


def summary(samples: np.ndarray[Any, Any], clock_ns: float) -> dict[str, float]:
    """Return the percentiles of single calls in ns, less the clock's own cost."""
    p50, p99, p999, p9999 = np.percentile(samples, [50, 99, 99.9, 99.99]) - clock_ns
    shown = {"p50": p50, "p99": p99, "p99.9": p999, "p99.99": p9999, "mean": samples.mean() - clock_ns}
    return {name: round(float(value), 1) for name, value in shown.items()} | {"events": len(samples)}


def measure(events: int, spool: Path) -> dict[str, Any]:
    """Return all figures of one run; times in ns."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(NoExporter()))
    otel = provider.get_tracer("bench")
    attributes = {"request": "cmpl-1", "a": 1, "b": 2, "c": 3, "d": 4}
    reading_ns = clock_ns()
    off_ns = loop_ns("tracer.emit(c, r, 1, 2, 3, 4)", {"tracer": emit.NullEmitter(), "c": SCHEDULED, "r": "cmpl-1"})
    span_ns = loop_ns("t.start_span('s', attributes=a).end()", {"t": otel, "a": attributes}, blocks=100, turns=10)
    provider.shutdown()
    tracer = emit.Emitter(spool / "loop")
    on_ns = loop_ns("tracer.emit(c, r, 1, 2, 3, 4)", {"tracer": tracer, "c": SCHEDULED, "r": "cmpl-1"})
    tracer.close()
    pair_ns = clock_pair_ns()
    each, nothing, dropped = {}, {}, {}
    for name, pause_s in (("bursts", PAUSE_S), ("flat out", 0.0)):
        nothing[name] = summary(each_ns(emit.NullEmitter(), events // THREADS, pause_s), pair_ns)
        tracer = emit.Emitter(spool / name.replace(" ", "-"))
        each[name] = summary(each_ns(tracer, events // THREADS, pause_s), pair_ns)
        dropped[name] = tracer.dropped().get(SCHEDULED, 0)
        tracer.close()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "load_average": round(os.getloadavg()[0], 2),
        "clock_ns": round(reading_ns, 1),
        "clock_pair_ns": pair_ns,
        "off_ns": round(off_ns, 1),
        "emit_loop_ns": round(on_ns, 1),
        "span_loop_ns": round(span_ns, 1),
        "span_over_emit": round(span_ns / on_ns, 1),
        "each_ns": each,
        "nothing_ns": nothing,
        "dropped": dropped,
        "killed": killed(spool / "killed"),
    }


def show(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    rows = [
        ("clock reading", f"{found['clock_ns']:10.0f} ns", "the floor: every event has one"),
        ("off", f"{found['off_ns']:10.0f} ns", f"aim: at most {WANTED_OFF_NS}"),
        ("emit, loop", f"{found['emit_loop_ns']:10.0f} ns", f"aim: at most {WANTED_NS}"),
        (
            "OpenTelemetry span",
            f"{found['span_loop_ns']:10.0f} ns",
            f"{found['span_over_emit']} x emit; aim: at least {WANTED_SPANS}",
        ),
    ]
    for name, each in found["each_ns"].items():
        note = f"{each['events']} events, {THREADS} threads, {found['dropped'][name]} dropped"
        rows.append((f"each, {name}, p50", f"{each['p50']:10.0f} ns", f"aim: at most {WANTED_NS}; {note}"))
        tail = f"aim: at most {WANTED_TAIL_NS}; p99 {each['p99']:.0f}, p99.9 {each['p99.9']:.0f}"
        rows.append((f"each, {name}, p99.99", f"{each['p99.99']:10.0f} ns", tail))
        nothing = found["nothing_ns"][name]
        rows.append(("  a call that does nothing", f"{nothing['p99.99']:10.0f} ns", f"p99.9 {nothing['p99.9']:.0f}"))
    killed_row = found["killed"]
    rows.append(("lost after SIGKILL", f"{killed_row['lost']:10d}", f"of {killed_row['emitted']}; aim: {WANTED_LOST}"))
    lines = [f"{name:26}{value}   {note}" for name, value, note in rows]
    return "\n".join([f"Emit ({found['machine']}, load average {found['load_average']})", *lines, METHOD])


def _readings(found: dict[str, Any]) -> str:
    return f", {plain(shortened(found['emit_loop_ns'] / found['clock_ns']))} clock readings"


ROWS = {
    "event": Row(
        "one event, single thread", " ns", lambda found: found["emit_loop_ns"], at_most(WANTED_NS), more=_readings
    ),
    "threads": Row(
        f"one event, {THREADS} threads in bursts, p50", " ns", lambda found: found["each_ns"]["bursts"]["p50"],
        at_most(WANTED_NS),
    ),
    "tail": Row(
        f"one event, {THREADS} threads in bursts, p99.99", " ns", lambda found: found["each_ns"]["bursts"]["p99.99"],
        at_most(WANTED_TAIL_NS),
    ),
    "nothing": Row(
        f"a call that does nothing, {THREADS} threads in bursts, p99.99", " ns",
        lambda found: found["nothing_ns"]["bursts"]["p99.99"],
    ),
    "off": Row("a call with tracing off", " ns", lambda found: found["off_ns"], at_most(WANTED_OFF_NS)),
    "span": Row(
        "an OpenTelemetry span of five attributes, batch processor", " times one event",
        lambda found: found["span_over_emit"], at_least(WANTED_SPANS),
    ),
    "lost": Row(
        "lost after SIGKILL", "", lambda found: found["killed"]["lost"], at_most(WANTED_LOST),
        more=lambda found: f" of {found['killed']['emitted']:,}",
    ),
}  # fmt: skip


def main() -> None:
    """Measure, print, and end with status 1 if something that was emitted is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--events", type=int, default=400_000, help="events per distribution (default 400000)")
    figures.add_option(parser)
    options = parser.parse_args()
    run = figures.Run(options.figures)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-", dir=shared if shared.is_dir() else None) as folder:
        found = measure(options.events, Path(folder))
    sys.stdout.write((json.dumps(found, indent=1) if options.json else show(found)) + "\n")
    run.keep("emit", found)
    sys.exit(found["killed"]["lost"] > WANTED_LOST)


if __name__ == "__main__":
    main()

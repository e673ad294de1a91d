"""What the recorder takes in: `python -m tests.bench_ingest [--json] [--events N] [--rounds N] [--figures F]`.

From spool files to a published store, all in (open, read, convert, commit, publish, close), beside DuckDB's own Arrow
INSERT of the same rows into the same schema, ready in memory, in the same run: the ratio holds on other machines too.
Making and finishing a store takes the same time however much it holds, so less input shows a lower rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.collect import Recorder
from kvtrace.store import Store, discard, duckdb_version, working_path
from tests import figures, spooled
from tests.figure_rows import Row, at_least, plain, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

EVENTS = 4_000_000
ROUNDS = 3
WANTED_PER_S = 1_000_000

# Every stage in turn, a new id as long as vLLM's every 25 events, a ref now and then, payloads like real ones.
WRITE = """
from kvtrace import stages
codes = [stage.code for stage in stages.STAGES if stage.code > 3]
tracer.fact("kind", "core")
for i in range({events}):
    request = f"cmpl-kvt-{{i // 25:032x}}-0-{{i // 25:08x}}"
    numbers = i % 8, i % 2_000_000 * 1000, 37, 600
    tracer.emit(codes[i % len(codes)], request, *numbers, "kv_producer" if i % 10 == 0 else "")
"""


def timed(part: Callable[[], object]) -> tuple[float, float]:
    """Return how long `part` took: wall and processor seconds, over all threads."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    part()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def rows_of(path: Path) -> pa.Table:
    """Return the events of a store."""
    with Store.open(path) as store:
        return store.arrow("SELECT * FROM event")


def insert(path: Path, rows: pa.Table) -> None:
    """Insert rows with DuckDB alone, durably."""
    with Store.open(path, "write") as store:
        store.append("event", rows)
        store.execute("CHECKPOINT")


def measure(events: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Write a spool, take it in and insert its rows in turn, several times; return the figures."""
    spool = folder / "spool"
    spooled.run(WRITE.format(events=events), spool)
    ours, theirs, publishing = folder / "recorded.duckdb", folder / "inserted.duckdb", []
    taken_in, inserted = [], []
    rows: pa.Table | None = None
    (folder / "nothing").mkdir()
    empty_s = timed(Recorder(folder / "empty.duckdb", [folder / "nothing"], {}, analysis=None).run_once)[0]
    for _ in range(rounds):
        discard(ours)
        discard(theirs)
        recorder = Recorder(ours, [spool], {}, delete_consumed=False, analysis=None)
        taken_in.append(timed(recorder.run_once))
        assert recorder.stats.events >= events
        rows = rows or rows_of(ours)
        inserted.append(timed(partial(insert, theirs, rows)))
        publishing.append(publication_s(ours))
    assert rows is not None
    return {
        "events": rows.num_rows,
        "duckdb": duckdb_version(),
        "store_bytes": ours.stat().st_size,
        "recorder": rates(taken_in, rows.num_rows),
        "arrow_insert": rates(inserted, rows.num_rows),
        "empty_s": round(empty_s, 3),
        "publication_s": round(statistics.median(publishing), 4),
        "wanted_per_s": WANTED_PER_S,
    }


def publication_s(path: Path) -> float:
    """Return how long it takes to publish a store of this size after one more row."""
    working = working_path(path)
    path.rename(working)
    with Store.open(working, "write") as store:
        store.execute("INSERT INTO event (process) VALUES (1)")
        seconds = timed(lambda: store.publish(path))[0]
    working.unlink()
    return seconds


def rates(times: list[tuple[float, float]], events: int) -> dict[str, float]:
    """Return events/s of the median and the best round, and processor time per event."""
    walls = [wall for wall, _ in times]
    return {
        "events_per_s": round(events / statistics.median(walls)),
        "events_per_s_best": round(events / min(walls)),
        "cpu_us_per_event": round(min(cpu for _, cpu in times) / events * 1e6, 3),
    }


def show(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"ingest of {found['events']:,} events, DuckDB {found['duckdb']}, store {found['store_bytes'] >> 20} MiB"]
    for name, title in (("recorder", "spool to store, all in"), ("arrow_insert", "DuckDB's Arrow INSERT alone")):
        part = found[name]
        lines.append(
            f"  {title:<28} {part['events_per_s']:>10,} events/s (best {part['events_per_s_best']:,}), "
            f"{part['cpu_us_per_event']} us of processor an event"
        )
    ratio = found["arrow_insert"]["events_per_s"] / found["recorder"]["events_per_s"]
    lines.append(
        f"  the recorder takes {ratio:.2f} times as long as the INSERT alone; wanted: {WANTED_PER_S:,} events/s"
    )
    lines.append(f"  an empty recording takes {found['empty_s'] * 1000:.0f} ms, which is in the first line")
    lines.append(f"  publishing a store of that size: {found['publication_s'] * 1000:.0f} ms")
    return "\n".join(lines)


def _against_insert(found: dict[str, Any]) -> str:
    share = found["recorder"]["events_per_s"] / found["arrow_insert"]["events_per_s"]
    return f", {plain(shortened(share))} of DuckDB's own Arrow insert"


ROWS = {
    "rate": Row(
        "spool to store, all in", " million events/s", lambda found: found["recorder"]["events_per_s"] / 1e6,
        at_least(WANTED_PER_S / 1e6), size=lambda found: f", {found['events']:,} events", more=_against_insert,
    ),
    "processor": Row(
        "processor time of that, an event", " us", lambda found: found["recorder"]["cpu_us_per_event"]
    ),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    figures.add_option(parser)
    options = parser.parse_args()
    run = figures.Run(options.figures)
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-") as folder:
        found = measure(options.events, options.rounds, Path(folder))
    sys.stdout.write((json.dumps(found, indent=1) if options.json else show(found)) + "\n")
    run.keep("ingest", found)


if __name__ == "__main__":
    main()

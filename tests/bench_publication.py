"""What a live snapshot costs: `python -m tests.bench_publication [--json] [--requests N] [--store PATH] [--seconds S]`.

A recorder is started anew, as after a kill, on a store that is large already, while engines emit some 2,000 events a
second, and another process opens the snapshot every second and says how old the newest event in it is. What is in the
store is of the same load, and what is recorded bears times as if it had gone on at once. The aims are set for a store
of 100 million events, which is `--requests 2650000`; `--prefill PATH` makes it once, and `--store PATH --in-place` goes
on with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kvtrace import clock
from kvtrace.collect import Recorder
from kvtrace.store import Store, working_path
from kvtrace.store.files import SPARE_SUFFIX, beside
from kvtrace.testing import Fleet
from tests import big_stores, figures
from tests.figure_rows import Row, at_most
from tests.live_fleet import emitting

REQUESTS = 20_000
SECONDS = 40
WANTED_AGE_S, WANTED_SHARE = 5.0, 0.1
WANTED_ON_EVENTS = 100_000_000
_FIRST = 4  # snapshots until the first that is made of an earlier one, if the recorder was started on this store
_PATIENCE_S = 150.0
_LIVE_QPS = 60.0  # with their steps, some 2,000 events a second
_EARLIER = Fleet(2_900, seed=5, per_s=_LIVE_QPS, pairs=1)
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")

READ = """
import sys, time, duckdb
while True:
    begin_s = time.time() - int(sys.argv[2]) / 1e9
    connection = duckdb.connect(sys.argv[1], read_only=True)
    newest_ns, kept_ns = connection.execute(
        "SELECT max(last_ns), (SELECT max(start_ns) FROM request) FROM process").fetchone()
    connection.close()
    print(begin_s - newest_ns / 1e9, begin_s - kept_ns / 1e9, flush=True)
    time.sleep(max(0, 1 - (time.time() - int(sys.argv[2]) / 1e9 - begin_s)))
"""


def prefill(path: Path, requests: int) -> None:
    """Write a store of so many requests that ends now."""
    big_stores.write(path, requests, big_stores.ending(_EARLIER, requests, time.time_ns()))


def _go_on_at_once(store: Store) -> int:
    """Have this machine's clock go on where a store ends; return by how much its times are early then, ns."""
    end_ns = int(store.select("SELECT max(last_ns) FROM process").values[0][0])
    anchor = clock.read_anchor()
    store.execute(
        "INSERT INTO process BY NAME SELECT max(process) + 1 AS process, 'earlier' AS series, 'host-b' AS host, "
        "$domain AS domain, 1 AS pid, 1 AS parent_pid, 0 AS started_ns, $offset AS offset_ns, 0 AS lost_records, "
        "MAP {} AS facts FROM process",
        {"domain": clock.domain(), "offset": end_ns - anchor.monotonic_ns},
    )
    store.remember({"recorder.published_ns": str(end_ns)})
    return anchor.wall_ns - end_ns


def measure(output: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """Record on top of a store for so long; return what it cost and how far the snapshot was behind."""
    working = working_path(output)
    output.rename(working)
    with Store.open(working, "write") as store:
        events = int(store.select("SELECT count(*) FROM event").values[0][0])
        early_ns = _go_on_at_once(store)
    for left in (output, beside(output, SPARE_SUFFIX)):
        shutil.copyfile(working, left)
    (folder / "spool").mkdir()
    recorder = Recorder(output, [folder / "spool"], {})
    begin_s = time.monotonic()
    fleet = Fleet(int(_LIVE_QPS * (seconds + _PATIENCE_S)), seed=11, per_s=_LIVE_QPS, pairs=1)
    with recorder:
        opened_s = time.monotonic() - begin_s
        with emitting(fleet, folder, folder / "spool"):
            Path("/proc/self/clear_refs").write_text("5")  # the greatest memory from here on
            begin_s = time.monotonic()
            recorder.start()
            while not recorder.stats.published and time.monotonic() - begin_s < _PATIENCE_S:
                time.sleep(0.1)
            first_s = time.monotonic() - begin_s
            while recorder.stats.published < _FIRST and time.monotonic() - begin_s < _PATIENCE_S:
                time.sleep(1.0)
            warm_s = time.monotonic() - begin_s
            before = (time.process_time(), recorder.stats.publishing_s, recorder.stats.published, recorder.stats.events)
            reading = [sys.executable, "-c", READ, str(output), str(early_ns)]
            reader = subprocess.Popen(reading, stdout=subprocess.PIPE, text=True)
            time.sleep(seconds)
            after = (time.process_time(), recorder.stats.publishing_s, recorder.stats.published, recorder.stats.events)
            reader.terminate()
            memory_mib = int(_PEAK.findall(Path("/proc/self/status").read_text())[0]) >> 10
            ages = [tuple(map(float, line.split())) for line in reader.communicate(timeout=60)[0].splitlines()]
        stopped_s = time.monotonic()
    cpu_s, publishing_s, published, arrived = (late - early for late, early in zip(after, before, strict=True))
    return {
        "prefilled_events": events, "store_mib": output.stat().st_size >> 20, "seconds": seconds,
        "events_per_s": round(arrived / seconds), "publications": published, "opened_s": round(opened_s, 1),
        "first_s": round(first_s, 1), "warm_s": round(warm_s, 1),
        "publishing_share": round(publishing_s / seconds, 3), "recorder_share": round(cpu_s / seconds, 3),
        "age_s": [round(age, 2) for age, _ in ages], "age_max_s": round(max(age for age, _ in ages), 2),
        "age_median_s": round(sorted(age for age, _ in ages)[len(ages) // 2], 2),
        "requests_age_s": round(sorted(age for _, age in ages)[len(ages) // 2], 2),
        "requests_age_max_s": round(max(age for _, age in ages), 2),
        "analysis_s": round(recorder.stats.analyze_s, 2), "finished_s": round(time.monotonic() - stopped_s, 1),
        "memory_mib": memory_mib, "messages": recorder.stats.messages,
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    return "\n".join(
        [
            f"recording on top of {found['prefilled_events']:,} events ({found['store_mib']:,} MiB), "
            f"{found['events_per_s']:,} events/s for {found['seconds']} s",
            f"  {found['publications']} snapshots, for {found['publishing_share']:.1%} of a core "
            f"(wanted: under {WANTED_SHARE:.0%}); the recorder in all {found['recorder_share']:.1%}",
            f"  newest event in the snapshot: {found['age_median_s']} s old in the median, {found['age_max_s']} s at "
            f"most (wanted: {WANTED_AGE_S} s); newest request {found['requests_age_s']} and "
            f"{found['requests_age_max_s']} s; {found['memory_mib']:,} MiB of memory at most",
            f"  opened in {found['opened_s']} s, first snapshot after {found['first_s']} s, the {_FIRST}th after "
            f"{found['warm_s']} s, the last analysis took {found['analysis_s']} s, finished in {found['finished_s']} s",
            *(f"  said: {message}" for message in found["messages"]),
        ]
    )


def name_of(found: dict[str, Any]) -> str:
    """Return the name that the figures are kept under: a store of the size that the aims are set for has its own."""
    return "publication_large" if found["prefilled_events"] >= 0.95 * WANTED_ON_EVENTS else "publication"


def _store(found: dict[str, Any]) -> str:
    return f" ({found['prefilled_events'] / 1e6:,.1f} million; {found['events_per_s']:,} events/s come in)"


def _rows(store: str, caveat: str = "") -> dict[str, Row]:
    return {
        "age": Row(
            f"greatest age of the newest event in a live snapshot, on top of {store}", " s",
            lambda found: found["age_max_s"], at_most(WANTED_AGE_S), size=_store,
            more=lambda found: f", {found['age_median_s']} s in the median", caveat=lambda _: caveat,
        ),
        "requests": Row(
            "greatest age of the newest request in it", " s", lambda found: found["requests_age_max_s"],
            more=lambda found: f", {found['requests_age_s']} s in the median",
        ),
        "share": Row(
            "publishing it", " % of a core", lambda found: found["publishing_share"] * 100,
            at_most(WANTED_SHARE * 100), caveat=lambda _: caveat,
        ),
        "recorder": Row(
            "the recorder in all", " % of a core", lambda found: found["recorder_share"] * 100,
            more=lambda found: f", {found['memory_mib']:,} MiB of memory at most",
        ),
        "first": Row(
            "first snapshot of a recorder that is started anew on it, after a kill", " s",
            lambda found: found["first_s"], more=lambda found: f", the {_FIRST}th after {found['warm_s']} s",
        ),
    }  # fmt: skip


ROWS = _rows("a small store", "; set for 100 million events")
ROWS_LARGE = _rows("100 million events")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--store", type=Path, help="record on top of a copy of this store instead of making one")
    parser.add_argument("--in-place", action="store_true", help="record on top of the store itself, which has it then")
    parser.add_argument("--prefill", type=Path, help="only make the store, here, for --store")
    parser.add_argument("--folder", type=Path, help="work here, where there is room")
    figures.add_option(parser)
    options = parser.parse_args()
    run = figures.Run(options.figures)
    if options.prefill:
        prefill(options.prefill, options.requests)
        return
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-", dir=options.folder) as name:
        folder = Path(name)
        output = folder / "run.duckdb"
        if options.store and options.in_place:
            output = options.store.absolute()
        elif options.store:
            shutil.copyfile(options.store, output)
        else:
            # In a process of its own, whose memory is not the recorder's.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                pool.submit(prefill, output, options.requests).result()
        found = measure(output, options.seconds, folder)
    sys.stdout.write((json.dumps(found, indent=1) if options.json else show(found)) + "\n")
    run.keep(name_of(found), {name: value for name, value in found.items() if name not in {"age_s", "messages"}})


if __name__ == "__main__":
    main()

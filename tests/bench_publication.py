"""What a live snapshot costs: `python -m tests.bench_publication [--json] [--requests N] [--store PATH] [--seconds S]`.

A recorder goes on with a store that is large already while engines emit some 2,000 events a second, and another process
opens the snapshot every second and says how old the newest event in it is. The aims are set for a store of 100 million
events, which is `--requests 2420000`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtrace.collect import Recorder
from kvtrace.store import Store, working_path
from kvtrace.testing import Fleet
from tests import bench_queries
from tests.live_fleet import emitting

REQUESTS = 20_000
SECONDS = 40
WANTED_AGE_S, WANTED_SHARE = 5.0, 0.1
_FIRST = 4  # snapshots until the first that is made of an earlier one, if the recorder was started on this store
_PATIENCE_S = 150.0
_LIVE_QPS = 60.0  # with their steps, some 2,000 events a second

READ = """
import sys, time, duckdb
while True:
    begin_s = time.time()
    connection = duckdb.connect(sys.argv[1], read_only=True)
    newest_ns, kept_ns = connection.execute(
        "SELECT max(last_ns), (SELECT max(start_ns) FROM request) FROM process").fetchone()
    connection.close()
    print(begin_s - newest_ns / 1e9, begin_s - kept_ns / 1e9, flush=True)
    time.sleep(max(0, 1 - (time.time() - begin_s)))
"""


def measure(prefilled: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """Record on top of a store for so long; return what it cost and how far the snapshot was behind."""
    output = folder / "run.duckdb"
    working = working_path(output)
    prefilled.rename(working)
    with Store.open(working, "write") as store:
        events = int(store.select("SELECT count(*) FROM event").values[0][0])
        store.remember({"recorder.published_ns": str(time.time_ns())})
    (folder / "spool").mkdir()
    recorder = Recorder(output, [folder / "spool"], {})
    begin_s = time.monotonic()
    fleet = Fleet(int(_LIVE_QPS * (seconds + _PATIENCE_S)), seed=11, per_s=_LIVE_QPS, pairs=1)
    with recorder:
        opened_s = time.monotonic() - begin_s
        with emitting(fleet, folder, folder / "spool"):
            recorder.start()
            while recorder.stats.published < _FIRST and time.monotonic() - begin_s < _PATIENCE_S:
                time.sleep(1.0)
            warm_s = time.monotonic() - begin_s
            before = (time.process_time(), recorder.stats.publishing_s, recorder.stats.published, recorder.stats.events)
            reader = subprocess.Popen([sys.executable, "-c", READ, str(output)], stdout=subprocess.PIPE, text=True)
            time.sleep(seconds)
            after = (time.process_time(), recorder.stats.publishing_s, recorder.stats.published, recorder.stats.events)
            reader.terminate()
            ages = [tuple(map(float, line.split())) for line in reader.communicate(timeout=60)[0].splitlines()]
        stopped_s = time.monotonic()
    cpu_s, publishing_s, published, arrived = (late - early for late, early in zip(after, before, strict=True))
    return {
        "prefilled_events": events, "store_mib": output.stat().st_size >> 20, "seconds": seconds,
        "events_per_s": round(arrived / seconds), "publications": published, "opened_s": round(opened_s, 1),
        "warm_s": round(warm_s, 1),
        "publishing_share": round(publishing_s / seconds, 3), "recorder_share": round(cpu_s / seconds, 3),
        "age_s": [round(age, 2) for age, _ in ages], "age_max_s": round(max(age for age, _ in ages), 2),
        "requests_age_max_s": round(max(age for _, age in ages), 2),
        "analysis_s": round(recorder.stats.analyze_s, 2), "finished_s": round(time.monotonic() - stopped_s, 1),
        "messages": recorder.stats.messages,
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    median_s = sorted(found["age_s"])[len(found["age_s"]) // 2]
    return "\n".join(
        [
            f"recording on top of {found['prefilled_events']:,} events ({found['store_mib']:,} MiB), "
            f"{found['events_per_s']:,} events/s for {found['seconds']} s",
            f"  {found['publications']} snapshots, for {found['publishing_share']:.1%} of a core "
            f"(wanted: under {WANTED_SHARE:.0%}); the recorder in all {found['recorder_share']:.1%}",
            f"  newest event in the snapshot: {median_s} s old in the median, {found['age_max_s']} s at most "
            f"(wanted: {WANTED_AGE_S} s); newest request {found['requests_age_max_s']} s at most",
            f"  opened in {found['opened_s']} s, first snapshots for {found['warm_s']} s, "
            f"the last analysis took {found['analysis_s']} s, finished in {found['finished_s']} s",
            *(f"  said: {message}" for message in found["messages"]),
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--store", type=Path, help="record on top of a copy of this store instead of making one")
    parser.add_argument("--folder", type=Path, help="work here, where there is room")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-", dir=options.folder) as name:
        folder = Path(name)
        prefilled = folder / "prefilled.duckdb"
        if options.store:
            shutil.copyfile(options.store, prefilled)
        else:
            bench_queries.made(options.requests, prefilled)
        found = measure(prefilled, options.seconds, folder)
    sys.stdout.write((json.dumps(found, indent=1) if options.json else show(found)) + "\n")


if __name__ == "__main__":
    main()

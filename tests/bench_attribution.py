"""What the attribution in SQL takes: `python -m tests.bench_attribution [--json] [--requests N ...] [--figures F]`.

A made-up fleet, loaded in a store; then in one run the attribution of all its requests, and beside it a bare pivot of
the same events by DuckDB with the same memory and threads: a row an id, as recorded, with the first time of every point
that the store has, but for the engines' own. Last, `kvtrace explain STORE REQUEST`
as a whole process, on the same store with the answers written to its tables. The aims are set for a million requests.
"""

# ruff: noqa: S608 -- the statements are made of constants

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.schema import quoted, text
from kvtrace.store import Store
from kvtrace.testing import Fleet, fill
from tests import figures
from tests.figure_rows import Row, at_least, at_most

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS = (100_000, 1_000_000)
WANTED_OF_REQUESTS = 1_000_000
WANTED_PER_S, WANTED_RATIO, WANTED_EXPLAIN_S, WANTED_MIB = 300_000, 2.5, 1.0, 4096


def pivot(store: Store) -> str:
    """Return the SELECT of a row an id with the first time of every point that the store's requests have."""
    named = store.rows("SELECT DISTINCT stage::VARCHAR AS stage FROM event WHERE request <> '' ORDER BY stage")
    # CASE, since FILTER on as many aggregates takes half as long again.
    times = ", ".join(
        f"min(CASE WHEN stage = {text(row['stage'])} THEN t_ns END) AS {quoted(row['stage'])}" for row in named
    )
    return f"SELECT request, {times} FROM event WHERE request <> '' GROUP BY request"


def timed(store: Store, sql: str) -> float:
    """Return how long it takes to work out a SELECT into a table, in seconds."""
    begin_s = time.perf_counter()
    store.execute(f"CREATE OR REPLACE TEMP TABLE worked_out AS {sql}")
    return time.perf_counter() - begin_s


def measure(requests: int, folder: Path) -> dict[str, Any]:
    """Make a store of so many requests, work out its attribution, pivot its events, explain one request."""
    path = folder / f"fleet{requests}.duckdb"
    begin_s = time.perf_counter()
    with Store.open(path, "write") as store:
        events = fill(store, Fleet(requests))
        store.execute("CHECKPOINT")
        made_s = time.perf_counter() - begin_s
        store.execute(f"SET memory_limit = '{WANTED_MIB - 1024} MiB'")
        pivot_s = timed(store, pivot(store))
        walk_s = timed(store, "FROM walk_request")
        walked = store.select("SELECT count(*) FILTER (walked) / count(*) FROM worked_out").values[0][0]
        explained = _write_answers(store)
    begin_s = time.perf_counter()
    command = [sys.executable, "-m", "kvtrace", "explain", str(path), explained]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    explain_s = time.perf_counter() - begin_s
    path.unlink()
    return {
        "requests": requests, "events": events, "made_s": round(made_s, 1), "pivot_s": round(pivot_s, 2),
        "walk_s": round(walk_s, 2), "per_s": round(requests / walk_s), "ratio": round(walk_s / pivot_s, 2),
        "walked": round(walked, 4), "explain_s": round(explain_s, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip


def _write_answers(store: Store) -> str:
    """Write what was worked out to the table request, as explain reads it; return the id of one of its requests."""
    shares = ("compute", "compute_run", "compute_queue", "coordination", "transfer", "transfer_low", "transfer_high")
    names = ", ".join(f"{share}_ns" for share in (*shares, "unattributed"))
    store.execute(
        f"INSERT INTO request (request_key, request_id, client_request_id, attempt, mode, verdict, scope, start_ns, "
        f"first_token_ns, ttft_ns, prefill_engine, decode_engine, crosses_hosts, note, {names}) "
        f"SELECT row_number() OVER (), request_id, client_request_id, 0, mode, 'complete', scope, start_ns, "
        f"first_token_ns, ttft_ns, prefill_engine, decode_engine, false, '', {names} FROM worked_out WHERE walked"
    )
    store.execute("CHECKPOINT")
    return str(store.select("SELECT request_id FROM request ORDER BY start_ns LIMIT 1 OFFSET 1000").values[0][0])


def show(found: list[dict[str, Any]]) -> str:
    """Return the figures as text."""
    lines = []
    for one in found:
        lines += [
            f"attribution of {one['requests']:,} requests, {one['events']:,} events, made in {one['made_s']} s",
            f"  in SQL {one['walk_s']} s: {one['per_s']:,} requests/s (wanted {WANTED_PER_S:,}), "
            f"answers {one['walked']:.2%}",
            f"  a bare pivot {one['pivot_s']} s; ratio {one['ratio']} (wanted {WANTED_RATIO})",
            f"  peak memory of the process so far {one['peak_mib']:,} MiB (wanted {WANTED_MIB:,})",
            f"  kvtrace explain STORE REQUEST: {one['explain_s']} s (wanted {WANTED_EXPLAIN_S})",
        ]
    return "\n".join(lines)


def _of_aim(name: str) -> Callable[[list[dict[str, Any]]], Any]:
    """Return what finds a figure of the store that the aims are set for."""

    def part(found: list[dict[str, Any]]) -> Any:
        return {one["requests"]: one for one in found}[WANTED_OF_REQUESTS][name]

    return part


_STORE = f"a store of {WANTED_OF_REQUESTS:,} requests"
ROWS = {
    "rate": Row(f"attribution in SQL of {_STORE}", " requests/s", _of_aim("per_s"), at_least(WANTED_PER_S)),
    "ratio": Row("the same", " times a bare pivot of the same events", _of_aim("ratio"), at_most(WANTED_RATIO)),
    "memory": Row("the same, memory of the process at most", " MiB", _of_aim("peak_mib"), at_most(WANTED_MIB)),
    "explain": Row(
        f"`kvtrace explain STORE REQUEST` on {_STORE}, the whole process", " s", _of_aim("explain_s"),
        at_most(WANTED_EXPLAIN_S),
    ),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    figures.add_option(parser)
    options = parser.parse_args()
    run = figures.Run(options.figures)
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-") as folder:
        found = [measure(requests, Path(folder)) for requests in options.requests]
    sys.stdout.write((json.dumps(found, indent=1) if options.json else show(found)) + "\n")
    run.keep("attribution", found)


if __name__ == "__main__":
    main()

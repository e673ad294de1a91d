"""What profiles cost serving: one lab, profiled and not, in alternating blocks.

    python -m tests.bench_profiles [--mode push] [--pairs 8] [--rates 20] [--json FILE]

All processes of a lab switch their profilers on and off while they run, so both kinds of block are of the same
processes. A block is a dozen requests, one after another; blocks alternate in the order A B B A. Beside TTFT stands the
processor time of all processes, pollers left out, and that of the profilers' own threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvtrace import profiler
from kvtrace.lab import pollers, stack
from kvtrace.profiles.receiver import Receiver
from tests.bench_serving import REQUESTS_A_BLOCK, WARM_UP, ask, interval, processor_ns

SITE = Path(__file__).parent / "profile_site"
SETTLE_S = 1.5
"""Longer than a process takes to look at the switch and to begin or end its agent."""
UPLOAD_S = 10


def threads_ns(lab: stack.Lab) -> Counter[str]:
    """Return the processor time so far by the name of the thread, digits left out; pollers left out."""
    found: Counter[str] = Counter()
    for pid in lab.pids():
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                name = "".join(letter for letter in (task / "comm").read_text().strip() if not letter.isdigit())
                nice = int((task / "stat").read_text().rpartition(")")[2].split()[16])
                if nice < pollers.NICE:
                    found[name] += int((task / "schedstat").read_text().split()[0])
    return found


def block(lab: stack.Lab, switch: Path, rate_hz: int, seed: int) -> dict[str, float]:
    """Run one block; return its median TTFT, processor time of requests and of idling, in ns (idling: of a second)."""
    switch.write_text(str(rate_hz))
    time.sleep(SETTLE_S)
    before_ns = processor_ns(lab)
    time.sleep(1.0)
    idle_ns = processor_ns(lab) - before_ns
    ask(lab, WARM_UP, seed + 100_000)
    before_ns, began_s = processor_ns(lab), time.monotonic()
    result = ask(lab, REQUESTS_A_BLOCK, seed)
    spent_ns = processor_ns(lab) - before_ns
    return {
        "ttft": statistics.median(record.ttft_ns for record in result.completed if record.ttft_ns is not None),
        "tpot": statistics.median(record.tpot_ns for record in result.completed if record.tpot_ns is not None),
        "request": spent_ns / REQUESTS_A_BLOCK,
        "idle": idle_ns,
        "seconds": time.monotonic() - began_s,
    }


def measure(mode: str, pairs: int, rate_hz: int) -> dict[str, object]:
    """Return the relative differences of one mode at one rate, with their intervals."""
    with tempfile.TemporaryDirectory() as folder, Receiver(Path(folder) / "profiles") as receiver:
        switch = Path(folder) / "switch"
        switch.write_text("0")
        variables = {
            "PYTHONPATH": str(SITE),
            "KVTRACE_BENCH_SWITCH": str(switch),
            profiler.VARIABLE: receiver.url,
            profiler.UPLOAD_VARIABLE: str(UPLOAD_S),
        }
        environment = dict.fromkeys(("prefill", "decode", "router"), variables)
        with stack.Lab(mode, quiet=True, environment=environment) as lab:
            block(lab, switch, 0, 0)
            found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for number in range(pairs):
                for on in (False, True) if number % 2 == 0 else (True, False):
                    found[on].append(block(lab, switch, rate_hz if on else 0, number))
            names = threads_ns(lab)
    differences = {
        name: interval([math.log(on[name] / off[name]) for on, off in zip(found[True], found[False], strict=True)])
        for name in ("ttft", "tpot", "request", "idle")
    }
    medians = {
        name: [statistics.median(one[name] for one in found[on]) / 1e6 for on in (False, True)]
        for name in ("ttft", "tpot", "request", "idle")
    }
    return {
        "mode": mode, "rate_hz": rate_hz, "pairs": pairs, "differences": differences, "medians_ms": medians,
        "threads_s": {name: round(ns / 1e9, 2) for name, ns in names.most_common(12)}, "kept": receiver.kept,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", nargs="+", default=["push"])
    parser.add_argument("--rates", nargs="+", type=int, default=[20])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [measure(mode, options.pairs, rate) for mode in options.mode for rate in options.rates]
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""What tracing costs serving, in one deployment: switched on and off while it runs, in alternating blocks.

    python -m tests.bench_switched [--mode push pull] [--minutes 6] [--json FILE]

Two deployments differ for their whole life by several percent, whichever of them is instrumented (`bench_serving`), so
here both kinds of block are of the same processes. What this leaves out is the way through hooks that are attached and
switched off: some dozens of calls a request, of which `bench_emit` says what each costs. Blocks, figures and intervals
are those of `bench_serving`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

from kvtrace.lab import stack
from tests import spooled
from tests.bench_serving import FIGURES, REQUESTS_A_BLOCK, WARM_UP, ask, describe, interval, processor_ns, summary

SITE = Path(__file__).parent / "switch_site"
SETTLE_S = 0.3
"""Longer than a process takes to look at the switch."""


def block(lab: stack.Lab, switch: Path, state: str, seed: int) -> dict[str, float]:
    """Run one block with tracing on or off; return its figures."""
    switch.write_text(state)
    time.sleep(SETTLE_S)
    ask(lab, WARM_UP, seed + 100_000)
    before_ns = processor_ns(lab)
    result = ask(lab, REQUESTS_A_BLOCK, seed)
    return summary(result, processor_ns(lab) - before_ns)


def measure(mode: str, seconds: float) -> dict[str, object]:
    """Return the relative differences of one mode, on against off, with their intervals."""
    pairs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-") as folder:
        switch, spool = Path(folder) / "switch", Path(folder) / "spool"
        switch.write_text("on")
        variables = {"PYTHONPATH": str(SITE), "KVTRACE_BENCH_SWITCH": str(switch)}
        environment = dict.fromkeys(("prefill", "decode", "router"), variables)
        with stack.Lab(mode, quiet=True, spool=spool, environment=environment) as lab:
            block(lab, switch, "on", 900)  # first contact of the engines
            check_switch(lab, switch, spool)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or len(pairs) < 2:
                order = ("off", "on") if len(pairs) % 2 == 0 else ("on", "off")
                found = {state: block(lab, switch, state, len(pairs)) for state in order}
                pairs.append({name: math.log(found["on"][name] / found["off"][name]) for name in FIGURES})
    return {
        "mode": mode,
        "requests_a_side": len(pairs) * REQUESTS_A_BLOCK,
        **{name: interval([pair[name] for pair in pairs]) for name in FIGURES},
    }


def check_switch(lab: stack.Lab, switch: Path, spool: Path) -> None:
    """End the bench unless a block writes events while tracing is on, and none while it is off."""
    counts = []
    for state in ("off", "on"):
        switch.write_text(state)
        time.sleep(SETTLE_S)
        before = requests_in(spool)
        ask(lab, 2, 800)
        counts.append(len(requests_in(spool) - before))
    if counts != [0, 2]:
        raise SystemExit(f"the switch does not work: {counts[0]} requests traced while off, {counts[1]} while on")


def requests_in(spool: Path) -> set[str]:
    """Return the ids that the router gave to the requests that the spool tells of."""
    return {event.request for event in spooled.read(spool).events if event.request.startswith("kvt-")}


def main() -> None:
    """Measure the asked modes and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--minutes", type=float, default=6.0, help="time that a mode is measured")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = []
    for mode in arguments.mode:
        figure = measure(mode, arguments.minutes * 60)
        figures.append(figure)
        print(f"{mode}: tracing on against off, {figure['requests_a_side']} requests a side")  # noqa: T201
        for name in FIGURES:
            print(f"  {name:<11}{describe(figure[name])}")  # type: ignore[arg-type]  # noqa: T201
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps({"switched": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What tracing costs serving, in one deployment: switched on and off while it runs, by turns from request to request.

    python -m tests.bench_switched [--mode push pull] [--minutes 5] [--sides prefill decode router] [--recorded]
        [--figures FILE]

Two deployments differ for their whole life by several percent, whichever of them is instrumented (`bench_serving`), so
here both kinds of request are served by the same processes. The machine's speed drifts within seconds: neighbours of a
few hundred ms share it, blocks of a dozen requests do not (on the same requests their intervals are twice as wide).
What this leaves out is the way through hooks that are attached and switched off: some dozens of calls a request, of
which `bench_emit` says what each costs. With `--sides` only these switch, the others trace all the time. `--recorded`:
a recorder follows with live metrics, spans to a receiver and snapshots with a copy for Grafana; it is stopped while
tracing is off, so that all of its work falls on requests with tracing on. Each pair asks the same prompt, in turn first
with and first without; its figure is the ratio on / off, and the interval is the 95 % bootstrap interval of the mean
log ratio over pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.lab import stack
from tests import figures, spooled
from tests.bench_serving import FIGURES, ask, describe, interval, processor_ns, rows, summary
from tests.live_recorder import following

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence

SITE = Path(__file__).parent / "switch_site"
SETTLE_S = 0.04
"""Longer than a process takes to look at the switch."""
WARM_UP = 8
SIDES = ("prefill", "decode", "router")
STATES = {"off": b"\0", "on": b"\1"}


class Switch:
    """The file that says whether the deployment's processes trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorder: subprocess.Popen[bytes] | None = None
        """Stopped while tracing is off."""
        path.write_bytes(STATES["on"])

    def turn(self, state: str) -> None:
        """Turn tracing on or off, in place since processes have mapped the file, and wait until all have seen it."""
        with self.path.open("r+b") as file:
            file.write(STATES[state])
        if self.recorder is not None:
            self.recorder.send_signal(signal.SIGCONT if state == "on" else signal.SIGSTOP)
        time.sleep(SETTLE_S)


@contextmanager
def recording(switch: Switch, spool: Path, folder: Path) -> Iterator[None]:
    """Let a recorder follow, which works only while tracing is on."""
    with following(spool, folder) as recorder:
        switch.recorder = recorder
        try:
            yield
        finally:
            switch.turn("on")
            switch.recorder = None


def serve(lab: stack.Lab, switch: Switch, state: str, seed: int) -> dict[str, float]:
    """Serve one request with tracing on or off; return its figures."""
    switch.turn(state)
    before_ns = processor_ns(lab)
    result = ask(lab, 1, seed)
    return summary(result, processor_ns(lab) - before_ns)


def measure(mode: str, seconds: float, sides: Sequence[str] = SIDES, *, recorded: bool = False) -> dict[str, object]:
    """Return the relative differences of one mode, on against off, with their intervals; only `sides` switch."""
    pairs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvtrace-bench-") as folder:
        switch, spool = Switch(Path(folder) / "switch"), Path(folder) / "spool"
        variables = {"PYTHONPATH": str(SITE), "KVTRACE_BENCH_SWITCH": str(switch.path)}
        environment = dict.fromkeys(sides, variables)
        with stack.Lab(mode, quiet=True, spool=spool, environment=environment) as lab:
            ask(lab, WARM_UP, 900)  # first contact of the engines
            if set(sides) == set(SIDES):
                check_switch(lab, switch, spool)
            with recording(switch, spool, Path(folder)) if recorded else nullcontext():
                until_s = time.monotonic() + seconds
                while time.monotonic() < until_s or len(pairs) < 2:
                    order = ("off", "on") if len(pairs) % 2 == 0 else ("on", "off")
                    found = {state: serve(lab, switch, state, len(pairs)) for state in order}
                    pairs.append({name: math.log(found["on"][name] / found["off"][name]) for name in FIGURES})
    return {"mode": mode, "requests_a_side": len(pairs), **{n: interval([one[n] for one in pairs]) for n in FIGURES}}


def check_switch(lab: stack.Lab, switch: Switch, spool: Path) -> None:
    """End the bench unless a request writes events while tracing is on, and none while it is off."""
    counts = []
    for state in ("off", "on"):
        switch.turn(state)
        before = requests_in(spool)
        ask(lab, 2, 800)
        counts.append(len(requests_in(spool) - before))
    if counts != [0, 2]:
        raise SystemExit(f"the switch does not work: {counts[0]} requests traced while off, {counts[1]} while on")


def requests_in(spool: Path) -> set[str]:
    """Return the ids that the router gave to the requests that the spool tells of."""
    return {event.request for event in spooled.read(spool).events if event.request.startswith("kvt-")}


ROWS = rows("tracing on against off, switched from request to request")
ROWS_RECORDED = rows("switched likewise, with a recorder that shows metrics, sends spans and publishes snapshots")


def main() -> None:
    """Measure the asked modes and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--minutes", type=float, default=5.0, help="time that a mode is measured")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="whose tracing is switched")
    parser.add_argument("--recorded", action="store_true", help="record beside it, with metrics, spans and snapshots")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    figures.add_option(parser)
    arguments = parser.parse_args()
    if arguments.figures and set(arguments.sides) != set(SIDES):
        parser.error("--figures keeps what all sides cost: leave --sides away")
    run = figures.Run(arguments.figures)
    found = []
    for mode in arguments.mode:
        figure = measure(mode, arguments.minutes * 60, arguments.sides, recorded=arguments.recorded)
        found.append(figure)
        whose = ", ".join(arguments.sides) + (" and the recorder" if arguments.recorded else "")
        print(f"{mode}: tracing of {whose} on against off, {figure['requests_a_side']} requests a side")  # noqa: T201
        for name in FIGURES:
            print(f"  {name:<11}{describe(figure[name])}")  # type: ignore[arg-type]  # noqa: T201
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps({"switched": found}, indent=2) + "\n")
    run.keep("switched_recorded" if arguments.recorded else "switched", found)


if __name__ == "__main__":
    main()

"""What tracing costs serving: instrumented against stock connectors, both deployments up, alternating blocks.

    python -m tests.bench_serving [--mode push pull] [--minutes 10] [--sittings 6] [--recorded]
        [--json FILE] [--figures FILE]

A block is a dozen requests, one after another, the same ones on both sides; blocks alternate in the order A B B A, so
that drift of the machine falls on both. A pair's figure is the ratio instrumented / stock of neighbouring blocks; a
sitting's interval is the 95 % bootstrap interval of the mean log ratio over its pairs.

Two idle deployments are not idle: NIXL's progress threads poll. So the one that is not asked is frozen (SIGSTOP), and
each block begins with requests that do not count. Sittings start both anew, in the other order, since the place that
a deployment got on the machine stays its own: a difference that changes its sign with the order is the machine's. So
the interval of all follows from how the sittings' means scatter (Student's), not from how many pairs they have.
A sitting ends when its share of the time is up. Beside the times stands the processor time of all processes, pollers
left out: what tracing adds must show there, however the machine scatters. `--recorded`: a recorder follows the
instrumented deployment with live metrics, spans to a receiver and snapshots with a copy for Grafana; it is stopped
while stock is asked, so that all of its work falls on the instrumented blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace import intervals
from kvtrace.lab import pollers, stack, workload
from tests import figures
from tests.figure_rows import Row, within
from tests.live_recorder import following

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

CONCURRENCY = 1
REQUESTS_A_BLOCK = 12
INPUT_LEN = 200
OUTPUT_LEN = 8
WARM_UP = 2
FIGURES = ("ttft", "tpot", "throughput", "processor")
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "throughput": "throughput", "processor": "processor time"}
WANTED_WITHIN = 0.03


def signal_all(lab: stack.Lab, number: signal.Signals) -> None:
    """Send a signal to every process of a deployment; each of its programs leads a process group."""
    for server in (*lab.engines, *((lab.router,) if lab.router else ())):
        os.killpg(server.pid, number)


@contextmanager
def awake(lab: stack.Lab) -> Iterator[None]:
    """Let a frozen deployment run inside the block."""
    signal_all(lab, signal.SIGCONT)
    try:
        yield
    finally:
        signal_all(lab, signal.SIGSTOP)


def ask(lab: stack.Lab, requests: int, seed: int, output_len: int = OUTPUT_LEN) -> workload.Result:
    """Ask a deployment, one request after the other; end the bench where a request fails."""
    result = workload.run(
        lab.url, quiet=True, requests=requests, rate_qps=math.inf, concurrency=CONCURRENCY,
        input_len=INPUT_LEN, output_len=output_len, seed=seed,
    )  # fmt: skip
    failed = [record.error for record in result.records if record.error]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return result


def processor_ns(lab: stack.Lab) -> int:
    """Return the processor time of a deployment so far, NIXL's pollers (which the lab put behind the rest) left out."""
    total = 0
    for pid in lab.pids():
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                nice = int((task / "stat").read_text().rpartition(")")[2].split()[16])
                total += int((task / "schedstat").read_text().split()[0]) if nice < pollers.NICE else 0
    return total


def calmed(lab: stack.Lab) -> int:
    """Return how many threads of a deployment the lab put behind the rest."""
    stats = [task / "stat" for pid in lab.pids() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(stat.read_text().rpartition(")")[2].split()[16]) == pollers.NICE for stat in stats)


@contextmanager
def working(recorder: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Let a stopped recorder, if there is one, work inside the block."""
    if recorder is None:
        yield
        return
    recorder.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        recorder.send_signal(signal.SIGSTOP)


def block(lab: stack.Lab, seed: int, recorder: subprocess.Popen[bytes] | None = None) -> dict[str, float]:
    """Run one block; return its median TTFT and TPOT in ns, requests/s, and the deployment's processor time in ns."""
    with awake(lab), working(recorder):
        ask(lab, WARM_UP, seed + 100_000)
        before_ns = processor_ns(lab)
        result = ask(lab, REQUESTS_A_BLOCK, seed)
        return summary(result, processor_ns(lab) - before_ns)


def summary(result: workload.Result, processor_spent_ns: int) -> dict[str, float]:
    """Return a block's median TTFT and TPOT in ns, requests/s, and processor time in ns."""
    return {
        "processor": processor_spent_ns,
        "ttft": statistics.median(record.ttft_ns for record in result.completed if record.ttft_ns is not None),
        "tpot": statistics.median(record.tpot_ns for record in result.completed if record.tpot_ns is not None),
        "throughput": result.served_rate_qps,
    }


def interval(log_ratios: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Return (mean, low, high) of the ratio as a relative difference, with its 95 % bootstrap interval."""
    values = np.asarray(log_ratios)
    picks = np.random.default_rng(seed).integers(0, len(values), (2_000, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975])
    return math.expm1(values.mean()), math.expm1(low), math.expm1(high)


def among(means: list[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of the ratio as a relative difference, as sittings of these mean log ratios tell it."""
    error = statistics.stdev(means) / math.sqrt(len(means))
    found = intervals.estimate(intervals.Spread(statistics.fmean(means), error, len(means) - 1, 0.0))
    if found.low is None or found.high is None:
        raise ValueError(f"{len(means)} sittings have no interval")
    return math.expm1(found.value), math.expm1(found.low), math.expm1(found.high)


def measure(mode: str, minutes: float, sittings: int, *, recorded: bool = False) -> dict[str, object]:
    """Return the relative differences of one mode with their intervals, of all sittings and of each."""
    seconds = minutes * 60 / sittings
    by_sitting = [sit(mode, seconds, traced_first=one % 2 == 1, recorded=recorded) for one in range(sittings)]
    pairs = [pair for sitting in by_sitting for pair in sitting]
    return {
        "mode": mode,
        "pairs": len(pairs),
        "requests_a_side": len(pairs) * REQUESTS_A_BLOCK,
        **{
            figure: among([statistics.fmean(pair[figure] for pair in sitting) for sitting in by_sitting])
            for figure in FIGURES
        },
        "sittings": [
            {figure: interval([pair[figure] for pair in sitting]) for figure in FIGURES} for sitting in by_sitting
        ],
    }


def sit(mode: str, seconds: float, *, traced_first: bool, recorded: bool = False) -> list[dict[str, float]]:
    """Start both deployments in the order asked for and return the log ratios of each pair of blocks."""
    folder = Path(tempfile.mkdtemp(prefix="kvtrace-bench-"))
    spool = folder / "spool"
    stock = stack.Lab(mode, instrumented=False, quiet=True)
    traced = stack.Lab(mode, instrumented=True, spool=spool, quiet=True)
    pairs: list[dict[str, float]] = []
    try:
        with ExitStack() as running:
            for lab in (traced, stock) if traced_first else (stock, traced):
                running.enter_context(lab)
                running.callback(signal_all, lab, signal.SIGCONT)
                signal_all(lab, signal.SIGSTOP)
            if calmed(stock) != calmed(traced):
                raise SystemExit(
                    f"{calmed(stock)} pollers of stock and {calmed(traced)} of instrumented are calmed: no pair"
                )
            recorder = running.enter_context(following(spool, folder)) if recorded else None
            _pair(stock, traced, 900, recorder)  # first contact of the engines
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or len(pairs) < 2:
                pairs.append(_pair(stock, traced, len(pairs), recorder))
        if not any(path.stat().st_size for path in spool.iterdir()):
            raise SystemExit(f"{mode}: the instrumented deployment wrote nothing")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return pairs


def _pair(
    stock: stack.Lab, traced: stack.Lab, number: int, recorder: subprocess.Popen[bytes] | None
) -> dict[str, float]:
    found = {}
    for lab in (stock, traced) if number % 2 == 0 else (traced, stock):
        found[id(lab)] = block(lab, number, recorder if lab is traced else None)
    return {figure: math.log(found[id(traced)][figure] / found[id(stock)][figure]) for figure in FIGURES}


def describe(figure: tuple[float, float, float]) -> str:
    """Return a relative difference with its interval in words."""
    mean, low, high = figure
    return f"{mean:+7.2%}  95 % interval {low:+.2%} .. {high:+.2%}"


def rows(how: str) -> dict[str, Row]:
    """Return the rows of a bench that finds relative differences by mode, for the table of figures."""
    return {
        mode: Row(
            f"serving by {mode}, {how}", "", partial(_differences, mode), within(WANTED_WITHIN),
            size=partial(_requests, mode),
        )
        for mode in ("push", "pull")
    }  # fmt: skip


def _of_mode(mode: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["mode"]: one for one in found}[mode]


def _differences(mode: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {NAMES[figure]: _of_mode(mode, found)[figure] for figure in FIGURES}


def _requests(mode: str, found: list[dict[str, Any]]) -> str:
    return f", {_of_mode(mode, found)['requests_a_side']} requests a side"


ROWS = rows("instrumented against stock")
ROWS_RECORDED = rows("against stock, with a recorder that shows metrics, sends spans and publishes snapshots")


def main() -> None:
    """Measure the asked modes and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--minutes", type=float, default=10.0, help="time that a mode is measured")
    parser.add_argument("--sittings", type=int, default=6, help="how often both deployments are started")
    parser.add_argument("--recorded", action="store_true", help="record beside it, with metrics, spans and snapshots")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    figures.add_option(parser)
    arguments = parser.parse_args()
    if arguments.sittings < 2:
        parser.error("--sittings: two at least, since one does not tell a deployment from its place on the machine")
    run = figures.Run(arguments.figures)
    found = []
    for mode in arguments.mode:
        figure = measure(mode, arguments.minutes, arguments.sittings, recorded=arguments.recorded)
        found.append(figure)
        print(f"{mode}: instrumented against stock, {figure['requests_a_side']} requests a side")  # noqa: T201
        for name in FIGURES:
            print(f"  {name:<11}{describe(figure[name])}")  # type: ignore[arg-type]  # noqa: T201
            for number, sitting in enumerate(figure["sittings"], 1):  # type: ignore[arg-type, var-annotated]
                print(f"    sitting {number} {describe(sitting[name])}")  # noqa: T201
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps({"serving": found}, indent=2) + "\n")
    run.keep("serving_recorded" if arguments.recorded else "serving", found)


if __name__ == "__main__":
    main()

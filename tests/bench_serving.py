"""What tracing costs serving: instrumented against stock connectors, both deployments up, alternating blocks.

    python -m tests.bench_serving [--mode push pull] [--minutes 8] [--json FILE]

A block is a few requests in flight at a constant concurrency; blocks alternate in the order A B B A, so that drift
of the machine falls on both. A pair's figure is the ratio instrumented / stock of neighbouring blocks; the interval is
the 95 % bootstrap interval of the mean log ratio over pairs. It ends when every interval is within +- 3 %, or when
the time is up.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtrace.lab import stack, workload

CONCURRENCY = 1
REQUESTS_A_BLOCK = 12
INPUT_LEN = 200
OUTPUT_LEN = 8
WIDTH_MAX = 0.03
FIGURES = ("ttft", "tpot", "throughput")


def block(lab: stack.Lab, seed: int) -> dict[str, float]:
    """Run one block and return its median TTFT and TPOT in ns and its throughput in requests/s."""
    result = workload.run(
        lab.url, quiet=True, requests=REQUESTS_A_BLOCK, rate_qps=math.inf, concurrency=CONCURRENCY,
        input_len=INPUT_LEN, output_len=OUTPUT_LEN, seed=seed,
    )  # fmt: skip
    failed = [record.error for record in result.records if record.error]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return {
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


def measure(mode: str, minutes: float) -> dict[str, object]:
    """Return the relative differences of one mode with their intervals."""
    spool = Path(tempfile.mkdtemp(prefix="kvtrace-bench-"))
    pairs: list[dict[str, float]] = []
    try:
        with (
            stack.Lab(mode, instrumented=False, quiet=True) as stock,
            stack.Lab(mode, instrumented=True, spool=spool, quiet=True) as traced,
        ):
            for warm in range(2):
                block(stock, 900 + warm), block(traced, 900 + warm)
            deadline_s = time.monotonic() + minutes * 60
            while time.monotonic() < deadline_s:
                pairs.append(_pair(stock, traced, len(pairs)))
                if len(pairs) >= 12 and all(_narrow(pairs, figure) for figure in FIGURES):
                    break
        written = sum(path.stat().st_size for path in spool.iterdir())
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    return {
        "mode": mode,
        "pairs": len(pairs),
        "requests_a_side": len(pairs) * REQUESTS_A_BLOCK,
        "spool_bytes": written,
        **{figure: interval([pair[figure] for pair in pairs]) for figure in FIGURES},
    }


def _pair(stock: stack.Lab, traced: stack.Lab, number: int) -> dict[str, float]:
    order = (stock, traced) if number % 2 == 0 else (traced, stock)
    found = {id(lab): block(lab, number) for lab in order}
    return {figure: math.log(found[id(traced)][figure] / found[id(stock)][figure]) for figure in FIGURES}


def _narrow(pairs: list[dict[str, float]], figure: str) -> bool:
    _, low, high = interval([pair[figure] for pair in pairs])
    return (high - low) / 2 <= WIDTH_MAX


def main() -> None:
    """Measure the asked modes and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--minutes", type=float, default=8.0, help="longest time a mode is measured")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = []
    for mode in arguments.mode:
        figure = measure(mode, arguments.minutes)
        figures.append(figure)
        print(f"{mode}: instrumented against stock, {figure['requests_a_side']} requests a side")  # noqa: T201
        for name in FIGURES:
            mean, low, high = figure[name]  # type: ignore[misc]
            print(f"  {name:<11}{mean:+7.2%}  95 % interval {low:+.2%} .. {high:+.2%}")  # noqa: T201
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps({"serving": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

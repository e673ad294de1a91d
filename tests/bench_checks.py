"""What checking blocks costs: `python -m tests.bench_checks [--json] [--requests N] [--figures FILE]`.

First the parts, on host memory of the lab's shape: a checksum a MB (on the thread of its own, which lets go of the
interpreter meanwhile), the copy of a request's last two blocks (on the step's thread), the choice by id; beside a plain
copy of the same bytes in the same run. Then serving: one lab in which half of the requests are chosen, by a hash that
knows nothing of them, so that the chosen and the others meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from instrumented_connectors.block_memory import BlockMemory, regions
from instrumented_connectors.sampling import Sampling
from tests import figures
from tests.bench_serving import WANTED_WITHIN
from tests.figure_rows import Row, plain, shortened, within

MB = 1_000_000
REGIONS, BLOCKS, LENGTH = 4, 64, 131_072  # the lab: 4 layers, blocks of 128 tokens, K and V of 2 heads of 64 floats
REPEATS = 200
REQUESTS = 300
DRAWS = 4000


def median_ns(work: Callable[[int], Any]) -> float:
    """Return the median time of one call, which gets the number of its round."""
    times = []
    for number in range(REPEATS):
        begin_ns = time.perf_counter_ns()
        work(number)
        times.append(time.perf_counter_ns() - begin_ns)
    return statistics.median(times)


def parts() -> dict[str, float]:
    """Return what the parts cost."""
    import torch

    tensor = torch.randint(0, 256, (REGIONS, BLOCKS, LENGTH), dtype=torch.uint8)
    base = tensor.data_ptr()
    rows = np.array([(base + at * LENGTH, LENGTH, 0) for at in range(REGIONS * BLOCKS)])
    memory = BlockMemory.of(regions(rows, BLOCKS) or (), [tensor], BLOCKS)
    assert memory is not None
    flat = tensor.numpy()
    size = memory.block_bytes
    sampling = Sampling(0.1)
    checksum_ns = median_ns(lambda number: memory.checksum(number % BLOCKS))
    plain_ns = median_ns(lambda number: flat[:, number % BLOCKS].copy())
    return {
        "checksum_ms_per_mb": checksum_ns / size * MB / 1e6,
        "checksum_of_plain_copies": checksum_ns / plain_ns,
        "last_blocks_copied_us": 2 * median_ns(lambda number: memory.copied(number % BLOCKS)) / 1e3,
        "last_blocks_bytes": 2 * size,
        "choice_us": median_ns(lambda number: sampling.takes(f"cmpl-kvt-{number:032x}-0-aaaaaaaa")) / 1e3,
    }


def serving(mode: str, requests: int) -> dict[str, Any]:
    """Return by how much the chosen requests' TTFT and decoding differ from the others', ms and percent."""
    from kvtrace.store import Store
    from tests.engine.deployment import Deployment

    with Deployment(mode, Path(tempfile.mkdtemp(prefix="kvt-checks-")), verify_kv=0.5) as one:
        for _ in range(requests):
            one.send("checked")
        with Store.open(one.record(), "read") as store:
            rows = store.rows(
                "SELECT ttft_ns / 1e6 AS ttft_ms, checked_blocks, unchecked_blocks FROM request "
                "WHERE client_request_id LIKE 'checked:%' AND ttft_ns IS NOT NULL"
            )
    chosen = [row for row in rows if row["checked_blocks"] is not None]
    ttft_ms = [row["ttft_ms"] for row in chosen]
    others_ms = [row["ttft_ms"] for row in rows if row["checked_blocks"] is None]
    source = np.random.default_rng(1)
    drawn = [np.median(source.choice(values, (DRAWS, len(values))), axis=1) for values in (ttft_ms, others_ms)]
    low_ms, high_ms = np.quantile(drawn[0] - drawn[1], (0.025, 0.975))
    return {
        "mode": mode,
        "chosen": len(chosen),
        "others": len(others_ms),
        "checked_blocks": sum(row["checked_blocks"] for row in chosen),
        "unchecked_blocks": sum(row["unchecked_blocks"] for row in chosen),
        "others_ttft_ms": statistics.median(others_ms),
        "ttft_more_ms": statistics.median(ttft_ms) - statistics.median(others_ms),
        "ttft_more_low_ms": float(low_ms),
        "ttft_more_high_ms": float(high_ms),
    }


def _serving(found: dict[str, Any]) -> dict[str, Any]:
    """Return by how much chosen requests' TTFT differs, as a share of the others'."""
    names = ("ttft_more_ms", "ttft_more_low_ms", "ttft_more_high_ms")
    return {one["mode"]: tuple(one[name] / one["others_ttft_ms"] for name in names) for one in found["serving"]}


def _copies(found: dict[str, Any]) -> str:
    return f", {plain(shortened(found['parts']['checksum_of_plain_copies']))} plain copies of the same bytes"


def _compared(found: dict[str, Any]) -> str:
    checked = sum(one["checked_blocks"] for one in found["serving"])
    missed = sum(one["unchecked_blocks"] for one in found["serving"])
    return f"; {checked:,} of {checked + missed:,} blocks compared"


ROWS = {
    "checksum": Row(
        "a checksum, on a thread of its own, which lets go of the interpreter", " ms a MB on each side",
        lambda found: found["parts"]["checksum_ms_per_mb"],
        more=_copies,
    ),
    "copy": Row(
        "on D's forward thread: the copy of the last two blocks", " ms a request",
        lambda found: found["parts"]["last_blocks_copied_us"] / 1e3,
        more=lambda found: f", {plain(shortened(found['parts']['last_blocks_bytes'] / MB))} MB",
    ),
    "choice": Row("the choice by id", " us a request", lambda found: found["parts"]["choice_us"]),
    "serving": Row(
        "TTFT of chosen requests against the others of the same lab, half of them chosen", "", _serving,
        within(WANTED_WITHIN), more=_compared,
    ),
}  # fmt: skip


def main() -> int:
    """Measure, print, return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="a mode; 0 for the parts alone")
    figures.add_option(parser)
    arguments = parser.parse_args()
    run = figures.Run(arguments.figures)
    found: dict[str, Any] = {"parts": parts()}
    if arguments.requests:
        found["serving"] = [serving(mode, arguments.requests) for mode in ("push", "pull")]
    run.keep("checks", found)
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for name, value in found["parts"].items():
        sys.stdout.write(f"{name:<28}{value:>12,.3f}\n")
    for one in found.get("serving", ()):
        sys.stdout.write(
            f"{one['mode']}: TTFT of {one['chosen']} chosen requests {one['ttft_more_ms']:+.2f} ms "
            f"({one['ttft_more_low_ms']:+.2f} to {one['ttft_more_high_ms']:+.2f}) against {one['others']} others at "
            f"{one['others_ttft_ms']:.1f} ms; {one['checked_blocks']} blocks checked, {one['unchecked_blocks']} not\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's own totals, as the lab's engines tell them at `/metrics`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx

from kvtrace.totals import METRICS, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtrace.lab.engine import Engine

_TIMEOUT_S = 5.0
_SETTLE_S = 0.5
_SETTLE_MOST_S = 5.0


def read(engines: Iterable[Engine]) -> dict[str, dict[str, float]]:
    """Return by engine id what it says, by `Metric.name`, once it says the same twice half a second apart.

    vLLM passes a step's figures on with a later step, so the last ones arrive late. An engine that does not answer is
    left out.
    """
    engines = list(engines)
    found = read_once(engines)
    deadline_s = time.monotonic() + _SETTLE_MOST_S
    while time.monotonic() < deadline_s:
        time.sleep(_SETTLE_S)
        before, found = found, read_once(engines)
        if found == before:
            break
    return found


def since(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return by how much the totals of each engine have grown; one that did not answer twice is left out."""
    return {
        engine: {name: value - before[engine].get(name, 0.0) for name, value in totals.items()}
        for engine, totals in after.items()
        if engine in before
    }


def read_once(engines: Iterable[Engine]) -> dict[str, dict[str, float]]:
    """Return by engine id what it says now, by `Metric.name`; an engine that does not answer is left out."""
    found = {}
    for engine in engines:
        try:
            reply = httpx.get(f"{engine.url}/metrics", timeout=_TIMEOUT_S, trust_env=False)
            reply.raise_for_status()
        except httpx.HTTPError:
            continue
        found[engine.engine_id] = parse(reply.text)
    return found


def parse(text: str) -> dict[str, float]:
    """Return the totals in a reply of `/metrics`, by `Metric.name`, summed over what else tells samples apart."""
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM, which the lab runs

    wanted: dict[str, Metric] = {metric.sample: metric for metric in METRICS}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric = wanted.get(sample.name)
            if metric is not None and _counts(metric, sample.labels):
                sums[metric.name] = sums.get(metric.name, 0.0) + sample.value
    return sums


def _counts(metric: Metric, labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) in values for name, values in metric.labels.items())

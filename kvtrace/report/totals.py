"""What vLLM's `/metrics` said at the end of a run, compared with what the store holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtrace.legs import base_ids
from kvtrace.totals import SILENT, UNEXPLAINED, Recorded, Total, compare
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrace.store import Store

TOTALS_NAMED = 3
"""Of totals that differ for one reason so many are named; the table has all."""
FACT = "metrics."
"""Facts of a run by this name and an engine's id hold what that engine's `/metrics` said, as JSON."""

_RECORDED_SQL = """
WITH seen AS (
  SELECT p.engine, e.process, e.stage::VARCHAR AS stage, e.request, e.a, e.b, e.c FROM event AS e
  JOIN engine_process AS p USING (process) WHERE p.engine <> ''
), departed AS (
  SELECT unnest($engines::VARCHAR[]) AS engine, unnest($requests::VARCHAR[]) AS request
), ended AS (
  SELECT DISTINCT engine, request FROM seen WHERE stage IN ('prefill.finished', 'decode.finished')
  EXCEPT FROM departed
), posted AS (
  SELECT engine, sum(b)::BIGINT AS moved_bytes, sum(c)::BIGINT AS descriptors FROM seen AS s
  WHERE stage = 'transfer.post_ended' AND EXISTS (
    SELECT 1 FROM seen AS d WHERE d.stage = 'transfer.done' AND d.process = s.process AND d.a = s.a
  ) GROUP BY ALL
), lost AS (
  SELECT engine, sum(lost_records)::BIGINT AS lost_records FROM engine_process WHERE engine <> '' GROUP BY ALL
)
SELECT engine,
  count(*) FILTER (stage IN ('prefill.finished', 'decode.finished')) AS requests,
  count(*) FILTER (stage IN ('prefill.finished', 'decode.finished') AND EXISTS (
    SELECT 1 FROM departed AS x WHERE x.engine = s.engine AND x.request = s.request)) AS departed,
  coalesce(sum(a) FILTER (stage IN ('prefill.enqueued', 'decode.enqueued')), 0)::BIGINT AS prompt_tokens,
  coalesce(sum(a) FILTER (stage IN ('prefill.enqueued', 'decode.enqueued') AND NOT EXISTS (
    SELECT 1 FROM ended AS x WHERE x.engine = s.engine AND x.request = s.request)), 0)::BIGINT
    AS unfinished_prompt_tokens,
  count(*) FILTER (stage = 'transfer.done') AS transfers,
  coalesce(any_value(posted.moved_bytes), 0)::BIGINT AS moved_bytes,
  coalesce(any_value(posted.descriptors), 0)::BIGINT AS descriptors,
  count(*) FILTER (stage = 'transfer.failed') AS failed_transfers,
  count(*) FILTER (stage = 'prefill.lease_expired') AS expired,
  count(*) FILTER (stage = 'notification.orphaned') AS late_notifications,
  coalesce(any_value(lost.lost_records), 0)::BIGINT AS lost_records
FROM seen AS s LEFT JOIN posted USING (engine) LEFT JOIN lost USING (engine)
GROUP BY engine
"""

_EXCHANGES_SQL = """
SELECT p.engine, e.request, e.t_ns, split_part(e.stage::VARCHAR, '.http_', 2) AS what
FROM event AS e JOIN engine_process AS p USING (process) WHERE p.engine <> '' AND e.request IN (
  SELECT request FROM event WHERE stage IN ('prefill.http_disconnected', 'decode.http_disconnected')
) AND e.stage::VARCHAR SIMILAR TO '(prefill|decode)\\.http_(received|done|disconnected)' ORDER BY e.t_ns
"""
_FINISHED_SQL = """
SELECT p.engine, e.request, max(e.t_ns) AS t_ns FROM event AS e JOIN engine_process AS p USING (process)
WHERE p.engine <> '' AND stage IN ('prefill.finished', 'decode.finished') GROUP BY ALL
"""


def facts(said: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return what engines said as facts of a run."""
    return {f"{FACT}{engine}": json.dumps(values, sort_keys=True) for engine, values in said.items()}


def totals(store: Store, run: Mapping[str, str]) -> list[Total]:
    """Return every total of the run's engines from both sources; [] where no engine's `/metrics` were kept."""
    said = {name.removeprefix(FACT): json.loads(value) for name, value in run.items() if name.startswith(FACT)}
    if not said:
        return []
    departed = _departed(store)
    beside = {"engines": [engine for engine, _ in departed], "requests": [request for _, request in departed]}
    recorded = {row.pop("engine"): Recorded(**row) for row in store.rows(_RECORDED_SQL, beside)}
    return compare(said, recorded)


def _departed(store: Store) -> list[tuple[str, str]]:
    """Return by engine the requests that it finished and whose peer had left its HTTP server, not an earlier peer."""
    exchanges: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in store.rows(_EXCHANGES_SQL):
        exchanges.setdefault((row["engine"], row["request"]), []).append((row["t_ns"], row["what"]))
    if not exchanges:
        return []
    return [
        (row["engine"], row["request"])
        for row in store.rows(_FINISHED_SQL)
        if any(_was_left(exchanges.get((row["engine"], base), ()), row["t_ns"]) for base in base_ids(row["request"]))
    ]


def _was_left(exchanges: Sequence[tuple[int, str]], finished_ns: int) -> bool:
    """Return whether the peer left whose request came last before that; a client may ask again under one id."""
    begun = max(
        (n for n, (t_ns, what) in enumerate(exchanges) if what == "received" and t_ns <= finished_ns), default=0
    )
    return next((what for _, what in exchanges[begun:] if what != "received"), "") == "disconnected"


def sentences(found: Sequence[Total]) -> list[str]:
    """Return what the comparison says: how many totals differ or are explained, why which ones, whose are not known."""
    compared = [one for one in found if one.why != SILENT]
    apart: dict[str, list[Total]] = {}
    for one in compared:
        if not one.agrees:
            apart.setdefault(one.why, []).append(one)
    count = sum(map(len, apart.values()))
    differ = sum(one.is_a_difference for one in compared)
    counts = (
        f"{differ} {'differs' if differ == 1 else 'differ'}" if differ else "",
        f"{count - differ} {'is' if count - differ == 1 else 'are'} explained" if count > differ else "",
    )
    told = f"vLLM's /metrics and the store agree in {len(compared) - count} of {plural(len(compared), 'total')}"
    told += f"; {', '.join(filter(None, counts))}: " if count else "."
    reasons = []
    # What nothing explains comes first, then what was lost; what is only counted otherwise comes last.
    for why, totals in sorted(apart.items(), key=lambda item: (item[0] != UNEXPLAINED, not item[1][0].is_a_difference)):
        named = ", ".join(f"{one.name} of {one.engine} ({_counts(one)})" for one in totals[:TOTALS_NAMED])
        more = f" and {len(totals) - TOTALS_NAMED} more" if len(totals) > TOTALS_NAMED else ""
        reasons.append(f"{named}{more}, {'without explanation' if why == UNEXPLAINED else f'because {why}'}.")
    lines = [told + "".join(reasons)] if len(reasons) < 2 else [told.rstrip(), *reasons]
    if silent := sorted({one.engine for one in found if one.why == SILENT}):
        lines.append(
            f"The totals of {', '.join(silent)} are not known: /metrics did not answer before and after the load."
        )
    return lines


def _counts(one: Total) -> str:
    theirs = "none" if one.vllm is None else f"{one.vllm:,}"
    return f"vLLM {theirs}, the store {one.kvtrace:,}"

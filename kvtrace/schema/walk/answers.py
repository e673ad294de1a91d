"""The answers in SQL: one row a request with its shares, and the CTEs that lead there, strung together."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections.abc import Sequence

from kvtrace import stages
from kvtrace.schema.shape import text
from kvtrace.schema.walk import gather, long, pairs, parts, path, points
from kvtrace.schema.walk.parts import Part
from kvtrace.schema.walk.plan import NUMBER

_KEPT = (
    "p", "d", "f", "proc", "made", "again", "emitting", "others", "r", "o", "l0", "l2", "pieces", "j", "known", "awake",
    "s0", "s2",
)  # fmt: skip


def chain(edges: Sequence[stages.Edge]) -> list[tuple[str, str]]:
    """Return all CTEs from events to `v`, in order."""
    return [
        *gather.processes(), *gather.steps(), *gather.legs(), gather.fronts(), *points.joined(), *points.looked(),
        *points.requests(), *pairs.surroundings(), *points.placed(), *path.walked(edges), *parts.divided(),
    ]  # fmt: skip


def written(ctes: list[tuple[str, str]], select: str) -> str:
    """Return the CTEs and a SELECT over them as one statement; those that are read more than once are kept."""
    listed = ",\n".join(f"{name} AS {'MATERIALIZED ' if name in _KEPT else ''}(\n  {sql}\n)" for name, sql in ctes)
    return f"WITH {listed}\n{select}"


def segments(edges: Sequence[stages.Edge] = stages.EDGES) -> str:
    """Return the SELECT of view `walk_segment`: the parts of every path that can be walked."""
    listed = ", ".join(
        f"CASE WHEN ({part.when}) AND {part.start} < {part.end} THEN {{'cause': {text(part.cause.name)}, "
        f"'since': {part.start}, 'until': {part.end}}} END"
        for part in parts.parts(edges)
        if part.cause is not stages.WRITER_BUSY
    )
    sender = "CASE WHEN has_x THEN x_p0 WHEN p_picked_n > 0 THEN p_w_p0 END"
    picked, staged = NUMBER[stages.SENDER_PICKED.name], NUMBER[stages.PREFILL_STAGED.name]
    answer = f"""SELECT k, base, reason, longs, {sender} AS sender, pe,
    list_filter([CASE WHEN q_sender_picked = {staged} AND s_sender_picked < sender_picked
        THEN {{'since': s_sender_picked, 'until': sender_picked}} END,
      CASE WHEN q_transfer_matched IN ({picked}, {staged}) AND m_arrival < transfer_matched
        THEN {{'since': m_arrival, 'until': transfer_matched}} END], lambda x: x IS NOT NULL) AS waits,
    list_filter([{listed}], lambda x: x IS NOT NULL) AS parts
  FROM (SELECT *, {long.listed(NUMBER[stages.READY.name])} AS longs FROM v)"""
    shared = [("o", answer), *long.rows(), *long.senders(), ("z", _SEGMENTS)]
    return written([*chain(edges), *shared], _CAUSED)


def total(found: Sequence[Part], width: str = "{end} - {start}") -> str:
    """Return SQL for how long those stretches are together."""
    by_span: dict[tuple[str, str], list[str]] = {}
    for part in found:
        by_span.setdefault((part.start, part.end), []).append(part.when)
    terms = [
        f"coalesce(CASE WHEN {' OR '.join(f'({one})' for one in dict.fromkeys(whens))} "
        f"THEN greatest(0, {width.format(start=start, end=end)}) END, 0)"
        for (start, end), whens in by_span.items()
    ]
    return " + ".join(terms) or "0"


def requests(edges: Sequence[stages.Edge] = stages.EDGES) -> str:
    """Return the SELECT of view `walk_request`."""
    found = parts.parts(edges)

    def of(*kinds: stages.Class) -> str:
        return total([part for part in found if part.cause.kind in kinds])

    begun = "greatest(transfer_matched, decode_load_started, 0)"
    noticed = f"least(decode_reported, decode_ready, {pairs.NEVER_NS})"
    unseen = total(
        [part for part in found if part.cause is stages.UNKNOWN],
        f"least({{end}}, {noticed}) - greatest({{start}}, {begun})",
    )
    detected = ", ".join(
        f"CASE WHEN {part.when} AND {part.start} < {part.end} THEN {part.end} END"
        for part in found if part.cause is stages.DETECTION
    )  # fmt: skip
    answer = f"""SELECT k, base, f_client, mode, p_engine, d_engine, reason, begin_ns, n0, token_ns, longs,
    {of(stages.Class.RUN)} AS run_ns, {of(stages.Class.QUEUE)} AS queue_ns,
    {of(stages.Class.COORDINATION)} AS coordination_ns, {of(stages.Class.TRANSFER)} AS transfer_ns,
    {of(stages.Class.UNATTRIBUTED)} AS unattributed_ns,
    CASE WHEN has_x OR (d_enq IS NOT NULL AND d_remote = 0) THEN 0 ELSE {unseen} END AS unseen_ns,
    CASE WHEN NOT has_x AND NOT coalesce(d_enq IS NOT NULL AND d_remote = 0, false)
      THEN [{begun}, {noticed}] END AS unseen_span,
    {total([part for part in found if part.cause is stages.WIRE])} AS wire_ns, greatest({detected}) AS detected_ns,
    CASE WHEN has_x THEN arrived END AS arrived, bracket_low, bracket_high,
    f_received IS NOT NULL AND (f_token IS NOT NULL OR n0 IS NULL) AS by_router
  FROM (SELECT *, {long.listed(NUMBER[stages.READY.name])} AS longs FROM v)"""
    shared = [("o", answer), *long.rows(), ("lsum", _LONG_SUM), ("z", _WHOLE)]
    return written([*chain(edges), *shared], _FINAL)


_SEGMENTS = """SELECT base, p.cause AS cause, p.since AS since, p.until AS until FROM (
    SELECT base, unnest(parts) AS p FROM o ANTI JOIN blocked USING (k) WHERE reason IS NULL)
  UNION ALL SELECT base, cause, since, stop FROM pieces JOIN o USING (k) ANTI JOIN blocked USING (k)
    WHERE reason IS NULL
  UNION ALL SELECT base, cause, since, until FROM asleep JOIN o USING (k) ANTI JOIN blocked USING (k)
    WHERE reason IS NULL"""

_CAUSED = """SELECT base AS request_id, c.class, z.cause, c."where", since AS start_ns, until AS end_ns
FROM z JOIN cause AS c ON c.cause = z.cause"""

_QUEUES = "('prefill.queue', 'decode.queue')"
_LONG_SUM = f"""SELECT p.k, coalesce(sum(stop - since) FILTER (cause IN {_QUEUES}), 0)::BIGINT AS queue_ns,
    coalesce(sum(stop - since) FILTER (cause = 'unattributed'), 0)::BIGINT AS unattributed_ns,
    coalesce(sum(stop - since) FILTER (cause NOT IN {_QUEUES} AND cause <> 'unattributed'), 0)::BIGINT
      AS coordination_ns,
    coalesce(sum(greatest(0, least(stop, o.unseen_span[2]) - greatest(since, o.unseen_span[1])))
      FILTER (cause = 'unattributed' AND o.unseen_span IS NOT NULL), 0)::BIGINT AS unseen_ns
  FROM pieces AS p JOIN o USING (k) GROUP BY p.k"""

_WHOLE = """SELECT base, f_client, mode, p_engine, d_engine, begin_ns,
    CASE WHEN n0 IS NOT NULL THEN token_ns END AS first_ns,
    CASE WHEN reason IS NOT NULL THEN reason ELSE blocked.why END AS reason,
    by_router, run_ns, o.queue_ns + coalesce(l.queue_ns, 0) AS queue_ns,
    o.coordination_ns + coalesce(l.coordination_ns, 0) AS coordination_ns, transfer_ns,
    o.unattributed_ns + coalesce(l.unattributed_ns, 0) AS unattributed_ns,
    CASE WHEN arrived IS NOT NULL AND (transfer_ns > 0 OR detected_ns > 0)
      THEN transfer_ns - least(wire_ns, greatest(0, arrived - bracket_low)) ELSE transfer_ns END AS low_ns,
    transfer_ns + CASE WHEN arrived IS NULL THEN o.unseen_ns + coalesce(l.unseen_ns, 0)
      WHEN transfer_ns > 0 OR detected_ns > 0
      THEN greatest(0, least(bracket_high, greatest(coalesce(detected_ns, 0), arrived)) - arrived) ELSE 0 END AS high_ns
  FROM o LEFT JOIN lsum AS l USING (k) LEFT JOIN blocked USING (k)"""

_FINAL = """SELECT base AS request_id, coalesce(any_value(f_client), '') AS client_request_id,
  bool_and(reason IS NULL) AS walked, any_value(reason) AS unwalked, """ + ", ".join(
    f"CASE WHEN bool_and(reason IS NULL) THEN any_value({sql}) END AS {name}"
    for name, sql in (
        ("mode", "mode"), ("scope", "CASE WHEN by_router THEN 'router' ELSE 'engine' END"),
        ("prefill_engine", "p_engine"), ("decode_engine", "d_engine"), ("start_ns", "begin_ns"),
        ("first_token_ns", "first_ns"), ("ttft_ns", "first_ns - begin_ns"), ("compute_ns", "run_ns + queue_ns"),
        ("compute_run_ns", "run_ns"), ("compute_queue_ns", "queue_ns"), ("coordination_ns", "coordination_ns"),
        ("transfer_ns", "transfer_ns"), ("transfer_low_ns", "low_ns"), ("transfer_high_ns", "high_ns"),
        ("unattributed_ns", "unattributed_ns"),
    )
) + "\nFROM z GROUP BY base"  # fmt: skip

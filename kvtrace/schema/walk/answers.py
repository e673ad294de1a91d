"""The answers in SQL: one row a request with its shares, and the CTEs that lead there, strung together."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections.abc import Sequence

from kvtrace import stages
from kvtrace.schema.shape import text
from kvtrace.schema.walk import chunks, company, gather, handshakes, long, pairs, parts, path, points, ranks
from kvtrace.schema.walk.parts import Part
from kvtrace.schema.walk.plan import NUMBER

_KEPT = (
    "proc", "emitting", "again", "made", "naming", "x", "r", "strange", "vain", "looks", "ranked", "named", "said",
    "moves", "signed", "reports", "taken", "awake", "o", "l0", "l2", "pieces", "blocked", "s0", "s2", "k0", "hands",
    "own0", "own4", "spans",
)  # fmt: skip


def chain(edges: Sequence[stages.Edge]) -> list[tuple[str, str]]:
    """Return all CTEs from events to `v`, in order."""
    return [
        *gather.processes(), *gather.steps(), *gather.legs(), gather.fronts(), *points.joined(), *company.strange(),
        *company.looked(), *ranks.seen(), *pairs.surroundings(), *ranks.settled(), *handshakes.seen(),
        *points.placed(), *path.walked(edges), *parts.divided(),
    ]  # fmt: skip


def common(edges: Sequence[stages.Edge] = stages.EDGES) -> str:
    """Return what both statements begin with: WITH and the CTEs from events to `v`."""
    return f"WITH {_listed(chain(edges))}"


def written(edges: Sequence[stages.Edge], ctes: list[tuple[str, str]], select: str) -> str:
    """Return the common CTEs, those given and a SELECT over them as one statement."""
    return f"{common(edges)},\n{_listed(ctes)}\n{select}"


def _listed(ctes: list[tuple[str, str]]) -> str:
    """Return CTEs as SQL; those that are read more than once are kept."""
    return ",\n".join(
        f"{name} AS {'MATERIALIZED' if name in _KEPT else 'NOT MATERIALIZED'} (\n  {sql}\n)" for name, sql in ctes
    )


def segments(edges: Sequence[stages.Edge] = stages.EDGES) -> str:
    """Return the SELECT of view `walk_segment`: the parts of every path that can be walked."""
    listed = ", ".join(
        f"CASE WHEN ({part.when}) AND {part.start} < {part.end} THEN {{'cause': {text(part.cause.name)}, "
        f"'since': {part.start}, 'until': {part.end}}} END"
        for part in parts.parts(edges)
        if part.cause is not stages.WRITER_BUSY
    )
    longs = long.listed(NUMBER[stages.READY.name])
    picked, staged = NUMBER[stages.SENDER_PICKED.name], NUMBER[stages.PREFILL_STAGED.name]
    answer = f"""SELECT base, reason, longs, chunked, sender, pe, de, mode, has_x, shaking, h_since, h_until,
    list_filter([CASE WHEN sender_seen AND q_sender_picked = {staged} AND s_sender_picked < sender_picked
        THEN {{'since': s_sender_picked, 'until': sender_picked}} END,
      CASE WHEN sender_seen AND q_transfer_matched IN ({picked}, {staged}) AND m_arrival < transfer_matched
        THEN {{'since': m_arrival, 'until': transfer_matched}} END], lambda x: x IS NOT NULL) AS waits,
    list_filter([{listed}], lambda x: x IS NOT NULL) AS parts
  FROM (SELECT *, coalesce(met_since < h_until AND met_until > h_since, false) AS shaking
    FROM (SELECT *, {handshakes.columns()}, {longs} AS longs, {chunks.listed()} AS chunked FROM v))"""
    shared = [("o", answer), *long.rows(), *long.senders(), ("z", _SEGMENTS)]
    return written(edges, shared, _CAUSED)


def total(found: Sequence[Part], width: str = "{end} - {start}") -> str:
    """Return SQL for how long those stretches are together."""
    by_span: dict[tuple[str, str], list[str]] = {}
    for part in found:
        by_span.setdefault((part.start, part.end), []).append(part.when)
    terms = [
        f"CASE WHEN {' OR '.join(f'({one})' for one in dict.fromkeys(whens))} "
        f"THEN greatest(0, {width.format(start=start, end=end)}) ELSE 0 END"
        for (start, end), whens in by_span.items()
    ]
    return " + ".join(terms) or "0"


def unknown(found: Sequence[Part], width: str = "{end} - {start}") -> str:
    """Return SQL for how long the unattributed stretches are; those where an ancestor stood in are rare."""
    lacking = [part for part in found if part.cause is stages.UNKNOWN]
    strayed = [part for part in lacking if part.strayed]
    rest = total([part for part in lacking if not part.strayed], width)
    return f"{rest} + CASE WHEN on_path & {path.STRAYED} <> 0 THEN {total(strayed, width)} ELSE 0 END"


def requests(edges: Sequence[stages.Edge] = stages.EDGES) -> str:
    """Return the SELECT of view `walk_request`. Coordination, the most of a path's parts, is what the others leave."""
    found = parts.parts(edges)

    def of(kind: stages.Class) -> str:
        return total([part for part in found if part.cause.kind is kind])

    begun = "greatest(transfer_matched, decode_load_started, 0)"
    noticed = f"least(decode_reported, decode_ready, {pairs.NEVER_NS})"
    unseen = unknown(found, f"least({{end}}, {noticed}) - greatest({{start}}, {begun})")
    # The thread that looks for the KV may have no processor at the end of that: the wire may still have been busy.
    whens = {part.when for part in found if part.cause is stages.DETECTION}
    detected = ", ".join(
        f"CASE WHEN {part.when} AND {part.start} < {part.end} THEN {part.end} END"
        for part in found if part.when in whens
    )  # fmt: skip
    answer = f"""SELECT base, client, mode, pe, de, reason, begin_ns, n0, token_ns, longs, chunked,
    {of(stages.Class.RUN)} AS run_ns, {of(stages.Class.QUEUE)} AS queue_ns,
    {of(stages.Class.TRANSFER)} AS transfer_ns, {unknown(found)} AS unattributed_ns,
    CASE WHEN has_x OR untold THEN 0 ELSE {unseen} END AS unseen_ns,
    CASE WHEN NOT has_x AND NOT coalesce(untold, false)
      THEN [{begun}, {noticed}] END AS unseen_span,
    {total([part for part in found if part.cause is stages.WIRE])} AS wire_ns, greatest({detected}) AS detected_ns,
    transfer_arrived AS arrived, bracket_low, bracket_high,
    router_received IS NOT NULL AND (router_first_token IS NOT NULL OR n0 IS NULL) AS by_router
  FROM (SELECT *, {long.listed(NUMBER[stages.READY.name])} AS longs, {chunks.listed()} AS chunked FROM v)"""
    shared = [("o", answer), *long.rows(), ("lsum", _LONG_SUM), ("z", _WHOLE), ("y", _WALKED)]
    return written(edges, shared, _FINAL)


_SEGMENTS = """SELECT base, p.cause AS cause, p.since AS since, p.until AS until FROM (
    SELECT base, unnest(parts) AS p FROM o ANTI JOIN blocked USING (base) WHERE reason IS NULL)
  UNION ALL SELECT base, cause, since, stop FROM pieces JOIN o USING (base) ANTI JOIN blocked USING (base)
    WHERE reason IS NULL
  UNION ALL SELECT base, cause, since, until FROM covered JOIN o USING (base) ANTI JOIN blocked USING (base)
    WHERE reason IS NULL"""

_CAUSED = """SELECT base AS request_id, c.class, z.cause, c."where", since AS start_ns, until AS end_ns
FROM z JOIN cause AS c ON c.cause = z.cause"""


def _of(kind: stages.Class) -> str:
    return ", ".join(text(cause.name) for cause in stages.CAUSES if cause.kind is kind)


_LONG_SUM = f"""SELECT p.base,
    coalesce(sum(stop - since) FILTER (cause IN ({_of(stages.Class.RUN)})), 0)::BIGINT AS run_ns,
    coalesce(sum(stop - since) FILTER (cause IN ({_of(stages.Class.QUEUE)})), 0)::BIGINT AS queue_ns,
    coalesce(sum(stop - since) FILTER (cause = 'unattributed'), 0)::BIGINT AS unattributed_ns,
    coalesce(sum(greatest(0, least(stop, o.unseen_span[2]) - greatest(since, o.unseen_span[1])))
      FILTER (cause = 'unattributed' AND o.unseen_span IS NOT NULL), 0)::BIGINT AS unseen_ns
  FROM pieces AS p JOIN o USING (base) GROUP BY p.base"""

_WHOLE = """SELECT base, client, mode, begin_ns, token_ns, by_router,
    transfer_ns, o.run_ns + coalesce(l.run_ns, 0) AS run_ns,
    coalesce(np.engine, '') AS p_engine, coalesce(nd.engine, '') AS d_engine,
    o.queue_ns + coalesce(l.queue_ns, 0) AS queue_ns, o.unattributed_ns + coalesce(l.unattributed_ns, 0) AS unknown_ns,
    CASE WHEN arrived IS NOT NULL AND (transfer_ns > 0 OR detected_ns > 0)
      THEN transfer_ns - least(wire_ns, greatest(0, arrived - bracket_low)) ELSE transfer_ns END AS low_ns,
    transfer_ns + CASE WHEN arrived IS NULL THEN o.unseen_ns + coalesce(l.unseen_ns, 0)
      WHEN transfer_ns > 0 OR detected_ns > 0
      THEN greatest(0, least(bracket_high, coalesce(detected_ns, 0)) - greatest(arrived, begin_ns)) ELSE 0 END
      AS high_ns,
    token_ns - begin_ns AS ttft_ns
  FROM (SELECT * REPLACE (CASE WHEN n0 IS NOT NULL THEN token_ns END AS token_ns) FROM o WHERE reason IS NULL) AS o
    ANTI JOIN blocked USING (base) LEFT JOIN lsum AS l USING (base)
    LEFT JOIN naming AS np ON np.eno = o.pe LEFT JOIN naming AS nd ON nd.eno = o.de"""

_ANSWER = (
    ("client_request_id", "VARCHAR", "client"), ("walked", "BOOLEAN", "true"), ("unwalked", "VARCHAR", "NULL"),
    ("mode", "VARCHAR", "mode"), ("scope", "VARCHAR", "CASE WHEN by_router THEN 'router' ELSE 'engine' END"),
    ("prefill_engine", "VARCHAR", "p_engine"), ("decode_engine", "VARCHAR", "d_engine"),
    ("start_ns", "BIGINT", "begin_ns"), ("first_token_ns", "BIGINT", "token_ns"), ("ttft_ns", "BIGINT", "ttft_ns"),
    ("compute_ns", "BIGINT", "run_ns + queue_ns"), ("compute_run_ns", "BIGINT", "run_ns"),
    ("compute_queue_ns", "BIGINT", "queue_ns"),
    ("coordination_ns", "BIGINT", "ttft_ns - run_ns - queue_ns - transfer_ns - unknown_ns"),
    ("transfer_ns", "BIGINT", "transfer_ns"), ("transfer_low_ns", "BIGINT", "low_ns"),
    ("transfer_high_ns", "BIGINT", "high_ns"), ("unattributed_ns", "BIGINT", "unknown_ns"),
)  # fmt: skip
_ONLY_WITH_TOKEN = ("run_ns", "queue_ns", "transfer_ns", "unknown_ns", "low_ns", "high_ns")
"""Shares of a request whose first token was not seen are unknown, not none."""
_WALKED = (
    "SELECT * REPLACE ("
    + ", ".join(f"CASE WHEN ttft_ns IS NOT NULL THEN {name} END AS {name}" for name in _ONLY_WITH_TOKEN)
    + ") FROM z"
)
_FINAL = f"""SELECT base AS request_id, {", ".join(f"{sql}::{kind} AS {name}" for name, kind, sql in _ANSWER)} FROM y
UNION ALL SELECT base, min(client), false, coalesce(min(reason), min(why)),
  {", ".join("NULL" for _ in _ANSWER[3:])}
FROM o LEFT JOIN blocked USING (base) WHERE reason IS NOT NULL OR why IS NOT NULL GROUP BY base"""

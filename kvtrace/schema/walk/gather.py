"""Events to legs in SQL: who emitted what, the engines' steps, and one row a leg of either engine."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.evidence import AT_ONCE_NS
from kvtrace.legs import PREFIXES
from kvtrace.schema.shape import text

FRONT = tuple(
    stage for stage in stages.STAGES
    if stage.name.startswith(("client.", "router.", "prefill.http_", "decode.http_"))
    or stage is stages.DECODE_FIRST_TOKEN_OUT
)  # fmt: skip
LOOSE = (stages.REGISTRATION_RECEIVED, stages.ORPHANED)
_TRANSFER = (
    stages.PREPARED, stages.POST_STARTED, stages.POST_ENDED, stages.TRANSFER_DONE, stages.TRANSFER_FAILED,
    stages.PROBED,
)  # fmt: skip
_EITHER = (*_TRANSFER, stages.NOTIFIED, stages.TRANSFER_BEGUN)
_SAID = "\"ref\" <> ''"
OF_P = tuple(
    stage for stage in stages.STAGES
    if (stage.name.startswith("prefill.") and stage not in FRONT) or stage in (stages.SENDER_PICKED, stages.MATCHED)
)  # fmt: skip
OF_D = tuple(stage for stage in stages.STAGES if stage.name.startswith("decode.") and stage not in FRONT)
_STEP = tuple(stage for stage in stages.STAGES if stage.name.startswith("step."))


def among(*wanted: stages.Stage) -> str:
    """Return the condition that an event is of one of these stages."""
    return f"stage IN ({', '.join(text(stage.name) for stage in wanted)})"


def take(function: str, *wanted: stages.Stage, but: str = "") -> str:
    """Return an aggregate over the events of these stages only."""
    return f"{function} FILTER ({among(*wanted)}{f' AND {but}' if but else ''})"


def first(what: str, *wanted: stages.Stage) -> str:
    """Return `what` of the earliest event of these stages."""
    return take(f"arg_min({what}, t_ns)", *wanted)


def spread(name: str, stage: stages.Stage) -> str:
    """Return how many events of a stage there are, the first and the last: enough to choose among two."""
    return (
        f"{take('count(*)', stage)} AS {name}_n, {take('min(t_ns)', stage)} AS {name}_mn, "
        f"{take('max(t_ns)', stage)} AS {name}_mx"
    )


def _base(request: str) -> str:
    """Return SQL for the id that a front end was likeliest sent, as `legs.base_ids` has it: nested columns."""
    strip = " ".join(
        f"WHEN starts_with(whole, '{one}-') THEN substring(whole, {len(one) + 2})" for one in PREFIXES.split("|")
    )
    return f"""SELECT *, CASE WHEN NOT starts_with(whole, 'cmpl-') THEN cut WHEN cut LIKE '%-0' THEN left(cut, -2)
      ELSE regexp_replace(cut, '-[0-9]+$', '') END AS base
    FROM (SELECT *, regexp_matches(right(stem, 9), '^-[0-9a-f]{{8}}$') AS suffixed,
        CASE WHEN regexp_matches(right(stem, 9), '^-[0-9a-f]{{8}}$') THEN left(stem, -9) ELSE stem END AS cut
      FROM (SELECT *, CASE {strip} ELSE whole END AS stem
        FROM (SELECT *, CASE WHEN left(request, 1) BETWEEN '0' AND '9'
            THEN regexp_replace(request, '^[0-9]+_((?:{PREFIXES})-)', '\\1') ELSE request END AS whole
          FROM ({request}))))"""


def processes() -> list[tuple[str, str]]:
    """Return the CTEs that say of every process its engine's number, and which sides that engine has."""
    return [
        (
            "stated",
            """SELECT process, coalesce(host, '') || '/' || coalesce(domain, '') AS place, pid, parent_pid,
    coalesce(offset_ns, 0) AS offset_ns, coalesce(map_extract(facts, 'engine_id')[1], '') AS engine_id,
    coalesce(map_extract(facts, 'imported')[1], '') AS imported,
    coalesce(TRY_CAST(map_extract(facts, 'tp_size')[1] AS INTEGER), 1) AS ranks
  FROM process""",
        ),
        (
            "proc",
            """SELECT *, CASE WHEN engine <> '' THEN rank ELSE 1000000 + process END AS key,
    CASE WHEN engine <> '' THEN rank ELSE 0 END AS eno
  FROM (SELECT s.*, coalesce(nullif(s.engine_id, ''), c.engine, '') AS engine,
      dense_rank() OVER (ORDER BY coalesce(nullif(s.engine_id, ''), c.engine, '')) AS rank
    FROM stated AS s LEFT JOIN (SELECT place, parent_pid, arg_max(engine_id, process) AS engine FROM stated
      WHERE engine_id <> '' GROUP BY place, parent_pid) AS c ON c.place = s.place AND c.parent_pid = s.pid)""",
        ),
        (
            "emitting",
            f"""SELECT e.*, coalesce(p.key, 1000000 + e.process) AS key, coalesce(p.eno, 0) AS eno
  FROM (SELECT process, bool_or({among(*OF_P)}) AS is_p, bool_or({among(*OF_D)}) AS is_d
    FROM event WHERE request <> '' GROUP BY process) AS e LEFT JOIN proc AS p USING (process)""",
        ),
        (
            "home",
            """SELECT process, key, eno, bool_or(is_p) OVER w AS has_p,
    bool_or(is_d) OVER w OR NOT bool_or(is_p) OVER w AS has_d
  FROM emitting WINDOW w AS (PARTITION BY key)""",
        ),
        ("naming", "SELECT eno, min(engine) AS engine, max(ranks) AS ranks FROM proc GROUP BY eno"),
    ]


def steps() -> list[tuple[str, str]]:
    """Return the CTEs of all engines' steps, each beside its neighbours in order of making up.

    A number that is made up again, as by an engine's next process, is another step, and what comes then is of that.
    """
    own = f"FROM event JOIN proc AS p USING (process) WHERE {among(*_STEP)}"
    order = "PARTITION BY eno, a ORDER BY t_ns, stage::VARCHAR, process ROWS UNBOUNDED PRECEDING"
    near = ", ".join(
        f"{function}({name}, {by}) OVER w AS {prefix}{by}_{short}"
        for function, prefix in (("lag", "b"), ("lead", "a"))
        for by in (1, 2)
        for name, short in (("sched", "sched"), ("over", "over"), ("tokens", "tokens"))
    )
    return [
        (
            "again",
            f"SELECT p.eno, a FROM event JOIN proc AS p USING (process) WHERE {among(stages.STEP_SCHEDULED)} "
            "GROUP BY p.eno, a HAVING count(*) > 1",
        ),
        (
            "turned",
            f"""SELECT *, 0 AS turn FROM (SELECT event.*, p.eno {own}) ANTI JOIN again USING (eno, a)
  UNION ALL SELECT *, greatest(0, {take("count(*)", stages.STEP_SCHEDULED)} OVER ({order}) - 1) AS turn
  FROM (SELECT event.*, p.eno {own}) SEMI JOIN again USING (eno, a)""",
        ),
        (
            "stamped",
            f"""SELECT eno, a AS step, coalesce({take("min(t_ns)", stages.STEP_SCHEDULED)}, min(t_ns)) AS sched,
    coalesce({take("min(t_ns)", stages.STEP_STARTED)}, 0) AS started,
    coalesce({take("max(t_ns)", stages.STEP_FORWARDED)}, 0) AS forwarded,
    coalesce({take("max(t_ns)", stages.STEP_CONNECTED)}, 0) AS connected,
    coalesce({take("max(t_ns)", stages.STEP_ENDED)}, 0) AS ended,
    coalesce({take("max(c)", stages.STEP_CONNECTED)}, 0) AS connector,
    coalesce({take("arg_max(d, c)", stages.STEP_CONNECTED)}, 0) AS ahead,
    coalesce({first("b", stages.STEP_SCHEDULED)}, 0) AS tokens
  FROM turned GROUP BY eno, a, turn""",
        ),
        (
            "made",
            f"""SELECT *, row_number() OVER w AS place, {near} FROM (SELECT *,
      CASE WHEN ended <> 0 THEN ended ELSE greatest(connected, forwarded, started, sched) END AS over FROM stamped)
  WINDOW w AS (PARTITION BY eno ORDER BY sched, step)""",
        ),
        (
            "engine_steps",
            "SELECT eno, coalesce(bool_or(b1_sched = sched), false) AS tied, min(sched) AS begun "
            "FROM made GROUP BY eno",
        ),
    ]


def _transfers() -> str:
    """Return the columns of a leg's transfer: each of its points, its size, and whose it is."""
    points = ", ".join(
        f"{take('min(t_ns)', stage)} AS x_{short}_mn, {take('max(t_ns)', stage)} AS x_{short}_mx"
        for stage, short in (
            (stages.PREPARED, "prepared"), (stages.POST_STARTED, "started"), (stages.POST_ENDED, "ended"),
            (stages.TRANSFER_DONE, "done"),
        )
    )  # fmt: skip
    return f"""{take("count(*)", *_TRANSFER)} AS x_n, {take("min(a)", *_TRANSFER)} AS x_a0,
    {take("max(a)", *_TRANSFER)} AS x_a1, {take("min(process)", *_TRANSFER)} AS x_p0,
    {take("max(process)", *_TRANSFER)} AS x_p1, {take("max(c)", stages.PREPARED)} AS x_rank,
    {take('min("ref")', stages.PREPARED, but=_SAID)} AS x_ref0, {take('max("ref")', stages.PREPARED)} AS x_ref1,
    {points},
    {take("arg_max(b, t_ns)", stages.POST_ENDED)} AS x_bytes,
    {take("arg_max(d, t_ns)", stages.POST_ENDED)} AS x_at_post,
    {take("max(t_ns)", stages.PROBED)} AS x_probed, {take("count(*)", stages.TRANSFER_FAILED)} AS x_failed_n,
    {take("min(t_ns)", stages.TRANSFER_FAILED)} AS x_failed,
    {take("max(b)", stages.TRANSFER_DONE, stages.PROBED, but="b <> 0")} AS x_pending,
    {spread("told", stages.NOTIFIED)}, {take("min(process)", stages.NOTIFIED)} AS told_p0,
    {take("max(process)", stages.NOTIFIED)} AS told_p1, {take("min(a)", stages.NOTIFIED)} AS told_a0,
    {take("max(a)", stages.NOTIFIED)} AS told_a1,
    {take("count(*)", stages.TRANSFER_BEGUN, stages.HANDED_OVER)} AS begun_n"""


def _leg(side: str, own: tuple[stages.Stage, ...], columns: str, also: str = "") -> str:
    """Return the rows of one side's legs: one a request id that an engine of that side named."""
    count = f"count(*) FILTER ({among(*own)}) AS own_n"
    inner = f"""SELECT request, {count}, min(key) FILTER (NOT {among(*LOOSE)}) AS k0,
    max(key) FILTER (NOT {among(*LOOSE)}) AS k1, max(eno) FILTER (NOT {among(*LOOSE)}) AS eno,
    bool_or(has_p AND has_d) AS mixed, {columns}, {_transfers()}
  FROM event JOIN home USING (process)
  WHERE request <> '' AND ({among(*own, *(LOOSE if side == "d" else ()))} OR (has_{side} AND {among(*_EITHER)})){also}
  GROUP BY request"""
    return f"SELECT row_number() OVER () AS k, * FROM ({_base(inner)})"


def _looked(considered: stages.Stage, allocated: stages.Stage) -> str:
    """Return the columns of a scheduler's looks at a leg, and whether one of them can have been in vain."""
    look, given = take("min(t_ns)", considered), take("min(t_ns)", allocated)
    at_once = f"{take('count(*)', considered)} = 1 AND {given} BETWEEN {look} AND {look} + {AT_ONCE_NS}"
    return (
        f"{look} AS look, {given} AS allocated, "
        f"{look} IS NOT NULL AND ({at_once} AND min(key) = max(key) AND NOT bool_or(has_p AND has_d)) IS NOT TRUE "
        "AS vain"
    )


def legs() -> list[tuple[str, str]]:
    """Return the CTEs `p` and `d`: one row a leg, its points as columns."""
    s = stages
    waiting = (s.PREFILL_STAGED, s.SENDER_PICKED, s.MATCHED)
    of_p = f"""{take("min(t_ns)", s.PREFILL_ENQUEUED)} AS enq, {take("max(t_ns)", s.PREFILL_ENQUEUED)} AS enq_mx,
    {_looked(s.PREFILL_CONSIDERED, s.PREFILL_ALLOCATED)}, {take("count(*)", s.PREFILL_SCHEDULED)} AS own_sched_n,
    {take("max(a)", s.PREFILL_SCHEDULED)} AS own_step, {take("max(t_ns)", s.PREFILL_SCHEDULED)} AS own_at,
    {take("max(c)", s.PREFILL_SCHEDULED)} AS own_c,
    {take("max(d)", s.PREFILL_SCHEDULED)} AS own_d, {take("max(t_ns)", s.PREFILL_FINISHED)} AS finished,
    {spread("staged", s.PREFILL_STAGED)}, {spread("picked", s.SENDER_PICKED)}, {spread("matched", s.MATCHED)},
    {take("min(process)", *waiting)} AS w_p0, {take("max(process)", *waiting)} AS w_p1,
    {take('min("ref")', s.MATCHED)} AS ref0, {take('max("ref")', s.MATCHED)} AS ref1"""
    of_d = f"""{take("min(t_ns)", s.DECODE_ENQUEUED)} AS enq, {take("max(t_ns)", s.DECODE_ENQUEUED)} AS enq_mx,
    {first("c", s.DECODE_ENQUEUED)} AS remote, {first('"ref"', s.DECODE_ENQUEUED)} AS ref0,
    {_looked(s.DECODE_CONSIDERED, s.DECODE_ALLOCATED)},
    {take("max(t_ns)", s.REGISTRATION_QUEUED)} AS queued, {take("max(t_ns)", s.REGISTRATION_SENT)} AS sent,
    {take("min(process)", s.REGISTRATION_QUEUED, s.REGISTRATION_SENT)} AS sent_p0,
    {take("max(process)", s.REGISTRATION_QUEUED, s.REGISTRATION_SENT)} AS sent_p1,
    {spread("loading", s.LOAD_STARTED)}, {take("min(process)", s.LOAD_STARTED)} AS loading_p0,
    {take("max(process)", s.LOAD_STARTED)} AS loading_p1, {spread("reported", s.REPORTED)},
    {take("min(process)", s.REPORTED)} AS reported_p0, {take("max(process)", s.REPORTED)} AS reported_p1,
    {spread("ready", s.READY)}, {take("min(t_ns)", s.LOAD_FAILED)} AS load_failed,
    {take("count(*)", s.DECODE_SCHEDULED)} AS own_sched_n, {take("max(a)", s.DECODE_SCHEDULED)} AS own_step,
    {take("max(t_ns)", s.DECODE_SCHEDULED)} AS own_at,
    {take("max(b)", s.DECODE_SCHEDULED)} AS own_b, {take("max(c)", s.DECODE_SCHEDULED)} AS own_c,
    {take("max(d)", s.DECODE_SCHEDULED)} AS own_d, {spread("received", s.REGISTRATION_RECEIVED)},
    {take("max(process)", s.REGISTRATION_RECEIVED)} AS received_p1,
    {take("arg_max(process, t_ns)", s.REGISTRATION_RECEIVED)} AS reader,
    {take("min(process)", s.REGISTRATION_RECEIVED)} AS received_p0"""
    return [("p", _leg("p", OF_P, of_p)), ("d", _leg("d", OF_D, of_d))]


def fronts() -> tuple[str, str]:
    """Return the CTE `f`: one row an id that a front end named."""
    s = stages
    at = ", ".join(
        f"{take('min(t_ns)', stage)} AS {name}"
        for stage, name in (
            (s.ROUTER_RECEIVED, "received"), (s.ROUTER_DECIDED, "decided"), (s.ROUTER_PREFILL_RETURNED, "returned"),
            (s.ROUTER_FIRST_TOKEN, "token"), (s.CLIENT_SENT, "client_sent"), (s.CLIENT_FIRST_TOKEN, "client_token"),
            (s.PREFILL_HTTP_RECEIVED, "p_http"), (s.PREFILL_HTTP_RESPONDED, "p_responded"),
            (s.DECODE_HTTP_RECEIVED, "d_http"), (s.DECODE_FIRST_TOKEN_OUT, "out"),
        )
    )  # fmt: skip
    asked = {
        side: tuple(one for one in FRONT if one.name.startswith(prefix) and one is not received)
        for side, prefix, received in (
            ("p", "prefill.", s.PREFILL_HTTP_RECEIVED), ("d", "decode.", s.DECODE_HTTP_RECEIVED),
        )
    }  # fmt: skip
    return (
        "f",
        f"""SELECT request, {at}, {spread("sent_p", s.ROUTER_PREFILL_SENT)}, {spread("sent_d", s.ROUTER_DECODE_SENT)},
    {first('"ref"', s.ROUTER_DECIDED)} AS mode_ref,
    coalesce({take('arg_min("ref", t_ns)', s.ROUTER_RECEIVED, but=_SAID)},
      {take('arg_min("ref", t_ns)', s.CLIENT_SENT, but=_SAID)}, '') AS client,
    {take("count(*)", s.PREFILL_HTTP_RECEIVED)} AS p_http_n, {take("count(*)", s.DECODE_HTTP_RECEIVED)} AS d_http_n,
    {take("min(t_ns)", *asked["p"])} AS p_asked, {take("min(t_ns)", *asked["d"])} AS d_asked,
    bool_or({among(*(one for one in FRONT if one.where is s.Where.CLIENT))}) AS has_client
  FROM event WHERE request <> '' AND {among(*FRONT)} GROUP BY request""",
    )

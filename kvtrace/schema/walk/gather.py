"""Events to legs in SQL: who emitted what, the engines' steps, and one row a leg of either engine."""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import EMPTY_TURN_NS, TURN_NS
from kvtrace.legs import PREFIXES
from kvtrace.looks import AT_ONCE_NS
from kvtrace.schema.walk.aggregates import SAID, among, count, first, last, least, most, named, spread, when

FRONT = tuple(
    stage for stage in stages.STAGES
    if stage.name.startswith(("client.", "router.", "prefill.http_", "decode.http_"))
    or stage is stages.DECODE_FIRST_TOKEN_OUT
)  # fmt: skip
LOOSE = (stages.REGISTRATION_RECEIVED, stages.ORPHANED)
TRANSFER = (
    stages.PREPARED, stages.POST_STARTED, stages.POST_ENDED, stages.TRANSFER_DONE, stages.TRANSFER_FAILED,
    stages.PROBED,
)  # fmt: skip
_MODE = """CASE "ref" WHEN 'push' THEN 1 WHEN 'pull' THEN 2 WHEN 'local' THEN 3 ELSE 0 END"""
OF_P = tuple(
    stage for stage in stages.STAGES
    if (stage.name.startswith("prefill.") and stage not in FRONT) or stage in (stages.SENDER_PICKED, stages.MATCHED)
)  # fmt: skip
OF_D = tuple(
    stage for stage in stages.STAGES
    if stage.name.startswith("decode.") and stage not in FRONT
)  # fmt: skip
_NAMELESS = 1_000_000
"""Processes of no known engine are numbered from here, engines below it."""
_STEP = tuple(stage for stage in stages.STAGES if stage.name.startswith("step."))


def base_of(request: str) -> str:
    """Return `request` with the id that a front end was likeliest sent, as `legs.base_ids` has it: nested columns."""
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
            f"""SELECT *, CASE WHEN engine <> '' THEN rank ELSE {_NAMELESS} + process END AS key,
    CASE WHEN engine <> '' THEN rank ELSE 0 END AS eno
  FROM (SELECT s.*, coalesce(nullif(s.engine_id, ''), c.engine, '') AS engine,
      dense_rank() OVER (ORDER BY coalesce(nullif(s.engine_id, ''), c.engine, '')) AS rank
    FROM stated AS s LEFT JOIN (SELECT place, parent_pid, arg_max(engine_id, process) AS engine FROM stated
      WHERE engine_id <> '' GROUP BY place, parent_pid) AS c ON c.place = s.place AND c.parent_pid = s.pid)""",
        ),
        (
            "emitting",
            f"""SELECT e.*, coalesce(p.key, {_NAMELESS} + e.process) AS key, coalesce(p.eno, 0) AS eno
  FROM (SELECT process, bool_or({among(*OF_P)}) AS is_p, bool_or({among(*OF_D)}) AS is_d
    FROM (SELECT DISTINCT process, stage FROM event) GROUP BY process) AS e LEFT JOIN proc AS p USING (process)""",
        ),
        (
            "home",
            """SELECT process, key, eno, bool_or(is_p) OVER w AS has_p,
    bool_or(is_d) OVER w OR NOT bool_or(is_p) OVER w AS has_d
  FROM emitting WINDOW w AS (PARTITION BY key)""",
        ),
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
        for name, short in (("sched", "sched"), ("over", "over"), ("turn", "turn"))
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
  UNION ALL SELECT *, greatest(0, {count(stages.STEP_SCHEDULED)} OVER ({order}) - 1) AS turn
  FROM (SELECT event.*, p.eno {own}) SEMI JOIN again USING (eno, a)""",
        ),
        (
            "stamped",
            f"""SELECT eno, a AS step, coalesce({least("t_ns", stages.STEP_SCHEDULED)}, min(t_ns)) AS sched,
    coalesce({least("t_ns", stages.STEP_STARTED)}, 0) AS started,
    coalesce({most("t_ns", stages.STEP_FORWARDED)}, 0) AS forwarded,
    coalesce({most("t_ns", stages.STEP_CONNECTED)}, 0) AS connected,
    coalesce({most("t_ns", stages.STEP_ENDED)}, 0) AS ended,
    coalesce({most("c", stages.STEP_CONNECTED)}, 0) AS connector,
    coalesce({most("{'c': c, 't': -t_ns, 'process': -process, 'd': d}", stages.STEP_CONNECTED)}.d, 0) AS ahead,
    coalesce({first("b", stages.STEP_SCHEDULED)}, 0) AS tokens,
    greatest(0, coalesce({first("b", stages.STEP_ENDED)}, 0)) AS starved,
    greatest(0, coalesce({most("c", stages.WORKER_STARVED)}, 0)) AS lacked_f,
    greatest(0, coalesce({most("d", stages.WORKER_STARVED)}, 0)) AS lacked_c,
    greatest(0, coalesce({most("c", stages.RESULT_STARVED)}, 0) - {_looked_for_order()}) AS lacked_r
  FROM turned GROUP BY eno, a, turn""",
        ),
        (
            "made",
            f"""SELECT *, row_number() OVER w AS place, {near} FROM (SELECT *,
      CASE WHEN ended <> 0 THEN ended ELSE greatest(connected, forwarded, started, sched) END AS over,
      CASE WHEN tokens = 0 THEN {EMPTY_TURN_NS} ELSE {TURN_NS} END + coalesce(lead(starved) OVER w, 0) AS turn
      FROM stamped WINDOW w AS (PARTITION BY eno ORDER BY sched, step))
  WINDOW w AS (PARTITION BY eno ORDER BY sched, step)""",
        ),
        (
            "engine_steps",
            "SELECT eno, coalesce(bool_or(b1_sched = sched), false) AS tied, min(sched) AS steps_begun "
            "FROM made GROUP BY eno",
        ),
        (
            "naming",
            "SELECT eno, engine, ranks, tied, steps_begun FROM (SELECT eno, min(engine) AS engine, max(ranks) AS ranks "
            "FROM proc GROUP BY eno) LEFT JOIN engine_steps USING (eno)",
        ),
    ]


def _transfers() -> str:
    """Return the columns of a leg's transfer: each of its points, its size, and whose it is."""
    points = ", ".join(
        f"{least('t_ns', stage)} AS x_{short}_mn, {most('t_ns', stage)} AS x_{short}_mx"
        for stage, short in (
            (stages.PREPARED, "prepared"), (stages.POST_STARTED, "started"), (stages.POST_ENDED, "ended"),
            (stages.TRANSFER_DONE, "done"),
        )
    )  # fmt: skip
    return f"""{count(*TRANSFER)} AS x_n, {least("a", *TRANSFER)} AS x_a0,
    {most("a", *TRANSFER)} AS x_a1, {least("process", *TRANSFER)} AS x_p0,
    {most("process", *TRANSFER)} AS x_p1, {most("c", stages.PREPARED)} AS x_rank,
    {named("x_ref", stages.PREPARED)},
    {points},
    {least("b", stages.POST_ENDED)} AS x_bytes0, {most("b", stages.POST_ENDED)} AS x_bytes,
    {least("d", stages.POST_ENDED)} AS x_at_post0, {most("d", stages.POST_ENDED)} AS x_at_post,
    {most("t_ns", stages.PROBED)} AS x_probed, {count(stages.TRANSFER_FAILED)} AS x_failed_n,
    {least("t_ns", stages.TRANSFER_FAILED)} AS x_failed,
    {most("b", stages.TRANSFER_DONE, stages.PROBED, but="b <> 0")} AS x_pending,
    min(key) AS x_k0, max(key) AS x_k1, bool_or(has_p AND has_d) AS x_mixed"""


def _told() -> str:
    """Return the columns of the notifications that a leg's own engine read."""
    one = stages.NOTIFIED
    return f"""{spread("told", one)}, {least("process", one)} AS told_p0, {most("process", one)} AS told_p1,
    {least("a", one)} AS told_a0, {most("a", one)} AS told_a1, {count(stages.TRANSFER_BEGUN)} AS begun_n"""


def transfers() -> tuple[str, str]:
    """Return the CTE `x`: one row an id and side with its transfer's points.

    They are gathered apart from the legs: what an aggregate costs is its columns times its rows and events.
    """
    return (
        "x",
        f"""SELECT request, has_p AS of_p, has_d AS of_d, {_transfers()}
  FROM event JOIN home USING (process) WHERE request <> '' AND {among(*TRANSFER)} GROUP BY request, has_p, has_d""",
    )


def lacking() -> tuple[str, str]:
    """Return the CTE `lacking`: by an id's hash, for how long its threads had no processor, and its copies."""
    post, notice, copied = stages.POST_STARVED, stages.NOTICE_STARVED, (stages.PREFILL_COPIED, stages.DECODE_COPIED)
    return (
        "lacking",
        f"""SELECT hash(request) AS id, {most("b", post)} AS post, {count(notice)} AS n, {most("t_ns", notice)} AS t,
    {most("b", notice)} AS b, {most("c", notice)} AS c, {count(*copied)} AS copies
  FROM event WHERE request <> '' AND {among(post, notice, *copied)} GROUP BY request""",
    )


def _leg(side: str, own: tuple[stages.Stage, ...], columns: str) -> str:
    """Return the rows of one side's legs: one a request id that an engine of that side named."""
    loose = LOOSE if side == "d" else ()
    either = (stages.NOTIFIED, stages.TRANSFER_BEGUN)
    engine = when("key", *own, *either) if loose else "key"
    mine = f"""SELECT request, {count(*own)} AS own_n, min({engine}) AS k0, max({engine}) AS k1,
      bool_or(has_p AND has_d) AS mixed, {columns}, {_told()}
    FROM event JOIN home USING (process)
    WHERE request <> '' AND {among(*own, *loose, *either)} AND ({among(*own, *loose)} OR has_{side}) GROUP BY request"""
    counted = ["own_n", "own_sched_n", "x_n", "x_failed_n", "told_n", "begun_n", *(["handed_n"] if side == "p" else [])]
    whole = f"""SELECT * REPLACE (least(k0, x_k0) AS k0, greatest(k1, x_k1) AS k1,
      coalesce(mixed, false) OR coalesce(x_mixed, false) AS mixed,
      {", ".join(f"coalesce({name}, 0) AS {name}" for name in counted)}),
    CASE WHEN greatest(k1, x_k1) < {_NAMELESS} THEN greatest(k1, x_k1) ELSE 0 END AS eno,
    look IS NOT NULL AND (at_once AND k0 = k1 AND NOT mixed) IS NOT TRUE AS vain
  FROM (SELECT * FROM ({mine}) FULL JOIN (SELECT * FROM x WHERE of_{side}) USING (request))"""
    return base_of(whole)


def _looked_for_order() -> str:
    """Return for how long a step's workers looked for the order to sample, in ns; 0 where nobody saw that."""
    told = first("c", stages.STEP_ENDED)
    waited = f"{least('t_ns', stages.STEP_ENDED)} - {told} - {least('t_ns', stages.STEP_CONNECTED)}"
    return f"greatest(0, coalesce(CASE WHEN {told} > 0 THEN {waited} END, 0))"


def _looked(considered: stages.Stage, allocated: stages.Stage) -> str:
    """Return the columns of a scheduler's looks at a leg, those told by its blocks too, and whether it gave at once."""
    told = least("t_ns - c", allocated, but=f"c > {AT_ONCE_NS}")
    look, given = f"least({least('t_ns', considered)}, {told})", least("t_ns", allocated)
    return (
        f"{look} AS look, {given} AS allocated, "
        f"{count(considered)} = 1 AND {given} BETWEEN {look} AND {look} + {AT_ONCE_NS} AS at_once"
    )


def legs() -> list[tuple[str, str]]:
    """Return the CTEs `p` and `d`: one row a leg, its points as columns."""
    s = stages
    waiting = (s.PREFILL_STAGED, s.SENDER_PICKED, s.MATCHED)
    of_p = f"""{least("t_ns", s.PREFILL_ENQUEUED)} AS enq, {most("t_ns", s.PREFILL_ENQUEUED)} AS enq_mx,
    {most("d", s.PREFILL_ENQUEUED)} AS intake,
    {_looked(s.PREFILL_CONSIDERED, s.PREFILL_ALLOCATED)}, {count(s.PREFILL_SCHEDULED)} AS own_sched_n,
    {most("a", s.PREFILL_SCHEDULED)} AS own_step, {least("t_ns", s.PREFILL_SCHEDULED)} AS own_at0,
    {most("t_ns", s.PREFILL_SCHEDULED)} AS own_at,
    {most("c", s.PREFILL_SCHEDULED)} AS own_c,
    {most("d", s.PREFILL_SCHEDULED)} AS own_d, {most("t_ns", s.PREFILL_FINISHED)} AS finished,
    {spread("staged", s.PREFILL_STAGED)}, {spread("picked", s.SENDER_PICKED)}, {spread("matched", s.MATCHED)},
    {least("process", *waiting)} AS w_p0, {most("process", *waiting)} AS w_p1,
    {named("ref", s.MATCHED)}, {count(s.HANDED_OVER)} AS handed_n,
    {named("carried", s.PREFILL_ALLOCATED)}"""
    of_d = f"""{least("t_ns", s.DECODE_ENQUEUED)} AS enq, {most("t_ns", s.DECODE_ENQUEUED)} AS enq_mx,
    {most("d", s.DECODE_ENQUEUED)} AS intake,
    {most("c", s.DECODE_ENQUEUED)} AS remote, {named("ref", s.DECODE_ENQUEUED)},
    {_looked(s.DECODE_CONSIDERED, s.DECODE_ALLOCATED)},
    {most("t_ns", s.REGISTRATION_QUEUED)} AS queued, {most("t_ns", s.REGISTRATION_SENT)} AS sent,
    {least("process", s.REGISTRATION_QUEUED, s.REGISTRATION_SENT)} AS sent_p0,
    {most("process", s.REGISTRATION_QUEUED, s.REGISTRATION_SENT)} AS sent_p1,
    {spread("loading", s.LOAD_STARTED)}, {least("process", s.LOAD_STARTED)} AS loading_p0,
    {most("process", s.LOAD_STARTED)} AS loading_p1, {spread("reported", s.REPORTED)},
    {least("process", s.REPORTED)} AS reported_p0, {most("process", s.REPORTED)} AS reported_p1,
    {spread("ready", s.READY)}, {least("t_ns", s.LOAD_FAILED)} AS load_failed,
    {count(s.DECODE_SCHEDULED)} AS own_sched_n, {most("a", s.DECODE_SCHEDULED)} AS own_step,
    {least("t_ns", s.DECODE_SCHEDULED)} AS own_at0, {most("t_ns", s.DECODE_SCHEDULED)} AS own_at,
    {most("b", s.DECODE_SCHEDULED)} AS own_b, {most("c", s.DECODE_SCHEDULED)} AS own_c,
    {most("d", s.DECODE_SCHEDULED)} AS own_d, {spread("received", s.REGISTRATION_RECEIVED)},
    {most("process", s.REGISTRATION_RECEIVED)} AS received_p1,
    {last("process", s.REGISTRATION_RECEIVED)} AS reader,
    {least("process", s.REGISTRATION_RECEIVED)} AS received_p0,
    {named("carried", s.DECODE_ALLOCATED)}"""
    return [transfers(), lacking(), ("p", _leg("p", OF_P, of_p)), ("d", _leg("d", OF_D, of_d))]


def fronts() -> tuple[str, str]:
    """Return the CTE `f`: one row an id that a front end named."""
    s = stages
    at = ", ".join(
        f"{least('t_ns', stage)} AS {name}"
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
    {first(_MODE, s.ROUTER_DECIDED)} AS mode_ref,
    coalesce({first('"ref"', s.ROUTER_RECEIVED, but=SAID)},
      {first('"ref"', s.CLIENT_SENT, but=SAID)}, '') AS client,
    {count(s.PREFILL_HTTP_RECEIVED)} AS p_http_n, {count(s.DECODE_HTTP_RECEIVED)} AS d_http_n,
    {least("t_ns", *asked["p"])} AS p_asked, {least("t_ns", *asked["d"])} AS d_asked,
    bool_or({among(*(one for one in FRONT if one.where is s.Where.CLIENT))}) AS has_client
  FROM event WHERE request <> '' AND {among(*FRONT)} GROUP BY request""",
    )

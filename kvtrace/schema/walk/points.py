"""Legs to requests in SQL, and their events to points: which counts where there are several, and what is derived.

A request whose events do not fit one of the usual shapes is not guessed at: the column `why` says what is unusual, and
the reference walk answers for it.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.walk.gather import among
from kvtrace.schema.walk.pairs import NEVER_NS
from kvtrace.schema.walk.plan import column


def latest(name: str, limit: str) -> str:
    """Return SQL for the last of several times that is not after `limit`, the last of all if none or no limit is.

    Of more than two the middle ones are not kept: then the answer is NULL.
    """
    n, low, high = f"{name}_n", f"{name}_mn", f"{name}_mx"
    return (
        f"CASE WHEN {n} <= 1 OR {limit} IS NULL OR {high} <= {limit} OR {low} > {limit} THEN {high} "
        f"WHEN {n} = 2 THEN {low} END"
    )


def joined() -> list[tuple[str, str]]:
    """Return the CTE `j`: one row a request, both legs and the front end's view side by side."""
    return [
        (
            "j",
            """SELECT row_number() OVER () AS k, coalesce(l.base, f_request) AS base, l.* EXCLUDE (base), f.*,
    d_k0 IS NOT NULL AS has_d, p_k0 IS NOT NULL AS has_p
  FROM (SELECT coalesce(p_base, d_base) AS base, * FROM (SELECT COLUMNS('(.*)') AS 'p_\\1' FROM p)
      FULL JOIN (SELECT COLUMNS('(.*)') AS 'd_\\1' FROM d) ON p_base = d_base) AS l
    FULL JOIN (SELECT COLUMNS('(.*)') AS 'f_\\1' FROM f) AS f ON f_request = l.base
  WHERE p_k0 IS NOT NULL OR d_k0 IS NOT NULL OR f_request IS NOT NULL""",
        ),
        (
            "twice",
            "SELECT base FROM p GROUP BY base HAVING count(*) > 1 "
            "UNION SELECT base FROM d GROUP BY base HAVING count(*) > 1",
        ),
        (
            "linked",
            """SELECT base, d_ref0 AS other, true AS to_p FROM j
  WHERE has_d AND d_ref0 <> '' AND d_ref0 IS DISTINCT FROM p_request
  UNION ALL SELECT base, unnest([p_ref0, p_ref1]), false FROM j
  WHERE p_ref1 <> '' AND (p_ref0 <> p_ref1 OR NOT has_d OR p_ref1 IS DISTINCT FROM d_request)""",
        ),
        (
            "astray",
            """SELECT unnest([l.base, o.base]) AS base FROM linked AS l
    JOIN (SELECT base, request, true AS is_p FROM p UNION ALL SELECT base, request, false FROM d WHERE k0 IS NOT NULL)
      AS o ON o.request = l.other AND o.is_p = l.to_p WHERE o.base <> l.base""",
        ),
        (
            "named",
            "SELECT base, whole, stem, cut FROM p UNION ALL SELECT base, whole, stem, cut FROM d WHERE k0 IS NOT NULL",
        ),
        (
            "misnamed",
            """SELECT unnest([n.base, n.other]) AS base FROM (SELECT n.base, unnest([n.cut,
      CASE WHEN starts_with(n.whole, 'cmpl-') THEN regexp_replace(n.stem, '-[0-9]+$', '') END, n.stem]) AS other
    FROM named AS n ANTI JOIN f ON f.request = n.base) AS n SEMI JOIN f ON f.request = n.other""",
        ),
        (
            "asked",
            """SELECT key AS client FROM (SELECT f_client AS key, base FROM j WHERE f_client <> ''
    UNION ALL SELECT base, base FROM j SEMI JOIN (SELECT client FROM f WHERE client <> '') AS c ON c.client = j.base
      WHERE coalesce(f_client, '') = '') GROUP BY key HAVING count(*) > 1 AND count(DISTINCT base) <= 32""",
        ),
    ]


_X = (
    "n", "a0", "a1", "p0", "p1", "prepared_mn", "prepared_mx", "started_mn", "started_mx", "ended_mn", "ended_mx",
    "done_mn", "done_mx", "rank", "ref0", "ref1", "bytes", "at_post", "probed", "failed_n", "failed", "pending",
)  # fmt: skip


def looked() -> list[tuple[str, str]]:
    """Return the CTEs up to `others`: when, behind each leg, its scheduler first looked at anybody perhaps in vain."""
    looks = " UNION ALL ".join(
        "SELECT eno, t_ns FROM (SELECT p.eno, e.t_ns, e.request FROM event AS e JOIN proc AS p USING (process) "
        f"WHERE {among(stage)}) SEMI JOIN (FROM {side} WHERE vain) USING (request)"
        for side, stage in (("p", stages.PREFILL_CONSIDERED), ("d", stages.DECODE_CONSIDERED))
    )
    waiting = " UNION ALL ".join(f"SELECT '{side}' AS side, k, eno, enq, allocated FROM {side}" for side in "pd")
    return [
        ("looks", looks),
        (
            "others",
            f"SELECT side, w.k, v.t_ns AS look FROM ({waiting}) AS w ASOF JOIN looks AS v "
            "ON v.eno = w.eno AND v.t_ns >= w.enq WHERE (v.t_ns < w.allocated) IS NOT FALSE",
        ),
    ]


def requests() -> list[tuple[str, str]]:
    """Return the CTEs up to `r`: mode, the one transfer, whatever is unusual, the steps of its own."""
    alike = (
        "mode = 'push' AND coalesce(nd.ranks > 1 AND np.ranks = nd.ranks "
        "AND coalesce(x_rank, 0) BETWEEN 0 AND nd.ranks - 1, false)"
    )
    one_x = ", ".join(f"CASE WHEN p_x_n > 0 THEN p_x_{name} ELSE d_x_{name} END AS x_{name}" for name in _X)
    told = ", ".join(
        f"CASE WHEN p_told_n > 0 THEN p_told_{name} ELSE d_told_{name} END AS told_{name}"
        for name in ("n", "mn", "mx", "p0", "p1", "a0", "a1")
    )
    return [
        (
            "moded",
            f"""SELECT j.*, coalesce(p_eno, 0) AS pe, coalesce(d_eno, 0) AS de, {one_x}, {told}, CASE
      WHEN p_matched_n > 0 OR d_sent IS NOT NULL OR d_queued IS NOT NULL OR p_picked_n > 0 THEN 'push'
      WHEN d_loading_n > 0 THEN 'pull' WHEN f_mode_ref IN ('push', 'pull', 'local') THEN f_mode_ref
      WHEN has_d AND NOT has_p AND d_enq IS NOT NULL AND d_remote = 0 THEN 'local' ELSE 'unknown' END AS mode,
    has_d OR p_ref1 = d_request OR f_request = d_request OR p_request = d_request AS has_read
  FROM j""",
        ),
        (
            "da",
            """SELECT d.k, m.sched, m.over, m.tokens, m.b1_over, m.b1_tokens, m.a1_sched
  FROM (SELECT k, eno, enq FROM d WHERE enq IS NOT NULL) AS d
    ASOF LEFT JOIN made AS m ON m.eno = d.eno AND m.sched <= d.enq""",
        ),
        (
            "owned",
            f"""SELECT m.* REPLACE (least(m.p_look, ap.look) AS p_look, least(m.d_look, ad.look) AS d_look),
    {alike} AS alike, {_step_columns("p")}, {_step_columns("d")}, q.offset_ns AS x_offset,
    tp.eno IS NOT NULL AS p_has_steps, da.over AS da_over, da.tokens AS da_tokens, da.b1_over AS da_b1_over,
    da.b1_tokens AS da_b1_tokens, CASE WHEN da.sched IS NULL THEN td.begun ELSE da.a1_sched END AS da_next,
    coalesce(np.engine, '') AS p_engine, coalesce(nd.engine, '') AS d_engine,
    coalesce(tp.tied, false) OR coalesce(td.tied, false) AS tied, {_unusual(alike)} AS why
  FROM moded AS m
    LEFT JOIN made AS sp ON m.p_own_sched_n = 1 AND sp.eno = m.pe AND sp.step = m.p_own_step AND sp.sched = m.p_own_at
    LEFT JOIN made AS sd ON m.d_own_sched_n = 1 AND sd.eno = m.de AND sd.step = m.d_own_step AND sd.sched = m.d_own_at
    LEFT JOIN proc AS q ON q.process = m.x_p0
    LEFT JOIN (SELECT * FROM others WHERE side = 'p') AS ap ON ap.k = m.p_k
    LEFT JOIN (SELECT * FROM others WHERE side = 'd') AS ad ON ad.k = m.d_k
    LEFT JOIN da ON da.k = m.d_k LEFT JOIN naming AS np ON np.eno = m.pe LEFT JOIN naming AS nd ON nd.eno = m.de
    LEFT JOIN engine_steps AS tp ON tp.eno = m.pe LEFT JOIN engine_steps AS td ON td.eno = m.de
    LEFT JOIN (SELECT DISTINCT base FROM twice) AS w ON w.base = m.base
    LEFT JOIN (SELECT DISTINCT base FROM astray) AS s ON s.base = m.base
    LEFT JOIN (SELECT DISTINCT base FROM misnamed) AS n ON n.base = m.base
    LEFT JOIN asked AS c ON c.client = coalesce(nullif(m.f_client, ''), m.base)""",
        ),
        ("r", f"SELECT *, {_settled()} FROM owned"),
    ]


def _step_columns(side: str) -> str:
    names = ["sched", "started", "forwarded", "connected", "connector", "ahead", "tokens", "over", "place", "ended"]
    names += [f"{way}{by}_{what}" for way in "ba" for by in (1, 2) for what in ("sched", "over", "tokens")]
    return ", ".join(f"s{side}.{name} AS {side}s_{name}" for name in names)


def _unusual(alike: str) -> str:
    """Return SQL for what keeps a request from being walked here; the first reason counts.

    `alike` is the condition that each rank of P writes to its like on D, so that each write has its own notification.
    """
    return f"""CASE
      WHEN EXISTS (FROM proc WHERE imported <> '' AND engine = '') OR m.f_has_client OR m.p_begun_n > 0
        OR m.d_begun_n > 0
        THEN 'imported points'
      WHEN s.base IS NOT NULL OR n.base IS NOT NULL OR (p_request = d_request AND (p_suffixed OR p_k0 = d_k0))
        THEN 'ids that lead to other requests'
      WHEN p_k0 <> p_k1 OR d_k0 <> d_k1 OR p_mixed OR d_mixed OR (has_p AND p_own_n = 0)
        THEN 'engines that are both sides'
      WHEN w.base IS NOT NULL OR p_enq <> p_enq_mx OR d_enq <> d_enq_mx THEN 'several legs'
      WHEN x_a0 <> x_a1 OR x_p0 <> x_p1 OR (p_x_n > 0 AND d_x_n > 0)
        OR (mode = 'push' AND d_enq IS NOT NULL AND x_ref1 <> '' AND (x_ref0 <> x_ref1 OR x_ref1 <> d_request))
        OR ({alike} AND (told_a0 <> coalesce(x_rank, 0) OR told_a1 <> coalesce(x_rank, 0))) THEN 'several transfers'
      WHEN c.client IS NOT NULL THEN 'several attempts'
      WHEN f_p_http_n > 1 OR f_d_http_n > 1 OR f_p_asked <= f_p_http OR f_d_asked <= f_d_http THEN 'several exchanges'
      WHEN p_own_sched_n > 1 OR d_own_sched_n > 1 THEN 'several steps of its own'
      WHEN (p_told_n > 0 AND d_told_n > 0) OR (told_n > 1 AND told_p0 <> told_p1) THEN 'several notified'
      WHEN tp.tied OR td.tied THEN 'steps made up at one moment' END"""


def _settled() -> str:
    """Return what needs no knowledge of other requests: derived points, the transfer's signs, points settled so far."""
    has_x = "x_started_mx IS NOT NULL AND x_failed_n = 0"
    is_own = "d_own_c + d_own_b >= d_own_d"
    signs = "x_done_mx, x_probed, CASE WHEN mode = 'push' THEN told_mn END, CASE WHEN x_at_post = 1 THEN x_ended_mx END"
    return f"""{has_x} AS has_x, least({signs}) AS seen_ns,
    length(CASE WHEN x_bytes = 0 OR x_bytes IS NULL THEN '' ELSE bin(x_bytes) END) AS x_size,
    CASE WHEN p_own_c < p_own_d THEN ps_sched END AS prefill_begun,
    CASE WHEN p_own_c < p_own_d AND ps_forwarded <> 0 THEN ps_forwarded END AS prefill_computed,
    CASE WHEN {is_own} THEN ds_sched END AS decode_begun,
    CASE WHEN {is_own} AND ds_forwarded <> 0 THEN ds_forwarded END AS decode_computed,
    CASE WHEN {is_own} AND ds_ended <> 0 THEN ds_ended END AS decode_sampled,
    {latest("f_sent_p", "coalesce(f_p_http, p_enq)")} AS router_prefill_sent,
    {latest("f_sent_d", "coalesce(f_d_http, d_enq)")} AS router_decode_sent,
    {latest("d_ready", f"CASE WHEN {is_own} THEN ds_sched END")} AS decode_ready,
    CASE WHEN has_read THEN d_received_n END AS received_n, CASE WHEN has_read THEN d_received_mn END AS received_mn,
    CASE WHEN has_read THEN d_received_mx END AS received_mx"""


def placed() -> list[tuple[str, str]]:
    """Return the CTEs `b` and `g`: the transfer's bracket, and every point of the graph as a column."""
    narrow = {
        name: "CASE WHEN mode = 'push' AND has_x AND p_w_p0 = p_w_p1 AND p_w_p0 = x_p0 "
        f"THEN {latest(name, 'x_prepared_mx')} ELSE {name}_mx END"
        for name in ("p_staged", "p_picked", "p_matched")
    }  # fmt: skip
    return [
        (
            "b",
            f"""SELECT * EXCLUDE (why), CASE WHEN why IS NOT NULL THEN why
      WHEN has_x AND seen_ns IS NOT NULL AND fast_low < coalesce(fastest, {NEVER_NS})
        AND arrived > least(bracket_low, bracket_high) THEN 'the fastest of its pair is not sure'
      WHEN (f_sent_p_n > 2 AND router_prefill_sent IS NULL) OR (f_sent_d_n > 2 AND router_decode_sent IS NULL)
        OR (d_ready_n > 2 AND decode_ready IS NULL) THEN 'many of one point'
      WHEN has_x AND ((mode = 'push' AND p_w_p0 <> p_w_p1 AND (p_staged_n > 1 OR p_picked_n > 1 OR p_matched_n > 1))
        OR (d_reported_n > 0 AND CASE WHEN mode <> 'push' THEN d_reported_p0 <> x_p0 OR d_reported_p1 <> x_p0
          ELSE alike AND told_n > 0 AND (d_reported_p0 <> told_p0 OR d_reported_p1 <> told_p0) END)
        OR (alike AND told_n > 0 AND d_sent_p0 <> d_sent_p1)
        OR (mode <> 'push' AND d_loading_n > 1 AND d_loading_p0 <> d_loading_p1)
        OR (mode = 'push' AND received_n > 1 AND d_received_p0 <> d_received_p1)) THEN 'several ranks'
      END AS why
  FROM (SELECT *, CASE WHEN seen_ns IS NULL THEN greatest(wire_low, coalesce(x_ended_mx, 0))
        ELSE least(greatest(x_started_mx + coalesce(fastest, 0), bracket_low), seen_ns) END AS arrived,
      CASE WHEN seen_ns IS NULL THEN greatest(wire_low, coalesce(x_ended_mx, 0)) ELSE seen_ns END AS bracket_high
    FROM (SELECT *, CASE WHEN seen_ns IS NULL THEN wire_low ELSE least(CASE WHEN seen_ns >= coalesce(x_ended_mx, 0)
          THEN greatest(wire_low, coalesce(x_ended_mx, 0)) ELSE wire_low END, seen_ns) END AS bracket_low
      FROM (SELECT r.*, fast.fastest, messages.least, least(u.fast_low, ua.fast_low) AS fast_low,
          least(u.message_low, ua.message_low) AS message_low,
          greatest(x_started_mx, coalesce(x_pending + coalesce(x_offset, 0), 0)) AS wire_low
        FROM r LEFT JOIN fast ON fast.pe = r.pe AND fast.de = r.de AND fast.x_size = r.x_size
          LEFT JOIN messages ON messages.pe = r.pe AND messages.de = r.de
          LEFT JOIN (SELECT pe, de, min(fast_low) AS fast_low, min(message_low) AS message_low FROM unsure
            GROUP BY pe, de) AS u ON u.pe = r.pe AND u.de = r.de
          CROSS JOIN (SELECT min(fast_low) AS fast_low, min(message_low) AS message_low FROM unsure
            WHERE anywhere) AS ua)))""",
        ),
        (
            "g",
            f"""SELECT b.*, {_points(narrow)} FROM (SELECT *,
      {latest("d_reported", "decode_ready")} AS decode_reported,
      CASE WHEN d_sent IS NOT NULL THEN d_sent + coalesce(least, 0) WHEN mode = 'push' AND has_x
        AND d_received_p0 = d_received_p1 AND d_received_p0 = x_p0 THEN {latest("received", "x_prepared_mx")}
        ELSE received_mx END AS registered FROM b) AS b""",
        ),
    ]


def _points(narrow: dict[str, str]) -> str:
    """Return the columns of the points that are not there yet, each named after its point."""
    told = (
        f"CASE WHEN mode <> 'push' AND has_x THEN NULL WHEN d_reported_n > 0 THEN {latest('told', 'decode_reported')} "
        "ELSE told_mx END"
    )
    done = "CASE WHEN NOT has_x THEN x_done_mn WHEN mode = 'push' AND told_n > 0 THEN NULL ELSE x_done_mx END"
    loading = (
        "CASE WHEN mode <> 'push' AND has_x AND d_loading_p0 = x_p0 AND d_loading_p0 = d_loading_p1 "
        f"THEN {latest('d_loading', 'x_prepared_mx')} ELSE d_loading_mx END"
    )
    by_point = {
        "client.sent": "f_client_sent", "client.first_token": "f_client_token", "router.received": "f_received",
        "router.decided": "f_decided", "router.prefill_returned": "f_returned", "router.first_token": "f_token",
        "prefill.http_received": "f_p_http", "prefill.http_responded": "f_p_responded",
        "decode.http_received": "f_d_http", "decode.first_token_out": "f_out", "prefill.enqueued": "p_enq",
        "decode.enqueued": "d_enq", "prefill.finished": "p_finished", "prefill.staged": narrow["p_staged"],
        "sender.picked": narrow["p_picked"], "transfer.matched": narrow["p_matched"], "decode.allocated": "d_allocated",
        "decode.load_started": loading, "decode.load_failed": "d_load_failed", "transfer.begun": "NULL::BIGINT",
        "transfer.prepared": "CASE WHEN has_x THEN x_prepared_mx ELSE x_prepared_mn END",
        "transfer.post_started": "CASE WHEN has_x THEN x_started_mx ELSE x_started_mn END",
        "transfer.post_ended": "CASE WHEN has_x THEN x_ended_mx ELSE x_ended_mn END",
        "transfer.done": done, "transfer.failed": "x_failed", "transfer.notified": told,
        "transfer.arrived": "CASE WHEN has_x THEN arrived END",
    }  # fmt: skip
    return ", ".join(f"{sql} AS {column(name)}" for name, sql in by_point.items())

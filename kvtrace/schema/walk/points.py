"""Legs to requests in SQL, and their events to points: which counts where there are several, and what is derived.

A request whose events do not fit one of the usual shapes is not guessed at: the column `why` says what is unusual, and
the reference walk answers for it.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.division import INTAKE_NS
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


_X = (
    "n", "a0", "a1", "p0", "p1", "prepared_mn", "prepared_mx", "started_mn", "started_mx", "ended_mn", "ended_mx",
    "done_mn", "done_mx", "rank", "ref0", "ref1", "bytes0", "bytes", "at_post0", "at_post", "probed", "failed_n",
    "failed", "pending",
)  # fmt: skip
_ALIKE = (
    "mode = 'push' AND coalesce(d_ranks > 1 AND p_ranks = d_ranks "
    "AND coalesce(x_rank, 0) BETWEEN 0 AND d_ranks - 1, false)"
)
"""Each rank of P writes to its like on D, so that each write has its own notification."""
_LACKED = ("lacked_f", "lacked_c", "lacked_r")
_OWN_STEP = ("sched", "started", "forwarded", "connected", "connector", "ahead", "turn", "over", "ended", *_LACKED)


def joined() -> list[tuple[str, str]]:
    """Return the CTEs up to `r`: a row a request, both legs and the front end's view, each point as it counts."""
    one_x = ", ".join(f"CASE WHEN p_x_n > 0 THEN p_x_{name} ELSE d_x_{name} END AS x_{name}" for name in _X)
    told = ", ".join(
        f"CASE WHEN p_told_n > 0 THEN p_told_{name} ELSE d_told_{name} END AS told_{name}"
        for name in ("n", "mn", "mx", "p0", "p1", "a0", "a1")
    )
    return [
        (
            "j",
            """SELECT coalesce(l.base, f_request) AS base, l.* EXCLUDE (base), f.*,
    d_k0 IS NOT NULL AS has_d, p_k0 IS NOT NULL AS has_p, f_request IS NOT NULL AS has_f
  FROM (SELECT coalesce(p_base, d_base) AS base, * FROM (SELECT COLUMNS('(.*)') AS 'p_\\1' FROM p)
      FULL JOIN (SELECT COLUMNS('(.*)') AS 'd_\\1' FROM d) ON p_base = d_base) AS l
    FULL JOIN (SELECT COLUMNS('(.*)') AS 'f_\\1' FROM f) AS f ON f_request = l.base
  WHERE p_k0 IS NOT NULL OR d_k0 IS NOT NULL OR f_request IS NOT NULL""",
        ),
        (
            "moded",
            f"""SELECT j.*, coalesce(p_eno, 0) AS pe, coalesce(d_eno, 0) AS de, {one_x}, {told}, CASE
      WHEN p_matched_n > 0 OR d_sent IS NOT NULL OR d_queued IS NOT NULL OR p_picked_n > 0 THEN 'push'
      WHEN d_loading_n > 0 THEN 'pull' WHEN f_mode_ref > 0 THEN ['push', 'pull', 'local'][f_mode_ref]
      WHEN has_d AND NOT has_p AND d_enq IS NOT NULL AND d_remote = 0 THEN 'local' ELSE 'unknown' END AS mode,
    has_d OR p_ref1 = hash(d_request) OR f_request = d_request OR p_request = d_request AS has_read
  FROM j""",
        ),
        (
            "owned",
            f"""SELECT m.*, {_step_columns("p")}, {_step_columns("d")}, q.offset_ns AS x_offset,
    np.steps_begun IS NOT NULL AS p_has_steps, nd.steps_begun AS d_steps_begun,
    coalesce(np.engine, '') AS p_engine, coalesce(nd.engine, '') AS d_engine, np.ranks AS p_ranks, nd.ranks AS d_ranks,
    coalesce(np.tied, false) OR coalesce(nd.tied, false) AS tied, {_ALIKE} AS alike
  FROM moded AS m
    LEFT JOIN made AS sp ON sp.eno = m.pe AND sp.step = m.p_own_step AND sp.sched = m.p_own_at
    LEFT JOIN made AS sd ON sd.eno = m.de AND sd.step = m.d_own_step AND sd.sched = m.d_own_at
    LEFT JOIN proc AS q ON q.process = m.x_p0
    LEFT JOIN naming AS np ON np.eno = m.pe LEFT JOIN naming AS nd ON nd.eno = m.de""",
        ),
        ("placed", f"SELECT *, {_settled()} FROM owned"),
        ("r", f"SELECT {_kept()} FROM (SELECT *, {_several()} AS several FROM (SELECT *, {_narrowed()} FROM placed))"),
    ]


def _step_columns(side: str) -> str:
    names = [
        *_OWN_STEP,
        *(f"{way}{by}_{what}" for way in "ba" for by in (1, 2) for what in ("sched", "over", "turn")),
    ]
    return ", ".join(f"s{side}.{name} AS {side}s_{name}" for name in names)


def _unusual() -> str:
    """Return SQL for what of a request by itself keeps it from being walked here; the first reason counts."""
    return """CASE
      WHEN (SELECT bool_or(imported <> '' AND engine = '') FROM proc) OR f_has_client OR p_begun_n > 0
        OR p_handed_n > 0 OR d_begun_n > 0
        THEN 'imported points'
      WHEN p_request = d_request AND (p_suffixed OR p_k0 = d_k0) THEN 'ids that lead to other requests'
      WHEN p_k0 <> p_k1 OR d_k0 <> d_k1 OR p_mixed OR d_mixed OR (has_p AND p_own_n = 0)
        THEN 'engines that are both sides'
      WHEN p_enq <> p_enq_mx OR d_enq <> d_enq_mx THEN 'several legs'
      WHEN f_p_http_n > 1 OR f_d_http_n > 1 OR f_p_asked <= f_p_http OR f_d_asked <= f_d_http THEN 'several exchanges'
      WHEN tied THEN 'steps made up at one moment' END"""


def _several() -> str:
    """Return the condition that a first and a last time a point do not say what counts of a request, see `ranks`.

    That is of several ranks or transfers, of another rank than the one that reported, of more than two stamps.
    """
    ranks = " OR ".join(
        f"{name}_p0 <> {name}_p1" for name in ("x", "told", "p_w", "d_reported", "d_loading", "d_sent", "d_received")
    )
    return f"""coalesce({ranks} OR x_a0 <> x_a1 OR x_bytes0 <> x_bytes OR x_at_post0 <> x_at_post
      OR (p_x_n > 0 AND d_x_n > 0) OR (p_told_n > 0 AND d_told_n > 0)
      OR (mode = 'push' AND d_enq IS NOT NULL AND (x_ref0 <> x_ref1 OR x_ref1 <> hash(d_request)))
      OR (alike AND (told_a0 <> coalesce(x_rank, 0) OR told_a1 <> coalesce(x_rank, 0)))
      OR (has_x AND CASE WHEN mode <> 'push' THEN d_reported_p0 <> x_p0
        ELSE alike AND told_n > 0 AND d_reported_p0 <> told_p0 END)
      OR (d_reported_n > 2 AND decode_reported IS NULL)
      OR (told_n > 2 AND ({_TOLD}) IS NULL AND (mode = 'push' OR NOT has_x))
      OR (p_staged_n > 2 AND prefill_staged IS NULL) OR (p_picked_n > 2 AND sender_picked IS NULL)
      OR (p_matched_n > 2 AND transfer_matched IS NULL) OR (d_loading_n > 2 AND decode_load_started IS NULL)
      OR (d_sent IS NULL AND received_n > 2 AND read_ns IS NULL), false)"""


_TOLD = (
    f"CASE WHEN mode <> 'push' AND has_x THEN NULL WHEN d_reported_n > 0 THEN {latest('told', 'decode_reported')} "
    "ELSE told_mx END"
)


def size_class(moved_bytes: str) -> str:
    """Return SQL for the class of sizes that a transfer of so many bytes belongs to."""
    return f"length(CASE WHEN {moved_bytes} = 0 OR {moved_bytes} IS NULL THEN '' ELSE bin(abs({moved_bytes})) END)"


def _settled() -> str:
    """Return what needs no knowledge of other requests: derived points, the transfer's signs, points settled so far."""
    has_x = "x_started_mx IS NOT NULL AND x_failed_n = 0"
    is_own = "d_own_c + d_own_b >= d_own_d"
    begun = f"CASE WHEN {is_own} AND ds_sched IS NOT NULL THEN d_own_at0 END"
    signs = "x_done_mx, x_probed, CASE WHEN mode = 'push' THEN told_mn END, CASE WHEN x_at_post = 1 THEN x_ended_mx END"
    return f"""{has_x} AS has_x, least({signs}) AS seen_ns,
    {size_class("x_bytes")} AS x_size,
    CASE WHEN p_own_c < p_own_d AND ps_sched IS NOT NULL THEN p_own_at0 END AS prefill_begun,
    CASE WHEN p_own_c < p_own_d AND ps_forwarded <> 0 THEN ps_forwarded END AS prefill_computed,
    {begun} AS decode_begun,
    CASE WHEN {is_own} AND ds_forwarded <> 0 THEN ds_forwarded END AS decode_computed,
    CASE WHEN {is_own} AND ds_ended <> 0 THEN ds_ended END AS decode_sampled,
    {latest("f_sent_p", "coalesce(f_p_http, p_enq)")} AS router_prefill_sent,
    {latest("f_sent_d", "coalesce(f_d_http, d_enq)")} AS router_decode_sent,
    {latest("d_ready", begun)} AS decode_ready,
    CASE WHEN has_read THEN d_received_n END AS received_n, CASE WHEN has_read THEN d_received_mn END AS received_mn,
    CASE WHEN has_read THEN d_received_mx END AS received_mx"""


def _narrowed() -> str:
    """Return the points of which there may be several and which others settle, and what that leaves unclear."""
    of_sender = {
        name: "CASE WHEN mode = 'push' AND has_x AND p_w_p0 = x_p0 "
        f"THEN {latest(name, 'x_prepared_mx')} ELSE {name}_mx END"
        for name in ("p_staged", "p_picked", "p_matched")
    }  # fmt: skip
    loading = (
        "CASE WHEN mode <> 'push' AND has_x AND d_loading_p0 = x_p0 "
        f"THEN {latest('d_loading', 'x_prepared_mx')} ELSE d_loading_mx END"
    )
    received = (
        "CASE WHEN mode = 'push' AND has_x AND d_received_p0 = x_p0 "
        f"THEN {latest('received', 'x_prepared_mx')} ELSE received_mx END"
    )
    return f"""{latest("d_reported", "decode_ready")} AS decode_reported, {loading} AS decode_load_started,
    {of_sender["p_staged"]} AS prefill_staged, {of_sender["p_picked"]} AS sender_picked,
    {of_sender["p_matched"]} AS transfer_matched, {received} AS read_ns,
    (f_sent_p_n > 2 AND router_prefill_sent IS NULL) OR (f_sent_d_n > 2 AND router_decode_sent IS NULL)
      OR (d_ready_n > 2 AND decode_ready IS NULL) AS many_early"""


def _kept() -> str:
    """Return the columns of `r`: every one is written and read once a request, so there are no others."""
    s = stages
    done = "CASE WHEN NOT has_x THEN x_done_mn WHEN mode = 'push' AND told_n > 0 THEN NULL ELSE x_done_mx END"
    by_point = {
        s.CLIENT_SENT: "f_client_sent", s.CLIENT_FIRST_TOKEN: "f_client_token", s.ROUTER_RECEIVED: "f_received",
        s.ROUTER_DECIDED: "f_decided", s.ROUTER_PREFILL_RETURNED: "f_returned", s.ROUTER_FIRST_TOKEN: "f_token",
        s.PREFILL_HTTP_RECEIVED: "f_p_http", s.PREFILL_HTTP_RESPONDED: "f_p_responded",
        s.DECODE_HTTP_RECEIVED: "f_d_http", s.DECODE_FIRST_TOKEN_OUT: "f_out", s.PREFILL_ENQUEUED: "p_enq",
        s.DECODE_ENQUEUED: "d_enq", s.PREFILL_FINISHED: "p_finished", s.DECODE_ALLOCATED: "d_allocated",
        s.LOAD_FAILED: "d_load_failed", s.TRANSFER_BEGUN: "NULL::BIGINT", s.TRANSFER_FAILED: "x_failed",
        s.PREPARED: "CASE WHEN has_x THEN x_prepared_mx ELSE x_prepared_mn END",
        s.POST_STARTED: "CASE WHEN has_x THEN x_started_mx ELSE x_started_mn END",
        s.POST_ENDED: "CASE WHEN has_x THEN x_ended_mx ELSE x_ended_mn END", s.TRANSFER_DONE: done, s.NOTIFIED: _TOLD,
        **dict.fromkeys(
            (
                s.ROUTER_PREFILL_SENT, s.ROUTER_DECODE_SENT, s.PREFILL_BEGUN, s.PREFILL_COMPUTED, s.PREFILL_STAGED,
                s.SENDER_PICKED, s.MATCHED, s.LOAD_STARTED, s.REPORTED, s.READY, s.DECODE_BEGUN, s.DECODE_COMPUTED,
                s.DECODE_SAMPLED,
            ),
            "",
        ),
    }  # fmt: skip
    points = [f"{sql} AS {column(one.name)}".removeprefix(" AS ") for one, sql in by_point.items()]
    steps = [f"{side}s_{name}" for side, names in _STEPS_KEPT.items() for name in names]
    other = f"""base, has_f, coalesce(f_client, '') AS client, mode, pe, de,
    {_unusual()} AS alone, {_ids()},
    has_x, seen_ns, x_size, p_has_steps, d_steps_begun, p_look, d_look, p_allocated, d_sent, read_ns, received_mx,
    {", ".join(f"CASE WHEN {side}_intake >= {INTAKE_NS} THEN {side}_intake END AS {side}_intake" for side in "pd")},
    coalesce(p_own_sched_n > 1, false) AS p_chunked, coalesce(d_own_sched_n > 1, false) AS d_chunked,
    d_reader AS reader, x_started_mx AS started_ns, x_ended_mx AS ended_ns,
    greatest(x_started_mx, coalesce(x_pending + coalesce(x_offset, 0), 0)) AS wire_low,
    d_enq IS NOT NULL AND d_remote = 0 AS untold, d_own_c + 1 < d_own_d AS has_prompt,
    CASE WHEN has_x THEN x_p0 WHEN p_picked_n > 0 THEN p_w_p0 END AS sender,
    CASE WHEN many_early THEN 'many of one point' END AS unclear,
    several, CASE WHEN several AND has_read THEN hash(d_request) END AS read_id,
    CASE WHEN p_x_started_mx IS NOT NULL OR d_x_started_mx IS NOT NULL THEN
      CASE WHEN p_x_probed IS NOT NULL OR d_x_probed IS NOT NULL THEN 0 ELSE
      least(p_x_done_mn, d_x_done_mn, p_x_ended_mn, d_x_ended_mn, p_told_mn, d_told_mn)
        - greatest(p_x_started_mx, d_x_started_mx) END END AS fast_low, d_received_mn - d_sent AS message_low"""
    return ", ".join([other, *points, *steps])


_NEAR = ("b1_sched", "b1_over", "b1_turn", "b2_over", "b2_turn")
_STEPS_KEPT = {
    "p": (
        "sched", "started", "connected", "connector", "ahead", "over", "turn", *_NEAR, "a1_sched", "a1_over",
        "a1_turn", "a2_sched", *_LACKED,
    ),
    "d": ("sched", "started", "connected", "connector", "ahead", "over", *_LACKED, *_NEAR),
}  # fmt: skip


def _ids() -> str:
    """Return the ids by which a request may have to do with others, hashed: one hash for two ids costs an answer."""
    of_p = "has_d AND (d_ref0 <> d_ref1 OR d_ref1 <> hash(p_request) OR NOT has_p)"
    of_d = "p_ref0 <> p_ref1 OR NOT has_d OR p_ref1 <> hash(d_request)"
    return f"""CASE WHEN has_p THEN hash(p_request) END AS p_id, CASE WHEN has_d THEN hash(d_request) END AS d_id,
    CASE WHEN p_vain THEN hash(p_request) END AS p_vain, CASE WHEN d_vain THEN hash(d_request) END AS d_vain,
    CASE WHEN d_ref1 IS NOT NULL AND ({of_p}) THEN [d_ref0, d_ref1] END AS of_p,
    CASE WHEN p_ref1 IS NOT NULL AND ({of_d}) THEN [p_ref0, p_ref1] END AS of_d,
    CASE WHEN p_carried0 IS NOT NULL OR d_carried0 IS NOT NULL
      THEN [p_carried0, p_carried1, d_carried0, d_carried1] END AS carried,
    CASE WHEN NOT has_f THEN list_filter([p_request, CASE WHEN has_d THEN d_request END], lambda x: x IS NOT NULL)
      END AS nameless"""


def placed() -> list[tuple[str, str]]:
    """Return the CTEs `b` and `g`: the transfer's bracket, and every point of the graph as a column."""
    at_post = "greatest(wire_low, coalesce(ended_ns, 0))"
    looks = ", ".join(
        f"least({side}_look, CASE WHEN (o{side}.look < {given}) IS NOT FALSE THEN o{side}.look END) AS {side}_look"
        for side, given in (("p", "p_allocated"), ("d", "decode_allocated"))
    )
    return [
        (
            "near",
            f"""SELECT r.* REPLACE ({looks}), da.over AS da_over, da.turn AS da_turn,
    da.b1_over AS da_b1_over, da.b1_turn AS da_b1_turn,
    CASE WHEN da.sched IS NULL THEN d_steps_begun ELSE da.a1_sched END AS da_next,
    fast.fastest, messages.least, least(u.fast_low, ua.fast_low) AS fast_unsure,
    least(u.message_low, ua.message_low) AS message_unsure, m.since AS met_since, m.until AS met_until,
    m.d_since AS d_met_since, m.d_until AS d_met_until,
    CASE WHEN NOT has_x THEN 0 WHEN several THEN one_lacked ELSE greatest(0, lp.post, ld.post) END AS lacked_x,
    CASE WHEN several THEN notices ELSE ld.n END > 1 AS noticed_often,
    lp.copies > 0 OR ld.copies > 0 AS has_copies,
    CASE WHEN several THEN notice_t ELSE ld.t END AS noticed_t,
    CASE WHEN several THEN notice_b ELSE ld.b END AS noticed_b,
    CASE WHEN several THEN notice_c ELSE ld.c END AS noticed_c
  FROM settled AS r LEFT JOIN da ON da.eno = r.de AND da.enq = r.decode_enqueued
    LEFT JOIN others AS op ON op.eno = r.pe AND op.enq = r.prefill_enqueued
    LEFT JOIN others AS od ON od.eno = r.de AND od.enq = r.decode_enqueued
    LEFT JOIN fast ON fast.pe = r.pe AND fast.de = r.de AND fast.x_size = r.x_size
    LEFT JOIN messages ON messages.pe = r.pe AND messages.de = r.de
    LEFT JOIN (SELECT pe, de, min(fast_low) AS fast_low, min(message_low) AS message_low FROM unsure
      GROUP BY pe, de) AS u ON u.pe = r.pe AND u.de = r.de
    LEFT JOIN met AS m ON m.pe = r.pe AND m.de = r.de
    LEFT JOIN lacking AS lp ON lp.id = r.p_id LEFT JOIN lacking AS ld ON ld.id = r.d_id
    CROSS JOIN (SELECT min(fast_low) AS fast_low, min(message_low) AS message_low FROM unsure
      WHERE anywhere) AS ua""",
        ),
        (
            "b",
            f"""SELECT * EXCLUDE (why), CASE WHEN why IS NOT NULL THEN why
      WHEN has_x AND seen_ns IS NOT NULL AND fast_unsure < coalesce(fastest, {NEVER_NS})
        AND arrived > least(bracket_low, bracket_high) THEN 'the fastest of its pair is not sure'
      WHEN has_copies THEN 'copies through a host buffer'
      ELSE unclear END AS why, CASE WHEN has_x THEN arrived END AS transfer_arrived
  FROM (SELECT *, CASE WHEN seen_ns IS NULL THEN {at_post}
        ELSE least(greatest(started_ns + coalesce(fastest, 0), bracket_low), seen_ns) END AS arrived,
      coalesce(seen_ns, {at_post}) AS bracket_high
    FROM (SELECT *, CASE WHEN seen_ns IS NULL THEN wire_low
        ELSE least(CASE WHEN seen_ns >= coalesce(ended_ns, 0) THEN {at_post} ELSE wire_low END, seen_ns) END
      AS bracket_low FROM near))""",
        ),
        (
            "g",
            "SELECT *, CASE WHEN sent_ns IS NOT NULL THEN sent_ns + coalesce(least, 0) ELSE read_ns END AS registered "
            "FROM b",
        ),
    ]

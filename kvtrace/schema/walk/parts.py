"""How a wait divides, in SQL: by one step or none in columns, by many in rows (`long`). The reference is `division`.

A part is a cause with the condition, begin and end of its stretch, as SQL over the columns of one request.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtrace import stages
from kvtrace.division import TURN_NS
from kvtrace.schema.walk.long import BACKWARDS
from kvtrace.schema.walk.pairs import NEVER_NS
from kvtrace.schema.walk.path import APART
from kvtrace.schema.walk.plan import NUMBER, column, nodes
from kvtrace.splits import JOIN_NS


class Part(NamedTuple):
    """A stretch of the path in columns: it counts where `when` holds and it begins before it ends."""

    cause: stages.Cause
    when: str
    start: str
    end: str
    strayed: bool = False
    """Whether no direct predecessor was there: such a stretch is unattributed."""


def waits(after: stages.Stage, *before: stages.Stage) -> str:
    """Return the condition that the path waits for `after` since one of those."""
    return f"q_{column(after.name)} IN ({', '.join(str(NUMBER[one.name]) for one in before)})"


def _until(start: str, end: str, near: tuple[str, str, str, str]) -> str:
    """Return until when a wait with one step or none is the step's and the turn's; the rest is nobody's.

    `near` are the end of the last step made up by `start` and the turn behind it, and those of the one before it.
    """
    over, turn, earlier, earlier_turn = near
    return (
        f"least({end}, CASE WHEN {start} < {over} THEN least({over}, {end}) + {turn} "
        f"WHEN {start} < {earlier} THEN least({earlier}, {end}) + {earlier_turn} ELSE {start} + {TURN_NS} END)"
    )


_P_NEAR = ("ps_b1_over", "ps_b1_turn", "ps_b2_over", "ps_b2_turn")
_D_NEAR = ("ds_b1_over", "ds_b1_turn", "ds_b2_over", "ds_b2_turn")
_A_NEAR = ("da_over", "da_turn", "da_b1_over", "da_b1_turn")
_R_NEAR = ("ps_over", "ps_turn", "ps_b1_over", "ps_b1_turn")


def divided() -> list[tuple[str, str]]:
    """Return the CTEs `h` and `v`: where each wait divides, which have many steps in them, what cannot be told."""
    s = stages
    on_p, on_a = waits(s.PREFILL_BEGUN, s.PREFILL_ENQUEUED), waits(s.DECODE_ALLOCATED, s.DECODE_ENQUEUED)
    on_d = waits(s.DECODE_BEGUN, s.READY, s.LOAD_FAILED, s.DECODE_ENQUEUED)
    on_r = f"{waits(s.PREFILL_STAGED, s.PREFILL_FINISHED)} AND p_has_steps"
    on_m = waits(s.MATCHED, s.SENDER_PICKED, s.PREFILL_STAGED)
    sd, sp, sr, sm = "s_decode_begun", "s_prefill_begun", "s_prefill_staged", "s_transfer_matched"
    apart = (
        f"coalesce(NOT p_chunked AND ps_sched <= {sr} AND (ps_a1_sched IS NULL OR ps_a1_sched > {sr}) "
        "AND (ps_a2_sched IS NULL OR ps_a2_sched >= prefill_staged), false)"
    )
    columns = {
        "wp_long": f"coalesce({on_p} AND {sp} IS NOT NULL AND (ps_b1_sched > {sp} OR p_chunked), false)",
        "wp_u": f"CASE WHEN {on_p} THEN {_until(sp, 'prefill_begun', _P_NEAR)} END",
        "wd_long": f"coalesce({on_d} AND {sd} IS NOT NULL AND (ds_b1_sched > {sd} OR d_chunked), false)",
        "wd_u": f"CASE WHEN {on_d} THEN {_until(sd, 'decode_begun', _D_NEAR)} END",
        "wa_long": f"coalesce({on_a} AND s_decode_allocated < decode_allocated AND da_next < decode_allocated, false)",
        "wa_u": f"CASE WHEN {on_a} THEN {_until('s_decode_allocated', 'decode_allocated', _A_NEAR)} END",
        "wr_long": f"coalesce({on_r} AND {sr} IS NOT NULL AND NOT {apart}, false)",
        "wr_run": f"CASE WHEN {on_r} AND {apart} THEN CASE WHEN {sr} < ps_over THEN least(ps_over, prefill_staged) "
        f"WHEN {sr} < ps_b1_over THEN least(ps_b1_over, prefill_staged) ELSE {sr} END END",
        "wr_u": f"CASE WHEN {on_r} AND {apart} THEN {_until(sr, 'prefill_staged', _R_NEAR)} END",
        **{
            f"wq_{side}_at": f"CASE WHEN {waits(enqueued, *before)} AND {side[0]}_intake IS NOT NULL "
            f"THEN greatest(s_{side}_enqueued, {side}_enqueued - {side[0]}_intake) ELSE {side}_enqueued END"
            for side, enqueued, before in (
                ("prefill", s.PREFILL_ENQUEUED, (s.ROUTER_PREFILL_SENT, s.PREFILL_HTTP_RECEIVED)),
                ("decode", s.DECODE_ENQUEUED, (s.ROUTER_DECODE_SENT, s.DECODE_HTTP_RECEIVED)),
            )
        },
        "sender_seen": "coalesce((sender, pe) IN (SELECT (process, eno) FROM awake), false)",
        "m_arrival": f"least(greatest(coalesce(registered, {sm}), {sm}), transfer_matched)",
        "m_at": f"CASE WHEN {on_m} THEN greatest({sm}, router_decode_sent, decode_http_received, decode_enqueued) END",
    }
    later = {
        "wr_next": "coalesce(ps_a1_sched < prefill_staged AND least(ps_a1_over, prefill_staged) > wr_run, false)",
        "m_stop": "CASE WHEN decode_allocated < m_arrival THEN decode_allocated "
        "WHEN decode_allocated IS NOT NULL THEN m_arrival END",
        "m_u": _until("m_at", "least(decode_allocated, m_arrival)", _A_NEAR),
    }
    return [
        ("h", f"SELECT *, {_listed(columns)} FROM w"),
        (
            "v",
            f"SELECT *, CASE WHEN why IS NOT NULL THEN why {_odd()} END AS reason\n"
            f"  FROM (SELECT *, {_listed(later)} FROM h)",
        ),
    ]


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{sql} AS {name}" for name, sql in columns.items())


def _odd() -> str:
    """Return what of a path cannot be told in columns, as branches of a CASE."""
    from_ready = waits(stages.DECODE_BEGUN, stages.READY)
    waited = waits(stages.MATCHED, stages.SENDER_PICKED, stages.PREFILL_STAGED, stages.PREFILL_FINISHED)
    return f"""WHEN apart THEN '{APART}' WHEN n0 IS NULL THEN NULL
      WHEN noticed_often THEN 'many of one point'
      WHEN d_sent IS NOT NULL AND message_unsure < coalesce(least, {NEVER_NS}) AND {waited}
        AND (least IS NULL OR registered > s_transfer_matched) THEN 'the quickest message of its pair is not sure'
      WHEN {waited} AND d_met_since < m_arrival AND d_met_until > s_transfer_matched
        THEN 'a handshake that a registration waited for'
      WHEN (wp_u < prefill_begun AND NOT wp_long AND p_look < prefill_begun)
        OR (wd_u < decode_begun AND NOT wd_long AND NOT {from_ready} AND d_look < decode_begun)
        OR (wa_u < decode_allocated AND NOT wa_long AND d_look < decode_allocated) THEN 'blocks'
      WHEN wr_next AND NOT wr_long AND ps_a1_over < ps_a1_sched THEN '{BACKWARDS}'
      WHEN m_at < m_stop AND (decode_enqueued IS NULL OR m_at < decode_enqueued OR da_next < m_stop
          OR (m_u < m_stop AND d_look < m_stop))
        THEN 'blocks that a registration waited for'"""


def parts(edges: Sequence[stages.Edge]) -> list[Part]:
    """Return every stretch that a path can consist of, but for waits with many steps in them."""
    s = stages
    found: list[Part] = []
    for node in nodes(edges):
        name = column(node.name)
        since, chosen = f"s_{name}", f"q_{name}"
        found.append(Part(s.UNKNOWN, f"{chosen} >= 64", since, name, strayed=True))
        for edge in node.incoming:
            when = f"{chosen} = {NUMBER[edge.before.name]}"
            if edge.split in ("", "copy"):  # requests with copies are declined, so nothing divides the report of others
                found += _by_processor(Part(edge.cause, when, since, name), _lacked(edge.cause, since, name))
            elif edge.split == "join":
                held = f"router_prefill_returned BETWEEN {since} + {JOIN_NS} AND {name}"
                found.append(Part(s.PREFILL_REPLY, f"{when} AND {held}", since, "router_prefill_returned"))
                found.append(Part(edge.cause, f"{when} AND {held}", "router_prefill_returned", name))
                found.append(Part(edge.cause, f"{when} AND ({held}) IS NOT TRUE", since, name))
            else:
                found += _of_split(edge, when, since, name)
    return found


def _of_split(edge: stages.Edge, when: str, since: str, name: str) -> list[Part]:
    s = stages
    if edge.split == "handshake":
        return [Part(edge.cause, f"{when} AND NOT shaking", since, name)]
    side, _, kind = edge.split.partition(".")
    if kind == "wait":
        wait = "wp" if side == "prefill" else "wa" if edge.after is s.DECODE_ALLOCATED else "wd"
        when = f"{when} AND NOT {wait}_long"
        return [Part(edge.cause, when, since, f"{wait}_u"), Part(s.UNKNOWN, when, f"{wait}_u", name)]
    if kind == "intake":
        return [Part(edge.cause, when, since, f"wq_{side}_at")]
    if kind == "steps":
        return _steps(side, when, since, name)
    if kind == "tail":
        own = "ps" if side == "prefill" else "ds"
        over = f"least(greatest({own}_connected, {since}), {name})"
        began = f"greatest({since}, {over} - greatest(0, {own}_connector - {own}_ahead))"
        lacked = f"{own}_lacked_r - greatest(0, {own}_over - {name})"
        return [
            Part(edge.cause, when, since, began),
            *_by_processor(Part(s.STEP_CONNECTOR, when, began, over), f"{own}_lacked_c"),
            *_by_processor(Part(edge.cause, when, over, name), lacked),
        ]
    if kind == "ride":
        return _ride(edge.cause, when, since, name)
    if edge.split == "sender":
        return _of_sender(edge.cause, when, since, name)
    late = Part(s.REGISTRATION_LATE, when, since, "m_arrival")
    if edge.split == "late":
        return [late, Part(s.UNKNOWN, when, "m_arrival", name)]
    return [late, *_of_sender(edge.cause, when, "m_arrival", name)]


def _of_sender(cause: stages.Cause, when: str, since: str, name: str) -> list[Part]:
    """Return a wait for a sender thread, which `long` divides; of one that was never seen to wake nothing is known."""
    return [
        Part(cause, f"{when} AND sender_seen", since, name),
        Part(stages.UNKNOWN, f"{when} AND NOT sender_seen", since, name),
    ]


def _lacked(cause: stages.Cause, since: str, name: str) -> str:
    """Return for how long at least the thread that posts, or looks for the KV, had no processor, "" for none."""
    if cause is stages.POST:
        return f"lacked_x - greatest(0, coalesce(ended_ns, 0) - {name})"
    if cause is stages.DETECTION:
        fitting = f"noticed_b - greatest(0, noticed_c - ({name} - {since}))"
        return f"CASE WHEN noticed_t = {name} THEN {fitting} ELSE 0 END"
    return ""


def _by_processor(part: Part, lacked: str) -> list[Part]:
    """Return what a thread does, and behind it for how long it had no processor; all of it where that is not asked."""
    if not lacked:
        return [part]
    begin = f"greatest({part.start}, {part.end} - greatest(0, {lacked}))"
    return [part._replace(end=begin), Part(stages.PROCESSOR_WAIT, part.when, begin, part.end)]


def _steps(side: str, when: str, since: str, name: str) -> list[Part]:
    s = stages
    own = "ps" if side == "prefill" else "ds"
    when = f"{when} AND NOT {side[0]}_chunked"
    began = f"least(greatest({since}, coalesce(nullif({own}_started, 0), {own}_sched)), {name})"
    runs = f"least({began} + greatest(0, {own}_ahead), {name})"
    connector = Part(s.STEP_CONNECTOR, when, began, runs)
    if side == "prefill":
        forward = _by_processor(Part(s.PREFILL_FORWARD, when, runs, name), f"{own}_lacked_f")
        return [Part(s.PREFILL_LAUNCH, when, since, began), connector, *forward]
    prompt = "has_prompt"
    return [
        Part(s.DECODE_LAUNCH, when, since, began),
        connector,
        *_by_processor(Part(s.DECODE_PREFILL, f"{when} AND {prompt}", runs, name), f"{own}_lacked_f"),
        *_by_processor(Part(s.FIRST_STEP, f"{when} AND NOT {prompt}", runs, name), f"{own}_lacked_f"),
    ]


def _ride(cause: stages.Cause, when: str, since: str, name: str) -> list[Part]:
    """Return the ride behind a step: the step that ran, the scheduler's turn, at most one more step, its turn."""
    begun = "greatest(wr_run, ps_a1_sched)"
    turned = f"least({begun}, wr_u)"
    over = f"least(ps_a1_over, {name})"
    again = f"least({name}, {over} + ps_a1_turn)"
    short = f"{when} AND p_has_steps AND NOT wr_long"
    one, two = f"{short} AND NOT wr_next", f"{short} AND wr_next"
    return [
        Part(cause, f"{when} AND NOT p_has_steps", since, name),
        Part(cause, one, since, "wr_u"),
        Part(stages.UNKNOWN, one, "wr_u", name),
        Part(cause, two, since, turned),
        Part(stages.UNKNOWN, two, turned, begun),
        Part(cause, two, begun, again),
        Part(stages.UNKNOWN, two, again, name),
    ]

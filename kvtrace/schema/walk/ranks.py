"""Requests of several ranks or transfers in SQL: which transfer was waited for, and the points of its rank.

A leg's row has the first and the last time of a point, which settles it where one rank stamped it once or twice. Of the
others (`several`) all these events are read again, a row each, and what they come to replaces the columns of the row.
The reference is `assemble._transfers` and `graph.build`. Where there is no such request, nothing is read.
"""
# ruff: noqa: S608 -- every part is a constant of this package

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.walk.aggregates import among, count, least, most
from kvtrace.schema.walk.gather import TRANSFER
from kvtrace.schema.walk.pairs import KNOWN
from kvtrace.schema.walk.plan import column
from kvtrace.schema.walk.points import size_class

_OF_SENDER = (stages.PREFILL_STAGED, stages.SENDER_PICKED, stages.MATCHED, stages.REGISTRATION_RECEIVED)
_STARVED = (stages.POST_STARVED, stages.NOTICE_STARVED)
_READ_AGAIN = (
    *TRANSFER, *_OF_SENDER, *_STARVED, stages.NOTIFIED, stages.REPORTED, stages.LOAD_STARTED, stages.REGISTRATION_SENT,
)  # fmt: skip
_WHOLE = """{'t': t_ns, 'ref': "ref", 'b': b, 'c': c, 'd': d}"""
"""What orders the events of one stage, process and number as the reference does."""
_WHO = "{'t': t_ns, 'p': process}"


def said() -> list[tuple[str, str]]:
    """Return the CTEs up to `said`: the events of those requests, of P's leg (kind 0), D's (1), and of D's id on P (2).

    The empty side of the join is the one that is built first, so that no event is hashed for nothing.
    """
    return [
        (
            "ranked",
            f"""SELECT base, mode, p_id, d_id, read_id, pe, de, decode_ready,
    CASE WHEN decode_enqueued IS NOT NULL THEN d_id END AS asked_id, coalesce(np.ranks, 1) AS wrote,
    coalesce(nd.ranks, 1) AS width
  FROM judged LEFT JOIN naming AS np ON np.eno = pe LEFT JOIN naming AS nd ON nd.eno = de WHERE several AND {KNOWN}""",
        ),
        ("named", "SELECT base, unnest([p_id, d_id, read_id]) AS id, unnest([0, 1, 2]) AS kind FROM ranked"),
        (
            "said",
            f"""SELECT i.base, i.kind, e.process, stage, t_ns, a, b, c, d, "ref" FROM (SELECT * FROM event
      WHERE request <> '' AND {among(*_READ_AGAIN)}
        AND hash(request) IN (SELECT id FROM named WHERE id IS NOT NULL)) AS e
    JOIN home AS h USING (process) JOIN named AS i ON i.id = hash(e.request)
      AND i.kind = CASE WHEN {among(stages.REGISTRATION_RECEIVED)} THEN 2 WHEN has_p THEN 0 ELSE 1 END""",
        ),
    ]


def seen() -> list[tuple[str, str]]:
    """Return the CTEs up to `signed`: all transfers of those requests, who was told of each, and when it was complete.

    Where each rank of P writes to its like on D, each write has its own notification; else the last of as many as there
    are writes stands for all.
    """
    s = stages
    return [
        *said(),
        (
            "moves",
            f"""SELECT r.base, mode, pe, de, width, wrote, m.process, number, prepared.t AS prepared, started,
    posted.t AS ended, {size_class("posted.b")} AS size, posted.d = 1 AS at_post, coalesce(prepared.c, 0) AS rank,
    done, probed, failed, greatest(started, coalesce(pending + coalesce(q.offset_ns, 0), 0)) AS low
  FROM (SELECT base, process, a AS number, {most(_WHOLE, s.PREPARED)} AS prepared,
      {most("t_ns", s.POST_STARTED)} AS started, {most(_WHOLE, s.POST_ENDED)} AS posted,
      {most("t_ns", s.TRANSFER_DONE)} AS done, {most("t_ns", s.PROBED)} AS probed,
      {count(s.TRANSFER_FAILED)} > 0 AS failed, {most("b", s.TRANSFER_DONE, s.PROBED, but="b <> 0")} AS pending
    FROM said WHERE {among(*TRANSFER)} GROUP BY base, process, number) AS m
    JOIN ranked AS r USING (base) LEFT JOIN proc AS q ON q.process = m.process
  WHERE mode <> 'push' OR asked_id IS NULL OR coalesce(prepared.ref, '') = '' OR hash(prepared.ref) = asked_id""",
        ),
        (
            "writes",
            """SELECT base, count(*) AS n, count(DISTINCT rank) AS drivers,
    bool_or(started IS NOT NULL AND NOT failed) AS posted,
    width > 1 AND count(DISTINCT rank) = count(*) AND min(rank) >= 0 AND max(rank) < width
      AND (wrote = width OR count(*) = width) AS alike
  FROM moves GROUP BY base, width, wrote""",
        ),
        (
            "notes",
            f"""SELECT base, a, process, t_ns,
    row_number() OVER (PARTITION BY base ORDER BY kind, t_ns, process) AS place,
    row_number() OVER (PARTITION BY base, a ORDER BY kind, t_ns, process) AS own_place,
    count(*) OVER (PARTITION BY base) AS n
  FROM said WHERE {among(s.NOTIFIED)}""",
        ),
        (
            "signed",
            """SELECT *, least(done, probed, notified, CASE WHEN at_post THEN ended END) AS seen FROM (
    SELECT m.*, w.drivers, CASE WHEN mode = 'push' THEN CASE WHEN alike THEN mine.t_ns ELSE ours.t_ns END END
      AS notified, CASE WHEN mode = 'push' AND alike THEN coalesce(mine.process, 0) ELSE 0 END AS remote
    FROM moves AS m JOIN writes AS w USING (base)
      LEFT JOIN notes AS mine ON mine.base = m.base AND mine.a = m.rank AND mine.own_place = 1
      LEFT JOIN (SELECT notes.base, t_ns FROM notes JOIN writes AS w USING (base) WHERE place = least(w.n, notes.n))
        AS ours ON ours.base = m.base)""",
        ),
    ]


_MOVED = (
    stages.PREPARED, stages.POST_STARTED, stages.POST_ENDED, stages.TRANSFER_DONE, stages.TRANSFER_FAILED
)  # fmt: skip


def waited() -> list[tuple[str, str]]:
    """Return the CTEs up to `waited`: the last report, the transfer that it waited for, and the points of its rank."""
    s = stages
    whose = "CASE WHEN r.mode = 'push' THEN driver END"
    waiting = {
        **{stage: _own(stage, whose, "prepared") for stage in _OF_SENDER},
        s.LOAD_STARTED: _own(s.LOAD_STARTED, "CASE WHEN r.mode <> 'push' THEN driver END", "prepared"),
        s.REGISTRATION_SENT: _own(s.REGISTRATION_SENT, "nullif(remote, 0)", "NULL"),
    }
    points = ", ".join(f"{sql} AS {column(one.name)}" for one, sql in waiting.items())
    bare = ", ".join(f"{least('t_ns', stage)} AS bare_{column(stage.name)}" for stage in _MOVED)
    told = _own(s.NOTIFIED, "reported.p", "reported.t", _WHO)
    return [
        (
            "reports",
            f"""SELECT base, count(DISTINCT a) AS heard, coalesce(max(CASE WHEN t_ns <= decode_ready THEN {_WHO} END),
      max({_WHO})) AS reported FROM said JOIN ranked USING (base) WHERE {among(s.REPORTED)} GROUP BY base""",
        ),
        (
            "taken",
            """SELECT s.* FROM signed AS s LEFT JOIN reports USING (base)
  WHERE started IS NOT NULL AND NOT failed
    AND (reported IS NULL OR CASE WHEN mode = 'push' THEN remote IN (0, reported.p) ELSE process = reported.p END)
  QUALIFY row_number() OVER (PARTITION BY s.base
    ORDER BY coalesce(seen, 0) DESC, coalesce(ended, 0) DESC, started, process, number) = 1""",
        ),
        (
            "waited",
            f"""SELECT s.base, {points}, {bare}, {told} AS told, {most(_WHO, s.SENDER_PICKED)} AS picked,
    {most("b", s.POST_STARVED, but="process = driver AND a = number")} AS lacked
  FROM said AS s JOIN ranked AS r USING (base) LEFT JOIN reports USING (base)
    LEFT JOIN (SELECT base, process AS driver, number, prepared, remote FROM taken) USING (base)
  GROUP BY s.base""",
        ),
    ]


def _placed() -> str:
    """Return the points of a transfer as columns: those of the one that was waited for, else the first that were seen.

    What others moved is not what the last one waited for; in push D waits for the notification, not for P's poll.
    """
    chosen = {
        stages.PREPARED: "prepared", stages.POST_STARTED: "started", stages.POST_ENDED: "ended",
        stages.TRANSFER_DONE: "CASE WHEN mode <> 'push' OR told.t IS NULL THEN done END",
    }  # fmt: skip
    return ", ".join(
        f"CASE WHEN has_x THEN {chosen.get(stage, f'bare_{column(stage.name)}')} "
        f"WHEN NOT posted THEN bare_{column(stage.name)} END AS {column(stage.name)}"
        for stage in _MOVED
    )


def settled() -> list[tuple[str, str]]:
    """Return the CTEs up to `settled`: `judged` with the points of the rank that was waited for."""
    s = stages
    columns = {
        "has_x": "c.has_x", "seen_ns": "seen", "x_size": "size", "started_ns": "started", "ended_ns": "ended",
        "wire_low": "low", "sender": "coalesce(c.process, picked.p)", "decode_reported": "reported.t",
        "read_ns": f"c.{column(s.REGISTRATION_RECEIVED.name)}",
        "transfer_notified": "CASE WHEN c.mode = 'push' OR NOT (c.has_x OR (c.mode = 'pull' AND posted)) "
        "THEN told.t END",
        **{name: f"c.{name}" for one in (*_OF_SENDER[:3], s.LOAD_STARTED, *_MOVED) for name in (column(one.name),)},
    }  # fmt: skip
    return [
        *waited(),
        (
            "chosen",
            f"""SELECT *, {_placed()}
  FROM (SELECT r.base, r.mode, x.base IS NOT NULL AS has_x, x.* EXCLUDE (base, mode, pe, de, drivers),
      reported, coalesce(w.posted, false) AS posted, s.* EXCLUDE (base),
      CASE WHEN heard > 1 OR x.drivers > 1 THEN NULL WHEN r.mode = 'push' AND told IS NOT NULL THEN told
        ELSE {{'t': x.done, 'p': x.process}} END AS notice
    FROM ranked AS r LEFT JOIN taken AS x USING (base) LEFT JOIN reports USING (base) LEFT JOIN writes AS w USING (base)
      LEFT JOIN waited AS s USING (base))""",
        ),
        (
            "settled",
            f"""SELECT *, d_sent AS sent_ns, 0 AS one_lacked, 0 AS notices, NULL::BIGINT AS notice_t,
    NULL::BIGINT AS notice_b, NULL::BIGINT AS notice_c FROM judged WHERE NOT several OR NOT {KNOWN}
  UNION ALL SELECT j.* REPLACE ({", ".join(f"{sql} AS {name}" for name, sql in columns.items())}),
    c.{column(s.REGISTRATION_SENT.name)}, coalesce(lacked, 0), coalesce(n.n, 0), n.t_ns, n.b, n.c
  FROM (SELECT * FROM judged WHERE several) AS j JOIN chosen AS c USING (base)
    LEFT JOIN (SELECT base, process, t_ns, count(DISTINCT {{'b': b, 'c': c}}) AS n, max(b) AS b, max(c) AS c FROM said
      WHERE {among(s.NOTICE_STARVED)} GROUP BY base, process, t_ns) AS n
      ON n.base = c.base AND n.process = notice.p AND n.t_ns = notice.t""",
        ),
    ]


def _own(stage: stages.Stage, whose: str, limit: str, what: str = "t_ns") -> str:
    """Return SQL for the last event of a stage: of that process and not after the limit, else of it, else of any."""
    own, fitting = f"process = {whose}", f"t_ns <= {limit}"
    order = (f"{own} AND {fitting}", own, *((fitting,) if what is _WHO else ()))
    return f"coalesce({', '.join(most(what, stage, but=but) for but in order)}, {most(what, stage)})"

"""Tables that the recorder keeps beside the events, so that no query has to pivot or rank all of them: as values.

What stands in them follows from the other tables; `kvtrace.keeping` brings them up to date after every analysis.
"""

from __future__ import annotations

from kvtrace.schema.shape import Table, columns

WINDOWS_NS: tuple[int, int] = (30_000_000_000, 1_800_000_000_000)
"""The lengths of the windows of table `tally`: fine and coarse. The first divides the second."""
PER_OCTAVE = 32
"""So many buckets of `tally` lie between a time and its double."""

PLACE = Table(
    "place",
    "Which engine core every process works for, as tables step, transfer and leg have it.",
    columns(
        ("process", "INTEGER", "Number of the process."),
        ("core", "INTEGER", "The engine core it works for."),
        ("engine", "VARCHAR", "Engine id, '' if it is none."),
    ),
)

TRANSFER = Table(
    "transfer",
    "One row per transfer, as the side that drives it saw it. Times in unix ns, NULL where unseen.",
    columns(
        ("process", "INTEGER", "Process that drives it."),
        ("transfer", "BIGINT", "Its number in that process."),
        ("engine", "VARCHAR", "Engine id of the side that drives it."),
        ("request", "VARCHAR", "The request's id on that side."),
        ("remote_request", "VARCHAR", "The request's id on the other side."),
        ("rank", "BIGINT", "Rank that drives it."),
        ("moved_bytes", "BIGINT", "Bytes."),
        ("descriptors", "BIGINT", "Descriptors."),
        ("ts", "TIMESTAMP WITH TIME ZONE", "When its post began."),
        ("prepared_ns", "BIGINT", "Its descriptors were made."),
        ("post_started_ns", "BIGINT", "The call that posts it began."),
        ("post_ended_ns", "BIGINT", "That call returned."),
        ("done_at_post", "BOOLEAN", "The post came back done."),
        ("last_pending_ns", "BIGINT", "The last poll that said in progress."),
        ("done_ns", "BIGINT", "The first poll that said done."),
        ("polls", "BIGINT", "Polls made."),
        ("probe_pending_ns", "BIGINT", "The probe thread's last poll that said in progress."),
        ("probed_ns", "BIGINT", "The probe thread saw it done."),
        ("notified_ns", "BIGINT", "The other side read its completion notification."),
        ("failed_ns", "BIGINT", "It failed."),
        ("reason", "VARCHAR", "What NIXL said of the failure."),
        ("peer", "VARCHAR", "Engine id of the other side, '' if it was not seen."),
        ("seen_ns", "BIGINT", "The first sign of its completion that the side which drives it had."),
        (
            "siblings",
            "BIGINT",
            "Transfers that this engine posted for the request, itself included; NULL if not posted.",
        ),
        ("is_last", "BOOLEAN", "No sibling of it was seen complete later; NULL if it was not."),
    ),
)

STEP = Table(
    "step",
    "One row per engine step; a step ends with its slowest worker. Unix ns, NULL where unseen.",
    columns(
        ("process", "INTEGER", "The engine core."),
        ("step", "BIGINT", "Number of the step in it."),
        ("engine", "VARCHAR", "Engine id."),
        ("ts", "TIMESTAMP WITH TIME ZONE", "When it was made up, else begun."),
        ("scheduled_ns", "BIGINT", "The scheduler has made it up."),
        ("started_ns", "BIGINT", "The first worker begins."),
        ("forwarded_ns", "BIGINT", "The last worker's forward has ended."),
        ("connected_ns", "BIGINT", "The last worker's connector work is over."),
        ("ended_ns", "BIGINT", "The scheduler has taken in its result."),
        ("tokens", "BIGINT", "Tokens in it."),
        ("requests", "BIGINT", "Requests in it."),
        ("waiting", "BIGINT", "Requests known to wait for KV."),
        ("ranks", "BIGINT", "Workers that stamped it."),
        ("connector_ns", "BIGINT", "Time the connector took on the forward thread, on the slowest rank."),
        ("before_forward_ns", "BIGINT", "The part of it before the forward, on that rank."),
        ("gap_ns", "BIGINT", "From the making up of the step before it; NULL if that is ten minutes ago or unseen."),
        ("starved_ns", "BIGINT", "How long the scheduler's thread could have run before it and had no processor."),
        ("forward_starved_ns", "BIGINT", "A worker's time without a processor in its forward, the most of any rank."),
        ("connector_starved_ns", "BIGINT", "A worker's time without a processor in the connector's work, at least."),
        (
            "result_starved_ns",
            "BIGINT",
            "A worker's time without a processor between connector's work and result, once told to sample.",
        ),
    ),
)

LEG = Table(
    "leg",
    "One row per engine and request id in it: how long it waited there. Times in unix ns, NULL where unseen.",
    columns(
        ("engine", "VARCHAR", "Engine id."),
        ("request", "VARCHAR", "The request's id in that engine."),
        ("first_ns", "BIGINT", "The first of the times that follow."),
        ("prefill_from_ns", "BIGINT", "P put it in its queue."),
        ("prefill_to_ns", "BIGINT", "A step of P works on it, or it was over there."),
        ("decode_from_ns", "BIGINT", "D put it in its queue."),
        ("decode_to_ns", "BIGINT", "A step of D works on it, or it was over there."),
        ("kv_from_ns", "BIGINT", "D reserved blocks for KV that was to come."),
        ("kv_to_ns", "BIGINT", "The KV was there, or the request was over."),
    ),
)

NOTABLE = Table(
    "notable",
    "Events that are asked for by their kind, copied from table event: leases, handshakes, failures, threads.",
    columns(
        ("process", "INTEGER", "Process that emitted it."),
        ("stage", "stage", "Which point."),
        ("t_ns", "BIGINT", "When, unix ns."),
        ("request", "VARCHAR", "The request's id in that process; '' where none belongs."),
        ("ref", "VARCHAR", "As in table event."),
        ("a", "BIGINT", "As in table event."),
        ("b", "BIGINT", "As in table event."),
    ),
)

OCCURRENCE = Table(
    "occurrence",
    "How many events of each stage every process emitted, in windows of time.",
    columns(
        ("from_ns", "BIGINT", "Where the window begins, unix ns; it is as long as the fine ones of table tally."),
        ("process", "INTEGER", "Process that emitted them."),
        ("stage", "stage", "Which point."),
        ("events", "BIGINT", "How many."),
    ),
)

TALLY = Table(
    "tally",
    "Time by cause, in windows of time and in buckets by its length: what ranks causes without a look at every request."
    " The newest requests, whose window is not over, are not in it yet.",
    columns(
        (
            "what",
            "VARCHAR",
            "path: on the way to the first token; share: the same by class; hidden, slack: beside it; pace: after.",
        ),
        ("window_ns", "BIGINT", "Length of the window: fine or coarse. The coarse ones hold what the fine ones hold."),
        ("from_ns", "BIGINT", "Where the window begins, unix ns; the requests in it began in it."),
        ("mode", "VARCHAR", "push, pull, local or unknown."),
        ("scope", "VARCHAR", "Where the first token was seen. Scopes do not compare."),
        ("prefill_engine", "VARCHAR", "Engine id of P."),
        ("decode_engine", "VARCHAR", "Engine id of D."),
        ("cause", "VARCHAR", "The cause."),
        ("class", "VARCHAR", "The class that it counts for."),
        ("bucket", "INTEGER", "Which bucket: 32 to an octave, by the logarithm of the time; 0 where none is needed."),
        ("times", "BIGINT", "Times in it; on the path and after it one per request."),
        ("requests", "BIGINT", "Requests that they are of, each counted at its first time of that cause."),
        ("total_ns", "BIGINT", "Sum of the times."),
        ("least_ns", "BIGINT", "The shortest of them."),
        ("most_ns", "BIGINT", "The longest of them."),
    ),
)

KEPT: tuple[Table, ...] = (PLACE, TRANSFER, STEP, LEG, NOTABLE, OCCURRENCE, TALLY)
"""The tables of this module, as they are created."""

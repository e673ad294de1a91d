"""The store's tables, as values. The payload columns' comments derive from the vocabulary."""

from __future__ import annotations

from kvtrace import stages
from kvtrace.schema.kept import KEPT
from kvtrace.schema.shape import Table, columns


def _payload(slot: str) -> str:
    """Return the comment of one payload column: what every stage keeps in that slot."""
    uses = [
        f"{field.name}{f' [{field.unit}]' if field.unit else ''}: {stage.name}"
        for stage in stages.STAGES
        for field in stage.fields
        if field.slot == slot
    ]
    return f"Payload of the stage, by name: {'; '.join(uses)}."


RUN = Table(
    "run",
    "Facts of the run: what was run, with which versions, and how the recording went.",
    columns(
        ("name", "VARCHAR", "Name of the fact."),
        ("value", "VARCHAR", "Value; several processes' different values are joined by a comma."),
    ),
)

PROCESS = Table(
    "process",
    "Every process that emitted, one row per incarnation.",
    columns(
        ("process", "INTEGER", "Number of the process within this store."),
        ("series", "VARCHAR", "Name of its spool series."),
        ("host", "VARCHAR", "Id of its host."),
        ("domain", "VARCHAR", "Clock domain: processes of one domain share one monotonic clock."),
        ("pid", "BIGINT", "Process id on its host."),
        ("parent_pid", "BIGINT", "Process id of its parent."),
        ("started_ns", "BIGINT", "When the process started, unix ns."),
        ("offset_ns", "BIGINT", "What was added to its monotonic clock to make unix ns; one value per domain."),
        ("first_ns", "BIGINT", "Its first event, unix ns; NULL without events."),
        ("last_ns", "BIGINT", "Its last event, unix ns; NULL without events."),
        ("lost_records", "BIGINT", "Records that it could not keep: dropped, or never completed."),
        (
            "facts",
            "MAP(VARCHAR, VARCHAR)",
            "What it said of itself: kind, engine_id, role, connector, rank; imported: by format.",
        ),
    ),
)

EVENT = Table(
    "event",
    "Every recorded point, as emitted.",
    columns(
        ("process", "INTEGER", "Process that emitted it."),
        ("stage", "stage", "Which point; the view `vocabulary` says what it means."),
        ("t_ns", "BIGINT", "When, unix ns."),
        ("request", "VARCHAR", "The request's id in that process; '' where none belongs."),
        ("ref", "VARCHAR", f"{_payload('ref')[:-1]}; '' where there is none."),
        ("a", "BIGINT", _payload("a")),
        ("b", "BIGINT", _payload("b")),
        ("c", "BIGINT", _payload("c")),
        ("d", "BIGINT", _payload("d")),
    ),
)

LOSS = Table(
    "loss",
    "Records that a process could not keep, by stage: dropped since it began, or slots that it never completed.",
    columns(
        ("process", "INTEGER", "Process that lost them."),
        ("stage", "VARCHAR", "Stage of what was dropped; '' for slots never completed, whose stage nobody knows."),
        ("lost_records", "BIGINT", "How many."),
    ),
)

SPOOL_FILE = Table(
    "spool_file",
    "How far each spool file has been read; committed together with its events, so that none comes twice.",
    columns(
        ("series", "VARCHAR", "Series that the file belongs to."),
        ("number", "BIGINT", "Number of the file in its series."),
        ("process", "INTEGER", "Process that wrote it."),
        ("path", "VARCHAR", "Where it was read."),
        ("consumed", "BIGINT", "Records passed so far."),
        ("holes", "BIGINT[]", "Records passed over because they were not complete yet."),
        ("unfilled", "BIGINT", "Slots in it that were taken and never completed."),
        ("finished", "BOOLEAN", "Nothing more will come from it."),
    ),
)

RECORDER = Table(
    "recorder",
    "What the recorder had to say: files it skipped, restarts, failures.",
    columns(
        ("at_ns", "BIGINT", "When, unix ns."),
        ("subject", "VARCHAR", "The file or part it is about."),
        ("message", "VARCHAR", "One sentence."),
    ),
)

REQUEST = Table(
    "request",
    "One row per request and attempt: how long to its first token, and where that time went.",
    columns(
        ("request_key", "BIGINT", "Key of the request within this store."),
        ("request_id", "VARCHAR", "The id that the router minted, else the engines' own without its suffix."),
        ("client_request_id", "VARCHAR", "The id that the client sent; may repeat."),
        ("attempt", "INTEGER", "0 for the first attempt of a client's request."),
        ("mode", "VARCHAR", "push, pull, local or unknown."),
        ("verdict", "VARCHAR", "complete, incomplete, aborted, expired, failed, recomputed, corrupt or no handoff."),
        ("scope", "VARCHAR", "Where the first token was seen: client, router or engine. Scopes do not compare."),
        ("join_method", "VARCHAR", "How the two sides were found to be one request."),
        ("prefill_engine", "VARCHAR", "Engine id of P."),
        ("decode_engine", "VARCHAR", "Engine id of D."),
        ("prompt_tokens", "BIGINT", "Length of the prompt; NULL if nobody said it."),
        ("cached_tokens", "BIGINT", "Prompt tokens that D had in its prefix cache; NULL if it was not seen to look."),
        ("remote_tokens", "BIGINT", "Prompt tokens that were to come from P; NULL if D did not say how many."),
        ("output_tokens", "BIGINT", "Tokens produced; NULL if nobody said how many."),
        ("start_ns", "BIGINT", "First moment seen, unix ns."),
        ("first_token_ns", "BIGINT", "First content leaving for the client, unix ns; NULL if none."),
        ("end_ns", "BIGINT", "Last moment seen, unix ns."),
        ("ttft_ns", "BIGINT", "Time to first token; NULL if there was none, as are the shares."),
        ("compute_ns", "BIGINT", "Share: computing, or waiting for computing requests."),
        ("compute_run_ns", "BIGINT", "The part of compute in a step that worked on the request."),
        ("compute_queue_ns", "BIGINT", "The part of compute spent waiting for what computing requests held."),
        ("coordination_ns", "BIGINT", "Share: waiting for a message, a hop, a thread, a step boundary, a poll."),
        ("transfer_ns", "BIGINT", "Share: the KV's bytes being posted, copied, or on the wire."),
        ("transfer_low_ns", "BIGINT", "The least that transfer can have been."),
        ("transfer_high_ns", "BIGINT", "The most that transfer can have been."),
        ("unattributed_ns", "BIGINT", "Share: time that no event explains."),
        ("registration_late_ns", "BIGINT", "How long after P had computed D's registration came; negative: before."),
        ("moved_bytes", "BIGINT", "Bytes moved by its transfers."),
        ("descriptors", "BIGINT", "Descriptors of its transfers."),
        ("transfers", "INTEGER", "Transfers it took."),
        ("reserved_blocks", "BIGINT", "Blocks reserved on D for KV that was to come."),
        ("reserved_ns", "BIGINT", "How long they were reserved before the KV was there; NULL if unknown."),
        ("held_blocks", "BIGINT", "Blocks that P kept for the hand-off."),
        ("held_ns", "BIGINT", "How long P kept them after it had finished; NULL if it was not seen to let go."),
        ("held_after_end_ns", "BIGINT", "The part of that after the request was aborted or failed, else NULL."),
        ("idle_ns", "BIGINT", "How long the engine it came to first had made no step by then; NULL if unknown."),
        ("lost_ns", "BIGINT", "What lost attempts at it took before this one began; NULL if there were none."),
        (
            "straggler_rank",
            "INTEGER",
            "The rank of D that kept the others waiting longest: the last to report its KV, or one that held up the "
            "steps of the last; NULL if fewer than two reported.",
        ),
        (
            "straggler_ns",
            "BIGINT",
            "For how long: the last one since the last but one, without what others held up meanwhile; another one "
            "while it alone was still in a step and the KV had arrived.",
        ),
        (
            "checked_blocks",
            "BIGINT",
            "Blocks whose checksums on P and D were compared; NULL if it was not chosen for it.",
        ),
        ("corrupt_blocks", "BIGINT", "Those of them that differ."),
        ("unchecked_blocks", "BIGINT", "Blocks handed over that could not be compared; the note says why."),
        ("crosses_hosts", "BOOLEAN", "Some segment rests on two hosts' wall clocks."),
        ("note", "VARCHAR", "What else is to be said."),
        ("post_ns", "BIGINT", "Posting, as far as it lies on the path; NULL if none does."),
        ("wire_ns", "BIGINT", "Bytes on the wire, as far as it lies on the path; NULL if none does."),
        ("detection_ns", "BIGINT", "KV that had arrived and was not noticed, on the path; NULL if none lies there."),
        ("tpot_ns", "BIGINT", "Mean time per token after the first; NULL if there was none."),
        ("decode_tokens", "BIGINT", "Tokens after the first, as table pace has them; NULL if their end was not seen."),
    ),
)

SEGMENT = Table(
    "segment",
    "The critical path: segments that tile the time from start to first token without gap or overlap.",
    columns(
        ("request_key", "BIGINT", "Request it belongs to."),
        ("position", "INTEGER", "Order along the path, from 0."),
        ("class", "VARCHAR", "compute.run, compute.queue, coordination, transfer or unattributed."),
        ("cause", "VARCHAR", "The finer name; the view `cause` says what it means."),
        ("where", "VARCHAR", "Where the time passed."),
        ("waited_for", "VARCHAR", "What the request waited for."),
        ("start_ns", "BIGINT", "Unix ns."),
        ("end_ns", "BIGINT", "Unix ns."),
        ("crosses_hosts", "BOOLEAN", "Its ends lie on two hosts, so it rests on their wall clocks."),
    ),
)

HIDDEN = Table(
    "hidden",
    "Work beside the critical path, which delayed nobody.",
    columns(
        ("request_key", "BIGINT", "Request it belongs to."),
        ("cause", "VARCHAR", "The finer name; the view `cause` says what it means."),
        ("class", "VARCHAR", "What it would have been charged to on the path."),
        ("where", "VARCHAR", "Where the time passed."),
        ("start_ns", "BIGINT", "Unix ns."),
        ("duration_ns", "BIGINT", "How long it took."),
        ("slack_ns", "BIGINT", "How much longer it could have taken unnoticed; NULL if unknown."),
    ),
)

PACE = Table(
    "pace",
    "How the tokens after the first came, one row per request whose first and last token were seen.",
    columns(
        ("request_key", "BIGINT", "Request it belongs to."),
        ("start_ns", "BIGINT", "D's scheduler took in the first token, unix ns."),
        ("end_ns", "BIGINT", "D's scheduler took in the last token, unix ns."),
        ("tokens", "BIGINT", "Tokens after the first."),
        ("steps", "BIGINT", "Steps that made them."),
        ("tpot_ns", "BIGINT", "Mean time per token after the first; NULL if there was none."),
        ("itl_p50_ns", "BIGINT", "Median time between two steps that made tokens of it; NULL if there were none."),
        ("itl_max_ns", "BIGINT", "The longest of those; NULL if there were none."),
        ("extension_ns", "BIGINT", "By how much connector work on the forward thread made its steps longer."),
        ("occupancy_ns", "BIGINT", "How long the connector took on the forward thread in its steps."),
    ),
)

PACE_PART = Table(
    "pace_part",
    "What passed the time between the first and the last token: the parts sum to end_ns - start_ns of its pace.",
    columns(
        ("request_key", "BIGINT", "Request it belongs to."),
        ("cause", "VARCHAR", "The finer name; the view `cause` says what it means."),
        ("class", "VARCHAR", "Class it counts for."),
        ("duration_ns", "BIGINT", "How long, over all its steps."),
    ),
)

BLAME = Table(
    "blame",
    "Whose transfers were posted, or KV copied, while a request's steps waited for the connector, request by request.",
    columns(
        ("request_key", "BIGINT", "Request whose steps became longer."),
        ("blamed_request_id", "VARCHAR", "Request whose transfer was posted, or KV copied, then; may be the same."),
        ("extension_ns", "BIGINT", "By how much that made its steps longer."),
    ),
)

FINDING = Table(
    "finding",
    "What the run says in plain words, as `kvtrace explain` prints it; of very many requests, and of a recording that "
    "goes on, what the newest said.",
    columns(
        ("rank", "INTEGER", "1 for the most time at stake."),
        ("name", "VARCHAR", "Which finding: a cause, a verdict, or a name of its own."),
        ("sentence", "VARCHAR", "What is the case, with numbers."),
        ("grade", "VARCHAR", "How sure it is: measured, explained or supposed."),
        ("class", "VARCHAR", "The class that it counts for; '' where none can be told."),
        ("remedy", "VARCHAR", "What usually helps: supposed, not measured; '' where none can be told."),
        ("stake_ns", "BIGINT", "Request time that it is about, summed."),
        ("query", "VARCHAR", "The named query that shows it."),
        ("examples", "VARCHAR[]", "Ids of the requests that show it most, at most three."),
        ("mode", "VARCHAR", "The mode of the requests that it is about; '' for all of the run."),
        ("scope", "VARCHAR", "Their scope; '' for all of the run."),
        ("from_ns", "BIGINT", "The first moment of the requests that were looked at, unix ns."),
        ("as_of_ns", "BIGINT", "The last moment of them, unix ns."),
    ),
)

TABLES: tuple[Table, ...] = (
    RUN,
    PROCESS,
    EVENT,
    LOSS,
    SPOOL_FILE,
    RECORDER,
    REQUEST,
    SEGMENT,
    HIDDEN,
    PACE,
    PACE_PART,
    BLAME,
    *KEPT,
    FINDING,
)
TABLE_BY_NAME: dict[str, Table] = {table.name: table for table in TABLES}
ANSWERS: tuple[str, ...] = tuple(table.name for table in (SEGMENT, HIDDEN, PACE, PACE_PART, BLAME, REQUEST))
"""What the analysis writes, keyed by request; `request`, in which the keys are found, comes last."""
WORKED_OUT: tuple[str, ...] = (*ANSWERS, *(table.name for table in KEPT), FINDING.name)
"""Everything that follows from what was recorded."""

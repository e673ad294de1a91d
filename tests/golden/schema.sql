CREATE TYPE stage AS ENUM (
  'clock.anchor',
  'spool.dropped',
  'tracing.disabled',
  'router.received',
  'router.decided',
  'router.candidate',
  'router.prefill_sent',
  'router.prefill_returned',
  'router.decode_sent',
  'router.first_token',
  'router.done',
  'router.failed',
  'router.cancelled',
  'router.traced',
  'prefill.http_received',
  'prefill.http_responded',
  'prefill.http_done',
  'decode.http_received',
  'decode.first_token_out',
  'decode.http_done',
  'decode.http_disconnected',
  'prefill.http_disconnected',
  'prefill.enqueued',
  'prefill.considered',
  'prefill.allocated',
  'prefill.scheduled',
  'prefill.finished',
  'prefill.aborted',
  'prefill.preempted',
  'prefill.staged',
  'sender.picked',
  'prefill.lease_expired',
  'prefill.released',
  'prefill.lease_started',
  'prefill.lease_extended',
  'decode.enqueued',
  'decode.considered',
  'decode.allocated',
  'decode.registration_queued',
  'decode.registration_sent',
  'decode.load_started',
  'decode.reported',
  'decode.ready',
  'decode.scheduled',
  'decode.finished',
  'decode.aborted',
  'decode.preempted',
  'decode.load_failed',
  'handshake.started',
  'handshake.ended',
  'registration.received',
  'transfer.matched',
  'transfer.prepared',
  'transfer.post_started',
  'transfer.post_ended',
  'transfer.done',
  'transfer.failed',
  'transfer.notified',
  'transfer.post_starved',
  'transfer.notice_starved',
  'transfer.probed',
  'notification.orphaned',
  'step.scheduled',
  'step.started',
  'step.forwarded',
  'step.connected',
  'step.ended',
  'step.worker_starved',
  'step.result_starved',
  'sender.woke',
  'sender.slept',
  'client.sent',
  'client.first_token',
  'client.done',
  'client.failed',
  'transfer.begun',
  'prefill.handed_over',
  'prefill.checked',
  'decode.checked',
  'transfer.unchecked',
  'thread.placed',
  'prefill.copy_started',
  'prefill.copied',
  'decode.copy_started',
  'decode.copied'
);

CREATE TABLE run (
  "name" VARCHAR,
  "value" VARCHAR
);
COMMENT ON TABLE run IS 'Facts of the run: what was run, with which versions, and how the recording went.';
COMMENT ON COLUMN run."name" IS 'Name of the fact.';
COMMENT ON COLUMN run."value" IS 'Value; several processes'' different values are joined by a comma.';

CREATE TABLE process (
  "process" INTEGER,
  "series" VARCHAR,
  "host" VARCHAR,
  "domain" VARCHAR,
  "pid" BIGINT,
  "parent_pid" BIGINT,
  "started_ns" BIGINT,
  "offset_ns" BIGINT,
  "first_ns" BIGINT,
  "last_ns" BIGINT,
  "lost_records" BIGINT,
  "facts" MAP(VARCHAR, VARCHAR)
);
COMMENT ON TABLE process IS 'Every process that emitted, one row per incarnation.';
COMMENT ON COLUMN process."process" IS 'Number of the process within this store.';
COMMENT ON COLUMN process."series" IS 'Name of its spool series.';
COMMENT ON COLUMN process."host" IS 'Id of its host.';
COMMENT ON COLUMN process."domain" IS 'Clock domain: processes of one domain share one monotonic clock.';
COMMENT ON COLUMN process."pid" IS 'Process id on its host.';
COMMENT ON COLUMN process."parent_pid" IS 'Process id of its parent.';
COMMENT ON COLUMN process."started_ns" IS 'When the process started, unix ns.';
COMMENT ON COLUMN process."offset_ns" IS 'What was added to its monotonic clock to make unix ns; one value per domain.';
COMMENT ON COLUMN process."first_ns" IS 'Its first event, unix ns; NULL without events.';
COMMENT ON COLUMN process."last_ns" IS 'Its last event, unix ns; NULL without events.';
COMMENT ON COLUMN process."lost_records" IS 'Records that it could not keep: dropped, or never completed.';
COMMENT ON COLUMN process."facts" IS 'What it said of itself: kind, engine_id, role, connector, rank; imported: by format.';

CREATE TABLE event (
  "process" INTEGER,
  "stage" stage,
  "t_ns" BIGINT,
  "request" VARCHAR,
  "ref" VARCHAR,
  "a" BIGINT,
  "b" BIGINT,
  "c" BIGINT,
  "d" BIGINT
);
COMMENT ON TABLE event IS 'Every recorded point, as emitted.';
COMMENT ON COLUMN event."process" IS 'Process that emitted it.';
COMMENT ON COLUMN event."stage" IS 'Which point; the view `vocabulary` says what it means.';
COMMENT ON COLUMN event."t_ns" IS 'When, unix ns.';
COMMENT ON COLUMN event."request" IS 'The request''s id in that process; '''' where none belongs.';
COMMENT ON COLUMN event."ref" IS 'Payload of the stage, by name: reason: tracing.disabled; client_request_id: router.received; mode: router.decided; url: router.candidate; url: router.prefill_sent; url: router.decode_sent; reason: router.failed; flags: router.traced; transfer_id: prefill.allocated; status: prefill.finished; status: prefill.aborted; remote_request_id: decode.enqueued; transfer_id: decode.allocated; remote_engine: decode.load_started; status: decode.finished; status: decode.aborted; remote_engine: handshake.started; remote_engine: handshake.ended; remote_engine: registration.received; decode_request_id: transfer.matched; remote_request_id: transfer.prepared; reason: transfer.failed; client_request_id: client.sent; reason: client.failed; mode: transfer.begun; decode_request_id: prefill.checked; reason: transfer.unchecked; threads: thread.placed; '''' where there is none.';
COMMENT ON COLUMN event."a" IS 'Payload of the stage, by name: wall_ns [ns]: clock.anchor; code: spool.dropped; attempt: router.received; prefill: router.decided; leg: router.candidate; status: router.prefill_returned; status: router.done; status: router.failed; trace_high: router.traced; status: prefill.http_responded; status: prefill.http_done; status: decode.first_token_out; status: decode.http_done; prompt_tokens [tokens]: prefill.enqueued; local_tokens [tokens]: prefill.considered; blocks [blocks]: prefill.allocated; step: prefill.scheduled; blocks [blocks]: prefill.finished; rank: prefill.staged; rank: sender.picked; rank: prefill.lease_expired; rank: prefill.lease_started; rank: prefill.lease_extended; prompt_tokens [tokens]: decode.enqueued; local_tokens [tokens]: decode.considered; blocks [blocks]: decode.allocated; rank: decode.registration_queued; rank: decode.registration_sent; rank: decode.load_started; rank: decode.reported; step: decode.scheduled; output_tokens [tokens]: decode.finished; rank: decode.load_failed; rank: handshake.started; rank: handshake.ended; rank: registration.received; rank: transfer.matched; transfer: transfer.prepared; transfer: transfer.post_started; transfer: transfer.post_ended; transfer: transfer.done; transfer: transfer.failed; rank: transfer.notified; transfer: transfer.post_starved; rank: transfer.notice_starved; transfer: transfer.probed; rank: notification.orphaned; step: step.scheduled; step: step.started; step: step.forwarded; step: step.connected; step: step.ended; step: step.worker_starved; step: step.result_starved; slept_ns [ns]: sender.woke; busy_ns [ns]: sender.slept; prompt_tokens [tokens]: client.sent; output_tokens [tokens]: client.done; status: client.failed; rank: transfer.begun; rank: prefill.handed_over; rank: prefill.checked; rank: decode.checked; rank: transfer.unchecked; cpu: thread.placed; rank: prefill.copy_started; rank: prefill.copied; rank: decode.copy_started; rank: decode.copied.';
COMMENT ON COLUMN event."b" IS 'Payload of the stage, by name: uncertainty_ns [ns]: clock.anchor; count: spool.dropped; body_bytes [bytes]: router.received; decode: router.decided; index: router.candidate; handed_over: router.prefill_returned; chunks: router.done; trace_low: router.traced; chunks: decode.http_done; arrival_wall_ns [ns]: prefill.enqueued; remote_tokens [tokens]: prefill.considered; remote_tokens [tokens]: prefill.allocated; tokens [tokens]: prefill.scheduled; kept: prefill.finished; duration_ns [ns]: prefill.lease_started; arrival_wall_ns [ns]: decode.enqueued; remote_tokens [tokens]: decode.considered; remote_tokens [tokens]: decode.allocated; message_bytes [bytes]: decode.registration_sent; blocks [blocks]: decode.load_started; connector: decode.reported; tokens [tokens]: decode.scheduled; blocks [blocks]: decode.load_failed; ok: handshake.ended; descriptors: transfer.prepared; moved_bytes [bytes]: transfer.post_ended; last_pending_ns [ns]: transfer.done; starved_ns [ns]: transfer.post_starved; starved_ns [ns]: transfer.notice_starved; last_pending_ns [ns]: transfer.probed; tokens [tokens]: step.scheduled; rank: step.started; rank: step.forwarded; rank: step.connected; starved_ns [ns]: step.ended; rank: step.worker_starved; rank: step.result_starved; queue_length: sender.woke; queue_length: sender.slept; block: prefill.checked; block: decode.checked; blocks [blocks]: transfer.unchecked; beside: thread.placed; blocks [blocks]: prefill.copy_started; blocks [blocks]: prefill.copied; blocks [blocks]: decode.copy_started; blocks [blocks]: decode.copied.';
COMMENT ON COLUMN event."c" IS 'Payload of the stage, by name: prefill_inflight: router.decided; inflight: router.candidate; parent_span: router.traced; looked_ns [ns]: prefill.allocated; computed_tokens [tokens]: prefill.scheduled; remote: decode.enqueued; looked_ns [ns]: decode.allocated; peer_rank: decode.registration_sent; computed_tokens [tokens]: decode.scheduled; rank: transfer.prepared; descriptors: transfer.post_ended; polls: transfer.done; since_ns [ns]: transfer.notice_starved; requests: step.scheduled; asynchronous: step.forwarded; connector_ns [ns]: step.connected; ordered_ns [ns]: step.ended; forward_starved_ns [ns]: step.worker_starved; result_starved_ns [ns]: step.result_starved; signal_delay_ns [ns]: sender.woke; checksum: prefill.checked; checksum: decode.checked; running: thread.placed; copied_bytes [bytes]: prefill.copied; copied_bytes [bytes]: decode.copied.';
COMMENT ON COLUMN event."d" IS 'Payload of the stage, by name: decode_inflight: router.decided; tokens [tokens]: router.candidate; own_span: router.traced; intake_ns [ns]: prefill.enqueued; prompt_tokens [tokens]: prefill.scheduled; intake_ns [ns]: decode.enqueued; prompt_tokens [tokens]: decode.scheduled; done: transfer.post_ended; waiting: step.scheduled; before_forward_ns [ns]: step.connected; connector_starved_ns [ns]: step.worker_starved; checked_bytes [bytes]: prefill.checked; checked_bytes [bytes]: decode.checked; looked: thread.placed.';

CREATE TABLE loss (
  "process" INTEGER,
  "stage" VARCHAR,
  "lost_records" BIGINT
);
COMMENT ON TABLE loss IS 'Records that a process could not keep, by stage: dropped since it began, or slots that it never completed.';
COMMENT ON COLUMN loss."process" IS 'Process that lost them.';
COMMENT ON COLUMN loss."stage" IS 'Stage of what was dropped; '''' for slots never completed, whose stage nobody knows.';
COMMENT ON COLUMN loss."lost_records" IS 'How many.';

CREATE TABLE spool_file (
  "series" VARCHAR,
  "number" BIGINT,
  "process" INTEGER,
  "path" VARCHAR,
  "consumed" BIGINT,
  "holes" BIGINT[],
  "unfilled" BIGINT,
  "finished" BOOLEAN
);
COMMENT ON TABLE spool_file IS 'How far each spool file has been read; committed together with its events, so that none comes twice.';
COMMENT ON COLUMN spool_file."series" IS 'Series that the file belongs to.';
COMMENT ON COLUMN spool_file."number" IS 'Number of the file in its series.';
COMMENT ON COLUMN spool_file."process" IS 'Process that wrote it.';
COMMENT ON COLUMN spool_file."path" IS 'Where it was read.';
COMMENT ON COLUMN spool_file."consumed" IS 'Records passed so far.';
COMMENT ON COLUMN spool_file."holes" IS 'Records passed over because they were not complete yet.';
COMMENT ON COLUMN spool_file."unfilled" IS 'Slots in it that were taken and never completed.';
COMMENT ON COLUMN spool_file."finished" IS 'Nothing more will come from it.';

CREATE TABLE recorder (
  "at_ns" BIGINT,
  "subject" VARCHAR,
  "message" VARCHAR
);
COMMENT ON TABLE recorder IS 'What the recorder had to say: files it skipped, restarts, failures.';
COMMENT ON COLUMN recorder."at_ns" IS 'When, unix ns.';
COMMENT ON COLUMN recorder."subject" IS 'The file or part it is about.';
COMMENT ON COLUMN recorder."message" IS 'One sentence.';

CREATE TABLE request (
  "request_key" BIGINT,
  "request_id" VARCHAR,
  "client_request_id" VARCHAR,
  "attempt" INTEGER,
  "mode" VARCHAR,
  "verdict" VARCHAR,
  "scope" VARCHAR,
  "join_method" VARCHAR,
  "prefill_engine" VARCHAR,
  "decode_engine" VARCHAR,
  "prompt_tokens" BIGINT,
  "cached_tokens" BIGINT,
  "remote_tokens" BIGINT,
  "output_tokens" BIGINT,
  "start_ns" BIGINT,
  "first_token_ns" BIGINT,
  "end_ns" BIGINT,
  "ttft_ns" BIGINT,
  "compute_ns" BIGINT,
  "compute_run_ns" BIGINT,
  "compute_queue_ns" BIGINT,
  "coordination_ns" BIGINT,
  "transfer_ns" BIGINT,
  "transfer_low_ns" BIGINT,
  "transfer_high_ns" BIGINT,
  "unattributed_ns" BIGINT,
  "registration_late_ns" BIGINT,
  "moved_bytes" BIGINT,
  "descriptors" BIGINT,
  "transfers" INTEGER,
  "reserved_blocks" BIGINT,
  "reserved_ns" BIGINT,
  "held_blocks" BIGINT,
  "held_ns" BIGINT,
  "held_after_end_ns" BIGINT,
  "idle_ns" BIGINT,
  "lost_ns" BIGINT,
  "straggler_rank" INTEGER,
  "straggler_ns" BIGINT,
  "checked_blocks" BIGINT,
  "corrupt_blocks" BIGINT,
  "unchecked_blocks" BIGINT,
  "crosses_hosts" BOOLEAN,
  "note" VARCHAR,
  "post_ns" BIGINT,
  "wire_ns" BIGINT,
  "detection_ns" BIGINT,
  "tpot_ns" BIGINT,
  "decode_tokens" BIGINT
);
COMMENT ON TABLE request IS 'One row per request and attempt: how long to its first token, and where that time went.';
COMMENT ON COLUMN request."request_key" IS 'Key of the request within this store.';
COMMENT ON COLUMN request."request_id" IS 'The id that the router minted, else the engines'' own without its suffix.';
COMMENT ON COLUMN request."client_request_id" IS 'The id that the client sent; may repeat.';
COMMENT ON COLUMN request."attempt" IS '0 for the first attempt of a client''s request.';
COMMENT ON COLUMN request."mode" IS 'push, pull, local or unknown.';
COMMENT ON COLUMN request."verdict" IS 'complete, incomplete, aborted, expired, failed, recomputed, corrupt or no handoff.';
COMMENT ON COLUMN request."scope" IS 'Where the first token was seen: client, router or engine. Scopes do not compare.';
COMMENT ON COLUMN request."join_method" IS 'How the two sides were found to be one request.';
COMMENT ON COLUMN request."prefill_engine" IS 'Engine id of P.';
COMMENT ON COLUMN request."decode_engine" IS 'Engine id of D.';
COMMENT ON COLUMN request."prompt_tokens" IS 'Length of the prompt; NULL if nobody said it.';
COMMENT ON COLUMN request."cached_tokens" IS 'Prompt tokens that D had in its prefix cache; NULL if it was not seen to look.';
COMMENT ON COLUMN request."remote_tokens" IS 'Prompt tokens that were to come from P; NULL if D did not say how many.';
COMMENT ON COLUMN request."output_tokens" IS 'Tokens produced; NULL if nobody said how many.';
COMMENT ON COLUMN request."start_ns" IS 'First moment seen, unix ns.';
COMMENT ON COLUMN request."first_token_ns" IS 'First content leaving for the client, unix ns; NULL if none.';
COMMENT ON COLUMN request."end_ns" IS 'Last moment seen, unix ns.';
COMMENT ON COLUMN request."ttft_ns" IS 'Time to first token; NULL if there was none, as are the shares.';
COMMENT ON COLUMN request."compute_ns" IS 'Share: computing, or waiting for computing requests.';
COMMENT ON COLUMN request."compute_run_ns" IS 'The part of compute in a step that worked on the request.';
COMMENT ON COLUMN request."compute_queue_ns" IS 'The part of compute spent waiting for what computing requests held.';
COMMENT ON COLUMN request."coordination_ns" IS 'Share: waiting for a message, a hop, a thread, a step boundary, a poll.';
COMMENT ON COLUMN request."transfer_ns" IS 'Share: the KV''s bytes being posted, copied, or on the wire.';
COMMENT ON COLUMN request."transfer_low_ns" IS 'The least that transfer can have been.';
COMMENT ON COLUMN request."transfer_high_ns" IS 'The most that transfer can have been.';
COMMENT ON COLUMN request."unattributed_ns" IS 'Share: time that no event explains.';
COMMENT ON COLUMN request."registration_late_ns" IS 'How long after P had computed D''s registration came; negative: before.';
COMMENT ON COLUMN request."moved_bytes" IS 'Bytes moved by its transfers.';
COMMENT ON COLUMN request."descriptors" IS 'Descriptors of its transfers.';
COMMENT ON COLUMN request."transfers" IS 'Transfers it took.';
COMMENT ON COLUMN request."reserved_blocks" IS 'Blocks reserved on D for KV that was to come.';
COMMENT ON COLUMN request."reserved_ns" IS 'How long they were reserved before the KV was there; NULL if unknown.';
COMMENT ON COLUMN request."held_blocks" IS 'Blocks that P kept for the hand-off.';
COMMENT ON COLUMN request."held_ns" IS 'How long P kept them after it had finished; NULL if it was not seen to let go.';
COMMENT ON COLUMN request."held_after_end_ns" IS 'The part of that after the request was aborted or failed, else NULL.';
COMMENT ON COLUMN request."idle_ns" IS 'How long the engine it came to first had made no step by then; NULL if unknown.';
COMMENT ON COLUMN request."lost_ns" IS 'What lost attempts at it took before this one began; NULL if there were none.';
COMMENT ON COLUMN request."straggler_rank" IS 'The rank of D that kept the others waiting longest: the last to report its KV, or one that held up the steps of the last; NULL if fewer than two reported.';
COMMENT ON COLUMN request."straggler_ns" IS 'For how long: the last one since the last but one, without what others held up meanwhile; another one while it alone was still in a step and the KV had arrived.';
COMMENT ON COLUMN request."checked_blocks" IS 'Blocks whose checksums on P and D were compared; NULL if it was not chosen for it.';
COMMENT ON COLUMN request."corrupt_blocks" IS 'Those of them that differ.';
COMMENT ON COLUMN request."unchecked_blocks" IS 'Blocks handed over that could not be compared; the note says why.';
COMMENT ON COLUMN request."crosses_hosts" IS 'Some segment rests on two hosts'' wall clocks.';
COMMENT ON COLUMN request."note" IS 'What else is to be said.';
COMMENT ON COLUMN request."post_ns" IS 'Posting, as far as it lies on the path; NULL if none does.';
COMMENT ON COLUMN request."wire_ns" IS 'Bytes on the wire, as far as it lies on the path; NULL if none does.';
COMMENT ON COLUMN request."detection_ns" IS 'KV that had arrived and was not noticed, on the path; NULL if none lies there.';
COMMENT ON COLUMN request."tpot_ns" IS 'Mean time per token after the first; NULL if there was none.';
COMMENT ON COLUMN request."decode_tokens" IS 'Tokens after the first, as table pace has them; NULL if their end was not seen.';

CREATE TABLE segment (
  "request_key" BIGINT,
  "position" INTEGER,
  "class" VARCHAR,
  "cause" VARCHAR,
  "where" VARCHAR,
  "waited_for" VARCHAR,
  "start_ns" BIGINT,
  "end_ns" BIGINT,
  "crosses_hosts" BOOLEAN
);
COMMENT ON TABLE segment IS 'The critical path: segments that tile the time from start to first token without gap or overlap.';
COMMENT ON COLUMN segment."request_key" IS 'Request it belongs to.';
COMMENT ON COLUMN segment."position" IS 'Order along the path, from 0.';
COMMENT ON COLUMN segment."class" IS 'compute.run, compute.queue, coordination, transfer or unattributed.';
COMMENT ON COLUMN segment."cause" IS 'The finer name; the view `cause` says what it means.';
COMMENT ON COLUMN segment."where" IS 'Where the time passed.';
COMMENT ON COLUMN segment."waited_for" IS 'What the request waited for.';
COMMENT ON COLUMN segment."start_ns" IS 'Unix ns.';
COMMENT ON COLUMN segment."end_ns" IS 'Unix ns.';
COMMENT ON COLUMN segment."crosses_hosts" IS 'Its ends lie on two hosts, so it rests on their wall clocks.';

CREATE TABLE hidden (
  "request_key" BIGINT,
  "cause" VARCHAR,
  "class" VARCHAR,
  "where" VARCHAR,
  "start_ns" BIGINT,
  "duration_ns" BIGINT,
  "slack_ns" BIGINT
);
COMMENT ON TABLE hidden IS 'Work beside the critical path, which delayed nobody.';
COMMENT ON COLUMN hidden."request_key" IS 'Request it belongs to.';
COMMENT ON COLUMN hidden."cause" IS 'The finer name; the view `cause` says what it means.';
COMMENT ON COLUMN hidden."class" IS 'What it would have been charged to on the path.';
COMMENT ON COLUMN hidden."where" IS 'Where the time passed.';
COMMENT ON COLUMN hidden."start_ns" IS 'Unix ns.';
COMMENT ON COLUMN hidden."duration_ns" IS 'How long it took.';
COMMENT ON COLUMN hidden."slack_ns" IS 'How much longer it could have taken unnoticed; NULL if unknown.';

CREATE TABLE pace (
  "request_key" BIGINT,
  "start_ns" BIGINT,
  "end_ns" BIGINT,
  "tokens" BIGINT,
  "steps" BIGINT,
  "tpot_ns" BIGINT,
  "itl_p50_ns" BIGINT,
  "itl_max_ns" BIGINT,
  "extension_ns" BIGINT,
  "occupancy_ns" BIGINT
);
COMMENT ON TABLE pace IS 'How the tokens after the first came, one row per request whose first and last token were seen.';
COMMENT ON COLUMN pace."request_key" IS 'Request it belongs to.';
COMMENT ON COLUMN pace."start_ns" IS 'D''s scheduler took in the first token, unix ns.';
COMMENT ON COLUMN pace."end_ns" IS 'D''s scheduler took in the last token, unix ns.';
COMMENT ON COLUMN pace."tokens" IS 'Tokens after the first.';
COMMENT ON COLUMN pace."steps" IS 'Steps that made them.';
COMMENT ON COLUMN pace."tpot_ns" IS 'Mean time per token after the first; NULL if there was none.';
COMMENT ON COLUMN pace."itl_p50_ns" IS 'Median time between two steps that made tokens of it; NULL if there were none.';
COMMENT ON COLUMN pace."itl_max_ns" IS 'The longest of those; NULL if there were none.';
COMMENT ON COLUMN pace."extension_ns" IS 'By how much connector work on the forward thread made its steps longer.';
COMMENT ON COLUMN pace."occupancy_ns" IS 'How long the connector took on the forward thread in its steps.';

CREATE TABLE pace_part (
  "request_key" BIGINT,
  "cause" VARCHAR,
  "class" VARCHAR,
  "duration_ns" BIGINT
);
COMMENT ON TABLE pace_part IS 'What passed the time between the first and the last token: the parts sum to end_ns - start_ns of its pace.';
COMMENT ON COLUMN pace_part."request_key" IS 'Request it belongs to.';
COMMENT ON COLUMN pace_part."cause" IS 'The finer name; the view `cause` says what it means.';
COMMENT ON COLUMN pace_part."class" IS 'Class it counts for.';
COMMENT ON COLUMN pace_part."duration_ns" IS 'How long, over all its steps.';

CREATE TABLE blame (
  "request_key" BIGINT,
  "blamed_request_id" VARCHAR,
  "extension_ns" BIGINT
);
COMMENT ON TABLE blame IS 'Whose transfers were posted, or KV copied, while a request''s steps waited for the connector, request by request.';
COMMENT ON COLUMN blame."request_key" IS 'Request whose steps became longer.';
COMMENT ON COLUMN blame."blamed_request_id" IS 'Request whose transfer was posted, or KV copied, then; may be the same.';
COMMENT ON COLUMN blame."extension_ns" IS 'By how much that made its steps longer.';

CREATE TABLE place (
  "process" INTEGER,
  "core" INTEGER,
  "engine" VARCHAR
);
COMMENT ON TABLE place IS 'Which engine core every process works for, as tables step, transfer and leg have it.';
COMMENT ON COLUMN place."process" IS 'Number of the process.';
COMMENT ON COLUMN place."core" IS 'The engine core it works for.';
COMMENT ON COLUMN place."engine" IS 'Engine id, '''' if it is none.';

CREATE TABLE transfer (
  "process" INTEGER,
  "transfer" BIGINT,
  "engine" VARCHAR,
  "request" VARCHAR,
  "remote_request" VARCHAR,
  "rank" BIGINT,
  "moved_bytes" BIGINT,
  "descriptors" BIGINT,
  "ts" TIMESTAMP WITH TIME ZONE,
  "prepared_ns" BIGINT,
  "post_started_ns" BIGINT,
  "post_ended_ns" BIGINT,
  "done_at_post" BOOLEAN,
  "last_pending_ns" BIGINT,
  "done_ns" BIGINT,
  "polls" BIGINT,
  "probe_pending_ns" BIGINT,
  "probed_ns" BIGINT,
  "notified_ns" BIGINT,
  "failed_ns" BIGINT,
  "reason" VARCHAR,
  "peer" VARCHAR,
  "seen_ns" BIGINT,
  "siblings" BIGINT,
  "is_last" BOOLEAN
);
COMMENT ON TABLE transfer IS 'One row per transfer, as the side that drives it saw it. Times in unix ns, NULL where unseen.';
COMMENT ON COLUMN transfer."process" IS 'Process that drives it.';
COMMENT ON COLUMN transfer."transfer" IS 'Its number in that process.';
COMMENT ON COLUMN transfer."engine" IS 'Engine id of the side that drives it.';
COMMENT ON COLUMN transfer."request" IS 'The request''s id on that side.';
COMMENT ON COLUMN transfer."remote_request" IS 'The request''s id on the other side.';
COMMENT ON COLUMN transfer."rank" IS 'Rank that drives it.';
COMMENT ON COLUMN transfer."moved_bytes" IS 'Bytes.';
COMMENT ON COLUMN transfer."descriptors" IS 'Descriptors.';
COMMENT ON COLUMN transfer."ts" IS 'When its post began.';
COMMENT ON COLUMN transfer."prepared_ns" IS 'Its descriptors were made.';
COMMENT ON COLUMN transfer."post_started_ns" IS 'The call that posts it began.';
COMMENT ON COLUMN transfer."post_ended_ns" IS 'That call returned.';
COMMENT ON COLUMN transfer."done_at_post" IS 'The post came back done.';
COMMENT ON COLUMN transfer."last_pending_ns" IS 'The last poll that said in progress.';
COMMENT ON COLUMN transfer."done_ns" IS 'The first poll that said done.';
COMMENT ON COLUMN transfer."polls" IS 'Polls made.';
COMMENT ON COLUMN transfer."probe_pending_ns" IS 'The probe thread''s last poll that said in progress.';
COMMENT ON COLUMN transfer."probed_ns" IS 'The probe thread saw it done.';
COMMENT ON COLUMN transfer."notified_ns" IS 'The other side read its completion notification.';
COMMENT ON COLUMN transfer."failed_ns" IS 'It failed.';
COMMENT ON COLUMN transfer."reason" IS 'What NIXL said of the failure.';
COMMENT ON COLUMN transfer."peer" IS 'Engine id of the other side, '''' if it was not seen.';
COMMENT ON COLUMN transfer."seen_ns" IS 'The first sign of its completion that the side which drives it had.';
COMMENT ON COLUMN transfer."siblings" IS 'Transfers that this engine posted for the request, itself included; NULL if not posted.';
COMMENT ON COLUMN transfer."is_last" IS 'No sibling of it was seen complete later; NULL if it was not.';

CREATE TABLE step (
  "process" INTEGER,
  "step" BIGINT,
  "engine" VARCHAR,
  "ts" TIMESTAMP WITH TIME ZONE,
  "scheduled_ns" BIGINT,
  "started_ns" BIGINT,
  "forwarded_ns" BIGINT,
  "connected_ns" BIGINT,
  "ended_ns" BIGINT,
  "tokens" BIGINT,
  "requests" BIGINT,
  "waiting" BIGINT,
  "ranks" BIGINT,
  "connector_ns" BIGINT,
  "before_forward_ns" BIGINT,
  "gap_ns" BIGINT,
  "starved_ns" BIGINT,
  "forward_starved_ns" BIGINT,
  "connector_starved_ns" BIGINT,
  "result_starved_ns" BIGINT
);
COMMENT ON TABLE step IS 'One row per engine step; a step ends with its slowest worker. Unix ns, NULL where unseen.';
COMMENT ON COLUMN step."process" IS 'The engine core.';
COMMENT ON COLUMN step."step" IS 'Number of the step in it.';
COMMENT ON COLUMN step."engine" IS 'Engine id.';
COMMENT ON COLUMN step."ts" IS 'When it was made up, else begun.';
COMMENT ON COLUMN step."scheduled_ns" IS 'The scheduler has made it up.';
COMMENT ON COLUMN step."started_ns" IS 'The first worker begins.';
COMMENT ON COLUMN step."forwarded_ns" IS 'The last worker''s forward has ended.';
COMMENT ON COLUMN step."connected_ns" IS 'The last worker''s connector work is over.';
COMMENT ON COLUMN step."ended_ns" IS 'The scheduler has taken in its result.';
COMMENT ON COLUMN step."tokens" IS 'Tokens in it.';
COMMENT ON COLUMN step."requests" IS 'Requests in it.';
COMMENT ON COLUMN step."waiting" IS 'Requests known to wait for KV.';
COMMENT ON COLUMN step."ranks" IS 'Workers that stamped it.';
COMMENT ON COLUMN step."connector_ns" IS 'Time the connector took on the forward thread, on the slowest rank.';
COMMENT ON COLUMN step."before_forward_ns" IS 'The part of it before the forward, on that rank.';
COMMENT ON COLUMN step."gap_ns" IS 'From the making up of the step before it; NULL if that is ten minutes ago or unseen.';
COMMENT ON COLUMN step."starved_ns" IS 'How long the scheduler''s thread could have run before it and had no processor.';
COMMENT ON COLUMN step."forward_starved_ns" IS 'A worker''s time without a processor in its forward, the most of any rank.';
COMMENT ON COLUMN step."connector_starved_ns" IS 'A worker''s time without a processor in the connector''s work, at least.';
COMMENT ON COLUMN step."result_starved_ns" IS 'A worker''s time without a processor between connector''s work and result, once told to sample.';

CREATE TABLE leg (
  "engine" VARCHAR,
  "request" VARCHAR,
  "first_ns" BIGINT,
  "prefill_from_ns" BIGINT,
  "prefill_to_ns" BIGINT,
  "decode_from_ns" BIGINT,
  "decode_to_ns" BIGINT,
  "kv_from_ns" BIGINT,
  "kv_to_ns" BIGINT
);
COMMENT ON TABLE leg IS 'One row per engine and request id in it: how long it waited there. Times in unix ns, NULL where unseen.';
COMMENT ON COLUMN leg."engine" IS 'Engine id.';
COMMENT ON COLUMN leg."request" IS 'The request''s id in that engine.';
COMMENT ON COLUMN leg."first_ns" IS 'The first of the times that follow.';
COMMENT ON COLUMN leg."prefill_from_ns" IS 'P put it in its queue.';
COMMENT ON COLUMN leg."prefill_to_ns" IS 'A step of P works on it, or it was over there.';
COMMENT ON COLUMN leg."decode_from_ns" IS 'D put it in its queue.';
COMMENT ON COLUMN leg."decode_to_ns" IS 'A step of D works on it, or it was over there.';
COMMENT ON COLUMN leg."kv_from_ns" IS 'D reserved blocks for KV that was to come.';
COMMENT ON COLUMN leg."kv_to_ns" IS 'The KV was there, or the request was over.';

CREATE TABLE notable (
  "process" INTEGER,
  "stage" stage,
  "t_ns" BIGINT,
  "request" VARCHAR,
  "ref" VARCHAR,
  "a" BIGINT,
  "b" BIGINT
);
COMMENT ON TABLE notable IS 'Events that are asked for by their kind, copied from table event: leases, handshakes, failures, threads.';
COMMENT ON COLUMN notable."process" IS 'Process that emitted it.';
COMMENT ON COLUMN notable."stage" IS 'Which point.';
COMMENT ON COLUMN notable."t_ns" IS 'When, unix ns.';
COMMENT ON COLUMN notable."request" IS 'The request''s id in that process; '''' where none belongs.';
COMMENT ON COLUMN notable."ref" IS 'As in table event.';
COMMENT ON COLUMN notable."a" IS 'As in table event.';
COMMENT ON COLUMN notable."b" IS 'As in table event.';

CREATE TABLE occurrence (
  "from_ns" BIGINT,
  "process" INTEGER,
  "stage" stage,
  "events" BIGINT
);
COMMENT ON TABLE occurrence IS 'How many events of each stage every process emitted, in windows of time.';
COMMENT ON COLUMN occurrence."from_ns" IS 'Where the window begins, unix ns; it is as long as the fine ones of table tally.';
COMMENT ON COLUMN occurrence."process" IS 'Process that emitted them.';
COMMENT ON COLUMN occurrence."stage" IS 'Which point.';
COMMENT ON COLUMN occurrence."events" IS 'How many.';

CREATE TABLE tally (
  "what" VARCHAR,
  "window_ns" BIGINT,
  "from_ns" BIGINT,
  "mode" VARCHAR,
  "scope" VARCHAR,
  "prefill_engine" VARCHAR,
  "decode_engine" VARCHAR,
  "cause" VARCHAR,
  "class" VARCHAR,
  "bucket" INTEGER,
  "times" BIGINT,
  "requests" BIGINT,
  "total_ns" BIGINT,
  "least_ns" BIGINT,
  "most_ns" BIGINT
);
COMMENT ON TABLE tally IS 'Time by cause, in windows of time and in buckets by its length: what ranks causes without a look at every request. The newest requests, whose window is not over, are not in it yet.';
COMMENT ON COLUMN tally."what" IS 'path: on the way to the first token; share: the same by class; hidden, slack: beside it; pace: after.';
COMMENT ON COLUMN tally."window_ns" IS 'Length of the window: fine or coarse. The coarse ones hold what the fine ones hold.';
COMMENT ON COLUMN tally."from_ns" IS 'Where the window begins, unix ns; the requests in it began in it.';
COMMENT ON COLUMN tally."mode" IS 'push, pull, local or unknown.';
COMMENT ON COLUMN tally."scope" IS 'Where the first token was seen. Scopes do not compare.';
COMMENT ON COLUMN tally."prefill_engine" IS 'Engine id of P.';
COMMENT ON COLUMN tally."decode_engine" IS 'Engine id of D.';
COMMENT ON COLUMN tally."cause" IS 'The cause.';
COMMENT ON COLUMN tally."class" IS 'The class that it counts for.';
COMMENT ON COLUMN tally."bucket" IS 'Which bucket: 32 to an octave, by the logarithm of the time; 0 where none is needed.';
COMMENT ON COLUMN tally."times" IS 'Times in it; on the path and after it one per request.';
COMMENT ON COLUMN tally."requests" IS 'Requests that they are of, each counted at its first time of that cause.';
COMMENT ON COLUMN tally."total_ns" IS 'Sum of the times.';
COMMENT ON COLUMN tally."least_ns" IS 'The shortest of them.';
COMMENT ON COLUMN tally."most_ns" IS 'The longest of them.';

CREATE TABLE finding (
  "rank" INTEGER,
  "name" VARCHAR,
  "sentence" VARCHAR,
  "grade" VARCHAR,
  "class" VARCHAR,
  "remedy" VARCHAR,
  "stake_ns" BIGINT,
  "query" VARCHAR,
  "examples" VARCHAR[],
  "mode" VARCHAR,
  "scope" VARCHAR,
  "from_ns" BIGINT,
  "as_of_ns" BIGINT
);
COMMENT ON TABLE finding IS 'What the run says in plain words, as `kvtrace explain` prints it; of very many requests, and of a recording that goes on, what the newest said.';
COMMENT ON COLUMN finding."rank" IS '1 for the most time at stake.';
COMMENT ON COLUMN finding."name" IS 'Which finding: a cause, a verdict, or a name of its own.';
COMMENT ON COLUMN finding."sentence" IS 'What is the case, with numbers.';
COMMENT ON COLUMN finding."grade" IS 'How sure it is: measured, explained or supposed.';
COMMENT ON COLUMN finding."class" IS 'The class that it counts for; '''' where none can be told.';
COMMENT ON COLUMN finding."remedy" IS 'What usually helps: supposed, not measured; '''' where none can be told.';
COMMENT ON COLUMN finding."stake_ns" IS 'Request time that it is about, summed.';
COMMENT ON COLUMN finding."query" IS 'The named query that shows it.';
COMMENT ON COLUMN finding."examples" IS 'Ids of the requests that show it most, at most three.';
COMMENT ON COLUMN finding."mode" IS 'The mode of the requests that it is about; '''' for all of the run.';
COMMENT ON COLUMN finding."scope" IS 'Their scope; '''' for all of the run.';
COMMENT ON COLUMN finding."from_ns" IS 'The first moment of the requests that were looked at, unix ns.';
COMMENT ON COLUMN finding."as_of_ns" IS 'The last moment of them, unix ns.';

CREATE MACRO walk_request_sql() AS 'SELECT NULL::VARCHAR AS "request_id", NULL::VARCHAR AS "client_request_id", NULL::BOOLEAN AS "walked", NULL::VARCHAR AS "unwalked", NULL::VARCHAR AS "mode", NULL::VARCHAR AS "scope", NULL::VARCHAR AS "prefill_engine", NULL::VARCHAR AS "decode_engine", NULL::BIGINT AS "start_ns", NULL::BIGINT AS "first_token_ns", NULL::BIGINT AS "ttft_ns", NULL::BIGINT AS "compute_ns", NULL::BIGINT AS "compute_run_ns", NULL::BIGINT AS "compute_queue_ns", NULL::BIGINT AS "coordination_ns", NULL::BIGINT AS "transfer_ns", NULL::BIGINT AS "transfer_low_ns", NULL::BIGINT AS "transfer_high_ns", NULL::BIGINT AS "unattributed_ns" LIMIT 0';
CREATE MACRO walk_segment_sql() AS 'SELECT NULL::VARCHAR AS "request_id", NULL::VARCHAR AS "class", NULL::VARCHAR AS "cause", NULL::VARCHAR AS "where", NULL::BIGINT AS "start_ns", NULL::BIGINT AS "end_ns" LIMIT 0';

CREATE VIEW vocabulary AS
SELECT stage::stage AS stage, code::INTEGER AS code, "where", doc, a, b, c, d, ref
FROM (VALUES
    ('clock.anchor', 1, 'process', 'A reading of the monotonic and the wall clock, taken together.', 'wall_ns [ns]', 'uncertainty_ns [ns]', '', '', ''),
    ('spool.dropped', 2, 'process', 'Records lost since the process began, by stage.', 'code', 'count', '', '', ''),
    ('tracing.disabled', 3, 'process', 'Tracing switched itself off in this process after an error.', '', '', '', '', 'reason'),
    ('router.received', 10, 'router', 'The router has the request''s head.', 'attempt', 'body_bytes [bytes]', '', '', 'client_request_id'),
    ('router.decided', 11, 'router', 'P and D are chosen.', 'prefill', 'decode', 'prefill_inflight', 'decode_inflight', 'mode'),
    ('router.candidate', 12, 'router', 'One candidate''s queue as the router knew it when it chose.', 'leg', 'index', 'inflight', 'tokens [tokens]', 'url'),
    ('router.prefill_sent', 13, 'router', 'The prefill leg leaves the router.', '', '', '', '', 'url'),
    ('router.prefill_returned', 14, 'router', 'P''s reply has arrived whole.', 'status', 'handed_over', '', '', ''),
    ('router.decode_sent', 15, 'router', 'The decode leg leaves the router.', '', '', '', '', 'url'),
    ('router.first_token', 16, 'router', 'The first content leaves for the client.', '', '', '', '', ''),
    ('router.done', 17, 'router', 'The answer has left whole.', 'status', 'chunks', '', '', ''),
    ('router.failed', 18, 'router', 'The request failed.', 'status', '', '', '', 'reason'),
    ('router.cancelled', 19, 'router', 'The client went away and both legs were cancelled.', '', '', '', '', ''),
    ('router.traced', 20, 'router', 'The request''s place in a trace: its client''s, or one that begins here.', 'trace_high', 'trace_low', 'parent_span', 'own_span', 'flags'),
    ('prefill.http_received', 30, 'prefill', 'P''s HTTP server has the request''s head.', '', '', '', '', ''),
    ('prefill.http_responded', 31, 'prefill', 'P''s HTTP server sends the reply''s body.', 'status', '', '', '', ''),
    ('prefill.http_done', 32, 'prefill', 'P''s HTTP exchange has ended.', 'status', '', '', '', ''),
    ('decode.http_received', 40, 'decode', 'D''s HTTP server has the request''s head.', '', '', '', '', ''),
    ('decode.first_token_out', 41, 'decode', 'The first content leaves D''s HTTP server.', 'status', '', '', '', ''),
    ('decode.http_done', 42, 'decode', 'D''s HTTP exchange has ended.', 'status', 'chunks', '', '', ''),
    ('decode.http_disconnected', 43, 'decode', 'The peer of D''s HTTP server went away before the end.', '', '', '', '', ''),
    ('prefill.http_disconnected', 44, 'prefill', 'The peer of P''s HTTP server went away before the end.', '', '', '', '', ''),
    ('prefill.enqueued', 50, 'prefill', 'The request is in P''s scheduler.', 'prompt_tokens [tokens]', 'arrival_wall_ns [ns]', '', 'intake_ns [ns]', ''),
    ('prefill.considered', 51, 'prefill', 'P''s scheduler looks at the request.', 'local_tokens [tokens]', 'remote_tokens [tokens]', '', '', ''),
    ('prefill.allocated', 52, 'prefill', 'The request has blocks on P.', 'blocks [blocks]', 'remote_tokens [tokens]', 'looked_ns [ns]', '', 'transfer_id'),
    ('prefill.scheduled', 53, 'prefill', 'A step on P includes the request.', 'step', 'tokens [tokens]', 'computed_tokens [tokens]', 'prompt_tokens [tokens]', ''),
    ('prefill.finished', 54, 'prefill', 'P is done with the request and its blocks are known.', 'blocks [blocks]', 'kept', '', '', 'status'),
    ('prefill.aborted', 55, 'prefill', 'The request was aborted on P.', '', '', '', '', 'status'),
    ('prefill.preempted', 56, 'prefill', 'P took the request''s blocks away.', '', '', '', '', ''),
    ('prefill.staged', 57, 'prefill', 'P''s worker hands the blocks to its sender.', 'rank', '', '', '', ''),
    ('sender.picked', 58, 'prefill', 'P''s sender thread takes the blocks up.', 'rank', '', '', '', ''),
    ('prefill.lease_expired', 59, 'prefill', 'P gave the blocks up unread.', 'rank', '', '', '', ''),
    ('prefill.released', 60, 'prefill', 'P''s scheduler frees the blocks.', '', '', '', '', ''),
    ('prefill.lease_started', 61, 'prefill', 'P''s worker holds the blocks until a deadline.', 'rank', 'duration_ns [ns]', '', '', ''),
    ('prefill.lease_extended', 62, 'prefill', 'A heartbeat from D extends the lease.', 'rank', '', '', '', ''),
    ('decode.enqueued', 70, 'decode', 'The request is in D''s scheduler.', 'prompt_tokens [tokens]', 'arrival_wall_ns [ns]', 'remote', 'intake_ns [ns]', 'remote_request_id'),
    ('decode.considered', 71, 'decode', 'D''s scheduler looks at the request.', 'local_tokens [tokens]', 'remote_tokens [tokens]', '', '', ''),
    ('decode.allocated', 72, 'decode', 'Blocks are reserved on D: the destination is prepared.', 'blocks [blocks]', 'remote_tokens [tokens]', 'looked_ns [ns]', '', 'transfer_id'),
    ('decode.registration_queued', 73, 'decode', 'D''s worker hands the registration to its sender.', 'rank', '', '', '', ''),
    ('decode.registration_sent', 74, 'decode', 'The registration leaves D.', 'rank', 'message_bytes [bytes]', 'peer_rank', '', ''),
    ('decode.load_started', 75, 'decode', 'D''s worker begins to load the KV.', 'rank', 'blocks [blocks]', '', '', 'remote_engine'),
    ('decode.reported', 76, 'decode', 'D''s worker reports the KV as complete.', 'rank', 'connector', '', '', ''),
    ('decode.ready', 77, 'decode', 'D''s scheduler knows that the KV is there on every rank.', '', '', '', '', ''),
    ('decode.scheduled', 78, 'decode', 'A step on D includes the request.', 'step', 'tokens [tokens]', 'computed_tokens [tokens]', 'prompt_tokens [tokens]', ''),
    ('decode.finished', 79, 'decode', 'D is done with the request.', 'output_tokens [tokens]', '', '', '', 'status'),
    ('decode.aborted', 80, 'decode', 'The request was aborted on D.', '', '', '', '', 'status'),
    ('decode.preempted', 81, 'decode', 'D took the request''s blocks away.', '', '', '', '', ''),
    ('decode.load_failed', 82, 'decode', 'D''s worker reports that the KV did not arrive.', 'rank', 'blocks [blocks]', '', '', ''),
    ('handshake.started', 90, 'transfer', 'An engine begins to exchange agent metadata with another.', 'rank', '', '', '', 'remote_engine'),
    ('handshake.ended', 91, 'transfer', 'The exchange has ended.', 'rank', 'ok', '', '', 'remote_engine'),
    ('registration.received', 92, 'transfer', 'P''s sender thread reads D''s registration; the request id is D''s.', 'rank', '', '', '', 'remote_engine'),
    ('transfer.matched', 93, 'transfer', 'P''s sender thread has the blocks and the registration of one request together.', 'rank', '', '', '', 'decode_request_id'),
    ('transfer.prepared', 94, 'transfer', 'Descriptors are made for one transfer.', 'transfer', 'descriptors', 'rank', '', 'remote_request_id'),
    ('transfer.post_started', 95, 'transfer', 'The call that posts the transfer begins.', 'transfer', '', '', '', ''),
    ('transfer.post_ended', 96, 'transfer', 'The call that posts the transfer returns.', 'transfer', 'moved_bytes [bytes]', 'descriptors', 'done', ''),
    ('transfer.done', 97, 'transfer', 'A poll by the side that drives the transfer says done.', 'transfer', 'last_pending_ns [ns]', 'polls', '', ''),
    ('transfer.failed', 98, 'transfer', 'The transfer failed.', 'transfer', '', '', '', 'reason'),
    ('transfer.notified', 99, 'transfer', 'A worker reads the other side''s completion notification; the request id is the reader''s own.', 'rank', '', '', '', ''),
    ('transfer.post_starved', 102, 'transfer', 'For a tenth of a millisecond or more of a post its thread could have run and had no processor, as the kernel counts.', 'transfer', 'starved_ns [ns]', '', '', ''),
    ('transfer.notice_starved', 103, 'transfer', 'For a tenth of a millisecond or more before it noticed that the KV has come a thread of D could have run and had no processor; stamped as transfer.done or transfer.notified is.', 'rank', 'starved_ns [ns]', 'since_ns [ns]', '', ''),
    ('transfer.probed', 100, 'transfer', 'The probe thread saw the transfer done.', 'transfer', 'last_pending_ns [ns]', '', '', ''),
    ('notification.orphaned', 101, 'transfer', 'A notification names a request that the worker does not know.', 'rank', '', '', '', ''),
    ('step.scheduled', 110, 'engine', 'The scheduler has made up a step.', 'step', 'tokens [tokens]', 'requests', 'waiting', ''),
    ('step.started', 111, 'engine', 'A worker begins the step.', 'step', 'rank', '', '', ''),
    ('step.forwarded', 112, 'engine', 'The step''s forward has ended on a worker (on a GPU: its event has passed).', 'step', 'rank', 'asynchronous', '', ''),
    ('step.connected', 113, 'engine', 'The connector''s work of the step on the forward thread is over.', 'step', 'rank', 'connector_ns [ns]', 'before_forward_ns [ns]', ''),
    ('step.ended', 114, 'engine', 'The scheduler has taken in the step''s result.', 'step', 'starved_ns [ns]', 'ordered_ns [ns]', '', ''),
    ('step.worker_starved', 115, 'engine', 'For a tenth of a millisecond or more of a step''s part a worker''s forward thread could have run and had no processor, as the kernel counts.', 'step', 'rank', 'forward_starved_ns [ns]', 'connector_starved_ns [ns]', ''),
    ('step.result_starved', 116, 'engine', 'For a tenth of a millisecond or more between the connector''s work and the hand-over of the step''s result a worker''s thread could have run and had no processor, the time included in which it looked in vain for the order to sample; where scheduler and worker are one thread, until that took the result in.', 'step', 'rank', 'result_starved_ns [ns]', '', ''),
    ('sender.woke', 120, 'engine', 'The sender thread wakes.', 'slept_ns [ns]', 'queue_length', 'signal_delay_ns [ns]', '', ''),
    ('sender.slept', 121, 'engine', 'The sender thread goes to sleep.', 'busy_ns [ns]', 'queue_length', '', '', ''),
    ('client.sent', 130, 'client', 'The client sends the request.', 'prompt_tokens [tokens]', '', '', '', 'client_request_id'),
    ('client.first_token', 131, 'client', 'The first content has arrived at the client.', '', '', '', '', ''),
    ('client.done', 132, 'client', 'The answer has arrived whole.', 'output_tokens [tokens]', '', '', '', ''),
    ('client.failed', 133, 'client', 'The client gave up, or got an error.', 'status', '', '', '', 'reason'),
    ('transfer.begun', 134, 'transfer', 'The side that drives the transfer turns to it: descriptors, post and wire come next.', 'rank', '', '', '', 'mode'),
    ('prefill.handed_over', 135, 'prefill', 'P''s worker reports that the KV is with D, so that its blocks can go.', 'rank', '', '', '', ''),
    ('prefill.checked', 136, 'prefill', 'P''s worker knows the checksum of a block that it has computed.', 'rank', 'block', 'checksum', 'checked_bytes [bytes]', 'decode_request_id'),
    ('decode.checked', 137, 'decode', 'D''s worker knows the checksum of a block that has arrived.', 'rank', 'block', 'checksum', 'checked_bytes [bytes]', ''),
    ('transfer.unchecked', 138, 'transfer', 'A worker could not take the checksum of blocks that it should have.', 'rank', 'blocks [blocks]', '', '', 'reason'),
    ('thread.placed', 139, 'process', 'A look, in each second with a step, at the threads of a worker''s process: where its forward thread is, and who is beside it.', 'cpu', 'beside', 'running', 'looked', 'threads'),
    ('prefill.copy_started', 140, 'prefill', 'P''s worker begins to copy the request''s blocks of a step to its host buffer; the device does so once the step''s forward has ended.', 'rank', 'blocks [blocks]', '', '', ''),
    ('prefill.copied', 141, 'prefill', 'These blocks are in P''s host buffer.', 'rank', 'blocks [blocks]', 'copied_bytes [bytes]', '', ''),
    ('decode.copy_started', 142, 'decode', 'D''s worker begins to copy the request''s blocks from its host buffer; the device does so once the forward that runs has ended.', 'rank', 'blocks [blocks]', '', '', ''),
    ('decode.copied', 143, 'decode', 'The request''s blocks have left D''s host buffer for the device.', 'rank', 'blocks [blocks]', 'copied_bytes [bytes]', '', '')
) AS v(stage, code, "where", doc, a, b, c, d, ref);
COMMENT ON VIEW vocabulary IS 'What every stage means and what it keeps in a, b, c, d and ref.';
COMMENT ON COLUMN vocabulary."stage" IS 'Name of the stage.';
COMMENT ON COLUMN vocabulary."code" IS 'Its code on the wire.';
COMMENT ON COLUMN vocabulary."where" IS 'The kind of process that stamps it.';
COMMENT ON COLUMN vocabulary."doc" IS 'What it says.';
COMMENT ON COLUMN vocabulary."a" IS 'Name and unit of payload a.';
COMMENT ON COLUMN vocabulary."b" IS 'Name and unit of payload b.';
COMMENT ON COLUMN vocabulary."c" IS 'Name and unit of payload c.';
COMMENT ON COLUMN vocabulary."d" IS 'Name and unit of payload d.';
COMMENT ON COLUMN vocabulary."ref" IS 'Name of the text payload.';

CREATE VIEW cause AS
SELECT * FROM (VALUES
    ('client.hop', 'coordination', 'coordination', 'client', 'The request is on its way from the client to the router.', 'router placement, keep-alive connections, fewer hops'),
    ('router.decide', 'coordination', 'coordination', 'router', 'The router reads the request and chooses P and D.', 'a cheaper policy, more router processes'),
    ('router.dispatch', 'coordination', 'coordination', 'router', 'The router prepares and sends a leg: the prefill leg, or the decode leg once it may.', 'concurrent dispatch, more router processes'),
    ('prefill.hop', 'coordination', 'coordination', 'prefill', 'The prefill leg is on its way to P''s HTTP server.', 'router placement, keep-alive connections, fewer hops'),
    ('prefill.frontend', 'coordination', 'coordination', 'prefill', 'P''s front end reads, tokenises and hands over the request, or serialises the reply.', 'more API server processes, lighter front end, prompts sent as token ids'),
    ('prefill.step_boundary', 'coordination', 'coordination', 'prefill', 'The request reached P''s core while a step ran and waits for that step to end.', 'shorter steps, smaller chunks'),
    ('prefill.queue', 'compute.queue', 'compute', 'prefill', 'P''s scheduler passed the request over: computing requests hold the slots, the token budget or the blocks.', 'more or faster accelerators, other batching'),
    ('prefill.capacity', 'coordination', 'coordination', 'prefill', 'P''s scheduler passed the request over while no step computed: finished requests still hold the blocks.', 'shorter leases, earlier release'),
    ('prefill.launch', 'coordination', 'coordination', 'prefill', 'A step that works on the request is on its way from P''s scheduler to the workers.', 'fewer ranks, a lighter executor'),
    ('prefill.forward', 'compute.run', 'compute', 'prefill', 'A forward step on P works on the prompt.', 'more or faster accelerators, other batching'),
    ('prefill.sample', 'compute.run', 'compute', 'prefill', 'The same step on P samples and P''s scheduler takes in the result.', 'more or faster accelerators, other batching'),
    ('prefill.others', 'compute.queue', 'compute', 'prefill', 'Between the request''s own chunks P runs steps that work on other requests.', 'more or faster accelerators, other batching'),
    ('processor.wait', 'coordination', 'coordination', 'engine', 'A thread that works on the request could have run and had no processor: in a step, a post, or until it looked for the KV.', 'cores that nobody else wants: fewer threads and processes beside the engine, other pinning'),
    ('step.connector', 'coordination', 'coordination', 'engine', 'The connector works on the forward thread inside a step that works on the request.', 'less connector work inside steps, another connector'),
    ('prefill.reply', 'coordination', 'coordination', 'prefill', 'P''s reply is on its way back to the router.', 'router placement, keep-alive connections, fewer hops'),
    ('decode.hop', 'coordination', 'coordination', 'decode', 'The decode leg is on its way to D''s HTTP server.', 'router placement, keep-alive connections, fewer hops'),
    ('decode.frontend', 'coordination', 'coordination', 'decode', 'D''s front end reads, tokenises and hands over the request, or detokenises and writes the first token.', 'more API server processes, lighter front end, prompts sent as token ids'),
    ('decode.step_boundary', 'coordination', 'coordination', 'decode', 'The request could go on but D''s running step has to end first.', 'shorter steps, another order'),
    ('decode.queue', 'compute.queue', 'compute', 'decode', 'D''s scheduler passed the request over while its steps computed others.', 'more or faster accelerators, other batching'),
    ('decode.capacity', 'coordination', 'coordination', 'decode', 'D''s scheduler passed the request over while the blocks were held by requests that wait for KV themselves.', 'more KV memory on D, shorter waits for KV'),
    ('submit.wait', 'coordination', 'coordination', 'decode', 'The destination is prepared, and the order to load rides behind D''s step to the worker.', 'dispatch outside the step, a reader thread'),
    ('stage.wait', 'coordination', 'coordination', 'prefill', 'P has finished and the list of blocks rides behind P''s step to the sender.', 'dispatch outside the step'),
    ('writer.wake', 'coordination', 'coordination', 'prefill', 'P''s sender thread sleeps although its work has arrived.', 'a sender thread that is woken by the message, or another connector'),
    ('writer.busy', 'coordination', 'coordination', 'prefill', 'P''s sender thread works on something else.', 'more sender threads, cheaper posts'),
    ('registration.late', 'coordination', 'coordination', 'decode', 'P is ready to write and D''s registration has not been sent or is still on its way.', 'send both legs at once, choose D earlier'),
    ('handshake', 'coordination', 'coordination', 'transfer', 'The pair exchanges agent metadata before its first transfer.', 'warm the pair up, proactive handshakes'),
    ('prepare', 'coordination', 'coordination', 'transfer', 'The side that drives the transfer works out blocks and descriptors.', 'larger blocks, fewer descriptors'),
    ('post', 'transfer', 'transfer', 'transfer', 'The transfer is being posted.', 'fewer or larger descriptors'),
    ('host.copy', 'transfer', 'transfer', 'transfer', 'The KV is copied between a device and the host buffer that NIXL uses: on P ahead of the hand-off, on D behind it.', 'a buffer on the device, where NIXL can register it (`kv_buffer_device`)'),
    ('wire', 'transfer', 'transfer', 'transfer', 'The bytes are on the wire.', 'faster network, locality'),
    ('detection', 'coordination', 'coordination', 'decode', 'The bytes have arrived and nobody has noticed yet.', 'poll outside the step, notification by interrupt'),
    ('report', 'coordination', 'coordination', 'decode', 'D''s worker knows that the KV is there and D''s scheduler does not yet.', 'report outside the step'),
    ('decode.launch', 'coordination', 'coordination', 'decode', 'A step of D with the request is on its way from the scheduler to the workers.', 'fewer ranks, a lighter executor'),
    ('decode.first_step', 'compute.run', 'compute', 'decode', 'D computes the first token again, which P had already sampled.', 'a connector that hands over P''s token'),
    ('decode.prefill', 'compute.run', 'compute', 'decode', 'D computes prompt tokens itself: no hand-off, a failed load, or a part that was not handed over.', 'find out why the KV did not come'),
    ('decode.sample', 'compute.run', 'compute', 'decode', 'A step of D with the request samples, and D''s scheduler takes in the result.', 'more or faster accelerators, other batching'),
    ('decode.others', 'compute.queue', 'compute', 'decode', 'Between the request''s own steps D runs steps that work on other requests.', 'more or faster accelerators, other batching'),
    ('decode.reply', 'coordination', 'coordination', 'decode', 'The first token is on its way from D''s HTTP server through the router.', 'router placement, keep-alive connections, fewer hops'),
    ('attempt.lost', 'coordination', 'coordination', 'router', 'An earlier attempt under the same id was made and lost, and this one had to wait for that.', 'find out why attempts are lost; longer time-outs, other engines'),
    ('client.reply', 'coordination', 'coordination', 'client', 'The first token is on its way to the client.', 'router placement, keep-alive connections, fewer hops'),
    ('unattributed', 'unattributed', 'unattributed', 'process', 'No recorded event explains this time.', 'instrument the part that is missing, or look for a stopped process'),
    ('registration', 'coordination', 'coordination', 'decode', 'D''s leg arrives, blocks are reserved and the registration is sent while P computes.', 'nothing, while it is hidden'),
    ('prefill.return', 'coordination', 'coordination', 'prefill', 'P''s reply travels while the hand-off is already under way.', 'nothing, while it is hidden'),
    ('sender.poll', 'coordination', 'coordination', 'prefill', 'P learns that its write is done, which only frees P''s blocks.', 'nothing, while it is hidden'),
    ('decode.turn', 'coordination', 'coordination', 'decode', 'Between two of its steps D''s scheduler makes up the next one.', 'asynchronous scheduling, fewer requests a step'),
    ('decode.token', 'compute.run', 'compute', 'decode', 'A forward step on D makes the next tokens of the requests in it, and nothing else.', 'more or faster accelerators, other batching'),
    ('decode.mixed', 'compute.run', 'compute', 'decode', 'A forward step on D makes the next tokens and works on somebody''s prompt too.', 'smaller chunks, no local prefills on D')
) AS v(cause, class, answer, "where", doc, remedy);
COMMENT ON VIEW cause IS 'What every cause means, which class it counts for, and what usually helps.';
COMMENT ON COLUMN cause."cause" IS 'Name of the cause.';
COMMENT ON COLUMN cause."class" IS 'Class it counts for.';
COMMENT ON COLUMN cause."answer" IS 'The coarse class.';
COMMENT ON COLUMN cause."where" IS 'Where the time passes.';
COMMENT ON COLUMN cause."doc" IS 'What it says.';
COMMENT ON COLUMN cause."remedy" IS 'What usually helps.';

CREATE VIEW engine_process AS
WITH stated AS (
  SELECT
    p.process, p.domain, p.host, p.pid, p.parent_pid, p.started_ns, p.first_ns, p.last_ns, p.lost_records,
    coalesce(map_extract(p.facts, 'kind')[1], '') AS kind, coalesce(map_extract(p.facts, 'engine_id')[1], '') AS engine, coalesce(map_extract(p.facts, 'role')[1], '') AS role,
    TRY_CAST(map_extract(p.facts, 'rank')[1] AS BIGINT) AS rank
  FROM process AS p
), joined AS (
  SELECT
    p.*, coalesce(c.process, p.process) AS core,
    coalesce(nullif(p.engine, ''), nullif(child.engine, ''), '') AS known_engine
  FROM stated AS p
    LEFT JOIN stated AS c ON p.kind = 'worker' AND c.kind = 'core' AND c.domain = p.domain AND c.pid = p.parent_pid
      AND c.started_ns <= p.started_ns
    LEFT JOIN stated AS child ON p.kind = 'api' AND child.kind = 'core' AND child.domain = p.domain
      AND child.parent_pid = p.pid AND child.started_ns >= p.started_ns
  QUALIFY row_number() OVER (PARTITION BY p.process ORDER BY c.started_ns DESC, child.started_ns) = 1
)
SELECT
  process, core, kind, known_engine AS engine, role, rank, host, pid, to_timestamp((started_ns // 1000) / 1e6) AS started,
  to_timestamp((first_ns // 1000) / 1e6) AS first_at, to_timestamp((last_ns // 1000) / 1e6) AS last_at, lost_records
FROM joined;
COMMENT ON VIEW engine_process IS 'Processes with the facts that matter, and the engine core that each belongs to.';
COMMENT ON COLUMN engine_process."process" IS 'Number of the process.';
COMMENT ON COLUMN engine_process."core" IS 'The engine core it works for (its parent, where that is one), else itself.';
COMMENT ON COLUMN engine_process."kind" IS 'router, api, core or worker; client or engine where it was imported.';
COMMENT ON COLUMN engine_process."engine" IS 'Engine id, '''' if it is none.';
COMMENT ON COLUMN engine_process."role" IS 'vLLM''s kv_role.';
COMMENT ON COLUMN engine_process."rank" IS 'Tensor-parallel rank, NULL where there is none.';
COMMENT ON COLUMN engine_process."host" IS 'Id of its host.';
COMMENT ON COLUMN engine_process."pid" IS 'Process id on its host.';
COMMENT ON COLUMN engine_process."started" IS 'When it started.';
COMMENT ON COLUMN engine_process."first_at" IS 'Its first event.';
COMMENT ON COLUMN engine_process."last_at" IS 'Its last event.';
COMMENT ON COLUMN engine_process."lost_records" IS 'Records that it could not keep.';

CREATE VIEW event_named AS
SELECT
  to_timestamp((e.t_ns // 1000) / 1e6) AS ts, e.t_ns, e.process, p.kind, p.engine, e.stage, e.request,
  CASE e.stage
    WHEN 'clock.anchor' THEN map(['wall_ns', 'uncertainty_ns'], [e.a, e.b])
    WHEN 'spool.dropped' THEN map(['code', 'count'], [e.a, e.b])
    WHEN 'router.received' THEN map(['attempt', 'body_bytes'], [e.a, e.b])
    WHEN 'router.decided' THEN map(['prefill', 'decode', 'prefill_inflight', 'decode_inflight'], [e.a, e.b, e.c, e.d])
    WHEN 'router.candidate' THEN map(['leg', 'index', 'inflight', 'tokens'], [e.a, e.b, e.c, e.d])
    WHEN 'router.prefill_returned' THEN map(['status', 'handed_over'], [e.a, e.b])
    WHEN 'router.done' THEN map(['status', 'chunks'], [e.a, e.b])
    WHEN 'router.failed' THEN map(['status'], [e.a])
    WHEN 'router.traced' THEN map(['trace_high', 'trace_low', 'parent_span', 'own_span'], [e.a, e.b, e.c, e.d])
    WHEN 'prefill.http_responded' THEN map(['status'], [e.a])
    WHEN 'prefill.http_done' THEN map(['status'], [e.a])
    WHEN 'decode.first_token_out' THEN map(['status'], [e.a])
    WHEN 'decode.http_done' THEN map(['status', 'chunks'], [e.a, e.b])
    WHEN 'prefill.enqueued' THEN map(['prompt_tokens', 'arrival_wall_ns', 'intake_ns'], [e.a, e.b, e.d])
    WHEN 'prefill.considered' THEN map(['local_tokens', 'remote_tokens'], [e.a, e.b])
    WHEN 'prefill.allocated' THEN map(['blocks', 'remote_tokens', 'looked_ns'], [e.a, e.b, e.c])
    WHEN 'prefill.scheduled' THEN map(['step', 'tokens', 'computed_tokens', 'prompt_tokens'], [e.a, e.b, e.c, e.d])
    WHEN 'prefill.finished' THEN map(['blocks', 'kept'], [e.a, e.b])
    WHEN 'prefill.staged' THEN map(['rank'], [e.a])
    WHEN 'sender.picked' THEN map(['rank'], [e.a])
    WHEN 'prefill.lease_expired' THEN map(['rank'], [e.a])
    WHEN 'prefill.lease_started' THEN map(['rank', 'duration_ns'], [e.a, e.b])
    WHEN 'prefill.lease_extended' THEN map(['rank'], [e.a])
    WHEN 'decode.enqueued' THEN map(['prompt_tokens', 'arrival_wall_ns', 'remote', 'intake_ns'], [e.a, e.b, e.c, e.d])
    WHEN 'decode.considered' THEN map(['local_tokens', 'remote_tokens'], [e.a, e.b])
    WHEN 'decode.allocated' THEN map(['blocks', 'remote_tokens', 'looked_ns'], [e.a, e.b, e.c])
    WHEN 'decode.registration_queued' THEN map(['rank'], [e.a])
    WHEN 'decode.registration_sent' THEN map(['rank', 'message_bytes', 'peer_rank'], [e.a, e.b, e.c])
    WHEN 'decode.load_started' THEN map(['rank', 'blocks'], [e.a, e.b])
    WHEN 'decode.reported' THEN map(['rank', 'connector'], [e.a, e.b])
    WHEN 'decode.scheduled' THEN map(['step', 'tokens', 'computed_tokens', 'prompt_tokens'], [e.a, e.b, e.c, e.d])
    WHEN 'decode.finished' THEN map(['output_tokens'], [e.a])
    WHEN 'decode.load_failed' THEN map(['rank', 'blocks'], [e.a, e.b])
    WHEN 'handshake.started' THEN map(['rank'], [e.a])
    WHEN 'handshake.ended' THEN map(['rank', 'ok'], [e.a, e.b])
    WHEN 'registration.received' THEN map(['rank'], [e.a])
    WHEN 'transfer.matched' THEN map(['rank'], [e.a])
    WHEN 'transfer.prepared' THEN map(['transfer', 'descriptors', 'rank'], [e.a, e.b, e.c])
    WHEN 'transfer.post_started' THEN map(['transfer'], [e.a])
    WHEN 'transfer.post_ended' THEN map(['transfer', 'moved_bytes', 'descriptors', 'done'], [e.a, e.b, e.c, e.d])
    WHEN 'transfer.done' THEN map(['transfer', 'last_pending_ns', 'polls'], [e.a, e.b, e.c])
    WHEN 'transfer.failed' THEN map(['transfer'], [e.a])
    WHEN 'transfer.notified' THEN map(['rank'], [e.a])
    WHEN 'transfer.post_starved' THEN map(['transfer', 'starved_ns'], [e.a, e.b])
    WHEN 'transfer.notice_starved' THEN map(['rank', 'starved_ns', 'since_ns'], [e.a, e.b, e.c])
    WHEN 'transfer.probed' THEN map(['transfer', 'last_pending_ns'], [e.a, e.b])
    WHEN 'notification.orphaned' THEN map(['rank'], [e.a])
    WHEN 'step.scheduled' THEN map(['step', 'tokens', 'requests', 'waiting'], [e.a, e.b, e.c, e.d])
    WHEN 'step.started' THEN map(['step', 'rank'], [e.a, e.b])
    WHEN 'step.forwarded' THEN map(['step', 'rank', 'asynchronous'], [e.a, e.b, e.c])
    WHEN 'step.connected' THEN map(['step', 'rank', 'connector_ns', 'before_forward_ns'], [e.a, e.b, e.c, e.d])
    WHEN 'step.ended' THEN map(['step', 'starved_ns', 'ordered_ns'], [e.a, e.b, e.c])
    WHEN 'step.worker_starved' THEN map(['step', 'rank', 'forward_starved_ns', 'connector_starved_ns'], [e.a, e.b, e.c, e.d])
    WHEN 'step.result_starved' THEN map(['step', 'rank', 'result_starved_ns'], [e.a, e.b, e.c])
    WHEN 'sender.woke' THEN map(['slept_ns', 'queue_length', 'signal_delay_ns'], [e.a, e.b, e.c])
    WHEN 'sender.slept' THEN map(['busy_ns', 'queue_length'], [e.a, e.b])
    WHEN 'client.sent' THEN map(['prompt_tokens'], [e.a])
    WHEN 'client.done' THEN map(['output_tokens'], [e.a])
    WHEN 'client.failed' THEN map(['status'], [e.a])
    WHEN 'transfer.begun' THEN map(['rank'], [e.a])
    WHEN 'prefill.handed_over' THEN map(['rank'], [e.a])
    WHEN 'prefill.checked' THEN map(['rank', 'block', 'checksum', 'checked_bytes'], [e.a, e.b, e.c, e.d])
    WHEN 'decode.checked' THEN map(['rank', 'block', 'checksum', 'checked_bytes'], [e.a, e.b, e.c, e.d])
    WHEN 'transfer.unchecked' THEN map(['rank', 'blocks'], [e.a, e.b])
    WHEN 'thread.placed' THEN map(['cpu', 'beside', 'running', 'looked'], [e.a, e.b, e.c, e.d])
    WHEN 'prefill.copy_started' THEN map(['rank', 'blocks'], [e.a, e.b])
    WHEN 'prefill.copied' THEN map(['rank', 'blocks', 'copied_bytes'], [e.a, e.b, e.c])
    WHEN 'decode.copy_started' THEN map(['rank', 'blocks'], [e.a, e.b])
    WHEN 'decode.copied' THEN map(['rank', 'blocks', 'copied_bytes'], [e.a, e.b, e.c])
    ELSE map(CAST([] AS VARCHAR[]), CAST([] AS BIGINT[]))
  END AS payload,
  e.ref
FROM event AS e LEFT JOIN engine_process AS p USING (process);
COMMENT ON VIEW event_named IS 'Events with their payload under its own names.';
COMMENT ON COLUMN event_named."ts" IS 'When.';
COMMENT ON COLUMN event_named."t_ns" IS 'When, unix ns.';
COMMENT ON COLUMN event_named."process" IS 'Process that emitted it.';
COMMENT ON COLUMN event_named."kind" IS 'Kind of that process.';
COMMENT ON COLUMN event_named."engine" IS 'Its engine id.';
COMMENT ON COLUMN event_named."stage" IS 'Which point.';
COMMENT ON COLUMN event_named."request" IS 'The request''s id in that process.';
COMMENT ON COLUMN event_named."payload" IS 'Numbers by name.';
COMMENT ON COLUMN event_named."ref" IS 'The text payload.';

CREATE VIEW ttft AS
WITH per_cause AS (
  SELECT request_key, cause, sum(end_ns - start_ns)::BIGINT AS cause_ns FROM segment GROUP BY request_key, cause
), top AS (
  SELECT request_key, arg_max(cause, cause_ns) AS top_cause, max(cause_ns) AS top_cause_ns
  FROM per_cause GROUP BY request_key
)
SELECT
  r.request_id, r.client_request_id, r.attempt, to_timestamp((r.start_ns // 1000) / 1e6) AS started, r.mode, r.verdict, r.scope,
  r.prefill_engine, r.decode_engine, r.prompt_tokens, r.ttft_ns / 1e6 AS ttft_ms, r.ttft_ns, r.compute_ns,
  r.compute_run_ns, r.compute_queue_ns, r.coordination_ns, r.transfer_ns, r.transfer_low_ns, r.transfer_high_ns,
  r.unattributed_ns, top.top_cause, top.top_cause_ns, r.crosses_hosts, r.note
FROM request AS r LEFT JOIN top USING (request_key);
COMMENT ON VIEW ttft IS 'Every request''s time to first token and where it went: the shares sum to ttft_ns exactly.';
COMMENT ON COLUMN ttft."request_id" IS 'The request.';
COMMENT ON COLUMN ttft."client_request_id" IS 'The id that the client sent; may repeat.';
COMMENT ON COLUMN ttft."attempt" IS '0 for the first attempt.';
COMMENT ON COLUMN ttft."started" IS 'First moment seen.';
COMMENT ON COLUMN ttft."mode" IS 'push, pull, local or unknown.';
COMMENT ON COLUMN ttft."verdict" IS 'How it ended.';
COMMENT ON COLUMN ttft."scope" IS 'Where the first token was seen. Scopes do not compare.';
COMMENT ON COLUMN ttft."prefill_engine" IS 'Engine id of P.';
COMMENT ON COLUMN ttft."decode_engine" IS 'Engine id of D.';
COMMENT ON COLUMN ttft."prompt_tokens" IS 'Length of the prompt; NULL if nobody said it.';
COMMENT ON COLUMN ttft."ttft_ms" IS 'Time to first token in ms; NULL if there was none.';
COMMENT ON COLUMN ttft."ttft_ns" IS 'The same in ns.';
COMMENT ON COLUMN ttft."compute_ns" IS 'Share.';
COMMENT ON COLUMN ttft."compute_run_ns" IS 'Part of compute.';
COMMENT ON COLUMN ttft."compute_queue_ns" IS 'Part of compute.';
COMMENT ON COLUMN ttft."coordination_ns" IS 'Share.';
COMMENT ON COLUMN ttft."transfer_ns" IS 'Share.';
COMMENT ON COLUMN ttft."transfer_low_ns" IS 'The least that transfer can have been.';
COMMENT ON COLUMN ttft."transfer_high_ns" IS 'The most that transfer can have been.';
COMMENT ON COLUMN ttft."unattributed_ns" IS 'Share: time that no event explains.';
COMMENT ON COLUMN ttft."top_cause" IS 'The cause that took most of it.';
COMMENT ON COLUMN ttft."top_cause_ns" IS 'How much that was.';
COMMENT ON COLUMN ttft."crosses_hosts" IS 'Some segment rests on two hosts'' wall clocks.';
COMMENT ON COLUMN ttft."note" IS 'What else is to be said.';

CREATE VIEW critical_path AS
SELECT
  r.request_id, r.attempt, s.position, to_timestamp((s.start_ns // 1000) / 1e6) AS started, s.start_ns,
  s.end_ns - s.start_ns AS duration_ns, s.class, split_part(s.class, '.', 1) AS answer, s.cause, s."where",
  s.waited_for, s.crosses_hosts
FROM segment AS s JOIN request AS r USING (request_key);
COMMENT ON VIEW critical_path IS 'Every segment of every request''s critical path, with the request''s id.';
COMMENT ON COLUMN critical_path."request_id" IS 'The request.';
COMMENT ON COLUMN critical_path."attempt" IS '0 for the first attempt.';
COMMENT ON COLUMN critical_path."position" IS 'Order along the path, from 0.';
COMMENT ON COLUMN critical_path."started" IS 'When it began.';
COMMENT ON COLUMN critical_path."start_ns" IS 'Unix ns.';
COMMENT ON COLUMN critical_path."duration_ns" IS 'How long.';
COMMENT ON COLUMN critical_path."class" IS 'The class, compute told apart as run and queue.';
COMMENT ON COLUMN critical_path."answer" IS 'The coarse class.';
COMMENT ON COLUMN critical_path."cause" IS 'The finer name.';
COMMENT ON COLUMN critical_path."where" IS 'Where the time passed.';
COMMENT ON COLUMN critical_path."waited_for" IS 'What the request waited for.';
COMMENT ON COLUMN critical_path."crosses_hosts" IS 'It rests on two hosts'' wall clocks.';

CREATE VIEW hidden_work AS
SELECT
  r.request_id, r.attempt, to_timestamp((h.start_ns // 1000) / 1e6) AS started, h.start_ns, h.duration_ns, h.slack_ns, h.class, h.cause,
  h."where"
FROM hidden AS h JOIN request AS r USING (request_key);
COMMENT ON VIEW hidden_work IS 'Work beside the critical path, with the request''s id.';
COMMENT ON COLUMN hidden_work."request_id" IS 'The request.';
COMMENT ON COLUMN hidden_work."attempt" IS '0 for the first attempt.';
COMMENT ON COLUMN hidden_work."started" IS 'When it began.';
COMMENT ON COLUMN hidden_work."start_ns" IS 'Unix ns.';
COMMENT ON COLUMN hidden_work."duration_ns" IS 'How long it took.';
COMMENT ON COLUMN hidden_work."slack_ns" IS 'How much longer it could have taken unnoticed.';
COMMENT ON COLUMN hidden_work."class" IS 'What it would have been charged to on the path.';
COMMENT ON COLUMN hidden_work."cause" IS 'The finer name.';
COMMENT ON COLUMN hidden_work."where" IS 'Where the time passed.';

CREATE VIEW tpot AS
WITH parts AS (
  SELECT request_key, coalesce(sum(duration_ns) FILTER (cause = 'decode.mixed'), 0)::BIGINT AS mixed_ns,
    coalesce(sum(duration_ns) FILTER (cause = 'unattributed'), 0)::BIGINT AS unattributed_ns
  FROM pace_part GROUP BY request_key
), others AS (
  SELECT b.request_key, sum(b.extension_ns)::BIGINT AS by_others_ns
  FROM blame AS b JOIN request AS r USING (request_key)
  WHERE b.blamed_request_id <> r.request_id GROUP BY b.request_key
)
SELECT
  r.request_id, r.attempt, to_timestamp((p.start_ns // 1000) / 1e6) AS started, r.mode, r.decode_engine, p.tokens, p.steps,
  p.tpot_ns / 1e6 AS tpot_ms, p.tpot_ns, p.itl_p50_ns, p.itl_max_ns, p.end_ns - p.start_ns AS decode_ns,
  p.extension_ns, p.occupancy_ns, coalesce(o.by_others_ns, 0)::BIGINT AS by_others_ns,
  coalesce(s.mixed_ns, 0)::BIGINT AS mixed_ns, coalesce(s.unattributed_ns, 0)::BIGINT AS unattributed_ns
FROM pace AS p JOIN request AS r USING (request_key) LEFT JOIN parts AS s USING (request_key)
  LEFT JOIN others AS o USING (request_key);
COMMENT ON VIEW tpot IS 'Every request''s time per output token after the first, and what made D''s steps longer.';
COMMENT ON COLUMN tpot."request_id" IS 'The request.';
COMMENT ON COLUMN tpot."attempt" IS '0 for the first attempt.';
COMMENT ON COLUMN tpot."started" IS 'D had its first token.';
COMMENT ON COLUMN tpot."mode" IS 'push, pull, local or unknown.';
COMMENT ON COLUMN tpot."decode_engine" IS 'Engine id of D.';
COMMENT ON COLUMN tpot."tokens" IS 'Tokens after the first.';
COMMENT ON COLUMN tpot."steps" IS 'Steps that made them.';
COMMENT ON COLUMN tpot."tpot_ms" IS 'Mean time per token after the first, ms.';
COMMENT ON COLUMN tpot."tpot_ns" IS 'The same in ns.';
COMMENT ON COLUMN tpot."itl_p50_ns" IS 'Median time between two steps that made tokens of it.';
COMMENT ON COLUMN tpot."itl_max_ns" IS 'The longest of those.';
COMMENT ON COLUMN tpot."decode_ns" IS 'From the first to the last token.';
COMMENT ON COLUMN tpot."extension_ns" IS 'The part by which connector work on the forward thread made steps longer.';
COMMENT ON COLUMN tpot."occupancy_ns" IS 'How long the connector took there, whether or not it cost anything.';
COMMENT ON COLUMN tpot."by_others_ns" IS 'The part of it in which other requests'' transfers were posted, or KV copied.';
COMMENT ON COLUMN tpot."mixed_ns" IS 'Time in steps that worked on somebody''s prompt too.';
COMMENT ON COLUMN tpot."unattributed_ns" IS 'Time that no step explains.';

CREATE VIEW blamed AS
SELECT
  b.blamed_request_id AS request_id, any_value(c.mode) AS mode, any_value(c.moved_bytes) AS moved_bytes,
  any_value(c.descriptors) AS descriptors, count(DISTINCT b.request_key)::BIGINT AS victims,
  sum(b.extension_ns)::BIGINT AS extension_ns
FROM blame AS b JOIN request AS r USING (request_key)
  LEFT JOIN (SELECT request_id, any_value(mode) AS mode, max(moved_bytes) AS moved_bytes,
    max(descriptors) AS descriptors FROM request GROUP BY request_id) AS c ON c.request_id = b.blamed_request_id
WHERE b.blamed_request_id <> r.request_id
GROUP BY b.blamed_request_id;
COMMENT ON VIEW blamed IS 'The requests whose transfers made other requests'' steps longer.';
COMMENT ON COLUMN blamed."request_id" IS 'The request whose transfers were posted, or KV copied, on the forward thread.';
COMMENT ON COLUMN blamed."mode" IS 'push, pull, local or unknown; NULL if the request is not in the store.';
COMMENT ON COLUMN blamed."moved_bytes" IS 'Bytes moved by its transfers.';
COMMENT ON COLUMN blamed."descriptors" IS 'Descriptors of its transfers.';
COMMENT ON COLUMN blamed."victims" IS 'Other requests whose steps became longer.';
COMMENT ON COLUMN blamed."extension_ns" IS 'By how much, over all of them.';

CREATE VIEW under_way AS
SELECT request_key, request_id, coalesce(end_ns, start_ns) AS seen_ns
FROM request
WHERE ttft_ns IS NULL AND verdict = 'incomplete'
  AND EXISTS (SELECT 1 FROM run WHERE name = 'recorder.state' AND value = 'recording')
  AND coalesce(end_ns, start_ns) >= (SELECT max(coalesce(end_ns, start_ns)) FROM request) - 600000000000;
COMMENT ON VIEW under_way IS 'Requests that may still get their first token: they are called incomplete only since the recording goes on.';
COMMENT ON COLUMN under_way."request_key" IS 'Key of the request.';
COMMENT ON COLUMN under_way."request_id" IS 'The request.';
COMMENT ON COLUMN under_way."seen_ns" IS 'Last moment seen so far, unix ns; not longer ago than the recorder looks back.';

CREATE VIEW walk_request AS
SELECT * FROM query(walk_request_sql());
COMMENT ON VIEW walk_request IS 'The shares of every request, worked out by this view from the events.';
COMMENT ON COLUMN walk_request."request_id" IS 'The id that its front end was sent, or the engines'' without its suffix.';
COMMENT ON COLUMN walk_request."client_request_id" IS 'The id that the client sent; may repeat.';
COMMENT ON COLUMN walk_request."walked" IS 'Whether the view answers; else the row stands for all requests of that id.';
COMMENT ON COLUMN walk_request."unwalked" IS 'Why it does not answer, NULL if it does: ask the reference walk.';
COMMENT ON COLUMN walk_request."mode" IS 'push, pull, local or unknown.';
COMMENT ON COLUMN walk_request."scope" IS 'Where the first token was seen: router or engine.';
COMMENT ON COLUMN walk_request."prefill_engine" IS 'Engine id of P.';
COMMENT ON COLUMN walk_request."decode_engine" IS 'Engine id of D.';
COMMENT ON COLUMN walk_request."start_ns" IS 'First moment seen, unix ns.';
COMMENT ON COLUMN walk_request."first_token_ns" IS 'First content leaving for the client, unix ns; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."ttft_ns" IS 'Time to first token; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."compute_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."compute_run_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."compute_queue_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."coordination_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."transfer_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."transfer_low_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."transfer_high_ns" IS 'Share, as in table request; NULL where it is not walked, or no first token came.';
COMMENT ON COLUMN walk_request."unattributed_ns" IS 'Share: time that no event explains; NULL where it is not walked, or no first token came.';

CREATE VIEW walk_segment AS
SELECT * FROM query(walk_segment_sql());
COMMENT ON VIEW walk_segment IS 'The critical path of every walked request; neighbours may have one cause.';
COMMENT ON COLUMN walk_segment."request_id" IS 'Request it belongs to.';
COMMENT ON COLUMN walk_segment."class" IS 'compute.run, compute.queue, coordination, transfer or unattributed.';
COMMENT ON COLUMN walk_segment."cause" IS 'The finer name; the view `cause` says what it means.';
COMMENT ON COLUMN walk_segment."where" IS 'Where the time passed.';
COMMENT ON COLUMN walk_segment."start_ns" IS 'Unix ns.';
COMMENT ON COLUMN walk_segment."end_ns" IS 'Unix ns.';

CREATE MACRO walk_common_sql() AS '112490 letters, sha256 908c36f19ac002bbfc7ea178ff094f668adca5d491c8c70f37d038927e85a6f3';
COMMENT ON MACRO walk_common_sql IS 'What both views of the walk begin with.';
CREATE OR REPLACE MACRO walk_request_sql() AS walk_common_sql() || '32968 letters, sha256 fc33c43f7ae79e582748fdfdb90816a859f974bd894b5a8e8f0b385f5b2908aa';
COMMENT ON MACRO walk_request_sql IS 'The statement that view walk_request stands for.';
CREATE OR REPLACE MACRO walk_segment_sql() AS walk_common_sql() || '48739 letters, sha256 2191e7c0bedb84ffee57c59ad0e9e18e08b44ab200718091895e9a2eff35efbd';
COMMENT ON MACRO walk_segment_sql IS 'The statement that view walk_segment stands for.';

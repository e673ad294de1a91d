"""The vocabulary: every point in time that kvtrace knows, declared once, as values.

Wire codes, the DuckDB ENUM and column comments, the dependency graph, the documents' tables and the
exporters' names all derive from `STAGES` and `CAUSES`. Codes are append-only: a code is never
renumbered and never reused. Standard library only, since engine processes import this module.
"""

from __future__ import annotations

from kvtrace.kinds import Cause as Cause
from kvtrace.kinds import Class as Class
from kvtrace.kinds import Edge as Edge
from kvtrace.kinds import Field as Field
from kvtrace.kinds import Stage as Stage
from kvtrace.kinds import Where as Where

_causes: list[Cause] = []
_stages: list[Stage] = []
_points: list[Stage] = []
_edges: list[Edge] = []


def _cause(name: str, kind: Class, where: Where, doc: str, remedy: str, **by_mode: str) -> Cause:
    cause = Cause(name, kind, where, doc, remedy, **by_mode)
    _causes.append(cause)
    return cause


def _stage(code: int, name: str, where: Where, doc: str, *fields: Field) -> Stage:
    stage = Stage(code, name, where, doc, fields)
    _stages.append(stage)
    return stage


def _point(code: int, name: str, where: Where, doc: str) -> Stage:
    point = Stage(code, name, where, doc, derived=True)
    _points.append(point)
    return point


def _edge(before: Stage, after: Stage, cause: Cause, split: str = "") -> None:
    _edges.append(Edge(before, after, cause, split))


# One declaration a line: this is a table.
# fmt: off
_NET = "router placement, keep-alive connections, fewer hops"
_FRONT = "more API server processes, lighter front end, prompts sent as token ids"
_THREAD = "a sender thread that is woken by the message, or another connector"
_MORE = "more or faster accelerators, other batching"

# Causes: what a segment of the critical path is charged to -----------------------------------------

CLIENT_HOP = _cause("client.hop", Class.COORDINATION, Where.CLIENT, "The request is on its way from the client to the router.", _NET)
ROUTER_DECIDE = _cause("router.decide", Class.COORDINATION, Where.ROUTER, "The router reads the request and chooses P and D.", "a cheaper policy, more router processes")
ROUTER_DISPATCH = _cause("router.dispatch", Class.COORDINATION, Where.ROUTER, "The router prepares and sends a leg: the prefill leg, or the decode leg once it may.", "concurrent dispatch, more router processes", push="more router processes")
PREFILL_HOP = _cause("prefill.hop", Class.COORDINATION, Where.PREFILL, "The prefill leg is on its way to P's HTTP server.", _NET)
PREFILL_FRONTEND = _cause("prefill.frontend", Class.COORDINATION, Where.PREFILL, "P's front end reads, tokenises and hands over the request, or serialises the reply.", _FRONT)
PREFILL_BOUNDARY = _cause("prefill.step_boundary", Class.COORDINATION, Where.PREFILL, "The request reached P's core while a step ran and waits for that step to end.", "shorter steps, smaller chunks")
PREFILL_QUEUE = _cause("prefill.queue", Class.QUEUE, Where.PREFILL, "P's scheduler passed the request over: computing requests hold the slots, the token budget or the blocks.", _MORE)
PREFILL_CAPACITY = _cause("prefill.capacity", Class.COORDINATION, Where.PREFILL, "P's scheduler passed the request over while no step computed: finished requests still hold the blocks.", "shorter leases, earlier release")
PREFILL_LAUNCH = _cause("prefill.launch", Class.COORDINATION, Where.PREFILL, "A step that works on the request is on its way from P's scheduler to the workers.", "fewer ranks, a lighter executor")
PREFILL_FORWARD = _cause("prefill.forward", Class.RUN, Where.PREFILL, "A forward step on P works on the prompt.", _MORE)
PREFILL_SAMPLE = _cause("prefill.sample", Class.RUN, Where.PREFILL, "The same step on P samples and P's scheduler takes in the result.", _MORE)
PREFILL_OTHERS = _cause("prefill.others", Class.QUEUE, Where.PREFILL, "Between the request's own chunks P runs steps that work on other requests.", _MORE)
PROCESSOR_WAIT = _cause("processor.wait", Class.COORDINATION, Where.ENGINE, "A thread that works on the request could have run and had no processor: in a step, a post, or until it looked for the KV.", "cores that nobody else wants: fewer threads and processes beside the engine, other pinning")
STEP_CONNECTOR = _cause("step.connector", Class.COORDINATION, Where.ENGINE, "The connector works on the forward thread inside a step that works on the request.", "less connector work inside steps, another connector", push="read notifications off the forward thread, another connector", pull="move posting off the forward thread, another connector")
PREFILL_REPLY = _cause("prefill.reply", Class.COORDINATION, Where.PREFILL, "P's reply is on its way back to the router.", _NET)
DECODE_HOP = _cause("decode.hop", Class.COORDINATION, Where.DECODE, "The decode leg is on its way to D's HTTP server.", _NET)
DECODE_FRONTEND = _cause("decode.frontend", Class.COORDINATION, Where.DECODE, "D's front end reads, tokenises and hands over the request, or detokenises and writes the first token.", _FRONT)
DECODE_BOUNDARY = _cause("decode.step_boundary", Class.COORDINATION, Where.DECODE, "The request could go on but D's running step has to end first.", "shorter steps, another order")
DECODE_QUEUE = _cause("decode.queue", Class.QUEUE, Where.DECODE, "D's scheduler passed the request over while its steps computed others.", _MORE)
DECODE_CAPACITY = _cause("decode.capacity", Class.COORDINATION, Where.DECODE, "D's scheduler passed the request over while the blocks were held by requests that wait for KV themselves.", "more KV memory on D, shorter waits for KV", push="later reservation, more KV memory on D")
SUBMIT_WAIT = _cause("submit.wait", Class.COORDINATION, Where.DECODE, "The destination is prepared, and the order to load rides behind D's step to the worker.", "dispatch outside the step, a reader thread")
STAGE_WAIT = _cause("stage.wait", Class.COORDINATION, Where.PREFILL, "P has finished and the list of blocks rides behind P's step to the sender.", "dispatch outside the step")
WRITER_WAKE = _cause("writer.wake", Class.COORDINATION, Where.PREFILL, "P's sender thread sleeps although its work has arrived.", _THREAD)
WRITER_BUSY = _cause("writer.busy", Class.COORDINATION, Where.PREFILL, "P's sender thread works on something else.", "more sender threads, cheaper posts")
REGISTRATION_LATE = _cause("registration.late", Class.COORDINATION, Where.DECODE, "P is ready to write and D's registration has not been sent or is still on its way.", "send both legs at once, choose D earlier")
HANDSHAKE = _cause("handshake", Class.COORDINATION, Where.TRANSFER, "The pair exchanges agent metadata before its first transfer.", "warm the pair up, proactive handshakes")
PREPARE = _cause("prepare", Class.COORDINATION, Where.TRANSFER, "The side that drives the transfer works out blocks and descriptors.", "larger blocks, fewer descriptors")
POST = _cause("post", Class.TRANSFER, Where.TRANSFER, "The transfer is being posted.", "fewer or larger descriptors")
HOST_COPY = _cause("host.copy", Class.TRANSFER, Where.TRANSFER, "The KV is copied between a device and the host buffer that NIXL uses: on P ahead of the hand-off, on D behind it.", "a buffer on the device, where NIXL can register it (`kv_buffer_device`)")
WIRE = _cause("wire", Class.TRANSFER, Where.TRANSFER, "The bytes are on the wire.", "faster network, locality")
DETECTION = _cause("detection", Class.COORDINATION, Where.DECODE, "The bytes have arrived and nobody has noticed yet.", "poll outside the step, notification by interrupt", push="read notifications outside the step, or by interrupt", pull="poll outside the step")
REPORT = _cause("report", Class.COORDINATION, Where.DECODE, "D's worker knows that the KV is there and D's scheduler does not yet.", "report outside the step")
DECODE_LAUNCH = _cause("decode.launch", Class.COORDINATION, Where.DECODE, "A step of D with the request is on its way from the scheduler to the workers.", "fewer ranks, a lighter executor")
FIRST_STEP = _cause("decode.first_step", Class.RUN, Where.DECODE, "D computes the first token again, which P had already sampled.", "a connector that hands over P's token")
DECODE_PREFILL = _cause("decode.prefill", Class.RUN, Where.DECODE, "D computes prompt tokens itself: no hand-off, a failed load, or a part that was not handed over.", "find out why the KV did not come")
DECODE_SAMPLE = _cause("decode.sample", Class.RUN, Where.DECODE, "A step of D with the request samples, and D's scheduler takes in the result.", _MORE)
DECODE_OTHERS = _cause("decode.others", Class.QUEUE, Where.DECODE, "Between the request's own steps D runs steps that work on other requests.", _MORE)
DECODE_REPLY = _cause("decode.reply", Class.COORDINATION, Where.DECODE, "The first token is on its way from D's HTTP server through the router.", _NET)
ATTEMPT_LOST = _cause("attempt.lost", Class.COORDINATION, Where.ROUTER, "An earlier attempt under the same id was made and lost, and this one had to wait for that.", "find out why attempts are lost; longer time-outs, other engines")
CLIENT_REPLY = _cause("client.reply", Class.COORDINATION, Where.CLIENT, "The first token is on its way to the client.", _NET)
UNKNOWN = _cause("unattributed", Class.UNATTRIBUTED, Where.PROCESS, "No recorded event explains this time.", "instrument the part that is missing, or look for a stopped process")
# Causes that only hidden work has.
REGISTRATION = _cause("registration", Class.COORDINATION, Where.DECODE, "D's leg arrives, blocks are reserved and the registration is sent while P computes.", "nothing, while it is hidden")
PREFILL_RETURN = _cause("prefill.return", Class.COORDINATION, Where.PREFILL, "P's reply travels while the hand-off is already under way.", "nothing, while it is hidden")
SENDER_POLL = _cause("sender.poll", Class.COORDINATION, Where.PREFILL, "P learns that its write is done, which only frees P's blocks.", "nothing, while it is hidden")

# Causes that only the pace of the tokens after the first has.
DECODE_TURN = _cause("decode.turn", Class.COORDINATION, Where.DECODE, "Between two of its steps D's scheduler makes up the next one.", "asynchronous scheduling, fewer requests a step")
DECODE_TOKEN = _cause("decode.token", Class.RUN, Where.DECODE, "A forward step on D makes the next tokens of the requests in it, and nothing else.", _MORE)
DECODE_MIXED = _cause("decode.mixed", Class.RUN, Where.DECODE, "A forward step on D makes the next tokens and works on somebody's prompt too.", "smaller chunks, no local prefills on D")

# Stages ----------------------------------------------------------------------------------------------

_RANK = Field("a", "rank", "", "Tensor-parallel rank of the worker.")
_STEP = Field("a", "step", "", "Number of the engine step, counted by the scheduler.")
_XFER = Field("a", "transfer", "", "Number of the transfer, unique within its process.")

ANCHOR = _stage(1, "clock.anchor", Where.PROCESS, "A reading of the monotonic and the wall clock, taken together.", Field("a", "wall_ns", "ns", "Wall clock."), Field("b", "uncertainty_ns", "ns", "Time between the readings around it."))
DROPPED = _stage(2, "spool.dropped", Where.PROCESS, "Records lost since the process began, by stage.", Field("a", "code", "", "Code of the stage whose records were lost."), Field("b", "count", "", "Records lost so far."))
DISABLED = _stage(3, "tracing.disabled", Where.PROCESS, "Tracing switched itself off in this process after an error.", Field("ref", "reason", "", "Where and what."))

ROUTER_RECEIVED = _stage(10, "router.received", Where.ROUTER, "The router has the request's head.", Field("a", "attempt", "", "0 for the first attempt of a client request."), Field("b", "body_bytes", "bytes", "Size of the body."), Field("ref", "client_request_id", "", "The id that the client sent, if any."))
ROUTER_DECIDED = _stage(11, "router.decided", Where.ROUTER, "P and D are chosen.", Field("a", "prefill", "", "Index of P."), Field("b", "decode", "", "Index of D."), Field("c", "prefill_inflight", "", "Requests that the router had in flight on that P."), Field("d", "decode_inflight", "", "Requests that the router had in flight on that D."), Field("ref", "mode", "", "push or pull."))
ROUTER_CANDIDATE = _stage(12, "router.candidate", Where.ROUTER, "One candidate's queue as the router knew it when it chose.", Field("a", "leg", "", "0 prefill, 1 decode."), Field("b", "index", "", "Index of the candidate."), Field("c", "inflight", "", "Requests that the router had in flight there."), Field("d", "tokens", "tokens", "Prompt tokens of those, where known."), Field("ref", "url", "", "Address of the candidate."))
ROUTER_PREFILL_SENT = _stage(13, "router.prefill_sent", Where.ROUTER, "The prefill leg leaves the router.", Field("ref", "url", "", "Address of P."))
ROUTER_PREFILL_RETURNED = _stage(14, "router.prefill_returned", Where.ROUTER, "P's reply has arrived whole.", Field("a", "status", "", "HTTP status."), Field("b", "handed_over", "", "1 if the reply hands KV over."))
ROUTER_DECODE_SENT = _stage(15, "router.decode_sent", Where.ROUTER, "The decode leg leaves the router.", Field("ref", "url", "", "Address of D."))
ROUTER_FIRST_TOKEN = _stage(16, "router.first_token", Where.ROUTER, "The first content leaves for the client.")
ROUTER_DONE = _stage(17, "router.done", Where.ROUTER, "The answer has left whole.", Field("a", "status", "", "HTTP status."), Field("b", "chunks", "", "Content chunks sent."))
ROUTER_FAILED = _stage(18, "router.failed", Where.ROUTER, "The request failed.", Field("a", "status", "", "HTTP status sent to the client."), Field("ref", "reason", "", "What failed."))
ROUTER_CANCELLED = _stage(19, "router.cancelled", Where.ROUTER, "The client went away and both legs were cancelled.")

ROUTER_TRACED = _stage(20, "router.traced", Where.ROUTER, "The request's place in a trace: its client's, or one that begins here.", Field("a", "trace_high", "", "Upper half of the trace id."), Field("b", "trace_low", "", "Lower half of the trace id."), Field("c", "parent_span", "", "The client's span id, 0 if it sent none."), Field("d", "own_span", "", "The span id that the legs were sent, 0 if they were sent the client's."), Field("ref", "flags", "", "W3C trace flags, two hexadecimal digits."))

_STATUS = Field("a", "status", "", "HTTP status.")
PREFILL_HTTP_RECEIVED = _stage(30, "prefill.http_received", Where.PREFILL, "P's HTTP server has the request's head.")
PREFILL_HTTP_RESPONDED = _stage(31, "prefill.http_responded", Where.PREFILL, "P's HTTP server sends the reply's body.", _STATUS)
PREFILL_HTTP_DONE = _stage(32, "prefill.http_done", Where.PREFILL, "P's HTTP exchange has ended.", _STATUS)
DECODE_HTTP_RECEIVED = _stage(40, "decode.http_received", Where.DECODE, "D's HTTP server has the request's head.")
DECODE_FIRST_TOKEN_OUT = _stage(41, "decode.first_token_out", Where.DECODE, "The first content leaves D's HTTP server.", _STATUS)
DECODE_HTTP_DONE = _stage(42, "decode.http_done", Where.DECODE, "D's HTTP exchange has ended.", _STATUS, Field("b", "chunks", "", "Content chunks sent."))
DECODE_HTTP_DISCONNECTED = _stage(43, "decode.http_disconnected", Where.DECODE, "The peer of D's HTTP server went away before the end.")
PREFILL_HTTP_DISCONNECTED = _stage(44, "prefill.http_disconnected", Where.PREFILL, "The peer of P's HTTP server went away before the end.")

_PROMPT, _INTAKE = Field("a", "prompt_tokens", "tokens", "Length of the prompt."), Field("d", "intake_ns", "ns", "For how long it had been in the engine core's queue, which is emptied between steps.")
_SCHED = (_STEP, Field("b", "tokens", "tokens", "Tokens of the request in this step."), Field("c", "computed_tokens", "tokens", "Tokens already computed before the step."), Field("d", "prompt_tokens", "tokens", "Length of the prompt."))
_CONSIDERED = (Field("a", "local_tokens", "tokens", "Tokens found in the local prefix cache."), Field("b", "remote_tokens", "tokens", "Tokens that the connector will bring."))
_ALLOCATED = (Field("a", "blocks", "blocks", "Blocks the request holds."), Field("b", "remote_tokens", "tokens", "Tokens that the connector will bring."), Field("ref", "transfer_id", "", "The transfer_id that the leg was sent, if any."), Field("c", "looked_ns", "ns", "Time since the look of the scheduler that led to it; 0 where nobody says."))
PREFILL_ENQUEUED = _stage(50, "prefill.enqueued", Where.PREFILL, "The request is in P's scheduler.", _PROMPT, Field("b", "arrival_wall_ns", "ns", "vLLM's own arrival time."), _INTAKE)
PREFILL_CONSIDERED = _stage(51, "prefill.considered", Where.PREFILL, "P's scheduler looks at the request.", *_CONSIDERED)
PREFILL_ALLOCATED = _stage(52, "prefill.allocated", Where.PREFILL, "The request has blocks on P.", *_ALLOCATED)
PREFILL_SCHEDULED = _stage(53, "prefill.scheduled", Where.PREFILL, "A step on P includes the request.", *_SCHED)
PREFILL_FINISHED = _stage(54, "prefill.finished", Where.PREFILL, "P is done with the request and its blocks are known.", Field("a", "blocks", "blocks", "Blocks kept for the hand-off."), Field("b", "kept", "", "1 if the blocks are held for the hand-off."), Field("ref", "status", "", "vLLM's final status."))
PREFILL_ABORTED = _stage(55, "prefill.aborted", Where.PREFILL, "The request was aborted on P.", Field("ref", "status", "", "vLLM's final status."))
PREFILL_PREEMPTED = _stage(56, "prefill.preempted", Where.PREFILL, "P took the request's blocks away.")
PREFILL_STAGED = _stage(57, "prefill.staged", Where.PREFILL, "P's worker hands the blocks to its sender.", _RANK)
SENDER_PICKED = _stage(58, "sender.picked", Where.PREFILL, "P's sender thread takes the blocks up.", _RANK)
LEASE_EXPIRED = _stage(59, "prefill.lease_expired", Where.PREFILL, "P gave the blocks up unread.", _RANK)
PREFILL_RELEASED = _stage(60, "prefill.released", Where.PREFILL, "P's scheduler frees the blocks.")
LEASE_STARTED = _stage(61, "prefill.lease_started", Where.PREFILL, "P's worker holds the blocks until a deadline.", _RANK, Field("b", "duration_ns", "ns", "Time left."))
LEASE_EXTENDED = _stage(62, "prefill.lease_extended", Where.PREFILL, "A heartbeat from D extends the lease.", _RANK)

DECODE_ENQUEUED = _stage(70, "decode.enqueued", Where.DECODE, "The request is in D's scheduler.", _PROMPT, Field("b", "arrival_wall_ns", "ns", "vLLM's own arrival time."), Field("c", "remote", "", "1 if the KV is to come from P."), _INTAKE, Field("ref", "remote_request_id", "", "The request's id on P, as D was told."))
DECODE_CONSIDERED = _stage(71, "decode.considered", Where.DECODE, "D's scheduler looks at the request.", *_CONSIDERED)
DECODE_ALLOCATED = _stage(72, "decode.allocated", Where.DECODE, "Blocks are reserved on D: the destination is prepared.", *_ALLOCATED)
REGISTRATION_QUEUED = _stage(73, "decode.registration_queued", Where.DECODE, "D's worker hands the registration to its sender.", _RANK)
REGISTRATION_SENT = _stage(74, "decode.registration_sent", Where.DECODE, "The registration leaves D.", _RANK, Field("b", "message_bytes", "bytes", "Size of the message."), Field("c", "peer_rank", "", "Order of the P rank it was sent to."))
LOAD_STARTED = _stage(75, "decode.load_started", Where.DECODE, "D's worker begins to load the KV.", _RANK, Field("b", "blocks", "blocks", "Local blocks to fill."), Field("ref", "remote_engine", "", "Engine id of P."))
REPORTED = _stage(76, "decode.reported", Where.DECODE, "D's worker reports the KV as complete.", _RANK, Field("b", "connector", "", "Which of the worker's watched connectors, from 0: a MultiConnector has several, by name in the process's fact connectors."))
READY = _stage(77, "decode.ready", Where.DECODE, "D's scheduler knows that the KV is there on every rank.")
DECODE_SCHEDULED = _stage(78, "decode.scheduled", Where.DECODE, "A step on D includes the request.", *_SCHED)
DECODE_FINISHED = _stage(79, "decode.finished", Where.DECODE, "D is done with the request.", Field("a", "output_tokens", "tokens", "Tokens produced."), Field("ref", "status", "", "vLLM's final status."))
DECODE_ABORTED = _stage(80, "decode.aborted", Where.DECODE, "The request was aborted on D.", Field("ref", "status", "", "vLLM's final status."))
DECODE_PREEMPTED = _stage(81, "decode.preempted", Where.DECODE, "D took the request's blocks away.")
LOAD_FAILED = _stage(82, "decode.load_failed", Where.DECODE, "D's worker reports that the KV did not arrive.", _RANK, Field("b", "blocks", "blocks", "Blocks that failed."))

HANDSHAKE_STARTED = _stage(90, "handshake.started", Where.TRANSFER, "An engine begins to exchange agent metadata with another.", _RANK, Field("ref", "remote_engine", "", "Engine id of the peer."))
HANDSHAKE_ENDED = _stage(91, "handshake.ended", Where.TRANSFER, "The exchange has ended.", _RANK, Field("b", "ok", "", "1 if it succeeded."), Field("ref", "remote_engine", "", "Engine id of the peer."))
REGISTRATION_RECEIVED = _stage(92, "registration.received", Where.TRANSFER, "P's sender thread reads D's registration; the request id is D's.", _RANK, Field("ref", "remote_engine", "", "Engine id of D."))
MATCHED = _stage(93, "transfer.matched", Where.TRANSFER, "P's sender thread has the blocks and the registration of one request together.", _RANK, Field("ref", "decode_request_id", "", "The request's id on D."))
PREPARED = _stage(94, "transfer.prepared", Where.TRANSFER, "Descriptors are made for one transfer.", _XFER, Field("b", "descriptors", "", "Number of descriptors."), Field("c", "rank", "", "Rank of the side that drives it."), Field("ref", "remote_request_id", "", "The request's id on the other side, as in the notification."))
POST_STARTED = _stage(95, "transfer.post_started", Where.TRANSFER, "The call that posts the transfer begins.", _XFER)
POST_ENDED = _stage(96, "transfer.post_ended", Where.TRANSFER, "The call that posts the transfer returns.", _XFER, Field("b", "moved_bytes", "bytes", "Bytes that the transfer moves."), Field("c", "descriptors", "", "Number of descriptors."), Field("d", "done", "", "1 if the post came back done."))
TRANSFER_DONE = _stage(97, "transfer.done", Where.TRANSFER, "A poll by the side that drives the transfer says done.", _XFER, Field("b", "last_pending_ns", "ns", "Monotonic time of the last poll that said in progress, 0 if none."), Field("c", "polls", "", "Polls made."))
TRANSFER_FAILED = _stage(98, "transfer.failed", Where.TRANSFER, "The transfer failed.", _XFER, Field("ref", "reason", "", "What NIXL said."))
NOTIFIED = _stage(99, "transfer.notified", Where.TRANSFER, "A worker reads the other side's completion notification; the request id is the reader's own.", _RANK)
POST_STARVED = _stage(102, "transfer.post_starved", Where.TRANSFER, "For a tenth of a millisecond or more of a post its thread could have run and had no processor, as the kernel counts.", _XFER, Field("b", "starved_ns", "ns", "Without a processor, of the time from transfer.post_started to here."))
NOTICE_STARVED = _stage(103, "transfer.notice_starved", Where.TRANSFER, "For a tenth of a millisecond or more before it noticed that the KV has come a thread of D could have run and had no processor; stamped as transfer.done or transfer.notified is.", _RANK, Field("b", "starved_ns", "ns", "Without a processor, since its look before."), Field("c", "since_ns", "ns", "Time since that look."))
PROBED = _stage(100, "transfer.probed", Where.TRANSFER, "The probe thread saw the transfer done.", _XFER, Field("b", "last_pending_ns", "ns", "Monotonic time of its last poll that said in progress."))
ORPHANED = _stage(101, "notification.orphaned", Where.TRANSFER, "A notification names a request that the worker does not know.", _RANK)

STEP_SCHEDULED = _stage(110, "step.scheduled", Where.ENGINE, "The scheduler has made up a step.", _STEP, Field("b", "tokens", "tokens", "Tokens in the step."), Field("c", "requests", "", "Requests in the step."), Field("d", "waiting", "", "Requests known to wait for KV."))
STEP_STARTED = _stage(111, "step.started", Where.ENGINE, "A worker begins the step.", _STEP, Field("b", "rank", "", "Rank of the worker."))
STEP_FORWARDED = _stage(112, "step.forwarded", Where.ENGINE, "The step's forward has ended on a worker (on a GPU: its event has passed).", _STEP, Field("b", "rank", "", "Rank of the worker."), Field("c", "asynchronous", "", "1 if stamped by a device event."))
STEP_CONNECTED = _stage(113, "step.connected", Where.ENGINE, "The connector's work of the step on the forward thread is over.", _STEP, Field("b", "rank", "", "Rank of the worker."), Field("c", "connector_ns", "ns", "Time the connector took on the forward thread in this step."), Field("d", "before_forward_ns", "ns", "The part of it before the forward."))
STEP_ENDED = _stage(114, "step.ended", Where.ENGINE, "The scheduler has taken in the step's result.", _STEP, Field("b", "starved_ns", "ns", "For how long the scheduler's thread, since the step before, could have run and had no processor; 0 where the kernel does not say, and where nobody came that waits for this step."), Field("c", "ordered_ns", "ns", "Time since the core told its workers to sample; 0 where nobody saw that."))
WORKER_STARVED = _stage(115, "step.worker_starved", Where.ENGINE, "For a tenth of a millisecond or more of a step's part a worker's forward thread could have run and had no processor, as the kernel counts.", _STEP, Field("b", "rank", "", "Rank of the worker."), Field("c", "forward_starved_ns", "ns", "Without a processor in the forward; 0 where a device computes."), Field("d", "connector_starved_ns", "ns", "Without a processor in the connector's work behind the forward, at least."))
RESULT_STARVED = _stage(116, "step.result_starved", Where.ENGINE, "For a tenth of a millisecond or more between the connector's work and the hand-over of the step's result a worker's thread could have run and had no processor, the time included in which it looked in vain for the order to sample; where scheduler and worker are one thread, until that took the result in.", _STEP, Field("b", "rank", "", "Rank of the worker."), Field("c", "result_starved_ns", "ns", "Without a processor in that time."))

SENDER_WOKE = _stage(120, "sender.woke", Where.ENGINE, "The sender thread wakes.", Field("a", "slept_ns", "ns", "How long it slept."), Field("b", "queue_length", "", "Work waiting for it."), Field("c", "signal_delay_ns", "ns", "Time since it was signalled, 0 if it woke by itself."))
SENDER_SLEPT = _stage(121, "sender.slept", Where.ENGINE, "The sender thread goes to sleep.", Field("a", "busy_ns", "ns", "How long it was awake."), Field("b", "queue_length", "", "Work left, which it waits for others to complete."))

# Points that only imported records have: of load generators, and of connectors that log their own.
CLIENT_SENT = _stage(130, "client.sent", Where.CLIENT, "The client sends the request.", Field("a", "prompt_tokens", "tokens", "Length of the prompt, as the client counts; 0 if it does not say."), Field("ref", "client_request_id", "", "The id that the client sent."))
CLIENT_FIRST_TOKEN = _stage(131, "client.first_token", Where.CLIENT, "The first content has arrived at the client.")
CLIENT_DONE = _stage(132, "client.done", Where.CLIENT, "The answer has arrived whole.", Field("a", "output_tokens", "tokens", "Tokens of the answer, as the client counts; 0 if it does not say."))
CLIENT_FAILED = _stage(133, "client.failed", Where.CLIENT, "The client gave up, or got an error.", Field("a", "status", "", "HTTP status, 0 if there was none."), Field("ref", "reason", "", "Kind of the failure."))
TRANSFER_BEGUN = _stage(134, "transfer.begun", Where.TRANSFER, "The side that drives the transfer turns to it: descriptors, post and wire come next.", _RANK, Field("ref", "mode", "", "push or pull."))
HANDED_OVER = _stage(135, "prefill.handed_over", Where.PREFILL, "P's worker reports that the KV is with D, so that its blocks can go.", _RANK)

# Checksums of handed-over blocks, where `--verify-kv` asks for them. They are no steps on the way to a token.
_CHECKED = (Field("a", "rank", "", "Tensor-parallel rank of the worker."), Field("b", "block", "", "The block's number on the side that does not drive the transfer: P's in pull, D's in push."), Field("c", "checksum", "", "CRC-32 over the block, region by region."), Field("d", "checked_bytes", "bytes", "Bytes that the checksum covers."))
PREFILL_CHECKED = _stage(136, "prefill.checked", Where.PREFILL, "P's worker knows the checksum of a block that it has computed.", *_CHECKED, Field("ref", "decode_request_id", "", "In push the request's id on D, whose block it is for."))
DECODE_CHECKED = _stage(137, "decode.checked", Where.DECODE, "D's worker knows the checksum of a block that has arrived.", *_CHECKED)
UNCHECKED = _stage(138, "transfer.unchecked", Where.TRANSFER, "A worker could not take the checksum of blocks that it should have.", Field("a", "rank", "", "Tensor-parallel rank of the worker."), Field("b", "blocks", "blocks", "How many blocks."), Field("ref", "reason", "", "Why not."))
PLACED = _stage(139, "thread.placed", Where.PROCESS, "A look, in each second with a step, at the threads of a worker's process: where its forward thread is, and who is beside it.", Field("a", "cpu", "", "CPU on which the forward thread last ran."), Field("b", "beside", "", "Other threads of the process that ran or could run on that CPU."), Field("c", "running", "", "Other threads of the process that ran or could run anywhere."), Field("d", "looked", "", "Other threads that were looked at: those busy at their last look, and some in turn."), Field("ref", "threads", "", "Names of those beside, joined by commas: a Python thread's own, else the kernel's, with nixl: before one that came with the NIXL agent."))

# Copies between a device and the host buffer that NIXL uses: where `kv_buffer_device` is cpu and the device is another.
_COPY = (_RANK, Field("b", "blocks", "blocks", "Blocks to copy, as the worker counts them."))
_COPY_OVER = (_RANK, Field("b", "blocks", "blocks", "Blocks copied."), Field("c", "copied_bytes", "bytes", "Bytes copied."))
PREFILL_COPY_STARTED = _stage(140, "prefill.copy_started", Where.PREFILL, "P's worker begins to copy the request's blocks of a step to its host buffer; the device does so once the step's forward has ended.", *_COPY)
PREFILL_COPIED = _stage(141, "prefill.copied", Where.PREFILL, "These blocks are in P's host buffer.", *_COPY_OVER)
DECODE_COPY_STARTED = _stage(142, "decode.copy_started", Where.DECODE, "D's worker begins to copy the request's blocks from its host buffer; the device does so once the forward that runs has ended.", *_COPY)
DECODE_COPIED = _stage(143, "decode.copied", Where.DECODE, "The request's blocks have left D's host buffer for the device.", *_COPY_OVER)

# Points that no process stamps: they are worked out from steps and brackets ---------------------------

PREFILL_BEGUN = _point(200, "prefill.begun", Where.PREFILL, "The first step on P that works on the prompt is made up.")
PREFILL_COMPUTED = _point(201, "prefill.computed", Where.PREFILL, "The forward that holds the last prompt token has ended on every rank.")
DECODE_BEGUN = _point(202, "decode.begun", Where.DECODE, "The first step on D that works on the request is made up.")
DECODE_COMPUTED = _point(203, "decode.computed", Where.DECODE, "The forward that yields the first token has ended on every rank.")
DECODE_SAMPLED = _point(204, "decode.sampled", Where.DECODE, "D's scheduler has taken in the step that yields the first token.")
ARRIVED = _point(205, "transfer.arrived", Where.TRANSFER, "The last byte has arrived, as early as the evidence and the pair's fastest seen rate allow.")

# Edges: what waits for what. A predecessor later than its successor is no predecessor; of those left, the last-arriving
# one is on the path. Edges that skip a point serve runs in which that point is not instrumented.

_edge(CLIENT_SENT, ROUTER_RECEIVED, CLIENT_HOP)
_edge(ROUTER_RECEIVED, ROUTER_DECIDED, ROUTER_DECIDE)
_edge(ROUTER_DECIDED, ROUTER_PREFILL_SENT, ROUTER_DISPATCH)
_edge(ROUTER_PREFILL_SENT, PREFILL_HTTP_RECEIVED, PREFILL_HOP)
_edge(ROUTER_PREFILL_SENT, PREFILL_ENQUEUED, PREFILL_FRONTEND, "prefill.intake")
_edge(PREFILL_HTTP_RECEIVED, PREFILL_ENQUEUED, PREFILL_FRONTEND, "prefill.intake")
_edge(PREFILL_ENQUEUED, PREFILL_BEGUN, PREFILL_BOUNDARY, "prefill.wait")
_edge(PREFILL_BEGUN, PREFILL_COMPUTED, PREFILL_FORWARD, "prefill.steps")
_edge(PREFILL_COMPUTED, PREFILL_FINISHED, PREFILL_SAMPLE, "prefill.tail")
_edge(PREFILL_FINISHED, PREFILL_STAGED, STAGE_WAIT, "prefill.ride")
_edge(PREFILL_STAGED, SENDER_PICKED, WRITER_BUSY, "sender")
_edge(SENDER_PICKED, MATCHED, WRITER_BUSY, "registration")
_edge(PREFILL_STAGED, MATCHED, WRITER_BUSY, "registration")
_edge(PREFILL_FINISHED, MATCHED, UNKNOWN, "late")
_edge(MATCHED, PREPARED, PREPARE, "handshake")
_edge(MATCHED, TRANSFER_BEGUN, PREPARE, "handshake")
_edge(TRANSFER_BEGUN, PREPARED, PREPARE)
_edge(PREFILL_FINISHED, PREFILL_HTTP_RESPONDED, PREFILL_FRONTEND)
_edge(PREFILL_HTTP_RESPONDED, ROUTER_PREFILL_RETURNED, PREFILL_REPLY)
_edge(PREFILL_FINISHED, ROUTER_PREFILL_RETURNED, PREFILL_REPLY)
_edge(ROUTER_PREFILL_RETURNED, ROUTER_DECODE_SENT, ROUTER_DISPATCH)
_edge(ROUTER_DECIDED, ROUTER_DECODE_SENT, ROUTER_DISPATCH)
_edge(ROUTER_DECODE_SENT, DECODE_HTTP_RECEIVED, DECODE_HOP)
_edge(PREFILL_HTTP_RESPONDED, DECODE_HTTP_RECEIVED, ROUTER_DISPATCH)
_edge(ROUTER_DECODE_SENT, DECODE_ENQUEUED, DECODE_FRONTEND, "decode.intake")
_edge(DECODE_HTTP_RECEIVED, DECODE_ENQUEUED, DECODE_FRONTEND, "decode.intake")
_edge(DECODE_ENQUEUED, DECODE_ALLOCATED, DECODE_BOUNDARY, "decode.wait")
_edge(DECODE_ALLOCATED, LOAD_STARTED, SUBMIT_WAIT)
_edge(DECODE_ALLOCATED, TRANSFER_BEGUN, SUBMIT_WAIT)
_edge(LOAD_STARTED, TRANSFER_BEGUN, PREPARE, "handshake")
_edge(LOAD_STARTED, PREPARED, PREPARE, "handshake")
_edge(PREPARED, POST_STARTED, PREPARE)
_edge(POST_STARTED, POST_ENDED, POST)
_edge(POST_STARTED, ARRIVED, POST)
_edge(POST_ENDED, ARRIVED, WIRE)
_edge(ARRIVED, NOTIFIED, DETECTION)
_edge(ARRIVED, TRANSFER_DONE, DETECTION)
_edge(NOTIFIED, REPORTED, REPORT, "copy")
_edge(TRANSFER_DONE, REPORTED, REPORT, "copy")
_edge(REPORTED, READY, REPORT)
_edge(POST_STARTED, TRANSFER_FAILED, POST)
_edge(POST_ENDED, TRANSFER_FAILED, WIRE)
_edge(TRANSFER_FAILED, LOAD_FAILED, REPORT)
_edge(LOAD_STARTED, LOAD_FAILED, PREPARE, "handshake")
_edge(LOAD_FAILED, DECODE_BEGUN, DECODE_BOUNDARY, "decode.wait")
_edge(READY, DECODE_BEGUN, DECODE_BOUNDARY, "decode.wait")
_edge(DECODE_ENQUEUED, DECODE_BEGUN, DECODE_BOUNDARY, "decode.wait")
_edge(DECODE_BEGUN, DECODE_COMPUTED, FIRST_STEP, "decode.steps")
_edge(DECODE_COMPUTED, DECODE_SAMPLED, DECODE_SAMPLE, "decode.tail")
_edge(DECODE_SAMPLED, DECODE_FIRST_TOKEN_OUT, DECODE_FRONTEND)
_edge(DECODE_COMPUTED, DECODE_FIRST_TOKEN_OUT, DECODE_FRONTEND)
_edge(DECODE_FIRST_TOKEN_OUT, ROUTER_FIRST_TOKEN, DECODE_REPLY, "join")
_edge(DECODE_SAMPLED, ROUTER_FIRST_TOKEN, DECODE_REPLY, "join")
_edge(ROUTER_FIRST_TOKEN, CLIENT_FIRST_TOKEN, CLIENT_REPLY)
_edge(DECODE_FIRST_TOKEN_OUT, CLIENT_FIRST_TOKEN, CLIENT_REPLY)

POINTS: tuple[Stage, ...] = tuple(_points)
EDGES: tuple[Edge, ...] = tuple(_edges)
STAGES: tuple[Stage, ...] = tuple(_stages)
CAUSES: tuple[Cause, ...] = tuple(_causes)
BY_CODE: dict[int, Stage] = {stage.code: stage for stage in STAGES}
BY_NAME: dict[str, Stage] = {stage.name: stage for stage in STAGES}
CAUSE_BY_NAME: dict[str, Cause] = {cause.name: cause for cause in CAUSES}
# fmt: on

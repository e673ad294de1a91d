"""What a run's numbers say in plain words: one small check per finding, none on too little data.

A check returns a finding only where enough requests show it and enough time is at stake; the thresholds stand here
together. Inside the bracket around the end of the wire nothing is proven, so no check rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvtrace import stages
from kvtrace.findings.model import Facts, Finding, Grade, Group

LEAST_REQUESTS = 20  # fewer tell of themselves, not of a system
SHARE = 0.10  # of all time to first token: less is not worth a sentence
LATE_PART = 0.20  # of a group's push requests
LEADING_PART = 0.60  # of the time, for what is named as the reason
LAST_PART = 0.80  # of the requests in which one rank is the last
EVENTS = 3  # things that must not happen at all need no twenty

_COORDINATION = stages.Class.COORDINATION.value


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.1f} ms"


def _part(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 1 or not share else "<1 %"


def _of(group: Group) -> str:
    return f"{group.mode}, scope {group.scope}"


def _finding(
    name: str, sentence: str, grade: Grade, cause: stages.Cause, stake_ns: int, query: str, examples: Iterable[str]
) -> Finding:
    return Finding(name, sentence, grade, cause.kind.value, cause.remedy, stake_ns, query, tuple(examples))


# Checks of one group ---------------------------------------------------------------------------------------


def registration_late(group: Group) -> Iterator[Finding]:
    """Report registrations that come after P had computed."""
    late = group.late
    cause = group.causes.get(stages.REGISTRATION_LATE.name)
    if late.told < LEAST_REQUESTS or late.late < LATE_PART * late.told or cause is None:
        return
    if cause.total_ns < SHARE * group.ttft_ns:
        return
    reason, reason_ns = max(late.waited_for.items(), key=lambda item: item[1], default=("", 0))
    why = f", most of it waiting for {reason}" if reason_ns >= LEADING_PART * cause.total_ns else ""
    if reason == SENT_LATE and why:
        why = ": the router sends D's leg after P's"
    yield _finding(
        "registration.late",
        f"Registrations arrive late in {_part(late.late, late.told)} of {late.told:,} push requests, by "
        f"{_ms(late.median_ns)} at the median{why}.",
        Grade.EXPLAINED if why else Grade.MEASURED,
        stages.REGISTRATION_LATE, cause.total_ns, "registrations", late.examples,
    )  # fmt: skip


SENT_LATE = "the router to send the decode leg"


def router_waits(group: Group) -> Iterator[Finding]:
    """Report P's reply, the router and the hop to D on the path: the price of one leg after the other."""
    names = (stages.PREFILL_REPLY, stages.ROUTER_DISPATCH, stages.DECODE_HOP)
    found = [(cause, group.causes[cause.name]) for cause in names if cause.name in group.causes]
    reply = group.causes.get(stages.PREFILL_REPLY.name)
    total_ns = sum(one.total_ns for _, one in found)
    if reply is None or reply.requests < LEAST_REQUESTS or total_ns < SHARE * group.ttft_ns:
        return
    if group.mode == "push":
        # Both legs are under way at once, so P's reply is on the path only where the answer has to wait for it.
        told = f"The router passes nothing on before P's reply is in: {_part(reply.total_ns, group.ttft_ns)}"
        share = f"{told} of the time to first token ({_of(group)}) pass with the first token made"
    else:
        told = "D hears of a request only after P's reply is back through the router: reply, dispatch and hop take"
        share = f"{told} {_part(total_ns, group.ttft_ns)} of the time to first token ({_of(group)})"
    yield _finding(
        "router.waits", f"{share}, {_ms(total_ns / reply.requests)} a request.",
        Grade.EXPLAINED, stages.ROUTER_DISPATCH, total_ns, "causes", reply.examples,
    )  # fmt: skip


def detection(group: Group) -> Iterator[Finding]:
    """Report bytes that had arrived for certain before D noticed."""
    seen = group.detection
    if seen.requests < LEAST_REQUESTS or seen.total_ns < SHARE * group.ttft_ns:
        return
    steps = seen.median_ns / seen.step_ns if seen.step_ns else 0.0
    pace = f", {steps:.1f} of D's steps" if steps >= 0.5 else ""
    yield _finding(
        "detection",
        f"D notices {_ms(seen.median_ns)} after the KV has arrived (median of {seen.requests:,} requests in which "
        f"the arrival is certain{pace}).",
        Grade.MEASURED, stages.DETECTION, seen.total_ns, "causes", seen.examples,
    )  # fmt: skip


def posting(group: Group) -> Iterator[Finding]:
    """Report posts that take longer than the wire can have taken."""
    post = group.posting
    if post.transfers < LEAST_REQUESTS or post.post_ns <= post.wire_high_ns or not post.descriptors:
        return
    if post.post_ns < SHARE * group.ttft_ns:
        return
    each = post.moved_bytes / post.descriptors
    yield _finding(
        "post.descriptors",
        f"Posting takes longer than the wire: {_ms(post.post_ns / post.transfers)} a transfer against at most "
        f"{_ms(post.wire_high_ns / post.transfers)}, with {post.descriptors / post.transfers:,.0f} descriptors of "
        f"{each:,.0f} bytes.",
        Grade.MEASURED, stages.POST, post.post_ns, "transfers", post.examples,
    )  # fmt: skip


def capacity(group: Group) -> Iterator[Finding]:
    """Report a side that is short of blocks that no computing request holds."""
    for cause, side in ((stages.DECODE_CAPACITY, "D"), (stages.PREFILL_CAPACITY, "P")):
        seen = group.causes.get(cause.name)
        if seen is None or seen.requests < EVENTS or group.requests < LEAST_REQUESTS:
            continue
        if seen.total_ns >= SHARE * group.ttft_ns:
            yield _finding(
                cause.name,
                f"{side} is short of KV blocks, not of network: {seen.requests:,} of {group.requests:,} requests "
                f"waited {_ms(seen.median_ns)} (median) for blocks that no computing request held.",
                Grade.EXPLAINED, cause, seen.total_ns, "causes", seen.examples,
            )  # fmt: skip


_RIDES = (
    (stages.STAGE_WAIT, "P has finished and its blocks ride behind P's next step to the sender"),
    (stages.SUBMIT_WAIT, "D's order to load rides behind D's step to its worker"),
    (stages.WRITER_WAKE, "P's sender thread sleeps although its work has come"),
    (stages.WRITER_BUSY, "P's sender thread is busy with something else"),
    (stages.STEP_CONNECTOR, "the connector works on the forward thread inside the request's own steps"),
    (stages.REPORT, "D's worker knows that the KV is there and D's scheduler does not yet"),
    (stages.PREFILL_FRONTEND, "P's front end reads, tokenises or answers"),
    (stages.DECODE_FRONTEND, "D's front end reads, tokenises or writes the first token"),
    (stages.HANDSHAKE, "a pair exchanges agent metadata before its first transfer"),
)


def waits(group: Group) -> Iterator[Finding]:
    """Report each kind of coordination that takes a part of the time to first token that counts."""
    for cause, what in _RIDES:
        seen = group.causes.get(cause.name)
        if seen is None or seen.requests < LEAST_REQUESTS or seen.total_ns < SHARE * group.ttft_ns:
            continue
        yield _finding(
            cause.name,
            f"In {seen.requests:,} of {group.requests:,} requests ({_of(group)}) {what}: {_ms(seen.median_ns)} at "
            f"the median, {_part(seen.total_ns, group.ttft_ns)} of all time to first token.",
            Grade.MEASURED, cause, seen.total_ns, "causes", seen.examples,
        )  # fmt: skip


def first_contact(group: Group) -> Iterator[Finding]:
    """Report handshakes that few requests paid for, and much."""
    seen = group.causes.get(stages.HANDSHAKE.name)
    if seen is None or not 0 < seen.requests < LEAST_REQUESTS or group.requests < LEAST_REQUESTS:
        return
    typical_ns = group.ttft_ns / group.requests
    if seen.median_ns >= typical_ns / 2:
        yield _finding(
            stages.HANDSHAKE.name,
            f"{seen.requests:,} of {group.requests:,} requests waited {_ms(seen.median_ns)} (median) for the first "
            "contact of their pair.",
            Grade.MEASURED, stages.HANDSHAKE, seen.total_ns, "causes", seen.examples,
        )  # fmt: skip


RECOMPUTE_SHARE = 0.20  # every hand-off of today does it: only a large part is worth a sentence


def first_token_again(group: Group) -> Iterator[Finding]:
    """Report much time in which D computes what P had sampled."""
    seen = group.causes.get(stages.FIRST_STEP.name)
    if seen is None or seen.requests < LEAST_REQUESTS or seen.total_ns < RECOMPUTE_SHARE * group.ttft_ns:
        return
    yield _finding(
        stages.FIRST_STEP.name,
        f"In {seen.requests:,} of {group.requests:,} requests ({_of(group)}) D computes again the first token that P "
        f"had sampled: {_ms(seen.median_ns)} at the median, {_part(seen.total_ns, group.ttft_ns)} of the time to it.",
        Grade.MEASURED, stages.FIRST_STEP, seen.total_ns, "causes", seen.examples,
    )  # fmt: skip


_BAD_ENDS = {
    "recomputed": (stages.DECODE_PREFILL, "D computed the prompt itself although it was to be handed over"),
    "no handoff": (stages.DECODE_PREFILL, "nothing was handed over: D was not told of any KV"),
    "expired": (stages.PREFILL_CAPACITY, "P gave the blocks up before they were read: such output is suspect"),
    "failed": (stages.UNKNOWN, "the request or its hand-off failed"),
    "incomplete": (stages.UNKNOWN, "records that the hand-off must have left are missing"),
}


def bad_ends(group: Group) -> Iterator[Finding]:
    """Report hand-offs that did not come about, however the answers looked."""
    for verdict, (cause, what) in _BAD_ENDS.items():
        seen = group.verdicts.get(verdict)
        if seen is not None and seen.requests >= EVENTS:
            yield _finding(
                verdict.replace(" ", "_"), f"In {seen.requests:,} requests ({_of(group)}) {what}.",
                Grade.MEASURED, cause, seen.total_ns, "slowest_requests", seen.examples,
            )  # fmt: skip


def corruption(group: Group) -> Iterator[Finding]:
    """Report hand-offs of which checksums say that D went on from other KV: one is too many."""
    seen = group.verdicts.get("corrupt")
    if seen is not None and seen.requests:
        yield Finding(
            "corrupt",
            f"In {seen.requests:,} requests ({_of(group)}) D went on from other KV than P had computed, by the "
            "checksums of both: their output is suspect.",
            Grade.MEASURED, stages.Class.UNATTRIBUTED.value,
            "find out who wrote into the blocks: leases that ended, blocks used again, the transport",
            seen.total_ns, "integrity", seen.examples,
        )  # fmt: skip


def unexplained(group: Group) -> Iterator[Finding]:
    """Report much time without explanation: the rest must not be read as if it were all."""
    seen = group.causes.get(stages.UNKNOWN.name)
    if seen is None or seen.requests < LEAST_REQUESTS or seen.total_ns < SHARE * group.ttft_ns:
        return
    yield _finding(
        "unattributed",
        f"{_part(seen.total_ns, group.ttft_ns)} of the time to first token ({_of(group)}) is explained by nothing "
        "that was recorded.",
        Grade.MEASURED, stages.UNKNOWN, seen.total_ns, "causes", seen.examples,
    )  # fmt: skip


def pacing(group: Group) -> Iterator[Finding]:
    """Report transfers that make the tokens of others come later."""
    pace = group.pacing
    if pace.requests < LEAST_REQUESTS or not pace.by_others_ns or pace.by_others_ns < SHARE * pace.decode_ns:
        return
    yield _finding(
        "tpot.extension",
        f"Connector work on D's forward thread is {_part(pace.extension_ns, pace.decode_ns)} of the time after the "
        f"first token ({_of(group)}), {_part(pace.by_others_ns, pace.extension_ns)} of it for other requests.",
        Grade.MEASURED, stages.STEP_CONNECTOR, pace.by_others_ns, "blamed", pace.examples,
    )  # fmt: skip


# Checks of the run -----------------------------------------------------------------------------------------


def saturation(facts: Facts) -> Iterator[Finding]:
    """Report that less was served than offered: what grows then is a queue."""
    if facts.saturated:
        total_ns = sum(group.ttft_ns for group in facts.groups)
        yield Finding(
            "saturated",
            f"Offered {facts.offered_rate_hz:.2f} requests/s, served {facts.served_rate_hz:.2f}: waiting grew with "
            "time everywhere, so differences in time to first token are queue growth, and no class names a remedy.",
            Grade.MEASURED, stages.Class.QUEUE.value, "less load, or more capacity", total_ns, "shares_by_class", (),
        )  # fmt: skip


def stragglers(facts: Facts) -> Iterator[Finding]:
    """Report a rank that is nearly always the last to have its KV."""
    total_ns = sum(group.ttft_ns for group in facts.groups)
    for one in facts.stragglers:
        if one.requests < LEAST_REQUESTS or one.last < LAST_PART * one.requests or one.total_ns < SHARE * total_ns:
            continue
        yield _finding(
            "rank.last",
            f"Rank {one.rank} of {one.engine} is the one that the others wait for in "
            f"{_part(one.last, one.requests)} of {one.requests:,} requests, {_ms(one.median_ns)} at the median.",
            Grade.MEASURED, stages.DETECTION, one.total_ns, "transfers", one.examples,
        )  # fmt: skip


HELD_NS = 1_000_000_000  # an engine needs some steps to hear of an abort


def held_blocks(facts: Facts) -> Iterator[Finding]:
    """Report blocks that P keeps for requests that are over."""
    held = facts.held
    if held.requests >= EVENTS and held.total_ns >= held.requests * HELD_NS:
        yield _finding(
            "blocks.held",
            f"P held the blocks of {held.requests:,} aborted requests for {held.total_ns / held.requests / 1e9:.1f} s "
            f"each after the abort, {held.longest_ns / 1e9:.1f} s at most.",
            Grade.MEASURED, stages.PREFILL_CAPACITY, held.total_ns, "blocks", held.examples,
        )  # fmt: skip


def retries(facts: Facts) -> Iterator[Finding]:
    """Report attempts that were lost before others took their place."""
    retried = facts.retried
    if retried.requests >= EVENTS:
        yield _finding(
            "attempts.lost",
            f"{retried.requests:,} requests are further attempts at others that were lost: {_ms(retried.median_ns)} at "
            "the median passed before they began.",
            Grade.MEASURED, stages.ATTEMPT_LOST, retried.total_ns, "slowest_requests", retried.examples,
        )  # fmt: skip


def losses(facts: Facts) -> Iterator[Finding]:
    """Report lost records: anything may be missing from every other number."""
    if facts.lost_records:
        yield Finding(
            "records.lost",
            f"{facts.lost_records:,} records were lost; requests of that time may lack events.",
            Grade.MEASURED, stages.Class.UNATTRIBUTED.value, "a larger spool, a recorder that keeps up", 0, "drops", (),
        )  # fmt: skip


GROUP_CHECKS: tuple[Callable[[Group], Iterator[Finding]], ...] = (
    registration_late, router_waits, detection, posting, capacity, waits, first_contact, first_token_again, bad_ends,
    corruption, unexplained, pacing,
)  # fmt: skip
RUN_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (saturation, stragglers, held_blocks, retries, losses)


def findings(facts: Facts) -> list[Finding]:
    """Return what the run's numbers say, most time at stake first.

    Where less was served than offered, every wait is a queue's: no other finding about waiting is then given.
    """
    found = [finding for check in RUN_CHECKS for finding in check(facts)]
    checks = (bad_ends, corruption, unexplained) if facts.saturated else GROUP_CHECKS
    found += [finding for group in facts.groups for check in checks for finding in check(group)]
    return sorted(found, key=lambda finding: (-finding.stake_ns, finding.name))


__all__ = ["findings"]

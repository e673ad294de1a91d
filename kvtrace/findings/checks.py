"""What a run's numbers say in plain words: one small check per finding, none on too little data.

A check of waiting returns a finding only where enough requests show it and enough time is at stake; what must not
happen at all is told from a few requests on, other KV than P's and lost records always (`terms` has the thresholds).
Inside the bracket around the end of the wire nothing is proven, so no check rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from kvtrace import stages
from kvtrace.findings.model import Facts, Finding, Grade, Group
from kvtrace.findings.rules import unexplained, waits
from kvtrace.findings.terms import (
    EVENTS,
    HELD_NS,
    LAST_PART,
    LATE_PART,
    LEADING_PART,
    LEAST_REQUESTS,
    SHARE,
    finding,
    of,
    of_all,
    part,
    spread,
)
from kvtrace.modes import PUSH
from kvtrace.splits import SENT_LATE
from kvtrace.verdict import CORRUPT, EXPIRED, FAILED, INCOMPLETE, NO_HANDOFF, RECOMPUTED
from kvtrace.wording import figure, ms, plural, seconds

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
    yield finding(
        "registration.late",
        f"Registrations arrive late in {part(late.late, late.told)} of {late.told:,} push requests, by "
        f"{spread(late.median_ns, late.p90_ns, late.late)}{why}.",
        Grade.EXPLAINED if why else Grade.MEASURED,
        stages.REGISTRATION_LATE, cause.total_ns, "registrations", late.examples, mode=group.mode,
    )  # fmt: skip


def router_waits(group: Group) -> Iterator[Finding]:
    """Report what one leg after the other costs: before D hears of a request, or before its answer goes on."""
    # By push both legs are under way at once, so P's reply is on the path only where the answer waits for it.
    is_push = group.mode == PUSH
    seen = group.legs.get("held" if is_push else "between")
    if seen is None or seen.requests < LEAST_REQUESTS or seen.total_ns < SHARE * group.ttft_ns:
        return
    cost = f"{spread(seen.median_ns, seen.p90_ns, seen.requests)}, and {of_all(seen.total_ns, group)}"
    which = f"{seen.requests:,} of {group.requests:,} requests ({of(group)})"
    if is_push:
        told = (
            f"Answers go on only after P's reply, though D had made their first token before: {which} wait so, {cost}."
        )
    else:
        told = f"D hears of {which} only after P's reply: that reply, dispatch and hop take {cost}."
    yield finding(
        "router.waits", told, Grade.SUPPOSED if is_push else Grade.EXPLAINED,
        stages.PREFILL_REPLY if is_push else stages.ROUTER_DISPATCH, seen.total_ns, "causes", seen.examples,
        remedy="a router that does not wait for P's reply by push" if is_push else None, mode=group.mode,
    )  # fmt: skip


def detection(group: Group) -> Iterator[Finding]:
    """Report bytes that had arrived for certain before D noticed."""
    seen = group.detection
    if seen.requests < LEAST_REQUESTS or seen.total_ns < SHARE * group.ttft_ns:
        return
    steps = seen.median_ns / seen.step_ns if seen.step_ns else 0.0
    pace = f", {figure(steps)} of D's steps" if steps >= 0.5 else ""
    yield finding(
        "detection",
        f"D notices {ms(seen.median_ns)} after the KV has arrived (median of {seen.requests:,} requests in which "
        f"the arrival is certain{pace}; {ms(seen.p90_ns)} at p90).",
        Grade.MEASURED, stages.DETECTION, seen.total_ns, "detection", seen.examples, mode=group.mode,
    )  # fmt: skip


def posting(group: Group) -> Iterator[Finding]:
    """Report posts that take longer than the wire can have taken."""
    post = group.posting
    if post.requests < LEAST_REQUESTS or post.post_ns <= post.wire_high_ns or not post.descriptors:
        return
    if post.post_ns < SHARE * group.ttft_ns:
        return
    each = post.moved_bytes / post.descriptors
    yield finding(
        "post.descriptors",
        f"Posting takes longer than the wire: {ms(post.post_ns / post.requests)} a request against at most "
        f"{ms(post.wire_high_ns / post.requests)} on average (posts at p90: {ms(post.p90_ns)}), with "
        f"{post.descriptors / post.transfers:,.0f} descriptors of {each:,.0f} bytes a transfer.",
        Grade.MEASURED, stages.POST, post.post_ns, "transfers", post.examples, mode=group.mode,
    )  # fmt: skip


def first_contact(group: Group) -> Iterator[Finding]:
    """Report handshakes that few requests paid for, and much."""
    seen = group.causes.get(stages.HANDSHAKE.name)
    if seen is None or not 0 < seen.requests < LEAST_REQUESTS or group.requests < LEAST_REQUESTS:
        return
    typical_ns = group.ttft_ns / group.requests
    if seen.median_ns >= typical_ns / 2:
        yield finding(
            stages.HANDSHAKE.name,
            f"{seen.requests:,} of {group.requests:,} requests waited {ms(seen.median_ns)} (median) for the first "
            "contact of their pair.",
            Grade.MEASURED, stages.HANDSHAKE, seen.total_ns, "causes", seen.examples, mode=group.mode,
        )  # fmt: skip


_BAD_ENDS: Mapping[str, tuple[stages.Cause, str, str | None]] = {
    RECOMPUTED: (stages.DECODE_PREFILL, "D computed the prompt itself although it was to be handed over", None),
    NO_HANDOFF: (stages.DECODE_PREFILL, "nothing was handed over: D was not told of any KV", None),
    EXPIRED: (
        stages.PREFILL_CAPACITY,
        "P gave the blocks up before they were read: such output is suspect",
        "longer leases, D's legs sent sooner, fewer requests waiting on D",
    ),
    FAILED: (stages.UNKNOWN, "the request or its hand-off failed", None),
    INCOMPLETE: (stages.UNKNOWN, "records that the hand-off must have left are missing", None),
}


def bad_ends(group: Group) -> Iterator[Finding]:
    """Report hand-offs that did not come about, however the answers looked."""
    for verdict, (cause, what, remedy) in _BAD_ENDS.items():
        seen = group.verdicts.get(verdict)
        if seen is not None and seen.requests >= EVENTS:
            yield finding(
                verdict.replace(" ", "_"), f"In {seen.requests:,} requests ({of(group)}) {what}.",
                Grade.MEASURED, cause, seen.total_ns, "slowest_requests", seen.examples, remedy, group.mode,
            )  # fmt: skip


def corruption(group: Group) -> Iterator[Finding]:
    """Report hand-offs of which checksums say that D went on from other KV: one is too many."""
    seen = group.verdicts.get(CORRUPT)
    if seen is not None and seen.requests:
        yield finding(
            CORRUPT,
            f"In {plural(seen.requests, 'request')} ({of(group)}) D went on from other KV than P had computed, by the "
            "checksums of both: their output is suspect.",
            Grade.MEASURED, stages.UNKNOWN, seen.total_ns, "integrity", seen.examples,
            "find out who wrote into the blocks: leases that ended, blocks used again, the transport",
        )  # fmt: skip


def pacing(group: Group) -> Iterator[Finding]:
    """Report transfers that make the tokens of others come later."""
    pace = group.pacing
    if pace.requests < LEAST_REQUESTS or not pace.by_others_ns or pace.by_others_ns < SHARE * pace.decode_ns:
        return
    yield finding(
        "tpot.extension",
        f"Connector work on D's forward thread is {part(pace.extension_ns, pace.decode_ns)} of the time after the "
        f"first token ({of(group)}), {part(pace.by_others_ns, pace.extension_ns)} of it for other requests.",
        Grade.MEASURED, stages.STEP_CONNECTOR, pace.by_others_ns, "blamed", pace.examples, mode=group.mode,
    )  # fmt: skip


# Checks of the run -----------------------------------------------------------------------------------------


def saturation(facts: Facts) -> Iterator[Finding]:
    """Report that less was served than offered: what grows then is a queue."""
    offered, served = facts.offered_rate_hz, facts.served_rate_hz
    if facts.saturated and offered is not None and served is not None:
        total_ns = sum(group.ttft_ns for group in facts.groups)
        yield finding(
            "saturated",
            f"Offered {figure(offered)} requests/s, served {figure(served)}: waiting grew with time everywhere, so "
            "differences in time to first token are queue growth, and no class names a remedy.",
            Grade.MEASURED, None, total_ns, "shares_by_class", (),
        )  # fmt: skip


def stragglers(facts: Facts) -> Iterator[Finding]:
    """Report a rank that the others nearly always wait for."""
    total_ns = sum(group.ttft_ns for group in facts.groups)
    for one in facts.stragglers:
        if one.requests < LEAST_REQUESTS or one.last < LAST_PART * one.requests or one.total_ns < SHARE * total_ns:
            continue
        yield finding(
            "rank.last",
            f"Rank {one.rank} of {one.engine} is the one that the others wait for in "
            f"{part(one.last, one.requests)} of {one.requests:,} requests, "
            f"{spread(one.median_ns, one.p90_ns, one.last)}.",
            # Slow in its post, on the wire, in noticing or in its steps: that others wait for it does not tell which.
            Grade.MEASURED, None, one.total_ns, "transfers", one.examples,
        )  # fmt: skip


def held_blocks(facts: Facts) -> Iterator[Finding]:
    """Report blocks that P keeps for requests that are over."""
    held = facts.held
    if held.requests >= EVENTS and held.total_ns >= held.requests * HELD_NS:
        yield finding(
            "blocks.held",
            f"P held the blocks of {held.requests:,} requests that were over for "
            f"{seconds(held.total_ns / held.requests)} each, {seconds(held.longest_ns)} at most.",
            Grade.MEASURED, stages.PREFILL_CAPACITY, held.total_ns, "blocks", held.examples,
        )  # fmt: skip


def retries(facts: Facts) -> Iterator[Finding]:
    """Report attempts that were lost before others took their place."""
    retried = facts.retried
    if retried.requests >= EVENTS:
        yield finding(
            "attempts.lost",
            f"{retried.requests:,} requests are further attempts at others that were lost: before they began, "
            f"{spread(retried.median_ns, retried.p90_ns, retried.requests)} had passed.",
            Grade.MEASURED, stages.ATTEMPT_LOST, retried.total_ns, "slowest_requests", retried.examples,
        )  # fmt: skip


def losses(facts: Facts) -> Iterator[Finding]:
    """Report lost records: anything may be missing from every other number."""
    if facts.lost_records:
        yield Finding(
            "records.lost",
            f"{plural(facts.lost_records, 'record was', 'records were')} lost; requests of that time may lack events.",
            Grade.MEASURED, stages.Class.UNATTRIBUTED.value, "a larger spool, a recorder that keeps up", 0, "drops", (),
        )  # fmt: skip


GROUP_CHECKS: tuple[Callable[[Group], Iterator[Finding]], ...] = (
    registration_late, router_waits, detection, posting, waits, first_contact, bad_ends, corruption, unexplained,
    pacing,
)  # fmt: skip
RUN_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (saturation, stragglers, held_blocks, retries, losses)


def findings(facts: Facts) -> list[Finding]:
    """Return what the run's numbers say, most time at stake first.

    Where less was served than offered, every wait is a queue's: no finding about what a group waited for is then given,
    and none names a class or a remedy.
    """
    found = [one for check in RUN_CHECKS for one in check(facts)]
    checks = (bad_ends, corruption, unexplained) if facts.saturated else GROUP_CHECKS
    found += [
        replace(one, mode=group.mode, scope=group.scope)
        for group in facts.groups
        for check in checks
        for one in check(group)
    ]
    if facts.saturated:
        found = [replace(one, kind="", remedy="") for one in found]
    return sorted(found, key=lambda one: (-one.stake_ns, one.name))

"""Findings about one cause alone: a table of causes, thresholds and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtrace import stages
from kvtrace.findings import terms
from kvtrace.findings.model import Finding, Grade, Group


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause is worth a sentence once so many requests show it and it takes that share of all time to first token.

    In the sentence, `seen` are the requests that show it, `all` those of the group, `spread` and `part` its time.
    """

    cause: stages.Cause
    sentence: str
    grade: Grade = Grade.MEASURED
    least_requests: int = terms.LEAST_REQUESTS
    share: float = terms.SHARE
    name: str = ""

    def check(self, group: Group) -> Iterator[Finding]:
        """Yield the finding if the group shows it."""
        seen = group.causes.get(self.cause.name)
        if seen is None or seen.requests < self.least_requests or group.requests < terms.LEAST_REQUESTS:
            return
        if seen.total_ns >= self.share * group.ttft_ns:
            told = self.sentence.format(
                seen=f"{seen.requests:,}", all=f"{group.requests:,}", group=terms.of(group),
                spread=terms.spread(seen.median_ns, seen.p90_ns, seen.requests),
                part=terms.of_all(seen.total_ns, group),
            )  # fmt: skip
            name = self.name or self.cause.name
            yield terms.finding(
                name, told, self.grade, self.cause, seen.total_ns, "causes", seen.examples, mode=group.mode
            )


_WAIT = "In {seen} of {all} requests ({group}) WHAT: {spread}, and {part}."
_SHORT = (
    "SIDE is short of KV blocks, not of network: {seen} of {all} requests ({group}) waited for blocks that no "
    "computing request held, {spread}, and {part}."
)
_AGAIN = _WAIT.replace("WHAT", "D computes again the first token that P had sampled")
_UNEXPLAINED = _WAIT.replace("WHAT", "nothing that was recorded explains a part of the way to the first token")
_WAITS = (
    (stages.STAGE_WAIT, "P has finished and its blocks ride behind P's next step to the sender"),
    (stages.SUBMIT_WAIT, "D's order to load rides behind D's step to its worker"),
    (stages.WRITER_WAKE, "P's sender thread sleeps although its work has come"),
    (stages.WRITER_BUSY, "P's sender thread is busy with something else"),
    (stages.STEP_CONNECTOR, "the connector works on the forward thread inside the request's own steps"),
    (stages.PROCESSOR_WAIT, "a thread that works on the request has no processor"),
    (stages.HOST_COPY, "the KV is copied between a device and a host buffer"),
    (stages.REPORT, "D's worker knows that the KV is there and D's scheduler does not yet"),
    (stages.PREFILL_BOUNDARY, "a request that has reached P waits for the step that runs there to end"),
    (stages.PREFILL_FRONTEND, "P's front end reads, tokenises or answers"),
    (stages.DECODE_FRONTEND, "D's front end reads, tokenises or writes the first token"),
    (stages.HANDSHAKE, "a pair exchanges agent metadata before its first transfer"),
)
RULES = (
    *(Rule(cause, _WAIT.replace("WHAT", what)) for cause, what in _WAITS),
    Rule(stages.DECODE_CAPACITY, _SHORT.replace("SIDE", "D"), Grade.EXPLAINED, least_requests=terms.EVENTS),
    Rule(stages.PREFILL_CAPACITY, _SHORT.replace("SIDE", "P"), Grade.EXPLAINED, least_requests=terms.EVENTS),
    Rule(stages.FIRST_STEP, _AGAIN, share=terms.RECOMPUTE_SHARE),
)
UNEXPLAINED = Rule(stages.UNKNOWN, _UNEXPLAINED, name="unattributed")


def waits(group: Group) -> Iterator[Finding]:
    """Report each cause that takes a part of the time to first token that counts."""
    for rule in RULES:
        yield from rule.check(group)


def unexplained(group: Group) -> Iterator[Finding]:
    """Report much time without explanation: the rest must not be read as if it were all."""
    yield from UNEXPLAINED.check(group)

"""Plain sentences about one request and about many. What is measured comes first; what is supposed says so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvtrace.findings.terms import SHARE, remedy_in
from kvtrace.report import bracket
from kvtrace.report.style import percent
from kvtrace.stages import CAUSE_BY_NAME, DETECTION, Class
from kvtrace.verdict import NO_HANDOFF, UNDER_WAY, VERDICTS
from kvtrace.wording import figure, ms, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrace.report.selection import Explained

Row = dict[str, Any]

SCOPES: Mapping[str, str] = {
    "client": "as the load generator saw it",
    "router": "as the router saw it",
    "engine": "as the engines saw it",
}
ANSWERS: Mapping[str, str] = {
    "compute": "compute_ns",
    "coordination": "coordination_ns",
    "transfer": "transfer_ns",
}
_NEEDED = {
    "prefill_engine": "P's side",
    "decode_engine": "D's side",
    "first_token_ns": "a first token",
    "end_ns": "its end",
}
_UNNEEDED = frozenset((("prefill_engine", NO_HANDOFF),))
"""What a verdict does without: D serves some requests alone."""
BURST = 1.5
"""Nobody serves more than is offered: so much more of it means that requests ended closer together than they came."""
CONTACT_PART = 0.05
"""Of a percentile: if first contact moves none further, nothing is said of it."""
_OWNERS = {"client": "the client's", "prefill": "P's", "decode": "D's", "router": "the router's"}


def phrase(cause: str) -> str:
    """Return a cause as prose: prefill.step_boundary is "P's step boundary", wire stays "wire"."""
    owner, dot, rest = cause.partition(".")
    if dot and owner in _OWNERS:
        return f"{_OWNERS[owner]} {rest.replace('_', ' ')}"
    return cause


def explanation(explained: Explained) -> str:
    """Return what one request waited for, in one to three sentences."""
    request = explained.request
    if request["ttft_ns"] is None:
        return _without_first_token(explained)
    ttft_ns = request["ttft_ns"]
    causes = cause_times(explained.segments)
    longest = _longest(causes)
    parts = [
        _part(answer, request[column], ttft_ns, causes, longest)
        for answer, column in sorted(ANSWERS.items(), key=lambda item: -request[item[1]])
        if request[column]
    ]
    told = f"Of {ms(ttft_ns)} to the first token, {SCOPES.get(request['scope'], 'seen from an unnamed place')}, "
    told += f"{_listed(parts)}; " if parts else ""
    told += _rest(request["unattributed_ns"], ttft_ns)
    doubt = bracket.sentence(request, {cause for cause, _ in causes})
    return " ".join(filter(None, [told, doubt, _longest_wait(longest, causes, request), _verdict(request)]))


def cause_times(segments: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Return the time in ns that the path spent on each (cause, class), longest first."""
    times: Counter[tuple[str, str]] = Counter()
    for segment in segments:
        times[segment["cause"], segment["class"]] += segment["end_ns"] - segment["start_ns"]
    return dict(times.most_common())


def remedy(explained: Explained, saturated: bool) -> str | None:
    """Return what usually helps against the longest wait: a supposition, so none where the run was saturated.

    None either against a wait that is too small a part of the whole for anything to help much.
    """
    waits = [
        (cause, time_ns)
        for (cause, kind), time_ns in cause_times(explained.segments).items()
        if kind not in (Class.RUN.value, Class.UNATTRIBUTED.value) and time_ns
    ]
    if not waits or waits[0][0] not in CAUSE_BY_NAME:
        return None
    if saturated:
        return "The run was offered more than it served: waiting then grows everywhere, and no class names a remedy."
    if waits[0][1] < SHARE * (explained.request["ttft_ns"] or 0):
        return None
    cause = CAUSE_BY_NAME[waits[0][0]]
    usual = remedy_in(explained.request["mode"], cause)
    is_doubted = _is_doubted(cause.name, cause_times(explained.segments), explained.request)
    doubted = ", and as far as it was not the wire" if is_doubted else ""
    return f"Supposed, not measured{doubted}: against {phrase(cause.name)} this usually helps: {usual}."


def population_sentence(group: Row) -> str:
    """Return where the median and the tail of one group's TTFT go."""
    timed = group["with_first_token"]
    if not timed:
        return f"None of {plural(group['requests'], 'request')} had a first token."
    if timed == 1:
        return f"The one request had its first token after {ms(group['ttft_ns']['p50'])}: {_mix(group, 'p50')}"
    median, tail = (ms(group["ttft_ns"][name]) for name in ("p50", "p99"))
    told = f"Half of {timed:,} requests had their first token within {median}, 99 % within {tail}. "
    told += f"Around the median {_mix(group, 'p50')} Around p99 {_mix(group, 'p99')}"
    return f"{told} {bracket.NOTE}" if any(bracket.of_group(group, name) for name in ("p50", "p99")) else told


def findings_sentence(basis: Row, findings: Sequence[Row]) -> str | None:
    """Return over how many requests no finding passed, and how many could not be judged; None where that goes without.

    `basis` is that of `kvtrace.report.population`.
    """
    requests, judged, least = basis["requests"], basis["judged_requests"], basis["least_requests"]
    none = "No finding passed its threshold, over "
    few = f"Findings about waiting need {least} requests of one mode and scope with a first token"
    if not judged:
        told = "" if findings else f"{none}{plural(requests, 'request')}. "
        return (
            f"{told}{few}, and the largest such group has {basis['largest_group']}: that none is listed does not mean "
            "that nothing was waited for. Only failures and losses are told of fewer."
        )
    if findings:
        return None
    if judged == requests:
        return f"{none}{plural(requests, 'request')}."
    return f"{none}{judged:,} of {plural(requests, 'request')}. {few}; the other {requests - judged:,} are too few."


def contact_sentence(group: Row) -> str | None:
    """Return how many requests paid for the first contact of their pair, and the percentiles of the others.

    None where no percentile moves by `CONTACT_PART`.
    """
    contact = group["first_contact"]
    if contact is None:
        return None
    before, after = group["ttft_ns"], contact["others_ttft_ns"]
    if all(abs(before[name] - after[name]) < CONTACT_PART * before[name] for name in after):
        return None
    pairs = "its pair" if contact["requests"] == 1 else "their pairs"
    others = ", ".join(f"{name} {ms(time_ns)}" for name, time_ns in after.items())
    return (
        f"{contact['requests']:,} of these requests paid for the first contact of {pairs} (handshake, "
        f"{ms(contact['longest_ns'])} at most). TTFT of the others: {others}."
    )


def load_sentence(load: Row | None) -> str | None:
    """Return whether the run kept up with what was offered, and over which time either rate counts."""
    if load is None:
        return None
    offered, served = load["offered_rate_hz"], load["served_rate_hz"]
    stated = f" (told to: {load['stated_rate_hz']:g})" if load["stated_rate_hz"] is not None else ""
    told = (
        f"Offered {figure(offered)} requests/s from the first arrival to the last{stated}, served {figure(served)} "
        "from the first end to the last"
    )
    if load["saturated"]:
        return f"{told}: saturated. Waiting then grows everywhere, and no class names a remedy."
    if served > BURST * offered:
        return (
            f"{told} while it did: requests ended closer together than they came, as behind a stall, or where the "
            "first of them had the longest answers."
        )
    return f"{told}: the run kept up."


def _mix(group: Row, percentile: str) -> str:
    shares = group["shares"][percentile]
    compute = shares["compute.run"] + shares["compute.queue"]
    bounds = f" ({told})" if (told := bracket.of_group(group, percentile)) else ""
    queued = f" ({percent(shares['compute.queue'], 1)} queued)" if shares["compute.queue"] else ""
    return (
        f"{percent(compute, 1)} was compute{queued}, {percent(shares['coordination'], 1)} coordination, "
        f"{percent(shares['transfer'], 1)} transfer{bounds}, {percent(shares['unattributed'], 1)} unattributed."
    )


def _part(
    answer: str, time_ns: int, ttft_ns: int, causes: Mapping[tuple[str, str], int], longest: tuple[str, str] | None
) -> str:
    """Return one class's share and its largest cause: 41 % was coordination (most of it detection, 12.1 ms).

    The longest wait of all has a sentence of its own, which names it and its part of the class.
    """
    own = _own(answer, causes)
    named = ""
    if own and own[0] != longest:
        spent = causes[own[0]]
        how_much = "" if len(own) == 1 else "most of it " if 2 * spent > time_ns else "longest: "
        named = f" ({how_much}{phrase(own[0][0])}, {ms(spent)})"
    return f"{percent(time_ns, ttft_ns)} was {answer}{named}"


def _own(answer: str, causes: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Return the causes of one class that took any time, with their classes, longest first."""
    return [(cause, kind) for (cause, kind), spent in causes.items() if kind.partition(".")[0] == answer and spent]


def _listed(parts: Sequence[str]) -> str:
    """Return "x was a, y b and z c"."""
    first, *others = parts
    others = [part.replace(" was ", " ", 1) for part in others]
    return ", ".join([first, *others[:-1]]) + (f" and {others[-1]}" if others else "")


def _rest(unattributed_ns: int, ttft_ns: int) -> str:
    if not unattributed_ns:
        return "nothing is unattributed."
    return f"{ms(unattributed_ns)} ({percent(unattributed_ns, ttft_ns)}) is unattributed."


def _longest(causes: Mapping[tuple[str, str], int]) -> tuple[str, str] | None:
    """Return the cause of the longest wait with its class, None where nothing was waited for."""
    waits = (one for one, spent in causes.items() if one[1] != Class.RUN.value and spent and one[0] in CAUSE_BY_NAME)
    return next(waits, None)


def _longest_wait(longest: tuple[str, str] | None, causes: Mapping[tuple[str, str], int], request: Row) -> str | None:
    if longest is None:
        return None
    name, kind = longest
    if kind == Class.UNATTRIBUTED.value:
        return "Its longest wait is what no recorded event explains."
    answer = kind.partition(".")[0]
    is_most = 2 * causes[longest] > request[ANSWERS[answer]]
    part = "all" if len(_own(answer, causes)) == 1 else "most" if is_most else "part"
    at_most = " at most" if _is_doubted(name, causes, request) else ""
    took = f"{ms(causes[longest])}{at_most}, {part} of the {answer}"
    return f"Its longest wait was {phrase(name)}, {took}: {_continued(name)}"


def _is_doubted(cause: str, causes: Mapping[tuple[str, str], int], request: Row) -> bool:
    """Return whether much of the cause's time may have been the wire."""
    return cause == DETECTION.name and bracket.of_request(request, {name for name, _ in causes})[0] is not None


def _continued(cause: str) -> str:
    """Return the cause's sentence as the end of another: "The bytes" goes on small, "D's scheduler" does not."""
    doc = CAUSE_BY_NAME[cause].doc
    return doc[0].lower() + doc[1:] if doc[1].islower() or doc.startswith("A ") else doc


def _verdict(request: Row) -> str | None:
    """Return what the verdict means and what is missing; None for a whole hand-off."""
    verdict = request["verdict"]
    if verdict == UNDER_WAY:
        return "It may still get one: it was under way when this snapshot of the recording was made."
    if verdict == "complete":
        return None
    meaning = VERDICTS.get(verdict, "a verdict that this release does not know")
    missing = [name for column, name in _NEEDED.items() if not request[column] and (column, verdict) not in _UNNEEDED]
    told = f"Verdict {verdict}: {meaning}"
    return f"{told}; nothing usable was recorded of {_listed(missing)}." if missing else f"{told}."


def _without_first_token(explained: Explained) -> str:
    request = explained.request
    known = [
        "its start",
        *(name for column, name in _NEEDED.items() if request[column]),
        *([plural(len(explained.segments), "segment")] if explained.segments else []),
    ]
    untold = "No time of a first token is known, so there is no TTFT to explain."
    return " ".join(filter(None, [untold, _verdict(request), f"Known: {_listed(known)}."]))

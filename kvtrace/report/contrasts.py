"""Sentences about two recordings: what differs most, what is not told apart, what else differs and may be why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrace.findings.terms import LEAST_REQUESTS
from kvtrace.intervals import BLOCKS, CONFIDENCE
from kvtrace.report.comparison import ASKED, FEW, SATURATED, SIDES, WAITED
from kvtrace.report.sentences import phrase
from kvtrace.report.style import NS_PER_MS, percent, printable
from kvtrace.wording import figure, ms, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Row = dict[str, Any]
Names = tuple[str, str]
"""What the two recordings are called: the one that is explained, and the one that it is compared with."""

WHAT = {
    "ttft_ns": "TTFT",
    "tpot_ns": "TPOT",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "offered_rate_hz": "offered requests/s",
    "served_rate_hz": "served requests/s",
}
INTERVALS = (
    f"Intervals are of {100 * CONFIDENCE:.0f} % and hold for all lines of a table together. They come from {BLOCKS} "
    "blocks of consecutive requests a recording, so that a queue counts once and not with every request in it. They "
    "tell these two recordings apart, not what was changed between them from chance: started anew, one deployment "
    "differs from itself by several percent. Record each several times, by turns, before you decide."
)
_MOST = 0.5
_ANEW = 0.10
"""Six pairs of starts of one deployment differed by up to 8 % in their TTFT (docs/costs.md, against stock)."""
_WORTH = 0.01
_CAUSES_NAMED = 2
_DIGITS_MOST = 6


def to_json(document: Row, facts: tuple[Mapping[str, str], Mapping[str, str]], paths: Sequence[str]) -> Row:
    """Return the comparison in the shape that `explain --against --json` promises; times in ns, rates in requests/s."""
    names = called(paths)
    groups = [
        {"sentence": of_group(one, names), "cautions": group_cautions(one, names), **one} for one in document["groups"]
    ]
    said = {"sentence": sentence(document, names), "cautions": cautions(document, names)}
    return {**dict(zip(SIDES, facts, strict=True)), "comparison": {**said, **document, "groups": groups}}


def sentence(document: Row, names: Names) -> str:
    """Return what differs most between the recordings and by how much, or why that cannot be said."""
    if not document["groups"]:
        return f"No comparison: {_why_not(document, names)}."
    first = document["groups"][0]
    told = of_group(first, names)
    if len(document["groups"]) == 1 and not any(one["with_first_token"] for one in document["not_compared"]):
        return told
    modes = " against ".join(dict.fromkeys(first[side]["mode"] for side in SIDES))
    return f"Of {modes}, scope {first['run']['scope']}: {told[0].lower()}{told[1:]}"


def of_group(group: Row, names: Names) -> str:
    """Return what differs most between two groups of requests, or why that cannot be said."""
    if group["no_intervals"]:
        return _unjudged(group, names)
    mean = group["ttft_ns"]["mean"]
    causes = named_causes(group)
    if mean["told_apart"]:
        longer, whose = abs(mean["difference"]), _of(group, names)
        told = f"The first token comes {ms(longer)} ({percent(longer, mean['against'])}) {_later(mean)} "
        told += f"in {whose[0]} than in {whose[1]} (means of {ms(mean['run'])} and {ms(mean['against'])}; "
        told += f"95 % interval {_span(mean)}){_most(mean, causes)}."
        small = longer < _ANEW * mean["against"]
        return told + (" So small a difference can come of starting the same deployment anew." if small else "")
    apart = f"{_signed(mean['difference'])} ms, 95 % interval {_span(mean)}"
    means = f"{ms(mean['run'])} against {ms(mean['against'])}, {apart}"
    others = [
        f"{WHAT[name]} {which} ({_signed(line['difference'])} ms, {_span(line)})"
        for name in WAITED
        if name in group
        for which, line in group[name].items()
        if line["told_apart"]
    ]
    others += [_named(cause) for cause in causes]
    whose = _of(group, names)
    if not others:
        return f"Nothing is told apart between {whose[0]} and {whose[1]}: mean TTFT is {means}."
    return f"Mean TTFT of {whose[0]} and {whose[1]} is not told apart ({means}); what is: {listed(others)}."


def named_causes(group: Row) -> list[Row]:
    """Return the causes that the sentence about a group names: told apart, the one that differs most first.

    Where the mean TTFT is told apart, the first is of its direction and the second against it.
    """
    mean = group["ttft_ns"]["mean"]
    causes = [cause for cause in group["causes"] if cause["told_apart"]]
    if group["no_intervals"] or not mean["told_apart"]:
        return causes[:_CAUSES_NAMED]
    alike = [cause for cause in causes if _is_alike(cause, mean)][:1]
    return alike and [*alike, *[cause for cause in causes if not _is_alike(cause, mean)][:1]]


def _is_alike(cause: Row, mean: Row) -> bool:
    return bool((cause["difference"] > 0) == (mean["difference"] > 0))


def cautions(document: Row, names: Names) -> list[str]:
    """Return what else differs between the recordings, and what is not known of them; most telling first.

    Of their groups the first one's is in it.
    """
    first = document["groups"][:1]
    sides = _told_of(document)
    found = ["Both are the same recording."] if document["is_same"] else []
    found += [_saturated(document, names)] if first else []
    other = [*(_setting(one, names) for one in document["differs"]), *_offered(document)]
    for group in first:
        other += _asked(group)
    found += _possible(other)
    for group in first:
        found += _left_out(group, names)
    for name, side in zip(names, sides, strict=False):
        if document["is_recording"][side]:
            found.append(f"{name} is still being recorded.")
        if lost := document["lost_records"][side]:
            found.append(f"{name} lost {plural(lost, 'record')}: its requests of that time may lack events.")
    for one in (one for one in document["not_compared"] if one["in"] in sides):
        name = names[SIDES.index(one["in"])]
        why = "the other recording has none alike" if one["with_first_token"] else "none had a first token"
        whose = f"{plural(one['requests'], 'request')} of {name} ({one['mode']}, scope {one['scope']})"
        found.append(f"Compared with nothing: {whose}, since {why}.")
    unknown = [name for name, side in zip(names, sides, strict=False) if not document["flags_known"][side]]
    if unknown:
        found.append(
            f"With which flags (caches, batches) the engines of {' and '.join(unknown)} ran is not known: kvtrace sees "
            "them only where it started the engines. What bounds a step is told by the query engines."
        )
    return [told for told in found if told]


def _told_of(document: Row) -> tuple[str, ...]:
    """Return the sides of which something is to be said: of a recording that stands on both, once."""
    return SIDES[:1] if document["is_same"] else SIDES


def group_cautions(group: Row, names: Names) -> list[str]:
    """Return in what else the requests of two groups differ, and how many are left out."""
    return [*_possible([*_asked(group)]), *_left_out(group, names)]


def _possible(other: Sequence[str]) -> list[str]:
    return [f"What else differs and may be the reason: {'; '.join(other)}."] if other else []


def _why_not(document: Row, names: Names) -> str:
    """Return why no group of one recording can be compared with one of the other."""
    groups = {side: [one for one in document["not_compared"] if one["in"] == side] for side in SIDES}
    for name, side in zip(names, SIDES, strict=True):
        if not groups[side]:
            return f"{name} holds no request"
        if not any(one["with_first_token"] for one in groups[side]):
            return f"none of {name}'s requests had a first token"
    timed = [[one for one in groups[side] if one["with_first_token"]] for side in SIDES]
    scopes = [sorted({one["scope"] for one in side}) for side in timed]
    if not set(scopes[0]) & set(scopes[1]):
        return (
            f"{names[0]} has requests of scope {' and '.join(scopes[0])}, {names[1]} of scope {' and '.join(scopes[1])}"
            ", and times that begin and end at different places do not compare; instrument both alike"
        )
    kinds = [listed([f"{one['mode']} (scope {one['scope']})" for one in side]) for side in timed]
    return f"{names[0]} has {kinds[0]}, {names[1]} {kinds[1]}, which are not alike"


def _unjudged(group: Row, names: Names) -> str:
    """Return why a group's differences are no verdict, with the two means."""
    mean, whose = group["ttft_ns"]["mean"], _of(group, names)
    means = f"Mean TTFT is {ms(mean['run'])} in {whose[0]} and {ms(mean['against'])} in {whose[1]}"
    because = " and ".join(names[SIDES.index(side)] for side in group["because_of"])
    if group["no_intervals"] == SATURATED:
        return f"No verdict: {because} was offered more than it served, so TTFT there is queue growth. {means}."
    if group["no_intervals"] == FEW:
        counts = " and ".join(f"{group[side]['with_first_token']:,}" for side in SIDES)
        return f"No verdict: {counts} requests are too few, each side needs {LEAST_REQUESTS}. {means}."
    return (
        f"No verdict: TTFT wanders in {because}: what a request takes depends on those before it for longer than a "
        f"twentieth of the recording, which is too short to tell what is usual. {means}."
    )


def _most(mean: Row, causes: Sequence[Row]) -> str:
    """Return the end of a sentence about a difference that says which causes make it."""
    if not causes:
        return "; no single cause is told apart"
    first, *opposed = causes
    most = "most of it" if first["difference"] / mean["difference"] > _MOST else "first of all"
    return f", {most} {_named(first)}" + "".join(f", in spite of {_named(cause)}" for cause in opposed)


def _named(cause: Row) -> str:
    return f"{phrase(printable(cause['cause']))}, {_signed(cause['difference'])} ms ({_span(cause)})"


def _of(group: Row, names: Names) -> Names:
    """Return what the two recordings are called, with their modes where these differ."""
    if group["run"]["mode"] == group["against"]["mode"]:
        return names
    one, other = (f"{name} ({group[side]['mode']})" for name, side in zip(names, SIDES, strict=True))
    return one, other


def _saturated(document: Row, names: Names) -> str:
    """Return that a recording did not keep up, or that nobody knows whether it did; "" where both did."""
    load = document["load"]
    told = []
    for name, side in zip(names, _told_of(document), strict=False):
        if load[side] is None:
            told.append(f"Whether {name} kept up is not known: too few requests were served.")
        elif load[side]["saturated"]:
            offered, served = load[side]["offered_rate_hz"], load[side]["served_rate_hz"]
            told.append(
                f"{name} was saturated: offered {figure(offered)} requests/s, served {figure(served)}. Waiting then "
                "grows with time everywhere, so no difference of TTFT or of a class is a verdict."
            )
    return " ".join(told)


def _setting(one: Row, names: Names) -> str:
    what, *values = (printable(one[key]) for key in ("what", *SIDES))
    return f"{what} ({values[0]} in {names[0]}, {values[1]} in {names[1]})"


def _offered(document: Row) -> Iterator[str]:
    """Yield by how much the load differs, where it does."""
    line = document["load"]["rates"].get("offered_rate_hz")
    if line and _counts(line):
        yield f"offered load ({figure(line['run'])} and {figure(line['against'])} requests/s)"


def _asked(group: Row) -> Iterator[str]:
    """Yield in what the groups' requests were asked for different things, and by how many engines they were served."""
    for name in ASKED:
        lines = group.get(name, {})
        if which := next((one for one, line in lines.items() if _counts(line)), None):
            yield f"{WHAT[name]} ({which} {lines[which]['run']:,} and {lines[which]['against']:,})"
    engines = [group[side]["engines"] for side in SIDES]
    if engines[0] != engines[1]:
        yield f"engines ({' and '.join('{prefill} P with {decode} D'.format(**one) for one in engines)})"


def _counts(line: Row) -> bool:
    """Return whether a difference is told apart and so large that it may be why another one is there."""
    return bool(line["told_apart"]) and abs(line["difference"]) >= _WORTH * max(line["run"], line["against"])


def _left_out(group: Row, names: Names) -> Iterator[str]:
    """Yield how many requests had no first token, and which verdicts are more frequent on one side."""
    counts = [group[side]["requests"] - group[side]["with_first_token"] for side in SIDES]
    if any(counts):
        each = " and ".join(
            f"{count:,} of {group[side]['requests']:,} in {name}"
            for count, side, name in zip(counts, SIDES, names, strict=True)
        )
        yield f"Left out, since they had no first token: {each}."
    if group["verdicts"]:
        shares = (
            f"{one['verdict']} {percent(one['run'], 1)} and {percent(one['against'], 1)}" for one in group["verdicts"]
        )
        yield f"Hand-offs did not fare alike ({names[0]} and {names[1]}): {listed(list(shares))} of the requests."


def _later(line: Row) -> str:
    return "later" if line["difference"] > 0 else "earlier"


def _signed(duration_ns: float) -> str:
    """Return a difference in ms with its sign."""
    return f"{'+' if duration_ns > 0 else ''}{figure(duration_ns / NS_PER_MS)}"


def _span(line: Row) -> str:
    return f"{_signed(line['low'])} to {_signed(line['high'])} ms"


def digits(line: Row, scale_ns: float) -> int:
    """Return how many decimals of ms suit times of that size: more where an interval would seem to touch 0."""
    places = 1 if scale_ns >= 10 * NS_PER_MS else 3
    if line["told_apart"]:
        while places < _DIGITS_MOST and 10**places * min(abs(line["low"]), abs(line["high"])) < NS_PER_MS:
            places += 1
    return places


def listed(parts: Sequence[str]) -> str:
    """Return "a, b and c"."""
    *before, last = parts
    return f"{', '.join(before)} and {last}" if before else last


def called(paths: Iterable[str]) -> Names:
    """Return what to call two stores: by their files' names, and as many folders before them as tell them apart."""
    one, other = map(printable, paths)
    parts = one.split("/"), other.split("/")
    for depth in range(1, max(map(len, parts)) + 1):
        names = "/".join(parts[0][-depth:]), "/".join(parts[1][-depth:])
        if names[0] != names[1]:
            return names
    return parts[0][-1], parts[1][-1]

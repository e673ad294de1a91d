"""The pages that `explain` prints: one request from headline to causes, or a population group by group."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvtrace.report import pace, sentences, tables, totals
from kvtrace.report.style import fitted, printable, prose, size
from kvtrace.report.waterfall import waterfall
from kvtrace.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from kvtrace.report.selection import Explained
    from kvtrace.totals import Total

Row = dict[str, Any]

AROUND_NOTE = (
    "Shares at a percentile are sums over the requests whose TTFT ranks within 5 points of it (p99: within 1); "
    "their number is the last row."
)
_NOTE_CELLS = 600


def print_request(explained: Explained, saturated: bool, console: Console) -> None:
    """Print one request: what it is, the sentence, shares, picture, causes, what usually helps."""
    request = explained.request
    _print_lines(_headline(request, console), console)
    _say(_facts(request, console), console, style="dim")
    console.print()
    _say(sentences.explanation(explained), console)
    if request["note"]:
        _say(f"Note: {fitted(request['note'], _NOTE_CELLS, console)}", console)
    if request["ttft_ns"] is not None:
        console.print()
        _print_lines(tables.shares(request, console), console)
    picture = waterfall(explained, console)
    if picture:
        console.print()
        _print_lines(picture, console)
        console.print()
        console.print(tables.request_causes(explained, console))
    if told := pace.explanation(explained):
        console.print()
        _say(told, console)
    advice = sentences.remedy(explained, saturated)
    if advice:
        console.print()
        _say(advice, console, style="italic")


def print_whole(lines: Sequence[str], console: Console) -> None:
    """Print lines that are to be copied, however long, below an empty one; nothing where there are none."""
    if lines:
        console.print()
    for line in lines:
        _print_line(line, console)


def print_population(summary: Row, facts: Mapping[str, str], name: str, console: Console) -> None:
    """Print the run's headline and then each scope and mode by itself."""
    _say(f"{printable(name)}: {plural(summary['requests'], 'request')}", console, style="bold")
    _say(_told(facts), console, style="dim")
    _say(sentences.load_sentence(summary["load"]), console)
    _print_findings(summary["findings"], console)
    if told := sentences.findings_sentence(summary["findings_basis"], summary["findings"]):
        console.print()
        _say(told, console)
    for group in summary["groups"]:
        console.print()
        _print_group(group, console)
    _print_pace(summary["pace"], console)
    if any(group["with_first_token"] for group in summary["groups"]):
        console.print()
        _say(AROUND_NOTE, console, style="dim")


def print_totals(found: Sequence[Total], console: Console) -> None:
    """Print vLLM's own totals beside the store's, first which of them differ and why."""
    console.print()
    for line in totals.sentences(found):
        _say(printable(line), console)
    console.print(tables.totals(list(found)))


def _print_findings(findings: list[Row], console: Console) -> None:
    """Print what the run's numbers say, most time at stake first, each with where to look and what kind of remedy."""
    for number, finding in enumerate(findings, 1):
        console.print()
        _say(f"{number}. {finding['sentence']} ({finding['grade']})", console)
        _print_line(f"   See: {finding['command']}", console)
        if finding["example_command"]:
            _print_line(f"   See: {finding['example_command']}", console)
        if finding["examples"]:
            # As wide as a line, since an id that is cut cannot be copied.
            examples = ", ".join(fitted(name, console.width - 4, console) for name in finding["examples"])
            _say(f"   Requests: {examples}", console, style="dim")
        if finding["remedy"]:
            _say(f"   Supposed, not measured: {finding['kind']}; what usually helps: {finding['remedy']}.", console)


def _print_group(group: Row, console: Console) -> None:
    verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in group["verdicts"].items())
    scope = sentences.SCOPES.get(group["scope"], "seen from an unnamed place")
    _say(f"{group['mode']}, scope {group['scope']} ({scope}): {verdicts}", console, style="bold")
    _say(sentences.population_sentence(group), console)
    _say(sentences.contact_sentence(group), console)
    if not group["with_first_token"]:
        return
    blocks = [tables.percentiles(group), tables.population_causes(group, console)]
    if group["hidden"]:
        blocks.append(tables.population_hidden(group, console))
    for block in [*blocks, tables.worst(group, console)]:
        console.print()
        console.print(block)


def _print_pace(paces: Row, console: Console) -> None:
    """Print how the tokens after the first came, and whose transfers cost other requests most."""
    told = pace.population_sentences(paces)
    if told:
        console.print()
    for sentence in told:
        _say(sentence, console)
    if paces["blamed"]:
        console.print()
        console.print(tables.blamed(paces["blamed"], console))


def _say(text: str | None, console: Console, style: str = "") -> None:
    """Print sentences, wrapped; nothing for no text."""
    if text:
        console.print(Text(prose(text, console), style=style))


def _print_line(line: str, console: Console) -> None:
    """Print a line that is to be copied, however long."""
    console.print(Text(printable(line), style="dim"), soft_wrap=True)


def _print_lines(lines: Iterable[Text], console: Console) -> None:
    """Print lines that were made for this width, each as one line whatever happens."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop")


def _headline(request: Row, console: Console) -> list[Text]:
    """Return which request this is and how it was served."""
    client = request["client_request_id"]
    attempt = f", attempt {request['attempt']}" if request["attempt"] else ""
    lines = [Text(fitted(request["request_id"], console.width - 12, console) + attempt, style="bold")]
    if client:
        lines.append(Text(f"client id {fitted(client, console.width - 12, console)}"))
    joined = f", joined by {request['join_method']}" if request["join_method"] else ""
    return [*lines, Text(printable(f"{request['mode']}, {request['verdict']}, scope {request['scope']}{joined}"))]


def _facts(request: Row, console: Console) -> str:
    """Return engines, tokens and bytes as one enumeration; empty if nothing is known of them."""
    engines = [
        f"{side} {fitted(request[column], 40, console)}"
        for side, column in (("P", "prefill_engine"), ("D", "decode_engine"))
        if request[column]
    ]
    tokens = [
        f"{request[column]:,} {what} tokens"
        for what, column in (("prompt", "prompt_tokens"), ("output", "output_tokens"))
        if request[column] is not None
    ]
    moved = []
    if request["moved_bytes"]:
        moved = [f"{size(request['moved_bytes'])} in {plural(request['transfers'] or 0, 'transfer')}"]
        if request["descriptors"]:
            moved[0] += f" of {plural(request['descriptors'], 'descriptor')}"
    checked = []
    if request["checked_blocks"] is not None:
        whole = request["checked_blocks"] + request["unchecked_blocks"]
        checked = [f"{request['checked_blocks']:,} of {plural(whole, 'block')} checked"]
    return ", ".join([*engines, *tokens, *moved, *checked])


def _told(facts: Mapping[str, str]) -> str:
    """Return the run's facts that a reader needs to place its numbers; a model in a folder by the folder's name."""
    wanted = ("model", "vllm", "nixl", "kvtrace", "connector", "device")
    return ", ".join(f"{name} {printable(PurePath(facts[name]).name)}" for name in wanted if facts.get(name))

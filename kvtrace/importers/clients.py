"""Records of load generators: what a client saw of its request, joined by the id that it sent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvtrace import stages
from kvtrace.importers.identity import ClientTimes, Known, own_name
from kvtrace.importers.points import Imported, Part, Placed
from kvtrace.importers.source import Source, printable
from kvtrace.wording import plural

PART = "client"
_REASON_LETTERS = 64


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """One request as its client saw it: unix ns, None where it saw nothing; `failure` is "" for a whole answer."""

    line: int
    client_id: str
    sent_ns: int
    first_token_ns: int | None
    done_ns: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    failure: str = ""

    @property
    def times(self) -> ClientTimes:
        """What tells this record from another one of the same id."""
        return ClientTimes(self.sent_ns, self.first_token_ns, self.done_ns, bool(self.failure))


def place(source: Source, name: str, records: list[ClientRecord], known: Known) -> Imported:
    """Return the points of a load generator's records, each under the request that it is of."""
    placed = Imported(source, name, len(records), parts={PART: Part({"kind": "client"})})
    unjoined = repeated = 0
    for record in records:
        request = known.client(record.client_id, record.sent_ns, record.done_ns) if record.client_id else None
        if request is not None and known.clients.get(request, record.times) != record.times:
            request, repeated = None, repeated + 1
        if request is None:
            unjoined += 1
            request = _own_request(record, known)
        else:
            placed.joined += 1
        known.clients[request] = record.times
        placed.points += _points(record, request)
    if unjoined:
        whole = plural(len(records), "record")
        placed.said.append(f"{unjoined} of {whole} joined no request known here: each stands alone")
    if repeated:
        placed.said.append(f"{repeated} of those bore an id that another record has: ids that repeat join nothing")
    return placed


def _own_request(record: ClientRecord, known: Known) -> str:
    """Return an id of its own for a record that joins nothing: the client's where that is free.

    A record that was imported before has the id that it had then, and never that of another record.
    """

    def is_free(name: str) -> bool:
        return known.clients.get(name, record.times) == record.times

    name = own_name(record.client_id)
    if name and name not in known.names and is_free(name):
        return name
    # Of records without an id only their place in the file tells that they are not one.
    placed = f"{name}#{record.sent_ns}" if name else f"{PART}#{record.sent_ns}.{record.line}"
    numbered = (f"{placed}.{number}" for number in itertools.count(2))
    return next(filter(is_free, itertools.chain([placed], numbered)))


def _points(record: ClientRecord, request: str) -> list[Placed]:
    client_id = printable(record.client_id)
    points = [Placed(record.sent_ns, stages.CLIENT_SENT, request, PART, client_id, record.prompt_tokens)]
    if record.first_token_ns is not None:
        points.append(Placed(record.first_token_ns, stages.CLIENT_FIRST_TOKEN, request, PART))
    if record.failure:
        reason = printable(record.failure, _REASON_LETTERS)
        points.append(Placed(record.done_ns, stages.CLIENT_FAILED, request, PART, reason, record.status))
    else:
        points.append(Placed(record.done_ns, stages.CLIENT_DONE, request, PART, "", record.output_tokens))
    return points

"""Whose record is it: ids of clients, routers and engines, and the hashes that connectors log instead of ids."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtrace import legs, stages
from kvtrace.importers.source import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrace.store import Store

_PERSON = b"vllm-kv-trace"
_LOGGED_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
_HASHED = re.compile(r"[0-9a-f]{16}")
HASHED_ID = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})")
# How vLLM's front end names the engine's request for an id that it was sent, before its random suffix.
_STEMS = ("{}", "cmpl-{}-0", "chatcmpl-{}")
_SHOWN_LETTERS = 230
_IDS_SQL = "SELECT DISTINCT request AS id FROM event WHERE request <> ''"
_REFS_SQL = "SELECT DISTINCT ref AS id FROM event WHERE list_contains($stages, stage::VARCHAR) AND ref <> ''"
_NAMING = [stage.name for stage in (stages.DECODE_ENQUEUED, stages.MATCHED, stages.PREPARED)]
_ATTEMPTS_SQL = """
SELECT e.ref AS client, e.request, e.t_ns, e.a AS attempt, t.request IS NOT NULL AS answered
FROM event AS e LEFT JOIN (SELECT DISTINCT request FROM event WHERE stage = 'router.first_token') AS t USING (request)
WHERE e.stage = 'router.received' AND e.ref <> '' ORDER BY e.t_ns, e.a
"""
_CLIENTS_SQL = """
SELECT request AS id, min(t_ns) FILTER (stage = 'client.sent') AS sent_ns,
  min(t_ns) FILTER (stage = 'client.first_token') AS first_token_ns,
  min(t_ns) FILTER (stage IN ('client.done', 'client.failed')) AS ended_ns, bool_or(stage = 'client.failed') AS failed
FROM event WHERE stage IN ('client.sent', 'client.first_token', 'client.done', 'client.failed') GROUP BY request
"""


def hashed(request_id: str) -> str:
    """Return the hash under which vLLM's lifecycle log lines name a request."""
    text = request_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8, person=_PERSON, usedforsecurity=False).hexdigest()


def logged_group(engine_request: str) -> str:
    """Return an engine's request id without vLLM's random suffix, as the lifecycle log groups requests."""
    return _LOGGED_SUFFIX.sub("", engine_request)


def own_name(text: str) -> str:
    """Return an id fit for a store; one that is not keeps its beginning and gets a digest of the whole."""
    cleaned = printable(text)
    if cleaned == text:
        return cleaned
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{cleaned[:_SHOWN_LETTERS]}~{digest}"


class Attempt(NamedTuple):
    """One attempt that a router made for a client's id."""

    request: str
    t_ns: int
    attempt: int
    answered: bool


@dataclass(slots=True)
class _Attempts:
    """All attempts under one client's id, in time order; `firsts` of them began a client's request."""

    made: list[Attempt] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)
    firsts: int = 0

    def add(self, attempt: Attempt) -> None:
        """Take in one attempt, once."""
        if attempt.request not in self.requests:
            self.requests.add(attempt.request)
            self.firsts += attempt.attempt == 0
            insort(self.made, attempt, key=lambda one: (one.t_ns, one.attempt))

    def answering(self, sent_ns: int, done_ns: int) -> str | None:
        """Return the attempt that answered a client; None where several clients' requests within bear this id."""
        within = self.made
        if self.firsts > 1:
            within = self._within(sent_ns, done_ns)
        if not within:
            return None
        return next((one.request for one in reversed(within) if one.answered), within[-1].request)

    def _within(self, sent_ns: int, done_ns: int) -> list[Attempt]:
        """Return the attempts of the only request that began in that time, none if it is not the only one."""
        found: list[Attempt] = []
        for index in range(bisect_left(self.made, sent_ns, key=lambda one: one.t_ns), len(self.made)):
            one = self.made[index]
            if one.t_ns > done_ns:
                break
            if one.attempt == 0 and any(other.attempt == 0 for other in found):
                return []
            found.append(one)
        return found if any(one.attempt == 0 for one in found) else []


class ClientTimes(NamedTuple):
    """When a client sent, had its first token and ended, in unix ns: two records that differ are two requests."""

    sent_ns: int
    first_token_ns: int | None
    ended_ns: int | None
    failed: bool


@dataclass(slots=True)
class Known:
    """The requests that are known so far, by the ids under which a record may name them."""

    attempts: dict[str, _Attempts] = field(default_factory=lambda: defaultdict(_Attempts))
    names: set[str] = field(default_factory=set)
    clients: dict[str, ClientTimes] = field(default_factory=dict)
    by_hash: dict[str, str] = field(default_factory=dict)
    by_group: dict[str, str] = field(default_factory=dict)
    kept: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def load(cls, store: Store) -> Known:
        """Return what a store knows."""
        known = cls()
        for row in store.rows(_ATTEMPTS_SQL):
            known.attempt(row["client"], Attempt(row["request"], row["t_ns"], row["attempt"], row["answered"]))
        known.learn(row["id"] for row in store.rows(_IDS_SQL))
        known.learn(row["id"] for row in store.rows(_REFS_SQL, {"stages": _NAMING}))
        for request, *times in store.select(_CLIENTS_SQL).values:
            known.clients[request] = ClientTimes(*times)
        return known

    def attempt(self, client_id: str, attempt: Attempt) -> None:
        """Take in what a router made of a client's id."""
        self.attempts[printable(client_id)].add(attempt)
        self.learn([attempt.request])

    def learn(self, ids: Iterable[str]) -> None:
        """Take in ids of engines, routers or clients, and the hashes that stand for them."""
        for one in ids:
            parts = HASHED_ID.fullmatch(one)
            if parts:  # an earlier import found no name for it
                self.kept[parts[1], parts[2]] = one
                self.names.add(parts[1])
                continue
            self.by_hash[hashed(one)] = one
            self.by_group.setdefault(hashed(logged_group(one)), logged_group(one))
            for base in legs.base_ids(one):
                self.names.add(base)
                for pattern in _STEMS:
                    named = pattern.format(base)
                    self.by_group.setdefault(hashed(named), named)

    def client(self, client_id: str, sent_ns: int, done_ns: int) -> str | None:
        """Return the request that a client's record is of, None if no request or more than one may be meant."""
        attempts = self.attempts.get(printable(client_id))
        if attempts is not None:
            return attempts.answering(sent_ns, done_ns)
        if client_id in self.names or printable(client_id) in self.names:
            return client_id if client_id in self.names else printable(client_id)
        hashes = (hashed(pattern.format(client_id)) for pattern in _STEMS)
        return next((one for one in hashes if one in self.names), None)

    def engine(self, id_hash: str, group_hash: str) -> tuple[str, bool]:
        """Return the id for an engine's hashed request, and whether it is one that somebody knows."""
        if id_hash in self.by_hash:
            return self.by_hash[id_hash], True
        kept = self.kept.get((group_hash, id_hash[:8]))
        if kept is not None:
            return kept, True
        base = self.by_group.get(group_hash)
        return f"{base or group_hash}-{id_hash[:8]}", base is not None


def is_hash(text: str) -> bool:
    """Return whether a text can be one of those hashes."""
    return _HASHED.fullmatch(text) is not None

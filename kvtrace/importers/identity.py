"""Whose record is it: ids of clients, routers and engines, and the hashes that connectors log instead of ids."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtrace import assemble, stages
from kvtrace.importers.source import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrace.store import Store

_PERSON = b"vllm-kv-trace"
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
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
_CLIENTS_SQL = "SELECT request AS id, t_ns FROM event WHERE stage = 'client.sent'"


def hashed(request_id: str) -> str:
    """Return the hash under which vLLM's lifecycle log lines name a request."""
    text = request_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8, person=_PERSON, usedforsecurity=False).hexdigest()


def stem(engine_request: str) -> str:
    """Return an engine's request id without vLLM's random suffix, as the lifecycle log groups requests."""
    return _RANDOM_SUFFIX.sub("", engine_request)


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
class Known:
    """The requests that are known so far, by the ids under which a record may name them."""

    attempts: dict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    names: set[str] = field(default_factory=set)
    clients: dict[str, int] = field(default_factory=dict)
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
        known.clients = {row["id"]: row["t_ns"] for row in store.rows(_CLIENTS_SQL)}
        return known

    def attempt(self, client_id: str, attempt: Attempt) -> None:
        """Take in what a router made of a client's id."""
        known = self.attempts[printable(client_id)]
        if all(one.request != attempt.request for one in known):
            known.append(attempt)
        self.learn([attempt.request])

    def learn(self, ids: Iterable[str]) -> None:
        """Take in ids of engines, routers or clients, and the hashes that stand for them."""
        for one in ids:
            is_hash = HASHED_ID.fullmatch(one)
            if is_hash:  # an earlier import found no name for it
                self.kept[is_hash[1], is_hash[2]] = one
                self.names.add(is_hash[1])
                continue
            self.by_hash[hashed(one)] = one
            self.by_group.setdefault(hashed(stem(one)), stem(one))
            for base in assemble.base_ids(one):
                self.names.add(base)
                for pattern in _STEMS:
                    named = pattern.format(base)
                    self.by_group.setdefault(hashed(named), named)

    def client(self, client_id: str, sent_ns: int, done_ns: int) -> str | None:
        """Return the request that a client's record is of, None if no request or more than one may be meant."""
        attempts = self.attempts.get(printable(client_id))
        if attempts:
            return _answered(attempts, sent_ns, done_ns)
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


def _answered(attempts: list[Attempt], sent_ns: int, done_ns: int) -> str | None:
    """Return the attempt that answered the client; None where several clients' requests bear this id."""
    if sum(one.attempt == 0 for one in attempts) > 1:
        attempts = [one for one in attempts if sent_ns <= one.t_ns <= done_ns]
        if sum(one.attempt == 0 for one in attempts) != 1:
            return None
    return next((one.request for one in reversed(attempts) if one.answered), attempts[-1].request)


def is_hash(text: str) -> bool:
    """Return whether a text can be one of those hashes."""
    return _HASHED.fullmatch(text) is not None

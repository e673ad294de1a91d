"""Spans of a recording that goes on: each request's once it is over, sampled so that what is slow or failed stays."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

from kvtrace.analyze import load_processes
from kvtrace.exporters import source
from kvtrace.exporters.spans import RunFacts
from kvtrace.exporters.traces import spans
from kvtrace.verdict import COMPLETE, NO_HANDOFF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from kvtrace.collect import Stats
    from kvtrace.exporters.otlp import Health, Sender
    from kvtrace.exporters.source import Row
    from kvtrace.store import Store

RECENT_REQUESTS = 1000
_SLOW_SHARE = 0.05
# Of fewer requests nobody can say which are slow.
_RECENT_MIN = 20
_HASH_BITS = 64
_ROWS_SQL = """
SELECT request_key, request_id, ttft_ns, verdict FROM request
WHERE request_key BETWEEN $least AND $most AND list_contains($keys::BIGINT[], request_key) ORDER BY start_ns
"""
_FINE = frozenset((COMPLETE, NO_HANDOFF))


class Sampling:
    """Keeps a share of all requests, and every one that failed or is among the slowest twentieth of late."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._recent: deque[int] = deque(maxlen=RECENT_REQUESTS)

    def keeps(self, row: Row) -> bool:
        """Return whether the request with this row of table request is kept; an equal id gives an equal answer."""
        must = self.must_keep(row)
        if row["ttft_ns"] is not None:
            self._recent.append(row["ttft_ns"])
        return must or self._draws(row["request_id"])

    def must_keep(self, row: Row) -> bool:
        """Return whether it failed, or is slow compared with those seen lately."""
        if row["verdict"] not in _FINE or row["ttft_ns"] is None:
            return True
        if len(self._recent) < _RECENT_MIN:
            return False
        slower = sum(1 for ttft_ns in self._recent if ttft_ns >= row["ttft_ns"])
        return slower < _SLOW_SHARE * len(self._recent)

    def _draws(self, request_id: str) -> bool:
        drawn = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=_HASH_BITS // 8).digest())
        return drawn < self.share * (1 << _HASH_BITS)


class SpanObserver:
    """Sends the spans of requests that are over. A receiver that is away costs counted drops and no time."""

    def __init__(self, sender: Sender, sampling: Sampling | None = None) -> None:
        self._sender = sender
        self._sampling = sampling or Sampling()
        self._passed_over = 0

    @property
    def health(self) -> Health:
        """Return how sending goes."""
        return self._sender.health

    def took(self, store: Store, events: pa.Table) -> None:
        """Do nothing: spans are made of whole requests."""

    def over(self, store: Store, keys: Sequence[int], stats: Stats) -> None:  # noqa: ARG002
        """Offer the spans of those requests that the sampling keeps."""
        of_keys = {"keys": list(keys), "least": min(keys, default=0), "most": max(keys, default=0)}
        rows = store.rows(_ROWS_SQL, of_keys) if keys else []
        kept: dict[int, bool] = {}
        for row in rows:
            must = self._sampling.must_keep(row)
            if self._sampling.keeps(row):
                kept[row["request_key"]] = must
        self._passed_over += len(rows) - len(kept)
        if kept:
            self._offer(store, kept)

    def _offer(self, store: Store, kept: Mapping[int, bool]) -> None:
        """Offer requests by key; one whose client's trace is not sampled only if it must be kept."""
        facts, processes, keys = RunFacts.of(store), load_processes(store), list(kept)
        self._sender.resource = dict(facts.resource)
        for first in range(0, len(keys), source.BATCH_REQUESTS):
            for told in source.told(store, keys[first : first + source.BATCH_REQUESTS], processes):
                made = spans(told, facts)
                if made[0].sampled or kept[told.row["request_key"]]:
                    self._sender.offer(made)
                else:
                    self._passed_over += 1

    def facts(self) -> dict[str, str]:
        """Return what was sent, dropped and left out so far, for the recorder's health."""
        health = self._sender.health
        found = {
            "recorder.otlp_exported_spans": str(health.exported),
            "recorder.otlp_dropped_spans": str(health.dropped),
            "recorder.otlp_unsampled_requests": str(self._passed_over),
        }
        return found | ({"recorder.otlp_failure": health.failure} if health.failure else {})

    def finish(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._sender.close()

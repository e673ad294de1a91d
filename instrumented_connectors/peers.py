"""Handshakes with other engines, on whichever thread they run."""

from __future__ import annotations

from typing import Any

from instrumented_connectors import privates
from instrumented_connectors.watch import Tracer, watch
from kvtrace import stages

_STARTED = stages.HANDSHAKE_STARTED.code
_ENDED = stages.HANDSHAKE_ENDED.code


class PeerSide:
    """Watches a worker's handshakes and emits their begin and end; they belong to a peer, not to a request."""

    def __init__(self, tracer: Tracer, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank

    def attach(self, worker: Any) -> None:
        """Watch the worker's handshakes."""
        if privates.find(worker, privates.NIXL_HANDSHAKE) is not None:
            name = privates.NIXL_HANDSHAKE.name
            watch(worker, name, self._tracer, before=self._started, after=self._ended, failed=self._failed)

    def _started(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *_args: Any, **_kwargs: Any
    ) -> str:
        del host, port, remote_tp_size  # named as vLLM names them, so that keywords find their place
        self._tracer.emit(_STARTED, "", self._rank, 0, 0, 0, expected_engine_id)
        return expected_engine_id

    def _ended(self, engine: str, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        self._tracer.emit(_ENDED, "", self._rank, 1, 0, 0, engine)

    def _failed(self, engine: str, _error: BaseException, *_args: Any, **_kwargs: Any) -> None:
        self._tracer.emit(_ENDED, "", self._rank, 0, 0, 0, engine)

"""What the scheduler's side tells the workers of the blocks of chosen requests: kept on P, given up on either side.

A worker is not told which blocks P keeps in pull, nor of a request's end before its blocks may be others'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from instrumented_connectors.watch import Tracer, watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instrumented_connectors.sampling import Sampling

NEWS_ATTRIBUTE = "kvtrace_blocks"
"""Name of the attribute of the connector's metadata that carries a step's `News` to the workers."""


class News(NamedTuple):
    """By request the blocks that P keeps, group by group, and the requests whose blocks are theirs no longer.

    The metadata of a step is bound before its forward, and no earlier step writes into blocks that were given up.
    """

    kept: dict[str, list[list[int]]]
    over: list[str]


class BlockNews:
    """Watches a scheduler's connector and puts what it learns into the metadata of the next step."""

    def __init__(self, tracer: Tracer, sampling: Sampling) -> None:
        self._tracer = tracer
        self._sampling = sampling
        self._kept: dict[str, list[list[int]]] = {}
        self._over: list[str] = []

    def attach(self, connector: Any) -> None:
        """Watch the connector's scheduler hooks."""
        watch(connector, "request_finished", self._tracer, after=self._finished)
        watch(connector, "request_finished_all_groups", self._tracer, after=self._finished)
        watch(connector, "build_connector_meta", self._tracer, after=self._carried)

    def _finished(
        self, _token: None, result: tuple[bool, Any], request: Any, block_ids: Sequence[Any], *_: Any
    ) -> None:
        params = request.kv_transfer_params
        if not (result[0] and params and params.get("do_remote_decode")):
            self._over.append(request.request_id)
        elif self._sampling.takes(request.request_id):
            is_flat = bool(block_ids) and isinstance(block_ids[0], int)
            groups = (block_ids,) if is_flat else block_ids
            self._kept[request.request_id] = [list(group) for group in groups]

    def _carried(self, _token: None, metadata: Any, scheduler_output: Any) -> None:
        over = [*self._over, *(scheduler_output.preempted_req_ids or ())]
        if over or self._kept:
            setattr(metadata, NEWS_ATTRIBUTE, News(self._kept, over))
            self._kept, self._over = {}, []

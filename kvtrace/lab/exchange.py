"""One request of a load as its client sees it: sent, its answer read as it arrives, timed by the monotonic clock."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx

from kvtrace.errors import LabError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the client saw it."""

    index: int
    client_request_id: str
    due_ns: int
    start_ns: int
    end_ns: int = 0
    status: int = 0
    """HTTP status, 0 where none arrived."""
    ttft_ns: int | None = None
    """From start to the first content; None for replies that were not streamed."""
    itl_ns: tuple[int, ...] = ()
    """Times between one content chunk and the next."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    error: str = ""

    @property
    def tpot_ns(self) -> float | None:
        """Return the mean time per output token after the first, None where there is none."""
        if self.ttft_ns is None or self.output_tokens < 2:
            return None
        return (self.end_ns - self.start_ns - self.ttft_ns) / (self.output_tokens - 1)


async def fetch(client: httpx.AsyncClient, body: dict[str, Any], record: Record) -> Record:
    """Send one request and return its completed record; whatever goes wrong becomes its error."""
    headers = {"X-Request-Id": record.client_request_id}
    answer = _Answer()
    try:
        record = replace(record, start_ns=time.monotonic_ns())
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            answer.status = reply.status_code
            if reply.status_code != httpx.codes.OK:
                answer.error = f"HTTP {reply.status_code}: {(await reply.aread())[:500].decode(errors='replace')}"
            elif body["stream"]:
                await answer.read_events(reply.aiter_lines())
            else:
                answer.take(json.loads(await reply.aread()), time.monotonic_ns())
    except (httpx.HTTPError, ValueError, LabError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer.complete(record, body)


@dataclass(slots=True)
class _Answer:
    """An answer as it arrives."""

    status: int = 0
    error: str = ""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    content_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0
    """When a stream's end mark came, 0 before."""
    output_tokens: int = 0
    prompt_tokens: int = 0

    async def read_events(self, lines: AsyncIterator[str]) -> None:
        """Take in server-sent events, and read on to the end behind their end mark, so that the connection can stay."""
        async for line in lines:
            arrived_ns = time.monotonic_ns()
            if line == "data: [DONE]":
                self.ended_ns = arrived_ns
            elif line.startswith("data: "):
                self.take(json.loads(line.removeprefix("data: ")), arrived_ns)
        if not self.ended_ns:
            raise LabError("the stream ended without its end mark")

    def take(self, event: dict[str, Any], arrived_ns: int) -> None:
        """Take in one event, or a whole reply."""
        if "error" in event:
            raise LabError(f"the server reports {event['error']}")
        for choice in event.get("choices", ()):
            if choice.get("text") or choice.get("token_ids"):
                self.content_ns.append(arrived_ns)
                self.texts.append(choice.get("text") or "")
                self.token_ids += choice.get("token_ids") or ()
        if usage := event.get("usage"):
            self.output_tokens = usage.get("completion_tokens") or 0
            self.prompt_tokens = usage.get("prompt_tokens") or 0

    def complete(self, record: Record, body: dict[str, Any]) -> Record:
        """Return the record with what has arrived."""
        times_ns = self.content_ns if body["stream"] else []
        return replace(
            record,
            end_ns=self.ended_ns or time.monotonic_ns(),
            status=self.status,
            ttft_ns=times_ns[0] - record.start_ns if times_ns else None,
            itl_ns=tuple(later - earlier for earlier, later in itertools.pairwise(times_ns)),
            output_tokens=self.output_tokens or len(self.token_ids),
            prompt_tokens=self.prompt_tokens or len(body["prompt"]),
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            error=self.error,
        )

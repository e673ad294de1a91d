"""What the analysis says of requests, as rows of the tables of `schema.ANSWERS`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from kvtrace import stages
from kvtrace.model import Attribution, Request
from kvtrace.store import Store


def names(request: Request) -> set[str]:
    """Return every id under which a row for this request may stand."""
    seen = {event.request for events in request.events.values() for event in events}
    return {request.request_id, request.base_id, *seen}


def write(store: Store, answers: Iterable[Attribution], *, replace_from_ns: int | None) -> set[int]:
    """Write answers to the tables of `schema.ANSWERS`, in place of those for these requests that begin then or later.

    None replaces none.
    Returns when the requests began whose answers are new or have gone, unix ns.
    """
    answers = list(answers)
    if not answers:
        return set()
    changed_ns = {answer.start_ns for answer in answers}
    if replace_from_ns is not None:
        # A row bears the id of its legs until their front end is seen, and that of its front end from then on.
        ids = sorted({name for answer in answers for name in names(answer.request)})
        changed_ns.update(store.forget_requests(ids, replace_from_ns))
    first_key = store.next_request_key()
    keyed = list(enumerate(answers, start=first_key))
    for table, rows in (
        ("request", (_request_row(key, answer) for key, answer in keyed)),
        ("segment", _segment_rows(keyed)),
        ("hidden", _hidden_rows(keyed)),
        ("pace", _pace_rows(keyed)),
        ("pace_part", _pace_part_rows(keyed)),
        ("blame", _blame_rows(keyed)),
    ):
        store.append_rows(table, rows)
    return changed_ns


def _request_row(key: int, answer: Attribution) -> dict[str, Any]:
    request, shares = answer.request, answer.shares_ns
    has_token = answer.ttft_ns is not None
    run_ns, queue_ns = shares[stages.Class.RUN.value], shares[stages.Class.QUEUE.value]
    row: dict[str, Any] = {
        "request_key": key,
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "attempt": request.attempt,
        "mode": request.mode,
        "verdict": answer.verdict,
        "scope": answer.scope,
        "join_method": request.join_method,
        "prefill_engine": request.prefill_engine,
        "decode_engine": request.decode_engine,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.prefix.cached,
        "remote_tokens": answer.prefix.remote,
        "output_tokens": answer.output_tokens,
        "start_ns": answer.start_ns,
        "first_token_ns": answer.first_token_ns,
        "end_ns": answer.end_ns,
        "registration_late_ns": answer.registration_late_ns,
        "moved_bytes": sum(transfer.moved_bytes for transfer in request.transfers),
        "descriptors": sum(transfer.descriptors for transfer in request.transfers),
        "transfers": len(request.transfers),
        **answer.blocks._asdict(),
        "straggler_rank": answer.straggler.rank if answer.straggler else None,
        "straggler_ns": answer.straggler.waited_ns if answer.straggler else None,
        **_integrity(answer),
        "crosses_hosts": any(segment.crosses_hosts for segment in answer.segments),
        "idle_ns": answer.idle_ns,
        "lost_ns": request.lost[-1].end_ns - request.lost[0].start_ns if request.lost else None,
        "note": answer.note,
        **_spent(answer),
        "tpot_ns": answer.pace.tpot_ns if answer.pace is not None else None,
        "decode_tokens": answer.pace.tokens if answer.pace is not None else None,
    }
    shown = {
        "ttft_ns": answer.ttft_ns,
        "compute_ns": run_ns + queue_ns,
        "compute_run_ns": run_ns,
        "compute_queue_ns": queue_ns,
        "coordination_ns": shares[stages.Class.COORDINATION.value],
        "transfer_ns": shares[stages.Class.TRANSFER.value],
        "transfer_low_ns": answer.transfer_low_ns,
        "transfer_high_ns": answer.transfer_high_ns,
        "unattributed_ns": shares[stages.Class.UNATTRIBUTED.value],
    }
    row.update(shown if has_token else dict.fromkeys(shown))
    return row


def _spent(answer: Attribution) -> dict[str, int | None]:
    """Return what some causes took on the path, None for those that do not lie there."""
    spent: dict[str, int | None] = dict.fromkeys(("post_ns", "wire_ns", "detection_ns"))
    for segment in answer.segments:
        if (name := f"{segment.cause}_ns") in spent:
            spent[name] = (spent[name] or 0) + segment.end_ns - segment.start_ns
    return spent


def _integrity(answer: Attribution) -> dict[str, int | None]:
    found = answer.integrity
    if found is None:
        return dict.fromkeys(("checked_blocks", "corrupt_blocks", "unchecked_blocks"))
    corrupt = len(found.corrupt)
    return {"checked_blocks": found.checked, "corrupt_blocks": corrupt, "unchecked_blocks": found.unchecked}


def _segment_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        for position, segment in enumerate(answer.segments):
            cause = stages.CAUSE_BY_NAME[segment.cause]
            yield {
                "request_key": key,
                "position": position,
                "class": cause.kind.value,
                "cause": cause.name,
                "where": cause.where.value,
                "waited_for": segment.waited_for,
                "start_ns": segment.start_ns,
                "end_ns": segment.end_ns,
                "crosses_hosts": segment.crosses_hosts,
            }


def _hidden_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        for hidden in answer.hidden:
            cause = stages.CAUSE_BY_NAME[hidden.cause]
            yield {
                "request_key": key,
                "cause": cause.name,
                "class": cause.kind.value,
                "where": cause.where.value,
                "start_ns": hidden.start_ns,
                "duration_ns": hidden.duration_ns,
                "slack_ns": hidden.slack_ns,
            }


def _pace_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if (pace := answer.pace) is not None:
            yield {
                "request_key": key,
                "start_ns": pace.start_ns,
                "end_ns": pace.end_ns,
                "tokens": pace.tokens,
                "steps": len(pace.itl_ns),
                "tpot_ns": pace.tpot_ns,
                "itl_p50_ns": int(statistics.median(pace.itl_ns)) if pace.itl_ns else None,
                "itl_max_ns": max(pace.itl_ns, default=None),
                "extension_ns": pace.extension_ns,
                "occupancy_ns": pace.occupancy_ns,
            }


def _pace_part_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if answer.pace is not None:
            for name, duration_ns in answer.pace.parts_ns.items():
                kind = stages.CAUSE_BY_NAME[name].kind.value
                yield {"request_key": key, "cause": name, "class": kind, "duration_ns": duration_ns}


def _blame_rows(keyed: list[tuple[int, Attribution]]) -> Iterator[dict[str, Any]]:
    for key, answer in keyed:
        if answer.pace is not None:
            for name, spent_ns in answer.pace.blame_ns.items():
                yield {"request_key": key, "blamed_request_id": name, "extension_ns": spent_ns}

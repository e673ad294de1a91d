"""Table `finding`: what a run says, kept in its store for whoever does not ask kvtrace."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrace import schema
from kvtrace.findings import checks, gather, rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrace.findings.model import Finding
    from kvtrace.store import Store

AS_OF = "findings.as_of_ns"
"""The fact of the run that says as of when table `finding` is, also where it is empty."""

MOST = 200_000
"""Of more requests the newest speak: gathering from these takes four seconds of processor time and 0.8 GiB."""

_SPAN_SQL = """
SELECT count(*) AS requests, min(start_ns) AS from_ns, max(coalesce(end_ns, first_token_ns, start_ns)) AS as_of_ns
FROM request
"""
_NEWEST_SQL = "SELECT min(start_ns) FROM (SELECT start_ns FROM request ORDER BY start_ns DESC LIMIT $newest)"
# Everything else that is gathered is joined to a request, or is no matter of time.
_TIMES = {"request": "start_ns", "step": "scheduled_ns"}


@dataclass(frozen=True, slots=True)
class _Span:
    """Of which requests something is said: how many the store has, and the first and last moment (unix ns)."""

    requests: int
    from_ns: int | None
    as_of_ns: int | None


def write(store: Store, newest: int = MOST) -> int:
    """Put what the run says now in place of what table `finding` holds; return how many findings that is.

    Of more requests than `newest` those speak that began last. Wants a transaction around.
    """
    span = _Span(**store.rows(_SPAN_SQL)[0])
    if span.requests > newest:
        from_ns = store.select(_NEWEST_SQL, {"newest": newest}).values[0][0]
        with _hidden(store, from_ns):
            span = _Span(**store.rows(_SPAN_SQL)[0])
            found = _found(store)
    else:
        found = _found(store)
    store.execute("DELETE FROM finding")
    if found:
        store.append_rows("finding", _rows(found, span))
    if span.as_of_ns is not None:
        store.remember({AS_OF: str(span.as_of_ns)})
    return len(found)


def _found(store: Store) -> list[Finding]:
    return checks.findings(gather.gather(store, rates.rates(store)))


@contextmanager
def _hidden(store: Store, before_ns: int) -> Iterator[None]:
    """Hide what began before that time (unix ns) behind views, so that the same statements gather from the rest.

    After an exception the views go with the transaction.
    """
    home = schema.quoted(store.select("SELECT current_database()").values[0][0])
    for name, time in _TIMES.items():
        store.execute(f"CREATE TEMP VIEW {name} AS FROM {home}.main.{name} WHERE {time} >= {before_ns:d}")
    yield
    for name in _TIMES:
        store.execute(f"DROP VIEW temp.{name}")


def _rows(found: list[Finding], span: _Span) -> Iterator[dict[str, Any]]:
    for rank, one in enumerate(found, start=1):
        yield {
            "rank": rank,
            "name": one.name,
            "sentence": one.sentence,
            "grade": one.grade.value,
            "class": one.kind,
            "remedy": one.remedy,
            "stake_ns": one.stake_ns,
            "query": one.query,
            "examples": list(one.examples),
            "mode": one.mode,
            "scope": one.scope,
            "from_ns": span.from_ns,
            "as_of_ns": span.as_of_ns,
        }

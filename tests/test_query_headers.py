"""What a query's file says of itself: title, parameters, columns; and how parameters are given."""

from __future__ import annotations

import pytest

from kvtrace import queries
from kvtrace.errors import QueryError, UsageError
from kvtrace.store import Store


@pytest.mark.parametrize("query", queries.load_all(), ids=lambda query: query.name)
def test_header_is_what_the_database_says(blank: Store, query: queries.Query) -> None:
    """Title, parameters, columns and types as documented; an empty store gives an answer, not an error."""
    rows = blank.select(query.sql, query.bind({p.name: "r1" for p in query.parameters if p.is_needed}))

    assert query.title.endswith(".")
    assert {p.name for p in query.parameters} == blank.parameters(query.sql)
    assert [(c.name, c.sql_type) for c in query.columns] == list(zip(rows.columns, rows.types, strict=True))
    assert "HUGEINT" not in rows.types


def test_every_query_is_in_one_group() -> None:
    assert sorted(name for members in queries.GROUPS.values() for name in members) == queries.names()


def test_what_is_needed_and_what_may_be_left_out_is_said() -> None:
    for query in queries.load_all():
        for parameter in query.parameters:
            assert parameter.is_needed != ("if not given" in parameter.doc), (query.name, parameter.name)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"limit": "ten"}, "limit wants BIGINT"), ({"limits": "1"}, "has no parameter limits; it has mode, .* limit")],
)
def test_a_wrong_parameter_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        queries.load("slowest_requests").bind(given)


def test_an_unknown_query_is_named() -> None:
    with pytest.raises(UsageError, match=r"there is no query \.\./\.\./secret"):
        queries.load("../../secret")


@pytest.mark.parametrize(
    ("text", "said"),
    [("SELECT 1", "has no title"), ("-- Title.\n--\n-- what is this\nSELECT 1", "neither a parameter nor a column")],
)
def test_a_header_that_documents_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        queries.parse("bad", text)


def test_a_parameter_means_the_same_in_every_query() -> None:
    """Dashboards bind by name, so that a name stands for one thing."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    for query in queries.load_all():
        for parameter in query.parameters:
            if parameter.name != "limit":
                meanings.setdefault(parameter.name, set()).add((parameter.sql_type, parameter.doc))

    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}

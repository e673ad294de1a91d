"""Style as a test: sizes, names, sentences, and a reason beside every exception from a rule."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtrace import cli, errors, queries, schema, stages

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvtrace", "instrumented_connectors")
MODULE_LINES_MOST = 350
FUNCTION_LINES_MOST = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base", "core", "manager", "stuff"}
UNIT_OF_SUFFIX = {"_ns": "ns", "_bytes": "bytes", "_tokens": "tokens"}
PLAIN_RULES = {"ARG001", "ARG002", "E402", "PLC0415"}
# A source may not name the place where it was written.
PRIVATE = re.compile(r"localhost:\d{4}|/home/\w")


@dataclass(frozen=True, slots=True)
class Source:
    """One source file: its text, and what Python makes of it."""

    name: str
    text: str
    tree: ast.Module


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    assert len(texts) > 100
    return [Source(name, text, ast.parse(text)) for name, text in texts.items()]


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a source file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_sentence(text: str) -> bool:
    """Return whether the text begins like a sentence and ends like one."""
    return len(text) > 8 and (text[0].isupper() or text.startswith("vLLM")) and text.rstrip().endswith((".", "?"))


# A test is one rule for all that it is for: a test a source and a rule were a thousand that took ten times as long.


def test_a_module_is_a_noun_and_short_and_says_what_it_is(sources: list[Source]) -> None:
    assert [source.name for source in sources if Path(source.name).stem in EMPTY_NAMES] == []
    assert [source.name for source in sources if len(source.text.splitlines()) > MODULE_LINES_MOST] == []
    assert [source.name for source in sources if not ast.get_docstring(source.tree)] == []


def test_a_function_fits_on_a_screen(sources: list[Source]) -> None:
    lines = {
        (source.name, function.name): (function.end_lineno or 0) - function.lineno + 1
        for source in sources
        for function in functions(source)
    }

    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES_MOST} == {}


def test_an_exception_from_a_rule_has_its_reason(sources: list[Source]) -> None:
    """`# noqa: X` goes on with why, unless X says it: an argument that a signature asks for, a late import."""
    bare = [
        (source.name, codes)
        for source in sources
        for codes in re.findall(r"# (?:ruff: )?noqa(?:: ([A-Z0-9, ]+))?$", source.text, re.MULTILINE)
        if not set(codes.split(", ")) <= PLAIN_RULES
    ]

    assert bare == []


def test_a_source_does_not_name_the_machine_it_was_written_on(sources: list[Source]) -> None:
    assert [(source.name, found) for source in sources if (found := PRIVATE.findall(source.text))] == []


def test_every_ignored_rule_in_pyproject_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)

    assert ignored is not None
    assert all(re.search(r'^\s*"[A-Z]+\d+",\s+# \S', line) for line in ignored[1].splitlines())


# The vocabulary and what people can name ---------------------------------------------------------------


def test_every_stage_has_a_sentence_and_fields_with_units_in_their_names() -> None:
    for stage in stages.STAGES:
        slots = [field.slot for field in stage.fields]

        assert is_sentence(stage.doc), stage.name
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", stage.name)
        assert len(set(slots)) == len(slots), stage.name
        assert set(slots) <= {"a", "b", "c", "d", "ref"}, stage.name
        for field in stage.fields:
            assert field.doc.endswith("."), (stage.name, field.name)
            for suffix, unit in UNIT_OF_SUFFIX.items():
                if field.name.endswith(suffix):
                    assert field.unit == unit, (stage.name, field.name)
            if field.unit == "ns":
                assert field.name.endswith("_ns"), (stage.name, field.name)


def test_every_cause_has_a_sentence_and_a_remedy() -> None:
    for cause in stages.CAUSES:
        assert is_sentence(cause.doc), cause.name
        assert cause.remedy, cause.name
        assert not cause.remedy.endswith("."), cause.name


def test_codes_and_names_are_each_used_once() -> None:
    assert len(stages.BY_CODE) == len(stages.BY_NAME) == len(stages.STAGES)
    assert len(stages.CAUSE_BY_NAME) == len(stages.CAUSES)


def test_every_query_has_a_title_and_describes_its_columns() -> None:
    for query in queries.load_all():
        assert is_sentence(query.title), query.name
        assert query.columns, query.name
        assert all(described.doc.endswith(".") for described in (*query.parameters, *query.columns)), query.name


def test_every_command_has_a_sentence() -> None:
    assert [name for name, command in cli.COMMANDS.items() if not is_sentence(command.sentence)] == []


def test_every_table_and_column_has_a_sentence_and_times_say_their_unit() -> None:
    for table in (*schema.TABLES, *schema.VIEWS):
        assert is_sentence(table.doc), table.name
        for column in table.columns:
            assert column.doc.strip().endswith("."), (table.name, column.name)
            if column.name.endswith("_ns"):
                assert column.sql_type == "BIGINT", (table.name, column.name)


def test_every_error_says_in_one_line_what_it_is_for() -> None:
    kinds = [item for _, item in inspect.getmembers(errors, inspect.isclass)]

    assert all(issubclass(kind, errors.KvtraceError) for kind in kinds)
    assert all(kind.__doc__ and "\n" not in kind.__doc__ for kind in kinds)

"""Style as a test: sizes, names, sentences, and a reason beside every exception from a rule."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtrace import cli, errors, queries, schema, stages

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvtrace", "instrumented_connectors")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULE_LINES_MOST = 350
FUNCTION_LINES_MOST = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base", "core", "manager", "stuff"}
UNIT_OF_SUFFIX = {"_ns": "ns", "_bytes": "bytes", "_tokens": "tokens"}
PLAIN_RULES = {"ARG001", "ARG002", "E402", "PLC0415"}
# A source may not name the place where it was written.
PRIVATE = re.compile(r"localhost:\d{4}|/home/\w")


def name_of(path: Path) -> str:
    """Return a source's path as a test id."""
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a source file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_sentence(text: str) -> bool:
    """Return whether the text begins like a sentence and ends like one."""
    return len(text) > 8 and (text[0].isupper() or text.startswith("vLLM")) and text.rstrip().endswith((".", "?"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_is_a_noun_and_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()

    assert path.stem not in EMPTY_NAMES
    assert len(lines) <= MODULE_LINES_MOST
    assert ast.get_docstring(ast.parse("\n".join(lines)))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {
        function.name: function.end_lineno - function.lineno + 1
        for function in functions(path)
        if function.end_lineno is not None and function.end_lineno - function.lineno + 1 > FUNCTION_LINES_MOST
    }

    assert long == {}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_an_exception_from_a_rule_has_its_reason(path: Path) -> None:
    """`# noqa: X` goes on with why, unless X says it: an argument that a signature asks for, a late import."""
    found = re.findall(r"# (?:ruff: )?noqa(?:: ([A-Z0-9, ]+))?$", path.read_text(encoding="utf-8"), re.MULTILINE)
    bare = [codes for codes in found if not set(codes.split(", ")) <= PLAIN_RULES]

    assert bare == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_does_not_name_the_machine_it_was_written_on(path: Path) -> None:
    assert PRIVATE.findall(path.read_text(encoding="utf-8")) == []


def test_every_ignored_rule_in_pyproject_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)

    assert ignored is not None
    assert all(re.search(r'^\s*"[A-Z]+\d+",\s+# \S', line) for line in ignored[1].splitlines())


# The vocabulary and what people can name ---------------------------------------------------------------


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_a_sentence_and_fields_with_units_in_their_names(stage: stages.Stage) -> None:
    slots = [field.slot for field in stage.fields]

    assert is_sentence(stage.doc)
    assert re.fullmatch(r"[a-z]+\.[a-z_]+", stage.name)
    assert len(set(slots)) == len(slots)
    assert set(slots) <= {"a", "b", "c", "d", "ref"}
    for field in stage.fields:
        assert field.doc.endswith(".")
        for suffix, unit in UNIT_OF_SUFFIX.items():
            if field.name.endswith(suffix):
                assert field.unit == unit
        if field.unit == "ns":
            assert field.name.endswith("_ns")


@pytest.mark.parametrize("cause", stages.CAUSES, ids=lambda cause: cause.name)
def test_every_cause_has_a_sentence_and_a_remedy(cause: stages.Cause) -> None:
    assert is_sentence(cause.doc)
    assert cause.remedy
    assert not cause.remedy.endswith(".")


def test_codes_and_names_are_each_used_once() -> None:
    assert len(stages.BY_CODE) == len(stages.BY_NAME) == len(stages.STAGES)
    assert len(stages.CAUSE_BY_NAME) == len(stages.CAUSES)


@pytest.mark.parametrize("query", queries.load_all(), ids=lambda query: query.name)
def test_every_query_has_a_title_and_describes_its_columns(query: queries.Query) -> None:
    assert is_sentence(query.title)
    assert query.columns
    assert all(described.doc.endswith(".") for described in (*query.parameters, *query.columns))


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_sentence(name: str) -> None:
    assert is_sentence(cli.COMMANDS[name].sentence)


@pytest.mark.parametrize("table", [*schema.TABLES, *schema.VIEWS], ids=lambda table: table.name)
def test_every_table_and_column_has_a_sentence_and_times_say_their_unit(table: schema.Table | schema.View) -> None:
    assert is_sentence(table.doc)
    for column in table.columns:
        assert column.doc.strip().endswith(".")
        if column.name.endswith("_ns"):
            assert column.sql_type == "BIGINT"


def test_every_error_says_in_one_line_what_it_is_for() -> None:
    kinds = [item for _, item in inspect.getmembers(errors, inspect.isclass)]

    assert all(issubclass(kind, errors.KvtraceError) for kind in kinds)
    assert all(kind.__doc__ and "\n" not in kind.__doc__ for kind in kinds)

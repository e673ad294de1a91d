"""Units, shares, ids and texts as a person reads them; what a terminal would obey is escaped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.report import style
from kvtrace.stages import Class
from kvtrace.wording import figure, ms, plural, seconds
from tests.printed import plain_console


def test_one_of_a_thing_is_no_plural() -> None:
    assert [plural(count, "request") for count in (0, 1, 2, 1000)] == [
        "0 requests", "1 request", "2 requests", "1,000 requests",
    ]  # fmt: skip
    assert [plural(count, "process was", "processes were") for count in (1, 2)] == ["1 process was", "2 processes were"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0"), (0.0421, "0.0421"), (0.5, "0.500"), (0.9994, "0.999"), (0.99951, "1.00"), (8.407, "8.41"),
        (9.994, "9.99"), (9.996, "10.0"), (10.84, "10.8"), (99.6, "99.6"), (99.96, "100"), (488.6, "489"),
        (999.6, "1,000"), (2375, "2,375"), (-5, "-5.00"), (-99.6, "-99.6"), (1e-6, "0.000001"), (-1e-9, "0"),
        (-0.0, "0"),
    ],
)  # fmt: skip
def test_a_sentence_has_three_significant_digits_of_a_number(value: float, told: str) -> None:
    assert figure(value) == told


def test_durations_in_sentences_have_their_unit() -> None:
    assert (ms(8_407_000), seconds(30_000_000_000)) == ("8.41 ms", "30.0 s")


def test_every_class_has_a_colour_and_glyphs_of_its_own() -> None:
    kinds = {kind.value for kind in Class}

    assert set(style.CLASS_STYLE) == kinds
    for attribute in ("colour", "glyph", "ascii_glyph"):
        assert len({getattr(item, attribute) for item in style.CLASS_STYLE.values()}) == len(kinds)
    assert all(item.ascii_glyph.isascii() for item in style.CLASS_STYLE.values())


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("plain-id", "plain-id"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\r\tc\x00", "a\\nb\\r\\tc\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u200bthin", "\\u200bthin"),
        ("\ud800", "\\ud800"),
        ("\x9b31m", "\\x9b31m"),
        ("[red]markup[/red]", "[red]markup[/red]"),
        ("ünïcødé 漢字", "ünïcødé 漢字"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_kept(hostile: str, shown: str) -> None:
    assert style.printable(hostile) == shown


@given(st.text(max_size=300), st.integers(min_value=1, max_value=80))
def test_a_fitted_text_fits_and_is_one_printable_line(text: str, width: int) -> None:
    fitted = style.fitted(text, width, plain_console())

    assert style.cell_len(fitted) <= width
    assert fitted.isprintable()


def test_a_long_id_keeps_both_its_ends() -> None:
    assert style.fitted("a" * 5000 + "b" * 5000, 11, plain_console()) == "aaaaa…bbbbb"
    assert style.fitted("short", 11, plain_console()) == "short"


@pytest.mark.parametrize(
    ("duration_ns", "scale_ns", "shown"),
    [
        (61_240_000, None, "61.2"),
        (0, 61_000_000, "0.0"),
        (12_000, 61_000_000, "<0.1"),
        (51_000, 61_000_000, "0.1"),
        (1_234_000, None, "1.234"),
        (100, None, "<0.001"),
        (123_456_789_000, None, "123456.8"),
        (None, None, "-"),
    ],
)
def test_milliseconds_have_the_digits_that_the_whole_deserves(duration_ns: int, scale_ns: int, shown: str) -> None:
    assert style.milliseconds(duration_ns, scale_ns) == shown


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(1, 2, "50 %"), (1, 1000, "<1 %"), (0, 5, "0 %"), (3, 0, "-"), (None, 5, "-")]
)
def test_a_small_share_is_not_called_nothing(part: int, whole: int, shown: str) -> None:
    assert style.percent(part, whole) == shown


def test_prose_keeps_a_number_with_its_unit() -> None:
    for width in range(12, 60):
        lines = style.prose("It took 12 ms and 3 % of 4 MB, which is 5 % more.", plain_console(width)).split("\n")
        assert not any(line.startswith(("%", "ms", "MB")) for line in lines)
        assert all(len(line) <= width for line in lines)

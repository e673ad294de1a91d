"""The wire format. The literal bytes here are its specification: whoever must change them makes a new FORMAT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace import stages, wire
from kvtrace.errors import SpoolError

GOLDEN = Path(__file__).parent / "golden" / "codes.txt"

HEADER = wire.SegmentHeader(
    series="0badcafe-7-1", number=3, capacity=1024, pid=7, parent_pid=6, pid_namespace=5, start_ticks=4, started_ns=9,
    anchor_monotonic_ns=10, anchor_wall_ns=1_700_000_000_000_000_000, anchor_uncertainty_ns=12,
    host_id="0badcafe", hostname="gpu-1", boot_id="b", domain="b/4026531834", vocabulary="00ff",
)  # fmt: skip


def test_a_record_is_these_64_bytes() -> None:
    expected = bytes.fromhex(
        "0100000000000000"  # t_ns
        "0200000000000000"  # a
        "feffffffffffffff"  # b
        "0400000000000000"  # c
        "0500000000000000"  # d
        "40000000"  # request: string id
        "41000000"  # ref: string id
        "3200"  # code
        "000000000000"
        "0010000000000000"  # commit: the record's offset in the file
    )

    assert expected == wire.RECORD.pack(1, 2, -2, 4, 5, 0x40, 0x41, 50, 4096)


def test_a_string_chunk_is_these_64_bytes() -> None:
    expected = b"cmpl-1" + bytes(34) + bytes.fromhex(
        "40000000"  # string id: the slot of its first chunk
        "0000"  # chunk number
        "0600"  # bytes of the whole string
        "01ff"  # code STRING
        "000000000000"
        "0010000000000000"  # commit
    )  # fmt: skip

    assert expected == wire.CHUNK.pack(b"cmpl-1", 0x40, 0, 6, wire.STRING, 4096)


def test_a_header_is_these_4096_bytes() -> None:
    expected = bytearray(4096)
    expected[0:384] = (
        bytes.fromhex("6b7674726163650a" "01000000" "00100000" "40000000" "04030201" "03000000" "00000000")
        + bytes.fromhex("0004000000000000" "0700000000000000" "0600000000000000" "0500000000000000" "0400000000000000")
        + bytes.fromhex("0900000000000000" "0000000000000000" "0a00000000000000" "00002a36fe9c9717" "0c00000000000000")
        + b"0badcafe-7-1".ljust(48, b"\0") + b"0badcafe".ljust(16, b"\0") + b"gpu-1".ljust(64, b"\0")
        + b"b".ljust(40, b"\0") + b"b/4026531834".ljust(64, b"\0") + b"00ff".ljust(24, b"\0") + bytes(16)
    )  # fmt: skip
    expected[896:900] = bytes.fromhex("896185aa")  # CRC-32 of the 384 bytes

    assert bytes(expected) == wire.pack_header(HEADER)


def test_no_code_is_ever_renumbered_or_reused() -> None:
    """The golden list may only grow: a stage may be added at a free code, never moved, renamed or removed."""
    golden = dict(line.split(" ", 1) for line in GOLDEN.read_text().splitlines())
    now = {str(stage.code): stage.name for stage in stages.STAGES}

    assert golden == {code: now.get(code) for code in golden}, "a published code changed its meaning"
    assert sorted(now) == sorted(golden), f"add the new stages to {GOLDEN.name}"


def test_every_code_fits_the_wire() -> None:
    assert all(0 < stage.code < wire.DROPS_COUNT - 1 for stage in stages.STAGES)
    assert len({stage.code for stage in stages.STAGES}) == len(stages.STAGES)


i64 = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)


@given(st.tuples(i64, i64, i64, i64, i64, u32, u32, st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1)))
def test_any_record_comes_back(record: tuple[int, ...]) -> None:
    assert record == wire.RECORD.unpack(wire.RECORD.pack(*record))


@given(st.text("abc-0", max_size=40), st.integers(0, 2**32 - 1), st.integers(0, 2**63))
def test_any_header_comes_back(text: str, number: int, moment_ns: int) -> None:
    header = replace(HEADER, series=text, hostname=text, number=number, anchor_wall_ns=moment_ns % 2**62)

    assert header == wire.unpack_header(wire.pack_header(header), "x.kvt")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"PAR1" + bytes(8000), "not a kvtrace spool file"),
        (wire.pack_header(HEADER)[:1000], "cut off inside its header"),
        (wire.pack_header(HEADER)[:30] + b"\xff" + wire.pack_header(HEADER)[31:], "header is damaged"),
        (wire.pack_header(HEADER)[:8] + b"\x02" + wire.pack_header(HEADER)[9:], "spool format 2"),
        (wire.pack_header(replace(HEADER, anchor_wall_ns=-1)), "which none does"),
        (wire.pack_header(replace(HEADER, anchor_monotonic_ns=2**63 - 1)), "which none does"),
    ],
)
def test_a_header_that_is_none_is_named(data: Any, reason: str) -> None:
    with pytest.raises(SpoolError, match=rf"x\.kvt: .*{reason}"):
        wire.unpack_header(data, "x.kvt")


@given(st.text(max_size=3000))
def test_a_text_is_cut_at_the_limit_and_stays_utf8(text: str) -> None:
    data = wire.encode_text(text)

    assert len(data) <= wire.TEXT_BYTES_MAX
    assert len(text.encode()) > wire.TEXT_BYTES_MAX or data.decode() == text
    assert b"".join(wire.split_text(data)) == data
    data.decode()


def test_two_long_texts_with_one_beginning_stay_apart() -> None:
    first, second = wire.encode_text("x" * 5000 + "1"), wire.encode_text("x" * 5000 + "2")

    assert first != second
    assert len(first) == len(second) == wire.TEXT_BYTES_MAX


def test_a_lone_surrogate_is_spelt_out() -> None:
    assert wire.encode_text("a\udc80b") == b"a\\udc80b"

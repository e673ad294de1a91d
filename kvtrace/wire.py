"""Bytes: a spool file is a 4096-byte header and 64-byte records, little endian, each record written exactly once.

Event   t_ns a b c d (i8 each) | request ref (u4: string ids, 0 = none) | code (u2) | 6 zero bytes | commit (u8)
Fact    an event with code FACT: request is the name's string id, ref the value's
String  40 bytes of UTF-8 | string id (u4) | chunk (u2) | bytes of the whole (u2) | code STRING | 6 zero bytes | commit

A record's commit word is its own offset in the file and is stored last; so a slot whose commit word is right is whole,
for a reader that reads the commit word *before* the rest. A string's id is the slot number (offset / 64) of its first
chunk. Strings are written before the first record that names them, and hold for one file only.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

from kvtrace import stages
from kvtrace.errors import SpoolError

MAGIC = b"kvtrace\n"
FORMAT = 1
HEADER_BYTES = 4096
RECORD_BYTES = 64
CHUNK_BYTES = 40
TEXT_BYTES_MAX = 4096  # a longer string is cut, and a print of the whole stands at its end
SUFFIX = ".kvt"

VOID = 0xFF00  # a slot that was taken and could not be used
STRING = 0xFF01
FACT = 0xFF02

RECORD = struct.Struct("<5q2IH6xQ")
CHUNK = struct.Struct(f"<{CHUNK_BYTES}sIHHH6xQ")
COUNTER = struct.Struct("<Q")

# The fixed part of the header; `_CRC_OFFSET` holds its checksum. What follows may change while the file is written.
_FIXED = struct.Struct("<8s6I7Q3q48s16s64s40s64s24s16s")
_CRC_OFFSET = 896
_CRC = struct.Struct("<I")
LATEST_NS = 7_258_118_400_000_000_000  # the year 2200: no clock of a machine reads more, or less than 1970
SEALED_OFFSET = 960  # monotonic ns of the moment the writer left the file; 0 while it may still write
DROPS_OFFSET = 1024  # one u8 per stage code: records dropped since the process began
DROPS_COUNT = (HEADER_BYTES - DROPS_OFFSET) // 8  # the last one takes every higher code
_ENDIAN_MARK = 0x01020304


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Who wrote a spool file, on which host and clock. `capacity` is the most records the file may come to hold."""

    series: str
    number: int
    capacity: int
    pid: int
    parent_pid: int
    pid_namespace: int
    start_ticks: int  # clock ticks since boot: with the pid, the identity of a process
    started_ns: int  # Unix ns
    anchor_monotonic_ns: int
    anchor_wall_ns: int
    anchor_uncertainty_ns: int
    host_id: str
    hostname: str
    boot_id: str
    domain: str
    vocabulary: str


def vocabulary_print() -> str:
    """Return 16 hex digits that change when any stage's code or name does."""
    lines = "\n".join(f"{stage.code} {stage.name}" for stage in stages.STAGES)
    return hashlib.blake2s(lines.encode(), digest_size=8).hexdigest()


def pack_header(header: SegmentHeader) -> bytes:
    """Return the header's 4096 bytes; texts that do not fit are cut."""
    fixed = _FIXED.pack(
        MAGIC, FORMAT, HEADER_BYTES, RECORD_BYTES, _ENDIAN_MARK, header.number, 0,
        header.capacity, header.pid, header.parent_pid, header.pid_namespace, header.start_ticks, header.started_ns, 0,
        header.anchor_monotonic_ns, header.anchor_wall_ns, header.anchor_uncertainty_ns,
        *(text.encode("utf-8", "replace") for text in (
            header.series, header.host_id, header.hostname, header.boot_id, header.domain, header.vocabulary, "")),
    )  # fmt: skip
    data = bytearray(HEADER_BYTES)
    data[: len(fixed)] = fixed
    _CRC.pack_into(data, _CRC_OFFSET, zlib.crc32(fixed))
    return bytes(data)


def unpack_header(data: bytes, name: str) -> SegmentHeader:
    """Return what a spool file's first bytes say; `name` names the file in the SpoolError for anything else."""
    if not data:
        raise SpoolError(f"{name}: empty, not a spool file; skipped")
    if data[: len(MAGIC)] != MAGIC:
        raise SpoolError(f"{name}: not a kvtrace spool file; skipped")
    if len(data) < HEADER_BYTES:
        raise SpoolError(f"{name}: cut off inside its header ({len(data)} of {HEADER_BYTES} bytes); skipped")
    fields = _FIXED.unpack_from(data)
    version, header_bytes, record_bytes, mark, number = fields[1:6]
    if version != FORMAT:
        raise SpoolError(f"{name}: spool format {version}, this kvtrace reads {FORMAT}; use the kvtrace that wrote it")
    intact = zlib.crc32(data[: _FIXED.size]) == _CRC.unpack_from(data, _CRC_OFFSET)[0]
    if not intact or (header_bytes, record_bytes, mark) != (HEADER_BYTES, RECORD_BYTES, _ENDIAN_MARK):
        raise SpoolError(f"{name}: its header is damaged; skipped")
    capacity, pid, parent_pid, pid_namespace, start_ticks, started_ns, _spare = fields[7:14]
    texts = [field.rstrip(b"\0").decode("utf-8", "replace") for field in fields[17:23]]
    anchor = fields[14:17]
    if not all(0 <= reading_ns <= LATEST_NS for reading_ns in anchor[:2]):
        raise SpoolError(f"{name}: its clocks read {anchor[0]} and {anchor[1]} ns, which none does; skipped")
    return SegmentHeader(
        texts[0], number, capacity, pid, parent_pid, pid_namespace, start_ticks, started_ns, *anchor, *texts[1:]
    )


def encode_text(text: str) -> bytes:
    r"""Return at most TEXT_BYTES_MAX bytes of UTF-8; a lone surrogate is spelt out as \udcxx, so any store takes it."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= TEXT_BYTES_MAX:
        return data
    mark = b"~" + hashlib.blake2s(data, digest_size=8).hexdigest().encode()
    kept = data[: TEXT_BYTES_MAX - len(mark)].decode("utf-8", "ignore").encode()
    return kept + mark


def split_text(data: bytes) -> list[bytes]:
    """Return the chunks that a string's bytes take, one per record."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def segment_name(series: str, number: int) -> str:
    """Return the file name of a series' segment."""
    return f"{series}-{number:06d}{SUFFIX}"


def drop_offset(code: int) -> int:
    """Return where the header counts the dropped records of a stage code."""
    return DROPS_OFFSET + 8 * min(code, DROPS_COUNT - 1)

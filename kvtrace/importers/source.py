"""A file to import: its lines by number, its digest, and every complaint about it in one shape."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvtrace.errors import SourceError
from kvtrace.wording import ms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = TypeVar("Kind")

HEAD_BYTES = 64 << 10
LINE_BYTES_MAX = 64 << 20
WHOLE_BYTES_MAX = 1 << 30
_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_LACKING = re.compile(r"Object missing required field (.+)")
_OTHER_TYPE = re.compile(r"Expected (.+), got (.+)")
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_MS_NS, _DAY_NS = 1_000_000, 86_400_000_000_000
# Unix times outside these years and durations beyond this are mistakes of a unit or worse.
TIME_NS_MIN, TIME_NS_MAX = 946_684_800_000_000_000, 4_102_444_800_000_000_000
DURATION_NS_MAX = 30 * _DAY_NS
COUNT_MAX = 1 << 53
# Times that were rounded on their way may cross by this much.
ROUNDING_NS = _MS_NS


@dataclass(frozen=True, slots=True)
class Source:
    """One file: where it lies, what it is called in a store, the digest of its bytes, how it begins."""

    path: Path
    digest: str
    head: bytes

    @property
    def name(self) -> str:
        """The file's own name, fit for a store."""
        return printable(self.path.name, 128)

    def fault(self, line: int, reason: str) -> SourceError:
        """Return the error that says what is wrong in which line."""
        return SourceError(f"{self.path}: line {line}: {reason}; nothing was imported")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers from 1."""
        number = 0
        try:
            with self.path.open("rb") as file:
                while line := file.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if len(line) > LINE_BYTES_MAX:
                        raise self.fault(number, f"is longer than {LINE_BYTES_MAX >> 20} MiB, so it is no record")
                    if line := (line.removeprefix(_BOM) if number == 1 else line).strip():
                        yield number, line
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def whole(self) -> bytes:
        """Return all bytes of a file that is one document."""
        try:
            if self.path.stat().st_size > WHOLE_BYTES_MAX:
                raise SourceError(f"{self.path} is larger than {WHOLE_BYTES_MAX >> 30} GiB; split it")
            return self.path.read_bytes().removeprefix(_BOM)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def decode(self, number: int, line: bytes, kind: type[Kind]) -> Kind:
        """Return the JSON of one line as `kind`; fields that `kind` does not name are passed over unread."""
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.fault(number, complaint(error)) from error

    def convert(self, number: int, value: Any, kind: type[Kind]) -> Kind:
        """Return what a JSON parser made, as `kind`."""
        try:
            return msgspec.convert(value, kind)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise self.fault(number, complaint(error)) from error

    # Numbers ------------------------------------------------------------------------------------------

    def time_ns(self, line: int, what: str, value: int) -> int:
        """Return a unix time in ns, or raise."""
        if not TIME_NS_MIN <= value <= TIME_NS_MAX:
            raise self.fault(line, f"{what} is no unix time in ns between the years 2000 and 2100")
        return value

    def duration_ns(self, line: int, what: str, value: float, unit_ns: int) -> int:
        """Return a duration in ns, given in units of `unit_ns`, or raise."""
        if not _is_finite(value) or value < 0 or value * unit_ns > DURATION_NS_MAX:
            raise self.fault(line, f"{what} is no duration between 0 and {DURATION_NS_MAX // _DAY_NS} days")
        return round(value * unit_ns)

    def reading_ns(self, line: int, what: str, value: float, unit_ns: int) -> int:
        """Return a reading of a clock that counts from some start of its own, in ns, or raise."""
        if not _is_finite(value) or not 0 <= value * unit_ns <= TIME_NS_MAX:
            raise self.fault(line, f"{what} is no reading of a clock")
        return round(value * unit_ns)

    def count(self, line: int, what: str, value: float | None) -> int:
        """Return a count, 0 where none was given, or raise."""
        if value is None:
            return 0
        if not _is_finite(value) or not 0 <= value < COUNT_MAX or value != int(value):
            raise self.fault(line, f"{what} is no count")
        return int(value)

    def within(self, line: int, first_token_ns: int, done_ns: int) -> int:
        """Return when the first token came, which is not after the end, or raise."""
        if first_token_ns > done_ns + ROUNDING_NS:
            raise self.fault(line, f"its first token comes {ms(first_token_ns - done_ns)} after its end")
        return min(first_token_ns, done_ns)


def open_source(path: Path) -> Source:
    """Return a regular file's source, its digest taken; raise for what is no text to import."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path} is no regular file; name a file to import")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            digest.update(head)
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if not size_bytes:
        raise SourceError(f"{path} is empty; nothing was imported")
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise SourceError(f"{path} is packed ({name}); unpack it first")
    return Source(path, digest.hexdigest(), head.removeprefix(_BOM))


def printable(text: str, letters_max: int = 256) -> str:
    """Return a text fit for a store: printable, no longer than that."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:letters_max]).strip()


def complaint(error: BaseException) -> str:
    """Return what a JSON parser has to say, in our words; nothing of the record itself is in it."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    said = str(error).partition("\n")[0]
    if "truncated" in said or (isinstance(error, json.JSONDecodeError) and _is_cut(error)):
        return "the record is cut short"
    if isinstance(error, msgspec.ValidationError):
        return f"is no such record: {_in_our_words(said)}"
    at = _AT_BYTE.search(said)
    return f"is not JSON (at byte {at[1]})" if at else "is not JSON"


def _in_our_words(said: str) -> str:
    """Return what msgspec says of a record that is of another shape than wanted."""
    told, _, path = said.replace("`", "").partition(" - at $")
    path = path.removeprefix(".")
    if lacking := _LACKING.fullmatch(told):
        return f"{path or 'it'} lacks the field {lacking[1]}"
    if other := _OTHER_TYPE.fullmatch(told):
        wanted, _, _optional = other[1].partition(" | null")
        return f"{path or 'it'} is of type {other[2]}, and {wanted} is wanted"
    return f"{path}: {told}" if path else told


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path} cannot be read: {error.strerror}")


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return whether a document ends where it may not."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())


def _is_finite(value: float) -> bool:
    """Return whether it is a number that a float can hold: JSON knows integers of any length."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

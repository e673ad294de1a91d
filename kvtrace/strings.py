"""The strings of one spool file: each is written once, in chunks of a record's size, and goes by a number then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace import wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = np.dtype([
    ("text", f"V{wire.CHUNK_BYTES}"), ("string", "<u4"), ("number", "<u2"), ("size", "<u2"), ("code", "<u2"),
    ("unused", "V6"), ("commit", "<u8"),
])  # fmt: skip


class Strings:
    """What has been put together so far: `texts` by number, of which 0 is ""."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {0: ""}
        self._parts: dict[int, dict[int, bytes]] = {}
        self._known = np.zeros(1024, np.bool_)
        self._known[0] = True

    def known(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return which of these numbers have their text."""
        known: NDArray[np.bool_] = self._known[np.minimum(numbers, len(self._known) - 1)]
        return known & (numbers < len(self._known))

    def take(self, records: NDArray[Any]) -> None:
        """Take in chunks, in slot order: most strings lie in one run, so those are cut out without a loop."""
        chunks = records.view(_CHUNK)
        words = chunks.view(np.uint64).reshape(-1, wire.RECORD_BYTES // 8)
        text = words[:, : wire.CHUNK_BYTES // 8].tobytes()
        string, size = chunks["string"], chunks["size"].astype(np.int64)
        starts = np.concatenate([[0], np.flatnonzero(string[1:] != string[:-1]) + 1])
        lengths = np.diff(starts, append=len(string))
        whole = (chunks["number"][starts] == 0) & (lengths == -(-size[starts] // wire.CHUNK_BYTES))
        first = starts[whole] * wire.CHUNK_BYTES
        spans = zip(first.tolist(), (first + size[starts[whole]]).tolist(), strict=True)
        texts = [_decode(text[begin:end]) for begin, end in spans]
        complete = string[starts[whole]].tolist()
        self.texts.update(zip(complete, texts, strict=True))
        for run in np.flatnonzero(~whole).tolist():
            for row in range(starts[run], starts[run] + lengths[run]):
                piece = text[row * wire.CHUNK_BYTES : (row + 1) * wire.CHUNK_BYTES]
                if self._take_one(int(string[row]), int(chunks["number"][row]), int(size[row]), piece):
                    complete.append(int(string[row]))
        if complete:
            highest = max(complete)
            if highest >= len(self._known):
                self._known = np.concatenate([self._known, np.zeros(highest * 2 - len(self._known), np.bool_)])
            self._known[complete] = True

    def _take_one(self, string: int, number: int, size: int, piece: bytes) -> bool:
        """Take in one chunk of a string that others interrupt; return whether it makes the string whole."""
        parts = self._parts.setdefault(string, {})
        parts[number] = piece
        if len(parts) * wire.CHUNK_BYTES < size:
            return False
        self.texts[string] = _decode(b"".join(parts[key] for key in sorted(parts))[:size])
        del self._parts[string]
        return True


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")

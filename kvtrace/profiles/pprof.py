"""Profiles in pprof's form: read, merged under conditions on labels and time, written."""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from kvtrace.errors import SourceError
from kvtrace.profiles.messages import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Labels = Mapping[str, str]
    Frame = tuple[str, str, int]

T = TypeVar("T")

BYTES_MOST = 64 * 1024 * 1024
_GZIP = b"\x1f\x8b"
_MOST = (1 << 63) - 1  # of a pprof number, and of a time in unix ns


def parse(data: bytes) -> Any:
    """Return the profile that the bytes hold, gzipped or not. Raises SourceError for anything else."""
    try:
        profile = Profile.FromString(inflated(data))
    except DecodeError as error:
        raise SourceError("this is no pprof profile: its bytes are none of protobuf") from error
    if not profile.string_table or profile.string_table[0]:
        raise SourceError("this is no pprof profile: its table of strings does not begin with an empty one")
    return profile


def inflated(data: bytes) -> bytes:
    """Return the bytes without gzip, 64 MiB of them at most. Raises SourceError where there are more, or it is cut."""
    if not data.startswith(_GZIP):
        return data
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        whole = stream.decompress(data, BYTES_MOST)
    except zlib.error as error:
        raise SourceError("this gzip file is damaged") from error
    if not stream.eof:
        raise SourceError(f"this gzip file is cut short, or holds more than {BYTES_MOST >> 20} MiB")
    return whole


def packed(profile: Any) -> bytes:
    """Return the profile as a file that pprof, speedscope and Grafana's flame graph read."""
    return gzip.compress(profile.SerializeToString(), compresslevel=6, mtime=0)


def labelled(profile: Any, labels: Labels) -> None:
    """Put labels on every sample of a profile, so that it says itself whose it is."""
    strings = {text: position for position, text in enumerate(profile.string_table)}

    def position(text: str) -> int:
        if text not in strings:
            strings[text] = len(profile.string_table)
            profile.string_table.append(text)
        return strings[text]

    pairs = [(position(name), position(value)) for name, value in labels.items()]
    for sample in profile.sample:
        for key, value in pairs:
            sample.label.add(key=key, str=value)


class Merged:
    """Profiles of one kind of value added up: samples of the same stack and labels become one."""

    def __init__(self, kind: str, unit: str) -> None:
        self.profiles = 0
        self._kind = kind
        self._unit = unit
        self._period = 0
        self._values: dict[tuple[tuple[Frame, ...], tuple[tuple[str, str], ...]], int] = defaultdict(int)
        self._begin_ns = 0
        self._end_ns = 0

    def add(self, profile: Any, keep: Callable[[Labels], bool] = lambda _labels: True) -> None:
        """Add the samples whose labels are to be kept. A profile without any of them does not count."""
        try:
            found = list(_samples(profile, self._unit, keep))
        except (IndexError, KeyError) as error:
            raise SourceError("this profile contradicts itself: a sample names what it does not hold") from error
        if not found:
            return
        begin_ns, end_ns = profile.time_nanos, profile.time_nanos + profile.duration_nanos
        if not 0 <= begin_ns <= end_ns <= _MOST:
            raise SourceError(f"this profile contradicts itself: it is from {begin_ns} to {end_ns}, unix ns")
        sums: dict[tuple[tuple[Frame, ...], tuple[tuple[str, str], ...]], int] = {}
        for stack, labels, value in found:
            key = stack, tuple(sorted(labels.items()))
            sums[key] = sums.get(key, self._values.get(key, 0)) + value
        if max(map(abs, sums.values())) > _MOST:
            raise SourceError("this profile contradicts itself: its values add up to more than centuries")
        self._values.update(sums)
        self._begin_ns = min(self._begin_ns, begin_ns) if self.profiles else begin_ns
        self._end_ns = max(self._end_ns, end_ns)
        self._period = max(self._period, profile.period)
        self.profiles += 1

    def profile(self, comment: str) -> Any:
        """Return the sum as a profile; `comment` says what it is the sum of."""
        made = Profile(time_nanos=self._begin_ns, duration_nanos=self._end_ns - self._begin_ns, period=self._period)
        strings = _Numbered("")
        kind = {"type": strings[self._kind], "unit": strings[self._unit]}
        made.sample_type.add(**kind)
        made.period_type.type, made.period_type.unit = kind["type"], kind["unit"]
        made.comment.append(strings[comment])
        functions: _Numbered[tuple[str, str]] = _Numbered()
        locations: _Numbered[Frame] = _Numbered()
        for (stack, labels), value in self._values.items():
            sample = made.sample.add(location_id=[locations[frame] + 1 for frame in stack], value=[value])
            for name, text in labels:
                sample.label.add(key=strings[name], str=strings[text])
        for frame in locations.found:
            name, file, line = frame
            location = made.location.add(id=locations[frame] + 1, address=locations[frame] + 1)
            location.line.add(function_id=functions[name, file] + 1, line=line)
        for name, file in functions.found:
            made.function.add(
                id=functions[name, file] + 1, name=strings[name], system_name=strings[name], filename=strings[file]
            )
        made.string_table.extend(strings.found)
        return made


class _Numbered(dict[T, int], Generic[T]):
    """Things with numbers in the order in which they were first asked for."""

    def __init__(self, *first: T) -> None:
        super().__init__()
        for thing in first:
            self[thing]

    def __missing__(self, thing: T) -> int:
        self[thing] = len(self)
        return self[thing]

    @property
    def found(self) -> list[T]:
        """Return the things in the order of their numbers."""
        return list(self)


def _samples(
    profile: Any, unit: str, keep: Callable[[Labels], bool]
) -> Iterator[tuple[tuple[Frame, ...], dict[str, str], int]]:
    """Yield stack (innermost first), labels and value of the samples to keep; nothing where no value has this unit."""
    strings = list(profile.string_table)
    wanted = next((at for at, each in enumerate(profile.sample_type) if strings[each.unit] == unit), None)
    if wanted is None:
        return
    functions = {each.id: (strings[each.name], strings[each.filename]) for each in profile.function}
    frames = {
        each.id: tuple((*functions[line.function_id], line.line) for line in each.line) for each in profile.location
    }
    for sample in profile.sample:
        labels = {strings[each.key]: strings[each.str] for each in sample.label if each.str}
        if keep(labels):
            stack = tuple(frame for identity in sample.location_id for frame in frames[identity])
            yield stack, labels, sample.value[wanted]

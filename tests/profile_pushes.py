"""Pushes of profiles as pyroscope-io makes them, and what reads the files back that are made of them."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvtrace import cli, profiler
from kvtrace.profiles import pprof
from kvtrace.profiles.messages import Profile, PushRequest
from tests.sample_store import START_NS

SECOND_NS = 1_000_000_000
HOSTILE = 'p"0{}\n<b>'


def push(
    samples: Iterable[tuple[tuple[str, ...], Mapping[str, str], int]], begin_ns: int = START_NS, **labels: str
) -> bytes:
    """Return a push as pyroscope-io makes it: stacks (innermost first), labels, ns; one second from `begin_ns` on."""
    profile = Profile(time_nanos=begin_ns, duration_nanos=SECOND_NS, period=10_000_000)
    strings = [""]

    def at(text: str) -> int:
        if text not in strings:
            strings.append(text)
        return strings.index(text)

    profile.sample_type.add(type=at("cpu"), unit=at("nanoseconds"))
    ids: dict[str, int] = {}
    for stack, own, value_ns in samples:
        for name in stack:
            ids.setdefault(name, len(ids) + 1)
        made = profile.sample.add(location_id=[ids[name] for name in stack], value=[value_ns])
        for name, value in own.items():
            made.label.add(key=at(name), str=at(value))
    for name, identity in ids.items():
        profile.function.add(id=identity, name=at(name), filename=at("x.py"))
        profile.location.add(id=identity).line.add(function_id=identity, line=identity)
    profile.string_table.extend(strings)
    pushed = PushRequest()
    series = pushed.series.add()
    for name, value in {"__name__": "process_cpu", "service_name": "kvtrace", **labels}.items():
        series.labels.add(name=name, value=value)
    series.samples.add(rawProfile=profile.SerializeToString())
    return gzip.compress(pushed.SerializeToString())


def stage(name: str) -> dict[str, str]:
    """Return the label of a thread in that stage."""
    return {profiler.STAGE_LABEL: name}


def totals(data: bytes) -> Counter[tuple[str, str, str]]:
    """Return the ns of a profile's samples by role, stage and innermost function."""
    profile = pprof.parse(data)
    strings = profile.string_table
    functions = {each.id: strings[each.name] for each in profile.function}
    frames = {each.id: functions[each.line[0].function_id] for each in profile.location}
    found: Counter[tuple[str, str, str]] = Counter()
    for sample in profile.sample:
        labels = {strings[each.key]: strings[each.str] for each in sample.label}
        found[labels.get("role", ""), labels.get(profiler.STAGE_LABEL, ""), frames[sample.location_id[0]]] += (
            sample.value[0]
        )
    return found


def exported(run: Path, *arguments: str) -> Counter[tuple[str, str, str]]:
    """Return the totals of a run's profiles as `kvtrace export` merges them."""
    target = run.with_name("merged.pb.gz")
    assert cli.main(["export", str(run), "--format", "pprof", "-o", str(target), "--force", *arguments]) == 0
    return totals(target.read_bytes())
